#pragma once

// The one file that knows which compiler reads it. What is marked KVT_HD is compiled twice from one
// source: by g++ or clang for the host, by nvcc for the device. Build with -ffp-contract=off (nvcc:
// --fmad=false): the codecs promise the same bytes on both sides, so every operation below rounds
// once and where it is written.
#if defined(__FAST_MATH__)
#error "kernels/ promises IEEE arithmetic; build without -ffast-math"
#endif

// KVT_TABLE is a constant array within such a function: the host doesn't copy it at each call.
#if defined(__CUDACC__)
#define KVT_HD __host__ __device__ __forceinline__
#define KVT_TABLE constexpr
#else
#define KVT_HD inline __attribute__((always_inline))
#define KVT_TABLE static constexpr
#endif
