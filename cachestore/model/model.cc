#include "cachestore/model/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
namespace {

constexpr int kMaxPageTokens = 8192;
constexpr int kPageTokensMultiple = 16;
constexpr const char* kSlidingWindow = "sliding_window";

absl::StatusOr<std::vector<bool>> SkippedLayers(const ModelRequest& request) {
  const int layers = static_cast<int>(request.spec.layers.size());
  std::vector<bool> skipped(request.spec.layers.size(), false);
  for (const std::string& item : request.policy.skip_layers) {
    if (item == kSlidingWindow) {
      for (int i = 0; i < layers; ++i) {
        if (request.spec.layers[i].kind == LayerKind::kSlidingWindow) skipped[i] = true;
      }
      continue;
    }
    const bool digits = !item.empty() && item.size() <= 4 &&
                        item.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::stoi(item) >= layers) {
      return Error(
          Reason::kInvalidField,
          fmt::format(
              "policy.kv_cache_dtype_skip_layers has \"{}\"; want layer indices 0 to {} or \"{}\"",
              item, layers - 1, kSlidingWindow));
    }
    skipped[static_cast<std::size_t>(std::stoi(item))] = true;
  }
  return skipped;
}

absl::Status CheckTensor(const TensorModel& tensor, const std::string& field,
                         const std::string& format) {
  if (const int multiple = kernels::DimMultiple(tensor.layout.codec);
      tensor.dim() % multiple != 0) {
    return Error(Reason::kFormatRefused, fmt::format("{} is {}; {} needs a multiple of {}", field,
                                                     tensor.dim(), format, multiple));
  }
  return absl::OkStatus();
}

// What page_tokens must be a multiple of.
int PageMultiple(const std::vector<std::pair<TensorFormat, TensorFormat>>& formats) {
  int multiple = kPageTokensMultiple;
  for (const auto& [k, v] : formats) {
    multiple = std::lcm(multiple, kernels::UnitTokens(k.codec));
    multiple = std::lcm(multiple, kernels::UnitTokens(v.codec));
  }
  return multiple;
}

absl::StatusOr<int> ResolvePageTokens(int asked, int fallback, int multiple) {
  if (asked == 0) {
    const int most = std::max(1, kMaxPageTokens / multiple);
    return std::clamp((fallback + multiple - 1) / multiple, 1, most) * multiple;
  }
  if (asked < 0 || asked > std::max(kMaxPageTokens, multiple) || asked % multiple != 0) {
    return Error(Reason::kInvalidField,
                 fmt::format("page_tokens is {}; want 0, or a multiple of {} up to {}", asked,
                             multiple, kMaxPageTokens));
  }
  return asked;
}

bool TakesScale(const TensorModel& tensor) {
  return kernels::RowOf(tensor.layout.codec.id).takes_scale;
}

absl::Status CheckScales(const std::vector<float>& given, int heads, const std::string& field) {
  if (given.size() != 1 && given.size() != static_cast<std::size_t>(heads)) {
    return Error(Reason::kInvalidField,
                 fmt::format("{} has {} values; want 1 or {} (one per KV head)", field,
                             given.size(), heads));
  }
  for (const float scale : given) {
    if (!std::isnormal(scale) || scale < 0) {
      return Error(Reason::kInvalidField,
                   fmt::format("{} is {}; want a finite normal number above 0", field, scale));
    }
  }
  return absl::OkStatus();
}

absl::Status SetScales(const std::vector<float>& given, const std::string& field,
                       TensorModel& tensor) {
  KVT_RETURN_IF_ERROR(CheckScales(given, tensor.heads(), field));
  tensor.per_head_scales = given.size() > 1;
  tensor.scales = tensor.per_head_scales ? given : std::vector<float>(tensor.heads(), given[0]);
  return absl::OkStatus();
}

absl::Status ApplyScales(const ModelRequest& request, Model& model) {
  std::vector<bool> seen(model.layers.size(), false);
  for (const LayerScales& scales : request.scales) {
    const auto field = fmt::format("scales of layer {}", scales.layer);
    if (scales.layer < 0 || scales.layer >= static_cast<int>(model.layers.size()) ||
        seen[scales.layer]) {
      return Error(Reason::kInvalidField, fmt::format("{}: want each of layers 0 to {} once", field,
                                                      model.layers.size() - 1));
    }
    seen[scales.layer] = true;
    LayerModel& layer = model.layers[scales.layer];
    if (!TakesScale(layer.k)) {
      return Error(
          Reason::kInvalidField,
          fmt::format("{}: the layer is stored as {}, which takes no scale; leave them out", field,
                      layer.format));
    }
    if (scales.k.empty() || (scales.v.empty() && layer.v.dim() > 0)) {
      return Error(Reason::kInvalidField,
                   fmt::format("{}: {}_scale is missing", field, scales.k.empty() ? "k" : "v"));
    }
    if (!scales.q.empty()) {
      KVT_RETURN_IF_ERROR(CheckScales(scales.q, layer.k.heads(), field + " q_scale"));
    }
    layer.q_scales = scales.q;
    KVT_RETURN_IF_ERROR(SetScales(scales.k, field + " k_scale", layer.k));
    if (layer.v.dim() == 0) continue;
    KVT_RETURN_IF_ERROR(SetScales(scales.v, field + " v_scale", layer.v));
  }
  if (request.scales.empty()) return absl::OkStatus();
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    if (TakesScale(model.layers[i].k) && !seen[i]) {
      return Error(
          Reason::kInvalidField,
          fmt::format(
              "scales of layer {} are missing while other layers have some; give all or none", i));
    }
  }
  return absl::OkStatus();
}

bool AllOne(const std::vector<float>& scales) {
  return std::all_of(scales.begin(), scales.end(), [](float s) { return s == 1.0f; });
}

// "calibrated n of n layers (CHECKPOINT)" for a source of "calibrated (CHECKPOINT)".
std::string CountLine(const std::string& source, const Model& model) {
  const std::size_t origin = std::min(source.find(" ("), source.size());
  return fmt::format("scales: {} {} of {} layers{}", source.substr(0, origin),
                     model.scaled_layers - model.unit_scale_layers, model.scaled_layers,
                     source.substr(origin));
}

// Says where the scales come from, or warns in vLLM's words where E4M3 runs at 1.0.
void DescribeScales(const ModelRequest& request, Model& model) {
  bool e4m3_at_one = false;
  for (LayerModel& layer : model.layers) {
    if (!TakesScale(layer.k)) continue;
    ++model.scaled_layers;
    layer.unit_scale = AllOne(layer.k.scales) && AllOne(layer.v.scales);
    model.unit_scale_layers += layer.unit_scale ? 1 : 0;
    e4m3_at_one |= layer.unit_scale && layer.k.layout.codec.element == ElementType::kE4m3;
  }
  if (model.scaled_layers == 0) return;
  if (model.unit_scale_layers < model.scaled_layers) {
    model.scales_line =
        CountLine(request.scales_source.empty() ? "given" : request.scales_source, model);
  }
  if (e4m3_at_one) {
    if (!model.scales_line.empty()) model.notices.push_back(model.scales_line);
    model.scales_line =
        "Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify that "
        "k/v_scale scaling factors are "
        "properly set in the checkpoint.";
  }
}

void AddNotices(const Format& format, Model& model) {
  const bool kivi = format.kind == Format::Kind::kKivi;
  if (kivi && format.k_bits == 2) {
    model.notices.push_back(
        "2-bit keys lose accuracy on models whose KV heads serve several query heads (GQA, MQA): "
        "evaluate your model, or use 4-bit keys (kivi4, k4v2)");
  }
  const bool mla =
      std::any_of(model.layers.begin(), model.layers.end(),
                  [](const LayerModel& layer) { return layer.spec.kind == LayerKind::kMla; });
  if (kivi && mla) {
    model.notices.push_back(
        "nobody has published what KIVI does to the latent of MLA: evaluate your model");
  }
  const bool nvfp4 = format.codec == kernels::CodecId::kNvfp4 ||
                     format.codec == kernels::CodecId::kNvfp4FourOverSix;
  if (nvfp4 && model.unit_scale_layers > 0) {
    model.notices.push_back(
        "nvfp4 at scale 1.0 loses blocks of 16 channels whose largest magnitude is below 0.006, "
        "and saturates above 2,688: give calibrated scales");
  }
}

TensorModel MakeTensor(const TensorFormat& format, int heads, int dim, const Model& model) {
  TensorModel tensor;
  tensor.layout = MakePartLayout(format.codec, heads, dim, model.page_tokens);
  tensor.residual = format.residual;
  tensor.source = model.request.spec.source;
  if (TakesScale(tensor)) tensor.scales.assign(heads, 1.0f);
  return tensor;
}

// How the source's bytes are kept as they are.
Format SourceFormat(ElementType source) {
  if (kernels::IsFp8(source)) return {.kind = Format::Kind::kFp8, .element = source};
  if (source == ElementType::kQ8)
    return {.kind = Format::Kind::kPlain, .codec = kernels::CodecId::kLlamaQ8};
  if (source == ElementType::kQ4)
    return {.kind = Format::Kind::kPlain, .codec = kernels::CodecId::kLlamaQ4};
  return {};
}

// A source that is quantized already is kept.
absl::StatusOr<Format> FormatFor(const ModelRequest& request) {
  KVT_ASSIGN_OR_RETURN(const Format asked, ParseFormat(request.policy.kv_cache_dtype));
  const Format kept = SourceFormat(request.spec.source);
  if (kept == Format{} || asked == kept) return asked;
  if (asked == Format{}) return kept;
  return Error(
      Reason::kFormatRefused,
      fmt::format("policy.kv_cache_dtype is {}; a source of {} is kept as it is: want auto or {}",
                  FormatName(asked), kernels::ElementName(request.spec.source), FormatName(kept)));
}

absl::Status CheckLayer(const LayerModel& layer, std::size_t index) {
  const auto field = [&](const char* name) {
    return fmt::format("spec.layers[{}].{}", index, name);
  };
  if (layer.k.layout.codec.id == kernels::CodecId::kMlaFp8 &&
      (layer.spec.kind != LayerKind::kMla || layer.spec.v_head_dim != 0)) {
    return Error(Reason::kFormatRefused,
                 fmt::format("{} has V of its own; {} needs mla layers without V", field("kind"),
                             layer.format));
  }
  KVT_RETURN_IF_ERROR(CheckTensor(layer.k, field("k_head_dim"), layer.format));
  return CheckTensor(layer.v, field("v_head_dim"), layer.format);
}

// Puts a layer, the `index`th, to those that keep what the same window sees.
absl::Status KeepWindow(std::size_t index, LayerModel& layer, Model& model) {
  if (layer.spec.kind != LayerKind::kSlidingWindow) return absl::OkStatus();
  auto window =
      std::find_if(model.windows.begin(), model.windows.end(),
                   [&](const Window& candidate) { return candidate.tokens == layer.spec.window; });
  if (window == model.windows.end()) {
    if (model.windows.size() == kMaxWindows) {
      return Error(Reason::kInvalidField,
                   fmt::format("spec.layers[{}].window is {}; with policy.retention window want at "
                               "most {} different ones",
                               index, layer.spec.window, kMaxWindows));
    }
    model.windows.push_back({.tokens = layer.spec.window,
                             .hash_block_tokens = model.request.spec.hash_block_tokens,
                             .layers = {}});
    window = model.windows.end() - 1;
  }
  window->layers.push_back(index);
  layer.window_index = static_cast<int>(window - model.windows.begin());
  return absl::OkStatus();
}

using LayerFormats = std::vector<std::pair<TensorFormat, TensorFormat>>;

LayerFormats FormatsOf(const Format& format, const std::vector<bool>& skipped, ElementType source,
                       int page_tokens) {
  LayerFormats formats;
  for (const bool skip : skipped) {
    const Format own = skip ? SourceFormat(source) : format;
    formats.emplace_back(KFormat(own, source, page_tokens), VFormat(own, source, page_tokens));
  }
  return formats;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Model>> ResolveModel(ModelRequest request,
                                                          int default_page_tokens) {
  KVT_RETURN_IF_ERROR(CheckSpec(request.spec));
  KVT_ASSIGN_OR_RETURN(const Format format, FormatFor(request));
  request.policy.kv_cache_dtype = FormatName(format);  // "fp8" and "fp8_e4m3" are one model
  KVT_ASSIGN_OR_RETURN(const std::vector<bool> skipped, SkippedLayers(request));
  std::vector<std::string>& skip_layers = request.policy.skip_layers;
  std::sort(skip_layers.begin(), skip_layers.end());
  skip_layers.erase(std::unique(skip_layers.begin(), skip_layers.end()), skip_layers.end());

  // What has no meaning is not in the id.
  const auto slides = [](const LayerSpec& layer) {
    return layer.kind == LayerKind::kSlidingWindow;
  };
  const bool no_window =
      request.policy.retention == Retention::kWindow &&
      std::none_of(request.spec.layers.begin(), request.spec.layers.end(), slides);
  if (no_window) request.policy.retention = Retention::kAll;
  for (LayerScales& scales : request.scales) {
    const auto layer = static_cast<std::size_t>(scales.layer);
    if (layer < request.spec.layers.size() && request.spec.layers[layer].v_head_dim == 0)
      scales.v.clear();
  }
  std::stable_sort(request.scales.begin(), request.scales.end(),
                   [](const LayerScales& a, const LayerScales& b) { return a.layer < b.layer; });

  auto model = std::make_shared<Model>();
  model->id = ModelIdOf(request);
  model->request = std::move(request);
  model->format = FormatName(format);
  if (model->request.max_tokens > 0) model->max_tokens = model->request.max_tokens;
  const ElementType source = model->request.spec.source;
  // Groups that are a page long are as long as the pages turn out: 16 tokens will do at first.
  const int multiple = PageMultiple(FormatsOf(format, skipped, source, kPageTokensMultiple));
  KVT_ASSIGN_OR_RETURN(model->page_tokens, ResolvePageTokens(model->request.page_tokens,
                                                             default_page_tokens, multiple));
  const LayerFormats formats = FormatsOf(format, skipped, source, model->page_tokens);
  for (std::size_t i = 0; i < formats.size(); ++i) {
    LayerModel layer{.spec = model->request.spec.layers[i],
                     .format = skipped[i] ? FormatName(SourceFormat(source)) : model->format};
    layer.k = MakeTensor(formats[i].first, layer.spec.kv_heads, layer.spec.k_head_dim, *model);
    layer.v = MakeTensor(formats[i].second, layer.spec.kv_heads, layer.spec.v_head_dim, *model);
    KVT_RETURN_IF_ERROR(CheckLayer(layer, i));
    model->source_bytes_per_token += layer.source_bytes();
    if (model->request.policy.retention == Retention::kWindow) {
      KVT_RETURN_IF_ERROR(KeepWindow(i, layer, *model));
    }
    model->layers.push_back(std::move(layer));
  }
  KVT_RETURN_IF_ERROR(ApplyScales(model->request, *model));
  DescribeScales(model->request, *model);
  AddNotices(format, *model);
  if (no_window) {
    model->notices.push_back(
        "policy.retention is window, and no layer is sliding_window: all tokens are kept");
  }
  return std::shared_ptr<const Model>(std::move(model));
}

}  // namespace kvtier::cachestore
