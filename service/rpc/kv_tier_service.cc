#include "service/rpc/kv_tier_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/log.h"
#include "service/rpc/append_batch_handler.h"
#include "service/rpc/append_handler.h"
#include "service/rpc/capacity_reply.h"
#include "service/rpc/read_handler.h"
#include "service/rpc/reply.h"
#include "service/rpc/rpc_status.h"
#include "service/rpc/subscribe_handler.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

using cachestore::SequenceKey;

constexpr std::uint32_t kDefaultListed = 1000;
constexpr std::uint32_t kMaxListed = 10'000;
constexpr int kMaxPrompts = 1024;

std::uint64_t MillisecondsOf(absl::Duration duration) {
  return static_cast<std::uint64_t>(absl::ToInt64Milliseconds(duration));
}

// What `of_prompt` or `of_sequence` makes of a request that names one of the two.
template <class Request, class F, class G>
absl::StatusOr<cachestore::Grant> OfPromptOrSequence(const Request& request, F of_prompt,
                                                     G of_sequence) {
  if (request.sequence().empty() != request.has_prompt()) {
    return cachestore::Error(cachestore::Reason::kInvalidField,
                             request.has_prompt()
                                 ? "prompt and sequence are both set; want one of the two"
                                 : "neither prompt nor sequence is set; want one of the two");
  }
  if (request.has_prompt()) {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request.namespace_()));
    return of_prompt(name_space, PromptFrom(request.prompt()));
  }
  KVT_ASSIGN_OR_RETURN(const SequenceKey key, KeyFrom(request.namespace_(), request.sequence()));
  return of_sequence(key);
}

template <class Response>
void FillQuota(const cachestore::QuotaStanding& standing, Response& response) {
  if (standing.quota != cachestore::kNoQuota)
    response.set_quota_bytes(static_cast<std::uint64_t>(standing.quota));
  response.set_held_bytes(static_cast<std::uint64_t>(standing.held));
}

}  // namespace

template <class Response, class Work>
grpc::ServerUnaryReactor* KvTierServiceImpl::Serve(Call* call, const char* rpc, Response* response,
                                                   Work work) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const auto finish = [this, reactor, rpc](const absl::Status& status) {
    if (!status.ok()) context_.observer.Rejected(rpc, cachestore::ReasonOf(status));
    reactor->Finish(ToGrpc(status));
  };
  const bool posted =
      context_.work.Post(WorkQueue::Priority::kControl, [this, response, finish, work] {
        response->set_boot_id(context_.boot_id);
        finish(work());
      });
  if (!posted) finish(Overloaded());
  return reactor;
}

grpc::ServerUnaryReactor* KvTierServiceImpl::RegisterModel(Call* call,
                                                           const v1::RegisterModelRequest* request,
                                                           v1::RegisterModelResponse* response) {
  return Serve(call, "RegisterModel", response, [this, request, response]() -> absl::Status {
    KVT_RETURN_IF_ERROR(context_.CheckNotDraining());
    KVT_ASSIGN_OR_RETURN(cachestore::ModelRequest wanted, ModelRequestFrom(*request));
    KVT_ASSIGN_OR_RETURN(const auto entry, context_.store.RegisterModel(std::move(wanted)));
    FillRegistration(entry->model(), static_cast<std::int64_t>(request->max_tokens()),
                     context_.store.budget(), *response);
    response->set_max_message_bytes(context_.max_message_bytes);
    Log(LogLevel::kInfo, response->capacity_line(),
        {{"model", entry->model().request.spec.name},
         {"model_id", entry->model().id},
         {"kv_cache_dtype", entry->model().format},
         {"page_tokens", entry->model().page_tokens}});
    if (!response->scales_line().empty()) {
      const bool warn = entry->model().unit_scale_layers > 0;
      Log(warn ? LogLevel::kWarning : LogLevel::kInfo, response->scales_line(),
          {{"model_id", entry->model().id}});
    }
    for (const std::string& notice : response->notices()) {
      Log(LogLevel::kWarning, notice, {{"model_id", entry->model().id}});
    }
    return absl::OkStatus();
  });
}

grpc::ServerBidiReactor<v1::AppendRequest, v1::AppendResponse>* KvTierServiceImpl::Append(
    Call* call) {
  return ServeAppend(context_, *call);
}

grpc::ServerUnaryReactor* KvTierServiceImpl::AppendBatch(Call* call,
                                                         const v1::AppendBatchRequest* request,
                                                         v1::AppendBatchResponse* response) {
  return ServeAppendBatch(context_, *call, *request, *response);
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Lookup(Call* call, const v1::LookupRequest* request,
                                                    v1::LookupResponse* response) {
  return Serve(call, "Lookup", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request->namespace_()));
    if (request->prompts_size() < 1 || request->prompts_size() > kMaxPrompts) {
      return cachestore::Error(cachestore::Reason::kInvalidField,
                               fmt::format("prompts has {} entries; want 1 to {}",
                                           request->prompts_size(), kMaxPrompts));
    }
    std::vector<cachestore::Prompt> prompts;
    for (const v1::Prompt& prompt : request->prompts()) prompts.push_back(PromptFrom(prompt));
    KVT_ASSIGN_OR_RETURN(const std::vector<std::int64_t> tokens,
                         context_.store.Lookup(name_space, request->model_id(), prompts));
    response->mutable_tokens()->Assign(tokens.begin(), tokens.end());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Acquire(Call* call, const v1::AcquireRequest* request,
                                                     v1::AcquireResponse* response) {
  return Serve(call, "Acquire", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const absl::Duration duration, GrantDurationFrom(request->duration_ms()));
    cachestore::Store& store = context_.store;
    KVT_ASSIGN_OR_RETURN(const cachestore::Grant grant,
                         OfPromptOrSequence(
                             *request,
                             [&](const std::string& name_space, const cachestore::Prompt& prompt) {
                               return store.Acquire(name_space, request->model_id(), prompt,
                                                    duration);
                             },
                             [&](const SequenceKey& key) { return store.Acquire(key, duration); }));
    response->set_lease_id(grant.id);
    response->set_tokens(static_cast<std::uint64_t>(grant.tokens));
    response->set_duration_ms(MillisecondsOf(grant.duration));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Renew(Call* call, const v1::RenewRequest* request,
                                                   v1::RenewResponse* response) {
  return Serve(call, "Renew", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request->namespace_()));
    KVT_ASSIGN_OR_RETURN(const absl::Duration duration, GrantDurationFrom(request->duration_ms()));
    KVT_ASSIGN_OR_RETURN(const cachestore::Grant grant,
                         context_.store.Renew(name_space, request->lease_id(), duration));
    response->set_duration_ms(MillisecondsOf(grant.duration));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Release(Call* call, const v1::ReleaseRequest* request,
                                                     v1::ReleaseResponse* response) {
  return Serve(call, "Release", response, [this, request]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request->namespace_()));
    context_.store.Release(name_space, request->lease_id());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Pin(Call* call, const v1::PinRequest* request,
                                                 v1::PinResponse* response) {
  return Serve(call, "Pin", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const absl::Duration duration, GrantDurationFrom(request->duration_ms()));
    KVT_ASSIGN_OR_RETURN(const cachestore::PinKind kind, PinKindFrom(request->kind()));
    const cachestore::PinTerms terms{kind, duration};
    cachestore::Store& store = context_.store;
    KVT_ASSIGN_OR_RETURN(const cachestore::Grant grant,
                         OfPromptOrSequence(
                             *request,
                             [&](const std::string& name_space, const cachestore::Prompt& prompt) {
                               return store.AddPin(name_space, request->model_id(), prompt, terms);
                             },
                             [&](const SequenceKey& key) { return store.AddPin(key, terms); }));
    response->set_pin_id(grant.id);
    response->set_tokens(static_cast<std::uint64_t>(grant.tokens));
    response->set_duration_ms(MillisecondsOf(grant.duration));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Unpin(Call* call, const v1::UnpinRequest* request,
                                                   v1::UnpinResponse* response) {
  return Serve(call, "Unpin", response, [this, request]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request->namespace_()));
    context_.store.Unpin(name_space, request->pin_id());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Fork(Call* call, const v1::ForkRequest* request,
                                                  v1::ForkResponse* response) {
  return Serve(call, "Fork", response, [this, request, response]() -> absl::Status {
    KVT_RETURN_IF_ERROR(context_.CheckNotDraining());
    KVT_ASSIGN_OR_RETURN(const SequenceKey key,
                         KeyFrom(request->namespace_(), request->sequence()));
    KVT_RETURN_IF_ERROR(
        KeyFrom(request->namespace_(), request->new_sequence(), "new_sequence").status());
    std::int64_t tokens = -1;
    if (request->has_tokens()) {
      KVT_ASSIGN_OR_RETURN(tokens, TokensFrom(request->tokens(), "tokens"));
    }
    KVT_ASSIGN_OR_RETURN(tokens, context_.store.Fork(key, request->new_sequence(), tokens));
    response->set_tokens(static_cast<std::uint64_t>(tokens));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Seal(Call* call, const v1::SealRequest* request,
                                                  v1::SealResponse* response) {
  return Serve(call, "Seal", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const SequenceKey key,
                         KeyFrom(request->namespace_(), request->sequence()));
    KVT_ASSIGN_OR_RETURN(const std::int64_t tokens, TokensFrom(request->tokens(), "tokens"));
    response->set_tokens(request->tokens());
    return context_.store.Seal(key, tokens);
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Truncate(Call* call,
                                                      const v1::TruncateRequest* request,
                                                      v1::TruncateResponse* response) {
  return Serve(call, "Truncate", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const SequenceKey key,
                         KeyFrom(request->namespace_(), request->sequence()));
    if (!request->has_tokens()) {
      return cachestore::Error(cachestore::Reason::kInvalidField,
                               "tokens is not set; want how many stay, 0 for none");
    }
    KVT_ASSIGN_OR_RETURN(const std::int64_t tokens, TokensFrom(request->tokens(), "tokens"));
    response->set_tokens(request->tokens());
    return context_.store.Truncate(key, tokens, request->writer_epoch());
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Abort(Call* call, const v1::AbortRequest* request,
                                                   v1::AbortResponse* response) {
  return Serve(call, "Abort", response, [this, request]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const SequenceKey key,
                         KeyFrom(request->namespace_(), request->sequence()));
    return context_.store.Abort(key);
  });
}

grpc::ServerWriteReactor<v1::ReadResponse>* KvTierServiceImpl::Read(
    Call* call, const v1::ReadRequest* request) {
  return ServeRead(context_, *call, *request);
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Remove(Call* call, const v1::RemoveRequest* request,
                                                    v1::RemoveResponse* response) {
  return Serve(call, "Remove", response, [this, request]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const SequenceKey key,
                         KeyFrom(request->namespace_(), request->sequence()));
    return context_.store.Remove(key);
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Describe(Call* call,
                                                      const v1::DescribeRequest* request,
                                                      v1::DescribeResponse* response) {
  return Serve(call, "Describe", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const SequenceKey key,
                         KeyFrom(request->namespace_(), request->sequence()));
    KVT_ASSIGN_OR_RETURN(const cachestore::SequenceDescription description,
                         context_.store.Describe(key));
    const cachestore::Model& model = description.model->model();
    *response->mutable_info() = ToProto(description);
    *response->mutable_spec() = ToProto(model.request.spec);
    response->set_page_tokens(static_cast<std::uint32_t>(model.page_tokens));
    for (std::size_t i = 0; i < description.layers.size(); ++i) {
      *response->add_layers() =
          ToProto(description.layers[i], model.layers[i], static_cast<int>(i));
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::ListSequences(Call* call,
                                                           const v1::ListSequencesRequest* request,
                                                           v1::ListSequencesResponse* response) {
  return Serve(call, "ListSequences", response, [this, request, response]() -> absl::Status {
    if (request->page_size() > kMaxListed) {
      return cachestore::Error(
          cachestore::Reason::kInvalidField,
          fmt::format("page_size is {}; want 0 to {}", request->page_size(), kMaxListed));
    }
    // The page token is the last id of the page before; only its namespace can be malformed.
    KVT_ASSIGN_OR_RETURN(SequenceKey after, KeyFrom(request->namespace_(), "any"));
    after.id = request->page_token();
    const std::uint32_t limit = request->page_size() == 0 ? kDefaultListed : request->page_size();
    const auto found = context_.store.List(after, static_cast<int>(limit));
    for (const cachestore::SequenceDescription& description : found) {
      if (description.state == cachestore::SequenceState::kGone) continue;  // meanwhile
      *response->add_sequences() = ToProto(description);
    }
    if (found.size() == limit) response->set_next_page_token(found.back().id);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Capacity(Call* call,
                                                      const v1::CapacityRequest* request,
                                                      v1::CapacityResponse* response) {
  return Serve(call, "Capacity", response, [this, request, response] {
    return FillCapacity(context_.store, *request, *response);
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Scales(Call* call, const v1::ScalesRequest* request,
                                                    v1::ScalesResponse* response) {
  return Serve(call, "Scales", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const auto entry, context_.store.FindModel(request->model_id()));
    FillScales(*entry, *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::GetQuota(Call* call,
                                                      const v1::GetQuotaRequest* request,
                                                      v1::GetQuotaResponse* response) {
  return Serve(call, "GetQuota", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request->namespace_()));
    FillQuota(context_.store.GetQuota(name_space), *response);
    const bool ladder = context_.store.GetPressure(name_space) == cachestore::Pressure::kLadder;
    response->set_pressure(ladder ? v1::PRESSURE_LADDER : v1::PRESSURE_EVICT);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::SetQuota(Call* call,
                                                      const v1::SetQuotaRequest* request,
                                                      v1::SetQuotaResponse* response) {
  return Serve(call, "SetQuota", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request->namespace_()));
    KVT_ASSIGN_OR_RETURN(const std::int64_t bytes, QuotaFrom(request->quota_bytes()));
    KVT_ASSIGN_OR_RETURN(const cachestore::QuotaStanding standing,
                         context_.store.SetQuota(name_space, bytes));
    FillQuota(standing, *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::SetPressure(Call* call,
                                                         const v1::SetPressureRequest* request,
                                                         v1::SetPressureResponse* response) {
  return Serve(call, "SetPressure", response, [this, request, response]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request->namespace_()));
    KVT_ASSIGN_OR_RETURN(const cachestore::Pressure pressure, PressureFrom(request->pressure()));
    KVT_RETURN_IF_ERROR(context_.store.SetPressure(name_space, pressure));
    if (pressure == cachestore::Pressure::kEvict) return absl::OkStatus();
    const std::vector<std::string>& ladder = context_.store.options().ladder;
    response->mutable_ladder()->Add(ladder.begin(), ladder.end());
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::SubscribeResponse>* KvTierServiceImpl::Subscribe(
    Call* call, const v1::SubscribeRequest* request) {
  return ServeSubscribe(context_, *call, *request);
}

grpc::ServerUnaryReactor* KvTierServiceImpl::OpenTransport(Call* call,
                                                           const v1::OpenTransportRequest* request,
                                                           v1::OpenTransportResponse* response) {
  return Serve(call, "OpenTransport", response, [this, request, response]() -> absl::Status {
    if (request->has_nccl()) return context_.transports.OpenNccl(request->nccl(), *response);
    if (!request->has_shm()) {
      return cachestore::Error(cachestore::Reason::kInvalidField,
                               "transport is not set; want shm or nccl");
    }
    KVT_ASSIGN_OR_RETURN(*response->mutable_transport_id(),
                         context_.transports.OpenShm(context_.clock.Now()));
    response->set_shm_socket(context_.transports.shm_socket());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::GrantCredit(Call* call,
                                                         const v1::GrantCreditRequest* request,
                                                         v1::GrantCreditResponse* response) {
  return Serve(call, "GrantCredit", response,
               [this, request] { return context_.transports.Grant(*request); });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::CloseTransport(
    Call* call, const v1::CloseTransportRequest* request, v1::CloseTransportResponse* response) {
  return Serve(call, "CloseTransport", response, [this, request] {
    context_.transports.Close(request->transport_id());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KvTierServiceImpl::Drain(Call* call, const v1::DrainRequest*,
                                                   v1::DrainResponse* response) {
  return Serve(call, "Drain", response, [this] {
    on_drain_();
    return absl::OkStatus();
  });
}

}  // namespace kvtier::service
