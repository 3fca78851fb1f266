#include "client/checkpoint_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/json_quote.h"
#include "client/text_file.h"

namespace kvtier::client {
namespace {

using nlohmann::json;

constexpr int kMaxLayers = 1024;
constexpr int kMaxHeads = 1 << 16;

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

// Null stands for "none", as a missing key does.
const json* Find(const json& object, const std::string& key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

absl::StatusOr<json> ReadJson(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return Invalid(fmt::format("{} is not a JSON object", path));
  return parsed;
}

// A count that may be missing: 0 then.
absl::StatusOr<int> Count(const json& object, const char* key, int most) {
  const json* value = Find(object, key);
  if (value == nullptr) return 0;
  if (!value->is_number_unsigned() || *value < 1 || *value > most)
    return Invalid(fmt::format("{} is {}; want 1 to {}", key, Quote(*value), most));
  return value->get<int>();
}

std::uint64_t Number(const json& value) {
  return value.is_number_unsigned() ? value.get<std::uint64_t>() : 0;
}

// Hybrids say in one of several ways which layers have attention, and so keep K and V.
struct AttentionRow {
  const char* key;
  bool (*holds)(const json& value, const json& config, int layer);
};

bool AttentionByType(const json& types, const json&, int layer) {
  const auto at = static_cast<std::size_t>(layer);
  if (!types.is_array() || at >= types.size() || !types[at].is_string()) return true;
  const std::string type = types[at];
  return type == "hybrid" || (type.ends_with("attention") && !type.starts_with("linear"));
}

constexpr std::array kAttentionRows = {
    AttentionRow{"layer_types", AttentionByType},
    AttentionRow{"layers_block_type", AttentionByType},
    AttentionRow{"hybrid_override_pattern",
                 [](const json& pattern, const json&, int layer) {
                   const auto at = static_cast<std::size_t>(layer);
                   const std::string text =
                       pattern.is_string() ? pattern.get<std::string>() : std::string();
                   return at >= text.size() || text[at] == '*';
                 }},
    AttentionRow{"attn_layer_indices",
                 [](const json& indices, const json&, int layer) {
                   return std::find(indices.begin(), indices.end(), layer) != indices.end();
                 }},
    AttentionRow{"full_attention_interval",
                 [](const json& interval, const json&, int layer) {
                   const std::uint64_t every = Number(interval);
                   return every == 0 || (static_cast<std::uint64_t>(layer) + 1) % every == 0;
                 }},
    AttentionRow{"attn_layer_period",
                 [](const json& period, const json& config, int layer) {
                   const std::uint64_t every = Number(period);
                   const json* offset = Find(config, "attn_layer_offset");
                   const std::uint64_t first = offset == nullptr ? 0 : Number(*offset);
                   return every == 0 || static_cast<std::uint64_t>(layer) % every == first;
                 }},
};

absl::StatusOr<std::vector<int>> KvLayers(const json& config) {
  KVT_ASSIGN_OR_RETURN(const int layers, Count(config, "num_hidden_layers", kMaxLayers));
  if (layers == 0) return Invalid("num_hidden_layers is missing");
  // 0 stands for none.
  const json* sharing = Find(config, "num_kv_shared_layers");
  int shared = 0;
  if (sharing != nullptr && *sharing != 0) {
    KVT_ASSIGN_OR_RETURN(shared, Count(config, "num_kv_shared_layers", layers - 1));
  }
  std::vector<int> kept;
  for (int layer = 0; layer < layers - shared; ++layer) {
    const auto row = std::find_if(kAttentionRows.begin(), kAttentionRows.end(),
                                  [&config](const AttentionRow& candidate) {
                                    return Find(config, candidate.key) != nullptr;
                                  });
    if (row == kAttentionRows.end() || row->holds(*Find(config, row->key), config, layer))
      kept.push_back(layer);
  }
  return kept;
}

// compressed-tensors' words; ModelOpt writes the same object without a strategy.
absl::Status TakeScheme(const json& scheme, CheckpointConfig& config) {
  const auto is = [&scheme](const char* key, const json& want) {
    const json* value = Find(scheme, key);
    return value == nullptr || *value == want;
  };
  const auto refuse = [&scheme](const char* key, const char* want) {
    return Invalid(
        fmt::format("kv_cache_scheme.{} is {}; want {}", key, Quote(*Find(scheme, key)), want));
  };
  if (!scheme.is_object())
    return Invalid(fmt::format("kv_cache_scheme is {}; want an object", Quote(scheme)));
  if (!is("type", "float")) return refuse("type", "\"float\"");
  if (!is("num_bits", 8)) return refuse("num_bits", "8");
  if (!is("symmetric", true)) return refuse("symmetric", "true");
  if (!is("dynamic", false)) return refuse("dynamic", "false: scales in the checkpoint");
  if (Find(scheme, "strategy") == nullptr) return absl::OkStatus();
  if (!is("strategy", "tensor") && !is("strategy", "attn_head"))
    return refuse("strategy", "\"tensor\" or \"attn_head\"");
  config.per_head = is("strategy", "attn_head");
  return absl::OkStatus();
}

// ModelOpt's and TensorRT-LLM's word for the same.
absl::Status CheckAlgorithm(const json& algorithm) {
  std::string name = algorithm.is_string() ? algorithm.get<std::string>() : Quote(algorithm);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  if (name == "FP8" || name == "NONE" || name.empty()) return absl::OkStatus();
  return Invalid(fmt::format("kv_cache_quant_algo is {}; want FP8", Quote(algorithm)));
}

absl::Status TakeQuantization(const json& quantization, CheckpointConfig& config) {
  if (const json* asked = Find(quantization, "calculate_kv_scales");
      asked != nullptr && *asked != false) {
    return Invalid(
        "calculate_kv_scales is set: scales guessed from a request's first tokens are not "
        "supported; calibrate the checkpoint, or write what a server has seen with `kvtier scales "
        "--observed`");
  }
  if (const json* scheme = Find(quantization, "kv_cache_scheme")) {
    KVT_RETURN_IF_ERROR(TakeScheme(*scheme, config));
  }
  const json* algorithm = Find(quantization, "kv_cache_quant_algo");
  return algorithm == nullptr ? absl::OkStatus() : CheckAlgorithm(*algorithm);
}

absl::StatusOr<CheckpointConfig> FromJson(const json& root) {
  CheckpointConfig config;
  const json* model = &root;
  for (const char* nested : {"text_config", "llm_config", "language_config"}) {
    if (const json* found = Find(root, nested)) model = found;
  }
  for (const json* object : {&root, model}) {
    KVT_RETURN_IF_ERROR(TakeQuantization(*object, config));
    for (const char* key : {"quantization_config", "compression_config", "quantization"}) {
      if (const json* quantization = Find(*object, key)) {
        KVT_RETURN_IF_ERROR(TakeQuantization(*quantization, config));
      }
    }
  }
  KVT_ASSIGN_OR_RETURN(config.kv_layers, KvLayers(*model));
  config.mla = Find(*model, "kv_lora_rank") != nullptr;
  KVT_ASSIGN_OR_RETURN(config.query_heads, Count(*model, "num_attention_heads", kMaxHeads));
  if (config.mla) {
    config.kv_heads = 1;
  } else if (const json* heads = Find(*model, "num_key_value_heads"); heads == nullptr) {
    config.kv_heads = config.query_heads;
  } else if (!heads->is_array()) {
    KVT_ASSIGN_OR_RETURN(config.kv_heads, Count(*model, "num_key_value_heads", kMaxHeads));
  }
  return config;
}

absl::Status In(const std::string& path, const absl::Status& status) {
  return Invalid(fmt::format("{}: {}", path, std::string(status.message())));
}

}  // namespace

absl::StatusOr<CheckpointConfig> ReadCheckpointConfig(const std::string& directory) {
  const std::string path = directory + "/config.json";
  KVT_ASSIGN_OR_RETURN(const json root, ReadJson(path));
  absl::StatusOr<CheckpointConfig> config = FromJson(root);
  if (!config.ok()) return In(path, config.status());
  const std::string modelopt = directory + "/hf_quant_config.json";
  if (!std::filesystem::exists(modelopt)) return config;
  KVT_ASSIGN_OR_RETURN(const json quantization, ReadJson(modelopt));
  if (const json* inner = Find(quantization, "quantization")) {
    if (const absl::Status status = TakeQuantization(*inner, *config); !status.ok())
      return In(modelopt, status);
  }
  return config;
}

}  // namespace kvtier::client
