#include <gtest/gtest.h>

#include <string>

#include "tests/gpu_client/worker.h"

int main(int argc, char** argv) {
  using namespace kvtier::testing;  // NOLINT(google-build-using-namespace)
  if (argc == 4 && std::string(argv[1]) == kWorkerArgument) return RunWorker(argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
