#include "service/device.h"

#include <fmt/format.h>

#include <charconv>

#include "cachestore/base/errors.h"
#include "cachestore/device/cuda_device.h"
#include "cachestore/device/host_device.h"
#include "service/log.h"

namespace kvtier::service {

absl::StatusOr<std::unique_ptr<cachestore::Device>> OpenDevice(const std::string& name) {
  if (name == "host") return std::make_unique<cachestore::HostDevice>();
  cachestore::CudaOptions options;
  constexpr std::size_t kPrefix = sizeof("cuda:") - 1;
  if (name != "auto") std::from_chars(&name[kPrefix], name.data() + name.size(), options.index);
  auto device = cachestore::OpenCudaDevice(options);
  if (device.ok()) return device;
  const std::string why(device.status().message());
  if (name == "auto" && absl::IsFailedPrecondition(device.status())) {
    Log(LogLevel::kInfo, "no GPU to use: pages live in host memory", {{"why", why}});
    return std::make_unique<cachestore::HostDevice>();
  }
  return cachestore::Error(cachestore::Reason::kInvalidField,
                           fmt::format("device is {}; {}; host takes host memory", name, why));
}

}  // namespace kvtier::service
