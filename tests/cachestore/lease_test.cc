// Leases: what was promised stays readable until it is released or expires, and then comes back.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using testing::AppendSpan;
using ::testing::HasSubstr;
using testing::kAsFp32;
using testing::Key;
using testing::kPage;
using testing::kSpace;
using testing::NaiveSequence;
using testing::OpenWithPrompt;
using testing::PromptFrom;
using testing::ReadCheck;

constexpr std::int64_t kMemory = 4 << 20;
constexpr std::int64_t kTokens = 300;

class LeaseTest : public testing::TwoTextsTest {
 protected:
  LeaseTest() : TwoTextsTest(TwoLayers(), {.memory = kMemory, .max_leases = 1000}, kTokens) {}

  void Write(const std::string& id, const Prompt& prompt, std::int64_t tokens) {
    const auto writer = OpenWithPrompt(store_, id, model(), prompt);
    const std::int64_t from = writer->standing().received_tokens;
    AppendSpan(*writer, one_, {from, tokens - from});
  }
  Grant Acquire(const Prompt& prompt, absl::Duration duration = absl::ZeroDuration()) {
    return store_->Acquire(kSpace, model().id, prompt, duration).value();
  }
  absl::StatusOr<SequenceReader> Open(std::uint64_t lease, ReadRange range = {}) {
    return store_->OpenReader(kSpace, lease, model().id, range, kAsFp32);
  }
  // `length`: of the sequence, which says what of it is codes.
  void ExpectReads(std::uint64_t lease, std::int64_t tokens, std::int64_t length) {
    auto reader = Open(lease);
    ASSERT_THAT(reader, IsOk());
    ASSERT_EQ(reader->pins().tokens, tokens);
    ReadCheck(*reader, kAsFp32, NaiveSequence(model(), one_, length)).Run(random_);
  }
  absl::Status FillSome(SequenceReader& reader) {
    const LayerOutput& out = reader.layers()[0];
    std::vector<std::byte> k(static_cast<std::size_t>(out.k_bytes_per_token())),
        v(static_cast<std::size_t>(out.v_bytes_per_token()));
    return reader.Fill(0, reader.pins().first_token, 1, k.data(), v.data());
  }
};

TEST_P(LeaseTest, HoldsWhatOfAPromptIsHeld) {
  Write("a", PromptFrom(0, kTokens), 200);
  EXPECT_EQ(Acquire(PromptFrom(7, 100)).id, 0u) << "nothing of it is held";
  // Inside a page, at a page's end, in what is no column yet, and all of it.
  for (const std::int64_t tokens : {std::int64_t{16}, std::int64_t{64}, std::int64_t{80},
                                    std::int64_t{128}, std::int64_t{192}, kTokens}) {
    const Grant lease = Acquire(PromptFrom(0, tokens));
    EXPECT_EQ(lease.tokens, std::min<std::int64_t>(tokens, 192));
    EXPECT_EQ(lease.duration, kDefaultLease);
    // A page of others' tokens is read as codes as far as it goes.
    ExpectReads(lease.id, lease.tokens, 200);
    EXPECT_THAT(Open(lease.id, {.tokens = lease.tokens + 1}),
                Refuses(Reason::kPastCommitted, HasSubstr("are committed")));
  }
  EXPECT_EQ(store_->leases(), 6);
  EXPECT_EQ(entry_->totals().sequences(), 1);
}

TEST_P(LeaseTest, KeepsWhatIsRemovedUntilItIsReleased) {
  Write("a", PromptFrom(0, kTokens), 200);
  const Grant by_prompt = Acquire(PromptFrom(0, 160));
  const Grant by_name = store_->Acquire(Key("a"), absl::ZeroDuration()).value();
  EXPECT_EQ(by_name.tokens, 200);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  EXPECT_THAT(store_->Describe(Key("a")), Refuses(Reason::kUnknownSequence, HasSubstr("a")));
  EXPECT_EQ(store_->Lookup(kSpace, model().id, {PromptFrom(0, kTokens)}).value()[0] / kPage,
            testing::SharablePages(model(), 200))
      << "columns stay, for the lease; what was the sequence's own is found no more";
  ExpectReads(by_name.id, 200, 200);
  ExpectReads(by_prompt.id, 160, 200);
  // The id is free at once.
  Write("a", PromptFrom(1000, kTokens), 50);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  store_->Release(kSpace, by_name.id);
  store_->Release(kSpace, by_name.id);
  EXPECT_THAT(Open(by_name.id), Refuses(Reason::kLeaseEnded, HasSubstr("lease_id")));
  ExpectReads(by_prompt.id, 160, 200);
  store_->Release(kSpace, by_prompt.id);
  EXPECT_EQ(store_->memory().free, kMemory);
  EXPECT_EQ(entry_->totals().tokens_held, 0);
  EXPECT_EQ(store_->leases(), 0);
}

TEST_P(LeaseTest, ExpiresAndEndsARunningRead) {
  Write("a", PromptFrom(0, kTokens), 200);
  const Grant lease = Acquire(PromptFrom(0, 192), absl::Milliseconds(200));
  auto reader = Open(lease.id);
  ASSERT_THAT(reader, IsOk());
  EXPECT_THAT(FillSome(*reader), IsOk());
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  store_.clock.Advance(absl::Milliseconds(500));
  EXPECT_THAT(FillSome(*reader), Refuses(Reason::kLeaseEnded, HasSubstr("expired 300ms ago")));
  EXPECT_THAT(Open(lease.id), Refuses(Reason::kLeaseEnded, HasSubstr("expired")));
  EXPECT_THAT(store_->Renew(kSpace, lease.id, absl::ZeroDuration()),
              Refuses(Reason::kLeaseEnded, HasSubstr("expired")));
  EXPECT_EQ(store_->Sweep(), 1);
  EXPECT_EQ(store_->Sweep(), 0);
  EXPECT_GT(store_->memory().use.total(), 0) << "a reader that has not noticed yet is no danger";
  // Others' bytes come; the reader never sees one.
  Write("b", PromptFrom(1000, kTokens), 200);
  EXPECT_THAT(FillSome(*reader), Refuses(Reason::kLeaseEnded, HasSubstr("expired")));
  reader = absl::CancelledError();
  ASSERT_THAT(store_->Remove(Key("b")), IsOk());
  EXPECT_EQ(store_->memory().free, kMemory);
}

// A read that names a sequence has a lease of its own, with a bound.
TEST_P(LeaseTest, AReadByNameEndsInTheEnd) {
  Write("a", {}, 100);
  SequenceReader reader = store_.Read("a");
  EXPECT_THAT(FillSome(reader), IsOk());
  EXPECT_EQ(store_->leases(), 0) << "only those that have a number count";
  store_.clock.Advance(store_->options().max_lease);
  EXPECT_THAT(FillSome(reader), Refuses(Reason::kLeaseEnded, HasSubstr("expired")));
}

TEST_P(LeaseTest, IsRenewedAsLongAsItLives) {
  Write("a", PromptFrom(0, kTokens), 100);
  const Grant lease = Acquire(PromptFrom(0, 96), absl::Seconds(1));
  for (int i = 0; i < 100; ++i) {
    store_.clock.Advance(absl::Milliseconds(900));
    const auto renewed = store_->Renew(kSpace, lease.id, absl::Seconds(1));
    ASSERT_THAT(renewed, IsOk());
    EXPECT_EQ(renewed->tokens, 96);
    EXPECT_EQ(store_->Sweep(), 0);
  }
  ExpectReads(lease.id, 96, 100);
}

// An open sequence goes on; the lease has the length that it was given.
TEST_P(LeaseTest, OnAnOpenSequenceHasItsLength) {
  const auto writer = OpenWithPrompt(store_, "a", model(), {});
  AppendSpan(*writer, one_, {0, 100});
  const Grant lease = store_->Acquire(Key("a"), absl::ZeroDuration()).value();
  AppendSpan(*writer, one_, {100, 180});
  ExpectReads(lease.id, 100, 280);
  ASSERT_THAT(store_->Abort(Key("a")), IsOk());
  testing::Message message(one_, writer->shard(), {}, {0, 1}, {280, 1});
  EXPECT_THAT(writer->Append(message.chunk()),
              Refuses(Reason::kSequenceGone, HasSubstr("aborted")));
  ExpectReads(lease.id, 100, 280);
}

// Between Lookup and Acquire the longer holder goes: the hit is shorter, and no error.
TEST_P(LeaseTest, AcquireGivesWhatIsLeft) {
  Write("a", PromptFrom(0, kTokens), 290);
  Write("b", PromptFrom(0, 200), 200);
  const Prompt prompt = PromptFrom(0, kTokens);
  EXPECT_EQ(store_->Lookup(kSpace, model().id, {prompt}).value()[0], 288);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  EXPECT_EQ(Acquire(prompt).tokens, 192);
}

// A device that fails half-way through an append may have spoiled what a lease holds.
TEST_P(LeaseTest, EndsWhenTheDeviceFails) {
  const auto writer = OpenWithPrompt(store_, "a", model(), {});
  AppendSpan(*writer, one_, {0, 100});
  const Grant lease = store_->Acquire(Key("a"), absl::ZeroDuration()).value();
  store_.device.FailEncode(2);
  testing::Message message(one_, writer->shard(), {}, {0, 1}, {100, 10});
  EXPECT_FALSE(writer->Append(message.chunk()).ok());
  store_.device.FailEncode(0);
  EXPECT_THAT(Open(lease.id), Refuses(Reason::kLeaseEnded, HasSubstr("is gone")));
  store_->Release(kSpace, lease.id);
  EXPECT_EQ(store_->memory().free, kMemory);
}

// Looked up and never fetched: nothing is held for it.
TEST_P(LeaseTest, LookupsHoldNothing) {
  Write("a", PromptFrom(0, kTokens), 200);
  for (int i = 0; i < 10'000; ++i)
    ASSERT_EQ(store_->Lookup(kSpace, model().id, {PromptFrom(0, 64)}).value()[0], 64);
  EXPECT_EQ(store_->leases(), 0);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  EXPECT_EQ(store_->memory().free, kMemory);
}

TEST_P(LeaseTest, IsRefusedWithTheReason) {
  Write("a", PromptFrom(0, kTokens), 100);
  const auto acquire = [&](absl::Duration duration) {
    return store_->Acquire(kSpace, model().id, PromptFrom(0, 64), duration);
  };
  EXPECT_THAT(
      acquire(absl::Minutes(11)),
      Refuses(Reason::kInvalidField, HasSubstr("duration_ms is 660000; want at most 600000")));
  EXPECT_THAT(acquire(absl::Seconds(-1)), Refuses(Reason::kInvalidField, HasSubstr("-1000")));
  const Grant lease = Acquire(PromptFrom(0, 64));
  // Another namespace's number is no lease, and can't be ended.
  EXPECT_THAT(store_->OpenReader("other", lease.id, "", {}, kAsFp32),
              Refuses(Reason::kLeaseEnded, HasSubstr("no such lease")));
  store_->Release("other", lease.id);
  ExpectReads(lease.id, 64, 100);
  for (int i = 1; i < 1000; ++i) Acquire(PromptFrom(0, 64));
  EXPECT_THAT(acquire(absl::ZeroDuration()),
              Refuses(Reason::kTooManyLeases, HasSubstr("1000 leases are held")));
  store_.clock.Advance(absl::Minutes(1));
  EXPECT_EQ(store_->Sweep(), 1000);
}

// Acquire, renew, release, expiry, remove and abort in any order, each also twice: what a live
// lease has reads right, and at idle nothing is held.
TEST_P(LeaseTest, AnyOrderEndsAtNothing) {
  struct Held {
    std::uint64_t id;
    std::int64_t tokens, length;
    absl::Time deadline;
  };
  std::vector<Held> leases;
  std::map<std::string, std::int64_t> lengths;
  for (int step = 0; step < 400; ++step) {
    const std::string id(1, static_cast<char>('a' + random_.Between(0, 3)));
    const auto duration = absl::Seconds(random_.Between(1, 20));
    switch (random_.Between(0, 6)) {
      case 0:
        if (lengths.contains(id)) break;
        lengths[id] = random_.Between(1, kTokens);
        Write(id, {}, lengths[id]);
        break;
      case 1: {
        const bool held = lengths.erase(id) > 0;
        EXPECT_EQ(store_->Remove(Key(id)).ok(), held);
        EXPECT_FALSE(store_->Remove(Key(id)).ok());
        break;
      }
      case 2:
        if (!lengths.contains(id)) break;
        leases.push_back({store_->Acquire(Key(id), duration)->id, lengths[id], lengths[id],
                          store_.clock.Now() + duration});
        break;
      case 3:
        store_.clock.Advance(absl::Seconds(random_.Between(0, 4)));
        if (random_.OneIn(2)) store_->Sweep();
        break;
      default: {
        if (leases.empty()) break;
        const auto at = static_cast<std::size_t>(
            random_.Between(0, static_cast<std::int64_t>(leases.size()) - 1));
        Held& lease = leases[at];
        const bool alive = store_.clock.Now() < lease.deadline;
        if (random_.OneIn(3)) {
          store_->Release(kSpace, lease.id);
          store_->Release(kSpace, lease.id);
          EXPECT_FALSE(Open(lease.id).ok());
          leases.erase(leases.begin() + static_cast<std::ptrdiff_t>(at));
        } else if (random_.OneIn(2)) {
          EXPECT_EQ(store_->Renew(kSpace, lease.id, duration).ok(), alive);
          if (alive) lease.deadline = store_.clock.Now() + duration;
        } else if (alive) {
          ExpectReads(lease.id, lease.tokens, lease.length);
        } else {
          EXPECT_THAT(Open(lease.id), Refuses(Reason::kLeaseEnded, HasSubstr("expired")));
        }
      }
    }
    if (HasFailure()) return;
  }
  for (const auto& [id, length] : lengths) ASSERT_THAT(store_->Remove(Key(id)), IsOk());
  store_.clock.Advance(absl::Minutes(1));
  store_->Sweep();
  EXPECT_EQ(store_->leases(), 0);
  EXPECT_EQ(store_->memory().free, kMemory);
  EXPECT_EQ(entry_->totals().sequences(), 0);
  EXPECT_EQ(entry_->totals().tokens_held, 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, LeaseTest,
                         ::testing::Values("auto", "kivi2", "fp8_e4m3(scale=page)"),
                         [](const auto& test) { return testing::TestNameOf(test.param); });

}  // namespace
}  // namespace kvtier::cachestore
