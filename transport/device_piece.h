#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::transport {

// Memory of a GPU that is sent or received as a whole.
struct DevicePiece {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

}  // namespace kvtier::transport
