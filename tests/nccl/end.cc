#include "tests/nccl/end.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "cachestore/base/check.h"

namespace kvtier::transport::testing {
namespace {

constexpr std::int64_t kAll = kGroups * kPieces * kPieceBytes;

std::byte ByteAt(std::int64_t at) {
  return static_cast<std::byte>((at * 31 + at / kPieceBytes * 7) & 0xff);
}

void Copy(void* to, const void* from, cudaMemcpyKind kind) {
  cudaStream_t stream = nullptr;
  KVT_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  KVT_CHECK(cudaMemcpyAsync(to, from, kAll, kind, stream) == cudaSuccess);
  KVT_CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  cudaStreamDestroy(stream);
}

}  // namespace

Pieces::Pieces(bool filled) {
  void* memory = nullptr;
  KVT_CHECK(cudaMalloc(&memory, kAll) == cudaSuccess);
  device_ = static_cast<std::byte*>(memory);
  KVT_CHECK(cudaHostAlloc(&memory, kAll, cudaHostAllocDefault) == cudaSuccess);
  host_ = static_cast<std::byte*>(memory);
  for (std::int64_t at = 0; at < kAll; ++at) host_[at] = filled ? ByteAt(at) : std::byte{0};
  Copy(device_, host_, cudaMemcpyHostToDevice);
}

Pieces::~Pieces() {
  cudaFree(device_);
  cudaFreeHost(host_);
}

std::vector<DevicePiece> Pieces::Group(int group, std::int64_t bytes) const {
  std::vector<DevicePiece> pieces;
  for (int i = 0; i < kPieces; ++i)
    pieces.push_back({device_ + (group * kPieces + i) * kPieceBytes, bytes});
  return pieces;
}

bool Pieces::Good() const {
  Copy(host_, device_, cudaMemcpyDeviceToHost);
  for (std::int64_t at = 0; at < kAll; ++at) {
    if (host_[at] != ByteAt(at)) return false;
  }
  return true;
}

int RunWorker(const std::string& behaviour, int to_test, int from_test) {
  setenv("NCCL_HOSTID", "worker", 1);  // NOLINT(concurrency-mt-unsafe): no thread runs yet
  if (behaviour == "other_version")
    setenv("FAKE_NCCL_VERSION", "22703", 1);  // NOLINT(concurrency-mt-unsafe)
  if (behaviour == "never_begins")
    setenv("FAKE_NCCL_FAULT", "op_hang", 1);  // NOLINT(concurrency-mt-unsafe)
  const auto library = NcclLibrary::Load(KVTIER_FAKE_NCCL).value();
  const std::string id = NcclLink::NewId(*library).value();
  if (write(to_test, id.data(), id.size()) != static_cast<ssize_t>(id.size())) return 10;
  if (behaviour == "dies_before") std::raise(SIGKILL);
  if (behaviour == "never_joins") pause();
  Pieces pieces(false);
  NcclReaper reaper(library);
  auto link = NcclLink::Connect(
      reaper, {.id = id, .rank = NcclLink::Rank::kWorker, .deadline = absl::Seconds(20)});
  if (!link.ok()) {
    std::fprintf(stderr, "worker: %s\n", link.status().ToString().c_str());
    return 11;
  }
  const std::int64_t bytes = behaviour == "other_size" ? kPieceBytes / 2 : kPieceBytes;
  for (int group = 0; group < kGroups; ++group) {
    if (behaviour == "dies_amid" && group == 1) std::raise(SIGKILL);
    if (behaviour == "stops_amid" && group == 1) std::raise(SIGSTOP);
    if (!(*link)->Receive(pieces.Group(group, bytes), absl::Seconds(20)).ok()) return 12;
  }
  const absl::Status received = (*link)->Wait(absl::Seconds(20));
  char end = 0;
  if (read(from_test, &end, 1) < 0) return 13;  // until the test is done with the link
  if (!received.ok()) return 14;
  return pieces.Good() ? 0 : 15;
}

}  // namespace kvtier::transport::testing
