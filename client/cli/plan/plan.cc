#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <utility>

#include "client/cli/command.h"
#include "client/cli/plan/figures.h"
#include "client/cli/plan/flags.h"

namespace kvtier::client {
namespace {

// A format that was asked for must be possible; of the formats that there are, those that aren't
// are told.
absl::StatusOr<PlanFigures> PlanFormats(const PlanFlags& flags, const PlannedModel& model) {
  PlanFigures plan{.flags = &flags, .model = &model, .formats = {}};
  bool any = false;
  absl::Status refused;
  for (const std::string& format : FormatsOf(flags, model.config)) {
    absl::StatusOr<FormatFigures> figures = FiguresOf(flags, model, format, flags.tokens);
    if (!figures.ok()) return figures.status();
    if (figures->refused.empty()) {
      any = true;
    } else if (refused.ok()) {
      refused = absl::InvalidArgumentError(figures->refused);
    }
    plan.formats.push_back(*std::move(figures));
  }
  if (!refused.ok() && (!any || !flags.kv_cache_dtype.empty())) return refused;
  return plan;
}

int RunPlan(const Session& session, const PlanFlags& flags) {
  const absl::StatusOr<PlannedModel> model = ModelOf(flags);
  if (!model.ok()) return session.BadUsage(model.status());
  const absl::StatusOr<PlanFigures> plan = PlanFormats(flags, *model);
  if (!plan.ok()) return session.BadUsage(plan.status());
  if (!flags.plot.empty()) {
    if (const absl::Status drawn = DrawPlan(*plan); !drawn.ok()) return session.BadUsage(drawn);
  }
  if (flags.csv) {
    const absl::StatusOr<std::string> csv = PlanCsv(*plan);
    if (!csv.ok()) return session.BadUsage(csv.status());
    session.terminal().out << *csv;
  } else {
    session.terminal().out << (session.flags().json ? PlanJson(*plan) : PlanText(*plan));
  }
  return kExitOk;
}

}  // namespace

Command AddPlan(CLI::App& parent, Terminal& terminal) {
  const NewCommand command = AddCommand(parent, terminal, "plan",
                                        "Compute what a cache takes, format by format; no server");
  const auto flags = std::make_shared<PlanFlags>();
  AddPlanFlags(*command.app, *flags);
  command.app->get_option("--csv")->excludes(command.app->get_option("--json"));
  return {command.app, [session = command.session, flags] { return RunPlan(*session, *flags); }};
}

}  // namespace kvtier::client
