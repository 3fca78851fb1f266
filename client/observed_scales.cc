#include "client/observed_scales.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/safetensors.h"
#include "client/text_file.h"
#include "kernels/element.h"

namespace kvtier::client {
namespace {

using Amax = google::protobuf::RepeatedField<float>;

struct Tensor {
  TensorInfo info;
  std::vector<float> values;
};

Tensor MakeTensor(const std::string& name, std::vector<float> values, bool per_head) {
  Tensor tensor{.info = {}, .values = std::move(values)};
  tensor.info.name = name;
  tensor.info.dtype = "F32";
  tensor.info.shape = {tensor.values.size()};
  if (per_head) tensor.info.shape.insert(tensor.info.shape.end(), {1, 1});
  return tensor;
}

absl::StatusOr<std::vector<Tensor>> TensorsOf(const v1::ScalesResponse& observed,
                                              const ObservedScalesOptions& options) {
  std::vector<Tensor> tensors;
  std::vector<std::string> unseen;
  for (const v1::LayerObservation& layer : observed.layers()) {
    // Of MLA's latent, which has no V, checkpoints carry the one scale twice.
    const Amax& v_amax = layer.v_amax().empty() ? layer.k_amax() : layer.v_amax();
    const auto k = ScalesFor(layer.k_amax(), options);
    const auto v = ScalesFor(v_amax, options);
    if (!k.ok() || !v.ok()) {
      unseen.push_back(fmt::format("layer {} ({})", layer.layer(),
                                   std::string((k.ok() ? v : k).status().message())));
      continue;
    }
    const std::string module = fmt::format("model.layers.{}.self_attn.", layer.layer());
    tensors.push_back(MakeTensor(module + "k_scale", *k, options.per_head));
    tensors.push_back(MakeTensor(module + "v_scale", *v, options.per_head));
  }
  if (unseen.empty()) return tensors;
  return absl::FailedPreconditionError(fmt::format(
      "not every layer was observed: {}; append to them first", fmt::join(unseen, ", ")));
}

// What ReadCheckpointScales needs to know, in a checkpoint's words.
absl::StatusOr<std::string> ConfigOf(const v1::ScalesResponse& observed, bool per_head) {
  const int heads = observed.layers(0).k_amax_size();
  const bool uniform = std::all_of(
      observed.layers().begin(), observed.layers().end(),
      [heads](const v1::LayerObservation& layer) { return layer.k_amax_size() == heads; });
  if (per_head && !uniform) {
    return absl::InvalidArgumentError(
        "layers differ in KV heads, which no config.json can say; write scales per tensor");
  }
  nlohmann::ordered_json config;
  config["num_hidden_layers"] = observed.layers_size();
  if (uniform) config["num_key_value_heads"] = heads;
  config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                   {"kv_cache_scheme",
                                    {{"num_bits", 8},
                                     {"type", "float"},
                                     {"symmetric", true},
                                     {"strategy", per_head ? "attn_head" : "tensor"},
                                     {"dynamic", false}}}};
  return config.dump(2) + "\n";
}

}  // namespace

absl::StatusOr<std::vector<float>> ScalesFor(const Amax& amax,
                                             const ObservedScalesOptions& options) {
  std::vector<float> largest(amax.begin(), amax.end());
  if (!options.per_head && !largest.empty())
    largest = {*std::max_element(largest.begin(), largest.end())};
  for (std::size_t head = 0; head < largest.size(); ++head) {
    const float scale =
        static_cast<float>(options.headroom * largest[head] / kernels::E4m3::kLargest);
    if (!std::isnormal(scale)) {
      const std::string where = options.per_head ? fmt::format("head {}: ", head) : "";
      return absl::FailedPreconditionError(fmt::format("{}amax {}", where, largest[head]));
    }
    largest[head] = scale;
  }
  return largest;
}

absl::Status WriteObservedScales(const v1::ScalesResponse& observed,
                                 const ObservedScalesOptions& options,
                                 const std::string& directory) {
  KVT_ASSIGN_OR_RETURN(const std::vector<Tensor> tensors, TensorsOf(observed, options));
  KVT_ASSIGN_OR_RETURN(const std::string config, ConfigOf(observed, options.per_head));
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  const std::string weights = directory + "/model.safetensors";
  const std::string description = directory + "/config.json";
  for (const std::string& path : {weights, description}) {
    if (!std::filesystem::exists(path)) continue;
    return absl::InvalidArgumentError(
        fmt::format("{} exists; take a directory that holds no checkpoint", path));
  }
  SafetensorsHeader header{.tensors = {}, .metadata = {{"format", "pt"}}};
  for (const Tensor& tensor : tensors) header.tensors.push_back(tensor.info);
  KVT_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                       SafetensorsWriter::Create(weights, std::move(header)));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    KVT_RETURN_IF_ERROR(writer.Write(i, 0, std::as_bytes(std::span(tensors[i].values))));
  }
  KVT_RETURN_IF_ERROR(writer.Finish());
  return WriteTextFile(description, config);
}

}  // namespace kvtier::client
