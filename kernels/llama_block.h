#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/codec.h"
#include "kernels/row.h"

// llama.cpp's `q8_0` and `q4_0` (ggml-quants.c, quantize_row_q8_0_ref and quantize_row_q4_0_ref): a
// row is blocks of 32 values, each an fp16 d and then codes; a value is code * d. Bytes equal the
// reference's, but for blocks whose d is below 2^-128, where 1 / d overflows: codes are 0 there.
// Magnitudes must not exceed kLargestMagnitude, or d would not fit fp16.
namespace kvtier::kernels {

// d = amax / 127, codes int8, rounded half away from zero.
struct LlamaQ8 {
  static constexpr int kBytes = kLlamaQ8Bytes;
  static constexpr float kLargestMagnitude = 127.0f * 65504.0f;

  KVT_HD static float Step(float largest) { return largest / 127.0f; }
  KVT_HD static std::uint8_t Code(float y) {
    // The float below 0.5: adding 0.5 itself would lift the value below 0.5 to 1.
    const float away = y + FromBits(0x3effffffu | (Bits(y) & 0x80000000u));
    return static_cast<std::uint8_t>(static_cast<std::int8_t>(away));
  }
  template <class Source>
  KVT_HD static void Encode(const Source* x, std::uint8_t* __restrict out) {
    const float d = Step(Integer<Source>::Value(LargestMagnitudeOf(x, kLlamaBlock)));
    const float inverse = FiniteOrZero(1.0f / d);
    const Fp16 stored = FromFloat<Fp16>(d);
    std::memcpy(out, &stored, sizeof stored);
    for (int i = 0; i < kLlamaBlock; ++i) out[2 + i] = Code(ToFloat(x[i]) * inverse);
  }
  KVT_HD static void Decode(const std::uint8_t* in, float* out) {
    Fp16 stored{};
    std::memcpy(&stored, in, sizeof stored);
    const float d = ToFloat(stored);
    for (int i = 0; i < kLlamaBlock; ++i)
      out[i] = static_cast<float>(static_cast<std::int8_t>(in[2 + i])) * d;
  }
};

// d = the value of largest magnitude, the first of them, / -8; codes 0 to 15 stand for -8 to 7;
// byte j holds value j in its low and value j + 16 in its high bits.
struct LlamaQ4 {
  static constexpr int kBytes = kLlamaQ4Bytes;
  static constexpr float kLargestMagnitude = 8.0f * 65504.0f;

  KVT_HD static std::uint8_t Code(float y) {
    return static_cast<std::uint8_t>(static_cast<int>(Clamp(y + 8.5f, 15.0f)));
  }

  // The first value of largest magnitude. As signed integers the largest positive value is the
  // largest, as unsigned ones the largest negative one; only blocks in which both are equally large
  // must be searched.
  template <class Source>
  KVT_HD static float FirstLargest(const Source* x) {
    using Bits = typename Integer<Source>::Type;
    using Unsigned = std::make_unsigned_t<Bits>;
    Bits highest = Integer<Source>::Of(x[0]);
    auto farthest = static_cast<Unsigned>(highest);
    for (int i = 1; i < kLlamaBlock; ++i) {
      const Bits bits = Integer<Source>::Of(x[i]);
      highest = bits > highest ? bits : highest;
      farthest = static_cast<Unsigned>(bits) > farthest ? static_cast<Unsigned>(bits) : farthest;
    }
    const auto lowest = static_cast<Bits>(farthest);
    const int positive = highest;
    const int negative = lowest < 0 ? lowest & Integer<Source>::kMagnitude : -1;
    const int largest = positive > negative ? positive : negative;
    if (largest == 0) return 0.0f;
    if (positive != negative) return Integer<Source>::Value(positive > negative ? highest : lowest);
    int first = 0;
    // Bounded: a client that shares memory may change x meanwhile.
    while (first < kLlamaBlock - 1 &&
           (Integer<Source>::Of(x[first]) & Integer<Source>::kMagnitude) != largest)
      ++first;
    return ToFloat(x[first]);
  }
  template <class Source>
  KVT_HD static void Encode(const Source* x, std::uint8_t* __restrict out) {
    const float d = FirstLargest(x) / -8.0f;
    const float inverse = FiniteOrZero(1.0f / d);
    const Fp16 stored = FromFloat<Fp16>(d);
    std::memcpy(out, &stored, sizeof stored);
    std::uint8_t codes[kLlamaBlock];
    for (int i = 0; i < kLlamaBlock; ++i) codes[i] = Code(ToFloat(x[i]) * inverse);
    for (int j = 0; j < kLlamaBlock / 2; ++j)
      out[2 + j] = static_cast<std::uint8_t>(codes[j] | codes[j + kLlamaBlock / 2] << 4);
  }
  KVT_HD static void Decode(const std::uint8_t* in, float* out) {
    Fp16 stored{};
    std::memcpy(&stored, in, sizeof stored);
    const float d = ToFloat(stored);
    for (int j = 0; j < kLlamaBlock / 2; ++j) {
      out[j] = static_cast<float>((in[2 + j] & 15) - 8) * d;
      out[j + kLlamaBlock / 2] = static_cast<float>((in[2 + j] >> 4) - 8) * d;
    }
  }
};

}  // namespace kvtier::kernels
