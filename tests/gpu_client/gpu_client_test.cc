// K and V between a worker's GPU and a server's: the same values as inside messages, in every
// layout and block size, and what fails costs one transport. Server and worker are two processes;
// their GPUs are emulated and NCCL is a substitute, or both use one real GPU, as two hosts would.
#include "client/gpu_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include "client/error_reason.h"
#include "tests/e2e/live_server.h"
#include "tests/support/scrape.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/variable.h"

namespace kvtier::testing {
namespace {

using client::GpuClient;
using client::GpuOptions;
using ::testing::HasSubstr;

constexpr int kLayers = 2;
constexpr int kHeads = 2;
constexpr int kDim = 64;
constexpr std::int64_t kRow = kDim * 2;  // bytes of a head's token, in bf16
constexpr std::int64_t kTokenBytes = kHeads * kRow;

// Memory of the worker's GPU, by way of pinned host memory.
class GpuBytes {
 public:
  explicit GpuBytes(std::size_t bytes)
      : size_(bytes),
        gpu_(client::AllocateOnGpu(static_cast<std::int64_t>(bytes)).value()),
        host_(client::AllocatePinned(static_cast<std::int64_t>(bytes)).value()) {
    Set(std::string(bytes, '\x5a'));
  }
  void Set(const std::string& bytes) {
    std::memcpy(host_.get(), bytes.data(), size_);
    Copy(gpu_.get(), host_.get(), cudaMemcpyHostToDevice);
  }
  std::string Get() const {
    Copy(host_.get(), gpu_.get(), cudaMemcpyDeviceToHost);
    return {reinterpret_cast<const char*>(host_.get()), size_};
  }
  std::byte* data() const { return gpu_.get(); }
  transport::DevicePiece piece() const { return {data(), static_cast<std::int64_t>(size_)}; }

 private:
  void Copy(std::byte* to, const std::byte* from, cudaMemcpyKind kind) const {
    const client::GpuStream stream = client::MakeGpuStream().value();
    EXPECT_EQ(cudaMemcpyAsync(to, from, size_, kind, stream.get()), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  }

  std::size_t size_;
  client::GpuMemory gpu_;
  client::PinnedMemory host_;
};

// Finite bf16 values of all sizes below 2.
std::string RandomRows(Random& random, std::int64_t tokens) {
  std::string bytes(static_cast<std::size_t>(tokens * kTokenBytes), '\0');
  for (std::size_t i = 0; i < bytes.size(); i += 2) {
    const auto bits = static_cast<std::uint16_t>(random.Between(0, 0xffff) & 0xbfff);
    std::memcpy(bytes.data() + i, &bits, sizeof(bits));
  }
  return bytes;
}

using Rows = std::vector<std::string>;  // K, V of layer 0, of layer 1

v1::ReadRequest RequestFor(const std::string& sequence) {
  v1::ReadRequest request;
  request.add_sequences()->set_sequence(sequence);
  return request;
}

class GpuTransfers : public ::testing::Test {
 protected:
  // With a GPU that isn't the server's, as the substitutes see it.
  void Start(const std::vector<std::string>& flags = {}, const std::string& device = "cuda:0") {
    std::vector<std::string> all = {"--memory=128MiB", "--nccl-library=" KVTIER_NCCL,
                                    "--nccl-memory=1MiB"};
    all.insert(all.end(), flags.begin(), flags.end());
    {
      const Variable of_server("TEST_DEVICE", device);
      server_.emplace(all);
    }
    host_.emplace("NCCL_HOSTID", "worker");
    client_ = server_->Connect({.transport = client::Transport::kInline});
    gpu_ = Make({});
    ASSERT_NE(gpu_, nullptr);
  }
  std::unique_ptr<GpuClient> Make(GpuOptions options) {
    options.nccl_library = KVTIER_NCCL;
    options.deadline = absl::Seconds(5);
    options.tell = [this](const std::string& said) { said_ += said + "\n"; };
    auto made = GpuClient::Make(*client_, options);
    EXPECT_THAT(made, IsOk());
    return made.ok() ? *std::move(made) : nullptr;
  }

  std::string Register(const std::string& format) {
    const auto registered = client_->RegisterModel(SmallModel(format, kLayers));
    EXPECT_THAT(registered, IsOk());
    return registered.ok() ? registered->model_id() : "";
  }

  Rows RandomData(std::int64_t tokens) {
    Rows rows(2 * kLayers);
    for (std::string& each : rows) each = RandomRows(random_, tokens);
    return rows;
  }

  // NHD, `step` tokens a chunk.
  static absl::Status Append(GpuClient& gpu, const std::string& model, const std::string& sequence,
                             const Rows& rows, std::int64_t step = 500) {
    client::AppendOptions options;
    options.open.set_sequence(sequence);
    options.open.set_model_id(model);
    auto stream = gpu.OpenAppend(options);
    if (!stream.ok()) return stream.status();
    std::vector<GpuBytes> memory;
    for (const std::string& each : rows) memory.emplace_back(each.size()).Set(each);
    const client::GpuStream computes = client::MakeGpuStream().value();
    const auto tokens = static_cast<std::int64_t>(rows[0].size()) / kTokenBytes;
    for (std::int64_t first = 0; first < tokens; first += step) {
      const std::int64_t count = std::min(step, tokens - first);
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        client::GpuChunk chunk;
        chunk.place.set_first_layer(layer);
        chunk.place.set_first_token(static_cast<std::uint64_t>(first));
        chunk.place.set_num_tokens(static_cast<std::uint32_t>(count));
        chunk.k = {memory[2 * layer].data() + first * kTokenBytes, count * kTokenBytes};
        chunk.v = {memory[2 * layer + 1].data() + first * kTokenBytes, count * kTokenBytes};
        const absl::Status sent = (*stream)->Send(chunk, computes.get());
        if (!sent.ok()) return sent;
      }
    }
    return (*stream)->Finish().status();
  }

  static std::size_t RowBytes(const v1::SequenceManifest& sequence) {
    return sequence.layers(0).dtype() == v1::DTYPE_FP8_E4M3 ? kDim : kDim * 2;
  }

  // As ReadInto puts them together.
  static absl::StatusOr<Rows> ReadOnHost(client::Client& client, const v1::ReadRequest& request) {
    Rows out;
    const auto read =
        client.ReadInto(request,
                        [&](const v1::SequenceManifest& sequence)
                            -> absl::StatusOr<std::vector<client::LayerTarget>> {
                          std::vector<client::LayerTarget> targets;
                          out.assign(2 * kLayers, std::string(sequence.num_tokens() *
                                                                  sequence.layers(0).num_heads() *
                                                                  RowBytes(sequence),
                                                              '\0'));
                          for (std::size_t i = 0; i < out.size(); i += 2) {
                            targets.push_back({.k = std::as_writable_bytes(std::span(out[i])),
                                               .v = std::as_writable_bytes(std::span(out[i + 1]))});
                          }
                          return targets;
                        });
    if (!read.ok()) return read.status();
    return out;
  }
  static absl::StatusOr<Rows> ReadOnGpu(GpuClient& gpu, const v1::ReadRequest& request) {
    std::vector<GpuBytes> memory;
    const auto read =
        gpu.Read(request,
                 [&](const v1::SequenceManifest& sequence)
                     -> absl::StatusOr<std::vector<client::GpuLayerTarget>> {
                   memory.clear();
                   std::vector<client::GpuLayerTarget> targets;
                   for (int i = 0; i < 2 * kLayers; ++i) {
                     memory.emplace_back(sequence.num_tokens() * sequence.layers(0).num_heads() *
                                         RowBytes(sequence));
                   }
                   for (std::size_t i = 0; i < memory.size(); i += 2) {
                     targets.push_back(
                         {.k = {.data = memory[i].data()}, .v = {.data = memory[i + 1].data()}});
                   }
                   return targets;
                 });
    if (!read.ok()) return read.status();
    Rows out;
    for (const GpuBytes& each : memory) out.push_back(each.Get());
    return out;
  }
  // Waits until so many are open at the server; how many are.
  int WaitForTransports(int wanted) {
    int open = -1;
    for (int look = 0; look < 100 && open != wanted; ++look) {
      if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      open = static_cast<int>(Series(Scrape(server_->metrics()))["kvtier_transports"]);
    }
    return open;
  }

  SeededRandom random_;
  std::string said_;
  std::optional<LiveServer> server_;
  std::optional<Variable> host_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<GpuClient> gpu_;  // goes first
};

TEST_F(GpuTransfers, EveryFormatLayoutAndBlockSizeGivesWhatMessagesGive) {
  Start();
  constexpr std::int64_t kTokens = 3001;  // more than a transport's memory takes at once
  const Rows data = RandomData(kTokens);
  for (const auto* format : {"auto", "fp8_e4m3", "int8_per_token_head", "kivi2"}) {
    const std::string model = Register(format);
    ASSERT_THAT(Append(*gpu_, model, format, data), IsOk()) << format;
    for (const v1::Layout layout : {v1::LAYOUT_NHD, v1::LAYOUT_HND}) {
      for (const std::uint32_t block_tokens : {0u, 48u}) {
        for (const v1::ReadAs as : {v1::READ_AS_SOURCE, v1::READ_AS_FP8_E4M3}) {
          v1::ReadRequest request = RequestFor(format);
          request.set_layout(layout);
          request.set_block_tokens(block_tokens);
          request.set_as(as);
          const auto by_nccl = ReadOnGpu(*gpu_, request);
          const auto inside = ReadOnHost(*client_, request);
          ASSERT_THAT(by_nccl, IsOk()) << format;
          ASSERT_THAT(inside, IsOk()) << format;
          EXPECT_TRUE(*by_nccl == *inside)
              << format << ", layout " << layout << ", blocks of " << block_tokens << ", as " << as;
        }
      }
    }
    if (format == std::string("auto")) {
      const auto kept = ReadOnGpu(*gpu_, RequestFor(format));
      EXPECT_TRUE(kept.value() == data);
    }
  }
  EXPECT_EQ(gpu_->transport(), "nccl");
  EXPECT_EQ(said_, "nccl\n");
}

TEST_F(GpuTransfers, BlocksGoWhereTheTableSays) {
  Start();
  constexpr std::int64_t kTokens = 1000;
  constexpr std::int64_t kBlock = 48, kBlocks = (kTokens + kBlock - 1) / kBlock;
  const Rows data = RandomData(kTokens);
  ASSERT_THAT(Append(*gpu_, Register("auto"), "s", data), IsOk());
  std::vector<std::uint32_t> ids(2 * kBlocks);
  std::iota(ids.begin(), ids.end(), 0u);
  std::shuffle(ids.begin(), ids.end(), random_.engine());
  ids.resize(kBlocks);
  for (const v1::Layout layout : {v1::LAYOUT_NHD, v1::LAYOUT_HND}) {
    constexpr std::int64_t kStride = kBlock * kTokenBytes + 512;
    std::vector<GpuBytes> memory;
    for (int i = 0; i < 2 * kLayers; ++i)
      memory.emplace_back(static_cast<std::size_t>(2 * kBlocks * kStride));
    v1::ReadRequest request = RequestFor("s");
    request.set_layout(layout);
    request.set_block_tokens(kBlock);
    const auto read = gpu_->Read(request, [&](const v1::SequenceManifest&) {
      std::vector<client::GpuLayerTarget> targets;
      for (std::size_t i = 0; i < memory.size(); i += 2) {
        targets.push_back(
            {.k = {.data = memory[i].data(), .block_ids = ids, .block_stride = kStride},
             .v = {.data = memory[i + 1].data(), .block_ids = ids, .block_stride = kStride}});
      }
      return targets;
    });
    ASSERT_THAT(read, IsOk());
    for (std::size_t i = 0; i < memory.size(); ++i) {
      std::string want(static_cast<std::size_t>(2 * kBlocks * kStride), '\x5a');
      for (std::int64_t token = 0; token < kTokens; ++token) {
        for (std::int64_t head = 0; head < kHeads; ++head) {
          const std::int64_t in = token % kBlock;
          const std::int64_t row =
              layout == v1::LAYOUT_NHD ? in * kHeads + head : head * kBlock + in;
          const auto block =
              static_cast<std::int64_t>(ids[static_cast<std::size_t>(token / kBlock)]);
          std::memcpy(want.data() + block * kStride + row * kRow,
                      data[i].data() + (token * kHeads + head) * kRow, kRow);
        }
      }
      EXPECT_TRUE(memory[i].Get() == want) << "layout " << layout << ", tensor " << i;
    }
  }
}

TEST_F(GpuTransfers, ManyAtOnceShareTwoTransports) {
  Start({"--max-nccl-transports=2"});
  gpu_ = Make({.path = GpuOptions::Path::kNccl});
  const std::string model = Register("auto");
  constexpr int kThreads = 6;
  std::vector<Rows> data;
  for (int i = 0; i < kThreads; ++i) data.push_back(RandomData(700 + 300 * i));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const std::string name = "s" + std::to_string(i);
      const Rows& rows = data[static_cast<std::size_t>(i)];
      EXPECT_THAT(Append(*gpu_, model, name, rows, 150), IsOk());
      for (int read = 0; read < 3; ++read) {
        const auto got = ReadOnGpu(*gpu_, RequestFor(name));
        ASSERT_THAT(got, IsOk());
        EXPECT_TRUE(*got == rows);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(WaitForTransports(2), 2);
}

// Layer by layer as they are received, from one GPU through the server to another place on it.
TEST_F(GpuTransfers, WhatIsStillAppendedIsFollowed) {
  Start();
  const std::string model = Register("auto");
  const Rows data = RandomData(1200);
  client::AppendOptions options;
  options.open.set_sequence("s");
  options.open.set_model_id(model);
  ASSERT_THAT(gpu_->OpenAppend(options).value()->Finish(), IsOk());  // opens it
  v1::ReadRequest request = RequestFor("s");
  request.set_follow(true);
  request.mutable_sequences(0)->set_num_tokens(1200);
  absl::StatusOr<Rows> followed = absl::UnknownError("");
  std::thread reader([&] { followed = ReadOnGpu(*gpu_, request); });
  EXPECT_THAT(Append(*gpu_, model, "s", data, 100), IsOk());
  reader.join();
  ASSERT_THAT(followed, IsOk());
  EXPECT_TRUE(*followed == data);
  request.mutable_sequences(0)->clear_num_tokens();
  EXPECT_THAT(std::string(ReadOnGpu(*gpu_, request).status().message()),
              HasSubstr("follow is set and num_tokens is 0"));
}

TEST_F(GpuTransfers, WhatIsRefusedCostsNobodyElse) {
  Start();
  const std::string model = Register("int8_per_token_head");
  Rows bad = RandomData(40);
  const std::uint16_t nan = 0x7fc0;
  std::memcpy(bad[2].data() + 7 * kTokenBytes + kRow + 2 * 5, &nan, sizeof nan);
  const absl::Status refused = Append(*gpu_, model, "bad", bad);
  EXPECT_EQ(client::ErrorReason(refused), "NON_FINITE_VALUE") << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("k of layer 1, head 1, token 7, channel 5 is nan"));
  EXPECT_THAT(Append(*gpu_, model, "good", RandomData(40)), IsOk());
  EXPECT_THAT(ReadOnGpu(*gpu_, RequestFor("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(ReadOnGpu(*gpu_, RequestFor("good")), IsOk());
}

TEST_F(GpuTransfers, AReadThatIsBrokenOffTakesItsTransportAlong) {
  Start();
  const Rows data = RandomData(3000);
  ASSERT_THAT(Append(*gpu_, Register("auto"), "s", data), IsOk());
  const auto broken = gpu_->Read(
      RequestFor("s"), [](const v1::SequenceManifest&) { return absl::AbortedError("no place"); });
  EXPECT_EQ(broken.status(), absl::AbortedError("no place"));
  const auto again = ReadOnGpu(*gpu_, RequestFor("s"));
  ASSERT_THAT(again, IsOk());
  EXPECT_TRUE(*again == data);
}

TEST_F(GpuTransfers, OneThatNobodyUsesIsClosedAndOpenedAgain) {
  Start({"--nccl-idle=1s"});
  const Rows data = RandomData(100);
  ASSERT_THAT(Append(*gpu_, Register("auto"), "s", data), IsOk());
  ASSERT_THAT(ReadOnGpu(*gpu_, RequestFor("s")), IsOk());
  EXPECT_EQ(WaitForTransports(0), 0);
  EXPECT_TRUE(ReadOnGpu(*gpu_, RequestFor("s")).value() == data);
  EXPECT_THAT(Append(*gpu_, Register("auto"), "t", data), IsOk());
}

// Whose worker may be gone for good.
TEST_F(GpuTransfers, OneThatIsIdleMakesRoomForAnother) {
  Start({"--max-nccl-transports=1"});
  const Rows data = RandomData(100);
  ASSERT_THAT(Append(*gpu_, Register("auto"), "s", data), IsOk());
  const auto other = Make({.path = GpuOptions::Path::kNccl});
  absl::StatusOr<Rows> read = absl::UnknownError("");
  for (int look = 0; look < 20 && !read.ok(); ++look) read = ReadOnGpu(*other, RequestFor("s"));
  ASSERT_THAT(read, IsOk());
  EXPECT_TRUE(*read == data);
  EXPECT_EQ(WaitForTransports(1), 1);
}

TEST_F(GpuTransfers, AServerOnHostMemorySaysSoAndTheHostCarriesIt) {
  Start({}, "host");
  const Rows data = RandomData(300);
  ASSERT_THAT(Append(*gpu_, Register("auto"), "s", data), IsOk());
  EXPECT_TRUE(ReadOnGpu(*gpu_, RequestFor("s")).value() == data);
  EXPECT_EQ(gpu_->transport(), "host");
  EXPECT_THAT(said_, HasSubstr("host: no NCCL here: pages lie in host memory (--device)"));
  const auto only = Make({.path = GpuOptions::Path::kNccl});
  const auto refused = ReadOnGpu(*only, RequestFor("s"));
  EXPECT_EQ(client::ErrorReason(refused.status()), "TRANSPORT_UNAVAILABLE") << refused.status();
}

TEST_F(GpuTransfers, TheServersOwnGpuIsRefused) {
  Start();
  host_.reset();
  auto made = GpuClient::Make(
      *client_,
      {.device = 0, .path = GpuOptions::Path::kNccl, .nccl_library = KVTIER_NCCL, .tell = {}});
  ASSERT_THAT(made, IsOk());
  const absl::Status refused = ReadOnGpu(**made, RequestFor("s")).status();
  EXPECT_EQ(client::ErrorReason(refused), "TRANSPORT_UNAVAILABLE") << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the server's own; NCCL wants two"));
}

#if KVTIER_EMULATED
TEST_F(GpuTransfers, AnotherVersionIsRefusedBeforeAnythingIsBegun) {
  {
    const Variable version("FAKE_NCCL_VERSION", "22703");
    Start();
  }
  const auto only = Make({.path = GpuOptions::Path::kNccl});
  const absl::Status refused = ReadOnGpu(*only, RequestFor("s")).status();
  EXPECT_EQ(client::ErrorReason(refused), "TRANSPORT_UNAVAILABLE");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the server's is 22703"));
}

// NCCL hangs at the server: its reads and appends fail in time, all else goes on.
TEST_F(GpuTransfers, WhatHangsIsLostInTime) {
  {
    const Variable fault("FAKE_NCCL_FAULT", "op_hang");
    Start({"--nccl-deadline=1s"});
  }
  const std::string model = Register("auto");
  const Rows data = RandomData(100);
  const absl::Status append = Append(*gpu_, model, "s", data);
  EXPECT_EQ(client::ErrorReason(append), "TRANSPORT_LOST") << append;
  ASSERT_THAT(AppendAll(*client_, model, "t", 100), IsOk());
  EXPECT_THAT(ReadOnHost(*client_, RequestFor("t")), IsOk());
  const absl::Status read = ReadOnGpu(*gpu_, RequestFor("t")).status();
  EXPECT_FALSE(read.ok());
  EXPECT_THAT(ReadOnHost(*client_, RequestFor("t")), IsOk());
}
#endif

}  // namespace
}  // namespace kvtier::testing
