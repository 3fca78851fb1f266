#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace kvtier::client {

// A wrong value as a message repeats it: its first bytes, and of what nests only the kind, however
// deep it goes.
std::string Quote(const nlohmann::json& value);

}  // namespace kvtier::client
