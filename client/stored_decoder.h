#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cachestore/model/part_header.h"
#include "cachestore/model/read_format.h"
#include "kernels/codec_run.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// Turns a read as stored into the read of values that was wanted: bit for bit what the server would
// have sent, decoded here from the codes that travelled. Checks the parts' headers and checksums on
// the way. Not thread-safe.
class StoredDecoder {
 public:
  // INVALID_ARGUMENT for what can't be had so: block_tokens, and scales that are none.
  static absl::StatusOr<StoredDecoder> Make(const v1::ReadRequest& wanted);

  // What to ask for instead.
  const v1::ReadRequest& request() const { return request_; }

  // The manifest as it would have been. Call once, first.
  absl::StatusOr<v1::ReadManifest> Begin(const v1::ReadManifest& stored);
  // The chunk as it would have been. ReadCheck has found its place in the manifest. DATA_LOSS names
  // the part that is damaged, or what does not fit.
  absl::StatusOr<v1::ReadChunk> Decode(const v1::ReadChunk& stored);

  // Of all that was decoded, as a read's summary has it.
  std::uint64_t saturated_values() const { return saturated_; }

 private:
  // The K or the V of one layer.
  struct Tensor {
    cachestore::TensorModel model;
    cachestore::PartHeader header;
    cachestore::HeadRange heads;
    std::vector<float> out_scales;
    kernels::ElementType out = kernels::ElementType::kBf16;
    std::uint64_t code_tokens = 0;
    std::string name;
  };
  struct Layer {
    Tensor k;
    std::optional<Tensor> v;
  };
  using Parts = google::protobuf::RepeatedPtrField<v1::StoredPart>;
  struct Side;  // one tensor's share of a chunk

  StoredDecoder() = default;
  absl::Status BeginLayer(const v1::SequenceManifest& sequence, v1::LayerManifest& layer);
  absl::Status CheckParts(const Side& side) const;
  absl::Status DecodeSide(const Side& side, std::string& out);
  void DecodeHead(const Side& side, int head, kernels::DecodeRun run);

  v1::ReadRequest request_;
  cachestore::ReadFormat format_;
  std::vector<std::vector<Layer>> layers_;  // by sequence of the manifest
  std::vector<std::uint32_t> first_layers_;
  std::uint64_t saturated_ = 0;
};

}  // namespace kvtier::client
