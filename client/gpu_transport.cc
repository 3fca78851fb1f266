#include "client/gpu_transport.h"

#include <fmt/format.h>
#include <grpcpp/client_context.h>

#include <algorithm>
#include <limits>

#include "absl/time/clock.h"
#include "cachestore/base/status_macros.h"
#include "client/grpc_status.h"

namespace kvtier::client {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr absl::Duration kCloseLimit = absl::Seconds(1);

std::int64_t Aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Begun {
  std::shared_ptr<OpenedTransport> opened;
  transport::NcclRuntime::Options options;
};

absl::StatusOr<Begun> Begin(const GpuTransportOptions& options, v1::Direction direction) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options.deadline));
  v1::OpenTransportRequest request;
  v1::NcclTransport& nccl = *request.mutable_nccl();
  nccl.set_direction(direction);
  KVT_ASSIGN_OR_RETURN(const std::string id, options.nccl->NewId());
  nccl.set_unique_id(id);
  nccl.set_nccl_version(options.nccl->version());
  nccl.set_gpu(options.nccl->gpu());
  v1::OpenTransportResponse reply;
  KVT_RETURN_IF_ERROR(FromGrpc(options.stub->OpenTransport(&context, request, &reply)));
  std::shared_ptr<OpenedTransport> opened(new OpenedTransport{*options.stub, std::move(reply)});
  return Begun{.opened = std::move(opened),
               .options = {.id = id,
                           .server = false,
                           .sends = direction == v1::DIRECTION_APPEND,
                           .deadline = options.deadline,
                           .memory = nullptr}};
}

}  // namespace

OpenedTransport::~OpenedTransport() {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kCloseLimit));
  v1::CloseTransportRequest request;
  request.set_transport_id(reply.transport_id());
  v1::CloseTransportResponse response;
  stub.CloseTransport(&context, request, &response);
}

v1::GrantCreditRequest GpuReadTransport::CreditOf(const OpenedTransport& opened) {
  v1::GrantCreditRequest credit;
  credit.set_transport_id(opened.reply.transport_id());
  return credit;
}

GpuReadTransport::GpuReadTransport(const GpuTransportOptions& options,
                                   std::shared_ptr<OpenedTransport> opened,
                                   std::shared_ptr<Slots> slots)
    : options_(options),
      opened_(std::move(opened)),
      slots_(std::move(slots)),
      credits_(*options.stub, CreditOf(*opened_), &v1::GrantCreditRequest::set_transfers) {}

absl::StatusOr<std::shared_ptr<GpuReadTransport>> GpuReadTransport::Open(
    const GpuTransportOptions& options) {
  KVT_ASSIGN_OR_RETURN(Begun begun, Begin(options, v1::DIRECTION_READ));
  auto slots = std::make_shared<Slots>();
  slots->bytes = static_cast<std::int64_t>(begun.opened->reply.max_transfer_bytes());
  for (std::size_t i = 0; i < kSlots; ++i) {
    KVT_ASSIGN_OR_RETURN(slots->memory.emplace_back(), AllocateOnGpu(slots->bytes));
  }
  KVT_ASSIGN_OR_RETURN(slots->stream, MakeGpuStream());
  KVT_ASSIGN_OR_RETURN(slots->copied, MakeGpuEvent());
  std::shared_ptr<GpuReadTransport> transport(
      new GpuReadTransport(options, std::move(begun.opened), slots));
  begun.options.memory = std::move(slots);
  transport->channel_ = options.nccl->Open(std::move(begun.options));
  return transport;
}

absl::Status GpuReadTransport::Receive(std::uint64_t number, std::int64_t bytes, Copies copies,
                                       std::function<void(const absl::Status&)> done) {
  if (bytes < 0 || bytes > slots_->bytes) {
    return absl::DataLossError(
        fmt::format("a transfer is said to have {} bytes; the transport's have at most {}", bytes,
                    slots_->bytes));
  }
  absl::MutexLock lock(&mutex_);
  const auto free = [this, number]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return number < freed_ + kSlots || !channel_->status().ok();
  };
  // Those before it may be another read's, which must post them first.
  if (!mutex_.AwaitWithTimeout(absl::Condition(&free), options_.deadline)) {
    return absl::DeadlineExceededError(fmt::format("transfer {} found no room within {} s", number,
                                                   absl::ToDoubleSeconds(options_.deadline)));
  }
  transport::NcclTransfer transfer{.pieces = {{slots_->memory[number % kSlots].get(), bytes}},
                                   .done = [this, number, copies = std::move(copies),
                                            done = std::move(done)](const absl::Status& came) {
                                     const absl::Status status =
                                         came.ok() ? Copy(number, copies) : came;
                                     if (came.ok() && !status.ok())
                                       channel_->Close(std::string(status.message()));
                                     Free(number);
                                     done(status);
                                   }};
  KVT_RETURN_IF_ERROR(channel_->Post(number, std::move(transfer)));
  posted_.insert(number);
  for (; posted_.contains(posted_to_); ++posted_to_) posted_.erase(posted_to_);
  if (posted_to_ > 0) credits_.Tell(posted_to_);
  return absl::OkStatus();
}

absl::Status GpuReadTransport::Copy(std::uint64_t number, const Copies& copies) const {
  KVT_RETURN_IF_ERROR(copies(slots_->memory[number % kSlots].get(), slots_->stream));
  return client::Drain(slots_->stream, slots_->copied, options_.deadline);
}

void GpuReadTransport::Free(std::uint64_t number) {
  absl::MutexLock lock(&mutex_);
  freed_ = std::max(freed_, number + 1);  // they end in order
}

absl::Status GpuReadTransport::Read::Take(const v1::ReadChunk& chunk, Copies copies) {
  if (!chunk.has_transfer())
    return absl::DataLossError("a chunk of a read over NCCL says no transfer");
  {
    absl::MutexLock lock(&progress_->mutex);
    KVT_RETURN_IF_ERROR(progress_->status);
    ++progress_->left;
  }
  const auto done = [progress = progress_](const absl::Status& status) {
    absl::MutexLock lock(&progress->mutex);
    --progress->left;
    progress->status.Update(status);
  };
  absl::Status posted = transport_->Receive(
      chunk.transfer(), static_cast<std::int64_t>(chunk.transfer_bytes()), std::move(copies), done);
  if (!posted.ok()) done(posted);
  return posted;
}

bool GpuReadTransport::Read::Await() {
  absl::MutexLock lock(&progress_->mutex);
  const auto all = [this]() ABSL_SHARED_LOCKS_REQUIRED(progress_->mutex) {
    return progress_->left == 0;
  };
  // Of more transfers than one: the channel gives up first.
  return progress_->mutex.AwaitWithTimeout(absl::Condition(&all),
                                           2 * transport_->options_.deadline);
}

absl::Status GpuReadTransport::Read::Finish() {
  if (!Await()) return absl::DeadlineExceededError("the transfers of the read have not ended");
  absl::MutexLock lock(&progress_->mutex);
  finished_ = progress_->status.ok();
  return progress_->status;
}

GpuReadTransport::Read::~Read() {
  if (finished_) return;
  transport_->channel_->Close("a read over it was broken off");
  Await();
}

GpuAppendTransport::GpuAppendTransport(const GpuTransportOptions& options,
                                       std::shared_ptr<OpenedTransport> opened)
    : options_(options), opened_(std::move(opened)) {}

absl::StatusOr<std::shared_ptr<GpuAppendTransport>> GpuAppendTransport::Open(
    const GpuTransportOptions& options) {
  KVT_ASSIGN_OR_RETURN(Begun begun, Begin(options, v1::DIRECTION_APPEND));
  std::shared_ptr<GpuAppendTransport> transport(
      new GpuAppendTransport(options, std::move(begun.opened)));
  transport->channel_ = options.nccl->Open(std::move(begun.options));
  transport->channel_->Allow(std::numeric_limits<std::uint64_t>::max());
  return transport;
}

std::int64_t GpuAppendTransport::Place(std::int64_t bytes) const {
  std::int64_t begin = 0;
  for (const auto& [from, to] : taken_) {
    if (from - begin >= bytes) break;
    begin = to;
  }
  const auto size = static_cast<std::int64_t>(opened_->reply.memory_bytes());
  return size - begin >= bytes ? begin : -1;
}

void GpuAppendTransport::GiveBack(std::int64_t begin) {
  absl::MutexLock lock(&mutex_);
  std::erase_if(taken_, [begin](const auto& piece) { return piece.first == begin; });
}

absl::StatusOr<std::shared_ptr<const void>> GpuAppendTransport::Send(
    const transport::DevicePiece& k, const transport::DevicePiece& v,
    std::shared_ptr<CUevent_st> after, v1::AppendChunk& chunk) {
  const std::int64_t v_begin = Aligned(k.bytes),
                     bytes = std::max(kAlignment, v_begin + Aligned(v.bytes));
  if (bytes > static_cast<std::int64_t>(opened_->reply.memory_bytes())) {
    return absl::InvalidArgumentError(
        fmt::format("a chunk has {} bytes; the server takes at most {} at once (--nccl-memory): "
                    "send fewer tokens a chunk",
                    bytes, opened_->reply.memory_bytes()));
  }
  absl::MutexLock lock(&mutex_);
  const auto room = [this, bytes]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return Place(bytes) >= 0 || !channel_->status().ok();
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&room), options_.deadline)) {
    return absl::DeadlineExceededError(
        fmt::format("the server has not made room for {} bytes within {} s", bytes,
                    absl::ToDoubleSeconds(options_.deadline)));
  }
  const std::int64_t begin = Place(bytes);
  KVT_RETURN_IF_ERROR(channel_->Post(
      next_, {.pieces = {k, v}, .after = std::move(after), .done = [](const absl::Status&) {}}));
  if (begin < 0) return channel_->status();
  taken_.emplace_back(begin, begin + bytes);
  std::sort(taken_.begin(), taken_.end());
  chunk.set_k_offset(static_cast<std::uint64_t>(begin));
  chunk.set_v_offset(static_cast<std::uint64_t>(begin + v_begin));
  chunk.set_transfer(next_++);
  return std::shared_ptr<const void>(
      this, [self = shared_from_this(), begin](const void*) { self->GiveBack(begin); });
}

}  // namespace kvtier::client
