#include "client/model_source.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/text_file.h"

namespace kvtier::client {
namespace {

std::string NameFromPath(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path absolute = std::filesystem::absolute(path, ignored);
  const std::filesystem::path folder = absolute.parent_path().filename();
  if (absolute.filename() == "config.json" && !folder.empty()) return folder.string();
  return absolute.stem().string();
}

const char* DtypeName(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return "bfloat16";
    case v1::DTYPE_FP16:
      return "float16";
    default:
      return "float32";
  }
}

absl::Status MatchNumber(const std::string& what, std::uint64_t file, std::uint64_t model) {
  if (file == model) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} is {} in the file, but {} in the model", what, file, model));
}

}  // namespace

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  if (!config.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {}", path, std::string(config.status().message())));
  }
  config->spec.set_name(NameFromPath(path));
  return config;
}

v1::ModelSpec SpecFromKvFile(const KvFile& file) {
  v1::ModelSpec spec;
  spec.set_name(std::filesystem::path(file.file().path()).stem().string());
  spec.set_source_dtype(file.dtype());
  spec.set_k_rope(v1::ROPE_STATE_AFTER);
  for (const KvFileLayer& layer : file.layers()) {
    v1::LayerSpec& added = *spec.add_layers();
    added.set_kind(layer.v ? v1::LAYER_KIND_FULL : v1::LAYER_KIND_MLA);
    added.set_kv_heads(static_cast<std::uint32_t>(layer.heads()));
    added.set_k_head_dim(static_cast<std::uint32_t>(layer.k_head_dim()));
    added.set_v_head_dim(static_cast<std::uint32_t>(layer.v_head_dim()));
  }
  return spec;
}

absl::Status MatchSpec(const KvFile& file, v1::ModelSpec& spec) {
  KVT_RETURN_IF_ERROR(MatchNumber("the number of layers", file.layers().size(),
                                  static_cast<std::uint64_t>(spec.layers_size())));
  for (std::size_t i = 0; i < file.layers().size(); ++i) {
    const KvFileLayer& layer = file.layers()[i];
    const v1::LayerSpec& wanted = spec.layers(static_cast<int>(i));
    KVT_RETURN_IF_ERROR(
        MatchNumber(fmt::format("layer {}: KV heads", i), layer.heads(), wanted.kv_heads()));
    KVT_RETURN_IF_ERROR(MatchNumber(fmt::format("layer {}: K head dim", i), layer.k_head_dim(),
                                    wanted.k_head_dim()));
    KVT_RETURN_IF_ERROR(MatchNumber(fmt::format("layer {}: V head dim", i), layer.v_head_dim(),
                                    wanted.v_head_dim()));
  }
  if (spec.source_dtype() == v1::DTYPE_UNSPECIFIED) spec.set_source_dtype(file.dtype());
  if (spec.source_dtype() != file.dtype()) {
    return absl::InvalidArgumentError(
        fmt::format("the file's tensors are {}, but the model's are {}", DtypeName(file.dtype()),
                    DtypeName(spec.source_dtype())));
  }
  return absl::OkStatus();
}

}  // namespace kvtier::client
