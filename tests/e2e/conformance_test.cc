// What a store promises to its users, asked of the store itself and of a server by its client: the
// same answers, the same reasons, the same bytes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "tests/cachestore/model_shapes.h"
#include "tests/e2e/subject.h"
#include "tests/support/status_matchers.h"

namespace kvtier::conformance {
namespace {

using testing::IsOk;

constexpr int kPage = 64;
constexpr std::int64_t kTokens = 320;
constexpr std::int64_t kBlock = 16;

cachestore::ModelSpec Spec() {
  return cachestore::testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
}

cachestore::ModelRequest Request(const std::string& format, int page_tokens = kPage) {
  return cachestore::testing::RequestOf(Spec(), format, page_tokens);
}

// The last layer keeps what a window sees.
cachestore::ModelRequest Windowed(const std::string& format) {
  cachestore::ModelRequest request = Request(format);
  request.spec.layers.back().kind = cachestore::LayerKind::kSlidingWindow;
  request.spec.layers.back().window = 100;
  request.policy.retention = cachestore::Retention::kWindow;
  return request;
}

Prompt PromptOf(std::uint32_t first, std::int64_t tokens) {
  Prompt prompt;
  prompt.token_ids.resize(static_cast<std::size_t>(tokens));
  std::iota(prompt.token_ids.begin(), prompt.token_ids.end(), first);
  return prompt;
}

struct Case {
  const char* name;
  std::unique_ptr<Subject> (*make)();
  const char* format;
};

class Conformance : public ::testing::TestWithParam<Case> {
 protected:
  Conformance()
      : subject_(GetParam().make()),
        model_(subject_->Register(Request(GetParam().format)).value()),
        data_(testing::MakeKvData(Spec(), kTokens, random_, 100.0f)),
        free_(subject_->free_bytes()) {}

  absl::StatusOr<Standing> Append(const std::string& sequence, std::int64_t first,
                                  std::int64_t count, const Prompt& prompt = {},
                                  std::uint64_t epoch = 0) {
    return subject_->Append({sequence, model_, &data_, first, count, epoch, prompt});
  }
  std::string ReasonOf(const absl::Status& status) const { return subject_->ReasonOf(status); }
  template <class T>
  std::string ReasonOf(const absl::StatusOr<T>& result) const {
    return subject_->ReasonOf(result.status());
  }
  Rows Read(const std::string& sequence, std::int64_t first = 0, std::int64_t tokens = 0) {
    return subject_->Read({sequence, 0, first, tokens}).value();
  }

  testing::SeededRandom random_;
  std::unique_ptr<Subject> subject_;
  std::string model_;
  KvData data_;
  std::int64_t free_;
};

TEST_P(Conformance, WhatWasAppendedIsRead) {
  const auto standing = Append("a", 0, 200);
  ASSERT_THAT(standing, IsOk());
  EXPECT_EQ(standing->committed, 200);
  const auto more = Append("a", 200, 120);
  ASSERT_THAT(more, IsOk());
  EXPECT_EQ(more->begun, 200);
  const Rows rows = Read("a");
  EXPECT_EQ(rows.size(), 2u * 2 * kTokens * 2 * 32);
  // The same however it was cut.
  ASSERT_THAT(Append("b", 0, kTokens), IsOk());
  EXPECT_EQ(Read("b"), rows);
  const Rows part = Read("a", 17, 100);
  const std::size_t row = 2 * 32;
  EXPECT_TRUE(std::equal(part.begin(), part.begin() + 100 * row, rows.begin() + 17 * row));
  EXPECT_EQ(ReasonOf(subject_->Read({"a", 0, 300, 21})), "PAST_COMMITTED");
  ASSERT_THAT(subject_->Remove("a"), IsOk());
  ASSERT_THAT(subject_->Remove("b"), IsOk());
  EXPECT_EQ(subject_->free_bytes(), free_);
}

TEST_P(Conformance, AGapIsRefusedAndWhatCameBeforeIsSkipped) {
  ASSERT_THAT(Append("a", 0, 50), IsOk());
  EXPECT_EQ(ReasonOf(Append("a", 51, 5)), "TOKEN_GAP");
  const auto again = Append("a", 40, 20);
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->received, 60);
  EXPECT_EQ(ReasonOf(Append("a", 0, 1, {}, 0)), "") << "skipped";
}

TEST_P(Conformance, SequencesEndOnceAndForAll) {
  EXPECT_EQ(ReasonOf(subject_->Seal("a", 5)), "UNKNOWN_SEQUENCE");
  ASSERT_THAT(Append("a", 0, 50), IsOk());
  EXPECT_EQ(ReasonOf(subject_->Seal("a", 49)), "INCOMPLETE");
  ASSERT_THAT(subject_->Seal("a", 50), IsOk());
  EXPECT_THAT(subject_->Seal("a", 50), IsOk());
  EXPECT_EQ(ReasonOf(Append("a", 50, 5)), "SEALED");
  EXPECT_EQ(ReasonOf(subject_->Abort("a")), "NOT_OPEN");
  EXPECT_EQ(ReasonOf(subject_->Truncate("a", 10, 1)), "SEALED");
  ASSERT_THAT(subject_->Remove("a"), IsOk());
  EXPECT_EQ(ReasonOf(subject_->Read({"a"})), "UNKNOWN_SEQUENCE");
  EXPECT_EQ(ReasonOf(subject_->Remove("a")), "UNKNOWN_SEQUENCE");
  ASSERT_THAT(Append("a", 0, 50), IsOk());
  ASSERT_THAT(subject_->Abort("a"), IsOk());
  EXPECT_EQ(subject_->free_bytes(), free_);
}

TEST_P(Conformance, EpochsTakeOver) {
  ASSERT_THAT(Append("a", 0, 50, {}, 3), IsOk());
  EXPECT_EQ(ReasonOf(Append("a", 50, 5, {}, 2)), "OLD_EPOCH");
  ASSERT_THAT(Append("a", 50, 5, {}, 4), IsOk());
  EXPECT_EQ(ReasonOf(subject_->Truncate("a", 10, 3)), "OLD_EPOCH");
  ASSERT_THAT(subject_->Truncate("a", 32, 5), IsOk());
  EXPECT_EQ(subject_->Committed("a").value(), 32);
}

TEST_P(Conformance, APromptIsFoundSharedAndLeased) {
  const Prompt prompt = PromptOf(0, kTokens);
  EXPECT_EQ(subject_->Lookup(model_, prompt).value(), 0);
  EXPECT_EQ(subject_->Acquire(model_, prompt).value().tokens, 0);
  ASSERT_THAT(Append("a", 0, kTokens, prompt), IsOk());
  const std::int64_t hit = kTokens / kBlock * kBlock;
  EXPECT_EQ(subject_->Lookup(model_, prompt).value(), hit);
  EXPECT_EQ(subject_->Lookup(model_, PromptOf(0, 40)).value(), 32);
  EXPECT_EQ(subject_->Lookup(model_, PromptOf(1, 40)).value(), 0);
  const std::int64_t free = subject_->free_bytes();
  const Standing standing = Append("b", 0, 0, prompt).value();
  EXPECT_EQ(standing.begun % kPage, 0);
  EXPECT_GE(standing.begun, kPage);
  ASSERT_THAT(Append("b", standing.begun, kTokens - standing.begun, prompt), IsOk());
  EXPECT_LT(free - subject_->free_bytes(), free_ - free);
  EXPECT_EQ(ReasonOf(Append("b", kTokens, 0, PromptOf(7, 100))), "PROMPT_MISMATCH");

  const Rows rows = Read("a", 0, 32);
  const Grant grant = subject_->Acquire(model_, PromptOf(0, 40)).value();
  EXPECT_EQ(grant.tokens, 32);
  ASSERT_THAT(subject_->Remove("a"), IsOk());
  ASSERT_THAT(subject_->Remove("b"), IsOk());
  EXPECT_EQ(subject_->Read({"", grant.id, 0, 0}).value(), rows);
  EXPECT_EQ(ReasonOf(subject_->Read({"", grant.id, 0, 33})), "PAST_COMMITTED");
  EXPECT_THAT(subject_->Renew(grant.id), IsOk());
  subject_->Release(grant.id);
  EXPECT_EQ(ReasonOf(subject_->Renew(grant.id)), "LEASE_ENDED");
  EXPECT_EQ(ReasonOf(subject_->Read({"", grant.id, 0, 0})), "LEASE_ENDED");
  EXPECT_EQ(subject_->free_bytes(), free_);
}

TEST_P(Conformance, ForksGoTheirOwnWay) {
  ASSERT_THAT(Append("a", 0, 150), IsOk());
  EXPECT_EQ(subject_->Fork("a", "exact", -1).value(), 150);
  EXPECT_EQ(subject_->Fork("a", "exact", -1).ok(), false);
  EXPECT_EQ(ReasonOf(subject_->Fork("a", "exact", -1)), "SEQUENCE_EXISTS");
  EXPECT_EQ(ReasonOf(subject_->Fork("a", "b", 151)), "PAST_COMMITTED");
  EXPECT_EQ(subject_->Fork("a", "rounded", 100).value() % kPage, 0);
  const Rows before = Read("a");
  EXPECT_EQ(Read("exact"), before);
  ASSERT_THAT(Append("exact", 150, 50), IsOk());
  ASSERT_THAT(Append("a", 150, 20), IsOk());
  EXPECT_EQ(Read("exact", 0, 128), Read("a", 0, 128)) << "where both have codes";
}

TEST_P(Conformance, ALeaseOutlivesItsSequence) {
  ASSERT_THAT(Append("a", 0, 100), IsOk());
  const Rows rows = Read("a", 0, 64);  // codes already, where there will be any
  const Grant grant = subject_->Acquire("a").value();
  EXPECT_EQ(grant.tokens, 100);
  ASSERT_THAT(Append("a", 100, 50), IsOk());
  ASSERT_THAT(subject_->Truncate("a", 64, 1), IsOk());
  ASSERT_THAT(subject_->Remove("a"), IsOk());
  EXPECT_EQ(subject_->Read({"", grant.id, 0, 64}).value(), rows);
  EXPECT_EQ(subject_->Read({"", grant.id, 0, 0}).value().size(), rows.size() / 64 * 100);
  subject_->Release(grant.id);
  EXPECT_EQ(subject_->free_bytes(), free_);
}

TEST_P(Conformance, AFullNamespaceEvictsItsColdestAndNotWhatIsInUse) {
  ASSERT_THAT(Append("a", 0, kTokens), IsOk());
  const std::int64_t each = free_ - subject_->free_bytes();
  ASSERT_THAT(subject_->SetQuota(2 * each + each / 2), IsOk());
  ASSERT_THAT(subject_->Seal("a", kTokens), IsOk());
  ASSERT_THAT(Append("b", 0, kTokens), IsOk());
  ASSERT_THAT(subject_->Seal("b", kTokens), IsOk());
  const Grant kept = subject_->Acquire("a").value();
  ASSERT_THAT(Append("c", 0, kTokens), IsOk());
  EXPECT_EQ(subject_->Committed("a").value(), kTokens);
  EXPECT_LT(subject_->Committed("b").value_or(0), kTokens);
  EXPECT_EQ(ReasonOf(Append("d", 0, kTokens)), "QUOTA") << "a is leased, c is open";
  subject_->Release(kept.id);
  EXPECT_THAT(Append("d", 0, kTokens), IsOk());
}

TEST_P(Conformance, PinsKeep) {
  ASSERT_THAT(Append("a", 0, kTokens), IsOk());
  ASSERT_THAT(subject_->Seal("a", kTokens), IsOk());
  EXPECT_EQ(subject_->Pin("a").value().tokens, kTokens);
  EXPECT_GT(subject_->SetQuota(1000).value(), 1000) << "nothing may go";
  EXPECT_EQ(subject_->Committed("a").value(), kTokens);
}

TEST_P(Conformance, WhatCannotBeNamesItself) {
  EXPECT_EQ(ReasonOf(subject_->Register(Request("three_bits"))), "UNKNOWN_FORMAT");
  EXPECT_EQ(ReasonOf(subject_->Register(Request("auto", 17))), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(subject_->Lookup("no model", PromptOf(0, 32))), "UNKNOWN_MODEL");
  const std::string other = subject_->Register(Request("int8_per_token_head")).value();
  ASSERT_THAT(Append("a", 0, 10), IsOk());
  EXPECT_EQ(ReasonOf(subject_->Append({"a", other, &data_, 10, 1})), "MODEL_MISMATCH");
}

constexpr Case kCases[] = {{"InProcess_auto", StoreInProcess, "auto"},
                           {"InProcess_kivi2", StoreInProcess, "kivi(2,2,32,32)"},
                           {"Server_auto", StoreBehindServer, "auto"},
                           {"Server_kivi2", StoreBehindServer, "kivi(2,2,32,32)"},
                           {"Shm_auto", StoreBySharedMemory, "auto"},
                           {"Shm_kivi2", StoreBySharedMemory, "kivi(2,2,32,32)"}};
INSTANTIATE_TEST_SUITE_P(Of, Conformance, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

// A step of random work and what came of it, as text: of both the same.
class SideBySide {
 public:
  SideBySide(Subject& subject, std::string model, const KvData& data)
      : subject_(subject), model_(std::move(model)), data_(data) {}

  std::string Step(testing::Random& random) {
    const std::string name = "s" + std::to_string(random.Between(0, 5));
    const std::int64_t a = random.Between(0, kTokens), b = random.Between(0, kTokens);
    const std::int64_t first = std::min(a, b), count = std::max(a, b) - first;
    const auto kind = random.Between(0, 9);
    const std::uint64_t epoch = ++epoch_;
    const Prompt prompt = PromptOf(static_cast<std::uint32_t>(random.Between(0, 1)) * 5000, a);
    switch (kind) {
      case 0:
        return Said(subject_.Seal(name, a));
      case 1:
        return Said(subject_.Remove(name));
      case 2:
        return Said(subject_.Truncate(name, first, epoch));
      case 3:
        return Number(subject_.Fork(name, "s" + std::to_string(a % 6), first));
      case 4:
        return Number(subject_.Lookup(model_, prompt));
      case 5: {
        const auto rows = subject_.Read({name, 0, first, count, epoch % 2 == 0});
        if (!rows.ok()) return Said(rows.status());
        std::size_t sum = 0;
        for (const float value : *rows) sum = sum * 31 + std::hash<float>()(value);
        return std::to_string(rows->size()) + " rows " + std::to_string(sum);
      }
      default: {
        const std::int64_t held = subject_.Committed(name).value_or(0);
        const auto standing = subject_.Append({name, model_, &data_, std::min(held, first),
                                               std::min(kTokens - std::min(held, first), b), epoch,
                                               kind == 6 ? prompt : Prompt()});
        if (!standing.ok()) return Said(standing.status());
        return std::to_string(standing->begun) + " " + std::to_string(standing->received) + " " +
               std::to_string(standing->committed);
      }
    }
  }

 private:
  std::string Said(const absl::Status& status) const {
    return status.ok() ? "ok" : subject_.ReasonOf(status) + ": " + std::string(status.message());
  }
  std::string Number(const absl::StatusOr<std::int64_t>& number) const {
    return number.ok() ? std::to_string(*number) : Said(number.status());
  }

  Subject& subject_;
  const std::string model_;
  const KvData& data_;
  std::uint64_t epoch_ = 0;
};

struct Other {
  const char* name;
  std::unique_ptr<Subject> (*make)();
};
class ConformanceSideBySide : public ::testing::TestWithParam<Other> {};

TEST_P(ConformanceSideBySide, AnswersAsTheStoreInProcess) {
  testing::SeededRandom seeds;
  const KvData data = testing::MakeKvData(Spec(), kTokens, seeds, 100.0f);
  const auto one = StoreInProcess(), other = GetParam().make();
  for (const auto& request : {Request("auto"), Request("kivi(2,2,32,32)"), Windowed("auto"),
                              Windowed("kivi(2,2,32,32)")}) {
    const std::string model = one->Register(request).value();
    ASSERT_EQ(other->Register(request).value(), model);
    const auto seed = static_cast<std::uint64_t>(seeds.Between(0, 1 << 30));
    testing::Random random(seed), same(seed);
    SideBySide here(*one, model, data), there(*other, model, data);
    for (int step = 0; step < 400; ++step)
      ASSERT_EQ(here.Step(random), there.Step(same)) << model << ", step " << step;
    for (int i = 0; i < 6; ++i) {
      const std::string name = "s" + std::to_string(i);
      EXPECT_EQ(one->Remove(name).ok(), other->Remove(name).ok());
    }
    EXPECT_EQ(one->free_bytes(), other->free_bytes());
  }
}
INSTANTIATE_TEST_SUITE_P(Of, ConformanceSideBySide,
                         ::testing::Values(Other{"Server", StoreBehindServer},
                                           Other{"Shm", StoreBySharedMemory}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace kvtier::conformance
