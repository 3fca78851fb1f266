// What comes between the evictor's choice and the sequence that lets go.

#include <gtest/gtest.h>

#include <memory>

#include "cachestore/sequence.h"
#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;

constexpr int kPage = 32;
constexpr std::int64_t kBudget = 1 << 20;

// Sequences without a store, over an evictor that the test asks itself.
class EvictionRaceTest : public ::testing::Test {
 protected:
  // A page of every layer and head.
  void Write(Sequence& sequence, int page) {
    const auto claim = std::make_shared<WriterClaim>();
    claim->shard = {.num_layers = 2, .num_heads = 2};
    ASSERT_THAT(sequence.Claim(claim, NoBlocks(), clock_.Now()), IsOk());
    testing::Message message(data_, claim->shard, {}, {0, 1}, {page * kPage, kPage});
    std::int64_t needed = 0;
    ASSERT_THAT(sequence.Append(*claim, message.chunk(), clock_.Now(), needed), IsOk());
  }
  void Seal(Sequence& sequence, std::int64_t tokens) {
    clock_.Advance(absl::Seconds(1));
    ASSERT_THAT(sequence.Seal(tokens), IsOk());
  }

  kvtier::testing::SeededRandom random_;
  const ModelSpec spec_ = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  const testing::KvData data_ = kvtier::testing::MakeKvData(spec_, 2 * kPage, random_);
  const std::unique_ptr<Device> device_ = kvtier::testing::MakeDevice();
  kvtier::testing::ManualClock clock_;
  Evictor evictor_{EvictionPolicyName::kLru, false, clock_};
  Arena arena_{device_->Reserve(kBudget).value(), kBudget};
  const SequenceHome home_{arena_, *device_, evictor_};
  const Owner owner_{std::make_shared<ModelEntry>(
                         ResolveModel(testing::RequestOf(spec_, "auto", kPage), kPage).value()),
                     std::make_shared<Namespace>(EvictionPolicyName::kLru)};
};

// Of a fork all that is its own is evicted, but a pin comes first: what others have as well stays
// the fork's until that ends.
TEST_F(EvictionRaceTest, APinThatComesBeforeTheLossKeepsWhatIsLeft) {
  const auto source = std::make_shared<Sequence>(testing::Key("a"), owner_, home_, clock_.Now());
  Write(*source, 0);
  ASSERT_THAT(source->Hold(-1), IsOk());
  std::int64_t needed = 0;
  const SequenceFork made = source->Fork(testing::Key("b"), kPage, clock_.Now(), needed).value();
  const std::shared_ptr<Sequence>& fork = made.sequence;
  Write(*fork, 1);
  Seal(*fork, 2 * kPage);
  source->Unhold(kPage);
  Seal(*source, kPage);

  const Evictor::Victim only_fork = {fork};
  ASSERT_EQ(evictor_.Evict(), only_fork) << "its end";
  EXPECT_FALSE(fork->LoseEvicted().gone);
  ASSERT_EQ(evictor_.Evict(), only_fork) << "its page";
  ASSERT_EQ(fork->AddPin(PinKind::kHard, -1).value(), kPage);
  const Sequence::Loss loss = fork->LoseEvicted();
  EXPECT_EQ(loss.tokens, kPage);
  EXPECT_FALSE(loss.gone);
  EXPECT_EQ(fork->Describe(false).state, SequenceState::kSealed);

  fork->RemovePin(PinKind::kHard, kPage);
  ASSERT_EQ(evictor_.Evict(), only_fork);
  EXPECT_TRUE(fork->LoseEvicted().gone);
}

}  // namespace
}  // namespace kvtier::cachestore
