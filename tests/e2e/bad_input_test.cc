// What a client may send that is wrong: each gets an error that names the field, what came and what
// is allowed, costs nobody else anything, and leaves no byte behind.
#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "client/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

class BadInput : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = std::make_unique<LiveServer>(std::vector<std::string>{"--memory=64MiB"});
  }
  static void TearDownTestSuite() { server_.reset(); }

  void SetUp() override { free_ = server_->FreeBytes(); }
  // The server serves on, and the bytes are back.
  void TearDown() override {
    EXPECT_TRUE(server_->process().running());
    const std::string id = Register("auto");
    EXPECT_THAT(AppendAll(client(), id, "proof of life", 40), IsOk());
    v1::RemoveRequest remove;
    remove.set_sequence("proof of life");
    EXPECT_THAT(client().Remove(remove), IsOk());
    EXPECT_EQ(server_->WaitForFreeBytes(free_), free_);
  }

  client::Client& client() { return server_->client(); }
  std::string Register(const std::string& kv_cache_dtype) {
    const auto registered = client().RegisterModel(SmallModel(kv_cache_dtype));
    EXPECT_THAT(registered, IsOk());
    return registered.ok() ? registered->model_id() : "";
  }
  // What the server says to one chunk on a fresh stream of `sequence`, "s" unless given.
  absl::Status SendOne(const std::string& model_id, v1::AppendChunk chunk,
                       const std::string& sequence = "s") {
    auto stream = OpenStream(client(), model_id, sequence);
    if (!stream.ok()) return stream.status();
    absl::Status sent = (*stream)->Send(std::move(chunk));
    return sent.ok() ? (*stream)->Finish().status() : sent;
  }
  absl::Status Remove(const std::string& sequence) {
    v1::RemoveRequest request;
    request.set_sequence(sequence);
    return client().Remove(request).status();
  }

  static std::unique_ptr<LiveServer> server_;
  std::int64_t free_ = 0;
};
std::unique_ptr<LiveServer> BadInput::server_;

TEST_F(BadInput, ShapeDoesNotFitTheModel) {
  v1::AppendChunk chunk = SmallChunk(0, 0, 16);
  chunk.mutable_k()->resize(100);
  EXPECT_THAT(SendOne(Register("auto"), chunk),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("chunk.k has 100 bytes"), HasSubstr("take 4096"))));
}

TEST_F(BadInput, VIsMissing) {
  v1::AppendChunk chunk = SmallChunk(0, 0, 16);
  chunk.clear_v();
  EXPECT_THAT(SendOne(Register("auto"), chunk),
              StatusIs(Code::kInvalidArgument, HasSubstr("chunk.v has 0 bytes")));
}

TEST_F(BadInput, LayerIsOutsideTheModel) {
  EXPECT_THAT(SendOne(Register("auto"), SmallChunk(7, 0, 16)),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("chunk.first_layer 7"), HasSubstr("0 to 1"))));
}

TEST_F(BadInput, HeadCountIsOutsideTheModel) {
  client::AppendOptions options;
  options.open.set_sequence("s");
  options.open.set_model_id(Register("auto"));
  options.open.set_num_heads(5);
  EXPECT_THAT(
      client().OpenAppend(options),
      StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("num_heads 5"), HasSubstr("2 KV heads"))));
  options.open.set_num_heads(0);
  options.open.set_first_layer(9);
  EXPECT_THAT(client().OpenAppend(options),
              StatusIs(Code::kInvalidArgument,
                       HasSubstr("first_layer 9 and num_layers 0 are outside the model's 2")));
}

TEST_F(BadInput, AHeadRangeBeyondAllIntegersIsRefused) {
  const std::string id = Register("auto");
  client::AppendOptions options;
  options.open.set_sequence("s");
  options.open.set_model_id(id);
  options.open.set_first_head(1);
  options.open.set_num_heads(std::numeric_limits<std::int32_t>::max());
  EXPECT_THAT(client().OpenAppend(options),
              StatusIs(Code::kInvalidArgument, HasSubstr("num_heads 2147483647")));
  ASSERT_THAT(AppendAll(client(), id, "held", 16), IsOk());
  v1::ReadRequest read;
  read.add_sequences()->set_sequence("held");
  read.set_first_head(1);
  read.set_num_heads(std::numeric_limits<std::int32_t>::max());
  EXPECT_THAT(client().Read(read, {}),
              StatusIs(Code::kInvalidArgument, HasSubstr("num_heads 2147483647")));
  EXPECT_THAT(Remove("held"), IsOk());
}

TEST_F(BadInput, ABlockTooLargeForAMessageIsRefused) {
  v1::RegisterModelRequest request = SmallModel("auto");
  for (v1::LayerSpec& layer : *request.mutable_spec()->mutable_layers()) {
    layer.set_kv_heads(64);
    layer.set_k_head_dim(128);
    layer.set_v_head_dim(128);
  }
  const auto registered = client().RegisterModel(request);
  ASSERT_THAT(registered, IsOk());
  auto stream = OpenStream(client(), registered->model_id(), "wide");
  ASSERT_THAT(stream, IsOk());
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    v1::AppendChunk chunk;
    chunk.set_first_layer(layer);
    chunk.set_num_tokens(1);
    chunk.set_k(std::string(std::size_t{64} * 128 * 2, '\0'));
    chunk.set_v(chunk.k());
    ASSERT_THAT((*stream)->Send(chunk), IsOk());
  }
  ASSERT_THAT((*stream)->Finish(), IsOk());
  v1::ReadRequest read;
  read.add_sequences()->set_sequence("wide");
  read.set_block_tokens(4096);
  EXPECT_THAT(client().Read(read, {}),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("block_tokens is 4096"), HasSubstr("8388608"))));
  EXPECT_THAT(Remove("wide"), IsOk());
}

TEST_F(BadInput, LayersOfDifferentHeadCountsGoOnOneStream) {
  v1::RegisterModelRequest request = SmallModel("kivi2");
  request.mutable_spec()->mutable_layers(1)->set_kv_heads(1);
  const auto registered = client().RegisterModel(request);
  ASSERT_THAT(registered, IsOk());
  auto stream = OpenStream(client(), registered->model_id(), "uneven heads");
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, 16)), IsOk());
  v1::AppendChunk narrow = SmallChunk(1, 0, 16);
  narrow.mutable_k()->resize(narrow.k().size() / 2);
  narrow.mutable_v()->resize(narrow.v().size() / 2);
  ASSERT_THAT((*stream)->Send(narrow), IsOk());
  const auto progress = (*stream)->Finish();
  ASSERT_THAT(progress, IsOk());
  EXPECT_EQ(progress->committed_tokens, 16u);
  EXPECT_THAT(Remove("uneven heads"), IsOk());
}

TEST_F(BadInput, SealingEndsAStreamThatStaysOpen) {
  const std::string id = Register("auto");
  auto stream = OpenStream(client(), id, "left open");
  ASSERT_THAT(stream, IsOk());
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_THAT((*stream)->Send(SmallChunk(layer, 0, 16)), IsOk());
  }
  WaitForChunks(**stream, 2);
  v1::SealRequest seal;
  seal.set_sequence("left open");
  seal.set_tokens(16);
  ASSERT_THAT(client().Seal(seal), IsOk());
  const absl::Status sent = (*stream)->Send(SmallChunk(0, 16, 16));
  EXPECT_THAT(sent.ok() ? (*stream)->Finish().status() : sent, ::testing::Not(IsOk()));
  EXPECT_THAT(Remove("left open"), IsOk());
}

TEST_F(BadInput, SourceDtypeIsUnknown) {
  v1::RegisterModelRequest request = SmallModel("auto");
  request.mutable_spec()->set_source_dtype(static_cast<v1::DType>(99));
  EXPECT_THAT(client().RegisterModel(request),
              StatusIs(Code::kInvalidArgument, HasSubstr("spec.source_dtype is 99")));
}

TEST_F(BadInput, EnumeratorsThatAreUnknownAreNotTakenForTheDefault) {
  v1::RegisterModelRequest request = SmallModel("auto");
  request.mutable_spec()->set_k_rope(static_cast<v1::RopeState>(7));
  EXPECT_THAT(client().RegisterModel(request),
              StatusIs(Code::kInvalidArgument, HasSubstr("spec.k_rope is 7")));
  client::AppendOptions options;
  options.open.set_sequence("s");
  options.open.set_model_id(Register("auto"));
  options.open.set_non_finite(static_cast<v1::NonFinitePolicy>(7));
  EXPECT_THAT(client().OpenAppend(options),
              StatusIs(Code::kInvalidArgument, HasSubstr("non_finite is 7")));
}

TEST_F(BadInput, FormatIsUnknown) {
  const auto registered = client().RegisterModel(SmallModel("kivi3"));
  EXPECT_THAT(registered,
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("\"kivi3\""), HasSubstr("kivi2"))));
  EXPECT_EQ(client::ErrorReason(registered.status()), "UNKNOWN_FORMAT");
}

TEST_F(BadInput, GroupDoesNotDivideTheHeadDim) {
  EXPECT_THAT(client().RegisterModel(SmallModel("kivi(2,2,48,96)")),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("v_head_dim is 64"), HasSubstr("multiple of 48"))));
}

TEST_F(BadInput, ResidualIsNoMultipleOfTheGroup) {
  EXPECT_THAT(client().RegisterModel(SmallModel("kivi(2,2,32,100)")),
              StatusIs(Code::kInvalidArgument, HasSubstr("residual_tokens is 100")));
}

TEST_F(BadInput, TokenGapNamesWhatIsExpected) {
  const std::string id = Register("auto");
  const absl::Status status = SendOne(id, SmallChunk(0, 5, 16));
  EXPECT_THAT(status, StatusIs(Code::kOutOfRange,
                               AllOf(HasSubstr("first_token is 5"), HasSubstr("expects token 0"))));
  EXPECT_EQ(client::ErrorReason(status), "TOKEN_GAP");
}

TEST_F(BadInput, ResendIsHarmlessAndCounted) {
  auto stream = OpenStream(client(), Register("kivi2"), "resent");
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, 100)), IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, 100)), IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 60, 100)), IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(1, 0, 160)), IsOk());
  const auto progress = (*stream)->Finish();
  ASSERT_THAT(progress, IsOk());
  EXPECT_EQ(progress->skipped_tokens, 140u);
  EXPECT_EQ(progress->committed_tokens, 160u);
  EXPECT_THAT(Remove("resent"), IsOk());
}

TEST_F(BadInput, NanAndInfAreRefusedWithTheirPlace) {
  const std::string id = Register("auto");
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    v1::AppendChunk chunk = SmallChunk(1, 0, 16);
    const v1::AppendChunk bad = SmallChunk(1, 0, 1, value);
    // Token 3, head 1, channel 2.
    chunk.mutable_v()->replace((3 * 2 * 64 + 64 + 2) * 2, 2, bad.v().substr(0, 2));
    EXPECT_THAT(
        SendOne(id, chunk),
        StatusIs(Code::kInvalidArgument, HasSubstr("v of layer 1, head 1, token 3, channel 2")));
  }
}

TEST_F(BadInput, KiviRefusesWhatItsScaleCannotHold) {
  const absl::Status status = SendOne(Register("kivi4"), SmallChunk(0, 0, 16, 40000.0f));
  EXPECT_THAT(status, StatusIs(Code::kInvalidArgument,
                               AllOf(HasSubstr("channel 0 is"), HasSubstr("32752"))));
  EXPECT_EQ(client::ErrorReason(status), "VALUE_OUT_OF_RANGE");
}

TEST_F(BadInput, LlamaBlocksRefuseWhatTheirScaleCannotHold) {
  EXPECT_THAT(SendOne(Register("q4_0"), SmallChunk(0, 0, 16, 600000.0f)),
              StatusIs(Code::kInvalidArgument, HasSubstr("q4_0 takes magnitudes up to 524032")));
}

TEST_F(BadInput, ARefusedChunkTakesNothing) {
  const std::string id = Register("kivi2");
  auto stream = OpenStream(client(), id, "half");
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, 130)), IsOk());
  v1::AppendChunk bad = SmallChunk(0, 130, 200);
  bad.mutable_v()->replace(bad.v().size() - 2, 2, "\x80\x7f");  // Inf
  static_cast<void>((*stream)->Send(bad));
  EXPECT_THAT((*stream)->Finish(), StatusIs(Code::kInvalidArgument, HasSubstr("token 329")));
  v1::DescribeRequest describe;
  describe.set_sequence("half");
  const auto description = client().Describe(describe);
  ASSERT_THAT(description, IsOk());
  EXPECT_EQ(description->layers(0).received_tokens(), 130u);
  EXPECT_THAT(Remove("half"), IsOk());
}

TEST_F(BadInput, ModelIsUnknown) {
  const auto stream = OpenStream(client(), "00000000000000000000000000000000", "s");
  EXPECT_THAT(stream, StatusIs(Code::kNotFound,
                               HasSubstr("model_id \"00000000000000000000000000000000\"")));
}

TEST_F(BadInput, SequenceIsUnknown) {
  v1::ReadRequest read;
  read.add_sequences()->set_sequence("nobody");
  EXPECT_THAT(client().Read(read, {}), StatusIs(Code::kNotFound, HasSubstr("\"nobody\"")));
  EXPECT_THAT(Remove("nobody"), StatusIs(Code::kNotFound, HasSubstr("\"nobody\"")));
}

TEST_F(BadInput, NamespacesDoNotSeeEachOther) {
  const std::string id = Register("auto");
  ASSERT_THAT(AppendAll(client(), id, "mine", 16), IsOk());
  v1::ReadRequest read;
  read.set_namespace_("other");
  read.add_sequences()->set_sequence("mine");
  EXPECT_THAT(client().Read(read, {}), StatusIs(Code::kNotFound, HasSubstr("namespace \"other\"")));
  EXPECT_THAT(Remove("mine"), IsOk());
}

TEST_F(BadInput, ReadPastTheCommittedLengthNamesIt) {
  const std::string id = Register("auto");
  ASSERT_THAT(AppendAll(client(), id, "short", 20), IsOk());
  v1::ReadRequest read;
  read.add_sequences()->set_sequence("short");
  read.mutable_sequences(0)->set_num_tokens(21);
  EXPECT_THAT(client().Read(read, {}), StatusIs(Code::kOutOfRange, HasSubstr("20 are committed")));
  EXPECT_THAT(Remove("short"), IsOk());
}

TEST_F(BadInput, AnotherModelIdNamesTheFieldThatDiffers) {
  ASSERT_THAT(AppendAll(client(), Register("auto"), "of auto", 16), IsOk());
  EXPECT_THAT(OpenStream(client(), Register("kivi2"), "of auto"),
              StatusIs(Code::kFailedPrecondition, HasSubstr("policy.kv_cache_dtype")));
  EXPECT_THAT(Remove("of auto"), IsOk());
}

TEST_F(BadInput, MessageOverTheLimit) {
  const absl::Status status = SendOne(Register("auto"), SmallChunk(0, 0, 1 << 13));
  EXPECT_THAT(
      SendOne(Register("auto"), SmallChunk(0, 0, 9000)),
      StatusIs(Code::kResourceExhausted, AllOf(HasSubstr("4608000"), HasSubstr("4194304"))));
  EXPECT_THAT(status, IsOk());  // exactly at the limit
  EXPECT_THAT(Remove("s"), IsOk());
}

TEST_F(BadInput, ASecondWriterOfTheSameEpochIsRefusedAndAHigherOneTakesOver) {
  const std::string id = Register("auto");
  auto first = OpenStream(client(), id, "contended", 1);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT((*first)->Send(SmallChunk(0, 0, 16)), IsOk());
  EXPECT_THAT(OpenStream(client(), id, "contended", 1),
              StatusIs(Code::kAlreadyExists, HasSubstr("writer_epoch is 1")));
  auto second = OpenStream(client(), id, "contended", 2);
  ASSERT_THAT(second, IsOk());
  EXPECT_THAT((*first)->Finish(), StatusIs(Code::kAborted, HasSubstr("epoch 2")));
  EXPECT_THAT(OpenStream(client(), id, "contended", 1),
              StatusIs(Code::kAborted, HasSubstr("epoch 2")));
  EXPECT_THAT((*second)->Finish(), IsOk());
  EXPECT_THAT(Remove("contended"), IsOk());
}

TEST_F(BadInput, AChunkAfterASealByAnotherCallIsRefused) {
  const std::string id = Register("auto");
  auto stream = OpenStream(client(), id, "sealed");
  ASSERT_THAT(stream, IsOk());
  for (const int layer : {0, 1}) ASSERT_THAT((*stream)->Send(SmallChunk(layer, 0, 16)), IsOk());
  WaitForChunks(**stream, 2);
  v1::SealRequest seal;
  seal.set_sequence("sealed");
  seal.set_tokens(16);
  ASSERT_THAT(client().Seal(seal), IsOk());
  const absl::Status sent = (*stream)->Send(SmallChunk(0, 16, 16));
  const absl::Status end = sent.ok() ? (*stream)->Finish().status() : sent;
  EXPECT_THAT(end, StatusIs(Code::kFailedPrecondition, HasSubstr("sealed")));
  EXPECT_THAT(Remove("sealed"), IsOk());
}

TEST_F(BadInput, AFullBudgetNamesItselfAndKeepsWhatWasAcknowledged) {
  const std::string id = Register("auto");
  auto stream = OpenStream(client(), id, "greedy");
  ASSERT_THAT(stream, IsOk());
  absl::Status sent;
  for (std::uint64_t token = 0; sent.ok() && token < 1'000'000; token += 1024) {
    for (int layer = 0; layer < 2 && sent.ok(); ++layer)
      sent = (*stream)->Send(SmallChunk(layer, token, 1024));
  }
  const absl::Status end = sent.ok() ? (*stream)->Finish().status() : sent;
  EXPECT_THAT(end, StatusIs(Code::kResourceExhausted, HasSubstr("67108864")));
  EXPECT_EQ(client::ErrorReason(end), "BUDGET");
  const std::uint64_t committed = (*stream)->progress().committed_tokens;
  EXPECT_GT(committed, 50'000u);
  v1::ReadRequest read;
  read.add_sequences()->set_sequence("greedy");
  read.mutable_sequences(0)->set_num_tokens(committed);
  EXPECT_THAT(client().Read(read, {}), IsOk());
  EXPECT_THAT(Remove("greedy"), IsOk());
}

TEST_F(BadInput, SealWithAnotherCountNamesLayerAndHead) {
  const std::string id = Register("auto");
  ASSERT_THAT(SendOne(id, SmallChunk(0, 0, 16), "uneven"), IsOk());
  v1::SealRequest seal;
  seal.set_sequence("uneven");
  seal.set_tokens(16);
  EXPECT_THAT(client().Seal(seal),
              StatusIs(Code::kFailedPrecondition, HasSubstr("layer 1 head 0")));
  EXPECT_THAT(Remove("uneven"), IsOk());
}

TEST_F(BadInput, ASealedSequenceTakesNoMore) {
  const std::string id = Register("auto");
  ASSERT_THAT(AppendAll(client(), id, "done", 16), IsOk());
  v1::SealRequest seal;
  seal.set_sequence("done");
  seal.set_tokens(16);
  ASSERT_THAT(client().Seal(seal), IsOk());
  EXPECT_THAT(client().Seal(seal), IsOk());  // again is a no-op
  EXPECT_THAT(OpenStream(client(), id, "done"),
              StatusIs(Code::kFailedPrecondition, HasSubstr("sealed at 16 tokens")));
  v1::AbortRequest abort;
  abort.set_sequence("done");
  EXPECT_THAT(client().Abort(abort), StatusIs(Code::kFailedPrecondition, HasSubstr("Remove")));
  EXPECT_THAT(Remove("done"), IsOk());
}

TEST_F(BadInput, ScalesMustBePositiveAndWhole) {
  v1::RegisterModelRequest request = SmallModel("fp8");
  v1::LayerScales& scales = *request.add_scales();
  scales.add_k_scale(0.0f);
  scales.add_v_scale(0.5f);
  EXPECT_THAT(
      client().RegisterModel(request),
      StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("layer 0"), HasSubstr("k_scale is 0"))));
  scales.set_k_scale(0, 0.5f);
  EXPECT_THAT(client().RegisterModel(request),
              StatusIs(Code::kInvalidArgument, HasSubstr("layer 1 are missing")));
}

}  // namespace
}  // namespace kvtier::testing
