// A read as stored: final parts byte for byte, filling ones as they stood with checksums of their
// own, the rest as source; and whoever decodes it gets what the store would have read.

#include "cachestore/stored_read.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/host_codec.h"
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
using ::testing::HasSubstr;
using testing::KvData;
using testing::NaiveSequence;
using testing::TestStore;
using testing::TokenSpan;
using Bytes = std::vector<std::byte>;

constexpr std::int64_t kMemory = 8 << 20;
constexpr std::int64_t kLongest = 500;

const char* const kFormats[] = {"auto",
                                "float16",
                                "fp8",
                                "int8_per_token_head",
                                "kivi2",
                                "kivi(4,2,4,4)",
                                "kivi(2,2,32,0)",
                                "kivi(8,8,16,48)",
                                "int4_per_token_head",
                                "nvfp4",
                                "kivi2(scales=fp8_e4m3)",
                                "q4_0(k_rotation=hadamard)"};

// One K or V of a read as stored, put together from its chunks.
struct Received {
  std::map<std::int64_t, Bytes> parts;                       // by page
  std::map<std::int64_t, std::vector<std::int64_t>> tokens;  // of them, by head
  std::vector<Bytes> rows;                                   // by head, from first_row
  std::int64_t first_row = -1;
};

class StoredRead : public ::testing::Test {
 protected:
  const Model& Register(const std::string& format, ElementType source = ElementType::kBf16) {
    spec_ = testing::IrregularSpec(source);
    testing::SuitTo(format, spec_);
    data_ =
        kvtier::testing::MakeKvData(spec_, kLongest, random_, testing::LargestFor(format, spec_));
    return store_.Register(testing::RequestOf(spec_, format, 96))->model();
  }

  SequenceReader Open(const std::string& id, ReadRange range = {},
                      TokenLayout layout = TokenLayout::kNhd) {
    return store_.Read(id, {.layout = layout, .stored = true, .accept_k_rotation = true}, range);
  }
  absl::StatusOr<SequenceReader> TryOpen(const std::string& id, std::int64_t first,
                                         std::int64_t tokens) {
    return store_->OpenReader({"default", id}, "", {.first_token = first, .tokens = tokens},
                              {.stored = true});
  }

  void TakeChunk(SequenceReader& reader, std::size_t layer, Side side, TokenSpan chunk,
                 Received& out) {
    const StoredSpan span = reader.Span(layer, side, chunk.first, chunk.count);
    const TensorPins& tensor = reader.pinned(layer, side);
    const HeadRange heads = reader.heads(layer);
    const std::int64_t part_bytes = PartBytes(tensor.model->layout, heads.count());
    for (std::int64_t page = span.first_page; page < span.end_page; ++page) {
      Bytes part(static_cast<std::size_t>(part_bytes), std::byte{0xee});
      ASSERT_THAT(reader.FillPart(layer, side, page, part.data()), IsOk());
      ASSERT_TRUE(out.parts.emplace(page, std::move(part)).second) << "page " << page << " twice";
      out.tokens[page] = PartTokens(tensor, heads, page);
      bytes_ += part_bytes;
    }
    if (span.rows == 0) return;
    if (out.first_row < 0) out.first_row = span.first_row;
    const std::int64_t row = tensor.model->source_row_bytes();
    Bytes rows(static_cast<std::size_t>(span.rows * heads.count() * row), std::byte{0xee});
    ASSERT_THAT(reader.FillRows(layer, side, span, rows.data()), IsOk());
    bytes_ += static_cast<std::int64_t>(rows.size());
    out.rows.resize(static_cast<std::size_t>(heads.count()));
    const bool nhd = nhd_;
    for (int h = 0; h < heads.count(); ++h) {
      for (std::int64_t i = 0; i < span.rows; ++i) {
        const auto at = rows.begin() + (nhd ? i * heads.count() + h : h * span.rows + i) * row;
        Bytes& to = out.rows[static_cast<std::size_t>(h)];
        to.insert(to.end(), at, at + row);
      }
    }
  }

  // Reads it all in chunks of random size, and checks that the sizes are those promised.
  void ReadAll(SequenceReader& reader, std::vector<std::pair<Received, Received>>& out) {
    bytes_ = 0;
    const std::int64_t first = reader.pins().first_token, end = first + reader.pins().tokens;
    for (std::size_t layer = 0; layer < reader.layers().size(); ++layer) {
      auto& [k, v] = out.emplace_back();
      for (std::int64_t token = first; token < end;) {
        const std::int64_t tokens =
            std::min(end - token, reader.ChunkTokens(layer, token, random_.Between(1, 1 << 16)));
        ASSERT_GT(tokens, 0);
        ASSERT_NO_FATAL_FAILURE(TakeChunk(reader, layer, Side::kK, {token, tokens}, k));
        if (reader.layers()[layer].v_dim > 0) {
          ASSERT_NO_FATAL_FAILURE(TakeChunk(reader, layer, Side::kV, {token, tokens}, v));
        }
        token += tokens;
      }
    }
    EXPECT_EQ(bytes_, reader.total_bytes());
  }

  static absl::Span<const std::byte> RowOf(const Received& received, const TensorModel& tensor,
                                           int head, std::int64_t token) {
    const auto bytes = static_cast<std::size_t>(tensor.source_row_bytes());
    const Bytes& rows = received.rows.at(static_cast<std::size_t>(head));
    return absl::Span<const std::byte>(rows).subspan(
        static_cast<std::size_t>(token - received.first_row) * bytes, bytes);
  }
  static bool AllZero(absl::Span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
  }

  // Decodes one K or V as a client would and compares it with what the values alone make.
  void ExpectDecodes(const SequenceReader& reader, std::size_t layer, Side side,
                     const Received& received, const NaiveSequence& naive) {
    const LayerOutput& out = reader.layers()[layer];
    const TensorPins& tensor = reader.pinned(layer, side);
    const PartLayout& layout = tensor.model->layout;
    const HeadRange heads = reader.heads(layer);
    const PartHeader want = MakePartHeader(*tensor.model, side, false);
    for (const auto& [page, part] : received.parts)
      ASSERT_THAT(CheckPart(part, layout, want, heads, "part"), IsOk()) << page;
    const TokenSpan span{reader.pins().first_token, reader.pins().tokens};
    for (int h = 0; h < heads.count(); ++h) {
      const Bytes expected =
          naive.of(side, out.layer).Read(heads.first + h, span, ElementType::kFp32, 1.0f);
      Bytes values(static_cast<std::size_t>(4 * layout.dim));
      for (std::int64_t token = span.first; token < span.end(); ++token) {
        kernels::DecodeRun run{
            .dim = layout.dim, .tokens = 1, .out = {values.data(), ElementType::kFp32, layout.dim}};
        const std::int64_t page = token / layout.page_tokens, in_page = token % layout.page_tokens;
        const auto part = received.parts.find(page);
        if (part != received.parts.end() &&
            in_page < received.tokens.at(page)[static_cast<std::size_t>(h)]) {
          run.codec = layout.codec;
          run.scale = EntryOf(part->second.data(), heads.first + h).scale;
          run.in = part->second.data() + layout.SliceOffset(h);
          run.first_token = in_page;
          if (token >= received.first_row && received.first_row >= 0) {
            ASSERT_TRUE(AllZero(RowOf(received, *tensor.model, h, token)));
          }
        } else {
          run.codec = {.id = kernels::CodecId::kRaw, .element = tensor.model->source};
          run.in = RowOf(received, *tensor.model, h, token).data();
        }
        kernels::DecodeOnHost(run);
        ASSERT_EQ(
            std::memcmp(values.data(), expected.data() + (token - span.first) * 4 * layout.dim,
                        values.size()),
            0)
            << (side == Side::kK ? "k" : "v") << " of layer " << out.layer << ", head "
            << heads.first + h << ", token " << token;
      }
    }
  }

  void ExpectReads(SequenceReader& reader, const NaiveSequence& naive) {
    std::vector<std::pair<Received, Received>> received;
    ASSERT_NO_FATAL_FAILURE(ReadAll(reader, received));
    for (std::size_t layer = 0; layer < received.size(); ++layer) {
      ASSERT_NO_FATAL_FAILURE(ExpectDecodes(reader, layer, Side::kK, received[layer].first, naive));
      if (reader.layers()[layer].v_dim == 0) continue;
      ASSERT_NO_FATAL_FAILURE(
          ExpectDecodes(reader, layer, Side::kV, received[layer].second, naive));
    }
  }

  SeededRandom random_;
  TestStore store_{kMemory};
  ModelSpec spec_;
  KvData data_;
  std::int64_t bytes_ = 0;
  bool nhd_ = true;
};

// Layers and heads stand apart, all bounds are hit at random.
TEST_F(StoredRead, DecodesToWhatTheStoreWouldHaveRead) {
  for (const char* format : kFormats) {
    SCOPED_TRACE(format);
    const Model& model =
        Register(format, random_.Pick<ElementType>({ElementType::kBf16, ElementType::kFp32}));
    testing::RandomStreams streams(*store_, {"default", format}, model, data_, random_);
    for (int i = 0; i < 4; ++i) {
      ASSERT_NO_FATAL_FAILURE(streams.FeedTo(random_.Between(1, kLongest - 100)));
      const NaiveSequence naive(model, data_,
                                [&](int layer, int head) { return streams.received(layer, head); });
      ReadRange range;
      range.shard.first_layer = static_cast<int>(random_.Between(0, 3));
      if (random_.OneIn(2)) range.shard.num_heads = 1;
      const std::int64_t committed = streams.Committed();
      range.first_token = random_.Between(0, committed / 32) * 32;  // a bound of each format
      nhd_ = random_.OneIn(2);
      SequenceReader reader = Open(format, range, nhd_ ? TokenLayout::kNhd : TokenLayout::kHnd);
      ASSERT_NO_FATAL_FAILURE(ExpectReads(reader, naive));
    }
    streams.CloseAll();
  }
}

// One head's codes go further than the others': parts go as far, and rows begin where the first
// end.
TEST_F(StoredRead, HeadsThatStandApart) {
  for (const char* format : kFormats) {
    SCOPED_TRACE(format);
    const Model& model = Register(format);
    const auto send = [&](const Shard& shard, const std::vector<int>& layers, std::int64_t tokens) {
      const auto writer = store_.OpenWriter(format, model, shard);
      testing::Message message(data_, writer->shard(), {}, layers, {0, tokens});
      ASSERT_THAT(writer->Append(message.chunk()), IsOk());
    };
    send({.num_layers = 2, .num_heads = 1}, {0, 1}, 300);
    send({.num_layers = 2, .first_head = 1, .num_heads = 1}, {0, 1}, 140);
    send({.first_layer = 2, .num_layers = 1}, {2}, 140);
    send({.first_layer = 3, .num_layers = 1}, {3}, 140);
    const NaiveSequence naive(
        model, data_, [](int layer, int head) { return layer < 2 && head == 0 ? 300 : 140; });
    for (const bool nhd : {true, false}) {
      nhd_ = nhd;
      SequenceReader reader = Open(format, {}, nhd ? TokenLayout::kNhd : TokenLayout::kHnd);
      EXPECT_EQ(reader.pins().tokens, 140);
      ASSERT_NO_FATAL_FAILURE(ExpectReads(reader, naive));
    }
  }
}

// What comes after the read was opened doesn't show, in a part that was filling least of all.
TEST_F(StoredRead, AppendsAfterItDoNotShow) {
  for (const char* format : kFormats) {
    SCOPED_TRACE(format);
    const Model& model = Register(format);
    testing::RandomStreams streams(*store_, {"default", format}, model, data_, random_);
    ASSERT_NO_FATAL_FAILURE(streams.FeedTo(random_.Between(1, 250)));
    const NaiveSequence naive(model, data_,
                              [&](int layer, int head) { return streams.received(layer, head); });
    SequenceReader reader = Open(format);
    const std::int64_t total = reader.total_bytes();
    ASSERT_NO_FATAL_FAILURE(streams.FeedTo(kLongest));
    ASSERT_NO_FATAL_FAILURE(ExpectReads(reader, naive));
    EXPECT_EQ(reader.total_bytes(), total);
    streams.CloseAll();
  }
}

TEST_F(StoredRead, AFinalPartIsThePartAndARangeOfHeadsItsSlices) {
  const Model& model = Register("kivi4");
  store_.AppendAtOnce("s", model, data_, 300);
  SequenceReader whole = Open("s");
  const Part& part = *whole.pinned(2, Side::kK).parts[1].part;
  const PartLayout& layout = part.layout();
  Bytes all(static_cast<std::size_t>(layout.bytes));
  ASSERT_THAT(whole.FillPart(2, Side::kK, 1, all.data()), IsOk());
  const Bytes held = kvtier::testing::BytesAt(store_.device, part.data(), layout.bytes);
  EXPECT_EQ(all, held);

  SequenceReader some =
      Open("s", {.shard = {.first_layer = 2, .num_layers = 1, .first_head = 1, .num_heads = 2}});
  Bytes two(static_cast<std::size_t>(PartBytes(layout, 2)), std::byte{0xee});
  ASSERT_THAT(some.FillPart(0, Side::kK, 1, two.data()), IsOk());
  EXPECT_EQ(std::memcmp(two.data(), held.data(), static_cast<std::size_t>(layout.header_bytes)), 0);
  EXPECT_EQ(std::memcmp(two.data() + layout.header_bytes, held.data() + layout.SliceOffset(1),
                        static_cast<std::size_t>(2 * layout.slice_bytes)),
            0);
}

TEST_F(StoredRead, AFillingPartSaysHowManyTokensItHas) {
  const Model& model = Register("kivi2");
  store_.AppendAtOnce("s", model, data_, 150);  // K: 128 codes, V: 22
  SequenceReader reader = Open("s");
  const auto writer = store_.OpenWriter("s", model, {.num_layers = 1});
  testing::Message more(data_, writer->shard(), {}, {0}, {150, 30});
  ASSERT_THAT(writer->Append(more.chunk()), IsOk());  // comes too late for the reader
  const PartLayout& layout = model.layers[0].v.layout;
  Bytes part(static_cast<std::size_t>(layout.bytes), std::byte{0xee});
  ASSERT_THAT(reader.FillPart(0, Side::kV, 0, part.data()), IsOk());
  for (int head = 0; head < 2; ++head) {
    const auto codes = static_cast<std::size_t>(layout.UnitOffset(head, 22));
    const auto end = static_cast<std::size_t>(layout.SliceOffset(head + 1));
    EXPECT_TRUE(AllZero(absl::Span<const std::byte>(part).subspan(codes, end - codes)));
  }
  EXPECT_EQ(HeaderOf(part.data()).tokens, 22u);
  EXPECT_THAT(PartTokens(reader.pinned(0, Side::kV), {0, 2}, 0), ::testing::ElementsAre(22, 22));
  EXPECT_THAT(
      CheckPart(part, layout, MakePartHeader(model.layers[0].v, Side::kV, false), {0, 2}, "part"),
      IsOk());
  // In the page it goes on filling without them.
  const Part& stored = *reader.pinned(0, Side::kV).parts[0].part;
  EXPECT_EQ(HeaderOf(stored.data()).checksum, 0u);
  EXPECT_EQ(HeaderOf(stored.data()).tokens, 0u);
  const StoredSpan k = reader.Span(0, Side::kK, 0, 150), v = reader.Span(0, Side::kV, 0, 150);
  EXPECT_EQ(k.pages(), 2);
  EXPECT_EQ(std::pair(k.first_row, k.rows), std::pair(std::int64_t{128}, std::int64_t{22}));
  EXPECT_EQ(v.pages(), 1);
  EXPECT_EQ(std::pair(v.first_row, v.rows), std::pair(std::int64_t{22}, std::int64_t{128}));
}

TEST_F(StoredRead, ARangeThatCutsAGroupIsOutOfRangeAndToldTheBounds) {
  const Model& model = Register("kivi2");
  store_.AppendAtOnce("s", model, data_, 150);
  EXPECT_THAT(TryOpen("s", 0, 64), IsOk());
  EXPECT_THAT(TryOpen("s", 96, 54), IsOk());   // to the end
  EXPECT_THAT(TryOpen("s", 96, 50), IsOk());   // to a token of the residual
  EXPECT_THAT(TryOpen("s", 133, 10), IsOk());  // from one to another
  EXPECT_THAT(
      TryOpen("s", 0, 65),
      Refuses(Reason::kGroupBound, AllOf(HasSubstr("token 65: k of layer 0"),
                                         HasSubstr("groups of 32"), HasSubstr("64 and 96"))));
  EXPECT_THAT(TryOpen("s", 1, 149), Refuses(Reason::kGroupBound, HasSubstr("0 and 32")));
  EXPECT_THAT(TryOpen("s", 1, 149), HasCode(absl::StatusCode::kOutOfRange));
  EXPECT_THAT(TryOpen("s", 0, 151), Refuses(Reason::kPastCommitted, HasSubstr("150")));
}

TEST_F(StoredRead, RotatedKeysAreRefusedToAReaderWhoDidNotAskForThem) {
  const Model& model = Register("q8_0(k_rotation=hadamard)");
  store_.AppendAtOnce("s", model, data_, 96);
  EXPECT_THAT(TryOpen("s", 0, 96),
              Refuses(Reason::kFormatRefused, AllOf(HasSubstr("k of layer 0 is rotated"),
                                                    HasSubstr("set accept_k_rotation"))));
  SequenceReader reader = Open("s");
  Bytes part(static_cast<std::size_t>(PartBytes(model.layers[0].k.layout, 2)));
  ASSERT_THAT(reader.FillPart(0, Side::kK, 0, part.data()), IsOk());
  EXPECT_EQ(HeaderOf(part.data()).rotation, kernels::Rotation::kHadamard);
  EXPECT_THAT(store_->OpenReader({"default", "s"}, "", {}, {.as = ElementType::kBf16}), IsOk());
}

TEST_F(StoredRead, APageFitsAMessage) {
  const ModelSpec spec = testing::UniformSpec({.heads = 4, .dim = 1024});
  TestStore store(32 << 20);
  const Model& model = store.Register(testing::RequestOf(spec, "auto", 1024))->model();
  const auto writer = store.OpenWriter("large", model);
  const auto open = [&](int heads) {
    return store->OpenReader({"default", "large"}, "", {.shard = {.num_heads = heads}},
                             {.stored = true});
  };
  EXPECT_THAT(open(1), IsOk());
  EXPECT_THAT(open(2),
              Refuses(Reason::kFormatRefused, AllOf(HasSubstr("a page of 2 heads of layer 0"),
                                                    HasSubstr("want at most 8388608"))));
}

TEST_F(StoredRead, ADamagedPartIsDataLoss) {
  const Model& model = Register("auto");
  store_.AppendAtOnce("s", model, data_, 96);
  SequenceReader reader = Open("s");
  const Part& part = *reader.pinned(0, Side::kV).parts[0].part;
  kvtier::testing::FlipBit(store_.device, part.SliceAt(1));
  Bytes out(static_cast<std::size_t>(model.layers[0].k.layout.bytes));  // the larger of the two
  EXPECT_THAT(reader.FillPart(0, Side::kV, 0, out.data()),
              Refuses(Reason::kChecksum, HasSubstr("page 0 head 1")));
  EXPECT_THAT(reader.FillPart(0, Side::kK, 0, out.data()), IsOk());
}

}  // namespace
}  // namespace kvtier::cachestore
