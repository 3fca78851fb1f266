#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/codec_table.h"
#include "kernels/host_codec.h"

namespace kvtier::kernels::testing {

inline constexpr std::uint8_t kKiviBits[] = {2, 4, 8};
inline constexpr std::uint16_t kKiviGroups[] = {4, 16, 32, 64, 128};

// Every codec, with each parameter that takes a path of its own.
inline std::vector<Codec> AllCodecs() {
  std::vector<Codec> codecs;
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    codecs.push_back({.id = CodecId::kRaw, .element = type});
  }
  for (const ElementType type : {ElementType::kE4m3, ElementType::kE5m2}) {
    codecs.push_back({.id = CodecId::kFp8, .element = type});
  }
  codecs.push_back({.id = CodecId::kInt8PerTokenHead});
  codecs.push_back({.id = CodecId::kFp8PerTokenHead});
  codecs.push_back({.id = CodecId::kLlamaQ8});
  codecs.push_back({.id = CodecId::kLlamaQ4});
  for (const CodecId id :
       {CodecId::kNvfp4, CodecId::kNvfp4FourOverSix, CodecId::kInt4PerTokenHead, CodecId::kMlaFp8})
    codecs.push_back({.id = id});
  codecs.push_back({.id = CodecId::kFp8Page, .element = ElementType::kE4m3, .group = 16});
  for (const CodecId id : {CodecId::kKiviChannel, CodecId::kKiviToken}) {
    for (const std::uint8_t bits : kKiviBits) {
      for (const std::uint16_t group : kKiviGroups) {
        codecs.push_back({.id = id, .element = ElementType::kFp16, .bits = bits, .group = group});
      }
      codecs.push_back({.id = id, .element = ElementType::kE4m3, .bits = bits, .group = 32});
    }
  }
  const Codec rotated[] = {{.id = CodecId::kFp8, .element = ElementType::kE4m3},
                           {.id = CodecId::kLlamaQ4},
                           {.id = CodecId::kNvfp4},
                           {.id = CodecId::kKiviChannel, .bits = 2, .group = 32}};
  for (Codec codec : rotated) {
    codec.rotation = Rotation::kHadamard;
    codecs.push_back(codec);
  }
  return codecs;
}

inline bool IsKivi(const Codec& codec) {
  return codec.id == CodecId::kKiviChannel || codec.id == CodecId::kKiviToken;
}

inline std::string NameOf(const Codec& codec) {
  std::string name = RowOf(codec.id).name;
  if (codec.rotation != Rotation::kNone) name += " rotated";
  if (IsKivi(codec))
    name += " bits " + std::to_string(codec.bits) + " group " + std::to_string(codec.group);
  return name + " " + ElementName(codec.element);
}

// A head dim that the codec takes.
inline int SomeDim(const Codec& codec) { return codec.id == CodecId::kMlaFp8 ? 576 : 128; }

// One head's source rows. The gaps that a stride leaves hold 0xff: NaN in every type.
class SourceRows {
 public:
  SourceRows(ElementType type, int dim, std::int64_t tokens, std::int64_t token_stride)
      : type_(type), dim_(dim), tokens_(tokens), stride_(token_stride) {
    bytes_.resize(static_cast<std::size_t>(tokens * token_stride * ElementBytes(type)),
                  std::byte{0xff});
  }
  SourceRows(ElementType type, int dim, std::int64_t tokens) : SourceRows(type, dim, tokens, dim) {}

  // Fills all rows with value(token, channel), rounded to the type.
  template <class F>
  SourceRows&& Fill(F value) && {
    for (std::int64_t token = 0; token < tokens_; ++token) {
      for (int c = 0; c < dim_; ++c) Set(token, c, value(token, c));
    }
    return std::move(*this);
  }
  void Set(std::int64_t token, int channel, float value) {
    VisitElement(type_, [&](auto element) {
      const auto stored = FromFloat<decltype(element)>(value);
      std::memcpy(At(token, channel), &stored, sizeof stored);
    });
  }
  float Get(std::int64_t token, int channel) const {
    return VisitElement(type_, [&](auto element) {
      std::memcpy(&element, const_cast<SourceRows*>(this)->At(token, channel), sizeof element);
      return ToFloat(element);
    });
  }

  int dim() const { return dim_; }
  std::int64_t tokens() const { return tokens_; }
  ElementType type() const { return type_; }
  ConstRows View(std::int64_t first_token = 0) const {
    return {bytes_.data() + first_token * stride_ * ElementBytes(type_), type_, stride_};
  }

 private:
  std::byte* At(std::int64_t token, int channel) {
    return bytes_.data() + (token * stride_ + channel) * ElementBytes(type_);
  }

  const ElementType type_;
  const int dim_;
  const std::int64_t tokens_, stride_;
  std::vector<std::byte> bytes_;
};

// All of `source` in one run. Its tokens must be whole units.
inline std::vector<std::byte> Encode(const Codec& codec, const SourceRows& source,
                                     float scale = 1.0f) {
  const auto units = static_cast<int>(source.tokens() / UnitTokens(codec));
  const std::int64_t bytes = units * UnitSizeOf(codec, source.dim()).total();
  std::vector<std::byte> out(static_cast<std::size_t>(bytes));
  EncodeOnHost({codec, source.dim(), scale, source.View(), units, out.data()});
  return out;
}

// Tokens [first, first + tokens) of an encoded head as fp32, [tokens, dim].
inline std::vector<float> Decode(const Codec& codec, int dim, const std::vector<std::byte>& stored,
                                 std::int64_t first, std::int64_t tokens, float scale = 1.0f) {
  std::vector<float> out(static_cast<std::size_t>(tokens * dim));
  DecodeOnHost({.codec = codec,
                .dim = dim,
                .scale = scale,
                .in = stored.data(),
                .first_token = first,
                .tokens = tokens,
                .out = {reinterpret_cast<std::byte*>(out.data()), ElementType::kFp32, dim}});
  return out;
}

// A KIVI group's words, fp16 or E4M3.
struct StoredScale {
  std::uint16_t scale = 0;
  std::uint16_t minimum = 0;

  friend bool operator==(const StoredScale&, const StoredScale&) = default;
};

// `lane` is a channel of a kKiviChannel unit, or a group of a kKiviToken unit (one row).
inline StoredScale ScaleIn(const Codec& codec, int dim, const std::byte* unit, int lane) {
  const int lanes = codec.id == CodecId::kKiviChannel ? dim : dim / codec.group;
  const std::byte* scales = unit + std::ptrdiff_t{lanes} * codec.group * codec.bits / 8;
  const std::size_t bytes = codec.element == ElementType::kE4m3 ? 1 : 2;
  StoredScale stored;
  std::memcpy(&stored.scale, scales + static_cast<std::ptrdiff_t>(bytes) * lane, bytes);
  std::memcpy(&stored.minimum, scales + static_cast<std::ptrdiff_t>(bytes) * (lanes + lane), bytes);
  return stored;
}

// A group's codes in element order, packed, and its words.
struct StoredGroup {
  std::vector<std::uint8_t> codes;
  StoredScale scaling;

  friend bool operator==(const StoredGroup&, const StoredGroup&) = default;
};
inline StoredGroup GroupIn(const Codec& codec, int dim, const std::byte* unit, int lane) {
  const int code_bytes = codec.group * codec.bits / 8;
  StoredGroup group{{}, ScaleIn(codec, dim, unit, lane)};
  for (int j = 0; j < code_bytes; ++j) {
    const int at = codec.id == CodecId::kKiviChannel ? j * dim + lane : lane * code_bytes + j;
    group.codes.push_back(static_cast<std::uint8_t>(unit[at]));
  }
  return group;
}

}  // namespace kvtier::kernels::testing
