// A device that fails: what it is asked for then is refused, at once, for good, and nothing waits.
#include <gmock/gmock.h>

#include <chrono>
#include <thread>
#include <vector>

#include "cachestore/base/errors.h"
#include "cachestore/device/cuda_device.h"
#include "tests/support/status_matchers.h"

#if KVTIER_EMULATED
#include "tests/emulation/fake_cudart.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using ::testing::HasSubstr;

constexpr std::int64_t kSlab = 1 << 20;

class CudaFault : public ::testing::Test {
 protected:
  ~CudaFault() override {
    device_.reset();
    cuda_double::Reset();
    EXPECT_EQ(cuda_double::Count().allocations, 0u);
  }

  void Open(const CudaOptions& options = {}) {
    device_ = OpenCudaDevice(options).value();
    slab_ = device_->Reserve(kSlab).value();
  }
  absl::Status Encode() {
    const EncodeJob job{
        {.codec = {.id = kernels::CodecId::kFp8, .element = kernels::ElementType::kE4m3},
         .dim = 64,
         .source = {values_.data(), kernels::ElementType::kBf16, 64},
         .units = 16,
         .out = slab_},
        &saturated_};
    return device_->Encode({&job, 1});
  }
  void ExpectLost(const absl::Status& status) {
    EXPECT_EQ(ReasonOf(status), "DEVICE_LOST") << status;
    EXPECT_THAT(std::string(device_->Health().message()), HasSubstr("cuda:0 is lost"));
    EXPECT_EQ(ReasonOf(Encode()), "DEVICE_LOST");
    // What is fetched then is nothing of what lay there.
    std::vector<std::byte> fetched(64, std::byte{0xee});
    const Transfer transfer{fetched.data(), slab_, 64};
    device_->Fetch({&transfer, 1});
    EXPECT_EQ(fetched, std::vector<std::byte>(64));
  }

  std::vector<std::byte> values_ = std::vector<std::byte>(16 * 64 * 2, std::byte{0x3f});
  std::uint64_t saturated_ = 0;
  std::unique_ptr<Device> device_;
  std::byte* slab_ = nullptr;
};

TEST_F(CudaFault, EveryCallOfAnEncoderThatFailsLosesTheDevice) {
  for (const char* call :
       {"cudaSetDevice", "cudaMemcpyAsync", "launch", "cudaEventRecord", "cudaEventQuery"}) {
    SCOPED_TRACE(call);
    Open();
    ASSERT_THAT(Encode(), IsOk());
    cuda_double::Inject(call, 0, cudaErrorIllegalAddress);
    const absl::Status status = Encode();
    EXPECT_THAT(std::string(status.message()), HasSubstr("cudaErrorIllegalAddress"));
    ExpectLost(status);
    device_.reset();
    cuda_double::Reset();
  }
}

TEST_F(CudaFault, WorkThatNeverEndsIsGivenUpAtTheDeadline) {
  Open({.deadline = absl::Milliseconds(50)});
  cuda_double::HangStreams(true);
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status = Encode();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_THAT(std::string(status.message()), HasSubstr("has not ended within 0.05 s"));
  ExpectLost(status);
}

// Those too that wait for a slot.
TEST_F(CudaFault, WhoWaitsForALostDeviceIsTold) {
  Open({.staging_slots = 1, .deadline = absl::Milliseconds(200)});
  cuda_double::HangStreams(true);
  std::vector<std::thread> threads;
  std::vector<absl::Status> statuses(4);
  for (absl::Status& status : statuses) {
    threads.emplace_back([&] { status = Encode(); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_EQ(ReasonOf(status), "DEVICE_LOST") << status;
}

TEST_F(CudaFault, MemoryThatIsNotThereIsRefusedAndNotLost) {
  cuda_double::Inject("cudaMalloc", 4, cudaErrorMemoryAllocation);  // after the staging slots
  device_ = OpenCudaDevice({}).value();
  EXPECT_EQ(ReasonOf(device_->Reserve(kSlab).status()), "BUDGET");
  EXPECT_THAT(device_->Health(), IsOk());
}

TEST_F(CudaFault, AUnitThatNoSlotHoldsIsRefusedAndNothingIsLost) {
  device_ = OpenCudaDevice({.staging_slots = 2, .staging_bytes = 64 << 10}).value();
  slab_ = device_->Reserve(kSlab).value();
  std::vector<std::byte> page(512 * 64 * 4);
  const EncodeJob job{{.codec = {.id = kernels::CodecId::kFp8Page,
                                 .element = kernels::ElementType::kE4m3,
                                 .group = 512},
                       .dim = 64,
                       .source = {page.data(), kernels::ElementType::kFp32, 64},
                       .units = 1,
                       .out = slab_}};
  for (int i = 0; i < 3; ++i) {
    const absl::Status refused = device_->Encode({&job, 1});
    EXPECT_EQ(ReasonOf(refused), "BUDGET") << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("fewer page_tokens"));
    EXPECT_THAT(Encode(), IsOk());
  }
}

TEST_F(CudaFault, ADeviceThatIsNotThereIsAPrecondition) {
  const auto refused = OpenCudaDevice({.index = 7});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("cuda:7: there are 1 devices"));
}

}  // namespace
}  // namespace kvtier::cachestore
#endif
