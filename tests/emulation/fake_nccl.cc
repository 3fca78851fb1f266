// A substitute for NCCL, for tests: a library to be loaded in its place by processes that have the
// substitute for CUDA's runtime. Communicators of two ranks, over TCP on this host, with what users
// of NCCL can see of it: joining takes its time and never ends where the other doesn't come; work
// is done in the stream's order, a group at a time; where the peer is gone the error is
// asynchronous, and the work hangs until it is aborted, as a kernel would. What hangs or corrupts
// there, sizes that differ, is an error here.
//
// FAKE_NCCL_VERSION: what it says it is. FAKE_NCCL_FAULT: init_hang, init_fail, id_fail, op_hang,
// abort_hang (for a second), several with commas between them.

#include <arpa/inet.h>
#include <nccl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/emulation/fake_cudart.h"

namespace {

constexpr std::uint64_t kMagic = 0x6b767469'6e63636cu;
constexpr auto kTick = std::chrono::milliseconds(5);

thread_local std::string t_last_error;

ncclResult_t Fail(ncclResult_t result, std::string why) {
  t_last_error = std::move(why);
  return result;
}

const char* Variable(const char* name) {
  return std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets variables meanwhile
}
bool HasFault(const char* name) {
  const char* faults = Variable("FAKE_NCCL_FAULT");
  return faults != nullptr && std::strstr(faults, name) != nullptr;
}
int Version() {
  const char* version = Variable("FAKE_NCCL_VERSION");
  return version == nullptr ? NCCL_VERSION_CODE : std::atoi(version);
}

// What an id holds, and what a rank says of itself.
struct Id {
  std::uint64_t magic;
  std::uint64_t token;
  std::uint16_t port;
};
struct Member {
  std::uint64_t token;
  std::uint64_t host;
  int rank;
  int version;
  int device;
  std::uint16_t port;
};

int Listen(std::uint16_t* port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (bind(socket, any, size) != 0 || listen(socket, 8) != 0) return -1;
  getsockname(socket, any, &size);
  *port = ntohs(address.sin_port);
  return socket;
}

int Dial(std::uint16_t port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    close(socket);
    return -1;
  }
  const int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return socket;
}

bool Ready(int socket, short events, const std::atomic<bool>& aborted) {
  while (!aborted) {
    pollfd poll{socket, events, 0};
    if (::poll(&poll, 1, static_cast<int>(kTick.count())) > 0) return true;
  }
  return false;
}
int Accept(int listener, const std::atomic<bool>& aborted) {
  return Ready(listener, POLLIN, aborted) ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
}
bool Read(int socket, void* to, std::size_t bytes, const std::atomic<bool>& aborted) {
  for (std::size_t done = 0; done < bytes;) {
    if (!Ready(socket, POLLIN, aborted)) return false;
    const ssize_t got = recv(socket, static_cast<char*>(to) + done, bytes - done, 0);
    if (got <= 0) return false;
    done += static_cast<std::size_t>(got);
  }
  return true;
}
bool Write(int socket, const void* from, std::size_t bytes) {
  return send(socket, from, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

// Tells each of the two ranks of the other; like NCCL's, it stays until both have come.
void BringTogether(int listener, std::uint64_t token) {
  const std::atomic<bool> never{false};
  std::array<Member, 2> members{};
  std::array<int, 2> sockets{-1, -1};
  while (sockets[0] < 0 || sockets[1] < 0) {
    const int socket = Accept(listener, never);
    Member member{};
    if (!Read(socket, &member, sizeof member, never) || member.token != token) {
      close(socket);
      continue;
    }
    const auto rank = static_cast<std::size_t>(member.rank);
    members[rank] = member;
    sockets[rank] = socket;
  }
  for (const int socket : sockets) {
    Write(socket, members.data(), sizeof members);
    close(socket);
  }
  close(listener);
}

struct Transfer {
  bool sends;
  std::byte* data;
  std::size_t bytes;
};

}  // namespace

struct ncclComm {
  Id id{};
  int rank = 0;
  std::atomic<int> state{ncclInProgress};
  std::atomic<bool> aborted{false};
  std::atomic<int> working{0};
  int peer = -1;
  std::string error;
  std::thread joining;

  ncclResult_t Join();
  void Work(const std::vector<Transfer>& transfers);

 private:
  // As on a GPU, the work itself does not end.
  void Hang(ncclResult_t result, const char* why) {
    if (why != nullptr) error = why;
    if (result != ncclSuccess) state = result;
    while (!aborted) std::this_thread::sleep_for(kTick);
  }
};

ncclResult_t ncclComm::Join() {
  while (HasFault("init_hang") && !aborted) std::this_thread::sleep_for(kTick);
  if (aborted || HasFault("init_fail")) return ncclSystemError;
  Member me{
      .token = id.token, .host = 0, .rank = rank, .version = Version(), .device = 0, .port = 0};
  const char* host = Variable("NCCL_HOSTID");
  me.host = std::hash<std::string>()(host == nullptr ? "" : host);
  const int listener = Listen(&me.port);
  const int root = Dial(id.port);
  std::array<Member, 2> members{};
  const bool met = root >= 0 && Write(root, &me, sizeof me) &&
                   Read(root, members.data(), sizeof members, aborted);
  close(root);
  ncclResult_t result = ncclSuccess;
  if (!met) {
    error = "the one who made the id is gone";
    result = ncclRemoteError;
  } else if (members[0].version != members[1].version) {
    error = "Mismatched NCCL version detected";
    result = ncclInvalidUsage;
  } else if (members[0].host == members[1].host) {
    error = "Duplicate GPU detected";
    result = ncclInvalidUsage;
  } else {
    peer = rank == 0 ? Accept(listener, aborted) : Dial(members[0].port);
    if (peer < 0) result = ncclRemoteError;
  }
  close(listener);
  return result;
}

void ncclComm::Work(const std::vector<Transfer>& transfers) {
  if (HasFault("op_hang")) return Hang(ncclSuccess, nullptr);
  for (const Transfer& transfer : transfers) {
    std::uint64_t bytes = transfer.bytes;
    if (transfer.sends) {
      if (!Write(peer, &bytes, sizeof bytes)) return Hang(ncclRemoteError, "the peer is gone");
    } else {
      if (!Read(peer, &bytes, sizeof bytes, aborted))
        return Hang(ncclRemoteError, "the peer is gone");
      if (bytes != transfer.bytes) return Hang(ncclInvalidUsage, "sizes differ: it would hang");
    }
    for (std::size_t done = 0; done < transfer.bytes;) {
      if (!Ready(peer, transfer.sends ? POLLOUT : POLLIN, aborted)) return;
      char* const at = reinterpret_cast<char*>(transfer.data) + done;
      const std::size_t left = std::min<std::size_t>(transfer.bytes - done, 256 << 10);
      const ssize_t moved = transfer.sends ? send(peer, at, left, MSG_NOSIGNAL | MSG_DONTWAIT)
                                           : recv(peer, at, left, MSG_DONTWAIT);
      if (moved == 0 || (moved < 0 && errno != EAGAIN && errno != EINTR))
        return Hang(ncclRemoteError, "the peer is gone");
      if (moved > 0) done += static_cast<std::size_t>(moved);
    }
  }
}

namespace {

struct Pending {
  ncclComm* comm;
  cudaStream_t stream;
  std::vector<Transfer> transfers;
};
thread_local int t_depth = 0;
thread_local std::vector<Pending> t_group;

ncclResult_t Flush() {
  for (Pending& pending : std::exchange(t_group, {})) {
    ++pending.comm->working;
    kvtier::cuda_double::Enqueue(pending.stream,
                                 [comm = pending.comm, transfers = std::move(pending.transfers)] {
                                   comm->Work(transfers);
                                   --comm->working;
                                 });
  }
  return ncclSuccess;
}

ncclResult_t Add(ncclComm* comm, cudaStream_t stream, const Transfer& transfer, int peer) {
  if (comm == nullptr || peer != 1 - comm->rank) return Fail(ncclInvalidArgument, "no such peer");
  if (comm->state != ncclSuccess) return Fail(ncclInvalidUsage, "the communicator is not ready");
  if (t_group.empty() || t_group.back().comm != comm || t_group.back().stream != stream)
    t_group.push_back({comm, stream, {}});
  t_group.back().transfers.push_back(transfer);
  return t_depth > 0 ? ncclSuccess : Flush();
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = Version();
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (HasFault("id_fail")) return Fail(ncclSystemError, "no interface");
  Id made{
      kMagic,
      static_cast<std::uint64_t>(getpid()) << 32 ^
          static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()),
      0};
  const int listener = Listen(&made.port);
  if (listener < 0) return Fail(ncclSystemError, "no port");
  *id = {};
  std::memcpy(id->internal, &made, sizeof made);
  std::thread(BringTogether, listener, made.token).detach();
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (ranks != 2 || rank < 0 || rank > 1) return Fail(ncclInvalidArgument, "two ranks only");
  if (config == nullptr || config->magic != 0xcafebeef || config->blocking != 0)
    return Fail(ncclInvalidArgument, "only what does not block");
  auto* comm = new ncclComm;
  *out = comm;
  std::memcpy(&comm->id, id.internal, sizeof comm->id);
  comm->rank = rank;
  if (comm->id.magic != kMagic) {
    comm->state = ncclInvalidArgument;
    return Fail(ncclInvalidArgument, "that is no id");
  }
  comm->joining = std::thread([comm] { comm->state = comm->Join(); });
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = static_cast<ncclResult_t>(comm->state.load());
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (HasFault("abort_hang")) std::this_thread::sleep_for(std::chrono::seconds(1));
  comm->aborted = true;
  if (comm->joining.joinable()) comm->joining.join();
  while (comm->working > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (comm->peer >= 0) close(comm->peer);
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  if (type != ncclUint8) return Fail(ncclInvalidArgument, "bytes only");
  auto* data = static_cast<std::byte*>(const_cast<void*>(from));
  return Add(comm, stream, {true, data, count}, peer);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (type != ncclUint8) return Fail(ncclInvalidArgument, "bytes only");
  return Add(comm, stream, {false, static_cast<std::byte*>(to), count}, peer);
}
ncclResult_t ncclGroupStart() {
  ++t_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (t_depth == 0) return Fail(ncclInvalidUsage, "no group");
  return --t_depth > 0 ? ncclSuccess : Flush();
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "an error";
  }
}
const char* ncclGetLastError(ncclComm_t comm) {
  return comm != nullptr && !comm->error.empty() ? comm->error.c_str() : t_last_error.c_str();
}

}  // extern "C"
