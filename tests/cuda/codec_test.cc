// Kernels give the bytes of the host's codecs: encoding, decoding to every type, and what they
// count; emulated, in every order of a block's threads; and the checksums of the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cachestore/device/cuda_device.h"
#include "cachestore/device/host_device.h"
#include "tests/cuda/orders.h"
#include "tests/kernels/hard_rows.h"
#include "tests/support/status_matchers.h"

namespace kvtier::cachestore {
namespace {

using kernels::Codec;
using kernels::ElementType;
using kernels::UnitSizeOf;
using kernels::UnitTokens;
using kernels::testing::AddExtremes;
using kernels::testing::CodecsAndExtremes;
using kernels::testing::HardRows;
using kernels::testing::kDims;
using kernels::testing::kOutputs;
using kernels::testing::kScales;
using kernels::testing::kSources;
using kernels::testing::NameOf;
using kernels::testing::SourceRows;
using kvtier::testing::IsOk;
using kvtier::testing::SeededRandom;

constexpr std::int64_t kSlab = 8 << 20;

class CudaCodec : public ::testing::TestWithParam<testing::Order> {
 protected:
  CudaCodec() { GetParam().set(); }
  ~CudaCodec() override {
    device_.reset();
    testing::ExpectNothingLeft();
  }

  std::unique_ptr<Device> device_ = OpenCudaDevice({.staging_slots = 2}).value();
  std::byte* const slab_ = device_->Reserve(kSlab).value();
};

// All that a device makes of one source: units at `stored`, in its memory; values of every type, of
// rows [1, tokens - 1) with gaps between them.
std::vector<std::byte> Everything(Device& device, std::byte* stored, const Codec& codec,
                                  const SourceRows& source, float scale, float out_scale) {
  const int dim = source.dim();
  const auto units = static_cast<int>(source.tokens() / UnitTokens(codec));
  const std::int64_t bytes = units * UnitSizeOf(codec, dim).total();
  std::uint64_t counts[8] = {};
  std::uint64_t checksum = 0;
  // In two jobs, so that not all is at the front.
  const int half = units / 2;
  const EncodeJob encode[] = {
      {{codec, dim, scale, source.View(), half, stored}, &counts[0]},
      {{codec, dim, scale, source.View(std::int64_t{half} * UnitTokens(codec)), units - half,
        stored + half * UnitSizeOf(codec, dim).total()},
       &counts[1],
       {stored, bytes, &checksum}}};
  EXPECT_THAT(device.Encode(encode), IsOk());
  std::vector<std::byte> out(static_cast<std::size_t>(bytes));
  const Transfer fetch{out.data(), stored, bytes};
  device.Fetch({&fetch, 1});

  const std::int64_t tokens = source.tokens() - 2, stride = dim + 3;
  std::vector<std::vector<std::byte>> reads;
  std::vector<DecodeJob> decode;
  for (const ElementType type : kOutputs) {
    reads.emplace_back(static_cast<std::size_t>(tokens * stride * ElementBytes(type)));
    decode.push_back({{.codec = codec,
                       .dim = dim,
                       .scale = scale,
                       .in = stored,
                       .first_token = 1,
                       .tokens = tokens,
                       .out_scale = out_scale,
                       .out = {reads.back().data(), type, stride}},
                      &counts[reads.size() + 1]});
  }
  EXPECT_THAT(device.Decode(decode), IsOk());
  for (const auto& read : reads) out.insert(out.end(), read.begin(), read.end());
  const auto append = [&out](const void* data, std::size_t size) {
    const auto* from = static_cast<const std::byte*>(data);
    out.insert(out.end(), from, from + size);
  };
  append(counts, sizeof counts);
  append(&checksum, sizeof checksum);
  return out;
}

TEST_P(CudaCodec, GivesTheHostsBytes) {
  HostDevice host;
  std::byte* const host_slab = host.Reserve(kSlab).value();
  SeededRandom random;
  int compared = 0;
  for (const Codec& codec : CodecsAndExtremes()) {
    for (const int dim : kDims) {
      if (dim % DimMultiple(codec) != 0) continue;
      // A third of them in each order.
      if (!random.OneIn(3)) continue;
      const ElementType type = kSources[random.Between(0, 2)];
      // Rotated at the largest scale, infinities cancel out: which NaN that gives nobody promises.
      const bool rotated = codec.rotation != kernels::Rotation::kNone;
      const float scale = kScales[random.Between(0, rotated ? 3 : 4)];
      const float out_scale = kScales[random.Between(0, 4)];
      const std::int64_t tokens =
          UnitTokens(codec) > 1 ? 2 * UnitTokens(codec) : (dim > 128 ? 5 : 67);
      if (tokens < 3) continue;
      auto source = HardRows(type, dim, tokens, random);
      AddExtremes(codec, source);
      // Parts begin at multiples of 64, slices at multiples of 16.
      const std::int64_t at = 16 * random.Between(0, 8);
      ASSERT_TRUE(Everything(*device_, slab_ + at, codec, source, scale, out_scale) ==
                  Everything(host, host_slab + at, codec, source, scale, out_scale))
          << NameOf(codec) << ", dim " << dim << ", " << ElementName(type) << ", scales " << scale
          << ", " << out_scale;
      ++compared;
    }
  }
  EXPECT_GT(compared, 100);
}

#if KVTIER_EMULATED
// Values in pinned memory go to and from it by themselves: what is copied is the tables.
TEST_P(CudaCodec, WhatIsPinnedIsReachedWithoutACopy) {
  constexpr int kDim = 64, kTokens = 512, kStride = kDim + 16;
  constexpr std::int64_t kBytes = std::int64_t{kTokens} * kStride * 2;
  alignas(4096) static std::byte memory[2 * kBytes];
  SeededRandom random;
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random.Between(0, 0x3f));
  const Codec codecs[] = {{.id = kernels::CodecId::kRaw, .element = ElementType::kBf16},
                          {.id = kernels::CodecId::kLlamaQ8},
                          {.id = kernels::CodecId::kKiviChannel,
                           .element = ElementType::kFp16,
                           .bits = 2,
                           .group = 32,
                           .rotation = kernels::Rotation::kHadamard}};
  HostDevice host;
  std::byte* const host_slab = host.Reserve(kSlab).value();
  for (const Codec& codec : codecs) {
    SCOPED_TRACE(NameOf(codec));
    const int units = kTokens / UnitTokens(codec);
    const auto run = [&](Device& device, std::byte* stored, std::byte* out) {
      const EncodeJob encode{
          {codec, kDim, 1.0f, {memory, ElementType::kBf16, kStride}, units, stored}, nullptr};
      EXPECT_THAT(device.Encode({&encode, 1}), IsOk());
      const DecodeJob decode{{.codec = codec,
                              .dim = kDim,
                              .in = stored,
                              .tokens = kTokens,
                              .out = {out, ElementType::kBf16, kStride}},
                             nullptr};
      EXPECT_THAT(device.Decode({&decode, 1}), IsOk());
    };
    std::vector<std::byte> want(kBytes);
    run(host, host_slab, want.data());
    std::byte* const out = memory + kBytes;
    std::fill(out, out + kBytes, std::byte{0});
    device_->Pin(memory, sizeof memory);
    const std::int64_t before = cuda_double::Count().copied_bytes;
    run(*device_, slab_, out);
    EXPECT_LT(cuda_double::Count().copied_bytes - before, kTokens * kDim);
    device_->Unpin(memory);
    EXPECT_TRUE(std::equal(want.begin(), want.end(), out));
    // And again through staging memory.
    run(*device_, slab_, out);
    EXPECT_GT(cuda_double::Count().copied_bytes - before, 4 * kTokens * kDim);
    EXPECT_TRUE(std::equal(want.begin(), want.end(), out));
  }
}
#endif

TEST_P(CudaCodec, ChecksumsAreTheHostsWhateverTheLength) {
  HostDevice host;
  std::byte* const host_slab = host.Reserve(kSlab).value();
  SeededRandom random;
  std::vector<std::byte> bytes(200 << 10);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.Between(0, 255));
  const Transfer writes[] = {{slab_, bytes.data(), std::ssize(bytes)},
                             {host_slab, bytes.data(), std::ssize(bytes)}};
  device_->Write({&writes[0], 1});
  host.Write({&writes[1], 1});
  std::vector<std::int64_t> lengths = {1,    16,   239,  240,   241,   256,   1023,  1024,     1025,
                                       1088, 2048, 2049, 32768, 32769, 33792, 99999, 200 << 10};
  for (int i = 0; i < 50; ++i) lengths.push_back(random.Between(1, 100 << 10));
  std::vector<std::uint64_t> got(lengths.size()), want(lengths.size());
  std::vector<ChecksumJob> jobs, host_jobs;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t at = lengths[i] < (100 << 10) ? random.Between(0, 64) : 0;
    jobs.push_back({slab_ + at, lengths[i], &got[i]});
    host_jobs.push_back({host_slab + at, lengths[i], &want[i]});
  }
  device_->Checksum(jobs);
  host.Checksum(host_jobs);
  EXPECT_EQ(got, want);
}

TEST_P(CudaCodec, TheLargestMagnitudesAreTheHosts) {
  HostDevice host;
  SeededRandom random;
  for (const ElementType type : kSources) {
    for (const int dim : kDims) {
      for (const std::int64_t tokens : {1, 31, 32, 33, 200}) {
        auto source = HardRows(type, dim, tokens, random);
        if (random.OneIn(3)) {
          source.Set(random.Between(0, tokens - 1), static_cast<int>(random.Between(0, dim - 1)),
                     random.OneIn(2) ? -std::numeric_limits<float>::infinity()
                                     : std::numeric_limits<float>::quiet_NaN());
        }
        const std::int64_t bytes = tokens * (dim + 3) * ElementBytes(type);
        const std::int64_t at = 2 * ElementBytes(type) * random.Between(0, 3);
        const Transfer write{slab_ + at, source.View().data, bytes};
        device_->Write({&write, 1});
        float got = -1, want = -1;
        const LargestJob job{{slab_ + at, type, dim + 3}, dim, tokens, &got};
        device_->Largest({&job, 1});
        const LargestJob host_job{source.View(), dim, tokens, &want};
        host.Largest({&host_job, 1});
        const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
        EXPECT_TRUE(bits(got) == bits(want) || (std::isnan(got) && std::isnan(want)))
            << got << " and " << want << ", dim " << dim << ", " << tokens << " of "
            << ElementName(type);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, CudaCodec, ::testing::ValuesIn(testing::kOrders),
                         [](const auto& order) { return std::string(order.param.name); });

}  // namespace
}  // namespace kvtier::cachestore
