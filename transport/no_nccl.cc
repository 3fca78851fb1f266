#include "transport/nccl.h"

namespace kvtier::transport {

absl::StatusOr<std::shared_ptr<NcclRuntime>> NcclRuntime::Load(const std::string& /*library*/,
                                                               int /*device*/) {
  return absl::FailedPreconditionError("this program was built without CUDA and NCCL's header");
}

}  // namespace kvtier::transport
