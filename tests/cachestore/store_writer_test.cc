// What a stream may and may not do: positions, epochs, sealing, dropping, and values that are
// refused.

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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
using testing::KvData;
using testing::Message;
using testing::TestStore;
using testing::TokenSpan;

constexpr std::int64_t kMemory = 1 << 20;

class StoreWriter : public ::testing::Test {
 protected:
  static StoreOptions Options() {
    return {.memory = kMemory, .max_sequences = 5, .open_sequence_deadline = absl::Minutes(5)};
  }

  const Model& Register(const std::string& format, ElementType source = ElementType::kBf16) {
    const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 4, .dim = 32}, source);
    data_ = kvtier::testing::MakeKvData(spec, 300, random_, 100.0f);
    return store_.Register(testing::RequestOf(spec, format, 64))->model();
  }

  // A writer whose end is noted in ends_.
  absl::StatusOr<std::unique_ptr<Writer>> Open(const Model& model, std::uint64_t epoch,
                                               Shard shard = {}) {
    WriterRequest request;
    request.key = kKey;
    request.model_id = model.id;
    request.shard = shard;
    request.epoch = epoch;
    request.on_end = [this, epoch](const absl::Status& why) { ends_.emplace_back(epoch, why); };
    return store_->OpenWriter(std::move(request));
  }

  absl::StatusOr<AppendResult> Append(Writer& writer, TokenSpan span,
                                      const std::vector<int>& layers = {0, 1}) {
    Message message(data_, writer.shard(), {}, layers, span);
    return writer.Append(message.chunk());
  }

  const SequenceKey kKey{"default", "s"};
  SeededRandom random_;
  TestStore store_{Options()};
  KvData data_;
  std::vector<std::pair<std::uint64_t, absl::Status>> ends_;
};

// ---- positions ----

TEST_F(StoreWriter, AGapIsOutOfRangeWithTheExpectedToken) {
  const Model& model = Register("kivi2");
  const auto writer = store_.OpenWriter("s", model);
  EXPECT_THAT(Append(*writer, {1, 10}),
              Refuses(Reason::kTokenGap, AllOf(HasSubstr("chunk.first_token is 1"),
                                               HasSubstr("layer 0 head 0 expects token 0"))));
  ASSERT_THAT(Append(*writer, {0, 10}), IsOk());
  ASSERT_THAT(Append(*writer, {10, 5}, {1}), IsOk());
  EXPECT_THAT(Append(*writer, {15, 1}),
              Refuses(Reason::kTokenGap, HasSubstr("layer 0 head 0 expects token 10")));
  EXPECT_THAT(Append(*writer, {16, 1}, {1}),
              Refuses(Reason::kTokenGap, HasSubstr("layer 1 head 0 expects token 15")));
  EXPECT_EQ(store_->Describe(kKey)->layers[0].received_tokens, 10);
  EXPECT_EQ(store_->Describe(kKey)->layers[1].received_tokens, 15);
}

TEST_F(StoreWriter, WhatIsResentIsSkippedAndCounted) {
  const Model& model = Register("kivi2");
  const auto writer = store_.OpenWriter("s", model);
  ASSERT_THAT(Append(*writer, {0, 100}), IsOk());
  const auto bytes = testing::StoredBytesOf(store_.device, store_.Read("s").pins());
  const AppendResult all = Append(*writer, {20, 80}).value();
  EXPECT_EQ(all.skipped_tokens, 80);
  EXPECT_EQ(all.received_tokens, 100);
  EXPECT_EQ(
      testing::DifferenceOf(testing::StoredBytesOf(store_.device, store_.Read("s").pins()), bytes),
      "");
  EXPECT_EQ(Append(*writer, {90, 30})->skipped_tokens, 10);
  // What one layer has and the other hasn't is no resend of the message.
  ASSERT_THAT(Append(*writer, {120, 30}, {1}), IsOk());
  const AppendResult half = Append(*writer, {110, 40}).value();
  EXPECT_EQ(half.skipped_tokens, 10);
  EXPECT_EQ(half.received_tokens, 150);
  EXPECT_EQ(half.committed_tokens, 150);
}

TEST_F(StoreWriter, AcksTellOfTheShardAndOfTheSequence) {
  const Model& model = Register("fp8");
  const auto first = store_.OpenWriter("s", model, {.num_layers = 2, .num_heads = 1});
  const auto rest =
      store_.OpenWriter("s", model, {.num_layers = 2, .first_head = 1, .num_heads = 3});
  AppendResult ack = Append(*first, {0, 50}).value();
  EXPECT_EQ(ack.received_tokens, 50);
  EXPECT_EQ(ack.committed_tokens, 0);
  ack = Append(*rest, {0, 30}).value();
  EXPECT_EQ(ack.received_tokens, 30);
  EXPECT_EQ(ack.committed_tokens, 30);
  EXPECT_EQ(store_.OpenWriter("s", model, {.num_heads = 1}, 1)->standing().received_tokens, 50);
}

// ---- epochs ----

TEST_F(StoreWriter, AHigherEpochTakesOverAtTheReceivedPosition) {
  const Model& model = Register("kivi2");
  const auto old = Open(model, 3).value();
  ASSERT_THAT(Append(*old, {0, 40}), IsOk());
  const auto taken = Open(model, 4);
  ASSERT_THAT(taken, IsOk());
  EXPECT_EQ((*taken)->standing().received_tokens, 40);
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_EQ(ends_[0].first, 3u);
  EXPECT_THAT(ends_[0].second,
              Refuses(Reason::kOldEpoch, HasSubstr("epoch 4 took over from epoch 3")));
  EXPECT_THAT(Append(*old, {40, 1}), Refuses(Reason::kOldEpoch, HasSubstr("epoch 4")));
  EXPECT_THAT(Append(**taken, {40, 1}), IsOk());
  EXPECT_EQ(ends_.size(), 1u);
}

TEST_F(StoreWriter, AnEqualEpochIsRefusedWhileTheFirstLives) {
  const Model& model = Register("kivi2");
  auto first = Open(model, 3).value();
  ASSERT_THAT(Append(*first, {0, 40}), IsOk());
  EXPECT_THAT(Open(model, 3), Refuses(Reason::kWriterExists, HasSubstr("writer_epoch is 3")));
  EXPECT_THAT(Append(*first, {40, 1}), IsOk());
  first.reset();
  const auto again = Open(model, 3);
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ((*again)->standing().received_tokens, 41);
  EXPECT_TRUE(ends_.empty()) << "a writer that leaves by itself isn't told that it ended";
}

TEST_F(StoreWriter, ALowerEpochIsAbortedAlsoAfterTheHigherOneLeft) {
  const Model& model = Register("kivi2");
  auto high = Open(model, 5).value();
  ASSERT_THAT(Append(*high, {0, 1}), IsOk());
  EXPECT_THAT(Open(model, 4), Refuses(Reason::kOldEpoch, HasSubstr("has had a writer of epoch 5")));
  high.reset();
  EXPECT_THAT(Open(model, 4), Refuses(Reason::kOldEpoch, HasSubstr("writer_epoch is 4")));
  EXPECT_THAT(Open(model, 5), IsOk());
}

TEST_F(StoreWriter, EpochsAreComparedWhereShardsOverlapOnly) {
  const Model& model = Register("kivi2");
  const Shard low{.num_layers = 1, .num_heads = 2}, high{.num_layers = 1, .first_head = 2};
  const Shard other_layer{.first_layer = 1, .num_heads = 2};
  const auto a = Open(model, 7, low).value();
  const auto b = Open(model, 1, high);
  const auto c = Open(model, 0, other_layer);
  ASSERT_THAT(b, IsOk());
  ASSERT_THAT(c, IsOk());
  EXPECT_TRUE(ends_.empty());
  // One head in common is enough, for the whole stream.
  EXPECT_THAT(Open(model, 7, {.num_layers = 1, .first_head = 1, .num_heads = 2}),
              Refuses(Reason::kWriterExists, ::testing::_));
  EXPECT_THAT(Open(model, 8, {.num_layers = 1, .first_head = 1, .num_heads = 2}), IsOk());
  ASSERT_EQ(ends_.size(), 2u);
  EXPECT_THAT(Append(**b, {0, 1}, {0}), Refuses(Reason::kOldEpoch, ::testing::_));
  EXPECT_THAT(Append(**c, {0, 1}, {1}), IsOk());
}

// ---- seal, abort, remove ----

TEST_F(StoreWriter, SealNamesWhoHasAnotherCount) {
  const Model& model = Register("kivi2");
  const auto writer = store_.OpenWriter("s", model, {.num_heads = 3});
  const auto last = store_.OpenWriter("s", model, {.first_head = 3});
  ASSERT_THAT(Append(*writer, {0, 20}), IsOk());
  ASSERT_THAT(Append(*last, {0, 20}), IsOk());
  EXPECT_THAT(store_->Seal(kKey, 21),
              Refuses(Reason::kIncomplete, HasSubstr("tokens is 21; layer 0 head 0 of sequence "
                                                     "\"s\" has received 20")));
  ASSERT_THAT(Append(*last, {20, 1}, {1}), IsOk());
  EXPECT_THAT(store_->Seal(kKey, 20),
              Refuses(Reason::kIncomplete, HasSubstr("layer 1 head 3 of sequence \"s\" has "
                                                     "received 21")));
  EXPECT_EQ(store_->Describe(kKey)->state, SequenceState::kOpen);
}

TEST_F(StoreWriter, ASealedSequenceTakesNoMoreAndKeepsItsBytes) {
  const Model& model = Register("kivi2");
  const auto writer = Open(model, 0).value();
  ASSERT_THAT(Append(*writer, {0, 150}), IsOk());
  const auto bytes = testing::StoredBytesOf(store_.device, store_.Read("s").pins());
  const MemoryHeld held = store_->Describe(kKey)->held;
  ASSERT_THAT(store_->Seal(kKey, 150), IsOk());
  EXPECT_THAT(store_->Seal(kKey, 150), IsOk());
  EXPECT_THAT(store_->Seal(kKey, 149), Refuses(Reason::kIncomplete, HasSubstr("tokens is 149")));
  EXPECT_EQ(store_->Describe(kKey)->state, SequenceState::kSealed);
  EXPECT_EQ(store_->Describe(kKey)->held, held);
  EXPECT_EQ(
      testing::DifferenceOf(testing::StoredBytesOf(store_.device, store_.Read("s").pins()), bytes),
      "");
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_THAT(ends_[0].second, IsOk()) << "a sealed stream is over, and well";
  EXPECT_THAT(Append(*writer, {150, 1}),
              Refuses(Reason::kSealed, HasSubstr("\"s\" is sealed at 150 tokens")));
  EXPECT_THAT(Open(model, 9), Refuses(Reason::kSealed, HasSubstr("sealed at 150 tokens")));
  EXPECT_EQ(store_->FindModel(model.id).value()->totals().sealed_sequences, 1);
}

// At T = R all of K is codes: the slot that held its residual goes when nothing can follow.
TEST_F(StoreWriter, SealGivesAnEmptyResidualSlotBack) {
  const Model& model = Register("kivi2");
  store_.AppendAtOnce("s", model, data_, 128);
  const std::int64_t free = store_->memory().free;
  ASSERT_THAT(store_->Seal(kKey, 128), IsOk());
  EXPECT_EQ(store_->memory().free, free + 2 * model.layers[0].k.residual_slot_bytes());
  EXPECT_THAT(store_->Seal(kKey, 128), IsOk());
  EXPECT_EQ(store_->Describe(kKey)->held, PlanSealed(model, 128));
}

TEST_F(StoreWriter, AbortDropsOpenSequencesOnly) {
  const Model& model = Register("kivi2");
  const auto writer = Open(model, 2).value();
  ASSERT_THAT(Append(*writer, {0, 10}), IsOk());
  ASSERT_THAT(store_->Abort(kKey), IsOk());
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_THAT(ends_[0].second, Refuses(Reason::kSequenceGone, HasSubstr("\"s\" was aborted")));
  EXPECT_THAT(Append(*writer, {10, 1}), Refuses(Reason::kSequenceGone, HasSubstr("aborted")));
  for (const absl::Status& status : {store_->Abort(kKey), store_->Remove(kKey),
                                     store_->Seal(kKey, 10), store_->Describe(kKey).status()}) {
    EXPECT_THAT(status, Refuses(Reason::kUnknownSequence,
                                HasSubstr("\"s\" is not held in namespace \"default\"")));
  }
  EXPECT_EQ(store_->memory().free, kMemory);

  // The name is free at once, also for lower epochs.
  const auto again = Open(model, 0).value();
  EXPECT_EQ(again->standing().received_tokens, 0);
  ASSERT_THAT(Append(*again, {0, 10}), IsOk());
  ASSERT_THAT(store_->Seal(kKey, 10), IsOk());
  EXPECT_THAT(store_->Abort(kKey), Refuses(Reason::kNotOpen, HasSubstr("\"s\" is sealed")));
  EXPECT_THAT(store_->Remove(kKey), IsOk());
  EXPECT_EQ(store_->memory().free, kMemory);
}

TEST_F(StoreWriter, RemoveEndsTheWriters) {
  const Model& model = Register("fp8");
  const auto writer = Open(model, 2).value();
  ASSERT_THAT(Append(*writer, {0, 10}), IsOk());
  ASSERT_THAT(store_->Remove(kKey), IsOk());
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_THAT(ends_[0].second, Refuses(Reason::kSequenceGone, HasSubstr("was removed")));
  EXPECT_THAT(Append(*writer, {10, 1}), Refuses(Reason::kSequenceGone, HasSubstr("removed")));
}

// The last writer of the old sequence must not take the new one of the same name with it.
TEST_F(StoreWriter, AWriterOfADroppedSequenceLeavesTheNextOneAlone) {
  const Model& model = Register("fp8");
  auto old = Open(model, 0).value();
  ASSERT_THAT(store_->Abort(kKey), IsOk());
  const auto next = Open(model, 0).value();
  old.reset();
  EXPECT_THAT(Append(*next, {0, 10}), IsOk());
  EXPECT_THAT(store_->Describe(kKey), IsOk());
}

TEST_F(StoreWriter, ASequenceThatReceivedNothingGoesWithItsLastWriter) {
  const Model& model = Register("fp8");
  auto first = store_.OpenWriter("s", model, {.num_heads = 1});
  auto second = store_.OpenWriter("s", model, {.first_head = 1});
  first.reset();
  EXPECT_THAT(store_->Describe(kKey), IsOk());
  second.reset();
  EXPECT_THAT(store_->Describe(kKey), Refuses(Reason::kUnknownSequence, ::testing::_));
  EXPECT_EQ(store_->FindModel(model.id).value()->totals().sequences(), 0);

  first = store_.OpenWriter("s", model);
  ASSERT_THAT(Append(*first, {0, 1}), IsOk());
  first.reset();
  EXPECT_EQ(store_->Describe(kKey)->committed_tokens, 1);
}

TEST_F(StoreWriter, AbandonedSequencesAreReclaimedAtTheDeadline) {
  const Model& model = Register("kivi2");
  const auto writer = Open(model, 0).value();
  ASSERT_THAT(Append(*writer, {0, 10}), IsOk());
  store_.AppendAtOnce("sealed", model, data_, 10);
  ASSERT_THAT(store_->Seal({"default", "sealed"}, 10), IsOk());
  store_.clock.Advance(absl::Minutes(5) - absl::Seconds(1));
  EXPECT_EQ(store_->ReclaimAbandoned(), 0);
  ASSERT_THAT(Append(*writer, {10, 1}), IsOk());  // a message counts
  store_.clock.Advance(absl::Minutes(5) - absl::Seconds(1));
  EXPECT_EQ(store_->ReclaimAbandoned(), 0);
  EXPECT_THAT(Append(*writer, {20, 1}), Refuses(Reason::kTokenGap, ::testing::_));
  store_.clock.Advance(absl::Seconds(1));
  EXPECT_EQ(store_->ReclaimAbandoned(), 1);
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_THAT(ends_[0].second,
              Refuses(Reason::kSequenceGone, HasSubstr("\"s\" had no message for 5m")));
  EXPECT_THAT(store_->Describe(kKey), Refuses(Reason::kUnknownSequence, ::testing::_));
  store_.clock.Advance(absl::Hours(100));
  EXPECT_EQ(store_->ReclaimAbandoned(), 0);
  EXPECT_THAT(store_->Describe({"default", "sealed"}), IsOk());
}

// ---- values ----

class StoreWriterValues : public StoreWriter {
 protected:
  // Appends 100 good tokens, then a message whose value at (layer 1, head 2, token 107, channel 5)
  // is `value`, and checks that a refusal takes nothing of it.
  absl::StatusOr<AppendResult> AppendWith(const Model& model, Side side, float value,
                                          bool saturate = false) {
    auto& layer = data_.layers[1];
    (side == Side::kK ? layer.k : layer.v).Set(2, 107, 5, value);
    store_.AppendAtOnce("s", model, data_, 100);
    const auto bytes = testing::StoredBytesOf(store_.device, store_.Read("s").pins());
    const MemoryParts before = store_->memory();
    const auto writer = store_.OpenWriter("s", model);
    Message message(data_, writer->shard(), {}, {0, 1}, {100, 50});
    message.chunk().saturate_non_finite = saturate;
    auto ack = writer->Append(message.chunk());
    if (!ack.ok()) {
      EXPECT_EQ(store_->Describe(kKey)->committed_tokens, 100);
      EXPECT_EQ(store_->memory().use, before.use);
      EXPECT_EQ(store_->memory().free, before.free);
      EXPECT_EQ(testing::DifferenceOf(
                    testing::StoredBytesOf(store_.device, store_.Read("s").pins()), bytes),
                "");
    }
    EXPECT_THAT(store_->Remove(kKey), IsOk());
    return ack;
  }
};

TEST_F(StoreWriterValues, NonFiniteValuesAreRefusedWithTheirPlace) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const char* format : {"auto", "float16", "fp8", "fp8_e5m2", "int8_per_token_head",
                             "fp8_per_token_head", "kivi2"}) {
    for (const ElementType source : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      const Model& model = Register(format, source);
      EXPECT_THAT(AppendWith(model, Side::kK, kNan),
                  Refuses(Reason::kNonFiniteValue,
                          HasSubstr("k of layer 1, head 2, token 107, channel 5 is nan")));
      EXPECT_THAT(AppendWith(Register(format, source), Side::kV, -kInf),
                  Refuses(Reason::kNonFiniteValue,
                          HasSubstr("v of layer 1, head 2, token 107, channel 5 is -inf")));
    }
  }
}

TEST_F(StoreWriterValues, KiviRefusesMagnitudesPast32752) {
  for (const char* format : {"kivi2", "kivi4", "k4v2", "kivi(8,8,16,0)"}) {
    for (const Side side : {Side::kK, Side::kV}) {
      const Model& model = Register(format, ElementType::kFp32);
      EXPECT_THAT(AppendWith(model, side, -32752.0f), IsOk());
      EXPECT_THAT(AppendWith(Register(format, ElementType::kFp32), side, 32752.002f),
                  Refuses(Reason::kValueOutOfRange,
                          AllOf(HasSubstr("layer 1, head 2, token 107, channel 5 is 32752.002"),
                                HasSubstr("takes magnitudes up to 32752"))));
    }
  }
  EXPECT_THAT(AppendWith(Register("fp8", ElementType::kFp32), Side::kK, 1e30f), IsOk());
}

TEST_F(StoreWriterValues, Fp8MaySaturateNonFiniteValuesAndCountsThem) {
  for (const char* format : {"fp8", "fp8_e5m2"}) {
    for (const float value :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
      const auto ack = AppendWith(Register(format), Side::kV, value, true);
      ASSERT_THAT(ack, IsOk());
      EXPECT_EQ(ack->saturated_values, 1);
    }
    const auto ack =
        AppendWith(Register(format), Side::kV, std::numeric_limits<float>::quiet_NaN(), true);
    EXPECT_THAT(ack, IsOk());
  }
  // Formats without a code for it refuse it all the same.
  EXPECT_THAT(AppendWith(Register("kivi2"), Side::kV, std::numeric_limits<float>::infinity(), true),
              Refuses(Reason::kNonFiniteValue, ::testing::_));
  EXPECT_THAT(AppendWith(Register("int8_per_token_head"), Side::kK,
                         std::numeric_limits<float>::quiet_NaN(), true),
              Refuses(Reason::kNonFiniteValue, ::testing::_));
}

TEST_F(StoreWriter, SaturatedValuesAreCountedByLayerAndSide) {
  const Model& model = Register("fp8");
  data_.layers[0].k.Set(1, 3, 0, 1000.0f);
  data_.layers[1].v.Set(3, 99, 31, -1000.0f);
  data_.layers[1].v.Set(0, 64, 2, 500.0f);
  data_.layers[1].v.Set(0, 65, 2, 448.0f);
  const auto writer = store_.OpenWriter("s", model);
  EXPECT_EQ(Append(*writer, {0, 70})->saturated_values, 2);
  EXPECT_EQ(Append(*writer, {70, 30})->saturated_values, 1);
  const SequenceDescription description = store_->Describe(kKey).value();
  EXPECT_EQ(description.saturated_values, 3);
  EXPECT_EQ(description.layers[0].k_saturated_values, 1);
  EXPECT_EQ(description.layers[0].v_saturated_values, 0);
  EXPECT_EQ(description.layers[1].k_saturated_values, 0);
  EXPECT_EQ(description.layers[1].v_saturated_values, 2);
  const auto entry = store_->FindModel(model.id).value();
  EXPECT_EQ(entry->totals().saturated_values, 3);
  ASSERT_THAT(store_->Remove(kKey), IsOk());
  EXPECT_EQ(entry->totals().saturated_values, 3) << "what went through stays counted";
}

// ---- models and limits ----

TEST_F(StoreWriter, AnotherModelIdIsToldTheFieldThatDiffers) {
  const Model& model = Register("kivi2");
  store_.AppendAtOnce("s", model, data_, 1);
  EXPECT_THAT(
      Open(Register("kivi4"), 1),
      Refuses(Reason::kModelMismatch, AllOf(HasSubstr("sequence \"s\" is of \"" + model.id),
                                            HasSubstr("they differ in policy.kv_cache_dtype"))));
  ModelRequest revised = model.request;
  revised.spec.revision = "other";
  EXPECT_THAT(Open(store_.Register(revised)->model(), 1),
              Refuses(Reason::kModelMismatch, HasSubstr("they differ in spec.revision")));
  WriterRequest unknown;
  unknown.key = kKey;
  unknown.model_id = "0123";
  EXPECT_THAT(
      store_->OpenWriter(std::move(unknown)),
      Refuses(Reason::kUnknownModel, HasSubstr("model_id \"0123\" is not registered here")));
}

TEST_F(StoreWriter, RegisteringAgainGivesTheSameModel) {
  const auto entry = store_->FindModel(Register("kivi2").id).value();
  EXPECT_EQ(store_.Register(entry->model().request), entry);
  EXPECT_EQ(store_->Models().size(), 1u);
}

TEST_F(StoreWriter, ModelsAreLimited) {
  TestStore store(StoreOptions{.memory = kMemory, .max_models = 2});
  const ModelSpec spec = testing::UniformSpec({.dim = 32});
  store.Register(testing::RequestOf(spec, "auto"));
  store.Register(testing::RequestOf(spec, "fp8"));
  EXPECT_THAT(store->RegisterModel(testing::RequestOf(spec, "kivi2")),
              Refuses(Reason::kTooManyModels, HasSubstr("the limit (max_models) is 2")));
  EXPECT_THAT(store->RegisterModel(testing::RequestOf(spec, "fp8_e4m3")), IsOk());
}

TEST_F(StoreWriter, SequencesAreLimited) {
  const Model& model = Register("fp8");
  for (int i = 0; i < 5; ++i) store_.AppendAtOnce(std::to_string(i), model, data_, 1);
  EXPECT_THAT(Open(model, 0),
              Refuses(Reason::kTooManySequences,
                      HasSubstr("5 sequences are held; the limit (max_sequences) is 5")));
  ASSERT_THAT(store_->Remove({"default", "3"}), IsOk());
  EXPECT_THAT(Open(model, 0), IsOk());
}

TEST_F(StoreWriter, NamespacesDoNotShareNames) {
  const Model& model = Register("fp8");
  store_.AppendAtOnce("s", model, data_, 7);
  EXPECT_THAT(store_->Describe({"other", "s"}),
              Refuses(Reason::kUnknownSequence, HasSubstr("namespace \"other\"")));
  EXPECT_THAT(store_->Remove({"other", "s"}), Refuses(Reason::kUnknownSequence, ::testing::_));
  WriterRequest request;
  request.key = {"other", "s"};
  request.model_id = model.id;
  EXPECT_EQ(store_->OpenWriter(std::move(request)).value()->standing().received_tokens, 0);
}

TEST_F(StoreWriter, ListGoesThroughANamespaceInOrder) {
  const Model& model = Register("fp8");
  for (const char* id : {"b", "a", "d", "c"}) store_.AppendAtOnce(id, model, data_, 2);
  const auto ids = [&](const std::string& name_space, const std::string& after, int limit) {
    std::string all;
    for (const auto& description : store_->List({name_space, after}, limit)) all += description.id;
    return all;
  };
  EXPECT_EQ(ids("default", "", 10), "abcd");
  EXPECT_EQ(ids("default", "", 3), "abc");
  EXPECT_EQ(ids("default", "b", 3), "cd");
  EXPECT_EQ(ids("a", "", 3), "");
  EXPECT_EQ(ids("z", "", 3), "");
}

}  // namespace
}  // namespace kvtier::cachestore
