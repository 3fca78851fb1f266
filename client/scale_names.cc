#include "client/scale_names.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace kvtier::client {
namespace {

using Side = ScaleSide;

constexpr std::array kNamings = {
    ScaleNaming{"LLM Compressor", "k_scale", Side::kK},
    ScaleNaming{"LLM Compressor", "v_scale", Side::kV},
    ScaleNaming{"LLM Compressor", "q_scale", Side::kQ},
    ScaleNaming{"vLLM, deprecated", "kv_scale", Side::kKv},
    ScaleNaming{"vLLM at run time", "attn.k_scale", Side::kK},
    ScaleNaming{"vLLM at run time", "attn.v_scale", Side::kV},
    ScaleNaming{"vLLM at run time", "attn.q_scale", Side::kQ},
    ScaleNaming{"vLLM, MLA", "mla_attn.k_scale", Side::kK},
    ScaleNaming{"vLLM, MLA", "mla_attn.v_scale", Side::kV},
    ScaleNaming{"vLLM, MLA", "mla_attn.q_scale", Side::kQ},
    ScaleNaming{"vLLM at run time, MLA", "mla_attn.mla_attn.k_scale", Side::kK},
    ScaleNaming{"vLLM at run time, MLA", "mla_attn.mla_attn.v_scale", Side::kV},
    ScaleNaming{"vLLM at run time, MLA", "mla_attn.mla_attn.q_scale", Side::kQ},
    ScaleNaming{"ModelOpt", "k_proj.k_scale", Side::kK},
    ScaleNaming{"ModelOpt", "v_proj.v_scale", Side::kV},
    ScaleNaming{"ModelOpt", "q_proj.q_scale", Side::kQ},
    ScaleNaming{"ModelOpt, fused", "qkv_proj.k_scale", Side::kK},
    ScaleNaming{"ModelOpt, fused", "qkv_proj.v_scale", Side::kV},
    ScaleNaming{"ModelOpt, fused twice", "qkqkv_proj.k_scale", Side::kK},
    ScaleNaming{"ModelOpt, fused twice", "qkqkv_proj.v_scale", Side::kV},
    ScaleNaming{"HYV3", "q.scale", Side::kQ},
    ScaleNaming{"HYV3", "k_cache.scale", Side::kK},
    ScaleNaming{"HYV3", "v_cache.scale", Side::kV},
    ScaleNaming{"Quark", "k_proj.output_scale", Side::kK},
    ScaleNaming{"Quark", "v_proj.output_scale", Side::kV},
    ScaleNaming{"Quark", "q_proj.output_scale", Side::kQ},
    ScaleNaming{"TensorRT-LLM", "kv_cache_scaling_factor", Side::kKv},
};

constexpr std::array kModules = {"self_attn", "attn", "attention", "self_attention", "mixer"};

// What stands before "layers" where they are the language model's.
constexpr std::array kPrefixes = {"model",    "language_model", "text_model", "llm",
                                  "backbone", "transformer",    "decoder",    "module"};

constexpr std::array kSuspects = {".k_scale", ".v_scale", ".kv_scale", "_cache.scale",
                                  "kv_cache_scaling_factor"};

// Takes `name` up to its next dot, or all of it.
std::string_view NextWord(std::string_view& name) {
  const std::size_t dot = std::min(name.find('.'), name.size());
  const std::string_view word = name.substr(0, dot);
  name.remove_prefix(std::min(dot + 1, name.size()));
  return word;
}

template <class Words>
bool IsOneOf(std::string_view word, const Words& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::optional<int> ParseIndex(std::string_view digits) {
  if (digits.empty() || digits.size() > 5) return std::nullopt;
  int index = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return std::nullopt;
    index = index * 10 + (c - '0');
  }
  return index;
}

}  // namespace

std::span<const ScaleNaming> ScaleNamings() { return kNamings; }

std::span<const char* const> AttentionModules() { return kModules; }

std::optional<ScaleName> ParseScaleName(const std::string& name) {
  std::string_view rest = name;
  std::string_view word = NextWord(rest);
  while (IsOneOf(word, kPrefixes)) word = NextWord(rest);
  if (word != "layers") return std::nullopt;
  const std::optional<int> layer = ParseIndex(NextWord(rest));
  if (!layer) return std::nullopt;
  const auto find = [](std::string_view wanted) {
    return std::find_if(kNamings.begin(), kNamings.end(),
                        [wanted](const ScaleNaming& row) { return row.name == wanted; });
  };
  auto row = find(rest);
  if (row == kNamings.end() && IsOneOf(NextWord(rest), kModules)) row = find(rest);
  if (row == kNamings.end()) return std::nullopt;
  return ScaleName{*layer, row->side};
}

bool LooksLikeScale(const std::string& name) {
  return std::any_of(kSuspects.begin(), kSuspects.end(),
                     [&name](const char* ending) { return name.ends_with(ending); });
}

}  // namespace kvtier::client
