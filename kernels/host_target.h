#pragma once

#include <string>
#include <vector>

namespace kvtier::kernels {

// The instruction sets that the host's codecs are compiled for and this CPU runs, best first, by
// Highway's names: "AVX3" (AVX-512), "AVX2", and the plain build, "SCALAR" or "EMU128". Never
// empty.
std::vector<std::string> HostTargets();

// Makes the host's codecs run on one of HostTargets() instead of the best. For tests and
// benchmarks: no codec may run meanwhile.
void UseHostTarget(const std::string& name);

// What the codecs run on now.
const char* HostTargetInUse();

}  // namespace kvtier::kernels
