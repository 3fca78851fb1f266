#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "cachestore/device/device.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

enum class TokenLayout { kNhd, kHnd };

// What a reader wants its bytes to be.
struct ReadFormat {
  std::optional<ElementType> as;  // unset: the source dtype
  TokenLayout layout = TokenLayout::kNhd;
  int block_tokens = 0;          // 0: what one Fill gives is one block
  std::optional<float> k_scale;  // FP8 output; unset: the stored scale where the layer is stored in
                                 // that type, else 1.0
  std::optional<float> v_scale;
  bool per_tensor_scales_only = false;
};

// What comes out for one layer.
struct LayerOutput {
  int layer = 0;
  int heads = 0;
  int k_dim = 0;
  int v_dim = 0;
  ElementType element = ElementType::kBf16;
  std::vector<float> k_scales;  // FP8 output only: one, or one a head
  std::vector<float> v_scales;
  std::vector<float> q_scales;  // as registered
  std::int64_t k_code_tokens = 0;
  std::int64_t v_code_tokens = 0;

  std::int64_t k_bytes_per_token() const { return heads * kernels::RowBytes(element, k_dim); }
  std::int64_t v_bytes_per_token() const { return heads * kernels::RowBytes(element, v_dim); }
};

// Reads one sequence from what it pinned: the bytes stay those of the moment it was made, even if
// the sequence is removed meanwhile. Not thread-safe; one caller at a time.
class SequenceReader {
 public:
  // INVALID_ARGUMENT where the format asked for can't be had. `device` must outlive it.
  static absl::StatusOr<SequenceReader> Make(SequencePins pins, const ReadFormat& format,
                                             Device& device);

  const SequencePins& pins() const { return pins_; }
  const std::vector<LayerOutput>& layers() const { return layers_; }
  std::int64_t total_bytes() const;
  std::int64_t pinned_parts() const;

  // Tokens of a chunk of at most `bytes` of K and V together: whole blocks, whole pages where that
  // is enough for one.
  std::int64_t ChunkTokens(std::size_t layer, std::int64_t bytes) const;

  // Writes K and V of `tokens` tokens from `first_token` of layers()[layer]. Output is laid out as
  // ReadFormat says; it takes tokens * {k,v}_bytes_per_token. DATA_LOSS when a page is not what was
  // stored.
  absl::Status Fill(std::size_t layer, std::int64_t first_token, std::int64_t tokens, std::byte* k,
                    std::byte* v);

  std::int64_t saturated_values() const { return static_cast<std::int64_t>(saturated_); }

 private:
  struct Output;  // where one tensor's values go

  SequenceReader(SequencePins pins, const ReadFormat& format, Device& device)
      : pins_(std::move(pins)), format_(format), device_(&device) {}

  void QueueTensor(const TensorPins& tensor, const Output& out, std::vector<DecodeJob>& jobs);
  void QueueRows(const TensorPins& tensor, int head, kernels::DecodeRun run,
                 std::int64_t first_token, std::vector<DecodeJob>& jobs);
  absl::Status Verify(TensorPins& tensor, std::int64_t first_token, std::int64_t tokens) const;

  SequencePins pins_;
  ReadFormat format_;
  Device* device_;
  std::vector<LayerOutput> layers_;
  std::uint64_t saturated_ = 0;
};

}  // namespace kvtier::cachestore
