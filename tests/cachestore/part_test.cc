// The bytes of a part are those that docs/page_format.md describes, its example among them.

#include "cachestore/part.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cachestore/stored_bytes.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::CodecId;
using kernels::ElementType;
using testing::KvData;
using testing::Message;
using testing::TestStore;
using Bytes = std::vector<std::byte>;

constexpr std::int64_t kMemory = 1 << 20;

// One layer of two heads; value i of a tensor, counted as [heads, tokens, dim] and on from K to V,
// is ((37 i mod 101) - 50) / 16.
KvData ExampleData(const ModelSpec& spec, std::int64_t tokens) {
  kvtier::testing::Random random(0);
  KvData data = kvtier::testing::MakeKvData(spec, tokens, random);
  int i = 0;
  for (auto* tensor : {&data.layers[0].k, &data.layers[0].v}) {
    for (int head = 0; head < tensor->heads; ++head) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int channel = 0; channel < tensor->dim; ++channel)
          tensor->Set(head, token, channel, static_cast<float>(i++ * 37 % 101 - 50) / 16.0f);
      }
    }
  }
  return data;
}

template <class T>
T At(const Bytes& bytes, std::int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

std::uint64_t Checksum(const Bytes& bytes, std::int64_t offset, std::int64_t size) {
  return XXH3_64bits(bytes.data() + offset, static_cast<std::size_t>(size));
}

// Lines of 16 bytes: offset, then the bytes.
std::string HexDump(const Bytes& bytes) {
  std::string dump;
  for (std::size_t at = 0; at < bytes.size(); at += 16) {
    dump += fmt::format("{:04x} ", at);
    for (std::size_t i = at; i < std::min(at + 16, bytes.size()); ++i)
      dump += fmt::format(" {:02x}", static_cast<unsigned>(bytes[i]));
    dump += '\n';
  }
  return dump;
}

class PartTest : public ::testing::Test {
 protected:
  // The parts of K and V after `tokens` tokens of ExampleData.
  std::vector<testing::StoredTensor> Store(const ModelRequest& request, std::int64_t tokens) {
    const Model& model = store_.Register(request)->model();
    store_.AppendAtOnce("s", model, ExampleData(request.spec, tokens), tokens);
    auto stored = testing::StoredBytesOf(store_.device, store_.Read("s").pins());
    EXPECT_THAT(store_->Remove({"default", "s"}), kvtier::testing::IsOk());
    return stored;
  }

  TestStore store_{kMemory};
};

ModelRequest KiviExample() {
  return testing::RequestOf(testing::UniformSpec({.layers = 1, .heads = 2, .dim = 4}),
                            "kivi(2,2,4,4)", 16);
}

TEST_F(PartTest, TheDocumentedExampleIsWhatTheStoreWrites) {
  std::ifstream file(KVTIER_TEST_DATA "/../../docs/page_format.md");
  std::stringstream document;
  document << file.rdbuf();
  ASSERT_FALSE(document.str().empty());
  const auto stored = Store(KiviExample(), 20);
  for (const std::size_t side : {0u, 1u}) {
    const std::string dump = HexDump(stored[side].parts[0]);
    EXPECT_NE(document.str().find(dump), std::string::npos) << dump;
  }
}

TEST_F(PartTest, HeaderSaysHowThePartIsStored) {
  ModelRequest request = KiviExample();
  request.spec.k_rope = RopeState::kBefore;
  const auto stored = Store(request, 20);
  for (const Side side : {Side::kK, Side::kV}) {
    const Bytes& part = stored[side == Side::kK ? 0 : 1].parts[0];
    EXPECT_EQ(std::memcmp(part.data(), "KVTP", 4), 0);
    EXPECT_EQ(At<std::uint16_t>(part, 4), 1);
    EXPECT_EQ(At<Side>(part, 6), side);
    EXPECT_EQ(At<CodecId>(part, 7), side == Side::kK ? CodecId::kKiviChannel : CodecId::kKiviToken);
    EXPECT_EQ(At<ElementType>(part, 9), ElementType::kBf16);
    EXPECT_EQ(At<std::uint8_t>(part, 10), 2);
    EXPECT_EQ(At<std::uint8_t>(part, 11), 1);
    EXPECT_EQ(At<std::uint16_t>(part, 12), 4);
    EXPECT_EQ(At<std::uint16_t>(part, 14), 2);
    EXPECT_EQ(At<std::uint32_t>(part, 16), 4u);
    EXPECT_EQ(At<std::uint32_t>(part, 20), 16u);
    EXPECT_EQ(At<std::uint32_t>(part, 24), 16u);
    EXPECT_EQ(At<std::uint32_t>(part, 28), 80u);
    EXPECT_EQ(At<std::uint64_t>(part, 32), 0u);
  }
}

TEST_F(PartTest, ChecksumsCoverTheHeaderAndEachSlice) {
  for (const char* format : {"auto", "fp8", "int8_per_token_head", "kivi(4,8,4,0)"}) {
    ModelRequest request = KiviExample();
    request.policy.kv_cache_dtype = format;
    for (const testing::StoredTensor& tensor : Store(request, 16)) {
      Bytes part = tensor.parts.at(0);
      const std::int64_t slice = At<std::uint32_t>(part, 28);
      for (int head = 0; head < 2; ++head)
        EXPECT_EQ(At<std::uint64_t>(part, 64 + 16 * head),
                  Checksum(part, 128 + head * slice, slice));
      const auto stored = At<std::uint64_t>(part, 56);
      std::memset(part.data() + 56, 0, 8);
      EXPECT_EQ(stored, Checksum(part, 0, 64 + 2 * 16)) << format;
      EXPECT_EQ(static_cast<std::int64_t>(part.size()), AlignUp(128 + 2 * slice));
    }
  }
}

TEST_F(PartTest, Fp8KeepsItsScalesAndItsCountOfSaturatedValues) {
  ModelRequest request = KiviExample();
  request.policy.kv_cache_dtype = "fp8";
  // 50 / 16 over 0.005 is 625, past 448; and over 0.01 it isn't.
  request.scales = {{.layer = 0, .k = {0.005f, 0.01f}, .v = {0.01f}}};
  const auto stored = Store(request, 16);
  const Bytes& k = stored[0].parts[0];
  EXPECT_EQ(At<float>(k, 64 + 8), 0.005f);
  EXPECT_EQ(At<float>(k, 64 + 16 + 8), 0.01f);
  EXPECT_EQ(At<float>(stored[1].parts[0], 64 + 16 + 8), 0.01f);
  std::uint64_t past = 0;
  const KvData data = ExampleData(request.spec, 16);
  for (int token = 0; token < 16; ++token) {
    for (int channel = 0; channel < 4; ++channel)
      past += std::abs(data.layers[0].k.Get(0, token, channel)) / 0.005f > 464 ? 1 : 0;
  }
  EXPECT_GT(past, 0u);
  EXPECT_EQ(At<std::uint64_t>(k, 32), past);
  EXPECT_EQ(At<std::uint64_t>(stored[1].parts[0], 32), 0u);
}

// Heads fill up one by one; only with the last the part is final.
TEST_F(PartTest, AFillingPartHasNoHeaderYetAndZeroesWhereNothingIs) {
  ModelRequest request = KiviExample();
  request.policy.kv_cache_dtype = "auto";
  const Model& model = store_.Register(request)->model();
  const KvData data = ExampleData(request.spec, 16);
  const auto first = store_.OpenWriter("s", model, {.num_heads = 1});
  const auto second = store_.OpenWriter("s", model, {.first_head = 1});
  Message full(data, first->shard(), {}, {0}, {0, 16});
  Message part_way(data, second->shard(), {}, {0}, {0, 9});
  ASSERT_THAT(first->Append(full.chunk()), kvtier::testing::IsOk());
  ASSERT_THAT(second->Append(part_way.chunk()), kvtier::testing::IsOk());
  const Bytes part =
      testing::StoredTensorOf(store_.device, store_.Read("s").pins().layers[0].k, 9).parts[0];
  for (std::size_t at = 0; at < 128; ++at) ASSERT_EQ(part[at], std::byte{0}) << "byte " << at;
  for (std::size_t at = 128 + 128 + 9 * 8; at < part.size(); ++at)
    ASSERT_EQ(part[at], std::byte{0}) << "byte " << at;
}

}  // namespace
}  // namespace kvtier::cachestore
