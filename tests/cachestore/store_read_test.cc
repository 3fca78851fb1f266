// A reader sees the bytes of the moment it was opened, whatever happens meanwhile; what was
// committed is readable in every shape a reader may ask for; damage is noticed.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/random_streams.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::HasCode;
using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::KvData;
using testing::Message;
using testing::NaiveSequence;
using testing::ReadCheck;
using testing::TestStore;

constexpr std::int64_t kMemory = 2 << 20;
constexpr ReadFormat kAsFp32{.as = ElementType::kFp32};

class StoreRead : public ::testing::Test {
 protected:
  const Model& Register(const ModelSpec& spec, const std::string& format, int page_tokens = 64) {
    data_ = kvtier::testing::MakeKvData(spec, 600, random_);
    return store_.Register(testing::RequestOf(spec, format, page_tokens))->model();
  }

  void AppendMore(const Model& model, std::int64_t from, std::int64_t to) {
    const auto writer = store_.OpenWriter("s", model);
    Message message(data_, writer->shard(), {}, {0, 1}, {from, to - from});
    ASSERT_THAT(writer->Append(message.chunk()), IsOk());
  }

  void ExpectReads(SequenceReader& reader, const ReadFormat& format, const NaiveSequence& naive) {
    ReadCheck(reader, format, naive).Run(random_);
  }

  SeededRandom random_;
  TestStore store_{kMemory};
  KvData data_;
};

const ModelSpec& TwoLayers() {
  static const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  return spec;
}

class StoreReadSnapshot : public StoreRead, public ::testing::WithParamInterface<const char*> {};

// Further appends turn K's residual into codes and overwrite V's oldest residual in place.
TEST_P(StoreReadSnapshot, AppendsAfterItDoNotShow) {
  const Model& model = Register(TwoLayers(), GetParam());
  std::int64_t tokens = random_.Between(1, 150);
  ASSERT_NO_FATAL_FAILURE(AppendMore(model, 0, tokens));
  for (int round = 0; round < 4; ++round) {
    const NaiveSequence naive(model, data_, tokens);
    SequenceReader reader = store_.Read("s", kAsFp32);
    const std::int64_t more = random_.Between(1, 110);
    ASSERT_NO_FATAL_FAILURE(AppendMore(model, tokens, tokens + more));
    ExpectReads(reader, kAsFp32, naive);
    EXPECT_EQ(reader.pins().committed_tokens, tokens);
    tokens += more;
  }
}

// The memory that a removed sequence leaves is written all over by another one; what a reader holds
// is not among it until the reader goes.
TEST_P(StoreReadSnapshot, RemovalAndReuseOfTheMemoryDoNotShow) {
  const Model& model = Register(TwoLayers(), GetParam());
  // Odd: of a residual slot that is empty at its length the reader keeps nothing.
  const std::int64_t tokens = 2 * random_.Between(50, 199) + 1;
  ASSERT_NO_FATAL_FAILURE(AppendMore(model, 0, tokens));
  const NaiveSequence naive(model, data_, tokens);
  std::optional<SequenceReader> reader = store_.Read("s", kAsFp32);
  ASSERT_THAT(store_->Remove({"default", "s"}), IsOk());
  EXPECT_THAT(store_->OpenReader({"default", "s"}, "", {}, kAsFp32),
              Refuses(Reason::kUnknownSequence, HasSubstr("\"s\" is not held in namespace")));
  EXPECT_EQ(store_->memory().free, kMemory - PlanSequence(model, tokens).allocated);

  const KvData other = kvtier::testing::MakeKvData(TwoLayers(), 600, random_);
  int filled = 0;
  for (; store_->memory().free > 2 * PlanSequence(model, 600).allocated; ++filled)
    store_.AppendAtOnce("fill" + std::to_string(filled), model, other, 600);
  EXPECT_GT(filled, 0);
  ExpectReads(*reader, kAsFp32, naive);
  for (int i = 0; i < filled; ++i)
    EXPECT_THAT(store_->Remove({"default", "fill" + std::to_string(i)}), IsOk());
  reader.reset();
  EXPECT_EQ(store_->memory().free, kMemory);
}

TEST_P(StoreReadSnapshot, DescribeAndReadAgree) {
  const Model& model = Register(TwoLayers(), GetParam());
  testing::RandomStreams streams(*store_, {"default", "s"}, model, data_, random_);
  ASSERT_NO_FATAL_FAILURE(streams.FeedTo(random_.Between(1, 500)));
  const SequenceDescription description = store_->Describe({"default", "s"}).value();
  SequenceReader reader = store_.Read("s");
  EXPECT_EQ(reader.pins().tokens, description.committed_tokens);
  EXPECT_EQ(reader.pins().committed_tokens, streams.Committed());
  EXPECT_FALSE(reader.pins().sealed);
  for (std::size_t i = 0; i < reader.layers().size(); ++i) {
    EXPECT_EQ(reader.layers()[i].k_code_tokens, description.layers[i].k_code_tokens);
    EXPECT_EQ(reader.layers()[i].v_code_tokens, description.layers[i].v_code_tokens);
    EXPECT_EQ(reader.layers()[i].k_code_tokens,
              testing::CodeTokensOf(GetParam(), Side::kK, streams.Committed(), model.page_tokens));
    EXPECT_EQ(reader.layers()[i].v_code_tokens,
              testing::CodeTokensOf(GetParam(), Side::kV, streams.Committed(), model.page_tokens));
  }
  ASSERT_THAT(store_->Seal({"default", "s"}, streams.Committed()), IsOk());
  EXPECT_TRUE(store_.Read("s").pins().sealed);
}

INSTANTIATE_TEST_SUITE_P(Formats, StoreReadSnapshot,
                         ::testing::Values("auto", "fp8", "int8_per_token_head", "kivi2",
                                           "kivi(4,2,32,0)"),
                         [](const auto& test) { return testing::TestNameOf(test.param); });

// Heads that are ahead of the others have other codes and residual; a reader sees what is
// committed.
TEST_F(StoreRead, HeadsThatStandApart) {
  for (const char* format : {"auto", "kivi2", "kivi(4,2,32,0)"}) {
    const Model& model = Register(TwoLayers(), format);
    const std::string id = format;
    const auto first = store_.OpenWriter(id, model, {.num_layers = 2, .num_heads = 1});
    const auto second =
        store_.OpenWriter(id, model, {.num_layers = 2, .first_head = 1, .num_heads = 1});
    Message ahead(data_, first->shard(), {}, {0, 1}, {0, 300});
    Message behind(data_, second->shard(), {}, {0, 1}, {0, 140});
    ASSERT_THAT(first->Append(ahead.chunk()), IsOk());
    EXPECT_EQ(store_.Read(id).pins().tokens, 0);
    ASSERT_THAT(second->Append(behind.chunk()), IsOk());
    SequenceReader reader = store_.Read(id, kAsFp32);
    EXPECT_EQ(reader.pins().tokens, 140);
    const NaiveSequence naive(model, data_, [](int, int head) { return head == 0 ? 300 : 140; });
    ExpectReads(reader, kAsFp32, naive);
  }
}

// Any range of tokens, heads and layers, in any layout and block size.
TEST_F(StoreRead, AnyPartInAnyShape) {
  for (const char* format : {"auto", "fp8_per_token_head", "kivi4"}) {
    const ModelSpec spec = testing::IrregularSpec();
    const Model& model = Register(spec, format, 96);
    const std::string id = format;
    testing::RandomStreams streams(*store_, {"default", id}, model, data_, random_);
    ASSERT_NO_FATAL_FAILURE(streams.FeedTo(420));
    const NaiveSequence naive(model, data_,
                              [&](int layer, int head) { return streams.received(layer, head); });
    for (int i = 0; i < 30; ++i) {
      ReadRange range;
      range.shard.first_layer = static_cast<int>(random_.Between(0, 3));
      range.shard.num_layers = static_cast<int>(random_.Between(1, 4 - range.shard.first_layer));
      if (range.shard.first_layer + range.shard.num_layers < 4 && random_.OneIn(2)) {
        range.shard.first_head = static_cast<int>(random_.Between(0, 1));
        if (range.shard.first_head == 0 || random_.OneIn(2)) range.shard.num_heads = 1;
      }
      range.first_token = random_.Between(0, 419);
      range.tokens = random_.OneIn(4) ? -1 : random_.Between(1, 420 - range.first_token);
      const ReadFormat as{.as = random_.Pick<ElementType>({ElementType::kBf16, ElementType::kFp32}),
                          .layout = random_.OneIn(2) ? TokenLayout::kNhd : TokenLayout::kHnd,
                          .block_tokens = random_.Pick<int>({0, 1, 16, 100})};
      SequenceReader reader = store_.Read(id, as, range);
      EXPECT_EQ(reader.pins().tokens, range.tokens < 0 ? 420 - range.first_token : range.tokens);
      ExpectReads(reader, as, naive);
    }
  }
}

TEST_F(StoreRead, NumHeadsOfZeroMeansToTheLastOfEachLayer) {
  const Model& model = Register(testing::IrregularSpec(), "auto");
  store_.AppendAtOnce("s", model, data_, 10);
  SequenceReader all = store_.Read("s");
  std::vector<int> heads;
  for (const LayerOutput& layer : all.layers()) heads.push_back(layer.heads);
  EXPECT_THAT(heads, ElementsAre(2, 2, 4, 1));
  EXPECT_EQ(all.layers()[3].k_code_tokens, 10);
  EXPECT_EQ(all.layers()[3].v_code_tokens, 0) << "an MLA layer has no V";
  EXPECT_EQ(store_->Describe({"default", "s"})->layers[3].v_code_tokens, 0);
  SequenceReader from_one = store_.Read("s", {}, {.shard = {.num_layers = 3, .first_head = 1}});
  heads.clear();
  for (const LayerOutput& layer : from_one.layers()) heads.push_back(layer.heads);
  EXPECT_THAT(heads, ElementsAre(1, 1, 3));
  EXPECT_EQ(from_one.total_bytes(), 10 * 2 * (1 * (40 + 32) + 1 * (32 + 64) + 3 * (32 + 32)));
  const auto refuses = [&](Shard shard, const char* message) {
    EXPECT_THAT(store_->OpenReader({"default", "s"}, "", {.shard = shard}, {}),
                Refuses(Reason::kInvalidField, HasSubstr(message)));
  };
  refuses({.first_head = 1}, "are outside the 1 KV heads of layer 3");
  refuses({.num_layers = 3, .num_heads = 3}, "are outside the 2 KV heads of layer 0");
  refuses({.first_layer = 4}, "outside the model's 4 layers");
  refuses({.first_layer = 2, .num_layers = 3}, "outside the model's 4 layers");
  refuses({.first_layer = -1}, "outside the model's 4 layers");
  refuses({.first_layer = 2, .num_layers = 1, .first_head = -1}, "first_head -1");
}

TEST_F(StoreRead, PastTheCommittedLengthIsOutOfRangeWithTheLength) {
  const Model& model = Register(TwoLayers(), "kivi2");
  store_.AppendAtOnce("s", model, data_, 77);
  const auto read = [&](std::int64_t first, std::int64_t tokens) {
    return store_->OpenReader({"default", "s"}, "", {.first_token = first, .tokens = tokens}, {});
  };
  EXPECT_THAT(read(0, 77), IsOk());
  EXPECT_THAT(read(77, 0), IsOk());
  EXPECT_THAT(read(77, -1), IsOk());
  for (const auto& [first, tokens] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 78}, {70, 8}, {78, 0}, {78, -1}, {1, INT64_MAX}, {INT64_MAX, 1}}) {
    EXPECT_THAT(
        read(first, tokens),
        Refuses(Reason::kPastCommitted, AllOf(HasSubstr("\"s\""), HasSubstr("77 are committed"))));
  }
}

TEST_F(StoreRead, ABlockFitsAMessage) {
  const Model& model = Register(TwoLayers(), "auto");
  store_.AppendAtOnce("s", model, data_, 1);
  constexpr int kMost = (8 << 20) / (2 * 2 * 32 * 2);  // 8 MiB of K and V
  const auto open = [&](int block_tokens) {
    return store_->OpenReader({"default", "s"}, "", {}, {.block_tokens = block_tokens});
  };
  EXPECT_THAT(open(kMost), IsOk());
  EXPECT_THAT(open(kMost + 1), Refuses(Reason::kInvalidField,
                                       HasSubstr("block_tokens is " + std::to_string(kMost + 1))));
}

TEST_F(StoreRead, AnotherModelIdIsToldTheFieldThatDiffers) {
  const Model& model = Register(TwoLayers(), "kivi2");
  const Model& other = Register(TwoLayers(), "kivi4");
  store_.AppendAtOnce("s", model, data_, 5);
  EXPECT_THAT(store_->OpenReader({"default", "s"}, model.id, {}, {}), IsOk());
  EXPECT_THAT(store_->OpenReader({"default", "s"}, other.id, {}, {}),
              Refuses(Reason::kModelMismatch, HasSubstr("they differ in policy.kv_cache_dtype")));
  EXPECT_THAT(store_->OpenReader({"default", "s"}, "nonsense", {}, {}),
              Refuses(Reason::kUnknownModel, HasSubstr("\"nonsense\"")));
  EXPECT_THAT(store_->OpenReader({"other", "s"}, "", {}, {}),
              Refuses(Reason::kUnknownSequence, HasSubstr("namespace \"other\"")));
}

// ---- damage ----

// Flips one bit of a final part, reads, and flips it back.
class StoreReadDamage : public StoreRead {
 protected:
  void ExpectDataLoss(const std::function<std::byte*(const Part&)>& place, const char* what) {
    SequenceReader reader = store_.Read("s");
    const Part& part = *reader.pins().layers[1].v.parts[1].part;
    std::byte* const at = place(part);
    kvtier::testing::FlipBit(store_.device, at);
    EXPECT_THAT(Read(0, 64), IsOk()) << "the page before " << what;
    EXPECT_THAT(Read(64, 64), Refuses(Reason::kChecksum, HasSubstr("page 1 head "))) << what;
    EXPECT_THAT(Read(127, 1), HasCode(absl::StatusCode::kDataLoss)) << what;
    kvtier::testing::FlipBit(store_.device, at);
    EXPECT_THAT(Read(64, 64), IsOk()) << what;
  }

  absl::Status Read(std::int64_t first, std::int64_t tokens) {
    SequenceReader reader = store_.Read("s", {}, {.first_token = first, .tokens = tokens});
    std::vector<std::byte> out(1 << 16);
    return reader.Fill(1, first, tokens, out.data(), out.data() + (out.size() / 2));
  }
};

TEST_F(StoreReadDamage, AFlippedBitInAFinalPartIsDataLoss) {
  for (const char* format : {"auto", "fp8", "int8_per_token_head", "kivi(2,2,32,0)"}) {
    SCOPED_TRACE(format);
    const Model& model = Register(TwoLayers(), format);
    store_.AppendAtOnce("s", model, data_, 200);
    const PartLayout& layout = model.layers[1].v.layout;
    const auto begin = [](const Part& part) {
      return part.SliceAt(0) - part.layout().header_bytes;
    };
    for (int head = 0; head < 2; ++head) {
      const std::int64_t somewhere = random_.Between(0, layout.slice_bytes - 1);
      ExpectDataLoss([&](const Part& p) { return p.SliceAt(head) + somewhere; }, "a slice");
      ExpectDataLoss([&](const Part& p) { return p.SliceAt(head) + layout.slice_bytes - 1; },
                     "a slice's last byte");
      ExpectDataLoss([&](const Part& p) { return begin(p) + kPartHeaderBytes + head * 16 + 3; },
                     "a slice's checksum");
      ExpectDataLoss([&](const Part& p) { return begin(p) + kPartHeaderBytes + head * 16 + 10; },
                     "a head's scale");
    }
    const std::int64_t in_header = random_.Between(0, kPartHeaderBytes - 1);
    ExpectDataLoss([&](const Part& p) { return begin(p) + in_header; }, "the header");
    ASSERT_THAT(store_->Remove({"default", "s"}), IsOk());
  }
}

// Damage to one head is not seen by who reads the others.
TEST_F(StoreReadDamage, OnlyTheHeadsReadAreChecked) {
  const Model& model = Register(TwoLayers(), "auto");
  store_.AppendAtOnce("s", model, data_, 64);
  SequenceReader whole = store_.Read("s");
  kvtier::testing::FlipBit(store_.device, whole.pins().layers[0].k.parts[0].part->SliceAt(1));
  std::vector<std::byte> k(1 << 14), v(1 << 14);
  const auto read_head = [&](int head) {
    SequenceReader reader = store_.Read("s", {}, {.shard = {.first_head = head, .num_heads = 1}});
    return reader.Fill(0, 0, 64, k.data(), v.data());
  };
  EXPECT_THAT(read_head(0), IsOk());
  EXPECT_THAT(read_head(1), Refuses(Reason::kChecksum, HasSubstr("page 0 head 1")));
}

// ---- a device that fails ----

TEST_F(StoreRead, AFailingReadSaysSoAndHarmsNothing) {
  const Model& model = Register(TwoLayers(), "kivi2");
  store_.AppendAtOnce("s", model, data_, 150);
  SequenceReader reader = store_.Read("s");
  std::vector<std::byte> k(1 << 16), v(1 << 16);
  store_.device.FailDecode(1);
  EXPECT_THAT(reader.Fill(0, 0, 150, k.data(), v.data()), HasCode(absl::StatusCode::kUnavailable));
  store_.device.FailDecode(0);
  ExpectReads(reader, {}, NaiveSequence(model, data_, 150));
}

// Residual that was committed may be overwritten when the last batch fails: nothing is left to
// trust, so the sequence goes and its memory comes back.
TEST_F(StoreRead, ADeviceThatFailsAnAppendTakesTheSequenceWithIt) {
  const Model& model = Register(TwoLayers(), "kivi2");
  for (int failing = 1; failing <= 3; ++failing) {
    store_.AppendAtOnce("s", model, data_, 150);
    absl::Status told;
    WriterRequest request;
    request.key = {"default", "s"};
    request.model_id = model.id;
    request.on_end = [&](const absl::Status& why) { told = why; };
    const auto writer = store_->OpenWriter(std::move(request)).value();
    Message message(data_, writer->shard(), {}, {0, 1}, {150, 200});
    store_.device.FailEncode(failing);
    EXPECT_THAT(writer->Append(message.chunk()), HasCode(absl::StatusCode::kUnavailable));
    store_.device.FailEncode(0);
    EXPECT_THAT(told, HasCode(absl::StatusCode::kUnavailable));
    EXPECT_THAT(store_->OpenReader({"default", "s"}, "", {}, {}),
                Refuses(Reason::kUnknownSequence, HasSubstr("\"s\"")));
    EXPECT_EQ(store_->memory().free, kMemory);
  }
}

}  // namespace
}  // namespace kvtier::cachestore
