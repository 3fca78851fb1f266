#include "cachestore/capacity.h"

#include <gtest/gtest.h>

#include "tests/cachestore/test_store.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::SeededRandom;
using testing::TestStore;

TEST(Capacity, IsOfWhatIsHeldAndOfWhatStillFits) {
  SeededRandom random;
  TestStore store(1 << 20);
  const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  const auto entry = store.Register(testing::RequestOf(spec, "fp8", 64));
  const Model& model = entry->model();
  ModelCapacity capacity = CapacityOf(model, entry->totals(), store->memory().free);
  EXPECT_EQ(capacity.mean_tokens, 32768) << "max_tokens, while nothing is held";
  EXPECT_EQ(capacity.compression_ratio, 0.0);
  EXPECT_EQ(capacity.more_tokens, TokensThatFit(model, 1 << 20));

  const testing::KvData data = kvtier::testing::MakeKvData(spec, 200, random);
  store.AppendAtOnce("a", model, data, 200);
  store.AppendAtOnce("b", model, data, 101);
  capacity = CapacityOf(model, entry->totals(), store->memory().free);
  EXPECT_EQ(capacity.mean_tokens, 150);
  EXPECT_EQ(capacity.source_bytes, 301 * 2 * 2 * 2 * 32 * 2);
  const std::int64_t part = 64 + 32 + 32 /* to 64 */ + 2 * 64 * 32;
  EXPECT_EQ(capacity.stored_bytes, 4 * part * (4 + 2));
  EXPECT_EQ(capacity.stored_bytes, store->budget() - store->memory().free);
  EXPECT_DOUBLE_EQ(capacity.compression_ratio, static_cast<double>(capacity.source_bytes) /
                                                   static_cast<double>(capacity.stored_bytes));
  EXPECT_EQ(capacity.more_sequences, store->memory().free / (4 * part * 3));
  EXPECT_EQ(capacity.more_tokens_as_mean_sequences(), capacity.more_sequences * 150);
  EXPECT_EQ(capacity.more_tokens, store->memory().free / (4 * part) * 64);
  EXPECT_DOUBLE_EQ(capacity.bytes_per_token, 4.0 * part / 64);
}

}  // namespace
}  // namespace kvtier::cachestore
