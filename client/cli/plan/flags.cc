#include "client/cli/plan/flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "cachestore/base/status_macros.h"
#include "cachestore/model/format.h"
#include "client/model_source.h"
#include "client/resolve_model.h"
#include "kernels/codec.h"

namespace kvtier::client {
namespace {

using cachestore::ElementType;
using cachestore::LayerKind;
using cachestore::LayerSpec;

constexpr std::int64_t kMaxRequests = 1 << 30;
constexpr std::int64_t kMaxMemory = std::int64_t{1} << 60;
constexpr std::int64_t kShortestContext = 512;

const std::map<std::string, ElementType> kSources = {{"bfloat16", ElementType::kBf16},
                                                     {"float16", ElementType::kFp16},
                                                     {"float32", ElementType::kFp32}};

absl::StatusOr<PlannedModel> ModelFromConfig(const PlanFlags& flags) {
  PlannedModel model;
  KVT_ASSIGN_OR_RETURN(model.config, ReadModelConfig(flags.model));
  const v1::ModelSpec& spec = model.config.spec;
  model.name = spec.name();
  for (const v1::LayerSpec& layer : spec.layers()) model.spec.layers.push_back(LayerSpecOf(layer));
  if (spec.source_dtype() == v1::DTYPE_FP16) model.spec.source = ElementType::kFp16;
  if (spec.source_dtype() == v1::DTYPE_FP32 && flags.dtype.empty()) {
    model.config.notices.emplace_back(
        "the config's dtype is float32; engines keep its cache in 16 bit, and so does this plan; "
        "--dtype float32 plans 32 bit");
  }
  return model;
}

absl::StatusOr<PlannedModel> ModelFromFlags(const PlanFlags& flags) {
  if (flags.layers < 1 || flags.kv_heads < 1 || flags.head_dim < 1) {
    return absl::InvalidArgumentError(
        "the model is missing: --layers, --kv-heads and --head-dim, or --model, are needed");
  }
  const int v_head_dim = flags.v_head_dim < 0 ? flags.head_dim : flags.v_head_dim;
  if (v_head_dim == 0 && flags.window > 0) {
    return absl::InvalidArgumentError(fmt::format(
        "--window is {} with --v-head-dim 0, which says MLA; want a window or MLA", flags.window));
  }
  LayerSpec full{.kind = v_head_dim == 0 ? LayerKind::kMla : LayerKind::kFull,
                 .kv_heads = flags.kv_heads,
                 .k_head_dim = flags.head_dim,
                 .v_head_dim = v_head_dim};
  LayerSpec windowed = full;
  windowed.kind = LayerKind::kSlidingWindow;
  windowed.window = flags.window;
  PlannedModel model{.name = "model", .spec = {}, .config = {}};
  for (int i = 1; i <= flags.layers; ++i) {
    const bool is_full = flags.window == 0 || (flags.full_every > 0 && i % flags.full_every == 0);
    model.spec.layers.push_back(is_full ? full : windowed);
  }
  return model;
}

void AddShapeFlags(CLI::App& app, PlanFlags& flags) {
  CLI::Option* model = app.add_option("--model", flags.model,
                                      "Hugging Face config.json; or the shape by the flags below");
  const auto add = [&](const char* name, int& into, int least, int most, const char* help) {
    return app.add_option(name, into, help)->check(CLI::Range(least, most))->excludes(model);
  };
  add("--layers", flags.layers, 1, cachestore::kMaxLayers, "Layers of the model");
  add("--kv-heads", flags.kv_heads, 1, cachestore::kMaxHeads, "KV heads of a layer");
  add("--head-dim", flags.head_dim, 1, kernels::kMaxHeadDim, "Dim of a head, of K and of V");
  add("--v-head-dim", flags.v_head_dim, 0, kernels::kMaxHeadDim,
      "Dim of V's heads if it is another; 0: no V, as with MLA");
  CLI::Option* window =
      add("--window", flags.window, 1, 1 << 30, "Tokens that a layer sees: sliding-window layers");
  add("--full-every", flags.full_every, 1, cachestore::kMaxLayers,
      "Each n-th layer sees everything; none if not given")
      ->needs(window);
  app.add_option("--dtype", flags.dtype,
                 "Source dtype: bfloat16, float16, float32; the config's 16-bit one, or bfloat16")
      ->check(CLI::IsMember(kSources));
}

}  // namespace

void AddPlanFlags(CLI::App& app, PlanFlags& flags) {
  AddShapeFlags(app, flags);
  app.add_option("--tokens", flags.tokens, "Tokens of a request")
      ->check(CLI::Range(std::int64_t{1}, kMaxPlannedTokens))
      ->capture_default_str();
  app.add_option("--requests", flags.requests, "Requests held at once")
      ->check(CLI::Range(std::int64_t{1}, kMaxRequests))
      ->capture_default_str();
  app.add_option("--memory", flags.memory, "Budget, 80GiB say: also tells what fits into it")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(CLI::Range(std::int64_t{1}, kMaxMemory));
  app.add_option("--page-tokens", flags.page_tokens, "Tokens of a page; 0: 128")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--kv-cache-dtype", flags.kv_cache_dtype,
                 "Format; the flag may be given again to compare; all of them if not given")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--kv-cache-dtype-skip-layers", flags.skip_layers,
                 "Layers kept in the source dtype: indices and/or sliding_window, by commas")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--retention", flags.retention,
                 "What sliding-window layers keep: all tokens, or the pages that their window sees")
      ->check(CLI::IsMember({"all", "window"}))
      ->capture_default_str();
  app.add_option("--context-lengths", flags.context_lengths,
                 "Of --csv and --plot, by commas; from 512 to the model's longest if not given")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, kMaxPlannedTokens))
      ->allow_extra_args(false);
  app.add_flag("--csv", flags.csv, "Print a row for each format and context length");
  app.add_option("--plot", flags.plot,
                 "Also draw the compression ratio over context length into this .svg or .png file, "
                 "by gnuplot");
}

absl::StatusOr<PlannedModel> ModelOf(const PlanFlags& flags) {
  KVT_ASSIGN_OR_RETURN(PlannedModel model,
                       flags.model.empty() ? ModelFromFlags(flags) : ModelFromConfig(flags));
  model.spec.name = "plan";  // a file may be called what no model may
  if (!flags.dtype.empty()) model.spec.source = kSources.at(flags.dtype);
  return model;
}

std::vector<std::string> FormatsOf(const PlanFlags& flags, const ModelConfig& config) {
  std::vector<std::string> formats;
  for (const std::string& asked :
       flags.kv_cache_dtype.empty() ? cachestore::FormatNames() : flags.kv_cache_dtype) {
    const std::string format = ResolveAuto(config, asked);
    if (std::find(formats.begin(), formats.end(), format) == formats.end())
      formats.push_back(format);
  }
  return formats;
}

std::vector<std::int64_t> ContextLengths(const PlanFlags& flags, const ModelConfig& config,
                                         int per_doubling) {
  if (!flags.context_lengths.empty()) {
    const std::set<std::int64_t> asked(flags.context_lengths.begin(), flags.context_lengths.end());
    return {asked.begin(), asked.end()};
  }
  const std::int64_t longest = config.max_position_embeddings == 0
                                   ? kDefaultLongestContext
                                   : static_cast<std::int64_t>(std::min<std::uint64_t>(
                                         config.max_position_embeddings, kMaxPlannedTokens));
  std::vector<std::int64_t> lengths;
  for (int i = 0;; ++i) {
    const std::int64_t length =
        std::llround(kShortestContext * std::exp2(static_cast<double>(i) / per_doubling));
    if (length >= longest) break;
    lengths.push_back(length);
  }
  lengths.push_back(longest);
  return lengths;
}

}  // namespace kvtier::client
