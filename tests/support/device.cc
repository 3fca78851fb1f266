#include "tests/support/device.h"

#include <cstdlib>
#include <string>

#include "cachestore/base/check.h"
#include "cachestore/device/cuda_device.h"
#include "cachestore/device/host_device.h"
#include "tests/support/variable.h"

namespace kvtier::testing {

using cachestore::Device;
using cachestore::Transfer;

std::unique_ptr<Device> MakeDevice() {
  const std::string name = VariableOr("TEST_DEVICE", "host");
  if (name == "host") return std::make_unique<cachestore::HostDevice>();
  KVT_CHECK(name.starts_with("cuda:"));
  auto device = cachestore::OpenCudaDevice(
      {.index = std::atoi(name.c_str() + 5), .staging_slots = 2, .staging_bytes = 1 << 20});
  if (!device.ok()) std::fprintf(stderr, "%s\n", device.status().ToString().c_str());
  return *std::move(device);
}

std::vector<std::byte> BytesAt(Device& device, const std::byte* memory, std::int64_t bytes) {
  std::vector<std::byte> fetched(static_cast<std::size_t>(bytes));
  const Transfer transfer{fetched.data(), memory, bytes};
  device.Fetch({&transfer, 1});
  return fetched;
}

void FlipBit(Device& device, std::byte* memory) {
  std::vector<std::byte> byte = BytesAt(device, memory, 1);
  byte[0] ^= std::byte{1};
  const Transfer transfer{memory, byte.data(), 1};
  device.Write({&transfer, 1});
}

}  // namespace kvtier::testing
