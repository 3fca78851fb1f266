#include <fmt/format.h>

#include <array>
#include <fstream>
#include <vector>

#include "cachestore/base/status_macros.h"
#include "client/cli/plan/figures.h"
#include "client/cli/plan/gnuplot.h"

namespace kvtier::client {
namespace {

constexpr int kPointsPerDoubling = 8;
constexpr std::array kColors = {"#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b",
                                "#17becf", "#9c755f", "#7f7f7f", "#d37295", "#8c8c00"};

// Formats that take the same bytes at each length are one curve.
struct Curve {
  std::string names;
  std::string points;  // a line each: tokens, mean, least and most ratio
};

absl::StatusOr<std::vector<Curve>> CurvesOf(const PlanFigures& plan) {
  std::vector<Curve> curves;
  for (const FormatFigures& format : plan.formats) {
    if (!format.refused.empty()) continue;
    std::string points;
    for (const std::int64_t tokens :
         ContextLengths(*plan.flags, plan.model->config, kPointsPerDoubling)) {
      KVT_ASSIGN_OR_RETURN(const FormatFigures figures,
                           FiguresOf(*plan.flags, *plan.model, format.format, tokens));
      const cachestore::Phases& phases = figures.phases;
      points += fmt::format("{} {:.5f} {:.5f} {:.5f}\n", tokens, phases.mean_ratio,
                            phases.least_ratio, phases.most_ratio);
    }
    bool drawn = false;
    for (Curve& curve : curves) {
      if (curve.points != points) continue;
      curve.names += ", " + format.format;
      drawn = true;
    }
    if (!drawn) curves.push_back({format.format, points});
  }
  return curves;
}

// Labels at 512, 1K, 2K and so on, up to the longest length there may be.
std::string Ticks() {
  std::string ticks = "set xtics ('512' 512";
  for (std::int64_t k = 1; k * 1024 <= kMaxPlannedTokens; k *= 2)
    ticks += fmt::format(", '{}K' {}", k, k * 1024);
  return ticks + ")\n";
}

std::string Title(const PlanFigures& plan) {
  const bool window = plan.flags->kept() == cachestore::Retention::kWindow;
  return GnuplotString(fmt::format("{}: {} bytes to all bytes stored{}", plan.model->name,
                                   kernels::ElementName(plan.model->spec.source),
                                   window ? ", windowed layers keep what their window sees" : "")) +
         ".\"\\n\"." +
         GnuplotString("lines: mean over the phases of pages and residual; bands: worst to best");
}

std::string Script(const PlanFigures& plan, const std::vector<Curve>& curves, bool svg) {
  std::string script = fmt::format("set terminal {} noenhanced size 960,640 font 'sans,12' {}\n",
                                   svg ? "svg" : "pngcairo", "background rgb 'white'");
  script += fmt::format("set title {}\n", Title(plan));
  script += Ticks();
  const auto lengths = ContextLengths(*plan.flags, plan.model->config, kPointsPerDoubling);
  // A little beyond the last, or rounding loses its label.
  script += fmt::format("set xrange [{}:{}]\n", 0.999 * static_cast<double>(lengths.front()),
                        1.001 * static_cast<double>(lengths.back()));
  script +=
      "set xlabel \"context length, tokens\\n\"\n"  // a line between it and the key
      "set ylabel 'compression ratio'\n"
      "set logscale x 2\n"
      "set yrange [0:]\n"
      "set grid lt 1 lw 1 lc rgb '#e4e4e4' back\n"
      "set border 3\n"
      "set tics nomirror\n"
      "set key outside center bottom horizontal maxcols 3 Left reverse width -2\n"
      "set style fill transparent solid 0.25 noborder\n";
  std::string plot = "plot ";
  for (std::size_t i = 0; i < curves.size(); ++i) {
    script += fmt::format("$curve{} << EOD\n{}EOD\n", i, curves[i].points);
    plot += fmt::format(
        "{0}$curve{1} using 1:3:4 with filledcurves lc rgb '{2}' notitle, "
        "$curve{1} using 1:2 with lines lw 2 lc rgb '{2}' title {3}",
        i == 0 ? "" : ", ", i, kColors[i % kColors.size()], GnuplotString(curves[i].names));
  }
  return script + plot + "\n";
}

}  // namespace

absl::Status DrawPlan(const PlanFigures& plan) {
  const std::string& path = plan.flags->plot;
  const bool svg = path.ends_with(".svg");
  if (!svg && !path.ends_with(".png")) {
    return absl::InvalidArgumentError(
        fmt::format("--plot is {}; want a name that ends in .svg or .png", path));
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<Curve> curves, CurvesOf(plan));
  KVT_ASSIGN_OR_RETURN(const std::string drawing, RunGnuplot(Script(plan, curves, svg)));
  std::ofstream file(path, std::ios::binary);
  file << drawing;
  file.close();
  if (!file) return absl::InvalidArgumentError(fmt::format("--plot: {} cannot be written", path));
  return absl::OkStatus();
}

}  // namespace kvtier::client
