#include "client/cli/cli.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "client/cli/command.h"
#include "client/cli/json.h"
#include "kvtier/version.h"

namespace kvtier::client {

namespace {

std::string Commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return fmt::format("commands are {}; kvtier COMMAND --help tells their flags\n",
                     fmt::join(names, ", "));
}

}  // namespace

int RunCli(std::vector<std::string> arguments, Terminal& terminal) {
  CLI::App app("Stores and reads KV caches in a kvtier server", "kvtier");
  app.set_version_flag("--version", fmt::format("kvtier {} ({})", kVersion, kRevision));
  app.require_subcommand(0, 1);  // a wrong one is named, and none is answered below
  const std::vector<Command> commands = {AddPut(app, terminal),     AddGet(app, terminal),
                                         AddList(app, terminal),    AddDescribe(app, terminal),
                                         AddRemove(app, terminal),  AddCapacity(app, terminal),
                                         AddScales(app, terminal),  AddPlan(app, terminal),
                                         AddFormats(app, terminal), AddDrain(app, terminal)};
  for (const std::string& argument : arguments) {
    if (IsUtf8(argument)) continue;
    terminal.err << "kvtier: an argument is not UTF-8 text: " << JsonLine(argument);
    return kExitBadUsage;
  }
  std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 takes a vector in
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error, terminal.out, terminal.err);  // --help
    const auto chosen = app.get_subcommands();
    terminal.err << fmt::format("kvtier{}: {}\n", chosen.empty() ? "" : " " + chosen[0]->get_name(),
                                error.what());
    if (chosen.empty()) terminal.err << Commands(app);
    return kExitBadUsage;
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  terminal.err << "kvtier: a command is missing\n" << Commands(app);
  return kExitBadUsage;
}

}  // namespace kvtier::client
