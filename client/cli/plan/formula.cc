#include "client/cli/plan/formula.h"

#include <fmt/format.h>

#include <algorithm>

#include "client/cli/table.h"

namespace kvtier::client {
namespace {

using cachestore::LayerKind;
using cachestore::LayerSpec;

bool Alike(const LayerSpec& a, const LayerSpec& b) {
  return a.kind == b.kind && a.window == b.window && a.kv_heads == b.kv_heads &&
         a.k_head_dim == b.k_head_dim && a.v_head_dim == b.v_head_dim;
}

std::string Number(std::int64_t n) { return WithThousands(static_cast<std::uint64_t>(n)); }

std::string Bytes(std::int64_t bytes) {
  std::string text = Number(bytes) + " bytes";
  if (bytes >= 1024) text += " = " + FormatBytes(static_cast<std::uint64_t>(bytes));
  return text;
}

// A sum over groups, a line each.
std::string Sum(const std::vector<LayerGroup>& groups, std::int64_t requests, int element_bytes) {
  const std::string factor = fmt::format("     = {} * {} * (", Number(requests), element_bytes);
  std::string text = "M_KV = B * b * sum of L * T * H_KV * (d_K + d_V)\n";
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const LayerGroup& group = groups[i];
    text += fmt::format("{}{} * {} * {} * ({} + {})",
                        i == 0 ? factor : std::string(factor.size() - 2, ' ') + "+ ", group.layers,
                        Number(group.tokens), group.layer.kv_heads, group.layer.k_head_dim,
                        group.layer.v_head_dim);
    text += i + 1 < groups.size() ? "\n" : ")";
  }
  return text;
}

}  // namespace

std::vector<LayerGroup> GroupLayers(const cachestore::ModelSpec& spec, std::int64_t tokens,
                                    cachestore::Retention retention) {
  std::vector<LayerGroup> groups;
  for (const LayerSpec& layer : spec.layers) {
    auto group = std::find_if(groups.begin(), groups.end(), [&](const LayerGroup& candidate) {
      return Alike(candidate.layer, layer);
    });
    if (group == groups.end()) {
      const bool cut =
          retention == cachestore::Retention::kWindow && layer.kind == LayerKind::kSlidingWindow;
      groups.push_back(
          {.layer = layer, .tokens = cut ? std::min<std::int64_t>(tokens, layer.window) : tokens});
      group = groups.end() - 1;
    }
    ++group->layers;
  }
  return groups;
}

KvFormula FormulaOf(const cachestore::ModelSpec& spec, const std::vector<LayerGroup>& groups,
                    std::int64_t requests) {
  const int element_bytes = kernels::ElementBytes(spec.source);
  KvFormula formula;
  for (const LayerGroup& group : groups) {
    const LayerSpec& layer = group.layer;
    formula.bytes += requests * element_bytes * group.layers * group.tokens * layer.kv_heads *
                     (layer.k_head_dim + layer.v_head_dim);
  }
  const LayerGroup& first = groups.front();
  const LayerSpec& layer = first.layer;
  const bool no_v = layer.v_head_dim == 0;
  if (groups.size() == 1 && (no_v || layer.v_head_dim == layer.k_head_dim)) {
    formula.text = fmt::format(
        "M_KV = {0}L * B * T * H_KV * d * b\n     = {0}{1} * {2} * {3} * {4} * {5} * {6}",
        no_v ? "" : "2 * ", first.layers, Number(requests), Number(first.tokens), layer.kv_heads,
        layer.k_head_dim, element_bytes);
  } else {
    formula.text = Sum(groups, requests, element_bytes);
  }
  formula.text += "\n     = " + Bytes(formula.bytes);
  return formula;
}

}  // namespace kvtier::client
