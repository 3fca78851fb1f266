#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cachestore/store.h"
#include "tests/cachestore/message.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace kvtier::cachestore::testing {

using kvtier::testing::Random;

// Feeds one sequence by random streams: layers and heads cut into shards of a stream each, every
// stream in a source order of its own; messages of one token up to all, of any of the shard's
// layers in any order, with tokens resent, which are NaN where all must be skipped, and in half of
// the feeds with some of what becomes final as codes; streams that leave, come back and take over.
// Keeps its own book of what was received and compares each ack.
class RandomStreams {
 public:
  RandomStreams(Store& store, const SequenceKey& key, const Model& model,
                const kvtier::testing::KvData& data, Random& random)
      : store_(store), key_(key), model_(model), data_(data), random_(random) {
    codes_ = random.OneIn(2);
    for (const LayerModel& layer : model.layers)
      received_.emplace_back(static_cast<std::size_t>(layer.spec.kv_heads), 0);
    CutLayers();
  }

  // Sends until every layer and head has `tokens`.
  void FeedTo(std::int64_t tokens) {
    const std::int64_t typical = random_.Pick<std::int64_t>({1, 7, 40, 150, 600});
    while (Committed() < tokens) {
      Stream& stream = streams_[Index(static_cast<std::int64_t>(streams_.size()))];
      // Longest behind goes first now and then, so that a feed ends.
      if (Least(stream.shard) >= tokens && !random_.OneIn(20)) continue;
      ASSERT_NO_FATAL_FAILURE(Send(stream, tokens, random_.Between(1, typical)));
    }
  }

  std::int64_t received(int layer, int head) const {
    return received_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)];
  }
  std::int64_t Committed() const {
    std::int64_t least = received_[0][0];
    for (const auto& heads : received_)
      least = std::min(least, *std::min_element(heads.begin(), heads.end()));
    return least;
  }
  void CloseAll() {
    for (Stream& stream : streams_) stream.writer.reset();
  }

 private:
  struct Stream {
    Shard shard;
    SourceOrder order;
    std::uint64_t epoch = 0;
    std::unique_ptr<Writer> writer;
    int ended = 0;  // calls of on_end for writers of this shard
  };

  std::size_t Index(std::int64_t size) {
    return static_cast<std::size_t>(random_.Between(0, size - 1));
  }

  void CutLayers() {
    const int layers = static_cast<int>(model_.layers.size());
    for (int first = 0, end = 0; first < layers; first = end) {
      const int heads = model_.layers[static_cast<std::size_t>(first)].spec.kv_heads;
      for (end = first + 1; end < layers && !random_.OneIn(3); ++end) {
        if (model_.layers[static_cast<std::size_t>(end)].spec.kv_heads != heads) break;
      }
      for (int head = 0, end_head = 0; head < heads; head = end_head) {
        end_head = static_cast<int>(random_.Between(head + 1, heads));
        streams_.push_back({.shard = {first, end - first, head, end_head - head},
                            .order = {.heads_first = random_.OneIn(2), .fused = random_.OneIn(3)},
                            .writer = nullptr});
      }
    }
  }

  std::int64_t Least(const Shard& shard) const { return LeastOf(AllLayers(shard), shard); }
  std::int64_t LeastOf(const std::vector<int>& layers, const Shard& shard) const {
    std::int64_t least = received(layers[0], shard.first_head);
    for (const int layer : layers) {
      for (int head = shard.first_head; head < shard.end_head(); ++head)
        least = std::min(least, received(layer, head));
    }
    return least;
  }

  static std::vector<int> AllLayers(const Shard& shard) {
    std::vector<int> layers;
    for (int layer = shard.first_layer; layer < shard.end_layer(); ++layer) layers.push_back(layer);
    return layers;
  }
  std::vector<int> SomeLayers(const Shard& shard) {
    std::vector<int> layers = AllLayers(shard);
    if (random_.OneIn(2)) return layers;
    std::shuffle(layers.begin(), layers.end(), random_.engine());
    layers.resize(static_cast<std::size_t>(random_.Between(1, shard.num_layers)));
    return layers;
  }

  void OpenWriter(Stream& stream) {
    WriterRequest request;
    request.key = key_;
    request.model_id = model_.id;
    request.shard = stream.shard;
    request.epoch = stream.epoch;
    request.on_end = [&stream](const absl::Status&) { ++stream.ended; };
    auto writer = store_.OpenWriter(std::move(request));
    ASSERT_THAT(writer, kvtier::testing::IsOk());
    stream.writer = std::move(*writer);
    EXPECT_EQ(stream.writer->standing().received_tokens, Least(stream.shard));
    EXPECT_EQ(stream.writer->standing().committed_tokens, Committed());
  }

  // Another stream of a higher epoch takes over and the old one has nothing more to say.
  void TakeOver(Stream& stream) {
    const std::unique_ptr<Writer> old = std::move(stream.writer);
    const int ended = stream.ended;
    ++stream.epoch;
    ASSERT_NO_FATAL_FAILURE(OpenWriter(stream));
    EXPECT_EQ(stream.ended, ended + 1);
    Message message(data_, stream.shard, {}, {stream.shard.first_layer}, {0, 1});
    EXPECT_THAT(old->Append(message.chunk()),
                kvtier::testing::Refuses(Reason::kOldEpoch, ::testing::_));
  }

  void Send(Stream& stream, std::int64_t target, std::int64_t tokens) {
    if (random_.OneIn(10)) stream.writer.reset();
    if (stream.writer == nullptr) {
      ASSERT_NO_FATAL_FAILURE(OpenWriter(stream));
    } else if (random_.OneIn(25)) {
      ASSERT_NO_FATAL_FAILURE(TakeOver(stream));
    }
    const std::vector<int> layers = SomeLayers(stream.shard);
    const std::int64_t least = LeastOf(layers, stream.shard);
    const std::int64_t first = random_.OneIn(4) ? random_.Between(0, least) : least;
    const TokenSpan span{first, std::min(tokens, target - first)};
    if (span.count == 0) return;
    Message message(data_, stream.shard, stream.order, layers, span);
    const std::int64_t skipped = Take(stream.shard, layers, span, message);
    if (codes_ && !stream.order.fused) StoreSome(layers, span, message);
    const auto ack = stream.writer->Append(message.chunk());
    ASSERT_THAT(ack, kvtier::testing::IsOk());
    EXPECT_EQ(ack->skipped_tokens, skipped);
    EXPECT_EQ(ack->received_tokens, Least(stream.shard));
    EXPECT_EQ(ack->committed_tokens, Committed());
  }

  // Lets some of the pages that become final come as codes.
  void StoreSome(const std::vector<int>& layers, TokenSpan span, Message& message) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const LayerModel& layer = model_.layers[static_cast<std::size_t>(layers[i])];
      for (const Side side : {Side::kK, Side::kV}) {
        const TensorModel& tensor = side == Side::kK ? layer.k : layer.v;
        if (tensor.dim() == 0 || random_.OneIn(4)) continue;
        const std::int64_t page = tensor.layout.page_tokens;
        std::int64_t first = (span.first + page - 1) / page;
        std::int64_t end = tensor.residual.CodeTokens(span.end()) / page;
        if (first < end && random_.OneIn(4)) first = random_.Between(first, end - 1);
        if (first < end && random_.OneIn(4)) end = random_.Between(first + 1, end);
        if (first < end) message.Store(i, side, tensor, data_, first, end);
      }
    }
  }

  // Books a message, poisons what it resends, and tells how many of its tokens all had already.
  std::int64_t Take(const Shard& shard, const std::vector<int>& layers, TokenSpan span,
                    Message& message) {
    std::int64_t skipped = span.count;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      for (int h = 0; h < shard.num_heads; ++h) {
        std::int64_t& received = received_[static_cast<std::size_t>(layers[i])]
                                          [static_cast<std::size_t>(shard.first_head + h)];
        const std::int64_t resent = std::min(span.count, received - span.first);
        message.Poison(i, h, resent);
        skipped = std::min(skipped, resent);
        received = std::max(received, span.end());
      }
    }
    return skipped;
  }

  Store& store_;
  const SequenceKey key_;
  const Model& model_;
  const kvtier::testing::KvData& data_;
  Random& random_;
  bool codes_ = false;
  std::vector<std::vector<std::int64_t>> received_;  // by layer, by head
  std::vector<Stream> streams_;
};

}  // namespace kvtier::cachestore::testing
