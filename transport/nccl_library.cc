#include "transport/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace kvtier::transport {
namespace {

constexpr int kOldest = NCCL_VERSION(2, 27, 0);

}  // namespace

absl::StatusOr<std::shared_ptr<const NcclLibrary>> NcclLibrary::Load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps one a thread
    return absl::FailedPreconditionError(fmt::format("no NCCL: {}", why));
  }
  const std::shared_ptr<NcclLibrary> loaded(new NcclLibrary);
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing = name;
  };
  decltype(&::ncclGetVersion) get_version = nullptr;
  find(get_version, "ncclGetVersion");
  find(loaded->GetUniqueId, "ncclGetUniqueId");
  find(loaded->CommInitRankConfig, "ncclCommInitRankConfig");
  find(loaded->CommGetAsyncError, "ncclCommGetAsyncError");
  find(loaded->CommAbort, "ncclCommAbort");
  find(loaded->Send, "ncclSend");
  find(loaded->Recv, "ncclRecv");
  find(loaded->GroupStart, "ncclGroupStart");
  find(loaded->GroupEnd, "ncclGroupEnd");
  find(loaded->get_error_string_, "ncclGetErrorString");
  find(loaded->get_last_error_, "ncclGetLastError");
  if (missing != nullptr)
    return absl::FailedPreconditionError(fmt::format("{} is no NCCL: it has no {}", path, missing));
  if (get_version(&loaded->version_) != ncclSuccess || loaded->version_ < kOldest) {
    return absl::FailedPreconditionError(
        fmt::format("{} is NCCL {}; want {} or newer", path, loaded->version_, kOldest));
  }
  return loaded;
}

absl::Status NcclLibrary::StatusOf(ncclResult_t result, const char* what, ncclComm_t comm) const {
  if (result == ncclSuccess) return absl::OkStatus();
  const std::string message =
      fmt::format("{}: NCCL says {} ({})", what, get_error_string_(result), get_last_error_(comm));
  switch (result) {
    case ncclRemoteError:
    case ncclSystemError:
      return absl::UnavailableError(message);
    case ncclInvalidUsage:
    case ncclInvalidArgument:
    case ncclUnhandledCudaError:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace kvtier::transport
