// Forks: exact where all stands at one length, whole pages elsewhere; each goes its own way.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using testing::AppendSpan;
using testing::Diverge;
using testing::ExpectReads;
using ::testing::HasSubstr;
using testing::Key;
using testing::kPage;
using testing::OpenWithPrompt;
using testing::PromptFrom;
using testing::TestStore;

constexpr std::int64_t kMemory = 4 << 20;
constexpr std::int64_t kTokens = 300;

class ForkTest : public testing::TwoTextsTest {
 protected:
  ForkTest() : TwoTextsTest(TwoLayers(), {.memory = kMemory}, kTokens) {}
};

// With pages, a page that is filling, and residual; then both go on with other tokens.
TEST_P(ForkTest, AtTheCurrentLengthIsExact) {
  for (const bool sealed : {false, true}) {
    const auto writer = OpenWithPrompt(store_, "a", model(), PromptFrom(0, 170));
    AppendSpan(*writer, one_, {0, 170});
    if (sealed) {
      ASSERT_THAT(store_->Seal(Key("a"), 170), IsOk());
    }
    const auto forked = store_->Fork(Key("a"), "b", -1);
    ASSERT_THAT(forked, IsOk());
    EXPECT_EQ(*forked, 170);
    EXPECT_EQ(store_->Describe(Key("b"))->held, PlanSequence(model(), 170));
    const KvData data = Diverge(one_, other_, 170);
    const auto fork = OpenWithPrompt(store_, "b", model(), {});
    EXPECT_EQ(fork->standing().received_tokens, 170);
    EXPECT_EQ(fork->standing().residual_origin, 0);
    AppendSpan(*fork, data, {170, 1});
    ExpectReads(store_, "b", model(), data, 171, 0, random_);
    AppendSpan(*fork, data, {171, 100});
    if (!sealed) AppendSpan(*writer, one_, {170, 120});
    ExpectReads(store_, "b", model(), data, 271, 0, random_);
    ExpectReads(store_, "a", model(), one_, sealed ? 170 : 290, 0, random_);
    ASSERT_THAT(store_->Remove(Key("a")), IsOk());
    ExpectReads(store_, "b", model(), data, 271, 0, random_);
    ASSERT_THAT(store_->Remove(Key("b")), IsOk());
    EXPECT_EQ(store_->memory().free, kMemory);
  }
  EXPECT_EQ(entry_->totals().tokens_held, 0);
  EXPECT_EQ(entry_->totals().appended_tokens, 170 + 120 + 170 + 2 * 101);
}

TEST_P(ForkTest, BeforeTheCurrentLengthHasWholePages) {
  const auto writer = OpenWithPrompt(store_, "a", model(), PromptFrom(0, 200));
  AppendSpan(*writer, one_, {0, 200});
  const std::int64_t whole = testing::SharablePages(model(), 200);
  for (const std::int64_t tokens :
       {std::int64_t{0}, std::int64_t{63}, std::int64_t{130}, std::int64_t{199}}) {
    const std::int64_t want = kPage * std::min(whole, tokens / kPage);
    const std::int64_t free = store_->memory().free;
    const auto forked = store_->Fork(Key("a"), "b", tokens);
    ASSERT_THAT(forked, IsOk());
    EXPECT_EQ(*forked, want);
    EXPECT_EQ(store_->memory().free, free);
    // Tokens behind it may be others.
    const KvData data = Diverge(one_, other_, want);
    const auto fork = OpenWithPrompt(store_, "b", model(), {});
    AppendSpan(*fork, data, {want, 250 - want});
    ExpectReads(store_, "b", model(), data, 250, want, random_);
    EXPECT_EQ(store_->Lookup("default", model().id, {PromptFrom(0, 200)}).value()[0], 192);
    ASSERT_THAT(store_->Remove(Key("b")), IsOk());
  }
  ExpectReads(store_, "a", model(), one_, 200, 0, random_);
}

TEST_P(ForkTest, WhereHeadsStandApartHasWholePages) {
  const auto writer = OpenWithPrompt(store_, "a", model(), {});
  testing::Message both(one_, writer->shard(), {}, {0, 1}, {0, 200});
  testing::Message more(one_, writer->shard(), {}, {0}, {200, 50});
  ASSERT_THAT(writer->Append(both.chunk()), IsOk());
  ASSERT_THAT(writer->Append(more.chunk()), IsOk());
  const auto forked = store_->Fork(Key("a"), "b", -1);
  ASSERT_THAT(forked, IsOk());
  EXPECT_EQ(*forked, kPage * testing::SharablePages(model(), 200));
}

// A fork of a sequence that was itself begun with others' pages goes on with its rule.
TEST_P(ForkTest, OfAForkKeepsTheOrigin) {
  const auto writer = OpenWithPrompt(store_, "a", model(), {});
  AppendSpan(*writer, one_, {0, 250});
  const std::int64_t origin = store_->Fork(Key("a"), "b", 130).value();
  const auto fork = OpenWithPrompt(store_, "b", model(), {});
  AppendSpan(*fork, one_, {origin, 210 - origin});
  ASSERT_EQ(store_->Fork(Key("b"), "c", 210).value(), 210);
  const auto last = OpenWithPrompt(store_, "c", model(), {});
  EXPECT_EQ(last->standing().residual_origin, origin);
  const KvData data = Diverge(one_, other_, 210);
  AppendSpan(*last, data, {210, 90});
  ExpectReads(store_, "c", model(), data, 300, origin, random_);
  ExpectReads(store_, "b", model(), one_, 210, origin, random_);
}

TEST_P(ForkTest, IsRefusedWithTheReason) {
  const auto writer = OpenWithPrompt(store_, "a", model(), {});
  AppendSpan(*writer, one_, {0, 100});
  EXPECT_THAT(store_->Fork(Key("x"), "b", -1), Refuses(Reason::kUnknownSequence, HasSubstr("x")));
  EXPECT_THAT(store_->Fork(Key("a"), "a", -1),
              Refuses(Reason::kSequenceExists, HasSubstr("new_sequence is \"a\"")));
  EXPECT_THAT(store_->Fork(Key("a"), "b", 101),
              Refuses(Reason::kPastCommitted, HasSubstr("tokens is 101")));
  EXPECT_EQ(entry_->totals().sequences(), 1);
}

TEST(Fork, ThatDoesNotFitTakesNothing) {
  SeededRandom random;
  const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  const auto plan = ResolveModel(testing::RequestOf(spec, "kivi2", kPage), 128).value();
  TestStore store(OnePageOfEveryLayer(*plan));  // not twice what 100 tokens take
  const auto entry = store.Register(testing::RequestOf(spec, "kivi2", kPage));
  const KvData data = kvtier::testing::MakeKvData(spec, 100, random);
  AppendSpan(*store.OpenWriter("a", entry->model()), data, {0, 100});
  const MemoryParts before = store->memory();
  EXPECT_THAT(store->Fork(Key("a"), "b", -1), Refuses(Reason::kBudget, HasSubstr("budget")));
  EXPECT_EQ(store->memory().use, before.use);
  EXPECT_EQ(store->memory().free, before.free);
  EXPECT_EQ(entry->totals().sequences(), 1);
  EXPECT_THAT(store->Describe(Key("b")), Refuses(Reason::kUnknownSequence, HasSubstr("b")));
}

// Any mix of appends, forks, sharing opens and removals: each sequence reads as its own tokens say,
// a lookup finds what is held, and in the end all memory is free.
TEST_P(ForkTest, AnyMixReadsRight) {
  struct Book {
    KvData data;
    std::vector<std::uint32_t> ids;
    std::int64_t tokens = 0;
    std::int64_t origin = 0;
    bool sealed = false;
  };
  std::map<std::string, Book> books;
  std::uint32_t next_id = 1000;
  const auto fresh_tokens = [&](Book& book, std::int64_t from) {
    book.data =
        Diverge(book.data,
                kvtier::testing::MakeKvData(
                    testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32}), kTokens, random_,
                    testing::LargestFor(
                        GetParam(), testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32}))),
                from);
    book.ids.resize(kTokens);
    for (std::size_t i = static_cast<std::size_t>(from); i < book.ids.size(); ++i)
      book.ids[i] = next_id++;
  };
  for (int step = 0; step < 120; ++step) {
    const std::string id = std::to_string(random_.Between(0, 5));
    const auto found = books.find(id);
    if (found == books.end()) {
      // Begins as another does, and parts from it somewhere.
      Book book{.data = one_, .ids = {}};
      std::int64_t parts = 0;
      if (!books.empty() && !random_.OneIn(4)) {
        const Book& base =
            std::next(books.begin(),
                      random_.Between(0, static_cast<std::int64_t>(books.size()) - 1))
                ->second;
        parts = random_.Between(0, kTokens);
        book.data = base.data;
        book.ids = base.ids;
      }
      fresh_tokens(book, parts);
      Prompt prompt;
      prompt.token_ids = book.ids;
      const auto writer = OpenWithPrompt(store_, id, model(), prompt);
      book.origin = book.tokens = writer->standing().received_tokens;
      ASSERT_LE(book.tokens, parts);
      ASSERT_EQ(book.tokens % kPage, 0);
      const std::int64_t count = random_.Between(1, 40);
      if (book.tokens + count > kTokens) continue;
      AppendSpan(*writer, book.data, {book.tokens, count});
      book.tokens += count;
      books.emplace(id, std::move(book));
      continue;
    }
    Book& book = found->second;
    const std::int64_t choice = random_.Between(0, 9);
    if (choice == 0) {
      ASSERT_THAT(store_->Remove(Key(id)), IsOk());
      books.erase(found);
    } else if (choice == 1) {
      const std::string to = std::to_string(random_.Between(0, 5));
      if (books.contains(to)) continue;
      const std::int64_t at = random_.OneIn(2) ? -1 : random_.Between(0, book.tokens);
      const std::int64_t got = store_->Fork(Key(id), to, at).value();
      Book fork{.data = book.data, .ids = book.ids, .tokens = got};
      fork.origin = got == book.tokens && (at < 0 || at == got) ? book.origin : got;
      books.emplace(to, std::move(fork));
      // Its tokens go on as the source's; that they may differ, other tests show.
    } else if (choice == 2) {
      ASSERT_THAT(store_->Seal(Key(id), book.tokens), IsOk());
      book.sealed = true;
    } else if (!book.sealed && book.tokens < kTokens) {
      const auto writer = store_.OpenWriter(id, model());
      const std::int64_t count =
          std::min(kTokens - book.tokens, random_.Between(1, random_.OneIn(3) ? 120 : 9));
      AppendSpan(*writer, book.data, {book.tokens, count});
      book.tokens += count;
    } else {
      ExpectReads(store_, id, model(), book.data, book.tokens, book.origin, random_);
    }
    if (HasFatalFailure() || HasFailure()) return;
  }
  for (const auto& [id, book] : books) {
    ExpectReads(store_, id, model(), book.data, book.tokens, book.origin, random_);
    ASSERT_THAT(store_->Remove(Key(id)), IsOk());
  }
  EXPECT_EQ(store_->memory().free, kMemory);
  EXPECT_EQ(entry_->totals().held, MemoryHeld{});
  EXPECT_EQ(entry_->totals().tokens_held, 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, ForkTest,
                         ::testing::Values("auto", "int8_per_token_head", "kivi2", "kivi(4,4,16,0)",
                                           "kivi(2,4,32,96)", "fp8_e4m3(scale=page)"),
                         [](const auto& test) { return testing::TestNameOf(test.param); });

}  // namespace
}  // namespace kvtier::cachestore
