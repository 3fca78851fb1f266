// Parts that a writer sends as codes: what they may be is checked to the last field, and what is
// refused changes nothing. That they make the bytes that the store would have made is
// store_path_independence_test.cc's.

#include "cachestore/stored_append.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/cachestore/stored_bytes.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::HasCode;
using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::KvData;
using testing::Message;
using testing::TestStore;
using Bytes = std::vector<std::byte>;

constexpr std::int64_t kMemory = 4 << 20;
constexpr int kPage = 32;
constexpr std::int64_t kTokens = 200;

const ModelSpec& Spec() {
  static const ModelSpec spec = testing::UniformSpec({.layers = 1, .heads = 2, .dim = 32});
  return spec;
}

class StoredAppend : public ::testing::Test {
 protected:
  const Model& Register(const std::string& format, const std::vector<float>& scales = {}) {
    data_ = kvtier::testing::MakeKvData(Spec(), kTokens, random_);
    ModelRequest request = testing::RequestOf(Spec(), format, kPage);
    if (!scales.empty()) request.scales = {{.layer = 0, .k = scales, .v = scales}};
    model_ = &store_.Register(request)->model();
    return *model_;
  }

  // Sends tokens [0, kTokens) with pages 0 to 1 of one side as codes that `spoil` has changed.
  absl::StatusOr<AppendResult> Send(Side side, const std::function<void(Bytes&)>& spoil,
                                    bool saturate = false) {
    const auto writer = store_.OpenWriter("s", *model_);
    Message message(data_, writer->shard(), {}, {0}, {0, kTokens});
    const TensorModel& tensor = side == Side::kK ? model_->layers[0].k : model_->layers[0].v;
    spoil(message.Store(0, side, tensor, data_, 0, 2)[1]);
    message.chunk().saturate_non_finite = saturate;
    auto result = writer->Append(message.chunk());
    if (!result.ok()) {
      EXPECT_EQ(writer->standing().received_tokens, 0);
      EXPECT_EQ(store_->memory().free, kMemory) << "memory was taken";
    }
    return result;
  }
  // The same, with checksums that fit what it is now.
  absl::StatusOr<AppendResult> SendIntact(Side side, const std::function<void(Bytes&)>& change,
                                          bool saturate = false) {
    return Send(
        side,
        [&](Bytes& part) {
          change(part);
          testing::Checksums(part, model_->layers[0].k.layout);
        },
        saturate);
  }

  template <class T>
  static void Put(Bytes& part, std::int64_t offset, T value) {
    std::memcpy(part.data() + offset, &value, sizeof value);
  }

  SeededRandom random_;
  TestStore store_{kMemory};
  KvData data_;
  const Model* model_ = nullptr;
};

TEST_F(StoredAppend, AnyBitThatFlipsOnTheWayIsNoticed) {
  for (const char* format : {"auto", "kivi2", "int8_per_token_head"}) {
    const Model& model = Register(format);
    const PartLayout& layout = model.layers[0].k.layout;
    std::vector<std::int64_t> places;
    for (std::int64_t at = 0; at < layout.header_use(); ++at) places.push_back(at);
    for (int i = 0; i < 20; ++i)
      places.push_back(random_.Between(layout.header_bytes, layout.SliceOffset(2) - 1));
    for (const std::int64_t at : places) {
      const auto bit = std::byte{static_cast<unsigned char>(1 << random_.Between(0, 7))};
      const Side side = random_.OneIn(2) ? Side::kK : Side::kV;
      EXPECT_THAT(
          Send(side, [&](Bytes& part) { part[static_cast<std::size_t>(at)] ^= bit; }),
          AnyOf(HasCode(absl::StatusCode::kDataLoss), HasCode(absl::StatusCode::kInvalidArgument)))
          << format << ", byte " << at;
    }
    EXPECT_THAT(Send(Side::kK, [](Bytes&) {}), IsOk());
    ASSERT_THAT(store_->Remove({"default", "s"}), IsOk());
  }
}

// With checksums that fit: what remains are the rules.
TEST_F(StoredAppend, EveryFieldOfTheHeaderMustBeTheModels) {
  Register("kivi2");
  struct Field {
    const char* name;
    std::size_t offset, size;
  };
  const Field fields[] = {
      {"magic", offsetof(PartHeader, magic), 4},
      {"version", offsetof(PartHeader, version), 2},
      {"side", offsetof(PartHeader, side), 1},
      {"codec", offsetof(PartHeader, codec), 1},
      {"element", offsetof(PartHeader, element), 1},
      {"source", offsetof(PartHeader, source), 1},
      {"bits", offsetof(PartHeader, bits), 1},
      {"k_before_rope", offsetof(PartHeader, k_before_rope), 1},
      {"group", offsetof(PartHeader, group), 2},
      {"heads", offsetof(PartHeader, heads), 2},
      {"dim", offsetof(PartHeader, dim), 4},
      {"page_tokens", offsetof(PartHeader, page_tokens), 4},
      {"tokens", offsetof(PartHeader, tokens), 4},
      {"slice_bytes", offsetof(PartHeader, slice_bytes), 4},
      {"saturated", offsetof(PartHeader, saturated), 8},
      {"rotation", offsetof(PartHeader, rotation), 1},
      {"reserved", offsetof(PartHeader, reserved), 15},
  };
  for (const Field& field : fields) {
    for (int i = 0; i < 8; ++i) {
      EXPECT_THAT(SendIntact(Side::kK,
                             [&](Bytes& part) {
                               const auto byte = static_cast<std::size_t>(
                                   random_.Between(0, static_cast<std::int64_t>(field.size) - 1));
                               part[field.offset + byte] ^=
                                   std::byte{static_cast<unsigned char>(random_.Between(1, 255))};
                             }),
                  Refuses(Reason::kInvalidField, AllOf(HasSubstr("k_parts[1], page 1 of layer 0"),
                                                       HasSubstr(field.name), HasSubstr("want"))));
    }
  }
}

TEST_F(StoredAppend, CountsAndScalesOfHeadsMustFit) {
  Register("fp8", {0.5f, 0.25f});
  const auto entry = [](int head, std::size_t offset) {
    return kPartHeaderBytes + head * kHeadEntryBytes + static_cast<std::int64_t>(offset);
  };
  const std::int64_t scale = entry(1, offsetof(HeadEntry, scale));
  EXPECT_THAT(SendIntact(Side::kV, [&](Bytes& part) { Put(part, scale, 0.5f); }),
              Refuses(Reason::kInvalidField, HasSubstr("scale of head 1 is 0.5; want 0.25")));
  const std::int64_t saturated = entry(1, offsetof(HeadEntry, saturated));
  EXPECT_THAT(SendIntact(Side::kV, [&](Bytes& part) { Put(part, saturated, 2000000u); }),
              Refuses(Reason::kInvalidField, HasSubstr("saturated of head 1 is 2000000")));
  EXPECT_THAT(
      SendIntact(Side::kV,
                 [&](Bytes& part) { Put(part, saturated, EntryOf(part.data(), 1).saturated + 1); }),
      Refuses(Reason::kInvalidField, HasSubstr("what its heads have together")));
  Register("kivi2");
  for (const float bad : {-1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    EXPECT_THAT(SendIntact(Side::kK, [&](Bytes& part) { Put(part, scale, bad); }),
                Refuses(Reason::kInvalidField, HasSubstr("scale of head 1")));
  }
}

// Scales and minima of all formats that keep them with the codes, and values kept as they are.
TEST_F(StoredAppend, WhatDoesNotReadAsFiniteIsRefused) {
  for (const char* format : {"auto", "float16", "fp8", "fp8_e5m2", "int8_per_token_head",
                             "fp8_per_token_head", "q8_0", "q4_0", "kivi2", "kivi(8,8,16,48)"}) {
    const Model& model = Register(format);
    const PartLayout& layout = model.layers[0].k.layout;
    const auto fill = [&](Bytes& part) {
      std::memset(part.data() + layout.SliceOffset(1), 0xff,
                  static_cast<std::size_t>(layout.slice_bytes));
    };
    EXPECT_THAT(SendIntact(Side::kK, fill),
                Refuses(Reason::kNonFiniteValue, HasSubstr("a value of head 1 is not finite")))
        << format;
  }
  // As vLLM does, if asked to.
  Register("fp8");
  const auto nan = [](Bytes& part) { part[part.size() - 1] = std::byte{0x7f}; };
  EXPECT_THAT(SendIntact(Side::kV, nan), Refuses(Reason::kNonFiniteValue, HasSubstr("v_parts")));
  EXPECT_THAT(SendIntact(Side::kV, nan, true), IsOk());
}

TEST_F(StoredAppend, AnInfinityIsNotFinite) {
  const Model& model = Register("kivi2");
  const PartLayout& layout = model.layers[0].k.layout;
  const auto infinite = [&](Bytes& part) {  // the first scale of the first unit
    Put(part, layout.SliceOffset(0) + layout.unit.codes, std::uint16_t{0x7c00});
    part[static_cast<std::size_t>(layout.SliceOffset(0))] = std::byte{0xff};
  };
  EXPECT_THAT(SendIntact(Side::kK, infinite),
              Refuses(Reason::kNonFiniteValue, HasSubstr("head 0")));
}

// Tokens of the page are here already, and some of their values saturated: a part that says
// otherwise would take them back.
TEST_F(StoredAppend, APartCannotTakeBackWhatWasCounted) {
  const Model& model = Register("fp8", {1.0f});
  data_.layers[0].k.Set(1, 3, 7, 1000.0f);
  data_.layers[0].k.Set(1, 20, 7, 1000.0f);
  const auto writer = store_.OpenWriter("s", model);
  Message first(data_, writer->shard(), {}, {0}, {0, 10});
  ASSERT_THAT(writer->Append(first.chunk()), IsOk());
  const std::int64_t counted = store_->Describe({"default", "s"})->saturated_values;
  Message again(data_, writer->shard(), {}, {0}, {0, kPage});
  Bytes& part = again.Store(0, Side::kK, model.layers[0].k, data_, 0, 1)[0];
  const Bytes honest = part;
  for (int head = 0; head < 2; ++head) WriteEntry(part.data(), head, {.scale = 1.0f});
  PartHeader header = HeaderOf(part.data());
  header.saturated = 0;
  WriteHeader(part.data(), header);
  testing::Checksums(part, model.layers[0].k.layout);
  EXPECT_THAT(writer->Append(again.chunk()),
              Refuses(Reason::kInvalidField, HasSubstr("counted of its tokens")));
  EXPECT_EQ(store_->Describe({"default", "s"})->saturated_values, counted);
  part = honest;
  const auto result = writer->Append(again.chunk());
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->received_tokens, kPage);
}

// Garbage with checksums that fit is the writer's own: it is kept, read, and freed.
TEST_F(StoredAppend, GarbageHarmsNobody) {
  for (const char* format : {"auto", "fp8", "int8_per_token_head", "q4_0", "kivi2"}) {
    const Model& model = Register(format);
    const PartLayout& layout = model.layers[0].k.layout;
    for (int round = 0; round < 20; ++round) {
      const bool finite = round % 2 == 0;  // no byte makes an Inf or NaN, whatever it is part of
      const auto result = SendIntact(Side::kK, [&](Bytes& part) {
        for (std::int64_t at = layout.header_bytes; at < layout.bytes; ++at)
          part[static_cast<std::size_t>(at)] =
              std::byte{static_cast<unsigned char>(random_.Between(0, finite ? 0x3f : 0xff))};
      });
      if (!finite && !result.ok()) {
        EXPECT_THAT(result, HasCode(absl::StatusCode::kInvalidArgument));
        continue;
      }
      ASSERT_THAT(result, IsOk());
      EXPECT_EQ(store_->Describe({"default", "s"})->held, PlanSequence(model, kTokens));
      SequenceReader reader = store_.Read("s");
      Bytes k(kTokens * 2 * 32 * 2), v(k.size());
      EXPECT_THAT(reader.Fill(0, 0, kTokens, k.data(), v.data()), IsOk());
      ASSERT_THAT(store_->Remove({"default", "s"}), IsOk());
    }
    EXPECT_EQ(store_->memory().free, kMemory);
  }
}

}  // namespace
}  // namespace kvtier::cachestore
