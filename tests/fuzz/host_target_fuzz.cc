// Codecs under arbitrary input: every instruction set must store, read and count what the plain
// build does, and must not crash on stored bytes that no encoder made. The first bytes of an input
// choose codec, head dim, source type and scales, the rest are values. kernels_tests runs it on
// random input under every compiler; libFuzzer looks for better input:
//   cmake --preset clang && ninja -C build/clang host_target_fuzz
//   build/clang/bin/host_target_fuzz -max_len=8192 -max_total_time=600
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <span>

#include "kernels/host_target.h"
#include "tests/kernels/codec_cases.h"

namespace kvtier::kernels {
namespace {

using Bytes = std::vector<std::byte>;

constexpr ElementType kSources[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
constexpr ElementType kOutputs[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                    ElementType::kE4m3, ElementType::kE5m2};
constexpr float kScales[] = {1.0f, 0.25f, 0.3f, 3.0f, 0x1p-100f, 0x1p120f};

// Reads an input's bytes one after the other, over and over.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint8_t Next() { return bytes_[at_++ % bytes_.size()]; }
  template <class T, std::size_t kCount>
  T Pick(const T (&choices)[kCount]) {
    return choices[Next() % kCount];
  }
  void Fill(Bytes& out) {
    for (std::byte& byte : out) byte = std::byte{Next()};
  }

 private:
  const std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

struct Case {
  Codec codec;
  int dim = 0;
  ElementType source = ElementType::kBf16;
  float scale = 1.0f, out_scale = 1.0f;
  std::int64_t tokens = 0, first_token = 0;
  Bytes values, stored;

  std::size_t StoredBytes() const {
    return static_cast<std::size_t>(tokens / UnitTokens(codec) * UnitSizeOf(codec, dim).total());
  }
};

// What an append refuses becomes 0.
void KeepToTheLimit(Case& c) {
  const bool any = c.codec.id == CodecId::kRaw || c.codec.id == CodecId::kFp8;
  if (any && c.codec.rotation == Rotation::kNone) return;
  const float limit = MagnitudeLimit(c.codec, c.dim);
  VisitElement(c.source, [&](auto element) {
    for (std::size_t at = 0; at < c.values.size(); at += sizeof element) {
      std::memcpy(&element, c.values.data() + at, sizeof element);
      if (std::fabs(ToFloat(element)) <= limit) continue;  // false for NaN
      std::memset(c.values.data() + at, 0, sizeof element);
    }
  });
}

Case CaseFrom(Input& input) {
  static const std::vector<Codec> codecs = testing::AllCodecs();
  Case c;
  c.codec = codecs[input.Next() % codecs.size()];
  const int multiple = DimMultiple(c.codec);
  const int most = input.Next() % 8 == 0 ? kMaxHeadDim : 160;
  const int times = 1 + input.Next() % std::max(1, most / multiple);
  c.dim = c.codec.id == CodecId::kMlaFp8 ? multiple : std::min(kMaxHeadDim, times * multiple);
  c.source = input.Pick(kSources);
  c.scale = input.Pick(kScales);
  c.out_scale = input.Pick(kScales);
  c.tokens = std::int64_t{1 + input.Next() % 3} * UnitTokens(c.codec);
  c.first_token = input.Next() % c.tokens;
  c.values.resize(static_cast<std::size_t>(c.tokens * c.dim * ElementBytes(c.source)));
  input.Fill(c.values);
  KeepToTheLimit(c);
  c.stored.resize(c.StoredBytes());
  input.Fill(c.stored);
  return c;
}

// Appends what `stored` reads as, and how much of it saturated. Which NaN comes out is not
// promised.
void Read(const Case& c, const Bytes& stored, Bytes& all) {
  const std::int64_t tokens = c.tokens - c.first_token;
  for (const ElementType type : kOutputs) {
    Bytes read(static_cast<std::size_t>(tokens * c.dim * ElementBytes(type)));
    const std::uint64_t saturated = DecodeOnHost({.codec = c.codec,
                                                  .dim = c.dim,
                                                  .scale = c.scale,
                                                  .in = stored.data(),
                                                  .first_token = c.first_token,
                                                  .tokens = tokens,
                                                  .out_scale = c.out_scale,
                                                  .out = {read.data(), type, c.dim}});
    VisitElement(type, [&](auto element) {
      for (std::size_t at = 0; at < read.size(); at += sizeof element) {
        std::memcpy(&element, read.data() + at, sizeof element);
        if (IsNan(ToFloat(element))) std::memset(read.data() + at, 0xff, sizeof element);
      }
    });
    all.insert(all.end(), read.begin(), read.end());
    all.push_back(static_cast<std::byte>(saturated));
  }
}

Bytes Everything(const Case& c) {
  Bytes all(c.StoredBytes());
  const auto units = static_cast<int>(c.tokens / UnitTokens(c.codec));
  const std::uint64_t saturated = EncodeOnHost(
      {c.codec, c.dim, c.scale, {c.values.data(), c.source, c.dim}, units, all.data()});
  const Bytes encoded = all;
  all.push_back(static_cast<std::byte>(saturated));
  Read(c, encoded, all);
  Read(c, c.stored, all);
  return all;
}

}  // namespace
}  // namespace kvtier::kernels

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name for it
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvtier::kernels;  // NOLINT(google-build-using-namespace)
  if (size == 0) return 0;
  Input input({data, size});
  const Case c = CaseFrom(input);
  const std::vector<std::string> targets = HostTargets();
  UseHostTarget(targets.back());
  const Bytes want = Everything(c);
  for (std::size_t i = 0; i + 1 < targets.size(); ++i) {
    UseHostTarget(targets[i]);
    if (Everything(c) == want) continue;
    std::fprintf(stderr, "%s differs: %s, dim %d, %s, scales %g and %g, %lld tokens from %lld\n",
                 targets[i].c_str(), kvtier::kernels::testing::NameOf(c.codec).c_str(), c.dim,
                 ElementName(c.source), static_cast<double>(c.scale),
                 static_cast<double>(c.out_scale), static_cast<long long>(c.tokens),
                 static_cast<long long>(c.first_token));
    std::abort();
  }
  UseHostTarget(targets.front());
  return 0;
}
