#include "cachestore/model/residual_rule.h"

#include <gtest/gtest.h>

#include <deque>

#include "cachestore/model/format.h"

namespace kvtier::cachestore {
namespace {

// KIVI's cache as published, token by token: K's residual becomes codes when it has R tokens; V's
// oldest residual token becomes codes when there are more than R.
struct TokenByToken {
  int residual_length;
  std::int64_t k_codes = 0, v_codes = 0;
  std::deque<std::int64_t> k_residual, v_residual;

  void Append(std::int64_t token) {
    k_residual.push_back(token);
    if (static_cast<int>(k_residual.size()) == residual_length) {
      k_codes += residual_length;
      k_residual.clear();
    }
    v_residual.push_back(token);
    if (static_cast<int>(v_residual.size()) > residual_length) {
      v_residual.pop_front();
      ++v_codes;
    }
  }
};

TEST(ResidualRule, CountsAsKiviDoesTokenByToken) {
  for (const int r : {4, 32, 48, 128}) {
    const Format format{
        .kind = Format::Kind::kKivi, .k_bits = 2, .v_bits = 2, .group = 4, .residual_tokens = r};
    const ResidualRule k = KFormat(format, ElementType::kFp16, 128).residual;
    const ResidualRule v = VFormat(format, ElementType::kFp16, 128).residual;
    TokenByToken published{.residual_length = r};
    for (std::int64_t token = 0; token < 3 * r + 5; ++token) {
      ASSERT_EQ(k.CodeTokens(token), published.k_codes) << "R " << r << ", " << token << " tokens";
      ASSERT_EQ(v.CodeTokens(token), published.v_codes) << "R " << r << ", " << token << " tokens";
      ASSERT_EQ(k.ResidualTokens(token), static_cast<std::int64_t>(published.k_residual.size()));
      ASSERT_EQ(v.ResidualTokens(token), static_cast<std::int64_t>(published.v_residual.size()));
      ASSERT_LE(k.ResidualTokens(token), k.capacity());
      ASSERT_LE(v.ResidualTokens(token), v.capacity());
      published.Append(token);
    }
  }
}

TEST(ResidualRule, WithoutAResidualKWaitsForItsGroupOnly) {
  const Format format{
      .kind = Format::Kind::kKivi, .k_bits = 2, .v_bits = 2, .group = 32, .residual_tokens = 0};
  const ResidualRule k = KFormat(format, ElementType::kFp16, 128).residual;
  const ResidualRule v = VFormat(format, ElementType::kFp16, 128).residual;
  EXPECT_EQ(k.CodeTokens(31), 0);
  EXPECT_EQ(k.CodeTokens(32), 32);
  EXPECT_EQ(k.CodeTokens(95), 64);
  EXPECT_EQ(k.capacity(), 32);
  EXPECT_EQ(v.CodeTokens(31), 31);
  EXPECT_EQ(v.capacity(), 0);
}

TEST(ResidualRule, OtherFormatsKeepNone) {
  const ResidualRule rule = KFormat({}, ElementType::kBf16, 128).residual;
  EXPECT_EQ(rule.CodeTokens(0), 0);
  EXPECT_EQ(rule.CodeTokens(1), 1);
  EXPECT_EQ(rule.ResidualTokens(12345), 0);
  EXPECT_EQ(rule.capacity(), 0);
}

}  // namespace
}  // namespace kvtier::cachestore
