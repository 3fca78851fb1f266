// What a client that shares memory may do wrong: it's told what, and only it is hurt.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"
#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"
#include "transport/shm_handover.h"

namespace kvtier::testing {
namespace {

using ::testing::_;
using ::testing::HasSubstr;
using transport::UniqueFd;
using Code = absl::StatusCode;

constexpr std::int64_t kMaxShm = 4 << 20;

class ShmBadInput : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = std::make_unique<LiveServer>(
        std::vector<std::string>{"--memory=64MiB", "--max-shm=4MiB", "--max-transports=8"});
  }
  static void TearDownTestSuite() { server_.reset(); }

  void SetUp() override {
    client_ = server_->Connect({.transport = client::Transport::kInline});
    model_ = client_->RegisterModel(SmallModel("auto")).value().model_id();
    stub_ = v1::KvTierService::NewStub(
        grpc::CreateChannel(server_->listen(), grpc::InsecureChannelCredentials()));
  }
  // The server serves on, and has room for as much as before.
  void TearDown() override {
    for (const std::string& id : opened_) Close(id);
    EXPECT_TRUE(server_->process().running());
    absl::StatusOr<std::shared_ptr<const client::SharedMemory>> memory;
    for (int i = 0; i < 100; ++i) {  // another thread sees that a client went
      memory = client_->Share(kMaxShm);
      if (memory.ok()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_THAT(memory, IsOk());
  }

  void Close(const std::string& id) {
    grpc::ClientContext context;
    v1::CloseTransportRequest close;
    close.set_transport_id(id);
    v1::CloseTransportResponse closed;
    EXPECT_TRUE(stub_->CloseTransport(&context, close, &closed).ok());
  }
  v1::OpenTransportResponse Open() {
    grpc::ClientContext context;
    v1::OpenTransportRequest request;
    request.mutable_shm();
    v1::OpenTransportResponse response;
    EXPECT_TRUE(stub_->OpenTransport(&context, request, &response).ok());
    opened_.push_back(response.transport_id());
    return response;
  }
  static UniqueFd Connect(const std::string& socket) {
    return transport::ConnectShm(socket, absl::Seconds(10)).value();
  }
  // What the server says to a descriptor as shared memory.
  absl::Status Offer(UniqueFd fd) {
    const v1::OpenTransportResponse opened = Open();
    return transport::HandShm(Connect(opened.shm_socket()), opened.transport_id(), fd);
  }
  static UniqueFd Memory(std::int64_t bytes, unsigned seals) {
    UniqueFd fd(memfd_create("bad", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
    if (bytes > 0) {
      EXPECT_EQ(fallocate(fd.get(), 0, 0, bytes), 0);
    }
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    return fd;
  }

  absl::Status AppendAt(const client::SharedMemory& memory, std::uint64_t offset,
                        const std::function<void(v1::AppendChunk&)>& change = {},
                        bool names_transport = true) {
    client::AppendOptions options;
    options.open.set_sequence("s");
    options.open.set_model_id(model_);
    if (names_transport) options.open.set_transport_id(memory.transport_id());
    auto stream = client_->OpenAppend(options);
    if (!stream.ok()) return stream.status();
    v1::AppendChunk chunk;
    chunk.set_num_tokens(16);
    chunk.set_k_offset(offset);
    chunk.set_v_offset(offset);
    if (change) change(chunk);
    absl::Status sent = (*stream)->Send(std::move(chunk));
    return sent.ok() ? (*stream)->Finish().status() : sent;
  }
  absl::Status Read(const std::function<void(v1::ReadRequest&)>& change) {
    if (client_->Describe(Sequence()).status().code() == Code::kNotFound) {
      EXPECT_THAT(AppendAll(*client_, model_, "held", 100), IsOk());
    }
    v1::ReadRequest request;
    request.add_sequences()->set_sequence("held");
    change(request);
    return client_->Read(request, {}).status();
  }
  static v1::DescribeRequest Sequence() {
    v1::DescribeRequest request;
    request.set_sequence("held");
    return request;
  }

  static std::unique_ptr<LiveServer> server_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<v1::KvTierService::Stub> stub_;
  std::string model_;
  std::vector<std::string> opened_;
};
std::unique_ptr<LiveServer> ShmBadInput::server_;

TEST_F(ShmBadInput, MemoryThatCouldEndTheServerIsRefused) {
  constexpr unsigned kBoth = F_SEAL_SHRINK | F_SEAL_GROW;
  EXPECT_THAT(Offer(Memory(4096, F_SEAL_GROW)),
              StatusIs(Code::kFailedPrecondition, HasSubstr("not sealed against shrinking")));
  EXPECT_THAT(Offer(Memory(4096, F_SEAL_SHRINK)),
              StatusIs(Code::kFailedPrecondition, HasSubstr("not sealed against growing")));
  EXPECT_THAT(Offer(Memory(4096, kBoth | F_SEAL_WRITE)),
              StatusIs(Code::kFailedPrecondition, HasSubstr("can't be written to")));
  EXPECT_THAT(Offer(Memory(0, kBoth)), StatusIs(Code::kFailedPrecondition, HasSubstr("empty")));
  EXPECT_THAT(Offer(Memory(kMaxShm + 4096, kBoth)),
              StatusIs(Code::kResourceExhausted, HasSubstr("room for 4194304 more (--max-shm)")));
  // Who touches what isn't there yet pays for it.
  UniqueFd holes(memfd_create("holes", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(holes.get(), 1 << 20), 0);
  ASSERT_EQ(fcntl(holes.get(), F_ADD_SEALS, kBoth), 0);
  EXPECT_THAT(Offer(std::move(holes)),
              StatusIs(Code::kFailedPrecondition, HasSubstr("has 0 of its 1048576 bytes")));
  EXPECT_THAT(Offer(UniqueFd(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600))),
              StatusIs(Code::kFailedPrecondition, _));
  EXPECT_THAT(Offer(UniqueFd(open("/dev/zero", O_RDWR | O_CLOEXEC))),
              StatusIs(Code::kFailedPrecondition, HasSubstr("is no memfd")));
  // Of huge pages, of which there may be none: the touch would be a SIGBUS.
  if (UniqueFd huge(memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
      huge.ok() && ftruncate(huge.get(), 2 << 20) == 0) {
    ASSERT_EQ(fcntl(huge.get(), F_ADD_SEALS, kBoth), 0);
    EXPECT_THAT(Offer(std::move(huge)),
                StatusIs(Code::kFailedPrecondition, HasSubstr("ordinary pages")));
  }
}

TEST_F(ShmBadInput, AnIdIsGoodForOneRegionAndForNobodyElse) {
  const auto region = transport::ShmRegion::Make(4096).value();
  const v1::OpenTransportResponse opened = Open();
  const UniqueFd first = Connect(opened.shm_socket());
  const auto hand = [&](const UniqueFd& connection, const std::string& id) {
    return transport::HandShm(connection, id, region->fd());
  };
  EXPECT_THAT(hand(Connect(opened.shm_socket()), "guessed"), StatusIs(Code::kNotFound, _));
  EXPECT_THAT(hand(first, opened.transport_id()), IsOk());
  EXPECT_THAT(hand(Connect(opened.shm_socket()), opened.transport_id()),
              StatusIs(Code::kAlreadyExists, _));
  // The second changed nothing for the first.
  grpc::ClientContext context;
  v1::GrantCreditRequest credit;
  credit.set_transport_id(opened.transport_id());
  v1::GrantCreditResponse granted;
  EXPECT_TRUE(stub_->GrantCredit(&context, credit, &granted).ok());
}

TEST_F(ShmBadInput, NonsenseOnTheSocketIsAnsweredAndSilenceDoesNotHinder) {
  const std::string socket = Open().shm_socket();
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(Connect(socket));
  const UniqueFd talker = Connect(socket);
  ASSERT_EQ(write(talker.get(), "GET / HTTP/1.1", 14), 14);
  char answer[512] = {};
  ASSERT_GT(read(talker.get(), answer, sizeof(answer) - 1), 0);
  EXPECT_THAT(std::string(answer + 1), HasSubstr("begin with"));
}

// A packet of no bytes is none, but what comes with it must be closed.
TEST_F(ShmBadInput, DescriptorsWithoutAPacketAreNotKept) {
  const auto open_files = [] {
    const std::string folder = "/proc/" + std::to_string(server_->process().pid()) + "/fd";
    return std::distance(std::filesystem::directory_iterator(folder), {});
  };
  const std::string socket = Open().shm_socket();
  const auto before = open_files();
  for (int i = 0; i < 50; ++i) {
    const UniqueFd connection = Connect(socket);
    int fd = connection.get();
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
    ASSERT_EQ(sendmsg(connection.get(), &message, 0), 0);
    char answer[64];
    EXPECT_GT(read(connection.get(), answer, sizeof(answer)), 0);
  }
  auto after = open_files();
  for (int i = 0; i < 300 && after > before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    after = open_files();
  }
  EXPECT_LE(after, before + 1);
}

TEST_F(ShmBadInput, AFileWhereTheSocketIsToBeStays) {
  const TempFolder folder;
  const std::string path = folder / "file";
  std::ofstream(path) << "keep";
  const Finished refused =
      RunCommand({KVTIER_KVTIERD, "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0",
                  "--metrics-listen=", "--memory=16MiB", "--shm-socket=" + path});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.output, HasSubstr("shm_socket is " + path));
  EXPECT_TRUE(std::filesystem::is_regular_file(path));
}

TEST_F(ShmBadInput, ABatchHasItsValuesInside) {
  v1::AppendBatchRequest batch;
  batch.add_entries()->mutable_open()->set_transport_id("x");
  EXPECT_THAT(client_->AppendBatch(batch),
              StatusIs(Code::kInvalidArgument, HasSubstr("entries[0].open.transport_id")));
}

// Values that change while they are read are stored as anything, and no search runs past them.
TEST_F(ShmBadInput, AWriterThatScribbles) {
  const std::string model = client_->RegisterModel(SmallModel("q4_0")).value().model_id();
  const auto memory = client_->Share(1 << 20).value();
  std::atomic<bool> stop{false};
  std::thread scribbler([&] {
    for (std::uint16_t bits = 0; !stop; bits = static_cast<std::uint16_t>(bits + 0x0101)) {
      for (std::int64_t at = 0; at < memory->size(); at += 64) {
        const std::uint16_t pair[2] = {static_cast<std::uint16_t>(bits & 0x3fff),
                                       static_cast<std::uint16_t>((bits & 0x3fff) | 0x8000)};
        std::memcpy(memory->data() + at, pair, sizeof(pair));
      }
    }
  });
  for (int round = 0; round < 20; ++round) {
    client::AppendOptions options;
    options.open.set_sequence("scribbled");
    options.open.set_model_id(model);
    options.open.set_transport_id(memory->transport_id());
    auto stream = client_->OpenAppend(options);
    ASSERT_THAT(stream, IsOk());
    v1::AppendChunk chunk;
    chunk.set_num_tokens(2048);
    chunk.set_k_offset(0);
    chunk.set_v_offset(512 << 10);
    EXPECT_THAT((*stream)->Send(chunk), IsOk());
    EXPECT_THAT((*stream)->Finish(), IsOk());
    v1::RemoveRequest remove;
    remove.set_sequence("scribbled");
    EXPECT_THAT(client_->Remove(remove), IsOk());
  }
  stop = true;
  scribbler.join();
}

TEST_F(ShmBadInput, TransportsAreCountedUntilTheyAreClosed) {
  std::vector<std::shared_ptr<const client::SharedMemory>> shared;
  absl::Status refused;
  while (refused.ok() && shared.size() < 9) {
    auto memory = client_->Share(4096);
    refused = memory.status();
    if (memory.ok()) shared.push_back(*std::move(memory));
  }
  EXPECT_EQ(client::ErrorReason(refused), "TOO_MANY_TRANSPORTS");
  EXPECT_EQ(shared.size(), 8u);
  for (const auto& memory : shared) Close(memory->transport_id());
}

TEST_F(ShmBadInput, AppendsFromOutsideTheMemory) {
  const auto memory = client_->Share(1 << 20).value();
  constexpr std::uint64_t kBytes = 4096;  // of 16 tokens
  EXPECT_THAT(AppendAt(*memory, (1 << 20) - kBytes), IsOk());
  for (const std::uint64_t offset :
       {std::uint64_t{(1 << 20) - kBytes + 16}, std::uint64_t{1 << 20},
        std::uint64_t{(1 << 20) + 16}, std::numeric_limits<std::uint64_t>::max(),
        std::numeric_limits<std::uint64_t>::max() - kBytes + 1, std::uint64_t{8}}) {
    EXPECT_THAT(
        AppendAt(*memory, offset),
        StatusIs(Code::kInvalidArgument, HasSubstr("chunk.k_offset is " + std::to_string(offset))));
  }
  EXPECT_THAT(AppendAt(*memory, 0, [](v1::AppendChunk& chunk) { chunk.set_k("abc"); }),
              StatusIs(Code::kInvalidArgument, HasSubstr("want one of the two")));
  EXPECT_THAT(AppendAt(*memory, 0, {}, false),
              StatusIs(Code::kInvalidArgument, HasSubstr("no transport_id")));
}

TEST_F(ShmBadInput, ATransportThatIsNotOpen) {
  auto memory = client_->Share(4096).value();
  const std::string id = memory->transport_id();
  memory.reset();
  absl::Status read;
  for (int i = 0; i < 100; ++i) {
    read = Read([&](v1::ReadRequest& request) { request.mutable_target()->set_transport_id(id); });
    if (client::ErrorReason(read) == "UNKNOWN_TRANSPORT") break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(client::ErrorReason(read), "UNKNOWN_TRANSPORT") << read;
  client::AppendOptions options;
  options.open.set_sequence("t");
  options.open.set_model_id(model_);
  options.open.set_transport_id("x");
  EXPECT_EQ(client::ErrorReason(client_->OpenAppend(options).status()), "UNKNOWN_TRANSPORT");
}

TEST_F(ShmBadInput, ReadsToOutsideTheMemory) {
  const auto memory = client_->Share(1 << 20).value();
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  const auto whole = [&](std::uint64_t offset, std::uint64_t bytes) {
    return Read([&](v1::ReadRequest& request) {
      request.mutable_target()->set_transport_id(memory->transport_id());
      request.mutable_target()->set_offset(offset);
      request.mutable_target()->set_bytes(bytes);
    });
  };
  constexpr std::uint64_t kNeeded = 100 * 256 * 2 * 2;
  EXPECT_THAT(whole((1 << 20) - kNeeded, kNeeded), IsOk());
  EXPECT_THAT(whole(0, kNeeded - 1), StatusIs(Code::kInvalidArgument, HasSubstr("target.bytes")));
  EXPECT_THAT(whole((1 << 20) - kNeeded + 16, kNeeded), StatusIs(Code::kInvalidArgument, _));
  EXPECT_THAT(whole(kMost - 15, 32), StatusIs(Code::kInvalidArgument, HasSubstr("target.offset")));
  EXPECT_THAT(whole(0, kMost), StatusIs(Code::kInvalidArgument, _));

  struct Table {
    std::vector<std::uint32_t> ids;
    std::uint64_t offset;
    std::uint64_t stride;
    const char* says;
  };
  const Table tables[] = {
      {{0, 1}, 0, 16384, "block_ids has 2 entries; 100 tokens take 4 blocks of 32"},
      {{0, 1, 2, 64}, 0, 16384, "block 64"},
      {{0, 1, 2, 63}, 16384, 16384, "block 63"},
      {{0, 1, 2, 0xffffffff}, 0, kMost - 15, "block 4294967295"},
      {{0, 1, 2, 0xffffffff}, 0, 1ull << 33, "block 4294967295"},
      {{0, 0, 0, 0}, kMost - 15, 0, "block 0"},
      {{0, 1, 2, 3}, 8, 16384, "want multiples of 16"},
  };
  for (const Table& table : tables) {
    const absl::Status read = Read([&](v1::ReadRequest& request) {
      request.set_block_tokens(32);
      request.mutable_sequences(0)->mutable_block_ids()->Add(table.ids.begin(), table.ids.end());
      request.mutable_target()->set_transport_id(memory->transport_id());
      for (int layer = 0; layer < 2; ++layer) {
        v1::LayerBlocks& blocks = *request.mutable_target()->add_layers();
        blocks.set_k_offset(table.offset);
        blocks.set_k_block_stride(table.stride);
      }
    });
    EXPECT_THAT(read, StatusIs(Code::kInvalidArgument, HasSubstr(table.says)));
  }
}

TEST_F(ShmBadInput, WhatDoesNotGoTogether) {
  const auto memory = client_->Share(1 << 20).value();
  const auto with = [&](const std::function<void(v1::ReadRequest&)>& change) {
    return Read([&](v1::ReadRequest& request) {
      request.mutable_target()->set_transport_id(memory->transport_id());
      request.mutable_target()->set_bytes(1 << 20);
      change(request);
    });
  };
  EXPECT_THAT(with([](v1::ReadRequest& r) { r.set_as(v1::READ_AS_STORED); }),
              StatusIs(Code::kInvalidArgument, HasSubstr("as is STORED")));
  EXPECT_THAT(with([](v1::ReadRequest& r) { r.mutable_target()->add_layers(); }),
              StatusIs(Code::kInvalidArgument, HasSubstr("block_tokens is 0")));
  EXPECT_THAT(with([](v1::ReadRequest& r) {
                r.set_block_tokens(16);
                r.mutable_target()->add_layers();
                r.mutable_target()->set_ring(true);
              }),
              StatusIs(Code::kInvalidArgument, HasSubstr("want one of the two")));
  EXPECT_THAT(with([](v1::ReadRequest& r) {
                r.set_block_tokens(16);
                r.mutable_target()->add_layers();
              }),
              StatusIs(Code::kInvalidArgument, HasSubstr("target.layers has 1 entries")));
  EXPECT_THAT(with([](v1::ReadRequest& r) { r.set_follow(true); }),
              StatusIs(Code::kInvalidArgument, HasSubstr("num_tokens is 0")));
  EXPECT_THAT(with([](v1::ReadRequest& r) {
                r.mutable_target()->set_ring(true);
                r.mutable_target()->set_bytes(1000);
              }),
              StatusIs(Code::kInvalidArgument, HasSubstr("want at least 65536")));
}

// One that reads more than its ring holds and gives nothing back keeps its own read waiting, until
// it goes; others' reads go on.
TEST_F(ShmBadInput, AReaderThatGivesNoRoomBack) {
  const auto memory = client_->Share(1 << 20).value();
  v1::ReadRequest request;
  request.add_sequences()->set_sequence("held");
  ASSERT_THAT(Read([](v1::ReadRequest&) {}), IsOk());  // 100 KB
  request.mutable_target()->set_transport_id(memory->transport_id());
  request.mutable_target()->set_bytes(64 << 10);
  request.mutable_target()->set_ring(true);
  request.mutable_target()->set_read_id(7);
  grpc::ClientContext context;
  const auto reader = stub_->Read(&context, request);
  v1::ReadResponse message;
  int chunks = 0;
  while (chunks < 3 && reader->Read(&message)) chunks += message.has_chunk() ? 1 : 0;
  EXPECT_EQ(chunks, 3);
  // Another with the same number can't take its credit.
  EXPECT_THAT(Read([&](v1::ReadRequest& r) { *r.mutable_target() = request.target(); }),
              StatusIs(Code::kInvalidArgument, HasSubstr("read_id is 7")));
  EXPECT_THAT(Read([](v1::ReadRequest&) {}), IsOk());
  context.TryCancel();
  EXPECT_FALSE(reader->Read(&message) && reader->Read(&message) && reader->Read(&message));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

}  // namespace
}  // namespace kvtier::testing
