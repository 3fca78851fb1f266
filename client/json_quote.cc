#include "client/json_quote.h"

#include <nlohmann/json.hpp>

namespace kvtier::client {

std::string Quote(const nlohmann::json& value) {
  constexpr std::size_t kMost = 80;
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, kMost);
}

}  // namespace kvtier::client
