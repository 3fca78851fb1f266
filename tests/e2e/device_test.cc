// What a server does with GPUs: none, one that works, one that fails.
#include <gmock/gmock.h>

#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"
#include "tests/support/variable.h"

namespace kvtier {
namespace {

using testing::AppendAll;
using ::testing::HasSubstr;
using testing::LiveServer;
using testing::RunCommand;
using testing::SmallModel;
using testing::Variable;

std::vector<std::string> Command(const std::string& device) {
  return {KVTIER_KVTIERD, "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0",
          "--metrics-listen=127.0.0.1:0", "--device=" + device};
}

// The device of this build may be there: what is asked for never is.
TEST(Device, OneThatIsNotThereIsRefusedWithTheReason) {
  const testing::Finished refused = RunCommand(Command("cuda:99"));
  EXPECT_EQ(refused.code, 1) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("device is cuda:99; "));
  EXPECT_THAT(refused.output, HasSubstr("host takes host memory"));
}

class EmulatedDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(KVTIER_GPU_KVTIERD) == KVTIER_KVTIERD)
      GTEST_SKIP() << "no emulated device: CUDA's headers are not installed";
  }
};

TEST_F(EmulatedDevice, AutoTakesHostMemoryWhereThereIsNone) {
  const Variable none("FAKE_CUDA_DEVICES", "0");
  const Variable device("TEST_DEVICE", "auto");
  LiveServer server;
  EXPECT_THAT(server.process().Output(), HasSubstr("no GPU to use: pages live in host memory"));
  EXPECT_THAT(server.process().Output(), HasSubstr("cudaErrorNoDevice"));
}

TEST_F(EmulatedDevice, AutoTakesTheFirst) {
  const Variable device("TEST_DEVICE", "auto");
  LiveServer server;
  EXPECT_THAT(server.process().Output(), HasSubstr("device=cuda:0"));
}

TEST_F(EmulatedDevice, MoreMemoryThanItHasIsRefused) {
  const Variable memory("FAKE_CUDA_MEMORY", "400000000");
  std::vector<std::string> command = Command("cuda:0");
  command[0] = KVTIER_GPU_KVTIERD;
  const testing::Finished refused = RunCommand(command);
  EXPECT_EQ(refused.code, 1) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("cuda:0 can't reserve so much"));
}

// What it held is gone: it says so to whoever asks, and ends, to be started again.
TEST_F(EmulatedDevice, OneThatIsLostEndsTheServer) {
  const Variable device("TEST_DEVICE", "cuda:0");
  const Variable fault("FAKE_CUDA_FAULT", "cudaMemcpyAsync:40:700");
  LiveServer server({"--memory=64MiB"});
  const auto model = server.client().RegisterModel(SmallModel("fp8"));
  ASSERT_TRUE(model.ok()) << model.status();
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) {
    status = AppendAll(server.client(), model->model_id(), "s" + std::to_string(i), 32);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuda:0 is lost: cudaMemcpyAsync failed"));
  EXPECT_EQ(server.process().Wait(20), 1);
  EXPECT_THAT(server.process().Output(), HasSubstr("cuda:0 is lost"));
}

}  // namespace
}  // namespace kvtier
