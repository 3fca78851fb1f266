// Every value of fp32 in every smaller type, and every code of those as fp32, as on the host. With
// KVTIER_EXHAUSTIVE all 2^32, which is for a real GPU; else one in some hundreds.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "cachestore/device/cuda_device.h"
#include "cachestore/device/host_device.h"
#include "tests/support/status_matchers.h"
#include "tests/support/variable.h"

namespace kvtier::cachestore {
namespace {

using kernels::Codec;
using kernels::CodecId;
using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::VariableOr;

constexpr int kDim = 256;
constexpr int kRows = 1 << 12;
constexpr std::int64_t kValues = std::int64_t{kRows} * kDim;  // of a block
constexpr std::int64_t kBlocks = (std::int64_t{1} << 32) / kValues;
constexpr std::int64_t kSomeBlocks = 8;

Codec CodecFor(ElementType type) {
  return {.id = kernels::IsFp8(type) ? CodecId::kFp8 : CodecId::kRaw, .element = type};
}

// What a device makes of values: codes, and these as fp32 again.
struct Made {
  explicit Made(ElementType type)
      : codes(static_cast<std::size_t>(kValues * kernels::ElementBytes(type))),
        back(static_cast<std::size_t>(kValues * 4)) {}

  std::vector<std::byte> codes, back;
};

void Convert(Device& device, std::byte* stored, ElementType type,
             const std::vector<std::uint32_t>& values, Made& made) {
  const auto* from = reinterpret_cast<const std::byte*>(values.data());
  const EncodeJob encode{
      {CodecFor(type), kDim, 1.0f, {from, ElementType::kFp32, kDim}, kRows, stored}, nullptr};
  ASSERT_THAT(device.Encode({&encode, 1}), IsOk());
  const Transfer fetch{made.codes.data(), stored, std::ssize(made.codes)};
  device.Fetch({&fetch, 1});
  const DecodeJob decode{{.codec = CodecFor(type),
                          .dim = kDim,
                          .in = stored,
                          .tokens = kRows,
                          .out = {made.back.data(), ElementType::kFp32, kDim}},
                         nullptr};
  ASSERT_THAT(device.Decode({&decode, 1}), IsOk());
  ASSERT_THAT(device.Health(), IsOk());
}

class Conversions : public ::testing::TestWithParam<ElementType> {};

TEST_P(Conversions, AreTheHosts) {
  const bool all = VariableOr("KVTIER_EXHAUSTIVE", "") == "1";
  const std::int64_t blocks = all ? kBlocks : kSomeBlocks;
  // Values that are so far apart, of all exponents and both signs.
  const auto step = static_cast<std::uint32_t>(all ? 1 : kBlocks / kSomeBlocks - 1);
  const auto device = OpenCudaDevice({}).value();
  HostDevice host;
  std::byte* const stored = device->Reserve(kValues * 4).value();
  std::byte* const on_host = host.Reserve(kValues * 4).value();
  Made got(GetParam()), want(GetParam());
  std::vector<std::uint32_t> values(kValues);
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t i = 0; i < kValues; ++i)
      values[static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(block * kValues + i) * step;
    std::thread thread([&] { Convert(host, on_host, GetParam(), values, want); });
    Convert(*device, stored, GetParam(), values, got);
    thread.join();
    ASSERT_TRUE(got.codes == want.codes) << "block " << block << " of " << blocks;
    ASSERT_TRUE(got.back == want.back) << "block " << block << " of " << blocks;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Conversions,
                         ::testing::Values(ElementType::kBf16, ElementType::kFp16,
                                           ElementType::kE4m3, ElementType::kE5m2),
                         [](const auto& of) { return std::string(ElementName(of.param)); });

}  // namespace
}  // namespace kvtier::cachestore
