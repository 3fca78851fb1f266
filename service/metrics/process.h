#pragma once

#include <cstdint>

namespace kvtier::service {

// What the kernel says of this process; 0 where it does not say.
struct ProcessFigures {
  std::int64_t resident_bytes = 0;
  double cpu_seconds = 0;         // user and system
  double start_time_seconds = 0;  // since the epoch
  std::int64_t open_descriptors = 0;
  std::int64_t max_descriptors = 0;
};

ProcessFigures ReadProcessFigures();

}  // namespace kvtier::service
