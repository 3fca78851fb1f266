#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/nccl/end.h"

int main(int argc, char** argv) {
  using namespace kvtier::transport::testing;  // NOLINT(google-build-using-namespace)
  if (argc == 5 && std::string(argv[1]) == kWorkerArgument)
    return RunWorker(argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
