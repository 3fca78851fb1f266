// The largest magnitudes of heads, however they lie, are those of their values one by one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/host_codec.h"
#include "tests/support/seed.h"

namespace kvtier::kernels {
namespace {

TEST(LargestMagnitudes, OfEachHeadInEitherLayout) {
  testing::SeededRandom random;
  for (int round = 0; round < 200; ++round) {
    const int heads = static_cast<int>(random.Between(1, 9));
    const int dim = static_cast<int>(random.Between(1, 140));
    const std::int64_t tokens = random.Between(0, 20);
    const bool nhd = random.OneIn(2);
    const std::int64_t head_stride = nhd ? dim : tokens * dim;
    const std::int64_t token_stride = nhd ? std::int64_t{heads} * dim : dim;
    std::vector<float> values(static_cast<std::size_t>(heads * tokens * dim));
    for (float& value : values) value = static_cast<float>(random.Between(-1000, 1000)) / 16;
    if (!values.empty() && random.OneIn(4))
      values[static_cast<std::size_t>(random.Between(0, std::ssize(values) - 1))] =
          std::numeric_limits<float>::quiet_NaN();
    const ConstRows rows{reinterpret_cast<const std::byte*>(values.data()), ElementType::kFp32,
                         token_stride};
    std::vector<float> largest(static_cast<std::size_t>(heads), -1);
    LargestMagnitudes(rows, dim, tokens, head_stride, largest);
    for (int head = 0; head < heads; ++head) {
      float expected = 0;
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int channel = 0; channel < dim; ++channel) {
          const float value = std::fabs(values[static_cast<std::size_t>(
              head * head_stride + token * token_stride + channel)]);
          expected = std::isnan(value) || std::isnan(expected)
                         ? std::numeric_limits<float>::quiet_NaN()
                         : std::max(expected, value);
        }
      }
      const float got = largest[static_cast<std::size_t>(head)];
      EXPECT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
          << got << ", not " << expected << "; head " << head << " of " << heads;
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
