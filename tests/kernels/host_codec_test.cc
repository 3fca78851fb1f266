#include "kernels/host_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/codec_table.h"
#include "tests/kernels/codec_cases.h"

namespace kvtier::kernels {
namespace {

using testing::AllCodecs;
using testing::Encode;
using testing::GroupIn;
using testing::NameOf;
using testing::SourceRows;
using Bytes = std::vector<std::byte>;

constexpr ElementType kSources[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
constexpr ElementType kOutputs[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                    ElementType::kE4m3, ElementType::kE5m2};
constexpr int kDim = 128;  // where one codec is tested
constexpr std::size_t kGuard = 64;
constexpr std::byte kCanary{0xa5};

SourceRows RandomRows(ElementType type, std::int64_t tokens, int dim = kDim) {
  std::mt19937 random(10);
  std::normal_distribution<float> normal(0.5f);
  return SourceRows(type, dim, tokens).Fill([&](std::int64_t, int) { return normal(random); });
}

int SomeUnits(const Codec& codec) { return UnitTokens(codec) == 1 ? 7 : 3; }

TEST(HostCodec, EncodingInPiecesEqualsEncodingAtOnce) {
  for (const Codec& codec : AllCodecs()) {
    const int units = SomeUnits(codec), dim = testing::SomeDim(codec);
    const std::int64_t unit_bytes = UnitSizeOf(codec, dim).total();
    for (const ElementType type : kSources) {
      const auto source = RandomRows(type, std::int64_t{units} * UnitTokens(codec), dim);
      const Bytes whole = Encode(codec, source);
      for (int cut = 0; cut <= units; ++cut) {
        Bytes pieces(whole.size());
        EncodeOnHost({codec, dim, 1.0f, source.View(), cut, pieces.data()});
        EncodeOnHost({codec, dim, 1.0f, source.View(std::int64_t{cut} * UnitTokens(codec)),
                      units - cut, pieces.data() + cut * unit_bytes});
        ASSERT_EQ(pieces, whole) << NameOf(codec) << ", " << ElementName(type) << ", cut " << cut;
      }
    }
  }
}

// As a head that has no whole unit yet: UBSan sees a copy to or from null, even of no bytes.
TEST(HostCodec, NoUnitsNeedNoBuffers) {
  for (const Codec& codec : AllCodecs()) {
    const int dim = testing::SomeDim(codec);
    for (const ElementType type : kSources) {
      EXPECT_EQ(EncodeOnHost({codec, dim, 1.0f, {nullptr, type, dim}, 0, nullptr}), 0u);
      EXPECT_EQ(DecodeOnHost({codec, dim, 1.0f, nullptr, 0, 0, 1.0f, {nullptr, type, dim}}), 0u);
    }
  }
}

TEST(HostCodec, EncodingWritesItsUnitsAndNothingElse) {
  for (const Codec& codec : AllCodecs()) {
    const int units = SomeUnits(codec), dim = testing::SomeDim(codec);
    const auto size = static_cast<std::size_t>(units * UnitSizeOf(codec, dim).total());
    for (const ElementType type : kSources) {
      const auto source = RandomRows(type, std::int64_t{units} * UnitTokens(codec), dim);
      // Two canaries: a byte that keeps both was never written.
      Bytes written(size, std::byte{0});
      for (const std::byte canary : {kCanary, ~kCanary}) {
        Bytes out(size + 2 * kGuard, canary);
        EncodeOnHost({codec, dim, 1.0f, source.View(), units, out.data() + kGuard});
        for (std::size_t i = 0; i < kGuard; ++i) {
          ASSERT_EQ(out[i], canary) << NameOf(codec);
          ASSERT_EQ(out[kGuard + size + i], canary) << NameOf(codec);
        }
        for (std::size_t i = 0; i < size; ++i) {
          if (out[kGuard + i] != canary) written[i] = std::byte{1};
        }
      }
      ASSERT_EQ(written, Bytes(size, std::byte{1})) << NameOf(codec) << ", " << ElementName(type);
    }
  }
}

// With 5 channels a unit takes 25 bytes, and its fp16 words lie at odd addresses.
TEST(HostCodec, OddDimsGiveTheBytesOfTheirChannels) {
  const Codec codec{.id = CodecId::kKiviChannel, .bits = 2, .group = 4};
  const auto value = [](std::int64_t token, int c) {
    return std::sin(static_cast<float>(token * 5 + c));
  };
  const auto odd = SourceRows(ElementType::kBf16, 5, 12).Fill(value);
  const auto even = SourceRows(ElementType::kBf16, 6, 12).Fill(value);
  const Bytes odd_stored = Encode(codec, odd), even_stored = Encode(codec, even);
  ASSERT_EQ(odd_stored.size(), 3u * 25u);
  for (int unit = 0; unit < 3; ++unit) {
    for (int c = 0; c < 5; ++c) {
      EXPECT_EQ(GroupIn(codec, 5, odd_stored.data() + 25 * unit, c),
                GroupIn(codec, 6, even_stored.data() + 30 * unit, c));
    }
  }
  const auto odd_values = testing::Decode(codec, 5, odd_stored, 0, 12);
  const auto even_values = testing::Decode(codec, 6, even_stored, 0, 12);
  for (std::size_t token = 0; token < 12; ++token) {
    for (std::size_t c = 0; c < 5; ++c) {
      EXPECT_EQ(odd_values[token * 5 + c], even_values[token * 6 + c]);
    }
  }
}

// A decode job's output: rows `stride` elements apart between guards.
struct Read {
  Bytes bytes;
  std::uint64_t saturated = 0;
};
Read ReadRange(const Codec& codec, const Bytes& stored, ElementType type, std::int64_t first,
               std::int64_t tokens) {
  const int dim = testing::SomeDim(codec);
  const std::int64_t stride = dim + 8;
  Read read{
      Bytes(2 * kGuard + static_cast<std::size_t>(tokens * stride * ElementBytes(type)), kCanary)};
  read.saturated = DecodeOnHost({.codec = codec,
                                 .dim = dim,
                                 .scale = 0.5f,
                                 .in = stored.data(),
                                 .first_token = first,
                                 .tokens = tokens,
                                 .out_scale = 0.25f,
                                 .out = {read.bytes.data() + kGuard, type, stride}});
  return read;
}

// Rows of a read without gaps and guards; checks that those were left alone.
Bytes RowsOf(const Read& read, ElementType type, int dim) {
  const std::size_t row =
      static_cast<std::size_t>(dim) * static_cast<std::size_t>(ElementBytes(type));
  const std::size_t stride = row + 8 * static_cast<std::size_t>(ElementBytes(type));
  Bytes rows;
  for (std::size_t i = 0; i < read.bytes.size(); ++i) {
    const bool inside = i >= kGuard && i < read.bytes.size() - kGuard;
    if (inside && (i - kGuard) % stride < row) {
      rows.push_back(read.bytes[i]);
    } else if (read.bytes[i] != kCanary) {
      ADD_FAILURE() << "byte " << i << " lies outside the rows and was written";
      break;
    }
  }
  return rows;
}

TEST(HostCodec, ReadOfARangeIsASliceOfTheWhole) {
  std::mt19937 random(11);
  for (const Codec& codec : AllCodecs()) {
    const std::int64_t tokens = std::int64_t{SomeUnits(codec)} * UnitTokens(codec);
    const int dim = testing::SomeDim(codec);
    const Bytes stored = Encode(codec, RandomRows(ElementType::kBf16, tokens, dim), 0.5f);
    for (const ElementType type : kOutputs) {
      SCOPED_TRACE(NameOf(codec) + " as " + ElementName(type));
      const std::size_t row =
          static_cast<std::size_t>(dim) * static_cast<std::size_t>(ElementBytes(type));
      const Bytes whole = RowsOf(ReadRange(codec, stored, type, 0, tokens), type, dim);
      ASSERT_EQ(whole.size(), static_cast<std::size_t>(tokens) * row);
      for (int trial = 0; trial < 8; ++trial) {
        // The first trials begin around a unit boundary.
        const std::int64_t first = trial < 3 ? UnitTokens(codec) + trial - 1
                                             : static_cast<std::int64_t>(random()) % tokens;
        const std::int64_t count = static_cast<std::int64_t>(random()) % (tokens - first + 1);
        const Bytes part = RowsOf(ReadRange(codec, stored, type, first, count), type, dim);
        const auto from = whole.begin() + first * static_cast<std::int64_t>(row);
        ASSERT_EQ(part, Bytes(from, from + count * static_cast<std::int64_t>(row)))
            << "tokens " << first << " + " << count;
      }
    }
  }
}

// Every output is the fp32 read, rounded once more, saturating; FP8 after division by its scale.
TEST(HostCodec, OutputsAreTheFp32ReadRounded) {
  for (const Codec& codec : AllCodecs()) {
    const std::int64_t tokens = UnitTokens(codec);
    const int dim = testing::SomeDim(codec);
    auto source = RandomRows(ElementType::kFp32, tokens, dim);
    // Times 0.5 / 0.25 beyond what E4M3 holds.
    source.Set(0, 3, std::min(30000.0f, MagnitudeLimit(codec, dim)));
    const Bytes stored = Encode(codec, source, 0.5f);
    const auto values = testing::Decode(codec, dim, stored, 0, tokens, 0.5f);
    for (const ElementType type : kOutputs) {
      if (type == codec.element && codec.id == CodecId::kRaw) continue;
      const Read read = ReadRange(codec, stored, type, 0, tokens);
      const Bytes rows = RowsOf(read, type, dim);
      std::uint64_t saturated = 0;
      VisitElement(type, [&](auto element) {
        using T = decltype(element);
        for (std::size_t i = 0; i < values.size(); ++i) {
          const float value = sizeof(T) == 1 ? values[i] / 0.25f : values[i];
          const T want = Saturate<T>(value);
          saturated += Overflows<T>(value) ? 1 : 0;
          // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): bits are what is promised
          ASSERT_EQ(std::memcmp(&want, rows.data() + i * sizeof(T), sizeof(T)), 0)
              << NameOf(codec) << " as " << ElementName(type) << ", value " << value;
        }
      });
      EXPECT_EQ(read.saturated, saturated) << NameOf(codec) << " as " << ElementName(type);
    }
  }
}

TEST(HostCodec, CastsCountWhatSaturates) {
  const Codec halves{.id = CodecId::kRaw, .element = ElementType::kFp16};
  auto source = RandomRows(ElementType::kBf16, 2);
  source.Set(0, 0, 65536.0f);
  source.Set(1, 127, -1e30f);
  source.Set(1, 1, 65280.0f);  // the bf16 value below the limit
  Bytes out(2 * 2 * kDim);
  EXPECT_EQ(EncodeOnHost({halves, kDim, 1.0f, source.View(), 2, out.data()}), 2u);
  const auto values = testing::Decode(halves, kDim, out, 0, 2);
  EXPECT_EQ(values[0], 65504.0f);
  EXPECT_EQ(values[kDim + 127], -65504.0f);
  EXPECT_EQ(values[kDim + 1], 65280.0f);
}

TEST(HostCodec, ValuesOfTheSourcesTypeAreKeptBitForBit) {
  for (const ElementType type : kSources) {
    const auto source = RandomRows(type, 3);
    const Codec codec{.id = CodecId::kRaw, .element = type};
    const Bytes stored = Encode(codec, source);
    EXPECT_EQ(std::memcmp(stored.data(), source.View().data, stored.size()), 0);
    EXPECT_EQ(RowsOf(ReadRange(codec, stored, type, 0, 3), type, kDim), stored);
  }
}

TEST(LargestMagnitude, SeesEveryRowAndNoGap) {
  for (const ElementType type : kOutputs) {
    // Gaps hold NaN, which would win.
    for (const std::int64_t stride : {5, 8}) {
      auto source = SourceRows(type, 5, 4, stride).Fill([](std::int64_t, int) { return 0.25f; });
      EXPECT_EQ(LargestMagnitude(source.View(), 5, 4), 0.25f) << ElementName(type);
      source.Set(3, 4, -3.5f);
      EXPECT_EQ(LargestMagnitude(source.View(), 5, 3), 0.25f) << ElementName(type);
      EXPECT_EQ(LargestMagnitude(source.View(), 5, 4), 3.5f) << ElementName(type);
      EXPECT_EQ(LargestMagnitude(source.View(), 5, 0), 0.0f) << ElementName(type);
    }
  }
}

TEST(LargestMagnitude, NanIsLargerThanInfinity) {
  for (const ElementType type : kSources) {
    auto source = SourceRows(type, 5, 4).Fill([](std::int64_t, int) { return -1.0f; });
    source.Set(1, 1, -std::numeric_limits<float>::infinity());
    EXPECT_EQ(LargestMagnitude(source.View(), 5, 4), std::numeric_limits<float>::infinity());
    for (const float nan :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
      source.Set(0, 0, nan);
      EXPECT_TRUE(std::isnan(LargestMagnitude(source.View(), 5, 4))) << ElementName(type);
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
