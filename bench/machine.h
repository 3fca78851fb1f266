#pragma once

#include <string>

namespace kvtier::bench {

// The CPU's name as the kernel knows it: a figure means nothing without it.
std::string CpuModel();

}  // namespace kvtier::bench
