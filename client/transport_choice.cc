#include "client/transport_choice.h"

#include <fmt/format.h>
#include <grpcpp/client_context.h>

#include <utility>

#include "absl/time/clock.h"
#include "cachestore/base/status_macros.h"
#include "client/grpc_status.h"
#include "transport/shm_handover.h"

namespace kvtier::client {
namespace {

// To open shared memory, all of it touched, takes as long as this takes inside messages, or longer.
constexpr std::uint64_t kWorthOpening = 32 << 20;

void Close(v1::KvTierService::Stub& stub, const std::string& transport_id, absl::Time deadline) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  v1::CloseTransportRequest request;
  request.set_transport_id(transport_id);
  v1::CloseTransportResponse response;
  stub.CloseTransport(&context, request, &response);
}

absl::StatusOr<std::shared_ptr<const SharedMemory>> HandOver(
    const v1::OpenTransportResponse& opened, std::int64_t bytes, absl::Time deadline) {
  // First: memory for a server on another host would be made for nothing.
  KVT_ASSIGN_OR_RETURN(transport::UniqueFd connection,
                       transport::ConnectShm(opened.shm_socket(), deadline - absl::Now()));
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<transport::ShmRegion> region,
                       transport::ShmRegion::Make(bytes));
  KVT_RETURN_IF_ERROR(transport::HandShm(connection, opened.transport_id(), region->fd()));
  return std::make_shared<const SharedMemory>(std::move(region), std::move(connection),
                                              opened.transport_id());
}

}  // namespace

absl::StatusOr<std::shared_ptr<const SharedMemory>> OpenShm(v1::KvTierService::Stub& stub,
                                                            std::int64_t bytes,
                                                            absl::Duration limit) {
  if (bytes <= 0) {
    return absl::InvalidArgumentError(
        fmt::format("{} bytes of shared memory are asked for; want at least 1", bytes));
  }
  const absl::Time deadline = absl::Now() + limit;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  v1::OpenTransportRequest request;
  request.mutable_shm();
  v1::OpenTransportResponse opened;
  KVT_RETURN_IF_ERROR(FromGrpc(stub.OpenTransport(&context, request, &opened)));
  auto shared = HandOver(opened, bytes, deadline);
  if (!shared.ok()) Close(stub, opened.transport_id(), deadline);
  return shared;
}

absl::StatusOr<std::shared_ptr<SharedPool>> TransportChoice::Pool(v1::KvTierService::Stub& stub,
                                                                  std::uint64_t expected_bytes) {
  const bool may_lack = options_.transport == Transport::kAuto;
  {
    absl::MutexLock lock(&mutex_);
    const auto settled = [this] {
      mutex_.AssertReaderHeld();
      return !opening_;
    };
    mutex_.Await(absl::Condition(&settled));  // bounded: opening has a limit
    if (pool_ != nullptr && pool_->spoiled()) {
      pool_ = nullptr;
      chosen_ = false;
    }
    if (chosen_ || options_.transport == Transport::kInline) return pool_;
    if (may_lack && inline_bytes_ + expected_bytes < kWorthOpening) return nullptr;
    opening_ = true;
  }
  const auto memory = OpenShm(stub, options_.shm_bytes, options_.limit);
  std::shared_ptr<SharedPool> pool;
  if (memory.ok()) pool = std::make_shared<SharedPool>(*memory);
  // What is full now may not be later.
  const bool later = memory.status().code() == absl::StatusCode::kResourceExhausted;
  {
    absl::MutexLock lock(&mutex_);
    opening_ = false;
    pool_ = pool;
    chosen_ = memory.ok() || (may_lack && !later);
    if (later) inline_bytes_ = 0;
  }
  if (!memory.ok() && !may_lack) return memory.status();
  if (options_.tell) {
    options_.tell(pool != nullptr ? std::string("K and V travel through shared memory")
                                  : fmt::format("K and V travel inside gRPC messages: {}",
                                                std::string(memory.status().message())));
  }
  return pool;
}

void TransportChoice::Forget(const std::shared_ptr<SharedPool>& pool) {
  absl::MutexLock lock(&mutex_);
  if (pool_ != pool) return;
  pool_ = nullptr;
  chosen_ = false;
}

std::string TransportChoice::name() const {
  absl::MutexLock lock(&mutex_);
  if (options_.transport == Transport::kInline) return "inline";
  if (pool_ != nullptr) return "shm";
  return chosen_ ? "inline" : "";
}

}  // namespace kvtier::client
