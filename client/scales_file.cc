#include "client/scales_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "cachestore/model/format.h"
#include "client/json_quote.h"
#include "client/text_file.h"

namespace kvtier::client {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

struct SideRow {
  const char* scale;
  const char* tensor;
  SideScales LayerCalibration::*side;
};
constexpr std::array kSides = {SideRow{"k_scale", "k_tensor", &LayerCalibration::k},
                               SideRow{"v_scale", "v_tensor", &LayerCalibration::v},
                               SideRow{"q_scale", "q_tensor", &LayerCalibration::q}};

std::string Text(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

absl::StatusOr<SideScales> SideFrom(const json& layer, const SideRow& row, std::size_t index) {
  SideScales side{.values = {}, .tensor = Text(layer, row.tensor)};
  const auto values = layer.find(row.scale);
  if (values == layer.end()) return side;
  const auto refuse = [&](const json& got) {
    return absl::InvalidArgumentError(
        fmt::format("layers[{}].{} has {}; want a list of finite normal numbers above 0", index,
                    row.scale, Quote(got)));
  };
  if (!values->is_array()) return refuse(*values);
  for (const json& value : *values) {
    const float scale = value.is_number() ? value.get<float>() : 0.0f;
    if (!std::isnormal(scale) || scale < 0) return refuse(value);
    side.values.push_back(scale);
  }
  return side;
}

absl::StatusOr<CheckpointScales> FromJson(const json& root) {
  const auto layers = root.is_object() ? root.find("layers") : root.end();
  if (layers == root.end() || !layers->is_array())
    return absl::InvalidArgumentError("want a JSON object with a list \"layers\"");
  CheckpointScales scales{.source = Text(root, "source"), .layers = {}, .warnings = {}};
  for (std::size_t i = 0; i < layers->size(); ++i) {
    const json& from = layers->at(i);
    if (!from.is_object())
      return absl::InvalidArgumentError(fmt::format("layers[{}] is not an object", i));
    LayerCalibration& layer = scales.layers.emplace_back();
    layer.layer = static_cast<int>(i);
    for (const SideRow& row : kSides) {
      KVT_ASSIGN_OR_RETURN(layer.*row.side, SideFrom(from, row, i));
    }
    if (!layer.k.tensor.empty()) ++scales.calibrated;
  }
  return scales;
}

}  // namespace

std::string ScalesToJson(const CheckpointScales& scales) {
  ordered_json root;
  root["source"] = scales.source;
  root["calibrated"] = scales.calibrated;
  root["warnings"] = scales.warnings;
  root["layers"] = ordered_json::array();
  for (const LayerCalibration& layer : scales.layers) {
    ordered_json& out = root["layers"].emplace_back();
    out["layer"] = layer.layer;
    for (const SideRow& row : kSides) {
      const SideScales& side = layer.*row.side;
      out[row.scale] = side.values;
      out[row.tensor] = side.tensor;
    }
  }
  return root.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

absl::StatusOr<CheckpointScales> ReadScales(const std::string& path,
                                            const CheckpointScalesOptions& options) {
  if (std::filesystem::is_directory(path)) return ReadCheckpointScales(path, options);
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  absl::StatusOr<CheckpointScales> scales =
      FromJson(json::parse(text, nullptr, /*allow_exceptions=*/false));
  if (scales.ok()) return scales;
  return absl::InvalidArgumentError(
      fmt::format("{}: {}", path, std::string(scales.status().message())));
}

bool KeepsSourceDtype(const v1::RegisterModelRequest& request, int layer) {
  const auto& skipped = request.policy().kv_cache_dtype_skip_layers();
  const bool windowed = request.spec().layers(layer).kind() == v1::LAYER_KIND_SLIDING_WINDOW;
  return std::any_of(skipped.begin(), skipped.end(), [&](const std::string& skip) {
    return skip == fmt::format("{}", layer) || (windowed && skip == "sliding_window");
  });
}

absl::Status SetScales(const CheckpointScales& scales, v1::RegisterModelRequest& request) {
  const std::string& dtype = request.policy().kv_cache_dtype();
  KVT_ASSIGN_OR_RETURN(const cachestore::Format format, cachestore::ParseFormat(dtype));
  if (format.kind == cachestore::Format::Kind::kFp8 &&
      format.element == kernels::ElementType::kE5m2) {
    return absl::InvalidArgumentError(
        fmt::format("kv_cache_dtype is {}; the scales of {} are for fp8_e4m3: give those of "
                    "fp8_e5m2 by --k-scale and --v-scale",
                    dtype, scales.source));
  }
  if (static_cast<int>(scales.layers.size()) != request.spec().layers_size()) {
    return absl::InvalidArgumentError(fmt::format("{} has scales for {} layers; the model has {}",
                                                  scales.source, scales.layers.size(),
                                                  request.spec().layers_size()));
  }
  request.set_scales_source(fmt::format("calibrated ({})", scales.source));
  for (int i = 0; i < request.spec().layers_size(); ++i) {
    if (KeepsSourceDtype(request, i)) continue;
    const LayerCalibration& from = scales.layers[static_cast<std::size_t>(i)];
    v1::LayerScales& to = *request.add_scales();
    to.set_layer(static_cast<std::uint32_t>(i));
    to.mutable_k_scale()->Assign(from.k.values.begin(), from.k.values.end());
    to.mutable_v_scale()->Assign(from.v.values.begin(), from.v.values.end());
    to.mutable_q_scale()->Assign(from.q.values.begin(), from.q.values.end());
  }
  return absl::OkStatus();
}

}  // namespace kvtier::client
