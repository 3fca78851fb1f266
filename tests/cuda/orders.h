#pragma once

#include <gtest/gtest.h>

#if KVTIER_EMULATED
#include "tests/emulation/emulation.h"
#include "tests/emulation/fake_cudart.h"
#endif

// What the tests of kernels can do where these are emulated: nothing of it on a GPU.
namespace kvtier::cachestore::testing {

// In which order a block's threads run.
struct Order {
  const char* name;
  void (*set)();
};

#if KVTIER_EMULATED

template <cuda_emulation::Order kOrder>
void Set() {
  cuda_emulation::SetOrder(kOrder);
}
inline constexpr Order kOrders[] = {{"forward", Set<cuda_emulation::Order::kForward>},
                                    {"reverse", Set<cuda_emulation::Order::kReverse>},
                                    {"random", Set<cuda_emulation::Order::kRandom>}};

// Of memory; and that no copy was one that would have waited.
inline void ExpectNothingLeft() {
  const cuda_double::Counters left = cuda_double::Count();
  EXPECT_EQ(left.allocations, 0u);
  EXPECT_EQ(left.pageable_copies, 0);
  EXPECT_EQ(left.null_stream_uses, 0);
}

#else

inline constexpr Order kOrders[] = {{"as_the_gpu_has_it", [] {}}};
inline void ExpectNothingLeft() {}

#endif

}  // namespace kvtier::cachestore::testing
