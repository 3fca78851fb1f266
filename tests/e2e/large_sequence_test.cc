// One sequence of more bytes than 32 bits can count, written by two streams of which one takes
// over.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

#include "client/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

constexpr std::uint32_t kHeads = 8, kDim = 256;
constexpr std::size_t kRowBytes = std::size_t{kHeads} * kDim * 2;  // of K, as of V
constexpr std::uint64_t kChunkTokens = 512;
constexpr std::uint64_t kTokens = (std::uint64_t{9} << 29) / (2 * kRowBytes);  // 4.5 GiB
constexpr std::int64_t kNeededKib = std::int64_t{8} << 20;

std::int64_t AvailableKib() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::int64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib;
  }
  return 0;
}

// Zeros but for the token's number and who wrote it, 14 bits a value: no NaN is among them.
std::string Rows(std::uint64_t first, std::uint64_t tokens, std::uint16_t writer) {
  std::string rows(tokens * kRowBytes, '\0');
  for (std::uint64_t i = 0; i < tokens; ++i) {
    const std::uint64_t token = first + i;
    const std::uint16_t values[] = {static_cast<std::uint16_t>(token & 0x3fff),
                                    static_cast<std::uint16_t>(token >> 14 & 0x3fff), writer};
    std::memcpy(rows.data() + i * kRowBytes, values, sizeof values);
  }
  return rows;
}

absl::Status Send(client::AppendStream& stream, std::uint64_t first, std::uint64_t end,
                  std::uint16_t writer) {
  for (; first < end; first += kChunkTokens) {
    v1::AppendChunk chunk;
    chunk.set_first_token(first);
    chunk.set_num_tokens(static_cast<std::uint32_t>(std::min(kChunkTokens, end - first)));
    chunk.set_k(Rows(first, chunk.num_tokens(), writer));
    chunk.set_v(chunk.k());
    if (absl::Status sent = stream.Send(std::move(chunk)); !sent.ok()) return sent;
  }
  return absl::OkStatus();
}

TEST(LargeSequence, IsWholeAndOfOneWriterAtATime) {
  if (AvailableKib() < kNeededKib)
    GTEST_SKIP() << AvailableKib() << " KiB of memory are available; " << kNeededKib
                 << " are needed";
  LiveServer server({"--memory=5GiB"});
  v1::RegisterModelRequest request = SmallModel("auto", /*layers=*/1);
  v1::LayerSpec& layer = *request.mutable_spec()->mutable_layers(0);
  layer.set_kv_heads(kHeads);
  layer.set_k_head_dim(kDim);
  layer.set_v_head_dim(kDim);
  const auto model = server.client().RegisterModel(request);
  ASSERT_THAT(model, IsOk());

  const auto first = OpenStream(server.client(), model->model_id(), "s", /*epoch=*/1);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(Send(**first, 0, 4 * kChunkTokens, 1), IsOk());
  WaitForChunks(**first, 4);
  EXPECT_EQ(client::ErrorReason(OpenStream(server.client(), model->model_id(), "s", 1).status()),
            "WRITER_EXISTS");
  const auto second = OpenStream(server.client(), model->model_id(), "s", /*epoch=*/2);
  ASSERT_THAT(second, IsOk());
  // What the first had is skipped, and nothing of its comes any more.
  const absl::Status late = Send(**first, 4 * kChunkTokens, 8 * kChunkTokens, 1);
  ASSERT_THAT(Send(**second, 2 * kChunkTokens, kTokens, 2), IsOk());
  const auto ack = (*second)->Finish();
  ASSERT_THAT(ack, IsOk());
  EXPECT_EQ(ack->committed_tokens, kTokens);
  const absl::Status end = late.ok() ? (*first)->Finish().status() : late;
  EXPECT_EQ(client::ErrorReason(end), "OLD_EPOCH") << end;
  v1::SealRequest seal;
  seal.set_sequence("s");
  seal.set_tokens(kTokens);
  ASSERT_THAT(server.client().Seal(seal), IsOk());

  v1::ReadRequest read;
  read.add_sequences()->set_sequence("s");
  client::ReadHandlers handlers;
  std::uint64_t wrong = 0;
  handlers.on_chunk = [&](const v1::ReadChunk& chunk) {
    for (std::uint64_t i = 0; i < chunk.num_tokens(); ++i) {
      const std::uint64_t token = chunk.first_token() + i;
      const std::string want = Rows(token, 1, token < 4 * kChunkTokens ? 1 : 2);
      for (const std::string* side : {&chunk.k(), &chunk.v()})
        wrong += side->compare(i * kRowBytes, kRowBytes, want) == 0 ? 0 : 1;
    }
    return absl::OkStatus();
  };
  const auto result = server.client().Read(read, handlers);
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(result->manifest.total_bytes(), kTokens * 2 * kRowBytes);
  EXPECT_EQ(result->manifest.sequences(0).num_tokens(), kTokens);
}

}  // namespace
}  // namespace kvtier::testing
