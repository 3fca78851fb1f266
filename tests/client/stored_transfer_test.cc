// Codes on the way: what the encoder sends is what the decoder makes the values of again, for every
// format, layout and cut; and whatever does not fit what was promised is noticed.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/read_check.h"
#include "client/resolve_model.h"
#include "client/stored_decoder.h"
#include "client/stored_encoder.h"
#include "kernels/host_codec.h"
#include "tests/support/kv_data.h"
#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::KvTensor;
using kvtier::testing::SeededRandom;
using kvtier::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kHeads = 3, kKDim = 64, kVDim = 32, kPage = 64;

// A model of one layer, what a server would have said of it, and 300 tokens.
class StoredTransfer : public ::testing::Test {
 protected:
  void Register(const std::string& format) {
    cachestore::ModelRequest own;
    own.spec = {.name = "m",
                .revision = "",
                .layers = {{.kv_heads = kHeads, .k_head_dim = kKDim, .v_head_dim = kVDim}}};
    own.policy.kv_cache_dtype = format;
    own.page_tokens = kPage;
    request_ = {};
    request_.mutable_spec()->set_name("m");
    request_.mutable_spec()->set_source_dtype(v1::DTYPE_BF16);
    v1::LayerSpec& layer = *request_.mutable_spec()->add_layers();
    layer.set_kv_heads(kHeads);
    layer.set_k_head_dim(kKDim);
    layer.set_v_head_dim(kVDim);
    request_.mutable_policy()->set_kv_cache_dtype(format);
    request_.set_page_tokens(kPage);
    data_ = kvtier::testing::MakeKvData(own.spec, 300, random_);
    v1::RegisterModelResponse reply;
    reply.set_model_id(cachestore::ResolveModel(own, kPage).value()->id);
    reply.set_page_tokens(kPage);
    const auto model = ResolveRegistered(request_, reply);
    ASSERT_THAT(model, IsOk());
    model_ = *model;
  }

  static std::string Rows(const KvTensor& values, std::int64_t first, std::int64_t tokens,
                          v1::Layout layout) {
    std::string rows;
    const bool hnd = layout == v1::LAYOUT_HND;
    for (std::int64_t i = 0; i < tokens * kHeads; ++i) {
      const std::int64_t token = hnd ? i % tokens : i / kHeads;
      const int head = static_cast<int>(hnd ? i / tokens : i % kHeads);
      rows.append(reinterpret_cast<const char*>(values.Row(head, first + token)),
                  static_cast<std::size_t>(values.row_bytes()));
    }
    return rows;
  }

  v1::AppendChunk Source(std::int64_t first, std::int64_t tokens, v1::Layout layout) const {
    v1::AppendChunk chunk;
    chunk.set_first_token(static_cast<std::uint64_t>(first));
    chunk.set_num_tokens(static_cast<std::uint32_t>(tokens));
    chunk.set_k(Rows(data_.layers[0].k, first, tokens, layout));
    chunk.set_v(Rows(data_.layers[0].v, first, tokens, layout));
    return chunk;
  }

  v1::AppendChunk Encoded(std::int64_t first, std::int64_t tokens, v1::Layout layout) const {
    v1::AppendOpen open;
    open.set_layout(layout);
    v1::AppendChunk chunk = Source(first, tokens, layout);
    StoredEncoder(model_, open).Encode(chunk);
    return chunk;
  }

  // The manifest of a read as stored of everything, had the server received `tokens`.
  v1::ReadManifest Manifest(std::int64_t tokens) const {
    v1::ReadManifest manifest;
    v1::SequenceManifest& sequence = *manifest.add_sequences();
    sequence.set_sequence("s");
    sequence.set_num_tokens(static_cast<std::uint64_t>(tokens));
    sequence.set_page_tokens(kPage);
    v1::LayerManifest& layer = *sequence.add_layers();
    layer.set_num_heads(kHeads);
    layer.set_kv_heads(kHeads);
    layer.set_k_head_dim(kKDim);
    layer.set_v_head_dim(kVDim);
    layer.set_dtype(v1::DTYPE_BF16);
    layer.set_kv_cache_dtype(request_.policy().kv_cache_dtype());
    return manifest;
  }

  // The chunk of a read whose codes are the parts of `sent`, which has tokens [0, n), and whose
  // rows are the rest of it: as if the server kept the last page of codes as source.
  static v1::ReadChunk AsRead(const v1::AppendChunk& sent, v1::ReadManifest& manifest) {
    v1::ReadChunk chunk;
    chunk.set_num_tokens(sent.num_tokens());
    chunk.set_k(sent.k());
    chunk.set_v(sent.v());
    *chunk.mutable_k_parts() = sent.k_parts();
    *chunk.mutable_v_parts() = sent.v_parts();
    for (auto* parts : {chunk.mutable_k_parts(), chunk.mutable_v_parts()}) {
      for (v1::StoredPart& part : *parts) part.add_tokens(kPage);
    }
    v1::LayerManifest& layer = *manifest.mutable_sequences(0)->mutable_layers(0);
    layer.set_k_code_tokens(static_cast<std::uint64_t>(sent.k_parts_size() * kPage));
    layer.set_v_code_tokens(static_cast<std::uint64_t>(sent.v_parts_size() * kPage));
    manifest.set_total_bytes(ChunkBytes(chunk));
    return chunk;
  }

  // What a codec makes of the first `codes` tokens of one K or V, and the rest as it is, in fp32.
  static std::string Expected(const cachestore::TensorModel& tensor, const KvTensor& values,
                              std::int64_t codes, std::int64_t tokens) {
    std::string out(static_cast<std::size_t>(tokens * kHeads * tensor.dim() * 4), '\0');
    for (int head = 0; head < kHeads; ++head) {
      const cachestore::PartLayout& layout = tensor.layout;
      std::vector<std::byte> units(
          static_cast<std::size_t>(codes / layout.unit_tokens * layout.unit.total() + 1));
      kernels::EncodeOnHost({.codec = layout.codec,
                             .dim = layout.dim,
                             .source = {values.Row(head, 0), values.type, values.dim},
                             .units = static_cast<int>(codes / layout.unit_tokens),
                             .out = units.data()});
      kernels::DecodeRun run{
          .codec = layout.codec,
          .dim = layout.dim,
          .in = units.data(),
          .tokens = codes,
          .out = {reinterpret_cast<std::byte*>(out.data()) + std::int64_t{head} * layout.dim * 4,
                  kernels::ElementType::kFp32, std::int64_t{kHeads} * layout.dim}};
      kernels::DecodeOnHost(run);
      run.codec = {.id = kernels::CodecId::kRaw, .element = values.type};
      run.in = values.Row(head, codes);
      run.tokens = tokens - codes;
      run.out.data += codes * run.out.token_stride * 4;
      kernels::DecodeOnHost(run);
    }
    return out;
  }

  static v1::ReadRequest Wanted(v1::ReadAs as) {
    v1::ReadRequest request;
    request.add_sequences()->set_sequence("s");
    request.set_as(as);
    return request;
  }

  // Decodes a spoiled read as it comes: the error, if there is one.
  static absl::Status Decode(const v1::ReadManifest& manifest, const v1::ReadChunk& chunk) {
    auto decoder = StoredDecoder::Make(Wanted(v1::READ_AS_FP32)).value();
    ReadCheck check;
    for (const absl::Status& status :
         {check.Begin(manifest, 1, ReadKind::kStored), decoder.Begin(manifest).status()}) {
      if (!status.ok()) return status;
    }
    if (absl::Status status = check.Take(chunk); !status.ok()) return status;
    if (absl::Status status = decoder.Decode(chunk).status(); !status.ok()) return status;
    return check.End();
  }

  SeededRandom random_;
  v1::RegisterModelRequest request_;
  std::shared_ptr<const cachestore::Model> model_;
  KvData data_;
};

TEST_F(StoredTransfer, WhatIsEncodedHereIsDecodedHere) {
  for (const char* format : {"auto", "float16", "fp8", "fp8_e5m2", "int8_per_token_head",
                             "fp8_per_token_head", "q8_0", "q4_0", "kivi2", "kivi(4,2,32,32)",
                             "nvfp4_4over6", "int4_per_token_head", "q4_0(k_rotation=hadamard)"}) {
    SCOPED_TRACE(format);
    ASSERT_NO_FATAL_FAILURE(Register(format));
    for (const std::int64_t tokens : {1, 63, 64, 200, 300}) {
      v1::ReadManifest manifest = Manifest(tokens);
      const v1::ReadChunk chunk = AsRead(Encoded(0, tokens, v1::LAYOUT_NHD), manifest);
      auto decoder = StoredDecoder::Make(Wanted(v1::READ_AS_FP32)).value();
      EXPECT_EQ(decoder.request().as(), v1::READ_AS_STORED);
      const auto plain = decoder.Begin(manifest);
      ASSERT_THAT(plain, IsOk());
      EXPECT_EQ(plain->sequences(0).layers(0).dtype(), v1::DTYPE_FP32);
      EXPECT_EQ(plain->total_bytes(),
                static_cast<std::uint64_t>(tokens * kHeads * (kKDim + kVDim) * 4));
      const auto values = decoder.Decode(chunk);
      ASSERT_THAT(values, IsOk());
      const cachestore::LayerModel& layer = model_->layers[0];
      EXPECT_EQ(values->k(),
                Expected(layer.k, data_.layers[0].k,
                         static_cast<std::int64_t>(chunk.k_parts_size()) * kPage, tokens));
      EXPECT_EQ(values->v(),
                Expected(layer.v, data_.layers[0].v,
                         static_cast<std::int64_t>(chunk.v_parts_size()) * kPage, tokens));
      EXPECT_EQ(values->k_parts_size() + values->v_parts_size(), 0);
      EXPECT_THAT(Decode(manifest, chunk), IsOk());
    }
  }
}

// The same codes from either layout, and the rows that stay are those left out of the parts.
TEST_F(StoredTransfer, TheEncoderTakesOutThePagesThatItsTokensMakeFinal) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));  // residual of 128
  for (const v1::Layout layout : {v1::LAYOUT_NHD, v1::LAYOUT_HND}) {
    // K is codes to 256: pages 1 to 3. V is codes to 172: page 1.
    const v1::AppendChunk chunk = Encoded(40, 260, layout);
    ASSERT_EQ(chunk.k_parts_size(), 3);
    ASSERT_EQ(chunk.v_parts_size(), 1);
    EXPECT_EQ(chunk.k_parts(0).page(), 1u);
    EXPECT_EQ(chunk.v_parts(0).page(), 1u);
    EXPECT_EQ(chunk.k_parts(0).data(), Encoded(64, 192, v1::LAYOUT_NHD).k_parts(0).data());
    const auto without = [&](const KvTensor& values, std::int64_t begin, std::int64_t end) {
      if (layout == v1::LAYOUT_NHD)
        return Rows(values, 40, begin - 40, layout) + Rows(values, end, 300 - end, layout);
      std::string rows;
      const auto row = static_cast<std::size_t>(values.row_bytes());
      for (int head = 0; head < kHeads; ++head) {
        const auto* at = reinterpret_cast<const char*>(values.Row(head, 40));
        rows.append(at, static_cast<std::size_t>(begin - 40) * row);
        rows.append(at + static_cast<std::size_t>(end - 40) * row,
                    static_cast<std::size_t>(300 - end) * row);
      }
      return rows;
    };
    EXPECT_EQ(chunk.k(), without(data_.layers[0].k, 64, 256));
    EXPECT_EQ(chunk.v(), without(data_.layers[0].v, 64, 128));
  }
}

TEST_F(StoredTransfer, AShardsPartsAreOfItsHeads) {
  ASSERT_NO_FATAL_FAILURE(Register("fp8"));
  v1::AppendOpen open;
  open.set_first_head(1);
  open.set_num_heads(2);
  v1::AppendChunk chunk;
  chunk.set_num_tokens(kPage);
  for (std::int64_t token = 0; token < kPage; ++token) {
    for (int head = 1; head < 3; ++head) {
      chunk.mutable_k()->append(reinterpret_cast<const char*>(data_.layers[0].k.Row(head, token)),
                                kKDim * 2);
    }
  }
  StoredEncoder(model_, open).Encode(chunk);
  ASSERT_EQ(chunk.k_parts_size(), 1);
  EXPECT_TRUE(chunk.k().empty());
  const auto* part = reinterpret_cast<const std::byte*>(chunk.k_parts(0).data().data());
  EXPECT_EQ(cachestore::HeaderOf(part).heads, 2);
  const std::string whole = Encoded(0, kPage, v1::LAYOUT_NHD).k_parts(0).data();
  EXPECT_EQ(cachestore::EntryOf(part, 0).checksum,
            cachestore::EntryOf(reinterpret_cast<const std::byte*>(whole.data()), 1).checksum);
}

// The server says what is wrong with them, and where.
TEST_F(StoredTransfer, ValuesThatTheFormatDoesNotTakeTravelAsTheyAre) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  data_.layers[0].k.Set(2, 70, 5, 40000.0f);
  const v1::AppendChunk chunk = Encoded(0, 300, v1::LAYOUT_NHD);
  EXPECT_EQ(chunk.k_parts_size(), 0);
  EXPECT_EQ(chunk.k(), Source(0, 300, v1::LAYOUT_NHD).k());
  EXPECT_EQ(chunk.v_parts_size(), 2);
  v1::AppendChunk wrong = Source(0, 300, v1::LAYOUT_NHD);
  wrong.mutable_v()->pop_back();
  StoredEncoder(model_, {}).Encode(wrong);
  EXPECT_EQ(wrong.v_parts_size(), 0);
}

TEST_F(StoredTransfer, AnyDamageOnTheWayIsDataLoss) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  v1::ReadManifest manifest = Manifest(300);
  const v1::ReadChunk good = AsRead(Encoded(0, 300, v1::LAYOUT_NHD), manifest);
  ASSERT_THAT(Decode(manifest, good), IsOk());
  const auto size = static_cast<std::int64_t>(good.v_parts(1).data().size());
  for (int i = 0; i < 300; ++i) {
    v1::ReadChunk chunk = good;
    const std::int64_t at = i < 64 ? i : random_.Between(64 + 3 * 16, size - 1);
    if (at >= 112 && at < 128) continue;  // padding, which nothing is said of
    (*chunk.mutable_v_parts(1)->mutable_data())[static_cast<std::size_t>(at)] ^=
        static_cast<char>(1 << random_.Between(0, 7));
    EXPECT_THAT(
        Decode(manifest, chunk),
        StatusIs(absl::StatusCode::kDataLoss, HasSubstr("sequence s, layer 0, v, page 1: part")))
        << "byte " << at;
  }
}

TEST_F(StoredTransfer, WhatDoesNotAddUpIsDataLoss) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  v1::ReadManifest manifest = Manifest(300);
  const v1::ReadChunk good = AsRead(Encoded(0, 300, v1::LAYOUT_NHD), manifest);
  const auto spoiled = [&](const std::function<void(v1::ReadChunk&)>& spoil) {
    v1::ReadChunk chunk = good;
    spoil(chunk);
    return Decode(manifest, chunk);
  };
  const auto loss = [](const char* what) {
    return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(what));
  };
  EXPECT_THAT(spoiled([](auto& c) { c.mutable_k_parts()->RemoveLast(); }), loss("3 parts"));
  EXPECT_THAT(spoiled([](auto& c) { c.clear_k_parts(); }), loss("0 parts"));
  EXPECT_THAT(spoiled([](auto& c) { *c.add_v_parts() = c.k_parts(3); }), loss("page 2"));
  EXPECT_THAT(spoiled([](auto& c) { c.mutable_k_parts()->SwapElements(0, 1); }),
              loss("comes as page 1"));
  EXPECT_THAT(spoiled([](auto& c) { c.mutable_k()->pop_back(); }), loss("bytes of source"));
  EXPECT_THAT(spoiled([](auto& c) { c.mutable_k_parts(0)->set_tokens(0, 63); }),
              loss("its header says 64"));
  EXPECT_THAT(spoiled([](auto& c) { c.mutable_k_parts(0)->clear_tokens(); }),
              loss("0 counts of tokens"));
  EXPECT_THAT(spoiled([](auto& c) { c.set_num_tokens(299); }), loss("bytes of source"));
  EXPECT_THAT(spoiled([](auto& c) { c.set_num_tokens(4'000'000'000u); }), loss("are expected"));
  const auto promised = [&](const std::function<void(v1::ReadManifest&)>& change) {
    v1::ReadManifest other = manifest;
    change(other);
    return Decode(other, good);
  };
  const auto layer = [](v1::ReadManifest& m) { return m.mutable_sequences(0)->mutable_layers(0); };
  EXPECT_THAT(promised([](auto& m) { m.set_total_bytes(5); }), loss("the manifest says 5"));
  EXPECT_THAT(promised([&](auto& m) { layer(m)->set_kv_cache_dtype("kivi9"); }), loss("kivi9"));
  EXPECT_THAT(promised([&](auto& m) { layer(m)->set_kv_cache_dtype("kivi4"); }), loss("page 0"));
  EXPECT_THAT(promised([&](auto& m) { layer(m)->set_kv_heads(2); }), loss("3 heads from 0"));
  EXPECT_THAT(promised([&](auto& m) { layer(m)->set_k_head_dim(4'000'000'000u); }), loss(""));
  EXPECT_THAT(promised([&](auto& m) { layer(m)->set_k_code_tokens(~std::uint64_t{0}); }), loss(""));
  EXPECT_THAT(promised([&](auto& m) { layer(m)->set_v_code_tokens(0); }), loss(""));
  EXPECT_THAT(promised([](auto& m) { m.mutable_sequences(0)->set_page_tokens(0); }), loss(""));
  EXPECT_THAT(promised([](auto& m) { m.mutable_sequences(0)->set_page_tokens(96); }), loss(""));
  EXPECT_THAT(promised([&](auto& m) {
                m.mutable_sequences(0)->set_first_token(std::uint64_t{1} << 63);
                layer(m)->set_first_token(std::uint64_t{1} << 63);
              }),
              loss("can't be"));
  EXPECT_THAT(promised([&](auto& m) { layer(m)->set_first_token(301); }),
              loss("layer 0 begins at token 301"));
}

TEST_F(StoredTransfer, WhatAReadOfCodesCannotHaveIsRefused) {
  v1::ReadRequest request = Wanted(v1::READ_AS_BF16);
  request.set_block_tokens(16);
  EXPECT_THAT(StoredDecoder::Make(request),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("block_tokens is set")));
  request = Wanted(v1::READ_AS_BF16);
  request.set_k_scale(1);
  EXPECT_THAT(StoredDecoder::Make(request),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("FP8 output only")));
}

// A client that would make other pages than the server must not try.
TEST_F(StoredTransfer, AnotherModelIdIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Register("kivi2"));
  v1::RegisterModelResponse reply;
  reply.set_model_id("another");
  reply.set_page_tokens(kPage);
  EXPECT_THAT(ResolveRegistered(request_, reply),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("another"), HasSubstr(model_->id))));
}

}  // namespace
}  // namespace kvtier::client
