#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "cachestore/sequence_reader.h"
#include "tests/cachestore/naive_tensor.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore::testing {

using kvtier::testing::Random;

// The whole of a sequence as NaiveTensors. `model` and `data` must outlive it.
class NaiveSequence {
 public:
  using Received = std::function<std::int64_t(int layer, int head)>;

  NaiveSequence(const Model& model, const kvtier::testing::KvData& data, const Received& received,
                std::int64_t origin = 0)
      : model_(model) {
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      std::vector<std::int64_t> by_head;
      for (int head = 0; head < model.layers[i].spec.kv_heads; ++head)
        by_head.push_back(received(static_cast<int>(i), head));
      k_.emplace_back(model.layers[i], Side::kK, data.layers[i].k, by_head, origin);
      v_.emplace_back(model.layers[i], Side::kV, data.layers[i].v, by_head, origin);
    }
  }
  NaiveSequence(const Model& model, const kvtier::testing::KvData& data, std::int64_t received,
                std::int64_t origin = 0)
      : NaiveSequence(
            model, data, [received](int, int) { return received; }, origin) {}

  const NaiveTensor& of(Side side, int layer) const {
    return (side == Side::kK ? k_ : v_)[static_cast<std::size_t>(layer)];
  }

  // The scale that a reader gets without asking for one.
  float StoredScale(Side side, int layer, int head, kernels::ElementType as) const {
    const LayerModel& l = model_.layers[static_cast<std::size_t>(layer)];
    const TensorModel& tensor = side == Side::kK ? l.k : l.v;
    const bool same =
        tensor.layout.codec.id == kernels::CodecId::kFp8 && tensor.layout.codec.element == as;
    return same ? tensor.scales[static_cast<std::size_t>(head)] : 1.0f;
  }

 private:
  const Model& model_;
  std::vector<NaiveTensor> k_;
  std::vector<NaiveTensor> v_;
};

// Reads `reader` to its end in pieces of random size and compares every row.
class ReadCheck {
 public:
  ReadCheck(SequenceReader& reader, const ReadFormat& format, const NaiveSequence& naive)
      : reader_(reader), format_(format), naive_(naive) {}

  void Run(Random& random) {
    const std::int64_t end = reader_.pins().first_token + reader_.pins().tokens;
    for (std::size_t layer = 0; layer < reader_.layers().size(); ++layer) {
      for (std::int64_t first = reader_.pins().first_token; first < end;) {
        const std::int64_t asked = reader_.ChunkTokens(layer, first, random.Between(1, 1 << 18));
        const TokenSpan span{first, std::min(asked, end - first)};
        ASSERT_GT(span.count, 0);
        ASSERT_NO_FATAL_FAILURE(RunPiece(layer, span));
        first = span.end();
      }
    }
  }

 private:
  void RunPiece(std::size_t layer, TokenSpan span) {
    const LayerOutput& out = reader_.layers()[layer];
    std::vector<std::byte> k(static_cast<std::size_t>(span.count * out.k_bytes_per_token()));
    std::vector<std::byte> v(static_cast<std::size_t>(span.count * out.v_bytes_per_token()));
    const absl::Status status = reader_.Fill(layer, span.first, span.count, k.data(), v.data());
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_NO_FATAL_FAILURE(Compare(Side::kK, out, span, k));
    if (out.v_dim > 0) Compare(Side::kV, out, span, v);
  }

  void Compare(Side side, const LayerOutput& out, TokenSpan span,
               const std::vector<std::byte>& got) const {
    const int dim = side == Side::kK ? out.k_dim : out.v_dim;
    const std::int64_t row_bytes = std::int64_t{dim} * kernels::ElementBytes(out.element);
    const auto& asked = side == Side::kK ? format_.k_scale : format_.v_scale;
    for (int h = 0; h < out.heads; ++h) {
      const int head = reader_.pins().shard.first_head + h;
      const float scale = asked.value_or(naive_.StoredScale(side, out.layer, head, out.element));
      const std::vector<std::byte> want =
          naive_.of(side, out.layer).Read(head, span, out.element, scale);
      for (std::int64_t i = 0; i < span.count; ++i) {
        ASSERT_EQ(0, std::memcmp(got.data() + RowIndex(i, h, out.heads, span) * row_bytes,
                                 want.data() + i * row_bytes, static_cast<std::size_t>(row_bytes)))
            << (side == Side::kK ? "k" : "v") << " of layer " << out.layer << ", head " << head
            << ", token " << span.first + i << " as " << kernels::ElementName(out.element);
      }
    }
  }

  // Rows before that of token `i` of the piece and head `h`.
  std::int64_t RowIndex(std::int64_t i, int h, int heads, TokenSpan span) const {
    const std::int64_t block = format_.block_tokens > 0 ? format_.block_tokens : span.count;
    const std::int64_t in_block = i % block;
    const std::int64_t begin = i - in_block;
    const std::int64_t block_tokens = std::min(block, span.count - begin);
    return begin * heads + (format_.layout == TokenLayout::kNhd ? in_block * heads + h
                                                                : h * block_tokens + in_block);
  }

  SequenceReader& reader_;
  const ReadFormat& format_;
  const NaiveSequence& naive_;
};

}  // namespace kvtier::cachestore::testing
