// Codes instead of values over the wire: what a client encodes is stored as if the server had, what
// a client decodes reads as if the server had, in shards, ranges and layouts; and what is wrong
// with a part is told and harms nobody.
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/error_reason.h"
#include "client/resolve_model.h"
#include "client/stored_encoder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

using client::Transfer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr std::uint32_t kTokens = 700;
constexpr int kHeads = 2, kDim = 64;  // of SmallModel
constexpr std::size_t kRow = kDim * 2;

const char* const kFormats[] = {"auto",
                                "float16",
                                "fp8",
                                "int8_per_token_head",
                                "q4_0",
                                "kivi2",
                                "kivi(4,2,4,16)",
                                "kivi(8,8,32,0)",
                                "nvfp4",
                                "int4_per_token_head",
                                "fp8(scale=page)",
                                "kivi4(k_rotation=hadamard)"};

class StoredTransfer : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = std::make_unique<LiveServer>(std::vector<std::string>{"--memory=64MiB"});
  }
  static void TearDownTestSuite() { server_.reset(); }

  void SetUp() override { free_ = server_->FreeBytes(); }
  void TearDown() override {
    const auto held = client().ListSequences({});
    ASSERT_THAT(held, IsOk());
    for (const v1::SequenceInfo& info : held->sequences()) {
      v1::RemoveRequest remove;
      remove.set_sequence(info.sequence());
      EXPECT_THAT(client().Remove(remove), IsOk());
    }
    EXPECT_EQ(server_->WaitForFreeBytes(free_), free_);
    EXPECT_TRUE(server_->process().running());
  }

  static client::Client& client() { return server_->client(); }

  void Register(const std::string& kv_cache_dtype) {
    const v1::RegisterModelRequest request = SmallModel(kv_cache_dtype);
    const auto reply = client().RegisterModel(request);
    ASSERT_THAT(reply, IsOk());
    const auto model = client::ResolveRegistered(request, *reply);
    ASSERT_THAT(model, IsOk());
    model_ = *model;
  }

  // [tokens, heads, dim] of all tokens: bf16 values that saturate in FP8 now and then.
  static std::string Values(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 200.0f);
    std::string bytes;
    for (std::size_t i = 0; i < std::size_t{kTokens} * kHeads * kDim; ++i) {
      const float value = normal(random);
      bytes.append(reinterpret_cast<const char*>(&value) + 2, 2);
    }
    return bytes;
  }

  struct Stream {
    std::uint32_t first_head = 0, heads = kHeads;
    std::vector<std::uint32_t> cuts = {kTokens};  // ends of its chunks
    bool stored = false;
  };

  v1::AppendChunk ChunkOf(const Stream& stream, std::uint32_t layer, std::uint32_t first,
                          std::uint32_t end) const {
    v1::AppendChunk chunk;
    chunk.set_first_layer(layer);
    chunk.set_first_token(first);
    chunk.set_num_tokens(end - first);
    for (std::uint32_t token = first; token < end; ++token) {
      const std::size_t at = (std::size_t{token} * kHeads + stream.first_head) * kRow;
      chunk.mutable_k()->append(k_, at, stream.heads * kRow);
      chunk.mutable_v()->append(v_, at, stream.heads * kRow);
    }
    return chunk;
  }
  static client::AppendOptions OptionsOf(const Stream& stream, const std::string& sequence) {
    client::AppendOptions options;
    options.open.set_sequence(sequence);
    options.open.set_first_head(stream.first_head);
    options.open.set_num_heads(stream.heads);
    return options;
  }

  // Sends both layers; every other chunk of a stored stream as codes and the rest as values.
  void Send(const std::string& sequence, const Stream& stream) {
    client::AppendOptions options = OptionsOf(stream, sequence);
    options.open.set_model_id(model_->id);
    const client::StoredEncoder encoder(model_, options.open);
    auto append = client().OpenAppend(options);
    ASSERT_THAT(append, IsOk());
    std::uint32_t first = 0;
    for (std::size_t i = 0; i < stream.cuts.size(); ++i) {
      for (std::uint32_t layer = 0; layer < 2; ++layer) {
        v1::AppendChunk chunk = ChunkOf(stream, layer, first, stream.cuts[i]);
        if (stream.stored && i % 2 == 0) encoder.Encode(chunk);
        parts_ += chunk.k_parts_size() + chunk.v_parts_size();
        ASSERT_THAT((*append)->Send(std::move(chunk)), IsOk());
      }
      first = stream.cuts[i];
    }
    ASSERT_THAT((*append)->Finish(), IsOk());
  }

  static v1::ReadRequest ReadOf(const std::string& sequence, v1::ReadAs as) {
    v1::ReadRequest request;
    request.set_accept_k_rotation(true);
    request.add_sequences()->set_sequence(sequence);
    request.set_as(as);
    return request;
  }

  // All bytes of a read in the order of its layers, K before V, and what it says of them.
  struct Whole {
    std::string bytes;
    std::string scales;
    std::uint64_t saturated = 0;
    std::uint64_t transferred = 0;
  };
  static absl::StatusOr<Whole> ReadWhole(const v1::ReadRequest& request, Transfer transfer) {
    std::vector<std::string> tensors;
    tensors.reserve(64);
    const auto place = [&](const v1::SequenceManifest& sequence) {
      std::vector<client::LayerTarget> targets;
      for (const v1::LayerManifest& layer : sequence.layers()) {
        const std::size_t bytes =
            layer.dtype() == v1::DTYPE_FP32                                              ? 4
            : layer.dtype() == v1::DTYPE_FP8_E4M3 || layer.dtype() == v1::DTYPE_FP8_E5M2 ? 1
                                                                                         : 2;
        const std::size_t size = sequence.num_tokens() * layer.num_heads() * kDim * bytes;
        std::string& k = tensors.emplace_back(size, '\xee');
        std::string& v = tensors.emplace_back(size, '\xee');
        targets.push_back(
            {std::as_writable_bytes(std::span(k)), std::as_writable_bytes(std::span(v))});
      }
      return absl::StatusOr<std::vector<client::LayerTarget>>(targets);
    };
    const auto result = client().ReadInto(request, place, transfer);
    if (!result.ok()) return result.status();
    Whole whole{.saturated = result->summary.saturated_values(),
                .transferred = result->transferred_bytes};
    for (const std::string& tensor : tensors) whole.bytes += tensor;
    for (const v1::LayerManifest& layer : result->manifest.sequences(0).layers())
      whole.scales += layer.ShortDebugString();
    return whole;
  }

  void ExpectAlike(const v1::ReadRequest& request) {
    const auto values = ReadWhole(request, Transfer::kValues);
    const auto codes = ReadWhole(request, Transfer::kStored);
    ASSERT_THAT(values, IsOk());
    ASSERT_THAT(codes, IsOk());
    EXPECT_TRUE(values->bytes == codes->bytes) << request.ShortDebugString();
    EXPECT_EQ(values->scales, codes->scales);
    EXPECT_EQ(values->saturated, codes->saturated) << request.ShortDebugString();
    EXPECT_EQ(values->transferred, values->bytes.size());
  }

  static std::uint64_t SaturatedOf(const std::string& sequence) {
    v1::DescribeRequest describe;
    describe.set_sequence(sequence);
    return client().Describe(describe)->info().saturated_values();
  }

  // The parts and rows of a sequence, as they travel.
  static std::string StoredBytes(const std::string& sequence) {
    std::string bytes;
    client::ReadHandlers handlers;
    handlers.on_chunk = [&](const v1::ReadChunk& chunk) {
      for (const auto* parts : {&chunk.k_parts(), &chunk.v_parts()}) {
        for (const v1::StoredPart& part : *parts) bytes += part.SerializeAsString();
      }
      bytes += chunk.k() + chunk.v();
      return absl::OkStatus();
    };
    EXPECT_THAT(client().Read(ReadOf(sequence, v1::READ_AS_STORED), handlers), IsOk());
    return bytes;
  }

  // What the server says to one chunk of codes that `change` has spoiled.
  absl::Status SendSpoiled(const std::function<void(v1::AppendChunk&)>& change,
                           const std::function<void(v1::AppendOpen&)>& open = {}) {
    client::AppendOptions options = OptionsOf({}, "spoiled");
    options.open.set_model_id(model_->id);
    if (open) open(options.open);
    auto append = client().OpenAppend(options);
    if (!append.ok()) return append.status();
    v1::AppendChunk chunk = ChunkOf({}, 0, 0, 400);
    client::StoredEncoder(model_, options.open).Encode(chunk);
    change(chunk);
    if (absl::Status sent = (*append)->Send(std::move(chunk)); !sent.ok()) return sent;
    return (*append)->Finish().status();
  }

  static std::unique_ptr<LiveServer> server_;
  std::int64_t free_ = 0;
  std::shared_ptr<const cachestore::Model> model_;
  int parts_ = 0;  // sent
  const std::string k_ = Values(1), v_ = Values(2);
};
std::unique_ptr<LiveServer> StoredTransfer::server_;

// A fork's residual counts from where it begins: its codes are others than a sequence's of the same
// tokens, and the same however they came.
TEST_F(StoredTransfer, OfAForkCountsFromItsOrigin) {
  for (const char* format : kFormats) {
    SCOPED_TRACE(format);
    Register(format);
    Send("source", {});
    for (const bool stored : {false, true}) {
      v1::ForkRequest fork;
      fork.set_sequence("source");
      fork.set_new_sequence(stored ? "codes" : "values");
      fork.set_tokens(300);
      const auto forked = client().Fork(fork);
      ASSERT_THAT(forked, IsOk());
      const auto origin = static_cast<std::uint32_t>(forked->tokens());
      EXPECT_EQ(origin, 256u);
      client::AppendOptions options = OptionsOf({}, fork.new_sequence());
      options.open.set_model_id(model_->id);
      const client::StoredEncoder encoder(model_, options.open);
      auto append = client().OpenAppend(options);
      ASSERT_THAT(append, IsOk());
      EXPECT_EQ((*append)->opened().received_tokens(), origin);
      EXPECT_EQ((*append)->opened().residual_origin(), origin);
      for (std::uint32_t layer = 0; layer < 2; ++layer) {
        v1::AppendChunk chunk = ChunkOf({}, layer, origin, kTokens);
        if (stored) encoder.Encode(chunk, origin);
        EXPECT_EQ(chunk.k_parts_size() > 0, stored);
        ASSERT_THAT((*append)->Send(std::move(chunk)), IsOk());
      }
      ASSERT_THAT((*append)->Finish(), IsOk());
    }
    EXPECT_TRUE(StoredBytes("values") == StoredBytes("codes"));
    ExpectAlike(ReadOf("codes", v1::READ_AS_FP32));
    for (const char* sequence : {"source", "values", "codes"}) {
      v1::RemoveRequest remove;
      remove.set_sequence(sequence);
      ASSERT_THAT(client().Remove(remove), IsOk());
    }
  }
}

TEST_F(StoredTransfer, CodesOfAClientAreTheServersOwn) {
  for (const char* format : kFormats) {
    SCOPED_TRACE(format);
    ASSERT_NO_FATAL_FAILURE(Register(format));
    const std::string values = std::string(format) + " values",
                      codes = std::string(format) + " codes";
    ASSERT_NO_FATAL_FAILURE(Send(values, {.cuts = {100, kTokens}}));
    EXPECT_EQ(std::exchange(parts_, 0), 0);
    ASSERT_NO_FATAL_FAILURE(
        Send(codes, {.heads = 1, .cuts = {5, 300, 301, kTokens}, .stored = true}));
    ASSERT_NO_FATAL_FAILURE(
        Send(codes, {.first_head = 1, .heads = 1, .cuts = {650, 660, kTokens}, .stored = true}));
    EXPECT_GT(std::exchange(parts_, 0), 4);
    EXPECT_TRUE(StoredBytes(codes) == StoredBytes(values));
    EXPECT_EQ(SaturatedOf(codes), SaturatedOf(values));
  }
}

TEST_F(StoredTransfer, CodesDecodedHereAreTheServersValues) {
  for (const char* format : kFormats) {
    if (std::string(format) == "fp8(scale=page)") continue;  // groups of 128: other bounds
    SCOPED_TRACE(format);
    ASSERT_NO_FATAL_FAILURE(Register(format));
    // The second head stands behind: its codes end earlier, and so does what is committed.
    ASSERT_NO_FATAL_FAILURE(Send(format, {.heads = 1}));
    ASSERT_NO_FATAL_FAILURE(Send(format, {.first_head = 1, .heads = 1, .cuts = {517}}));
    for (const v1::ReadAs as : {v1::READ_AS_SOURCE, v1::READ_AS_BF16, v1::READ_AS_FP16,
                                v1::READ_AS_FP32, v1::READ_AS_FP8_E4M3, v1::READ_AS_FP8_E5M2}) {
      v1::ReadRequest request = ReadOf(format, as);
      ASSERT_NO_FATAL_FAILURE(ExpectAlike(request));
      request.set_layout(v1::LAYOUT_HND);
      request.set_first_head(1);
      request.mutable_sequences(0)->set_first_token(64);
      request.mutable_sequences(0)->set_num_tokens(352);
      if (as == v1::READ_AS_FP8_E4M3) request.set_v_scale(0.5f);
      ASSERT_NO_FATAL_FAILURE(ExpectAlike(request));
      request.set_first_head(0);
      request.set_num_heads(1);
      request.set_first_layer(1);
      ASSERT_NO_FATAL_FAILURE(ExpectAlike(request));
    }
  }
}

TEST_F(StoredTransfer, FewerBytesTravel) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  ASSERT_NO_FATAL_FAILURE(Send("s", {}));
  const auto values = ReadWhole(ReadOf("s", v1::READ_AS_BF16), Transfer::kValues);
  const auto codes = ReadWhole(ReadOf("s", v1::READ_AS_BF16), Transfer::kStored);
  ASSERT_THAT(codes, IsOk());
  EXPECT_LT(codes->transferred * 2, values->transferred);  // the residual is a fifth of it
}

TEST_F(StoredTransfer, ARangeThatCutsAGroupIsToldItsBounds) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  ASSERT_NO_FATAL_FAILURE(Send("s", {}));
  v1::ReadRequest request = ReadOf("s", v1::READ_AS_BF16);
  request.mutable_sequences(0)->set_first_token(5);
  const auto refused = ReadWhole(request, Transfer::kStored);
  EXPECT_THAT(refused, StatusIs(Code::kOutOfRange, HasSubstr("the nearest bounds are 0 and 32")));
  EXPECT_EQ(client::ErrorReason(refused.status()), "GROUP_BOUND");
  request = ReadOf("s", v1::READ_AS_STORED);
  request.set_block_tokens(16);
  EXPECT_THAT(client().Read(request, {}),
              StatusIs(Code::kInvalidArgument, HasSubstr("block_tokens is 16")));
  request = ReadOf("s", v1::READ_AS_STORED);
  request.set_k_scale(1);
  EXPECT_THAT(client().Read(request, {}),
              StatusIs(Code::kInvalidArgument, HasSubstr("k_scale or v_scale is set")));
}

TEST_F(StoredTransfer, PartsThatAreNotTheModelsAreRefused) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));  // of 400 tokens K is final to page 2, V to page 1
  const auto refused = [&](const char* what, const std::function<void(v1::AppendChunk&)>& change) {
    EXPECT_THAT(SendSpoiled(change), StatusIs(Code::kInvalidArgument, HasSubstr(what)));
  };
  EXPECT_THAT(SendSpoiled([](auto&) {}), IsOk());
  v1::RemoveRequest remove;
  remove.set_sequence("spoiled");
  EXPECT_THAT(client().Remove(remove), IsOk());
  refused("k_parts[1].page is 3; want consecutive pages, of 0 to 2", [](auto& c) {
    c.mutable_k_parts(0)->set_page(1);
    c.mutable_k_parts(1)->set_page(3);
  });
  refused("k_parts[1].page is 4000000000",
          [](auto& c) { c.mutable_k_parts(1)->set_page(4'000'000'000); });
  refused("v_parts[2].page is 2; want consecutive pages, of 0 to 1", [](auto& c) {
    *c.add_v_parts() = c.v_parts(0);
    c.mutable_v_parts(2)->set_page(2);
  });
  refused("k_parts[2].data has 0 bytes; a part of 2 heads takes",
          [](auto& c) { c.mutable_k_parts(2)->clear_data(); });
  refused("chunk.k has", [](auto& c) { c.mutable_k()->pop_back(); });
  refused("those that come as parts left out", [](auto& c) { c.mutable_v_parts()->RemoveLast(); });
  refused("k_parts[0], page 0 of layer 0: side is 1; want 0", [](auto& c) {
    const std::string k = c.k_parts(0).data();
    c.mutable_k_parts(0)->set_data(c.v_parts(0).data());
    c.mutable_k_parts(0)->mutable_data()->resize(k.size());
  });
  refused("leave out num_layers", [](auto& c) { c.set_num_layers(2); });
  EXPECT_THAT(SendSpoiled([](auto&) {}, [](v1::AppendOpen& open) { open.set_fused_kv(true); }),
              StatusIs(Code::kInvalidArgument, HasSubstr("leave out fused_kv")));
  const absl::Status damaged =
      SendSpoiled([](auto& c) { c.mutable_v_parts(1)->mutable_data()->at(700) ^= 1; });
  EXPECT_THAT(damaged, StatusIs(Code::kDataLoss,
                                AllOf(HasSubstr("v_parts[1], page 1"), HasSubstr("checksum"))));
  EXPECT_EQ(client::ErrorReason(damaged), "CHECKSUM");
}

// Whatever comes is refused or taken whole; the server lives, and TearDown finds the bytes back.
TEST_F(StoredTransfer, RandomDamageHarmsNobody) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  std::mt19937 random(7);
  const auto pick = [&](std::size_t size) { return random() % size; };
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    const absl::Status status = SendSpoiled([&](v1::AppendChunk& chunk) {
      auto& parts = pick(2) == 0 ? *chunk.mutable_k_parts() : *chunk.mutable_v_parts();
      v1::StoredPart& part = parts[static_cast<int>(pick(static_cast<std::size_t>(parts.size())))];
      switch (pick(5)) {
        case 0:
          part.set_page(static_cast<std::uint32_t>(random()));
          break;
        case 1:
          part.mutable_data()->resize(pick(2 * part.data().size()));
          break;
        case 2:
          parts.RemoveLast();
          break;
        default:
          part.mutable_data()->at(pick(96)) ^= static_cast<char>(1 + pick(255));
      }
    });
    if (!status.ok()) {
      ++refused;
      continue;
    }
    v1::RemoveRequest remove;
    remove.set_sequence("spoiled");
    EXPECT_THAT(client().Remove(remove), IsOk());
  }
  EXPECT_GT(refused, 190);
}

TEST_F(StoredTransfer, PartsCountInTheLargestMessage) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  const absl::Status status = SendSpoiled([](auto& chunk) {
    chunk.mutable_v_parts(0)->set_data(std::string(9 << 19, 'x'));  // 4.5 MiB of at most 4
  });
  EXPECT_THAT(status, StatusIs(Code::kResourceExhausted, HasSubstr("and their parts, have")));
  EXPECT_EQ(client::ErrorReason(status), "MESSAGE_TOO_LARGE");
}

}  // namespace
}  // namespace kvtier::testing
