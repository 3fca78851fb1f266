#include "kernels/host_target.h"

#include <hwy/highway.h>

#include <cstdint>
#include <cstdlib>

namespace kvtier::kernels {
namespace {

// Of this CPU, whatever UseHostTarget has said.
std::int64_t Supported() {
  static const std::int64_t supported = (hwy::SupportedTargets() & HWY_TARGETS) | HWY_STATIC_TARGET;
  return supported;
}

}  // namespace

std::vector<std::string> HostTargets() {
  std::vector<std::string> names;
  for (std::int64_t left = Supported(); left != 0; left &= left - 1)
    names.emplace_back(hwy::TargetName(left & -left));
  return names;
}

void UseHostTarget(const std::string& name) {
  for (std::int64_t left = Supported(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    if (name != hwy::TargetName(target)) continue;
    hwy::SetSupportedTargetsForTest(target);
    return;
  }
  std::abort();  // not one of HostTargets()
}

}  // namespace kvtier::kernels
