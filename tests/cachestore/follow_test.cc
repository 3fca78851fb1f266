// Those who follow a sequence get each layer as it is received, and hear how it ended.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::Random;
using kvtier::testing::Refuses;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kAsFp32;
using testing::Key;
using testing::KvData;
using testing::Message;
using testing::NaiveSequence;

constexpr std::int64_t kMemory = 4 << 20;
constexpr std::int64_t kTokens = 400;
constexpr int kLayers = 3, kHeads = 2;
constexpr std::int64_t kAtOnce = 1 << 20;  // bytes: all that a layer has

// What a piece was of.
struct Given {
  int layer = 0;
  std::int64_t first = 0;
  std::int64_t tokens = 0;
  friend bool operator==(const Given&, const Given&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Given& given) {
    return out << "layer " << given.layer << ": " << given.tokens << " from " << given.first;
  }
};

class FollowTest : public testing::TwoTextsTest {
 protected:
  FollowTest()
      : TwoTextsTest(testing::UniformSpec({.layers = kLayers, .heads = kHeads, .dim = 32}),
                     {.memory = kMemory}, kTokens),
        received_(kLayers, std::vector<std::int64_t>(kHeads)) {}

  void Open(Shard shard = {}) { writer_ = store_.OpenWriter("s", model(), shard); }

  void Send(int layer, std::int64_t until) { Send(*writer_, layer, until); }
  void Send(Writer& writer, int layer, std::int64_t until) {
    const Shard& shard = writer.shard();
    auto& heads = received_[static_cast<std::size_t>(layer)];
    const std::int64_t from = heads[static_cast<std::size_t>(shard.first_head)];
    Message message(one_, shard, {}, {layer}, {from, until - from});
    ASSERT_THAT(writer.Append(message.chunk()), IsOk());
    for (int head = shard.first_head; head < shard.end_head(); ++head)
      heads[static_cast<std::size_t>(head)] = until;
  }
  void SendAll(std::int64_t until) {
    for (int layer = 0; layer < kLayers; ++layer) Send(layer, until);
  }

  absl::StatusOr<SequenceFollower> Follow(ReadRange range = {},
                                          const ReadFormat& format = kAsFp32) {
    return store_->Follow({Key("s"), "", [this] { ++news_; }}, range, format);
  }

  // All pieces that there are, each compared with what has been received now.
  std::vector<Given> Take(SequenceFollower& follower, const ReadFormat& format = kAsFp32,
                          std::int64_t bytes = kAtOnce) {
    const NaiveSequence naive(model(), one_, [&](int layer, int head) {
      return received_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)];
    });
    std::vector<Given> all;
    for (;;) {
      auto piece = follower.Next(bytes);
      EXPECT_THAT(piece, IsOk());
      if (!piece.ok() || !piece->has_value()) return all;
      testing::ReadCheck(**piece, format, naive).Run(random_);
      const SequencePins& pins = (*piece)->pins();
      all.push_back({pins.shard.first_layer, pins.first_token, pins.tokens});
    }
  }

  // Of a follower that was given all there is.
  void ExpectEnds(SequenceFollower& follower, Reason reason, const std::string& message) {
    EXPECT_EQ(news_, 1) << "it is told once";
    EXPECT_THAT(follower.Next(kAtOnce), Refuses(reason, HasSubstr(message)));
    EXPECT_FALSE(follower.done());
  }
  SequenceFollower FollowAll() {
    SequenceFollower follower = Follow().value();
    Take(follower);
    news_ = 0;
    return follower;
  }

  std::vector<std::vector<std::int64_t>> received_;  // by layer and head
  std::unique_ptr<Writer> writer_;
  int news_ = 0;
};

TEST_P(FollowTest, GivesEachLayerBeforeTheNextHasCome) {
  Open();
  SequenceFollower follower = Follow().value();
  EXPECT_EQ(follower.opening().layers().size(), kLayers);
  EXPECT_EQ(follower.opening().pins().committed_tokens, 0);
  EXPECT_THAT(Take(follower), IsEmpty());
  for (int layer = 0; layer < kLayers; ++layer) {
    Send(layer, 150);
    EXPECT_EQ(news_, layer + 1);
    EXPECT_THAT(Take(follower), ElementsAre(Given{layer, 0, 150}));
    EXPECT_FALSE(follower.done());
  }
  EXPECT_EQ(follower.tokens(), 150);
  SendAll(300);
  EXPECT_THAT(Take(follower),
              ElementsAre(Given{0, 150, 150}, Given{1, 150, 150}, Given{2, 150, 150}));
  ASSERT_THAT(store_->Seal(Key("s"), 300), IsOk());
  EXPECT_THAT(Take(follower), IsEmpty());
  EXPECT_TRUE(follower.done());
  EXPECT_EQ(follower.tokens(), 300);
}

TEST_P(FollowTest, GivesASealedSequenceWholeLayerByLayer) {
  Open();
  SendAll(300);
  ASSERT_THAT(store_->Seal(Key("s"), 300), IsOk());
  SequenceFollower follower = Follow({.first_token = 10}).value();
  EXPECT_TRUE(follower.opening().pins().sealed);
  const std::vector<Given> given = Take(follower, kAsFp32, 40'000);
  EXPECT_TRUE(follower.done());
  EXPECT_EQ(follower.tokens(), 290);
  Given want{.layer = 0, .first = 10, .tokens = 0};
  for (const Given& piece : given) {
    EXPECT_EQ(piece.layer, want.layer);
    EXPECT_EQ(piece.first, want.first);
    want.first += piece.tokens;
    if (want.first == 300) want = {want.layer + 1, 10, 0};
  }
  EXPECT_EQ(want.layer, kLayers);
  EXPECT_GT(given.size(), kLayers) << "in pieces of no more bytes than were asked for";
}

TEST_P(FollowTest, EveryLayerHasItsTurnWhenTheFirstAlwaysHasMore) {
  Open();
  SendAll(100);
  SequenceFollower follower = Follow().value();
  for (int i = 0; i < 12; ++i) {
    const auto piece = follower.Next(1);  // of one token
    ASSERT_THAT(piece, IsOk());
    EXPECT_EQ((*piece)->pins().shard.first_layer, 0) << "a turn lasts until it gave what it had";
    if (i == 0) Send(0, 110);
  }
  const std::vector<Given> rest = Take(follower);
  EXPECT_THAT(rest,
              ElementsAre(Given{0, 12, 88}, Given{1, 0, 100}, Given{2, 0, 100}, Given{0, 100, 10}))
      << "what came in its turn waits for the next";
}

TEST_P(FollowTest, GivesWholeBlocksUntilTheEndIsKnown) {
  const ReadFormat format{.as = kernels::ElementType::kFp32, .block_tokens = 16};
  Open();
  SequenceFollower follower = Follow({.first_token = 5}, format).value();
  Send(0, 30);
  EXPECT_THAT(Take(follower, format), ElementsAre(Given{0, 5, 16}));
  Send(0, 36);
  EXPECT_THAT(Take(follower, format), IsEmpty()) << "15 tokens are no block";
  Send(0, 40);
  EXPECT_THAT(Take(follower, format), ElementsAre(Given{0, 21, 16}));
  Send(1, 40);
  Send(2, 40);
  EXPECT_THAT(Take(follower, format), ElementsAre(Given{1, 5, 32}, Given{2, 5, 32}));
  ASSERT_THAT(store_->Seal(Key("s"), 40), IsOk());
  EXPECT_THAT(Take(follower, format),
              ElementsAre(Given{0, 37, 3}, Given{1, 37, 3}, Given{2, 37, 3}));
  EXPECT_TRUE(follower.done());
}

TEST_P(FollowTest, GivesWhatAllHeadsThatItAsksForHave) {
  const auto first = store_.OpenWriter("s", model(), {.num_heads = 1});
  const auto second = store_.OpenWriter("s", model(), {.first_head = 1, .num_heads = 1});
  SequenceFollower both = Follow().value();
  SequenceFollower one = Follow({.shard = {.first_layer = 1, .first_head = 1}}).value();
  Send(*first, 1, 100);
  EXPECT_THAT(Take(both), IsEmpty());
  EXPECT_THAT(Take(one), IsEmpty());
  Send(*second, 1, 70);
  EXPECT_THAT(Take(both), ElementsAre(Given{1, 0, 70}));
  EXPECT_THAT(Take(one), ElementsAre(Given{1, 0, 70}));
  Send(*second, 0, 70);
  EXPECT_THAT(Take(one), IsEmpty()) << "not of layer 0";
}

TEST_P(FollowTest, EndsWhereItWasAskedToOnceThatIsCommitted) {
  Open();
  SequenceFollower follower = Follow({.first_token = 20, .tokens = 100}).value();
  SequenceFollower of_first = Follow({.shard = {.num_layers = 1}, .tokens = 100}).value();
  Send(0, 150);
  EXPECT_THAT(Take(follower), ElementsAre(Given{0, 20, 100}));
  EXPECT_THAT(Take(of_first), ElementsAre(Given{0, 0, 100}));
  EXPECT_FALSE(of_first.done()) << "not committed yet";
  Send(1, 110);
  Send(2, 119);
  EXPECT_THAT(Take(follower), ElementsAre(Given{1, 20, 90}, Given{2, 20, 99}));
  EXPECT_THAT(Take(of_first), IsEmpty());
  EXPECT_TRUE(of_first.done());
  EXPECT_FALSE(follower.done());
  Send(1, 130);
  Send(2, 130);
  EXPECT_THAT(Take(follower), ElementsAre(Given{1, 110, 10}, Given{2, 119, 1}));
  EXPECT_TRUE(follower.done());
  EXPECT_EQ(follower.tokens(), 100);
}

// Where nothing is at source precision for a while.
TEST_P(FollowTest, GivesWhatAPlainReadGives) {
  if (model().layers[0].k.residual.capacity() > 0) return;
  Open();
  SequenceFollower follower = Follow().value();
  std::vector<std::vector<std::byte>> k(kLayers), v(kLayers);
  const auto take = [&] {
    while (auto piece = follower.Next(kAtOnce).value()) {
      const LayerOutput& out = piece->layers()[0];
      const auto layer = static_cast<std::size_t>(out.layer);
      const auto bytes = static_cast<std::size_t>(piece->pins().tokens * out.k_bytes_per_token());
      k[layer].resize(k[layer].size() + bytes);
      v[layer].resize(v[layer].size() + bytes);
      ASSERT_THAT(piece->Fill(0, piece->pins().first_token, piece->pins().tokens,
                              &k[layer].back() + 1 - bytes, &v[layer].back() + 1 - bytes),
                  IsOk());
    }
  };
  for (std::int64_t until = 0; until < kTokens;) {
    until = std::min(kTokens, until + random_.Between(1, 90));
    for (int layer = 0; layer < kLayers; ++layer) {
      Send(layer, until);
      ASSERT_NO_FATAL_FAILURE(take());
    }
  }
  ASSERT_THAT(store_->Seal(Key("s"), kTokens), IsOk());
  ASSERT_NO_FATAL_FAILURE(take());
  EXPECT_TRUE(follower.done());
  SequenceReader reader = store_.Read("s", kAsFp32);
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    std::vector<std::byte> want_k(k[layer].size()), want_v(v[layer].size());
    ASSERT_THAT(reader.Fill(layer, 0, kTokens, want_k.data(), want_v.data()), IsOk());
    EXPECT_EQ(k[layer], want_k);
    EXPECT_EQ(v[layer], want_v);
  }
}

TEST_P(FollowTest, IsToldOnceUntilItLooksAgain) {
  Open();
  SequenceFollower follower = Follow().value();
  Take(follower);
  Send(0, 10);
  Send(0, 20);
  Send(1, 20);
  EXPECT_EQ(news_, 1);
  Message resent(one_, writer_->shard(), {}, {0}, {0, 20});
  Take(follower);
  ASSERT_THAT(writer_->Append(resent.chunk()), IsOk());
  EXPECT_EQ(news_, 1) << "nothing of it was new";
  Send(2, 20);
  EXPECT_EQ(news_, 2);
}

TEST_P(FollowTest, IsToldOutsideTheSequencesLock) {
  for (const bool seals : {true, false}) {
    received_.assign(kLayers, std::vector<std::int64_t>(kHeads));
    Open();
    std::vector<std::int64_t> committed;
    auto follower = store_->Follow({Key("s"), "",
                                    [&] {
                                      const auto is = store_->Describe(Key("s"));
                                      committed.push_back(is.ok() ? is->committed_tokens : -1);
                                    }},
                                   {}, kAsFp32);
    ASSERT_THAT(follower, IsOk());
    SendAll(10);
    Take(*follower);
    if (seals) {
      ASSERT_THAT(store_->Seal(Key("s"), 10), IsOk());
    }
    ASSERT_THAT(store_->Remove(Key("s")), IsOk());
    EXPECT_THAT(committed, ElementsAre(0, seals ? 10 : -1));
  }
}

TEST_P(FollowTest, EndsWithASequenceThatGoes) {
  Open();
  Send(0, 50);
  {
    SequenceFollower follower = FollowAll();
    ASSERT_THAT(store_->Abort(Key("s")), IsOk());
    ExpectEnds(follower, Reason::kSequenceGone, "\"s\" was aborted");
  }
  EXPECT_EQ(store_->memory().free, kMemory);
  received_.assign(kLayers, std::vector<std::int64_t>(kHeads));
  Open();
  SendAll(50);
  ASSERT_THAT(store_->Seal(Key("s"), 50), IsOk());
  {
    SequenceFollower follower = Follow().value();
    ASSERT_THAT(follower.Next(kAtOnce), IsOk());
    news_ = 0;
    ASSERT_THAT(store_->Remove(Key("s")), IsOk());
    ExpectEnds(follower, Reason::kSequenceGone, "\"s\" was removed");
  }
  EXPECT_EQ(store_->memory().free, kMemory);
}

TEST_P(FollowTest, EndsWithASilentWriter) {
  Open();
  Send(0, 50);
  SequenceFollower follower = FollowAll();
  store_.clock.Advance(store_->options().open_sequence_deadline);
  EXPECT_EQ(store_->ReclaimAbandoned(), 1);
  ExpectEnds(follower, Reason::kSequenceGone, "had no message for 5m");
}

TEST_P(FollowTest, EndsWithTheWriterOfNothing) {
  Open();
  SequenceFollower follower = FollowAll();
  writer_.reset();
  ExpectEnds(follower, Reason::kSequenceGone, "held nothing when its last writer left");
}

TEST_P(FollowTest, EndsWithADeviceThatFails) {
  Open();
  Send(0, 50);
  SequenceFollower follower = FollowAll();
  store_.device.FailEncode(1);
  Message message(one_, writer_->shard(), {}, {0}, {50, 50});
  EXPECT_FALSE(writer_->Append(message.chunk()).ok());
  ExpectEnds(follower, Reason::kSequenceGone, "\"s\" was given up: the device is lost");
}

TEST_P(FollowTest, EndsWithATruncateOfWhatItWasGiven) {
  Open();
  SendAll(200);
  SequenceFollower follower = FollowAll();
  ASSERT_THAT(store_->Truncate(Key("s"), 0, 1), IsOk());
  ExpectEnds(follower, Reason::kSequenceGone, "truncated before what had been read of it");
}

TEST_P(FollowTest, GoesOnAfterATruncateOfOtherTokens) {
  Open();
  SendAll(96);
  SequenceFollower follower = Follow({.tokens = 200}).value();
  const auto piece = [&] { return follower.Next(kAtOnce).value()->pins().shard.first_layer; };
  EXPECT_EQ(piece(), 0);
  EXPECT_EQ(piece(), 1);
  Send(0, 160);
  Send(1, 130);
  // Layer 2 was not given yet, and of the others nothing past 96 tokens.
  ASSERT_THAT(store_->Truncate(Key("s"), 96, 1), IsOk());
  received_.assign(kLayers, std::vector<std::int64_t>(kHeads, 96));
  writer_ = store_.OpenWriter("s", model(), {}, 2);
  EXPECT_THAT(Take(follower), ElementsAre(Given{2, 0, 96}));
  for (int layer = 0; layer < kLayers; ++layer) {
    Message message(other_, writer_->shard(), {}, {layer}, {96, 104});
    ASSERT_THAT(writer_->Append(message.chunk()), IsOk());
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto next = follower.Next(kAtOnce);
    ASSERT_THAT(next, IsOk());
    EXPECT_EQ((*next)->pins().first_token, 96);
    EXPECT_EQ((*next)->pins().tokens, 104);
  }
  EXPECT_THAT(follower.Next(kAtOnce), IsOk());
  EXPECT_TRUE(follower.done());
}

TEST_P(FollowTest, EndsWithItsLease) {
  Open();
  Send(0, 50);
  SequenceFollower follower = FollowAll();
  Send(0, 60);
  EXPECT_EQ(follower.deadline(), store_.clock.Now() + store_->options().max_lease);
  store_.clock.Advance(store_->options().max_lease);
  ExpectEnds(follower, Reason::kLeaseEnded, "expired");
}

TEST_P(FollowTest, RefusesWhatASealedSequenceHasNot) {
  Open();
  SendAll(50);
  SequenceFollower longer = Follow({.first_token = 10, .tokens = 41}).value();
  SequenceFollower later = Follow({.first_token = 51}).value();
  SequenceFollower exact = Follow({.first_token = 10, .tokens = 40}).value();
  Take(longer);
  Take(later);
  ASSERT_THAT(store_->Seal(Key("s"), 50), IsOk());
  EXPECT_THAT(longer.Next(1), Refuses(Reason::kPastCommitted, HasSubstr("sealed with 50")));
  EXPECT_THAT(later.Next(1), Refuses(Reason::kPastCommitted, HasSubstr("sealed with 50")));
  Take(exact);
  EXPECT_TRUE(exact.done());
}

TEST_P(FollowTest, KeepsNothingFromItsWriterBetweenPieces) {
  EXPECT_THAT(Follow(), Refuses(Reason::kUnknownSequence, HasSubstr("\"s\"")));
  Open();
  SendAll(100);
  const std::int64_t free = store_->memory().free;
  SequenceFollower follower = Follow().value();
  ASSERT_TRUE(follower.Next(1).value().has_value());
  EXPECT_EQ(store_->memory().free, free);
  SendAll(101);
  EXPECT_EQ(store_->memory().free, kMemory - store_->Describe(Key("s"))->held.allocated)
      << "between two pieces nothing is kept for it";
}

INSTANTIATE_TEST_SUITE_P(Formats, FollowTest,
                         ::testing::Values("auto", "fp8", "int8_per_token_head", "kivi2",
                                           "kivi(4,2,32,0)"),
                         [](const auto& test) { return testing::TestNameOf(test.param); });

// A writer in one thread and followers that sleep until they are told, in two others: each gets
// every token of every layer once, in order. Now and then the writer waits until they have all that
// it sent, which one that has missed its news never has.
TEST(FollowConcurrency, NoNewsIsLost) {
  kvtier::testing::SeededRandom random;
  testing::TestStore store(kMemory);
  const ModelSpec spec = testing::UniformSpec({.layers = kLayers, .heads = kHeads, .dim = 32});
  const Model& model = store.Register(testing::RequestOf(spec, "fp8", 64))->model();
  const KvData data = kvtier::testing::MakeKvData(spec, kTokens, random);
  const NaiveSequence naive(model, data, kTokens);
  const auto writer = store.OpenWriter("s", model);
  std::array<std::atomic<std::int64_t>, 2> given{};  // tokens of all layers, by follower
  const auto follow = [&](std::size_t number, std::uint64_t seed) {
    Random own(seed);
    // It may be told once more when it has gone.
    struct News {
      std::mutex mutex;
      std::condition_variable came;
      bool some = false;
    };
    const auto news = std::make_shared<News>();
    auto follower = store->Follow({Key("s"), "",
                                   [news] {
                                     const std::lock_guard lock(news->mutex);
                                     news->some = true;
                                     news->came.notify_one();
                                   }},
                                  {}, kAsFp32);
    ASSERT_THAT(follower, IsOk());
    std::vector<std::int64_t> next(kLayers);
    while (!follower->done() && !::testing::Test::HasFailure()) {
      auto piece = follower->Next(own.Between(1, 20'000));
      ASSERT_THAT(piece, IsOk());
      if (!piece->has_value()) {
        if (follower->done()) break;
        std::unique_lock lock(news->mutex);
        ASSERT_TRUE(news->came.wait_for(lock, std::chrono::seconds(20), [&] { return news->some; }))
            << "it was never told";
        news->some = false;
        continue;
      }
      const SequencePins& pins = (*piece)->pins();
      std::int64_t& expected = next[static_cast<std::size_t>(pins.shard.first_layer)];
      ASSERT_EQ(pins.first_token, expected);
      expected += pins.tokens;
      testing::ReadCheck(**piece, kAsFp32, naive).Run(own);
      given[number] += pins.tokens;
    }
    EXPECT_THAT(next, ::testing::Each(kTokens));
  };
  std::vector<std::thread> followers;
  for (std::size_t i = 0; i < given.size(); ++i)
    followers.emplace_back(follow, i, random.engine()());
  std::int64_t sent = 0;
  for (std::int64_t first = 0; first < kTokens;) {
    const std::int64_t count = std::min(kTokens - first, random.Between(1, 9));
    for (int layer = 0; layer < kLayers; ++layer) {
      Message message(data, writer->shard(), {}, {layer}, {first, count});
      EXPECT_THAT(writer->Append(message.chunk()), IsOk());
      sent += count;
      if (!random.OneIn(4)) continue;
      for (const auto& of_one : given) {
        while (of_one < sent && !::testing::Test::HasFailure()) std::this_thread::yield();
      }
    }
    first += count;
  }
  EXPECT_THAT(store->Seal(Key("s"), kTokens), IsOk());
  for (std::thread& follower : followers) follower.join();
}

}  // namespace
}  // namespace kvtier::cachestore
