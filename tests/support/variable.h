#pragma once

#include <cstdlib>
#include <string>

namespace kvtier::testing {

// NOLINTBEGIN(concurrency-mt-unsafe): no other thread of a test sets variables

// Of the environment; `otherwise` where it isn't set.
inline std::string VariableOr(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

// One that is set while this lives, for the processes that start meanwhile too.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* const name_;
};

// NOLINTEND(concurrency-mt-unsafe)

}  // namespace kvtier::testing
