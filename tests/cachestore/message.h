#pragma once

#include <cstddef>
#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include "cachestore/chunk.h"
#include "tests/cachestore/stored_part.h"
#include "tests/support/kv_data.h"

namespace kvtier::cachestore::testing {

// [first, first + count) of a sequence.
struct TokenSpan {
  std::int64_t first = 0;
  std::int64_t count = 0;

  std::int64_t end() const { return first + count; }
};

// How a client's values lie: NHD or HND, K and V apart or behind each other in every row.
struct SourceOrder {
  bool heads_first = false;
  bool fused = false;
};

// One append message: densely packed values of a shard, each buffer as long as its values, and the
// chunk that points at them.
class Message {
 public:
  Message(const kvtier::testing::KvData& data, const Shard& shard, SourceOrder order,
          const std::vector<int>& layers, TokenSpan span)
      : shard_(shard), order_(order), span_(span) {
    chunk_.first_token = span.first;
    chunk_.tokens = span.count;
    for (const int layer : layers) AddLayer(layer, data.layers[static_cast<std::size_t>(layer)]);
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  // Makes the first `tokens` tokens of one head NaN, K and V: taken unread they do no harm.
  void Poison(std::size_t layer_index, int head, std::int64_t tokens) {
    const Chunk::Layer& layer = chunk_.layers[layer_index];
    for (std::int64_t token = 0; token < tokens; ++token) {
      const auto& [k_bytes, v_bytes] = row_bytes_[layer_index];
      std::memset(RowAt(layer.k, head, token), 0xff, k_bytes);
      if (v_bytes > 0) std::memset(RowAt(layer.v, head, token), 0xff, v_bytes);
    }
  }

  // Lets pages [first, end) of one K or V come as codes, which the chunk's tokens must make final.
  // Not of fused values. `data` is what the message was made of. The parts, to be spoiled.
  std::vector<std::vector<std::byte>>& Store(std::size_t layer_index, Side side,
                                             const TensorModel& tensor,
                                             const kvtier::testing::KvData& data,
                                             std::int64_t first, std::int64_t end) {
    Chunk::Layer& layer = chunk_.layers[layer_index];
    SourceTensor& source = side == Side::kK ? layer.k : layer.v;
    const auto& values = data.layers[static_cast<std::size_t>(layer.layer)];
    const HeadRange heads{shard_.first_head, shard_.end_head()};
    std::vector<std::vector<std::byte>>& parts = parts_.emplace_back();
    StoredPages stored{.begin = first * tensor.layout.page_tokens - span_.first,
                       .end = end * tensor.layout.page_tokens - span_.first,
                       .heads = heads.count()};
    for (std::int64_t page = first; page < end; ++page) {
      parts.push_back(MakePart(tensor, side, side == Side::kK ? values.k : values.v, heads, page));
      stored.parts.push_back(parts.back().data());
    }
    LeaveOut(stored, tensor, source);
    return parts;
  }

  Chunk& chunk() { return chunk_; }

 private:
  static std::byte* RowAt(const SourceTensor& source, int shard_head, std::int64_t token) {
    return const_cast<std::byte*>(source.RowsOf(shard_head, token).data);  // the message's own
  }

  // Moves the rows together around those that come as codes.
  void LeaveOut(const StoredPages& stored, const TensorModel& tensor, SourceTensor& source) {
    const SourceTensor all = source;
    const std::int64_t rows = span_.count - (stored.end - stored.begin);
    buffers_.emplace_back(
        static_cast<std::size_t>(shard_.num_heads * rows * tensor.source_row_bytes()));
    source.data = buffers_.back().data();
    if (order_.heads_first) source.head_stride = rows * tensor.dim();
    source.stored = stored;
    for (int head = 0; head < shard_.num_heads; ++head) {
      for (std::int64_t token = 0; token < span_.count; ++token) {
        if (token >= stored.begin && token < stored.end) continue;
        std::memcpy(RowAt(source, head, token), RowAt(all, head, token),
                    static_cast<std::size_t>(tensor.source_row_bytes()));
      }
    }
  }

  void AddLayer(int layer, const kvtier::testing::KvData::Layer& values) {
    Chunk::Layer out{.layer = layer, .k = {}, .v = {}};
    const int k_dim = values.k.dim, v_dim = values.v.dim;
    if (order_.fused) {
      std::byte* both = MakeBuffer(values.k.type, k_dim + v_dim);
      out.k = SourceAt(both, values.k.type, k_dim + v_dim);
      out.v = SourceAt(both + k_dim * kernels::ElementBytes(values.k.type), values.v.type,
                       k_dim + v_dim);
    } else {
      out.k = SourceAt(MakeBuffer(values.k.type, k_dim), values.k.type, k_dim);
      if (v_dim > 0) out.v = SourceAt(MakeBuffer(values.v.type, v_dim), values.v.type, v_dim);
    }
    CopyRows(values.k, out.k);
    if (v_dim > 0) CopyRows(values.v, out.v);
    row_bytes_.emplace_back(values.k.row_bytes(), values.v.row_bytes());
    chunk_.layers.push_back(out);
  }

  std::byte* MakeBuffer(kernels::ElementType type, int row) {
    buffers_.emplace_back(
        static_cast<std::size_t>(shard_.num_heads * span_.count * row * ElementBytes(type)));
    return buffers_.back().data();
  }

  SourceTensor SourceAt(const std::byte* data, kernels::ElementType type, int row) const {
    return {.data = data,
            .type = type,
            .head_stride = order_.heads_first ? span_.count * row : row,
            .token_stride = order_.heads_first ? row : std::int64_t{shard_.num_heads} * row};
  }

  void CopyRows(const kvtier::testing::KvTensor& values, const SourceTensor& to) const {
    for (int head = 0; head < shard_.num_heads; ++head) {
      for (std::int64_t token = 0; token < span_.count; ++token) {
        std::memcpy(RowAt(to, head, token),
                    values.Row(shard_.first_head + head, span_.first + token),
                    static_cast<std::size_t>(values.row_bytes()));
      }
    }
  }

  const Shard shard_;
  const SourceOrder order_;
  const TokenSpan span_;
  std::list<std::vector<std::byte>> buffers_;
  std::list<std::vector<std::vector<std::byte>>> parts_;
  std::vector<std::pair<std::size_t, std::size_t>> row_bytes_;  // of K and V, by layer
  Chunk chunk_;
};

}  // namespace kvtier::cachestore::testing
