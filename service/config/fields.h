#pragma once

#include <functional>
#include <string>
#include <vector>

#include "service/config/field_type.h"

namespace kvtier::service {

// A field of Config and its names: `page_tokens` in a file, --page-tokens, KVTIER_PAGE_TOKENS.
struct Field {
  std::string key;
  std::string placeholder;  // of the value, in --help
  FieldType type;
  std::string help;

  std::string flag() const;
  std::string variable() const;
};

// Every field, in the order of --help and docs/configuration.md.
const std::vector<Field>& Fields();

// The row of that key; nullptr where there is none.
const Field* FindField(const std::string& key);

// `; did you mean "page_tokens"?` for a key that is at most a few keystrokes away, by the name that
// `named` gives it; otherwise where to look.
std::string Suggestion(const std::string& key,
                       const std::function<std::string(const Field&)>& named);

}  // namespace kvtier::service
