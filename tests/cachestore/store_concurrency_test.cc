// Many threads over one store: what a reader sees is whole and of its moment, what is let go comes
// back, nothing deadlocks. Run under the thread sanitizer.

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::Random;
using kvtier::testing::SeededRandom;
using testing::KvData;
using testing::Message;
using testing::NaiveSequence;
using testing::TestStore;

constexpr std::int64_t kMemory = 1 << 20;
constexpr std::int64_t kLongest = 160;
constexpr int kIds = 2;
constexpr int kRounds = 100;  // of each writer; the others go on until the writers are done

// One model, its values, and work of threads on its sequences.
class Traffic {
 public:
  Traffic(TestStore& store, const std::string& format, Random& random)
      : store_(store),
        name_(format),
        model_(store.Register(testing::RequestOf(Spec(), format, 32))->model()),
        data_(kvtier::testing::MakeKvData(Spec(), kLongest, random)) {}

  // Feeds one shard of random sequences from wherever they stand. Waits for the other writer and
  // for the readers between rounds, so that none runs alone.
  void Write(Random& random, Shard shard) {
    for (int round = 0; round < kRounds; ++round) {
      writers_.arrive_and_wait();
      for (const int rounds = ++rounds_; reads_ < rounds;) std::this_thread::yield();
      WriterRequest request;
      request.key = SomeKey(random);
      request.model_id = model_.id;
      request.shard = shard;
      request.epoch = random.OneIn(6) ? ++epoch_ : epoch_.load();
      request.on_end = [this](const absl::Status& why) {
        EXPECT_TRUE(why.ok() || why.code() == absl::StatusCode::kAborted) << why;
        ++ends_;
      };
      auto writer = store_->OpenWriter(std::move(request));
      if (writer.ok()) {
        Feed(random, **writer);
      } else {
        ExpectOneOf(writer.status(), {Reason::kSealed, Reason::kOldEpoch, Reason::kWriterExists,
                                      Reason::kSequenceGone});
      }
    }
  }

  // Reads a whole sequence and compares it to what the codecs make of its values.
  void ReadOne(Random& random) {
    const ReadFormat format{.as = ElementType::kFp32};
    auto reader = store_->OpenReader(SomeKey(random), model_.id, {}, format);
    ++reads_;
    if (!reader.ok()) return ExpectOneOf(reader.status(), {Reason::kUnknownSequence});
    const NaiveSequence naive(model_, data_, reader->pins().tokens);
    testing::ReadCheck(*reader, format, naive).Run(random);
    tokens_read_ += reader->pins().tokens;
  }

  // Drops or seals a sequence, once for some messages that the writers have sent.
  void DropOne(Random& random) {
    if (appends_ < 5 * (1 + drops_)) return std::this_thread::yield();
    ++drops_;
    const SequenceKey key = SomeKey(random);
    switch (random.Between(0, 3)) {
      case 0:
        return ExpectOneOf(store_->Abort(key), {Reason::kUnknownSequence, Reason::kNotOpen});
      case 1:
        return ExpectOneOf(store_->Remove(key), {Reason::kUnknownSequence});
      case 2:
        store_.clock.Advance(absl::Minutes(3));
        store_->ReclaimAbandoned();
        return;
      default:
        if (const auto description = store_->Describe(key);
            description.ok() && description->committed_tokens > 0) {
          ExpectOneOf(store_->Seal(key, description->committed_tokens),
                      {Reason::kUnknownSequence, Reason::kIncomplete});
        }
    }
  }

  void RemoveAll() {
    for (int i = 0; i < kIds; ++i)
      ExpectOneOf(store_->Remove({"default", name_ + std::to_string(i)}),
                  {Reason::kUnknownSequence});
  }

  std::int64_t tokens_read() const { return tokens_read_; }
  int ends() const { return ends_; }

 private:
  static ModelSpec Spec() { return testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32}); }

  SequenceKey SomeKey(Random& random) const {
    return {"default", name_ + std::to_string(random.Between(0, kIds - 1))};
  }

  void Feed(Random& random, Writer& writer) {
    std::int64_t first = writer.standing().received_tokens;
    while (first < kLongest && !random.OneIn(12)) {
      const testing::TokenSpan span{
          first, std::min<std::int64_t>(kLongest - first, random.Between(1, 30))};
      Message message(data_, writer.shard(), {.heads_first = random.OneIn(2)}, {1, 0}, span);
      const auto ack = writer.Append(message.chunk());
      if (!ack.ok()) {
        return ExpectOneOf(ack.status(), {Reason::kSealed, Reason::kOldEpoch, Reason::kSequenceGone,
                                          Reason::kBudget});
      }
      first = ack->received_tokens;
      ++appends_;
      std::this_thread::yield();
    }
  }

  static void ExpectOneOf(const absl::Status& status, const std::vector<Reason>& allowed) {
    bool expected = status.ok();
    for (const Reason reason : allowed) expected |= ReasonOf(status) == ReasonName(reason);
    EXPECT_TRUE(expected) << status;
  }

  TestStore& store_;
  const std::string name_;
  const Model& model_;
  const KvData data_;
  std::barrier<> writers_{2};
  std::atomic<int> rounds_{0};  // of both writers
  std::atomic<int> reads_{0};
  std::atomic<int> appends_{0};
  std::atomic<int> drops_{0};
  std::atomic<std::uint64_t> epoch_{0};
  std::atomic<int> ends_{0};
  std::atomic<std::int64_t> tokens_read_{0};
};

TEST(StoreConcurrency, WritersReadersAndDropsAtOnce) {
  SeededRandom random;
  // Time passes by minutes while a slow machine's reads are under way.
  TestStore store(StoreOptions{.memory = kMemory, .max_lease = absl::Hours(10'000)});
  Traffic split(store, "auto", random);  // heads come from two streams and may stand apart
  Traffic whole(store, "kivi(4,2,16,32)", random);
  std::vector<std::thread> writers, others;
  const auto write = [&](Traffic& traffic, Shard shard) {
    writers.emplace_back([&traffic, shard, seed = random.engine()()] {
      Random own(seed);
      traffic.Write(own, shard);
    });
  };
  std::atomic<bool> done{false};
  const auto meanwhile = [&](auto work) {
    others.emplace_back([&done, work, seed = random.engine()()] {
      Random own(seed);
      while (!done) work(own);
    });
  };
  write(split, {.num_heads = 1});
  write(split, {.first_head = 1});
  write(whole, {});
  write(whole, {});
  meanwhile([&](Random& r) { split.ReadOne(r); });
  meanwhile([&](Random& r) { whole.ReadOne(r); });
  meanwhile([&](Random& r) { split.DropOne(r); });
  meanwhile([&](Random& r) { whole.DropOne(r); });
  meanwhile([&](Random&) {
    EXPECT_EQ(testing::SumOf(store->memory()), kMemory);
    EXPECT_LE(store->List({"default", ""}, 100).size(), std::size_t{2 * kIds});
    for (const auto& model : store->Models()) EXPECT_GE(model->totals().held.allocated, 0);
    std::this_thread::yield();
  });
  for (std::thread& thread : writers) thread.join();
  done = true;
  for (std::thread& thread : others) thread.join();
  EXPECT_GT(split.tokens_read() + whole.tokens_read(), 0);
  RecordProperty("streams_ended", split.ends() + whole.ends());
  split.RemoveAll();
  whole.RemoveAll();
  EXPECT_EQ(store->memory().free, kMemory);
  for (const auto& model : store->Models()) {
    EXPECT_EQ(model->totals().held, MemoryHeld{});
    EXPECT_EQ(model->totals().sequences(), 0);
    EXPECT_GT(model->totals().appended_tokens, 0);
  }
}

// Readers and a writer of one sequence at once, every reader open while an append runs: the
// residual that it holds is never written, and what becomes codes meanwhile is not what it reads.
TEST(StoreConcurrency, ReadersFollowAWriter) {
  SeededRandom random;
  TestStore store(kMemory);
  const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  const Model& model = store.Register(testing::RequestOf(spec, "kivi(2,2,16,32)", 32))->model();
  const KvData data = kvtier::testing::MakeKvData(spec, 600, random);
  store.AppendAtOnce("s", model, data, 1);
  std::atomic<bool> done{false};
  std::atomic<int> opened{0}, appended{0};
  const auto read = [&](std::uint64_t seed) {
    Random own(seed);
    const ReadFormat format{.as = ElementType::kBf16};
    while (!done && !::testing::Test::HasFailure()) {
      const int before = appended;
      SequenceReader reader = store.Read("s", format);
      ++opened;
      while (appended == before && !done) std::this_thread::yield();
      testing::ReadCheck(reader, format, NaiveSequence(model, data, reader.pins().tokens)).Run(own);
    }
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) readers.emplace_back(read, random.engine()());
  const auto writer = store.OpenWriter("s", model);
  for (std::int64_t first = 1; first < 600 && !HasFailure(); ++appended) {
    while (opened <= appended && !HasFailure()) std::this_thread::yield();
    const std::int64_t count = std::min<std::int64_t>(600 - first, random.Between(1, 9));
    Message message(data, writer->shard(), {}, {0, 1}, {first, count});
    EXPECT_THAT(writer->Append(message.chunk()), IsOk());
    first += count;
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(store->Describe({"default", "s"})->held, PlanSequence(model, 600));
}

}  // namespace
}  // namespace kvtier::cachestore
