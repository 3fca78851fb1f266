#include "client/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cachestore/base/status_macros.h"
#include "client/json_quote.h"

namespace kvtier::client {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxLayers = 1 << 16;
constexpr std::uint64_t kMaxExtent = 1 << 24;  // heads, dims, windows
constexpr std::uint64_t kMaxPositions = std::uint64_t{1} << 40;

// The cell that engines keep for MLA with a sparse indexer (DeepSeek-V3.2) where no format is asked
// for: latent as FP8, rope as bf16.
constexpr char kSparseMlaFormat[] = "fp8_ds_mla";

// Each of these, when set, lays the cache out in a way that the fields read below don't tell.
constexpr std::array kRefused = {"attn_config",
                                 "attn_layer_period",
                                 "attention_chunk_size",
                                 "attention_k_eq_v",
                                 "block_configs",
                                 "block_types",
                                 "cross_attention_layers",
                                 "full_attention_interval",
                                 "global_head_dim",
                                 "hybrid_override_pattern",
                                 "is_encoder_decoder",
                                 "layers_block_type",
                                 "linear_attn_config",
                                 "linear_num_key_heads",
                                 "lru_width",
                                 "mamba_d_ssm",
                                 "mamba_d_state",
                                 "multi_query",
                                 "multi_query_attention",
                                 "new_decoder_architecture",
                                 "num_global_key_value_heads",
                                 "num_kv_heads",
                                 "num_kv_shared_layers",
                                 "ssm_cfg",
                                 "swa_head_dim",
                                 "swa_num_key_value_heads"};

// What transformers takes `sliding_window` to mean where neither layer_types nor
// sliding_window_pattern says it.
enum class WindowDefault {
  kPattern,  // every `pattern`-th layer is full; the window has a default too, so it must be given
  kAll,      // all layers
  kOff,      // none, unless use_sliding_window says otherwise
};
struct WindowRow {
  const char* model_type;
  WindowDefault rule;
  std::uint64_t pattern;
};
constexpr std::array kWindowDefaults = {
    WindowRow{"cohere2", WindowDefault::kPattern, 4},
    WindowRow{"gemma2", WindowDefault::kPattern, 2},
    WindowRow{"gemma3", WindowDefault::kPattern, 6},
    WindowRow{"gemma3_text", WindowDefault::kPattern, 6},
    WindowRow{"gpt_oss", WindowDefault::kPattern, 2},
    WindowRow{"mistral", WindowDefault::kAll, 0},
    WindowRow{"mixtral", WindowDefault::kAll, 0},
    WindowRow{"phi3", WindowDefault::kAll, 0},
    WindowRow{"starcoder2", WindowDefault::kAll, 0},
    WindowRow{"qwen2", WindowDefault::kOff, 0},
    WindowRow{"qwen2_moe", WindowDefault::kOff, 0},
    WindowRow{"qwen3", WindowDefault::kOff, 0},
    WindowRow{"qwen3_moe", WindowDefault::kOff, 0},
};

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

// The config's fields. `null` is what a missing field is: transformers writes it for "none".
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}

  const json* Find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  absl::StatusOr<std::optional<std::uint64_t>> Count(const char* name, std::uint64_t most) const {
    const json* value = Find(name);
    if (value == nullptr) return std::optional<std::uint64_t>();
    if (!value->is_number_unsigned() || value->get<std::uint64_t>() < 1 ||
        value->get<std::uint64_t>() > most) {
      return Invalid(
          fmt::format("{} is {}; a whole number in [1, {}] is needed", name, Quote(*value), most));
    }
    return std::optional(value->get<std::uint64_t>());
  }

  absl::StatusOr<std::uint64_t> Needed(const char* name, std::uint64_t most) const {
    KVT_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> value, Count(name, most));
    if (!value) return Invalid(fmt::format("{} is missing", name));
    return *value;
  }

  std::string Text(const char* name) const {
    const json* value = Find(name);
    return value != nullptr && value->is_string() ? value->get<std::string>() : "";
  }

 private:
  const json& object_;
};

absl::Status CheckRefused(const Fields& fields) {
  for (const char* name : kRefused) {
    const json* value = fields.Find(name);
    if (value == nullptr || *value == json(false) || *value == json(0) || value->empty()) continue;
    return Invalid(
        fmt::format("{} is {}; a cache laid out by it is not supported", name, Quote(*value)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<bool>> SlidingByType(const json& types, std::uint64_t layers) {
  if (!types.is_array() || types.size() != layers) {
    return Invalid(fmt::format("layer_types has {} entries; num_hidden_layers is {}",
                               types.is_array() ? types.size() : 0, layers));
  }
  std::vector<bool> sliding;
  for (const json& type : types) {
    if (type != "full_attention" && type != "sliding_attention") {
      return Invalid(
          fmt::format("layer_types[{}] is {}; full_attention and sliding_attention are "
                      "allowed",
                      sliding.size(), Quote(type)));
    }
    sliding.push_back(type == "sliding_attention");
  }
  return sliding;
}

std::vector<bool> SlidingByPattern(std::uint64_t pattern, std::uint64_t layers) {
  std::vector<bool> sliding;
  for (std::uint64_t i = 0; i < layers; ++i) sliding.push_back((i + 1) % pattern != 0);
  return sliding;
}

const WindowRow* FindWindowDefault(const std::string& model_type) {
  const auto found =
      std::find_if(kWindowDefaults.begin(), kWindowDefaults.end(),
                   [&](const WindowRow& row) { return model_type == row.model_type; });
  return found == kWindowDefaults.end() ? nullptr : &*found;
}

// use_sliding_window and max_window_layers, Qwen's way: the first layers see everything.
absl::StatusOr<std::vector<bool>> SlidingBySwitch(const Fields& fields, bool on,
                                                  std::uint64_t layers) {
  std::vector<bool> sliding(layers, false);
  if (!on) return sliding;
  const json* first = fields.Find("max_window_layers");
  if (first == nullptr || !first->is_number_unsigned()) {
    return Invalid(
        fmt::format("max_window_layers is {}; with use_sliding_window a whole number is "
                    "needed",
                    first == nullptr ? "missing" : Quote(*first)));
  }
  for (std::uint64_t i = first->get<std::uint64_t>(); i < layers; ++i) sliding[i] = true;
  return sliding;
}

// Which layers are windowed, decided in transformers' order.
absl::StatusOr<std::vector<bool>> SlidingLayers(const Fields& fields, std::uint64_t layers) {
  if (const json* types = fields.Find("layer_types")) return SlidingByType(*types, layers);
  const WindowRow* row = FindWindowDefault(fields.Text("model_type"));
  const bool pattern_by_default = row != nullptr && row->rule == WindowDefault::kPattern;
  const json* window = fields.Find("sliding_window");
  if (window == nullptr && !pattern_by_default) return std::vector<bool>(layers, false);
  if (const json* on = fields.Find("use_sliding_window")) {
    if (!on->is_boolean()) {
      return Invalid(fmt::format("use_sliding_window is {}; true or false is needed", Quote(*on)));
    }
    return SlidingBySwitch(fields, on->get<bool>(), layers);
  }
  KVT_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> pattern,
                       fields.Count("sliding_window_pattern", kMaxLayers));
  if (pattern) return SlidingByPattern(*pattern, layers);
  if (row == nullptr) {
    return Invalid(
        fmt::format("sliding_window is {}, but neither layer_types nor "
                    "sliding_window_pattern says for which layers",
                    Quote(*window)));
  }
  if (pattern_by_default) return SlidingByPattern(row->pattern, layers);
  return std::vector<bool>(layers, row->rule == WindowDefault::kAll);
}

absl::StatusOr<v1::DType> SourceDtype(const Fields& inner, const Fields& outer) {
  for (const Fields* fields : {&inner, &outer}) {
    for (const char* field : {"torch_dtype", "dtype"}) {
      const json* value = fields->Find(field);
      if (value == nullptr) continue;
      std::string name = value->is_string() ? value->get<std::string>() : Quote(*value);
      if (name.starts_with("torch.")) name = name.substr(std::string_view("torch.").size());
      if (name == "bfloat16") return v1::DTYPE_BF16;
      if (name == "float16" || name == "half") return v1::DTYPE_FP16;
      if (name == "float32" || name == "float") return v1::DTYPE_FP32;
      return Invalid(
          fmt::format("{} is {}; bfloat16, float16 and float32 are allowed", field, name));
    }
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::StatusOr<v1::LayerSpec> MlaLayer(const Fields& fields, std::uint64_t rank) {
  KVT_ASSIGN_OR_RETURN(const std::uint64_t rope, fields.Needed("qk_rope_head_dim", kMaxExtent));
  v1::LayerSpec layer;
  layer.set_kind(v1::LAYER_KIND_MLA);
  layer.set_kv_heads(1);
  layer.set_k_head_dim(static_cast<std::uint32_t>(rank + rope));
  return layer;
}

absl::StatusOr<v1::LayerSpec> AttentionLayer(const Fields& fields) {
  KVT_ASSIGN_OR_RETURN(const std::uint64_t heads, fields.Needed("num_attention_heads", kMaxExtent));
  KVT_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> kv_heads,
                       fields.Count("num_key_value_heads", kMaxExtent));
  if (heads % kv_heads.value_or(heads) != 0) {
    return Invalid(fmt::format("num_key_value_heads is {}; it must divide num_attention_heads, {}",
                               *kv_heads, heads));
  }
  KVT_ASSIGN_OR_RETURN(std::optional<std::uint64_t> head_dim, fields.Count("head_dim", kMaxExtent));
  if (!head_dim) {
    KVT_ASSIGN_OR_RETURN(const std::uint64_t hidden, fields.Needed("hidden_size", kMaxExtent));
    if (hidden % heads != 0) {
      return Invalid(
          fmt::format("head_dim is missing, and num_attention_heads, {}, does not divide "
                      "hidden_size, {}",
                      heads, hidden));
    }
    head_dim = hidden / heads;
  }
  KVT_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> v_head_dim,
                       fields.Count("v_head_dim", kMaxExtent));
  v1::LayerSpec layer;
  layer.set_kind(v1::LAYER_KIND_FULL);
  layer.set_kv_heads(static_cast<std::uint32_t>(kv_heads.value_or(heads)));
  layer.set_k_head_dim(static_cast<std::uint32_t>(*head_dim));
  layer.set_v_head_dim(static_cast<std::uint32_t>(v_head_dim.value_or(*head_dim)));
  return layer;
}

absl::Status AddLayers(const Fields& fields, v1::ModelSpec& spec) {
  KVT_ASSIGN_OR_RETURN(const std::uint64_t layers, fields.Needed("num_hidden_layers", kMaxLayers));
  KVT_ASSIGN_OR_RETURN(const std::vector<bool> sliding, SlidingLayers(fields, layers));
  KVT_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> rank,
                       fields.Count("kv_lora_rank", kMaxExtent));
  KVT_ASSIGN_OR_RETURN(const v1::LayerSpec layer,
                       rank ? MlaLayer(fields, *rank) : AttentionLayer(fields));
  std::uint64_t window = 0;
  if (std::find(sliding.begin(), sliding.end(), true) != sliding.end()) {
    if (rank) return Invalid("kv_lora_rank is set for a model with sliding-window layers");
    KVT_ASSIGN_OR_RETURN(window, fields.Needed("sliding_window", kMaxExtent));
  }
  for (const bool windowed : sliding) {
    v1::LayerSpec& added = *spec.add_layers();
    added = layer;
    if (!windowed) continue;
    added.set_kind(v1::LAYER_KIND_SLIDING_WINDOW);
    added.set_window(static_cast<std::uint32_t>(window));
  }
  return absl::OkStatus();
}

// DeepSeek-V3.2's indexer keeps keys of its own beside an MLA cache, and its engines keep that
// cache as FP8. Beside any other cache an indexer is not known.
absl::Status ReadIndexer(const Fields& fields, ModelConfig& config) {
  KVT_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> dim,
                       fields.Count("index_head_dim", kMaxExtent));
  if (!dim && fields.Text("model_type") != "deepseek_v32") return absl::OkStatus();
  if (fields.Find("kv_lora_rank") == nullptr) {
    return Invalid(
        fmt::format("index_head_dim is {}; an indexer is supported beside MLA alone, and "
                    "kv_lora_rank is missing",
                    dim ? fmt::format("{}", *dim) : "missing"));
  }
  config.engine_dtype = kSparseMlaFormat;
  config.notices.push_back(
      fmt::format("engines keep this model's cache as {0} where no format is asked for, so auto is "
                  "{0}; bfloat16 keeps 16 bit",
                  kSparseMlaFormat));
  config.notices.push_back(
      fmt::format("the keys of its sparse indexer{} are not part of the cache that is stored",
                  dim ? fmt::format(" (index_head_dim {})", *dim) : ""));
  return absl::OkStatus();
}

// The weights' quantization says nothing of the cache; a scheme for the cache itself is told, for
// engines follow it.
void ReadQuantization(const Fields& fields, ModelConfig& config) {
  const json* quantization = fields.Find("quantization_config");
  if (quantization == nullptr || !quantization->is_object()) return;
  if (Fields(*quantization).Find("kv_cache_scheme") == nullptr) return;
  config.notices.emplace_back(
      "quantization_config.kv_cache_scheme is set: engines keep this checkpoint's cache as FP8; "
      "auto is the source dtype here, fp8_e4m3 is what they do");
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return Invalid("the config is not a JSON object");
  const Fields outer(root);
  const json* nested = outer.Find("text_config");
  if (nested != nullptr && !nested->is_object()) return Invalid("text_config is not an object");
  const Fields inner(nested == nullptr ? root : *nested);
  KVT_RETURN_IF_ERROR(CheckRefused(outer));
  KVT_RETURN_IF_ERROR(CheckRefused(inner));
  ModelConfig config;
  KVT_ASSIGN_OR_RETURN(const v1::DType dtype, SourceDtype(inner, outer));
  config.spec.set_source_dtype(dtype);
  config.spec.set_k_rope(v1::ROPE_STATE_AFTER);
  KVT_RETURN_IF_ERROR(AddLayers(inner, config.spec));
  KVT_RETURN_IF_ERROR(ReadIndexer(inner, config));
  ReadQuantization(outer, config);
  KVT_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> positions,
                       inner.Count("max_position_embeddings", kMaxPositions));
  config.max_position_embeddings = positions.value_or(0);
  return config;
}

std::string ResolveAuto(const ModelConfig& config, const std::string& kv_cache_dtype) {
  return kv_cache_dtype.empty() || kv_cache_dtype == "auto" ? config.engine_dtype : kv_cache_dtype;
}

}  // namespace kvtier::client
