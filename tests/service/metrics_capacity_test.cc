#include <gtest/gtest.h>

#include <memory>

#include "cachestore/capacity.h"
#include "cachestore/model/plan.h"
#include "tests/support/status_matchers.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;

constexpr std::int64_t kMaxTokens = 1000;
constexpr std::int64_t kFree = 10 << 20;

// Two layers, bf16: 2 * 2 * 2 heads * (32 + 32) bytes a token.
std::shared_ptr<const Model> MakeModel(const std::string& kv_cache_dtype) {
  ModelRequest request;
  request.spec.name = "m";
  request.spec.layers.assign(2, {.kv_heads = 2, .k_head_dim = 32, .v_head_dim = 32});
  request.policy.kv_cache_dtype = kv_cache_dtype;
  request.max_tokens = kMaxTokens;
  auto model = ResolveModel(request, 128);
  EXPECT_THAT(model, IsOk());
  return *model;
}

ModelTotals Totals(std::int64_t sequences, std::int64_t tokens) {
  ModelTotals totals;
  totals.sealed_sequences = sequences;
  totals.sequence_tokens = tokens;
  totals.tokens_held = tokens;
  return totals;
}

TEST(Capacity, OfNothingHeldIsThePlan) {
  const auto model = MakeModel("kivi2");
  const ModelCapacity capacity = CapacityOf(*model, ModelTotals{}, kFree);
  EXPECT_EQ(capacity.source_bytes, 0);
  EXPECT_EQ(capacity.stored_bytes, 0);
  EXPECT_EQ(capacity.compression_ratio, 0.0);
  EXPECT_EQ(capacity.mean_tokens, kMaxTokens);
  EXPECT_EQ(capacity.more_tokens, TokensThatFit(*model, kFree));
  EXPECT_EQ(capacity.more_sequences, SequencesThatFit(*model, kMaxTokens, kFree));
  EXPECT_GT(capacity.more_sequences, 1);

  const std::int64_t planned = PlanSealed(*model, kMaxTokens).allocated;
  EXPECT_DOUBLE_EQ(capacity.bytes_per_token, static_cast<double>(planned) / kMaxTokens);
  EXPECT_DOUBLE_EQ(capacity.planned_compression_ratio, 512.0 / capacity.bytes_per_token);
  EXPECT_GT(capacity.planned_compression_ratio, 3.0);
}

TEST(Capacity, RatioIsSourceOverStored) {
  const auto model = MakeModel("auto");
  ModelTotals totals = Totals(2, 300);
  totals.held.allocated = 2 * 512 * 300;
  const ModelCapacity capacity = CapacityOf(*model, totals, kFree);
  EXPECT_EQ(capacity.source_bytes, 512 * 300);
  EXPECT_EQ(capacity.stored_bytes, totals.held.allocated);
  EXPECT_DOUBLE_EQ(capacity.compression_ratio, 0.5);
}

TEST(Capacity, MeanIsOfTheSequencesHeld) {
  const auto model = MakeModel("kivi4");
  const ModelCapacity capacity = CapacityOf(*model, Totals(3, 601), kFree);
  EXPECT_EQ(capacity.mean_tokens, 200);
  EXPECT_EQ(capacity.more_sequences, SequencesThatFit(*model, 200, kFree));
  EXPECT_EQ(capacity.more_tokens_as_mean_sequences(), 200 * capacity.more_sequences);

  // Open sequences count, those that have no token yet as well; a mean is a token at least.
  ModelTotals open;
  open.open_sequences = 5;
  EXPECT_EQ(CapacityOf(*model, open, kFree).mean_tokens, kMaxTokens);
  open.sequence_tokens = 3;
  EXPECT_EQ(CapacityOf(*model, open, kFree).mean_tokens, 1);
  open.sequence_tokens = 50;
  open.sealed_sequences = 5;
  EXPECT_EQ(CapacityOf(*model, open, kFree).mean_tokens, 5);
}

TEST(Capacity, OfAFullBudgetIsNothing) {
  const auto model = MakeModel("fp8");
  const ModelCapacity capacity = CapacityOf(*model, Totals(1, 100), 0);
  EXPECT_EQ(capacity.more_tokens, 0);
  EXPECT_EQ(capacity.more_sequences, 0);
}

}  // namespace
}  // namespace kvtier::cachestore
