#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cachestore/device/device.h"

namespace kvtier::testing {

// The device that stores in tests stand on: host memory, or, where TEST_DEVICE is cuda:N,
// that.
std::unique_ptr<cachestore::Device> MakeDevice();

// What lies in a device's memory, and a bit of it turned over.
std::vector<std::byte> BytesAt(cachestore::Device& device, const std::byte* memory,
                               std::int64_t bytes);
void FlipBit(cachestore::Device& device, std::byte* memory);

}  // namespace kvtier::testing
