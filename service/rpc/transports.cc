#include "service/rpc/transports.h"

#include <fmt/format.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <utility>
#include <vector>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::service {
namespace {

using cachestore::Error;
using cachestore::Reason;

constexpr std::size_t kIdBytes = 16;

absl::Status Unknown(const char* field = "transport_id") {
  return Error(Reason::kUnknownTransport,
               fmt::format("{} is none that is open and has its memory: open another", field));
}

}  // namespace

absl::StatusOr<std::string> Transports::NewId() {
  std::string id(kIdBytes, '\0');
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size()))
    return Error(Reason::kTransportUnavailable, "the kernel gives no random bytes for an id");
  return id;
}

void Transports::SetShmSocket(const std::string& address, const std::string& why) {
  absl::MutexLock lock(&mutex_);
  shm_socket_ = address;
  why_no_shm_ = why;
}

std::string Transports::shm_socket() const {
  absl::MutexLock lock(&mutex_);
  return shm_socket_;
}

absl::StatusOr<std::string> Transports::OpenShm(absl::Time now) {
  KVT_ASSIGN_OR_RETURN(std::string id, NewId());
  absl::MutexLock lock(&mutex_);
  if (shm_socket_.empty())
    return Error(Reason::kTransportUnavailable, "no shared memory here: " + why_no_shm_);
  KVT_RETURN_IF_ERROR(CheckRoom());
  transports_[id].opened = now;
  return id;
}

absl::Status Transports::CheckRoom() const {
  if (static_cast<std::int64_t>(transports_.size()) < limits_.max_transports)
    return absl::OkStatus();
  return Error(Reason::kTooManyTransports,
               fmt::format("{} transports are open; want at most {} (--max-transports)",
                           transports_.size(), limits_.max_transports));
}

absl::Status Transports::TakeShm(const std::string& id, transport::UniqueFd memory,
                                 std::shared_ptr<transport::UniqueFd> connection) {
  {
    absl::MutexLock lock(&mutex_);
    const auto found = transports_.find(id);
    if (found == transports_.end()) return Unknown();
    if (found->second.connection != nullptr || found->second.nccl != nullptr)
      return absl::AlreadyExistsError("the transport has its memory already");
    found->second.connection = std::move(connection);  // nobody else hands it any
  }
  const std::int64_t room = limits_.max_shm_bytes - mapped_bytes();
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<transport::ShmRegion> mapped,
                       transport::ShmRegion::Map(std::move(memory), room));
  *mapped_ += mapped->size();
  transport::ShmRegion* const region = mapped.get();
  device_.Pin(region->data(), region->size());
  std::shared_ptr<const transport::ShmRegion> counted(
      region, [owner = std::move(mapped), count = mapped_, &device = device_](const auto*) mutable {
        const std::int64_t bytes = owner->size();
        device.Unpin(owner->data());
        owner.reset();
        *count -= bytes;
      });
  absl::MutexLock lock(&mutex_);
  const auto found = transports_.find(id);
  if (found == transports_.end()) return Unknown();
  found->second.memory = std::move(counted);
  return absl::OkStatus();
}

void Transports::Close(const std::string& id) {
  Transport closed;  // unmapped without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = transports_.find(id);
  if (found == transports_.end()) return;
  closed = std::move(found->second);
  transports_.erase(found);
  if (closed.connection != nullptr) shutdown(closed.connection->get(), SHUT_RDWR);
}

void Transports::Sweep(absl::Time now) {
  std::vector<Transport> closed;  // ended without the lock
  absl::MutexLock lock(&mutex_);
  for (auto it = transports_.begin(); it != transports_.end();) {
    Transport& transport = it->second;
    const bool over =
        transport.nccl == nullptr
            ? transport.connection == nullptr && transport.opened + kHandoverDeadline < now
            : !transport.nccl->channel().status().ok() ||
                  transport.nccl->channel().idle() > limits_.nccl_idle;
    if (over) closed.push_back(std::move(transport));
    it = over ? transports_.erase(it) : std::next(it);
  }
}

absl::StatusOr<Transports::Found> Transports::Find(const std::string& id, const char* field) const {
  absl::MutexLock lock(&mutex_);
  const auto found = transports_.find(id);
  if (found == transports_.end() || found->second.memory == nullptr) return Unknown(field);
  const Transport& transport = found->second;
  if (transport.nccl != nullptr) {
    KVT_RETURN_IF_ERROR(transport.nccl->channel().status());
  }
  return Found{.memory = transport.memory, .nccl = transport.nccl};
}

absl::StatusOr<std::shared_ptr<RingCredit>> Transports::OpenRing(const std::string& id,
                                                                 std::uint64_t read_id,
                                                                 std::function<void()> on_news) {
  auto credit = std::make_shared<RingCredit>(std::move(on_news));
  absl::MutexLock lock(&mutex_);
  const auto found = transports_.find(id);
  if (found == transports_.end()) return Unknown();
  auto& rings = found->second.rings;
  std::erase_if(rings, [](const auto& ring) { return ring.second.expired(); });
  if (!rings.emplace(read_id, credit).second) {
    return Error(Reason::kInvalidField,
                 fmt::format("target.read_id is {}, as another read's of this transport", read_id));
  }
  return credit;
}

absl::Status Transports::Grant(const v1::GrantCreditRequest& request) {
  std::shared_ptr<RingCredit> credit;
  std::shared_ptr<NcclTransport> nccl;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = transports_.find(request.transport_id());
    if (found == transports_.end()) return Unknown();
    nccl = found->second.nccl;
    const auto ring = found->second.rings.find(request.read_id());
    if (ring != found->second.rings.end()) credit = ring->second.lock();
  }
  if (nccl != nullptr) nccl->channel().Allow(request.transfers());
  if (credit != nullptr) credit->Grant(request.chunks());
  return absl::OkStatus();
}

std::int64_t Transports::open() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<std::int64_t>(transports_.size());
}

}  // namespace kvtier::service
