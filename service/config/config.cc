#include "service/config/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "kvtier/version.h"
#include "service/config/fields.h"
#include "service/config/file.h"
#include "service/config/flags.h"

namespace kvtier::service {
namespace {

constexpr char kPrefix[] = "KVTIER_";
constexpr char kFileVariable[] = "KVTIER_CONFIG";

// Whether a variable sets no field, but is known: the configuration file, or one of the client and
// of tests.
bool IsOthers(const std::string& variable) {
  return variable == kFileVariable || variable == "KVTIER_SERVER" ||
         variable == "KVTIER_NAMESPACE" || variable == "KVTIER_SEED";
}

// Takes layers of settings one over the other and remembers where each value is from.
class Layers {
 public:
  explicit Layers(LoadResult& result) : result_(result) {
    for (const Field& field : Fields()) result_.settings.push_back({field.key, "", "default"});
  }

  // A value that is not allowed is a problem even where a layer above overrides it.
  void Set(const Field& field, const std::string& text, const std::string& origin) {
    if (!field.type.parse(text, result_.config)) {
      result_.problems.push_back(
          fmt::format("{} is \"{}\" ({}); want {}", field.key, text, origin, field.type.allowed));
      return;
    }
    SettingOf(field.key).origin = origin;
  }

  Setting& SettingOf(const std::string& key) {
    return *std::find_if(result_.settings.begin(), result_.settings.end(),
                         [&](const Setting& setting) { return setting.key == key; });
  }

 private:
  LoadResult& result_;
};

void ApplyFile(const std::string& path, Layers& layers, LoadResult& result) {
  if (path.empty()) return;
  const FileSettings file = ReadSettingsFile(path);
  for (const FileSettings::Value& value : file.values)
    layers.Set(*value.field, value.text, value.origin);
  result.problems.insert(result.problems.end(), file.problems.begin(), file.problems.end());
}

void ApplyEnvironment(const Environment& environment, Layers& layers, LoadResult& result) {
  for (const auto& [variable, text] : environment) {
    if (variable.compare(0, sizeof(kPrefix) - 1, kPrefix) != 0 || IsOthers(variable)) continue;
    const std::string key = absl::AsciiStrToLower(variable.substr(sizeof(kPrefix) - 1));
    const Field* const field = FindField(key);
    if (field != nullptr && field->variable() == variable) {
      layers.Set(*field, text, "environment " + variable);
    } else {
      result.warnings.push_back(fmt::format("environment variable {} is unknown{}", variable,
                                            Suggestion(key, &Field::variable)));
    }
  }
}

bool Overlap(const std::string& a, const std::string& b) {
  const auto all = [](const std::string& host) { return host == "0.0.0.0" || host == "::"; };
  const HostAndPort left = SplitAddress(a);
  const HostAndPort right = SplitAddress(b);
  return left.port != 0 && left.port == right.port &&
         (left.host == right.host || all(left.host) || all(right.host));
}

// gRPC lets two servers share a port, and each would get some of the other's connections.
void CheckAddresses(Layers& layers, LoadResult& result) {
  const std::pair<const char*, const std::string*> addresses[] = {
      {"listen", &result.config.listen},
      {"health_listen", &result.config.health_listen},
      {"metrics_listen", &result.config.metrics_listen}};
  for (std::size_t i = 0; i < std::size(addresses); ++i) {
    for (std::size_t j = i + 1; j < std::size(addresses); ++j) {
      const auto& [a, address_a] = addresses[i];
      const auto& [b, address_b] = addresses[j];
      if (!Overlap(*address_a, *address_b)) continue;
      result.problems.push_back(fmt::format(
          "{} is \"{}\" ({}) and {} is \"{}\" ({}); want different ports", a, *address_a,
          layers.SettingOf(a).origin, b, *address_b, layers.SettingOf(b).origin));
    }
  }
}

void CheckWatermarks(Layers& layers, LoadResult& result) {
  if (result.config.evict_until <= result.config.evict_above) return;
  result.problems.push_back(
      fmt::format("evict_until is {} ({}) and evict_above is {} ({}); want at most as much",
                  result.config.evict_until, layers.SettingOf("evict_until").origin,
                  result.config.evict_above, layers.SettingOf("evict_above").origin));
}

std::string SettingsText(const std::vector<Setting>& settings) {
  const auto shown = [](const Setting& s) { return s.value.empty() ? "\"\"" : s.value; };
  std::size_t key_width = 0;
  std::size_t value_width = 0;
  for (const Setting& setting : settings) {
    key_width = std::max(key_width, setting.key.size());
    value_width = std::max(value_width, shown(setting).size());
  }
  std::string text;
  for (const Setting& setting : settings) {
    text += fmt::format("{:<{}}  {:<{}}  {}\n", setting.key, key_width, shown(setting), value_width,
                        setting.origin);
  }
  return text;
}

std::string ProblemsText(const std::vector<std::string>& problems) {
  std::string text = fmt::format("kvtierd: the configuration has {} problem{}\n", problems.size(),
                                 problems.size() == 1 ? "" : "s");
  for (const std::string& problem : problems) text += fmt::format("  {}\n", problem);
  return text;
}

std::string FileOf(const Flags& flags, const Environment& environment) {
  if (flags.config_file.has_value()) return *flags.config_file;
  const auto variable = environment.find(kFileVariable);
  return variable == environment.end() ? std::string() : variable->second;
}

}  // namespace

Environment EnvironmentOf(const char* const* variables) {
  Environment environment;
  for (; *variables != nullptr; ++variables) {
    const std::string variable = *variables;
    const std::size_t equals = variable.find('=');
    if (equals != std::string::npos)
      environment.emplace(variable.substr(0, equals), variable.substr(equals + 1));
  }
  return environment;
}

LoadResult LoadConfig(int argc, const char* const* argv, const Environment& environment) {
  LoadResult result;
  const Flags flags = ReadFlags(argc, argv);
  if (flags.help || flags.version) {
    result.exit_code = 0;
    result.text =
        flags.help ? flags.help_text : fmt::format("kvtierd {} ({})\n", kVersion, kRevision);
    return result;
  }

  Layers layers(result);
  result.problems = flags.problems;
  ApplyFile(FileOf(flags, environment), layers, result);
  ApplyEnvironment(environment, layers, result);
  for (const auto& [field, text] : flags.values) layers.Set(*field, text, "flag " + field->flag());
  CheckAddresses(layers, result);
  CheckWatermarks(layers, result);
  for (const Field& field : Fields())
    layers.SettingOf(field.key).value = field.type.show(result.config);

  if (!result.problems.empty()) {
    result.exit_code = 2;
    result.text = ProblemsText(result.problems);
  } else if (flags.check_config) {
    result.exit_code = 0;
    result.text = SettingsText(result.settings);
  }
  for (const std::string& warning : result.warnings) {
    if (result.exit_code.has_value()) result.text += fmt::format("warning: {}\n", warning);
  }
  return result;
}

}  // namespace kvtier::service
