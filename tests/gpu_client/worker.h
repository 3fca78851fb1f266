#pragma once

#include <string>

namespace kvtier::testing {

// Where this executable takes its first argument for this, it is a worker of the server `address`,
// which from and to its GPU appends to sequence "s" of the model `model_id`, or, where there is
// none, reads sequence "held", until it's killed.
inline constexpr char kWorkerArgument[] = "--worker";
int RunWorker(const std::string& address, const std::string& model_id);

}  // namespace kvtier::testing
