// K and V between a worker's GPU and a server's: the same values as inside messages, in every
// layout and block size, and what fails costs one transport. Server and worker are two processes;
// their GPUs are emulated and NCCL is a substitute, or both use one real GPU, as two hosts would.
#include "client/gpu_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <numeric>
#include <thread>

#include "client/error_reason.h"
#include "tests/gpu_client/gpu_transfers.h"

namespace kvtier::testing {
namespace {

using ::testing::HasSubstr;

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
  Rows first;
  for (const std::string& rows : data) first.push_back(rows.substr(0, 100 * kTokenBytes));
  ASSERT_THAT(Append(*gpu_, model, "s", first), IsOk());
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

// The server's kernels read what the worker's stream writes before the append, however late that
// is.
TEST_F(GpuTransfers, AnAppendWaitsForWhatComputesItsValues) {
  Start();
  const std::string model = Register("auto");
  const Rows data = RandomData(200);
  client::AppendOptions options;
  options.open.set_sequence("s");
  options.open.set_model_id(model);
  const auto append = gpu_->OpenAppend(options).value();
  const client::GpuStream computes = client::MakeGpuStream().value();
  const GpuBytes scratch(32 << 20);
  std::vector<GpuBytes> late;  // 0x5a until they are copied
  std::vector<client::PinnedMemory> values;
  for (const std::string& rows : data) {
    late.emplace_back(rows.size());
    values.push_back(client::AllocatePinned(static_cast<std::int64_t>(rows.size())).value());
    std::memcpy(values.back().get(), rows.data(), rows.size());
  }
  for (int i = 0; i < (KVTIER_EMULATED ? 20 : 2000); ++i)
    ASSERT_EQ(cudaMemsetAsync(scratch.data(), i, 32 << 20, computes.get()), cudaSuccess);
  for (std::size_t i = 0; i < data.size(); ++i) {
    ASSERT_EQ(cudaMemcpyAsync(late[i].data(), values[i].get(), data[i].size(),
                              cudaMemcpyHostToDevice, computes.get()),
              cudaSuccess);
  }
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    client::GpuChunk chunk;
    chunk.place.set_first_layer(layer);
    chunk.place.set_num_tokens(200);
    chunk.k = late[2 * layer].piece();
    chunk.v = late[2 * layer + 1].piece();
    ASSERT_THAT(append->Send(chunk, computes.get()), IsOk());
  }
  EXPECT_EQ(cudaStreamQuery(computes.get()), cudaErrorNotReady) << "too early to show anything";
  ASSERT_THAT(append->Finish(), IsOk());
  EXPECT_TRUE(ReadOnGpu(*gpu_, RequestFor("s")).value() == data);
}

// Of prefill and decode workers that are cut in other ways.
TEST_F(GpuTransfers, HeadsAreAppendedAndReadByRange) {
  Start();
  const std::string model = Register("auto");
  const std::string rows = RandomRows(random_, 300);
  std::string of_head[kHeads];
  for (std::size_t at = 0; at < rows.size(); at += kRow)
    of_head[at / kRow % kHeads] += rows.substr(at, kRow);
  for (const std::uint32_t head : {0u, 1u}) {
    client::AppendOptions options;
    options.open.set_sequence("s");
    options.open.set_model_id(model);
    options.open.set_first_head(head);
    options.open.set_num_heads(1);
    const auto append = gpu_->OpenAppend(options).value();
    GpuBytes memory(of_head[head].size());
    memory.Set(of_head[head]);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      client::GpuChunk chunk;
      chunk.place.set_first_layer(layer);
      chunk.place.set_num_tokens(300);
      chunk.k = chunk.v = memory.piece();
      ASSERT_THAT(append->Send(chunk, nullptr), IsOk());
    }
    ASSERT_THAT(append->Finish(), IsOk());
  }
  EXPECT_EQ(ReadOnGpu(*gpu_, RequestFor("s")).value(), Rows(2 * kLayers, rows));
  v1::ReadRequest half = RequestFor("s");
  half.set_first_head(1);
  half.set_num_heads(1);
  EXPECT_EQ(ReadOnGpu(*gpu_, half).value(), Rows(2 * kLayers, of_head[1]));
}

TEST_F(GpuTransfers, AReadWhoseLeaseEndsMeanwhileFails) {
  Start();
  ASSERT_THAT(Append(*gpu_, Register("auto"), "s", RandomData(3000)), IsOk());
  v1::AcquireRequest acquire;
  acquire.set_sequence("s");
  acquire.set_duration_ms(200);
  const auto lease = client_->Acquire(acquire).value();
  v1::ReadRequest request;
  request.add_sequences()->set_lease_id(lease.lease_id());
  const GpuBytes memory(3000 * kTokenBytes);
  const auto read = gpu_->Read(request, [&](const v1::SequenceManifest&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const client::GpuTensor all{.data = memory.data()};
    return std::vector<client::GpuLayerTarget>(kLayers, {.k = all, .v = all});
  });
  EXPECT_EQ(client::ErrorReason(read.status()), "LEASE_ENDED") << read.status();
}

TEST_F(GpuTransfers, AServerThatRestartsIsFoundAgain) {
  Start();
  const std::string model = Register("auto");
  const Rows data = RandomData(300);
  ASSERT_THAT(Append(*gpu_, model, "s", data), IsOk());
  ASSERT_THAT(ReadOnGpu(*gpu_, RequestFor("s")), IsOk());
  const std::string address = server_->listen();
  server_->process().Signal(SIGKILL);
  server_->process().Wait(10);
  host_.reset();
  {
    const Variable of_server("TEST_DEVICE", "cuda:0");
    server_.emplace(std::vector<std::string>{std::string("--nccl-library=") + KVTIER_NCCL,
                                             "--nccl-memory=1MiB"},
                    address);
  }
  host_.emplace("NCCL_HOSTID", "worker");
  absl::Status appended;
  for (int tries = 0; tries < 100; ++tries) {
    appended = Append(*gpu_, model, "s", data);
    if (appended.ok()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_THAT(appended, IsOk());
  EXPECT_TRUE(ReadOnGpu(*gpu_, RequestFor("s")).value() == data);
  EXPECT_EQ(gpu_->transport(), "nccl");
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

TEST_F(GpuTransfers, AReadThatIsBrokenOffTakesItsTransportAlongAndNothingElse) {
  Start();
  const std::int64_t free = server_->FreeBytes();
  const Rows data = RandomData(3000);
  ASSERT_THAT(Append(*gpu_, Register("auto"), "s", data), IsOk());
  const auto broken = gpu_->Read(
      RequestFor("s"), [](const v1::SequenceManifest&) { return absl::AbortedError("no place"); });
  EXPECT_EQ(broken.status(), absl::AbortedError("no place"));
  const auto again = ReadOnGpu(*gpu_, RequestFor("s"));
  ASSERT_THAT(again, IsOk());
  EXPECT_TRUE(*again == data);
  v1::RemoveRequest remove;
  remove.set_sequence("s");
  EXPECT_THAT(client_->Remove(remove), IsOk());
  EXPECT_EQ(server_->WaitForFreeBytes(free), free);
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
TEST_F(GpuTransfers, TheCallersDeviceStaysAsItWas) {
  Start();
  const Variable two("FAKE_CUDA_DEVICES", "2");
  const std::string model = Register("auto");
  int device = -1;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_THAT(Append(*gpu_, model, "s", RandomData(10)), IsOk());
  EXPECT_THAT(ReadOnGpu(*gpu_, RequestFor("s")), IsOk());
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 1);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

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
