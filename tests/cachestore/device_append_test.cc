// Values that lie in the device's own memory: stored, checked and refused as those of the host's.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::SeededRandom;
using testing::KvData;
using testing::Message;
using testing::SourceOrder;
using testing::TestStore;

constexpr std::int64_t kMemory = 4 << 20;

class DeviceAppend : public ::testing::Test {
 protected:
  // All that `source` may look at of so many heads and tokens, in the device's memory.
  SourceTensor ToDevice(const SourceTensor& source, int heads, std::int64_t tokens, int dim) {
    if (source.data == nullptr) return source;
    tokens -= source.stored.end - source.stored.begin;
    const std::int64_t bytes =
        ((heads - 1) * source.head_stride + (tokens - 1) * source.token_stride +
         kernels::RowElements(source.type, dim)) *
        kernels::ElementBytes(source.type);
    SourceTensor there = source;
    there.data = memory_ + used_;
    const Transfer write{memory_ + used_, source.data, bytes};
    store_.device.Write({&write, 1});
    used_ += (bytes + 63) / 64 * 64;
    EXPECT_LE(used_, kMemory);
    return there;
  }

  absl::Status Append(const std::string& id, const Model& model, Message& message, bool on_device) {
    const auto writer = store_.OpenWriter(id, model);
    Chunk chunk = message.chunk();
    used_ = 0;
    chunk.on_device = on_device;
    for (Chunk::Layer& layer : chunk.layers) {
      if (!on_device) break;
      const LayerModel& of = model.layers[static_cast<std::size_t>(layer.layer)];
      const int heads = of.spec.kv_heads;
      layer.k = ToDevice(layer.k, heads, chunk.tokens, of.k.dim());
      layer.v = ToDevice(layer.v, heads, chunk.tokens, of.v.dim());
    }
    return writer->Append(chunk).status();
  }

  std::vector<std::byte> Everything(const std::string& id) {
    SequenceReader reader = store_.Read(id);
    std::vector<std::byte> all;
    for (std::size_t i = 0; i < reader.layers().size(); ++i) {
      const LayerOutput& layer = reader.layers()[i];
      std::vector<std::byte> k(static_cast<std::size_t>(layer.tokens * layer.k_bytes_per_token()));
      std::vector<std::byte> v(static_cast<std::size_t>(layer.tokens * layer.v_bytes_per_token()));
      EXPECT_THAT(reader.Fill(i, 0, layer.tokens, k.data(), v.data()), IsOk());
      all.insert(all.end(), k.begin(), k.end());
      all.insert(all.end(), v.begin(), v.end());
    }
    return all;
  }

  TestStore store_{kMemory};
  std::byte* const memory_ = store_.base->Reserve(kMemory).value();
  std::int64_t used_ = 0;
  SeededRandom random_;
};

struct Case {
  const char* format;
  ElementType source;
};

TEST_F(DeviceAppend, IsStoredAsFromTheHost) {
  for (const Case& of : {Case{"auto", ElementType::kBf16}, Case{"fp8_e4m3", ElementType::kFp32},
                         Case{"int8_per_token_head", ElementType::kFp16},
                         Case{"kivi2", ElementType::kBf16}, Case{"auto", ElementType::kE4m3}}) {
    for (const SourceOrder order : {SourceOrder{}, SourceOrder{.heads_first = true},
                                    SourceOrder{.heads_first = false, .fused = true}}) {
      SCOPED_TRACE(of.format);
      const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 3, .dim = 64}, of.source);
      const Model& model = store_.Register(testing::RequestOf(spec, of.format, 64))->model();
      const KvData data = kvtier::testing::MakeKvData(spec, 300, random_, 100.0f);
      Message message(data, {.num_heads = 3}, order, {0, 1}, {0, 300});
      ASSERT_THAT(Append("host", model, message, false), IsOk());
      ASSERT_THAT(Append("device", model, message, true), IsOk());
      EXPECT_TRUE(Everything("host") == Everything("device"));
      for (const auto* id : {"host", "device"})
        EXPECT_THAT(store_->Remove({"default", id}), IsOk());
    }
  }
}

TEST_F(DeviceAppend, IsRefusedInTheSameWords) {
  for (const auto* format : {"int8_per_token_head", "fp8_e4m3", "kivi2"}) {
    for (const float value :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 3e38f}) {
      const ModelSpec spec =
          testing::UniformSpec({.layers = 2, .heads = 3, .dim = 64}, ElementType::kFp32);
      const Model& model = store_.Register(testing::RequestOf(spec, format, 64))->model();
      const KvData data = kvtier::testing::MakeKvData(spec, 100, random_, 1.0f);
      Message message(data, {.num_heads = 3}, {}, {0, 1}, {0, 100});
      const SourceTensor& v = message.chunk().layers[1].v;
      auto* row = reinterpret_cast<float*>(const_cast<std::byte*>(v.RowsOf(2, 99).data));
      row[17] = value;
      const absl::Status host = Append("host", model, message, false);
      const absl::Status device = Append("device", model, message, true);
      EXPECT_EQ(host, device) << format;
      for (const auto* id : {"host", "device"}) store_->Remove({"default", id}).IgnoreError();
    }
  }
}

}  // namespace
}  // namespace kvtier::cachestore
