#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace kvtier::service {

// Bytes of "1073741824", "6GiB" or "500MB": units of 1024 (KiB, MiB, GiB, TiB) and of 1000 (kB, MB,
// GB, TB), in any case. Nothing where it is no such text, is 0, or is
// more than 2^63 - 1.
std::optional<std::int64_t> ParseSize(const std::string& text);

// In the largest unit of 1024 that it is a whole number of, as ParseSize takes it.
std::string FormatSize(std::int64_t bytes);

}  // namespace kvtier::service
