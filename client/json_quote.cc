#include "client/json_quote.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace kvtier::client {
namespace {

bool IsDeeper(const nlohmann::json& value, int levels) {
  if (!value.is_structured()) return false;
  return levels == 0 || std::any_of(value.begin(), value.end(), [&](const nlohmann::json& inner) {
           return IsDeeper(inner, levels - 1);
         });
}

}  // namespace

std::string Quote(const nlohmann::json& value) {
  constexpr std::size_t kMost = 80;
  constexpr int kLevels = 8;
  if (IsDeeper(value, kLevels)) return "deeply nested";
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, kMost);
}

}  // namespace kvtier::client
