#pragma once

// The one file that knows which compiler reads it. What is marked KVT_HD is compiled twice from one
// source: by g++ or clang for the host, by nvcc for the device. Build with -ffp-contract=off (nvcc:
// --fmad=false): the codecs promise the same bytes on both sides, so every operation below rounds
// once and where it is written.
#if defined(__FAST_MATH__)
#error "kernels/ promises IEEE arithmetic; build without -ffast-math"
#endif

// KVT_DEVICE is for kernels alone, which the host only emulates; so are the two that unroll a loop.
#if defined(__CUDACC__)
#define KVT_HD __host__ __device__ __forceinline__
#define KVT_DEVICE __device__ __forceinline__
#define KVT_UNROLL _Pragma("unroll")
#define KVT_UNROLL_BY(n) KVT_UNROLL_PRAGMA(unroll n)
#define KVT_UNROLL_PRAGMA(words) _Pragma(#words)
#else
#define KVT_HD inline __attribute__((always_inline))
#define KVT_DEVICE inline
#define KVT_UNROLL
#define KVT_UNROLL_BY(n)
#endif
