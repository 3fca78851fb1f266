// The budget is never exceeded, sums up exactly at every step, a refused append changes nothing,
// and when all is released the baseline is back.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/stored_bytes.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Message;
using testing::NaiveSequence;
using testing::ReadCheck;
using testing::TestStore;

constexpr std::int64_t kLongest = 300;

SequenceKey Key(const std::string& id) { return {"default", id}; }

// What the totals of all models and the arena say of the same memory.
void ExpectBooksAgree(TestStore& store) {
  const MemoryParts parts = store->memory();
  EXPECT_EQ(testing::SumOf(parts), store->budget());
  for (const std::int64_t part : {parts.use.codes, parts.use.scales, parts.use.residual,
                                  parts.use.header, parts.slack, parts.free})
    EXPECT_GE(part, 0);
}

MemoryHeld HeldByModels(TestStore& store) {
  MemoryHeld held;
  for (const auto& model : store->Models()) held += model->totals().held;
  return held;
}

// A store full of random work, and a model of what each sequence has.
class RandomWork {
 public:
  explicit RandomWork(std::int64_t memory)
      : store_(StoreOptions{.memory = memory, .eviction = EvictionPolicyName::kNone}) {
    for (const char* format : {"auto", "fp8", "kivi2", "kivi(4,4,16,0)", "int8_per_token_head"}) {
      const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
      models_.push_back(store_.Register(testing::RequestOf(spec, format, 64)));
      data_.push_back(kvtier::testing::MakeKvData(spec, kLongest, random_));
    }
  }

  void Step() {
    const std::string id = std::to_string(random_.Between(0, 7));
    switch (random_.Between(0, 9)) {
      case 0:
        return Drop(id);
      case 1:
        return Seal(id);
      case 2:
      case 3:
        return OpenReader(id);
      case 4:
      case 5:
        return CloseReader();
      default:
        return Append(id, random_.Between(1, random_.OneIn(3) ? 150 : 20));
    }
  }

  void ExpectSums() {
    ExpectBooksAgree(store_);
    const MemoryParts parts = store_->memory();
    const MemoryHeld held = HeldByModels(store_);
    EXPECT_EQ(parts.use, held.use);
    EXPECT_EQ(parts.slack, held.slack());
    MemoryHeld described;
    for (const auto& [id, book] : books_) {
      const auto description = store_->Describe(Key(id));
      ASSERT_THAT(description, IsOk());
      EXPECT_EQ(description->committed_tokens, book.tokens);
      const Model& model = models_[book.model]->model();
      const bool sealed = description->state == SequenceState::kSealed;
      EXPECT_EQ(description->held,
                sealed ? PlanSealed(model, book.tokens) : PlanSequence(model, book.tokens));
      described += description->held;
    }
    // Readers may hold parts and slots that no sequence has any more.
    if (readers_.empty()) {
      EXPECT_EQ(described, held);
    } else {
      EXPECT_LE(described.allocated, held.allocated);
    }
  }

  void ReleaseAll() {
    while (!readers_.empty()) CloseReader();
    while (!books_.empty()) Drop(books_.begin()->first);
  }

  TestStore& store() { return store_; }
  int refused() const { return refused_; }

 private:
  struct Book {
    std::size_t model = 0;
    std::int64_t tokens = 0;
    bool sealed = false;
    std::unique_ptr<Writer> writer;
  };
  struct OpenRead {
    SequenceReader reader;
    std::size_t model;
    std::int64_t tokens;
  };

  void Append(const std::string& id, std::int64_t tokens) {
    const auto found = books_.find(id);
    Book fresh{.model = static_cast<std::size_t>(
                   random_.Between(0, static_cast<std::int64_t>(models_.size()) - 1))};
    Book& book = found == books_.end() ? fresh : found->second;
    if (book.sealed || book.tokens == kLongest) return;
    const Model& model = models_[book.model]->model();
    if (book.writer == nullptr) book.writer = store_.OpenWriter(id, model);
    const testing::TokenSpan span{book.tokens, std::min(tokens, kLongest - book.tokens)};
    Message message(data_[book.model], book.writer->shard(), {}, {0, 1}, span);
    const MemoryParts before = store_->memory();
    const auto ack = book.writer->Append(message.chunk());
    if (ack.ok()) {
      book.tokens += span.count;
      EXPECT_EQ(ack->committed_tokens, book.tokens);
      if (random_.OneIn(4)) book.writer.reset();
      if (found == books_.end()) books_.emplace(id, std::move(fresh));
      return;
    }
    ++refused_;
    EXPECT_THAT(ack, Refuses(Reason::kBudget, HasSubstr(std::to_string(store_->budget()))));
    const MemoryParts after = store_->memory();
    EXPECT_EQ(after.use, before.use);
    EXPECT_EQ(after.slack, before.slack);
    if (book.tokens > 0) ExpectUntouched(id, book);
  }

  // A sequence reads as the codecs alone make it.
  void ExpectUntouched(const std::string& id, const Book& book) {
    SequenceReader reader = store_.Read(id, kAsFp32);
    const NaiveSequence naive(models_[book.model]->model(), data_[book.model], book.tokens);
    ReadCheck(reader, kAsFp32, naive).Run(random_);
  }

  void Drop(const std::string& id) {
    const auto found = books_.find(id);
    if (found == books_.end()) return;
    if (found->second.sealed) {
      EXPECT_THAT(store_->Abort(Key(id)), Refuses(Reason::kNotOpen, HasSubstr(id)));
      EXPECT_THAT(store_->Remove(Key(id)), IsOk());
    } else {
      EXPECT_THAT(random_.OneIn(2) ? store_->Abort(Key(id)) : store_->Remove(Key(id)), IsOk());
    }
    books_.erase(found);
  }

  void Seal(const std::string& id) {
    const auto found = books_.find(id);
    if (found == books_.end()) return;
    EXPECT_THAT(store_->Seal(Key(id), found->second.tokens), IsOk());
    found->second.sealed = true;
  }

  void OpenReader(const std::string& id) {
    const auto found = books_.find(id);
    if (found == books_.end()) return;
    readers_.push_back({store_.Read(id, kAsFp32), found->second.model, found->second.tokens});
  }

  void CloseReader() {
    if (readers_.empty()) return;
    const auto index = static_cast<std::size_t>(
        random_.Between(0, static_cast<std::int64_t>(readers_.size()) - 1));
    OpenRead& read = readers_[index];
    const NaiveSequence naive(models_[read.model]->model(), data_[read.model], read.tokens);
    ReadCheck(read.reader, kAsFp32, naive).Run(random_);
    readers_.erase(readers_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  static constexpr ReadFormat kAsFp32{.as = ElementType::kFp32};

  SeededRandom random_;
  TestStore store_;
  std::vector<std::shared_ptr<ModelEntry>> models_;
  std::vector<testing::KvData> data_;  // by model
  std::map<std::string, Book> books_;
  std::vector<OpenRead> readers_;
  int refused_ = 0;
};

TEST(StoreBudget, AnyMixOfWorkSumsUpAndComesBackToNothing) {
  int refused = 0;
  // From "a sequence or two fit" to "almost all fits".
  for (const std::int64_t memory : {150'000, 400'000, 1'000'000}) {
    RandomWork work(memory);
    for (int step = 0; step < 400; ++step) {
      work.Step();
      work.ExpectSums();
      if (::testing::Test::HasFailure()) return;
    }
    refused += work.refused();
    work.ReleaseAll();
    EXPECT_EQ(work.store()->memory().free, memory);
    EXPECT_EQ(work.store()->memory().use, MemoryUse{});
    EXPECT_EQ(HeldByModels(work.store()), MemoryHeld{});
  }
  EXPECT_GT(refused, 0) << "no budget was ever full";
}

// A chunk of several layers whose last layer finds no memory takes none of them.
TEST(StoreBudget, ARefusedAppendIsRefusedWhole) {
  SeededRandom random;
  for (const char* format : {"auto", "kivi2", "fp8"}) {
    const ModelSpec spec = testing::UniformSpec({.layers = 3, .heads = 2, .dim = 32});
    const auto plan = ResolveModel(testing::RequestOf(spec, format, 64), 128).value();
    // Room for 100 tokens, and for the new pages of 200 tokens in all tensors but the last.
    const std::int64_t memory = PlanSequence(*plan, 200).allocated - kAlignment;
    TestStore store(memory);
    const Model& model = store.Register(testing::RequestOf(spec, format, 64))->model();
    const testing::KvData data = kvtier::testing::MakeKvData(spec, 200, random);
    store.AppendAtOnce("s", model, data, 100);
    const auto bytes = testing::StoredBytesOf(store.device, store.Read("s").pins());
    const MemoryParts before = store->memory();

    const auto writer = store.OpenWriter("s", model);
    Message message(data, writer->shard(), {}, {0, 1, 2}, {100, 100});
    EXPECT_THAT(
        writer->Append(message.chunk()),
        Refuses(Reason::kBudget, AllOf(HasSubstr("memory budget of " + std::to_string(memory)),
                                       HasSubstr(" are free, "))));
    EXPECT_EQ(store->memory().use, before.use);
    EXPECT_EQ(store->memory().free, before.free);
    EXPECT_EQ(store->Describe(Key("s"))->committed_tokens, 100);
    EXPECT_EQ(
        testing::DifferenceOf(testing::StoredBytesOf(store.device, store.Read("s").pins()), bytes),
        "");
    // The stream goes on with what fits.
    Message less(data, writer->shard(), {}, {0, 1, 2}, {100, 1});
    EXPECT_THAT(writer->Append(less.chunk()), IsOk());
  }
}

TEST(StoreBudget, AThousandAbortsLeaveNothing) {
  SeededRandom random;
  constexpr std::int64_t kMemory = 300'000;
  const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  TestStore store(kMemory);
  const testing::KvData data = kvtier::testing::MakeKvData(spec, kLongest, random);
  std::vector<std::shared_ptr<ModelEntry>> models;
  for (const char* format : {"auto", "fp8", "kivi2"})
    models.push_back(store.Register(testing::RequestOf(spec, format, 32)));
  for (int round = 0; round < 1000; ++round) {
    const Model& model = random.Pick(models)->model();
    const auto writer = store.OpenWriter("s", model);
    const std::int64_t stop = random.Between(0, 120);
    for (std::int64_t first = 0; first < stop;) {
      const std::int64_t count = random.Between(1, 60);
      Message message(data, writer->shard(), {}, {0, 1}, {first, count});
      ASSERT_THAT(writer->Append(message.chunk()), IsOk());
      first += count;
    }
    ASSERT_THAT(store->Abort(Key("s")), IsOk());
    ASSERT_EQ(store->memory().free, kMemory) << "round " << round;
  }
  for (const auto& model : models) {
    EXPECT_EQ(model->totals().sequences(), 0);
    EXPECT_EQ(model->totals().tokens_held, 0);
    EXPECT_GT(model->totals().appended_tokens, 0);
  }
}

// Work for readers comes out of the budget too: a slot that a reader holds is copied, not written.
TEST(StoreBudget, ACopyOfTheResidualIsRefusedWhereItDoesNotFit) {
  SeededRandom random;
  const ModelSpec spec = testing::UniformSpec({.layers = 1, .heads = 2, .dim = 32});
  const auto plan = ResolveModel(testing::RequestOf(spec, "kivi2", 64), 128).value();
  TestStore store(OnePageOfEveryLayer(*plan));  // one V page more than 60 tokens take
  const Model& model = store.Register(testing::RequestOf(spec, "kivi2", 64))->model();
  const testing::KvData data = kvtier::testing::MakeKvData(spec, 60, random);
  store.AppendAtOnce("s", model, data, 50);
  const auto writer = store.OpenWriter("s", model);
  Message message(data, writer->shard(), {}, {0}, {50, 10});
  std::optional<SequenceReader> reader = store.Read("s");
  EXPECT_THAT(writer->Append(message.chunk()),
              Refuses(Reason::kBudget, HasSubstr("32768 more are needed")));
  reader.reset();
  EXPECT_THAT(writer->Append(message.chunk()), IsOk());
}

TEST(StoreBudget, AModelOfWhichNotOnePageFitsIsRefused) {
  const ModelSpec spec = testing::UniformSpec({.layers = 4, .heads = 4, .dim = 64});
  TestStore store(100'000);
  EXPECT_THAT(store->RegisterModel(testing::RequestOf(spec, "auto")),
              Refuses(Reason::kBudget,
                      AllOf(HasSubstr("memory is 100000 bytes"), HasSubstr("\"model\" as auto"))));
}

}  // namespace
}  // namespace kvtier::cachestore
