// The largest magnitudes that a model's appends have had, by layer and KV head.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using ::testing::_;
using ::testing::IsEmpty;
using testing::KvData;
using testing::Message;
using testing::TestStore;

class Observed : public ::testing::Test {
 protected:
  std::shared_ptr<ModelEntry> Register(const ModelSpec& spec, const std::string& format) {
    data_ = kvtier::testing::MakeKvData(spec, 200, random_, 100.0f);
    return store_.Register(testing::RequestOf(spec, format, 64));
  }

  absl::Status Append(const ModelEntry& model, const std::string& id, std::int64_t first,
                      std::int64_t count, Shard shard = {}, bool saturate = false) {
    const auto writer = store_.OpenWriter(id, model.model(), shard);
    std::vector<int> layers;
    for (int i = 0; i < writer->shard().num_layers; ++i)
      layers.push_back(writer->shard().first_layer + i);
    Message message(data_, writer->shard(), {}, layers, {first, count});
    message.chunk().saturate_non_finite = saturate;
    return writer->Append(message.chunk()).status();
  }

  float Largest(const kvtier::testing::KvTensor& tensor, int head, std::int64_t begin,
                std::int64_t end) const {
    float largest = 0;
    for (std::int64_t token = begin; token < end; ++token) {
      for (int channel = 0; channel < tensor.dim; ++channel)
        largest = std::max(largest, std::fabs(tensor.Get(head, token, channel)));
    }
    return largest;
  }

  void ExpectObserved(const ModelEntry& model, std::int64_t begin, std::int64_t end) {
    const auto observed = model.observed();
    ASSERT_EQ(observed.size(), data_.layers.size());
    for (std::size_t layer = 0; layer < observed.size(); ++layer) {
      const KvData::Layer& values = data_.layers[layer];
      ASSERT_EQ(static_cast<int>(observed[layer].size()), values.k.heads);
      for (int head = 0; head < values.k.heads; ++head) {
        const HeadMagnitudes& seen = observed[layer][static_cast<std::size_t>(head)];
        EXPECT_EQ(seen.k, Largest(values.k, head, begin, end)) << layer << " " << head;
        EXPECT_EQ(seen.v, Largest(values.v, head, begin, end)) << layer << " " << head;
        EXPECT_EQ(seen.tokens, end - begin);
      }
    }
  }

  SeededRandom random_;
  TestStore store_{2 << 20};
  KvData data_;
};

const ModelSpec& ThreeByTwo() {
  static const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 3, .dim = 32});
  return spec;
}

TEST_F(Observed, IsTheLargestByLayerAndHeadInEveryFormat) {
  for (const char* format : {"auto", "fp8", "kivi2", "int8_per_token_head", "q8_0"}) {
    const auto model = Register(ThreeByTwo(), format);
    EXPECT_THAT(model->observed(), IsEmpty());
    ASSERT_THAT(Append(*model, format, 0, 130), IsOk());
    ASSERT_NO_FATAL_FAILURE(ExpectObserved(*model, 0, 130));
    ASSERT_THAT(store_->Remove({"default", format}), IsOk());
  }
}

TEST_F(Observed, OutlivesItsSequencesAndSkipsWhatWasReceived) {
  const auto model = Register(ThreeByTwo(), "fp8");
  ASSERT_THAT(Append(*model, "s", 0, 50), IsOk());
  // Resent tokens are not even looked at.
  for (KvData::Layer& layer : data_.layers) layer.k.Set(1, 20, 3, 3000);
  ASSERT_THAT(Append(*model, "s", 0, 80), IsOk());
  for (KvData::Layer& layer : data_.layers) layer.k.Set(1, 20, 3, 0);
  ASSERT_NO_FATAL_FAILURE(ExpectObserved(*model, 0, 80));
  ASSERT_THAT(store_->Remove({"default", "s"}), IsOk());
  ASSERT_NO_FATAL_FAILURE(ExpectObserved(*model, 0, 80));
  data_.layers[1].v.Set(2, 0, 0, -5000);
  ASSERT_THAT(Append(*model, "other", 0, 1), IsOk());
  EXPECT_EQ(model->observed()[1][2].v, data_.layers[1].v.Get(2, 0, 0) * -1);
  EXPECT_EQ(model->observed()[1][2].tokens, 81);
}

TEST_F(Observed, ShardsObserveTheirHeadsOnly) {
  const auto model = Register(ThreeByTwo(), "fp8");
  ASSERT_THAT(Append(*model, "s", 0, 40, {.first_layer = 1, .num_layers = 1, .first_head = 2}),
              IsOk());
  const auto observed = model->observed();
  EXPECT_EQ(observed[1][2].k, Largest(data_.layers[1].k, 2, 0, 40));
  EXPECT_EQ(observed[1][2].tokens, 40);
  EXPECT_EQ(observed[1][1].k, 0);
  EXPECT_EQ(observed[0][2].tokens, 0);
}

TEST_F(Observed, ARefusedChunkIsNotObserved) {
  const auto model = Register(ThreeByTwo(), "fp8");
  data_.layers[1].v.Set(2, 10, 0, std::numeric_limits<float>::infinity());
  EXPECT_THAT(Append(*model, "s", 0, 40), Refuses(Reason::kNonFiniteValue, _));
  EXPECT_THAT(model->observed(), IsEmpty());
}

TEST_F(Observed, WhatIsNotFiniteIsPassedOver) {
  const auto model = Register(ThreeByTwo(), "fp8");
  ASSERT_THAT(Append(*model, "finite", 0, 40, {}, true), IsOk());
  const auto before = model->observed();
  data_.layers[1].v.Set(2, 10, 0, std::numeric_limits<float>::infinity());
  data_.layers[1].k.Set(2, 11, 5, std::nanf(""));
  data_.layers[1].k.Set(2, 39, 5, 2000);
  ASSERT_THAT(Append(*model, "s", 0, 40, {}, true), IsOk());
  EXPECT_EQ(model->observed()[1][2].k, 2000);
  EXPECT_LE(model->observed()[1][2].v, before[1][2].v);
  EXPECT_EQ(model->observed()[0][1].k, before[0][1].k);
}

TEST_F(Observed, ManyWritersTogetherLoseNothing) {
  const auto model = Register(ThreeByTwo(), "fp8");
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&, i] {
      for (int round = 0; round < 10; ++round) {
        const std::string id = std::to_string(i) + "-" + std::to_string(round);
        EXPECT_THAT(Append(*model, id, 0, 1 + i), IsOk());
        EXPECT_THAT(store_->Remove({"default", id}), IsOk());
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(model->observed()[1][2].k, Largest(data_.layers[1].k, 2, 0, 4));
  EXPECT_EQ(model->observed()[1][2].tokens, 10 * (1 + 2 + 3 + 4));
}

}  // namespace
}  // namespace kvtier::cachestore
