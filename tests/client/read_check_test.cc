#include "client/read_check.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::StatusIs;
using ::testing::HasSubstr;

// Tokens 10..15 of layers 2 and 3, two heads, K dim 4, V dim 2, 16 bit.
v1::ReadManifest Manifest() {
  v1::ReadManifest manifest;
  v1::SequenceManifest& sequence = *manifest.add_sequences();
  sequence.set_sequence("s");
  sequence.set_first_token(10);
  sequence.set_num_tokens(6);
  for (std::uint32_t i = 2; i < 4; ++i) {
    v1::LayerManifest& layer = *sequence.add_layers();
    layer.set_layer(i);
    layer.set_num_heads(2);
    layer.set_k_head_dim(4);
    layer.set_v_head_dim(2);
    layer.set_dtype(v1::DTYPE_BF16);
  }
  manifest.set_total_bytes(2 * 6 * 2 * (4 + 2) * 2);
  return manifest;
}

v1::ReadChunk Chunk(std::uint32_t layer, std::uint64_t first, std::uint32_t tokens) {
  v1::ReadChunk chunk;
  chunk.set_layer(layer);
  chunk.set_first_token(first);
  chunk.set_num_tokens(tokens);
  chunk.set_k(std::string(tokens * 2 * 4 * 2, 'k'));
  chunk.set_v(std::string(tokens * 2 * 2 * 2, 'v'));
  return chunk;
}

absl::Status BeginWith(const std::function<void(v1::ReadManifest&)>& change) {
  v1::ReadManifest manifest = Manifest();
  change(manifest);
  ReadCheck check;
  return check.Begin(manifest, 1);
}

TEST(ReadCheck, TakesWhatTheManifestPromised) {
  ReadCheck check;
  ASSERT_THAT(check.Begin(Manifest(), 1), IsOk());
  EXPECT_THAT(check.Take(Chunk(2, 10, 4)), IsOk());
  EXPECT_THAT(check.Take(Chunk(2, 14, 2)), IsOk());
  EXPECT_THAT(check.End(), StatusIs(absl::StatusCode::kDataLoss,
                                    HasSubstr("layer 3 ended at token 10; the manifest says 16")));
  EXPECT_THAT(check.Take(Chunk(3, 10, 6)), IsOk());
  EXPECT_THAT(check.End(), IsOk());
  EXPECT_EQ(check.layer_index(Chunk(3, 10, 6)), 1u);
}

struct BadChunk {
  std::function<void(v1::ReadChunk&)> change;
  const char* message;
};

TEST(ReadCheck, RefusesAChunkThatWasNotPromised) {
  const std::vector<BadChunk> bad = {
      {[](v1::ReadChunk& c) { c.set_sequence_index(1); }, "sequence 1"},
      {[](v1::ReadChunk& c) { c.set_layer(1); }, "layer 1, which the manifest"},
      {[](v1::ReadChunk& c) { c.set_layer(4); }, "layer 4, which the manifest"},
      {[](v1::ReadChunk& c) { c.set_first_token(11); }, "from 11; from 10 on 6"},
      {[](v1::ReadChunk& c) { c.set_num_tokens(7); }, "brings 7 tokens"},
      {[](v1::ReadChunk& c) { c.set_num_tokens(0); }, "brings 0 tokens"},
      {[](v1::ReadChunk& c) { c.mutable_k()->pop_back(); }, "31 bytes of K and 16 of V"},
      {[](v1::ReadChunk& c) { c.mutable_v()->push_back('x'); }, "32 bytes of K and 17 of V"},
  };
  for (const BadChunk& chunk : bad) {
    ReadCheck check;
    ASSERT_THAT(check.Begin(Manifest(), 1), IsOk());
    v1::ReadChunk changed = Chunk(2, 10, 2);
    chunk.change(changed);
    EXPECT_THAT(check.Take(changed),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(chunk.message)));
  }
}

// Chunks of different layers take turns, and the summary says how far they were to come.
TEST(ReadCheck, TakesWhatIsFollowedAsItComes) {
  v1::ReadManifest manifest = Manifest();
  manifest.set_total_bytes(0);
  manifest.mutable_sequences(0)->set_num_tokens(0);
  ReadCheck check;
  ASSERT_THAT(check.Begin(manifest, 1, ReadKind::kFollowed), IsOk());
  EXPECT_THAT(check.Take(Chunk(2, 10, 4)), IsOk());
  EXPECT_THAT(check.Take(Chunk(3, 10, 9)), IsOk());
  EXPECT_THAT(check.Take(Chunk(2, 15, 4)),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("4 tokens from 15; from 14")));
  EXPECT_THAT(check.Take(Chunk(2, 14, 5)), IsOk());
  EXPECT_THAT(check.End(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("of 0 sequences")));
  v1::ReadSummary summary;
  summary.add_tokens(10);
  ReadCheck longer = check;
  EXPECT_THAT(longer.End(summary),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("ended at token 19")));
  summary.set_tokens(0, 9);
  EXPECT_THAT(check.End(summary), IsOk());
  ReadCheck known;
  ASSERT_THAT(known.Begin(Manifest(), 1, ReadKind::kFollowed), IsOk());
  EXPECT_THAT(known.End(summary),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("says 9 tokens of sequence s")));
}

TEST(ReadCheck, RefusesAChunkTwice) {
  ReadCheck check;
  ASSERT_THAT(check.Begin(Manifest(), 1), IsOk());
  ASSERT_THAT(check.Take(Chunk(2, 10, 6)), IsOk());
  EXPECT_THAT(check.Take(Chunk(2, 10, 6)),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("from 16 on 0 are expected")));
}

// Of a layer with a window the tokens begin later, and end where all do.
TEST(ReadCheck, TakesOfEachLayerWhatItsWindowSees) {
  v1::ReadManifest manifest = Manifest();
  manifest.mutable_sequences(0)->mutable_layers(1)->set_first_token(14);
  manifest.set_total_bytes((6 + 2) * 2 * (4 + 2) * 2);
  ReadCheck check;
  ASSERT_THAT(check.Begin(manifest, 1), IsOk());
  EXPECT_THAT(check.Take(Chunk(2, 10, 6)), IsOk());
  EXPECT_THAT(check.Take(Chunk(3, 10, 6)),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("from 14 on 2 are expected")));
  EXPECT_THAT(check.Take(Chunk(3, 14, 2)), IsOk());
  EXPECT_THAT(check.End(), IsOk());
}

TEST(ReadCheck, RefusesAManifestThatContradictsItself) {
  ReadCheck check;
  EXPECT_THAT(check.Begin(Manifest(), 2),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("has 1 sequences; 2 were")));
  EXPECT_THAT(
      BeginWith([](v1::ReadManifest& m) { m.set_total_bytes(1); }),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("says 1 bytes, but its layers take 288")));
  EXPECT_THAT(BeginWith([](v1::ReadManifest& m) {
                m.mutable_sequences(0)->mutable_layers(1)->set_layer(9);
              }),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("layer 9 stands in place 1")));
  EXPECT_THAT(BeginWith([](v1::ReadManifest& m) {
                m.mutable_sequences(0)->mutable_layers(0)->clear_dtype();
              }),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("unknown type 0")));
  for (const std::uint64_t first : {9, 17}) {
    EXPECT_THAT(BeginWith([first](v1::ReadManifest& m) {
                  m.mutable_sequences(0)->mutable_layers(1)->set_first_token(first);
                }),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("layer 3 begins at token")));
  }
  EXPECT_THAT(BeginWith([](v1::ReadManifest& m) { m.mutable_sequences(0)->set_num_tokens(~0ull); }),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("larger than 64 bits")));
}

// FP8 without its scales would be read as numbers of another size.
TEST(ReadCheck, RefusesFp8WithoutScales) {
  const auto fp8 = [](v1::ReadManifest& m, int k_scales, int v_scales) {
    for (v1::LayerManifest& layer : *m.mutable_sequences(0)->mutable_layers()) {
      layer.set_dtype(v1::DTYPE_FP8_E4M3);
      for (int i = 0; i < k_scales; ++i) layer.add_k_scale(0.5F);
      for (int i = 0; i < v_scales; ++i) layer.add_v_scale(0.5F);
    }
    m.set_total_bytes(m.total_bytes() / 2);
  };
  EXPECT_THAT(BeginWith([&](v1::ReadManifest& m) { fp8(m, 1, 2); }), IsOk());
  EXPECT_THAT(BeginWith([&](v1::ReadManifest& m) { fp8(m, 0, 1); }),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("0 K scales for 2 heads")));
  EXPECT_THAT(BeginWith([&](v1::ReadManifest& m) { fp8(m, 1, 3); }),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("3 V scales for 2 heads")));
  EXPECT_THAT(BeginWith([&](v1::ReadManifest& m) {
                m.mutable_sequences(0)->mutable_layers(0)->mutable_q_scale()->Resize(3, 1.0F);
              }),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("3 Q scales for 2 heads")));
}

// Every byte of a chunk goes to one place, and all places of the layer are met: checked by writing
// each byte's own (token, head, byte) and reading it off where it must lie.
TEST(ForEachRun, PutsEachVectorInItsPlace) {
  constexpr std::uint64_t kTokens = 11;
  constexpr std::uint64_t kHeads = 3;
  constexpr std::uint64_t kBytes = 2;
  const auto value = [](std::uint64_t token, std::uint64_t head, std::uint64_t byte) {
    return static_cast<char>(token * 16 + head * 4 + byte);
  };
  for (const v1::Layout layout : {v1::LAYOUT_NHD, v1::LAYOUT_HND}) {
    for (const std::uint64_t block : {0, 2, 4}) {
      const ReadGeometry geometry{.layout = layout,
                                  .block_tokens = block,
                                  .tokens = kTokens,
                                  .heads = kHeads,
                                  .vector_bytes = kBytes};
      std::string layer(kTokens * kHeads * kBytes, '\xFF');
      for (std::uint64_t first = 0; first < kTokens; first += 4) {
        const std::uint64_t count = std::min<std::uint64_t>(4, kTokens - first);
        const std::uint64_t in_block = block == 0 ? count : block;
        std::string chunk;
        for (std::uint64_t start = 0; start < count; start += in_block) {
          const std::uint64_t tokens = std::min(in_block, count - start);
          for (std::uint64_t i = 0; i < tokens * kHeads; ++i) {
            const std::uint64_t token = layout == v1::LAYOUT_NHD ? i / kHeads : i % tokens;
            const std::uint64_t head = layout == v1::LAYOUT_NHD ? i % kHeads : i / tokens;
            for (std::uint64_t b = 0; b < kBytes; ++b) {
              chunk.push_back(value(first + start + token, head, b));
            }
          }
        }
        EXPECT_THAT(ForEachRun(geometry, first, count,
                               [&](const ByteRun& run) {
                                 std::memcpy(layer.data() + run.layer_offset,
                                             chunk.data() + run.chunk_offset, run.size);
                                 return absl::OkStatus();
                               }),
                    IsOk());
      }
      for (std::uint64_t t = 0; t < kTokens; ++t) {
        for (std::uint64_t h = 0; h < kHeads; ++h) {
          const std::uint64_t vector = layout == v1::LAYOUT_NHD ? t * kHeads + h : h * kTokens + t;
          EXPECT_EQ(layer[vector * kBytes], value(t, h, 0)) << layout << " " << block;
          EXPECT_EQ(layer[vector * kBytes + 1], value(t, h, 1)) << layout << " " << block;
        }
      }
    }
  }
}

TEST(ForEachRun, StopsAtAnError) {
  int calls = 0;
  const ReadGeometry geometry{
      .layout = v1::LAYOUT_HND, .block_tokens = 0, .tokens = 4, .heads = 3, .vector_bytes = 2};
  EXPECT_THAT(ForEachRun(geometry, 0, 4,
                         [&](const ByteRun&) {
                           ++calls;
                           return absl::CancelledError("enough");
                         }),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("enough")));
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace kvtier::client
