// Threads that share prefixes, lease, read, fork and remove the same few sequences: who reads gets
// the right values or is told that the lease has ended, nothing deadlocks, and in the end nothing
// is held. Run under the thread sanitizer.

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Random;
using kvtier::testing::SeededRandom;
using testing::kAsFp32;
using testing::kSpace;
using testing::Message;
using testing::NaiveSequence;
using testing::PromptFrom;
using testing::TestStore;

constexpr std::int64_t kTokens = 96;
constexpr int kRounds = 400;

// All sequences have the same tokens, and a format in which values don't depend on who wrote them.
class SharedTraffic {
 public:
  SharedTraffic(Random& random, const StoreOptions& options)
      : store_(options),
        entry_(store_.Register(testing::RequestOf(spec_, "fp8", 16))),
        data_(kvtier::testing::MakeKvData(spec_, kTokens, random, 100.0f)),
        naive_(entry_->model(), data_, kTokens) {}

  void Work(Random& random) {
    std::vector<std::uint64_t> leases;
    for (int round = 0; round < kRounds; ++round) {
      switch (random.Between(0, 9)) {
        case 0:
        case 1:
          Write(random);
          break;
        case 2:
          store_->Remove(SomeKey(random)).IgnoreError();
          break;
        case 3: {
          const auto kind = random.OneIn(2) ? PinKind::kHard : PinKind::kSoft;
          if (random.OneIn(4))
            store_->AddPin(SomeKey(random), {kind, absl::Seconds(1)}).status().IgnoreError();
          store_->Fork(SomeKey(random), SomeKey(random).id, random.OneIn(2) ? -1 : 40)
              .status()
              .IgnoreError();
          break;
        }
        case 4:
          store_.clock.Advance(absl::Milliseconds(random.Between(0, 300)));
          store_->Sweep();
          break;
        case 5: {
          // What was cut off comes again as it was.
          store_->Truncate(SomeKey(random), random.Between(0, kTokens), 0).IgnoreError();
          const auto held =
              store_->Lookup(kSpace, entry_->model().id, {PromptFrom(0, kTokens)}).value();
          EXPECT_LE(held[0], kTokens);
          break;
        }
        case 6:
        case 7: {
          const auto duration = absl::Milliseconds(random.Between(1, 2000));
          const auto lease =
              random.OneIn(2)
                  ? store_->Acquire(SomeKey(random), duration)
                  : store_->Acquire(kSpace, entry_->model().id,
                                    PromptFrom(0, random.Between(1, kTokens)), duration);
          if (lease.ok() && lease->id != 0) leases.push_back(lease->id);
          break;
        }
        default:
          if (leases.empty() || random.OneIn(4)) {
            Read(store_->OpenReader(SomeKey(random), "", {}, kAsFp32));
          } else {
            const std::uint64_t lease = random.Pick(leases);
            if (random.OneIn(3)) {
              store_->Release(kSpace, lease);
              std::erase(leases, lease);
            } else {
              store_->Renew(kSpace, lease, absl::Seconds(1)).status().IgnoreError();
              Read(store_->OpenReader(kSpace, lease, "", {}, kAsFp32));
            }
          }
      }
    }
  }

  bool Evicts() { return store_->evictions()[0].evictions > 0; }
  void ExpectNothingHeld() {
    for (const SequenceDescription& held : store_->List({kSpace, ""}, 100))
      EXPECT_THAT(store_->Remove({kSpace, held.id}), IsOk());
    store_.clock.Advance(absl::Hours(1));
    store_->Sweep();
    EXPECT_EQ(store_->leases(), 0);
    EXPECT_EQ(store_->pins(), 0);
    EXPECT_EQ(store_->memory().free, store_->budget());
    EXPECT_EQ(entry_->totals().sequences(), 0);
    EXPECT_EQ(entry_->totals().tokens_held, 0);
    EXPECT_EQ(entry_->totals().sequence_tokens, 0);
    EXPECT_EQ(store_->Lookup(kSpace, entry_->model().id, {PromptFrom(0, kTokens)}).value()[0], 0);
    EXPECT_GT(read_, 0);
    EXPECT_GT(shared_, 0);
  }

 private:
  static SequenceKey SomeKey(Random& random) {
    return {kSpace, std::to_string(random.Between(0, 3))};
  }

  void Write(Random& random) {
    const SequenceKey key = SomeKey(random);
    WriterRequest request;
    request.key = key;
    request.model_id = entry_->model().id;
    request.prompt = PromptFrom(random.OneIn(2) ? 0 : 1000, kTokens);
    const auto writer = store_->OpenWriter(std::move(request));
    if (!writer.ok()) return;
    std::int64_t from = (*writer)->standing().received_tokens;
    shared_ += (*writer)->standing().residual_origin;
    while (from < kTokens && !random.OneIn(5)) {
      const std::int64_t count = std::min(kTokens - from, random.Between(1, 40));
      Message message(data_, (*writer)->shard(), {}, {0, 1}, {from, count});
      if (!(*writer)->Append(message.chunk()).ok()) return;
      from += count;
    }
    if (!random.OneIn(3)) store_->Seal(key, from).IgnoreError();
  }

  void Read(absl::StatusOr<SequenceReader> reader) {
    if (!reader.ok() || reader->pins().tokens == 0) return;
    const std::int64_t tokens = reader->pins().tokens;
    for (std::size_t i = 0; i < reader->layers().size(); ++i) {
      const LayerOutput& out = reader->layers()[i];
      std::vector<std::byte> k(static_cast<std::size_t>(tokens * out.k_bytes_per_token())),
          v(static_cast<std::size_t>(tokens * out.v_bytes_per_token()));
      const absl::Status status = reader->Fill(i, 0, tokens, k.data(), v.data());
      if (!status.ok()) {
        EXPECT_EQ(ReasonOf(status), "LEASE_ENDED") << status;
        return;
      }
      ExpectRows(Side::kK, out, tokens, k);
      ExpectRows(Side::kV, out, tokens, v);
      read_ += tokens;
    }
  }

  void ExpectRows(Side side, const LayerOutput& out, std::int64_t tokens,
                  const std::vector<std::byte>& got) const {
    const auto row = static_cast<std::size_t>(out.k_dim) * sizeof(float);
    for (int head = 0; head < out.heads; ++head) {
      const auto want =
          naive_.of(side, out.layer).Read(head, {0, tokens}, ElementType::kFp32, 1.0f);
      for (std::size_t token = 0; token < static_cast<std::size_t>(tokens); ++token) {
        const std::size_t at =
            (token * static_cast<std::size_t>(out.heads) + static_cast<std::size_t>(head)) * row;
        ASSERT_EQ(0, std::memcmp(got.data() + at, want.data() + token * row, row))
            << "layer " << out.layer << ", head " << head << ", token " << token;
      }
    }
  }

  const ModelSpec spec_ = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  TestStore store_;
  std::shared_ptr<ModelEntry> entry_;
  KvData data_;
  NaiveSequence naive_;
  std::atomic<std::int64_t> read_{0};
  std::atomic<std::int64_t> shared_{0};
};

// With room for everything, and with so little that something is evicted all the time.
class LeaseConcurrency : public ::testing::TestWithParam<StoreOptions> {};

TEST_P(LeaseConcurrency, ReadersGetTheirValuesOrAreToldThatTheLeaseHasEnded) {
  SeededRandom random;
  SharedTraffic traffic(random, GetParam());
  const bool scarce = GetParam().memory < 1 << 20;
  // Threads that hardly meet may leave room for each other, now and then.
  for (int round = 0; round == 0 || (scarce && !traffic.Evicts() && round < 20); ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, seed = random.engine()()] {
        Random own(seed);
        traffic.Work(own);
      });
    }
    for (std::thread& thread : threads) thread.join();
    traffic.ExpectNothingHeld();
  }
  EXPECT_EQ(traffic.Evicts(), scarce);
}

INSTANTIATE_TEST_SUITE_P(
    Budgets, LeaseConcurrency,
    ::testing::Values(StoreOptions{.memory = 8 << 20},
                      StoreOptions{.memory = 45'000, .eviction = EvictionPolicyName::kLru},
                      StoreOptions{.memory = 45'000, .eviction = EvictionPolicyName::kS3Fifo}),
    [](const auto& test) {
      if (test.param.memory > 1 << 20) return "ample";
      return test.param.eviction == EvictionPolicyName::kLru ? "scarce_lru" : "scarce_s3_fifo";
    });

}  // namespace
}  // namespace kvtier::cachestore
