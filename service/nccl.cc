#include "service/nccl.h"

#include <charconv>
#include <string>

#include "cachestore/base/status_macros.h"
#include "service/log.h"

namespace kvtier::service {

absl::StatusOr<std::shared_ptr<transport::NcclRuntime>> SetUpNccl(const Config& config,
                                                                  cachestore::Device& device,
                                                                  Transports& transports) {
  const auto none = [&](const std::string& why) {
    transports.SetNccl(nullptr, nullptr, why);
    return nullptr;
  };
  const std::string name = device.name();
  const std::string prefix = "cuda:";
  if (!name.starts_with(prefix)) return none("pages lie in host memory (--device)");
  if (config.nccl_library.empty()) return none("nccl_library is empty");
  int index = 0;
  std::from_chars(&name[prefix.size()], name.data() + name.size(), index);
  auto runtime = transport::NcclRuntime::Load(config.nccl_library, index);
  if (!runtime.ok()) {
    const std::string why(runtime.status().message());
    Log(LogLevel::kWarning, "no NCCL transports with clients", {{"why", why}});
    return none(why);
  }
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<NcclMemory> memory,
                       NcclMemory::Reserve(device, config.max_nccl_transports, config.nccl_memory));
  transports.SetNccl(*runtime, std::move(memory), "");
  return runtime;
}

}  // namespace kvtier::service
