#include "tests/emulation/emulation.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#error "fibers are written for x86-64"
#endif

// Saves the registers that a call keeps, and goes on with another stack. Six pushes, no system
// call: ucontext takes twenty-five times as long.
extern "C" void kvtier_switch_stack(void** save, void* load);
__asm__(R"(
.text
.globl kvtier_switch_stack
.type kvtier_switch_stack,@function
kvtier_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvtier_switch_stack,.-kvtier_switch_stack
)");

namespace kvtier::cuda_emulation {
namespace {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStackBytes = 64 << 10;
constexpr std::size_t kSlotBytes = 16;

std::atomic<Order> g_order{Order::kForward};

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s\n", what);
  std::abort();
}

struct FreeStack {
  void operator()(char* stack) const { std::free(stack); }
};
using Stack = std::unique_ptr<char, FreeStack>;

struct Fiber {
  Stack stack;
  void* top = nullptr;  // its stack pointer while another runs
  bool done = false;
};

struct Warp {
  std::array<std::array<std::byte, kSlotBytes>, kWarp> slots;
  unsigned alive = 0;
  unsigned arrived = 0;
  unsigned mask = 0;  // that the lanes that arrived wait for
  std::uint64_t passed = 0;
};

// One block at a time on a thread.
class Block {
 public:
  void Run(unsigned index, unsigned threads, const std::function<void()>& body) {
    index_ = index;
    body_ = &body;
    fibers_.resize(threads);
    for (Fiber& fiber : fibers_) fiber = {std::move(fiber.stack), nullptr, false};
    warps_.assign((threads + kWarp - 1) / kWarp, {});
    for (unsigned i = 0; i < threads; ++i) warps_[i / kWarp].alive |= 1u << i % kWarp;
    alive_ = threads;
    waiting_ = 0;
    std::vector<unsigned> order(threads);
    for (unsigned i = 0; i < threads; ++i)
      order[i] = g_order == Order::kReverse ? threads - 1 - i : i;
    std::minstd_rand random(index + 1);
    while (alive_ > 0) {
      if (g_order == Order::kRandom) std::shuffle(order.begin(), order.end(), random);
      progress_ = false;
      for (const unsigned i : order) {
        if (!fibers_[i].done) Resume(i);
      }
      if (!progress_) Die("its threads wait for each other: a barrier that not all reach");
    }
  }

  unsigned index() const { return index_; }
  unsigned current() const { return current_; }

  void Barrier() {
    const std::uint64_t passed = passed_;
    ++waiting_;
    OpenBarrier();
    while (passed_ == passed) Yield();
  }

  void Exchange(unsigned mask, void* value, std::size_t bytes, unsigned from) {
    Warp& warp = warps_[current_ / kWarp];
    if (bytes > kSlotBytes) Die("a shuffle of more than 16 bytes");
    std::memcpy(warp.slots[current_ % kWarp].data(), value, bytes);
    WarpBarrier(warp, mask);
    if (from >= kWarp || (mask >> from & 1u) == 0 || (warp.alive >> from & 1u) == 0)
      Die("a shuffle from a lane that takes no part in it");
    std::memcpy(value, warp.slots[from].data(), bytes);
    WarpBarrier(warp, mask);
  }

 private:
  void Resume(unsigned i) {
    Fiber& fiber = fibers_[i];
    if (fiber.top == nullptr) {
      progress_ = true;
      if (fiber.stack == nullptr)
        fiber.stack.reset(static_cast<char*>(std::aligned_alloc(64, kStackBytes)));
      void** top = reinterpret_cast<void**>(fiber.stack.get() + kStackBytes);
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(&Block::Enter);
      top -= 6;  // registers
      fiber.top = top;
    }
    current_ = i;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), kStackBytes);
#endif
    kvtier_switch_stack(&scheduler_, fiber.top);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  void Yield() {
    Fiber& fiber = fibers_[current_];
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fake, scheduler_bottom_,
                                   scheduler_size_);
#endif
    kvtier_switch_stack(&fiber.top, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  static void Enter();
  void RunFiber() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom_, &scheduler_size_);
#endif
    (*body_)();
    progress_ = true;
    fibers_[current_].done = true;
    --alive_;
    Warp& warp = warps_[current_ / kWarp];
    warp.alive &= ~(1u << current_ % kWarp);
    // Who is gone is waited for no longer, as on the device.
    OpenBarrier();
    OpenWarp(warp);
    Yield();
    Die("a thread that ended runs again");
  }

  void OpenBarrier() {
    if (waiting_ == 0 || waiting_ < alive_) return;
    waiting_ = 0;
    ++passed_;
    progress_ = true;
  }
  void WarpBarrier(Warp& warp, unsigned mask) {
    const unsigned me = 1u << current_ % kWarp;
    if ((mask & me) == 0) Die("a lane outside of its own mask");
    if (warp.arrived != 0 && warp.mask != mask) Die("lanes of a warp with different masks");
    warp.mask = mask;
    warp.arrived |= me;
    const std::uint64_t passed = warp.passed;
    OpenWarp(warp);
    while (warp.passed == passed) Yield();
  }
  void OpenWarp(Warp& warp) {
    const unsigned awaited = warp.mask & warp.alive;
    if (warp.arrived == 0 || (warp.arrived & awaited) != awaited) return;
    warp.arrived = 0;
    ++warp.passed;
    progress_ = true;
  }

  unsigned index_ = 0;
  unsigned current_ = 0;
  const std::function<void()>* body_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  unsigned alive_ = 0;
  unsigned waiting_ = 0;  // at the block's barrier
  std::uint64_t passed_ = 0;
  bool progress_ = false;
  void* scheduler_ = nullptr;  // its stack pointer while a fiber runs
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_bottom_ = nullptr;
  std::size_t scheduler_size_ = 0;
#endif
};

thread_local Block t_block;

void Block::Enter() { t_block.RunFiber(); }

}  // namespace

void SetOrder(Order order) { g_order = order; }

void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  if (threads == 0 || threads > 1024) Die("a block of no, or more than 1024, threads");
  for (unsigned block = 0; block < blocks; ++block) t_block.Run(block, threads, body);
}

Index ThreadIndex() { return {t_block.current()}; }
Index BlockIndex() { return {t_block.index()}; }
unsigned Lane() { return t_block.current() % kWarp; }
void BlockBarrier() { t_block.Barrier(); }
void Shuffle(unsigned mask, void* value, std::size_t bytes, unsigned from) {
  t_block.Exchange(mask, value, bytes, from);
}

}  // namespace kvtier::cuda_emulation
