#include "service/config/flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "absl/strings/str_replace.h"

namespace kvtier::service {
namespace {

// The arguments in the order that CLI11 takes a vector in: the last first.
std::vector<std::string> Arguments(int argc, const char* const* argv) {
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    // CLI11 takes `--flag=` for a flag whose value comes next.
    if (argument.size() > 3 && argument.compare(0, 2, "--") == 0 &&
        argument.find('=') == argument.size() - 1) {
      arguments.push_back(argument.substr(0, argument.size() - 1));
      arguments.emplace_back();
    } else {
      arguments.push_back(argument);
    }
  }
  std::reverse(arguments.begin(), arguments.end());
  return arguments;
}

std::string Description(const Field& field) {
  const std::string value = field.type.show(Config());
  return fmt::format("{}\nDefault: {}. Allowed: {}", field.help, value.empty() ? "empty" : value,
                     field.type.allowed);
}

std::string Unknown(const std::string& argument) {
  if (argument.empty() || argument.front() != '-')
    return fmt::format("argument \"{}\" belongs to no flag", argument);
  const std::string flag = argument.substr(0, argument.find('='));
  const std::string key = absl::StrReplaceAll(flag, {{"--", ""}, {"-", "_"}});
  return fmt::format("flag {} is unknown{}", flag, Suggestion(key, &Field::flag));
}

}  // namespace

Flags ReadFlags(int argc, const char* const* argv) {
  CLI::App app(
      "Holds the KV cache of LLM inference workers.\n\n"
      "Each value is also a variable (--page-tokens: KVTIER_PAGE_TOKENS) and a key of the\n"
      "configuration file (page_tokens). Flags override variables, these override the file.\n",
      "kvtierd");
  app.get_formatter()->column_width(40);
  app.allow_extras();
  // Not CLI11's own: they would be looked at only where all else is right.
  app.set_help_flag();
  CLI::Option* const help = app.add_flag("-h,--help")->description("Print this and exit");
  CLI::Option* const version = app.add_flag("--version")->description("Print the version and exit");
  CLI::Option* const check =
      app.add_flag("--check-config")
          ->description("Print the configuration, or all that is wrong with it, and exit");
  for (CLI::Option* flag : {help, version, check}) flag->disable_flag_override();
  CLI::Option* const config = app.add_option("--config")->type_name("FILE")->take_last();
  config->description("The configuration file, KEY = VALUE lines in TOML");
  std::vector<std::pair<const Field*, CLI::Option*>> options;
  for (const Field& field : Fields()) {
    CLI::Option* const option =
        app.add_option(field.flag())->type_name(field.placeholder)->take_last();
    option->description(Description(field));
    options.emplace_back(&field, option);
  }

  Flags flags;
  try {
    app.parse(Arguments(argc, argv));
  } catch (const CLI::ParseError& error) {
    flags.problems.push_back(fmt::format("command line: {}", error.what()));
  }
  for (const std::string& argument : app.remaining()) flags.problems.push_back(Unknown(argument));
  for (const auto& [field, option] : options) {
    if (option->count() > 0) flags.values.emplace_back(field, option->results().back());
  }
  if (config->count() > 0) flags.config_file = config->results().back();
  flags.help = help->count() > 0;
  flags.version = version->count() > 0;
  flags.check_config = check->count() > 0;
  if (flags.help) flags.help_text = app.help();
  return flags;
}

}  // namespace kvtier::service
