#include "service/rpc/shm_server.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "service/log.h"
#include "transport/shm_handover.h"

namespace kvtier::service {
namespace {

using transport::UniqueFd;

constexpr std::size_t kMoreConnections = 64;  // than transports
constexpr int kSecondMs = 1000;

}  // namespace

absl::StatusOr<std::unique_ptr<ShmServer>> ShmServer::Start(const std::string& address,
                                                            Transports& transports,
                                                            const cachestore::Clock& clock) {
  KVT_ASSIGN_OR_RETURN(UniqueFd listener, transport::ListenForShm(address));
  UniqueFd stop(eventfd(0, EFD_CLOEXEC));
  if (!stop.ok()) return absl::ResourceExhaustedError("no more file descriptors");
  return std::unique_ptr<ShmServer>(
      new ShmServer(address, std::move(listener), std::move(stop), transports, clock));
}

ShmServer::ShmServer(const std::string& address, UniqueFd listener, UniqueFd stop,
                     Transports& transports, const cachestore::Clock& clock)
    : address_(address),
      listener_(std::move(listener)),
      stop_(std::move(stop)),
      transports_(transports),
      clock_(clock),
      thread_([this] { Run(); }) {}

ShmServer::~ShmServer() {
  const std::uint64_t one = 1;
  while (write(stop_.get(), &one, sizeof(one)) < 0) {
  }
  thread_.join();
  if (address_.front() != '@') unlink(address_.c_str());
}

void ShmServer::Run() {
  // So that those who come late hear why; the rest wait in the socket's queue.
  const auto most =
      static_cast<std::size_t>(transports_.limits().max_transports) + kMoreConnections;
  while (true) {
    const bool full = clients_.size() >= most || clock_.Now() < accepts_from_;
    std::vector<pollfd> polled = {
        {.fd = stop_.get(), .events = POLLIN, .revents = 0},
        {.fd = full ? -1 : listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Client& client : clients_)
      polled.push_back({.fd = client.connection->get(), .events = POLLIN, .revents = 0});
    poll(polled.data(), polled.size(), kSecondMs);
    if (polled[0].revents != 0) return;
    const absl::Time late = clock_.Now() - Transports::kHandoverDeadline;
    std::vector<Client> kept;
    for (std::size_t i = 0; i < clients_.size(); ++i) {
      Client& client = clients_[i];
      const bool silent = client.transport_id.empty() && client.since < late;
      const bool done = polled[i + 2].revents != 0 ? Serve(client) : silent;
      if (!done) kept.push_back(std::move(client));
    }
    clients_ = std::move(kept);
    if (polled[1].revents != 0) Accept();
    transports_.Sweep(clock_.Now());
  }
}

void ShmServer::Accept() {
  UniqueFd connection = transport::AcceptShm(listener_);
  if (!connection.ok()) {
    accepts_from_ = clock_.Now() + absl::Seconds(1);
    return;
  }
  clients_.push_back({.connection = std::make_shared<UniqueFd>(std::move(connection)),
                      .transport_id = {},
                      .since = clock_.Now()});
}

bool ShmServer::Serve(Client& client) {
  if (!client.transport_id.empty()) {  // it went, or says what nobody asked for
    transports_.Close(client.transport_id);
    return true;
  }
  absl::StatusOr<transport::ShmOffer> offer = transport::ReceiveShm(*client.connection);
  absl::Status answer = offer.status();
  if (offer.ok())
    answer = transports_.TakeShm(offer->transport_id, std::move(offer->memory), client.connection);
  transport::AnswerShm(*client.connection, answer);
  if (!answer.ok()) {
    Log(LogLevel::kWarning, "refused shared memory", {{"why", std::string(answer.message())}});
    if (offer.ok() && answer.code() != absl::StatusCode::kAlreadyExists)
      transports_.Close(offer->transport_id);
    return true;
  }
  client.transport_id = offer->transport_id;
  return false;
}

}  // namespace kvtier::service
