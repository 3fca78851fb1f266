#include "service/config/file.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

namespace kvtier::service {
namespace {

std::optional<std::string> TextOf(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) return *text;
  if (const auto number = node.value_exact<std::int64_t>()) return std::to_string(*number);
  return std::nullopt;
}

std::string TypeName(const toml::node& node) {
  std::ostringstream name;
  name << node.type();
  return name.str();
}

void Take(const std::string& key, const toml::node& node, const std::string& origin,
          FileSettings& settings) {
  const Field* const field = FindField(key);
  const std::optional<std::string> text = TextOf(node);
  if (field == nullptr) {
    settings.problems.push_back(fmt::format(
        "key \"{}\" ({}) is unknown{}", key, origin,
        node.is_table() ? "; keys stand at the top, in no table" : Suggestion(key, &Field::key)));
  } else if (!text.has_value()) {
    settings.problems.push_back(fmt::format("{} is of type {} ({}); want {}", key, TypeName(node),
                                            origin, field->type.allowed));
  } else {
    settings.values.push_back({field, *text, origin});
  }
}

// Empty, or why not. A pipe or a device may never end: regular files only.
std::string Open(const std::string& path, std::ifstream& file) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return error.message();
  if (!std::filesystem::is_regular_file(status)) return "not a regular file";
  file.open(path);
  return file.is_open() ? "" : std::generic_category().message(errno);
}

}  // namespace

FileSettings ReadSettingsFile(const std::string& path) {
  FileSettings settings;
  std::ifstream file;
  if (const std::string why = Open(path, file); !why.empty()) {
    settings.problems.push_back(fmt::format("file {} can't be read: {}", path, why));
    return settings;
  }
  std::ostringstream content;
  content << file.rdbuf();

  toml::table table;
  try {
    table = toml::parse(content.str(), path);
  } catch (const toml::parse_error& error) {
    settings.problems.push_back(fmt::format("file {} line {} is not TOML: {}", path,
                                            error.source().begin.line, error.description()));
    return settings;
  }

  std::vector<std::pair<unsigned, std::string>> lines;
  for (const auto& [key, node] : table)
    lines.emplace_back(key.source().begin.line, std::string(key.str()));
  std::sort(lines.begin(), lines.end());
  for (const auto& [line, key] : lines)
    Take(key, *table.get(key), fmt::format("file {} line {}", path, line), settings);
  return settings;
}

}  // namespace kvtier::service
