#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace kvtier::client {

// A wrong value as a message repeats it: its first bytes, unless it nests deeply, which files may
// do without end.
std::string Quote(const nlohmann::json& value);

}  // namespace kvtier::client
