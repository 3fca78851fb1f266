#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/safetensors.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// K and V of one layer in a file: [tokens, heads, head_dim]. Without V it is an MLA layer's latent.
struct KvFileLayer {
  TensorInfo k;
  std::optional<TensorInfo> v;

  std::uint64_t heads() const { return k.shape[1]; }
  std::uint64_t k_head_dim() const { return k.shape[2]; }
  std::uint64_t v_head_dim() const { return v ? v->shape[2] : 0; }
};

// A safetensors file with `layers.N.k` and `layers.N.v`, N from 0 without a gap, all of one token
// count and one dtype (BF16, F16 or F32). Thread-safe.
class KvFile {
 public:
  // INVALID_ARGUMENT names the tensor and what is wrong with it.
  static absl::StatusOr<KvFile> Open(const std::string& path);

  const SafetensorsReader& file() const { return file_; }
  const std::vector<KvFileLayer>& layers() const { return layers_; }
  std::uint64_t tokens() const { return layers_.front().k.shape[0]; }
  v1::DType dtype() const { return dtype_; }
  std::uint64_t bytes() const;  // of all K and V
  // Names of the tensors that are neither, by name.
  const std::vector<std::string>& ignored_tensors() const { return ignored_tensors_; }

 private:
  explicit KvFile(SafetensorsReader file);

  SafetensorsReader file_;
  std::vector<KvFileLayer> layers_;
  v1::DType dtype_ = v1::DTYPE_UNSPECIFIED;
  std::vector<std::string> ignored_tensors_;
};

// The wire's name for a safetensors dtype of K and V, and back; nothing for any other.
std::optional<v1::DType> DtypeFromSafetensors(const std::string& dtype);
std::optional<std::string> SafetensorsDtype(v1::DType dtype);

// "layers.3.k"
std::string LayerTensorName(std::uint64_t layer, const std::string& part);

}  // namespace kvtier::client
