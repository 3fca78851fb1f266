#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace kvtier::transport {

// What errno says.
inline std::string LastError() { return std::generic_category().message(errno); }

}  // namespace kvtier::transport
