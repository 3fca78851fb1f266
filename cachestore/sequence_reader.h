#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "cachestore/device/device.h"
#include "cachestore/lease.h"
#include "cachestore/model/read_format.h"
#include "cachestore/sequence.h"
#include "cachestore/stored_read.h"

namespace kvtier::cachestore {

// What comes out for one layer.
struct LayerOutput {
  int layer = 0;
  // Which of its tokens: to the range's end; from its first token on, or from where the layer's
  // window begins.
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  int heads = 0;
  int k_dim = 0;
  int v_dim = 0;
  ElementType element = ElementType::kBf16;
  // One, or one a head: of FP8 output; of a read as stored, those known beforehand.
  std::vector<float> k_scales;
  std::vector<float> v_scales;
  std::vector<float> q_scales;  // as registered
  std::int64_t k_code_tokens = 0;
  std::int64_t v_code_tokens = 0;

  std::int64_t k_bytes_per_token() const { return heads * kernels::RowBytes(element, k_dim); }
  std::int64_t v_bytes_per_token() const { return heads * kernels::RowBytes(element, v_dim); }
};

// Where values of one K or V go: blocks of the layout asked for, one behind the other, the last as
// short as its tokens; or, where `ids` are given, block i at data + ids[i] * stride.
struct BlockTarget {
  std::byte* data = nullptr;
  std::int64_t first_token = 0;  // of block 0
  std::int64_t tokens = 0;       // of all blocks
  std::int64_t block_tokens = 0;
  std::span<const std::uint32_t> ids = {};
  std::int64_t stride = 0;  // bytes
};

// Reads one sequence from what it pinned: the bytes stay those of the moment it was made, even if
// the sequence is removed meanwhile. Once its lease has ended every call is ABORTED, and what it
// wrote must not be used. Not thread-safe; one caller at a time.
class SequenceReader {
 public:
  // INVALID_ARGUMENT where the format asked for can't be had. `device` must outlive it.
  static absl::StatusOr<SequenceReader> Make(std::shared_ptr<const Lease> lease, SequencePins pins,
                                             const ReadFormat& format, Device& device);

  // The same of what it pins now, of `range` with its shard resolved. ABORTED where the lease has
  // ended; errors as Sequence::Pin.
  static absl::StatusOr<SequenceReader> Open(std::shared_ptr<const Lease> lease,
                                             const ReadRange& asked, const ReadFormat& format,
                                             Device& device);

  const SequencePins& pins() const { return pins_; }
  const std::vector<LayerOutput>& layers() const { return layers_; }
  std::int64_t total_bytes() const;
  std::int64_t pinned_parts() const;

  // Measures scales, where they are to be measured, a page of one K or V a call: all that is read
  // is decoded once more for that. False where nothing is left; the scales in layers() are final
  // then.
  absl::StatusOr<bool> MeasureScales();

  // Tokens of a chunk that begins at `first_token`, of at most `bytes` of K and V together: whole
  // blocks, whole pages where that is enough for one. As stored: whole pages of codes, one at
  // least.
  std::int64_t ChunkTokens(std::size_t layer, std::int64_t first_token, std::int64_t bytes) const;

  // Of K and V of these tokens, as they are asked for.
  std::int64_t ChunkBytes(std::size_t layer, std::int64_t first_token, std::int64_t tokens) const {
    const LayerOutput& out = layers_[layer];
    return stored() ? StoredBytes(layer, first_token, tokens)
                    : tokens * (out.k_bytes_per_token() + out.v_bytes_per_token());
  }

  // Writes K and V of `tokens` tokens from `first_token` of layers()[layer] to where they belong in
  // the targets, all of whose blocks that hold any of these must be there. DATA_LOSS when a page is
  // not what was stored.
  absl::Status Fill(std::size_t layer, std::int64_t first_token, std::int64_t tokens,
                    const BlockTarget& k, const BlockTarget& v);
  // The same to memory for these tokens alone, in blocks as ReadFormat says: each takes tokens *
  // {k,v}_bytes_per_token.
  absl::Status Fill(std::size_t layer, std::int64_t first_token, std::int64_t tokens, std::byte* k,
                    std::byte* v);

  // What a read as stored has for some tokens of layers()[layer], and its bytes. Parts and rows are
  // then filled one by one; ReadFormat says the rows' layout. DATA_LOSS as Fill.
  bool stored() const { return format_.stored; }
  const TensorPins& pinned(std::size_t layer, Side side) const {
    return side == Side::kK ? pins_.layers[layer].k : pins_.layers[layer].v;
  }
  HeadRange heads(std::size_t layer) const;
  StoredSpan Span(std::size_t layer, Side side, std::int64_t first_token,
                  std::int64_t tokens) const;
  absl::Status FillPart(std::size_t layer, Side side, std::int64_t page, std::byte* out);
  absl::Status FillRows(std::size_t layer, Side side, const StoredSpan& span, std::byte* out);

  std::int64_t saturated_values() const { return static_cast<std::int64_t>(saturated_); }

 private:
  struct Output;  // where one tensor's values go

  SequenceReader(std::shared_ptr<const Lease> lease, SequencePins pins, const ReadFormat& format,
                 Device& device)
      : lease_(std::move(lease)), pins_(std::move(pins)), format_(format), device_(&device) {}

  // The one way to bytes: runs `copy` under the lease.
  template <class F>
  absl::Status Guarded(F copy) const;

  absl::Status CheckRotation(const TensorModel& k, int layer) const;
  absl::Status SetScales(const LayerModel& model, LayerOutput& out) const;
  absl::StatusOr<bool> MeasurePage(const std::optional<float>& asked, std::vector<float>& scales);
  absl::Status CheckSize(const LayerOutput& out) const;
  absl::Status CheckBounds() const;
  std::int64_t StoredBytes(std::size_t layer, std::int64_t first_token, std::int64_t tokens) const;
  std::int64_t StoredChunkTokens(std::size_t layer, std::int64_t first_token,
                                 std::int64_t bytes) const;
  TensorPins& MutablePinned(std::size_t layer, Side side) {
    return side == Side::kK ? pins_.layers[layer].k : pins_.layers[layer].v;
  }
  void QueueTensor(const TensorPins& tensor, const Output& out, std::vector<DecodeJob>& jobs);
  void QueueRows(const TensorPins& tensor, int head, kernels::DecodeRun run,
                 std::int64_t first_token, std::vector<DecodeJob>& jobs);
  absl::Status Verify(TensorPins& tensor, std::int64_t first_token, std::int64_t tokens) const;

  std::shared_ptr<const Lease> lease_;
  SequencePins pins_;
  ReadFormat format_;
  Device* device_;
  std::vector<LayerOutput> layers_;
  std::uint64_t saturated_ = 0;
  // How far the measuring of scales has come.
  struct Measuring {
    std::size_t layer = 0;
    Side side = Side::kK;
    std::int64_t tokens = 0;
    std::vector<float> largest;  // by head
  };
  Measuring measuring_;
};

}  // namespace kvtier::cachestore
