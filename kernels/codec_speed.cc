#include "kernels/codec_speed.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "kernels/codec_table.h"
#include "kernels/host_codec.h"

namespace kvtier::kernels {
namespace {

constexpr int kTokens = 128, kDim = 128;
constexpr std::size_t kPattern = std::size_t{1} << 20;  // values; the data repeats them

std::unique_ptr<std::byte[]> Touched(std::size_t size) {
  auto memory = std::make_unique_for_overwrite<std::byte[]>(size);
  std::memset(memory.get(), 1, size);
  return memory;
}

template <class F>
double GigabytesPerSecond(std::size_t bytes, F work) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  work();
  return static_cast<double>(bytes) / 1e9 / (now() - start);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

CodecSpeed::CodecSpeed(std::size_t bytes, ElementType source)
    : bytes_(bytes),
      values_(Touched(bytes)),
      stored_(Touched(bytes)),
      read_(Touched(bytes)),
      source_(source) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pattern(std::min(kPattern, bytes / 2));
  for (std::uint16_t& bits : pattern) {
    const float x = normal(random);
    bits = source == ElementType::kBf16 ? FromFloat<Bf16>(x).bits : FromFloat<Fp16>(x).bits;
  }
  for (std::size_t at = 0; at < bytes; at += 2 * pattern.size())
    std::memcpy(values_.get() + at, pattern.data(), std::min(2 * pattern.size(), bytes - at));
}

int CodecSpeed::DimFor(const Codec& codec) {
  const int multiple = DimMultiple(codec);
  return (kDim + multiple - 1) / multiple * multiple;
}

std::size_t CodecSpeed::HeadBytes(const Codec& codec) const {
  return std::size_t{kTokens} * static_cast<std::size_t>(DimFor(codec) * ElementBytes(source_));
}

std::size_t CodecSpeed::StoredHeadBytes(const Codec& codec) const {
  const std::int64_t units = kTokens / UnitTokens(codec);
  return static_cast<std::size_t>(units * UnitSizeOf(codec, DimFor(codec)).total());
}

double CodecSpeed::Copy() {
  return GigabytesPerSecond(bytes_, [&] { std::memcpy(read_.get(), values_.get(), bytes_); });
}

std::vector<CodecSpeed::Speed> CodecSpeed::Measure(const std::vector<Codec>& codecs, int runs,
                                                   const Progress& progress) {
  struct Figures {
    std::vector<double> encode, decode;
  };
  std::vector<Figures> figures(codecs.size());
  int done = 0;
  for (int run = 0; run < runs; ++run) {
    for (std::size_t i = 0; i < codecs.size(); ++i) {
      copies_.push_back(Copy());
      figures[i].encode.push_back(Encode(codecs[i]));
      figures[i].decode.push_back(Decode(codecs[i]));
      progress(++done, runs * static_cast<int>(codecs.size()));
    }
  }
  std::vector<Speed> speeds;
  speeds.reserve(figures.size());
  for (const Figures& of : figures) speeds.push_back({Median(of.encode), Median(of.decode)});
  return speeds;
}

double CodecSpeed::copy() const { return Median(copies_); }

double CodecSpeed::Encode(const Codec& codec) {
  const int dim = DimFor(codec);
  const std::size_t heads = bytes_ / HeadBytes(codec);
  return GigabytesPerSecond(heads * HeadBytes(codec), [&] {
    for (std::size_t head = 0; head < heads; ++head) {
      EncodeOnHost({codec,
                    dim,
                    1.0f,
                    {values_.get() + head * HeadBytes(codec), source_, dim},
                    kTokens / UnitTokens(codec),
                    stored_.get() + head * StoredHeadBytes(codec)});
    }
  });
}

double CodecSpeed::Decode(const Codec& codec) {
  const int dim = DimFor(codec);
  const std::size_t heads = bytes_ / HeadBytes(codec);
  return GigabytesPerSecond(heads * HeadBytes(codec), [&] {
    for (std::size_t head = 0; head < heads; ++head) {
      DecodeOnHost({.codec = codec,
                    .dim = dim,
                    .in = stored_.get() + head * StoredHeadBytes(codec),
                    .tokens = kTokens,
                    .out = {read_.get() + head * HeadBytes(codec), source_, dim}});
    }
  });
}

}  // namespace kvtier::kernels
