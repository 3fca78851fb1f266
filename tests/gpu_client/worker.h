#pragma once

#include <string>

namespace kvtier::testing {

// Where this executable takes its first argument for this, it is a worker, which appends to
// sequence "s" of the model `model_id` at the server `address`, from its GPU, until it's killed.
inline constexpr char kWorkerArgument[] = "--worker";
int RunWorker(const std::string& address, const std::string& model_id);

}  // namespace kvtier::testing
