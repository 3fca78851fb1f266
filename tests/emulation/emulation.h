#pragma once

// Runs CUDA kernels on the host: a .cu file is compiled by g++ with this header before it. A
// block's threads are fibers of one thread, so that barriers and shuffles really wait; their order
// can be chosen, which shows where one is missing. A barrier that not all reach and a shuffle from
// a lane outside its mask abort. Blocks run one after another, and find shared memory as the one
// before left it. Not emulated: memory order between blocks, asynchronous copies, cooperative
// groups.

// The names are CUDA's.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)

// Before CUDA's own headers, which leave it alone then.
#define __shared__ static thread_local

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

namespace kvtier::cuda_emulation {

// In which order a block's threads run between barriers.
enum class Order { kForward, kReverse, kRandom };
// For launches from now on, of any thread.
void SetOrder(Order order);

// Runs `body` once for each thread of the grid; `name` is for messages.
void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body);

struct Index {
  unsigned x = 0;
};
// Of the fiber that runs.
Index ThreadIndex();
Index BlockIndex();

void BlockBarrier();
// Gives each lane what `from` lane gave; 16 bytes at most.
void Shuffle(unsigned mask, void* value, std::size_t bytes, unsigned from);
unsigned Lane();

}  // namespace kvtier::cuda_emulation

// What kernels see.
#define threadIdx (::kvtier::cuda_emulation::ThreadIndex())
#define blockIdx (::kvtier::cuda_emulation::BlockIndex())
#define __launch_bounds__(...)

inline void __syncthreads() { kvtier::cuda_emulation::BlockBarrier(); }

inline std::uint64_t __umul64hi(std::uint64_t a, std::uint64_t b) {
  __extension__ using Product = unsigned __int128;
  return static_cast<std::uint64_t>(Product{a} * b >> 64);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  const unsigned from = kvtier::cuda_emulation::Lane() ^ static_cast<unsigned>(lanes);
  kvtier::cuda_emulation::Shuffle(mask, &value, sizeof value, from);
  return value;
}

template <class T>
T atomicAdd(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicMax(T* to, T value) {
  T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(to, &before, value, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
  }
  return before;
}

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace kvtier::cuda_double {
cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work);
}  // namespace kvtier::cuda_double

namespace kvtier::kernels {

template <class... Parameters, class... Arguments>
int Launch(void (*kernel)(Parameters...), std::int64_t blocks, int threads, cudaStream_t stream,
           Arguments... arguments) {
  if (blocks <= 0) return cudaErrorInvalidConfiguration;
  const std::tuple<Parameters...> parameters(arguments...);
  return cuda_double::Enqueue(stream, [=] {
    cuda_emulation::RunGrid(static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                            [&] { std::apply(kernel, parameters); });
  });
}

}  // namespace kvtier::kernels
