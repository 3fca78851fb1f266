#include "transport/shm_handover.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "transport/last_error.h"

namespace kvtier::transport {
namespace {

constexpr std::string_view kMagic = "kvtier-shm-1";
constexpr std::size_t kMostPacket = 1024;
constexpr int kBacklog = 128;

struct Address {
  sockaddr_un name{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

absl::StatusOr<Address> AddressOf(const std::string& text) {
  Address address;
  address.name.sun_family = AF_UNIX;
  // One byte is left for the zero that ends a path.
  if (text.empty() || text.size() >= sizeof(address.name.sun_path)) {
    return absl::InvalidArgumentError(
        fmt::format("\"{}\" is no address of a Unix socket; want a path of 1 to {} bytes", text,
                    sizeof(address.name.sun_path) - 1));
  }
  std::copy(text.begin(), text.end(), address.name.sun_path);
  const bool abstract = text.front() == '@';
  if (abstract) address.name.sun_path[0] = '\0';
  address.size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size() + (abstract ? 0 : 1));
  return address;
}

UniqueFd PacketSocket(int flags) {
  return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
}

// A socket that a server left behind which was killed; not one that somebody listens on.
void RemoveStale(const std::string& path, const Address& address) {
  struct stat there {};
  if (path.front() == '@' || lstat(path.c_str(), &there) != 0 || !S_ISSOCK(there.st_mode)) return;
  const UniqueFd probe = PacketSocket(SOCK_NONBLOCK);
  if (connect(probe.get(), address.get(), address.size) != 0 && errno == ECONNREFUSED)
    unlink(path.c_str());
}

// A packet of bytes, with room for one descriptor beside it. Neither copied nor moved: it points
// into itself.
class Packet {
 public:
  explicit Packet(std::string_view text) {
    size_ = std::min(text.size(), bytes_.size());
    std::copy_n(text.begin(), size_, bytes_.begin());
  }
  Packet() : size_(kMostPacket) {}
  Packet(const Packet&) = delete;
  Packet& operator=(const Packet&) = delete;

  void Attach(int fd) {
    message_.msg_control = control_.data();
    message_.msg_controllen = CMSG_SPACE(sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message_);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }

  bool Send(const UniqueFd& to) {
    part_.iov_len = size_;
    return sendmsg(to.get(), &message_, MSG_NOSIGNAL) == static_cast<ssize_t>(size_);
  }

  // False where the other end is gone, or nothing came in time.
  bool Receive(const UniqueFd& from) {
    message_.msg_control = control_.data();
    message_.msg_controllen = control_.size();
    const ssize_t got = recvmsg(from.get(), &message_, MSG_CMSG_CLOEXEC);
    if (got < 0) message_.msg_controllen = 0;
    size_ = got > 0 ? static_cast<std::size_t>(got) : 0;
    return got > 0;
  }

  std::string_view text() const { return {bytes_.data(), size_}; }

  // All that came are owned here, so that none leaks; the first is the one that counts.
  UniqueFd TakeDescriptor() {
    UniqueFd first;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message_); header != nullptr;
         header = CMSG_NXTHDR(&message_, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        UniqueFd owned(fd);
        if (!first.ok()) first = std::move(owned);
      }
    }
    return first;
  }

 private:
  std::array<char, kMostPacket> bytes_{};
  std::size_t size_ = 0;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control_{};
  iovec part_{.iov_base = bytes_.data(), .iov_len = kMostPacket};
  msghdr message_{.msg_name = nullptr,
                  .msg_namelen = 0,
                  .msg_iov = &part_,
                  .msg_iovlen = 1,
                  .msg_control = nullptr,
                  .msg_controllen = 0,
                  .msg_flags = 0};
};

absl::Status Unavailable(const std::string& address, const std::string& what) {
  return absl::UnavailableError(
      fmt::format("no shared memory with the server's Unix socket {}: {}", address, what));
}

void SetLimit(const UniqueFd& socket, absl::Duration limit) {
  // Of 0 it would wait for ever.
  const timeval time = absl::ToTimeval(std::max(limit, absl::Milliseconds(1)));
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
    setsockopt(socket.get(), SOL_SOCKET, option, &time, sizeof(time));
}

}  // namespace

absl::StatusOr<UniqueFd> ListenForShm(const std::string& address) {
  KVT_ASSIGN_OR_RETURN(const Address name, AddressOf(address));
  RemoveStale(address, name);
  UniqueFd listener = PacketSocket(SOCK_NONBLOCK);
  if (!listener.ok() || bind(listener.get(), name.get(), name.size) != 0 ||
      listen(listener.get(), kBacklog) != 0) {
    return absl::InvalidArgumentError(
        fmt::format("can't listen on the Unix socket {}: {}", address, LastError()));
  }
  // Not the file's mode keeps others out, who run as other users in their containers, but the id.
  if (address.front() != '@') chmod(address.c_str(), 0666);
  return listener;
}

UniqueFd AcceptShm(const UniqueFd& listener) {
  return UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

absl::StatusOr<ShmOffer> ReceiveShm(const UniqueFd& connection) {
  Packet packet;
  const bool came = packet.Receive(connection);
  ShmOffer offer{.transport_id = {}, .memory = packet.TakeDescriptor()};  // of an empty one, too
  if (!came) return absl::UnavailableError("the client went");
  const std::string_view text = packet.text();
  if (text.substr(0, kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError(
        fmt::format("{} bytes came that don't begin with \"{}\"", text.size(), kMagic));
  }
  if (!offer.memory.ok()) return absl::InvalidArgumentError("no memory came with the packet");
  offer.transport_id = text.substr(kMagic.size());
  return offer;
}

void AnswerShm(const UniqueFd& connection, const absl::Status& answer) {
  std::string text(1, static_cast<char>(answer.code()));
  text += std::string(answer.message());
  Packet(text).Send(connection);
}

absl::StatusOr<UniqueFd> ConnectShm(const std::string& address, absl::Duration limit) {
  KVT_ASSIGN_OR_RETURN(const Address name, AddressOf(address));
  UniqueFd connection = PacketSocket(0);
  SetLimit(connection, limit);  // of connecting, too: many may want to
  if (connect(connection.get(), name.get(), name.size) != 0)
    return Unavailable(address, LastError());
  return connection;
}

absl::Status HandShm(const UniqueFd& connection, const std::string& transport_id,
                     const UniqueFd& memory) {
  Packet offer(std::string(kMagic) + transport_id);
  offer.Attach(memory.get());
  Packet answer;
  if (!offer.Send(connection) || !answer.Receive(connection))
    return absl::UnavailableError("the server did not answer to shared memory: " + LastError());
  const std::string_view text = answer.text();
  return absl::Status(static_cast<absl::StatusCode>(text.front()), std::string(text.substr(1)));
}

}  // namespace kvtier::transport
