#include <fmt/format.h>

#include <map>
#include <sstream>

#include "client/cli/plan/figures.h"
#include "client/cli/plan/formula.h"
#include "client/cli/table.h"

namespace kvtier::client {
namespace {

using Align = Table::Align;

constexpr std::size_t kWidth = 100;  // of a terminal

std::string Number(std::int64_t n) { return WithThousands(static_cast<std::uint64_t>(n)); }
std::string Size(std::int64_t bytes) { return FormatBytes(static_cast<std::uint64_t>(bytes)); }
std::string Plural(std::int64_t n, const std::string& noun) {
  return Number(n) + " " + noun + (n == 1 ? "" : "s");
}

// Lines of kWidth at most, those after the first indented.
std::string Folded(const std::string& text) {
  std::string folded;
  std::size_t column = 0;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (column > 0 && column + 1 + word.size() > kWidth) {
      folded += "\n  ";
      column = 2;
    } else if (column > 0) {
      folded += " ";
      ++column;
    }
    folded += word;
    column += word.size();
  }
  return folded + "\n";
}

std::string ShapeOf(const LayerGroup& group) {
  const cachestore::LayerSpec& layer = group.layer;
  std::string text =
      fmt::format("{} of {} x ", Plural(group.layers, "layer"), Plural(layer.kv_heads, "KV head"));
  if (layer.v_head_dim == layer.k_head_dim) {
    text += fmt::format("{}", layer.k_head_dim);
  } else if (layer.v_head_dim == 0) {
    text += fmt::format("{} of K, no V", layer.k_head_dim);
  } else {
    text += fmt::format("{} of K, {} of V", layer.k_head_dim, layer.v_head_dim);
  }
  if (layer.kind == cachestore::LayerKind::kMla) text += " (MLA)";
  if (layer.window > 0) text += fmt::format(", window {}", Plural(layer.window, "token"));
  return text + "\n";
}

std::string Head(const PlanFigures& plan) {
  const PlanFlags& flags = *plan.flags;
  const cachestore::ModelSpec& spec = plan.model->spec;
  const auto groups = GroupLayers(spec, flags.tokens, flags.kept());
  std::string text =
      fmt::format("{}, {}, {} of {}\n", plan.model->name, kernels::ElementName(spec.source),
                  Plural(flags.requests, "request"), Plural(flags.tokens, "token"));
  bool windowed = false;
  for (const LayerGroup& group : groups) {
    text += ShapeOf(group);
    windowed |= group.layer.window > 0;
  }
  text += "\n" + FormulaOf(spec, groups, flags.requests).text + "\n";
  if (!windowed) return text;
  return text + "\n" +
         Folded(flags.kept() == cachestore::Retention::kWindow
                    ? "sliding-window layers keep the pages that their window sees; by the formula "
                      "that is min(T, window) tokens"
                    : "sliding-window layers keep all tokens; --retention window plans without "
                      "those that no window sees");
}

std::string BytesTable(const PlanFigures& plan) {
  Table table({{"FORMAT"},
               {"STORED", Align::kRight},
               {"CODES", Align::kRight},
               {"SCALES", Align::kRight},
               {"RESIDUAL", Align::kRight},
               {"HEADER", Align::kRight},
               {"SLACK", Align::kRight}});
  for (const FormatFigures& format : plan.formats) {
    if (!format.refused.empty()) {
      table.AddRow({format.format, "refused"});
      continue;
    }
    const cachestore::MemoryUse& use = format.sealed.use;
    table.AddRow({format.format, Size(format.sealed.allocated), Size(use.codes), Size(use.scales),
                  Size(use.residual), Size(use.header), Size(format.sealed.slack())});
  }
  return table.ToString();
}

std::string RatioTable(const PlanFigures& plan) {
  Table table({{"FORMAT"},
               {"A REQUEST", Align::kRight},
               {"BYTES/TOKEN", Align::kRight},
               {"BITS", Align::kRight},
               {"RATIO", Align::kRight},
               {"WORST PHASE", Align::kRight},
               {"ASYMPTOTIC", Align::kRight},
               {"MOST RESIDUAL", Align::kRight}});
  for (const FormatFigures& format : plan.formats) {
    if (!format.refused.empty()) continue;
    table.AddRow({format.format, Size(format.sealed.allocated / plan.flags->requests),
                  fmt::format("{:.1f}", format.bytes_per_token),
                  fmt::format("{:.2f}", format.bits_per_element),
                  FormatRatio(format.compression_ratio), FormatRatio(format.phases.least_ratio),
                  FormatRatio(format.asymptote.compression_ratio),
                  Size(format.phases.most_residual)});
  }
  return table.ToString();
}

std::string FitsTable(const PlanFigures& plan) {
  const PlanFlags& flags = *plan.flags;
  Table table({{"FORMAT"},
               {"LONGEST CONTEXT", Align::kRight},
               {"REQUESTS", Align::kRight},
               {"KV CACHE SIZE", Align::kRight},
               {"CONCURRENCY", Align::kRight}});
  for (const FormatFigures& format : plan.formats) {
    if (!format.refused.empty()) continue;
    const Fits& fits = format.fits;
    table.AddRow({format.format,
                  fits.tokens == cachestore::kAnyTokens ? "any" : Number(fits.tokens),
                  Number(fits.requests), Number(fits.capacity.tokens),
                  fmt::format("{:.2f}x", fits.capacity.concurrency)});
  }
  return Folded(fmt::format("what {} hold: the longest context of {}, or so many requests of {}; "
                            "KV cache size and concurrency as kvtierd's capacity line says them",
                            Size(flags.memory), Plural(flags.requests, "request"),
                            Plural(flags.tokens, "token"))) +
         "\n" + table.ToString();
}

// Notices and refusals, each once with the formats that it is of.
std::string Remarks(const PlanFigures& plan) {
  std::vector<std::string> order;
  std::map<std::string, std::string> formats;
  const auto add = [&](const std::string& remark, const std::string& format) {
    std::string& names = formats[remark];
    if (names.empty()) order.push_back(remark);
    names += (names.empty() ? "" : ", ") + format;
  };
  for (const std::string& notice : plan.model->config.notices) add(notice, plan.model->name);
  for (const FormatFigures& format : plan.formats) {
    if (!format.refused.empty()) {
      add("refused: " + format.refused, format.format);
      continue;
    }
    for (const std::string& notice : format.model->notices) add(notice, format.format);
  }
  std::string text;
  for (const std::string& remark : order) text += Folded(formats[remark] + ": " + remark);
  return text.empty() ? text : "\n" + text;
}

}  // namespace

std::string PlanText(const PlanFigures& plan) {
  std::string text = Head(plan) + "\n" + BytesTable(plan) + "\n" + RatioTable(plan);
  std::int64_t period = 1;
  for (const FormatFigures& format : plan.formats) period = std::max(period, format.phases.period);
  text +=
      "\n" + Folded(fmt::format(
                 "bits: of an element, everything included; ratio: {} bytes to stored bytes; worst "
                 "phase: the least ratio, and the most residual, from here to {} tokens on; "
                 "asymptotic: without the residual, which does not grow with length",
                 kernels::ElementName(plan.model->spec.source), Number(period)));
  if (plan.flags->memory > 0) text += "\n" + FitsTable(plan);
  return text + Remarks(plan);
}

}  // namespace kvtier::client
