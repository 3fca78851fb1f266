#pragma once

#include "kvtier/v1/kv_tier.grpc.pb.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

// The service: one method a call, each no more than proto in, store, proto out. Streams are in
// append_handler, read_handler and subscribe_handler, batches in append_batch_handler. Thread-safe.
class KvTierServiceImpl final : public v1::KvTierService::CallbackService {
 public:
  // `on_drain` is called when a client asks for Drain.
  KvTierServiceImpl(RpcContext& context, std::function<void()> on_drain)
      : context_(context), on_drain_(std::move(on_drain)) {}

  using Call = grpc::CallbackServerContext;
  using Unary = grpc::ServerUnaryReactor;
  Unary* RegisterModel(Call* call, const v1::RegisterModelRequest* request,
                       v1::RegisterModelResponse* response) override;
  grpc::ServerBidiReactor<v1::AppendRequest, v1::AppendResponse>* Append(Call* call) override;
  Unary* AppendBatch(Call* call, const v1::AppendBatchRequest* request,
                     v1::AppendBatchResponse* response) override;
  Unary* Lookup(Call* call, const v1::LookupRequest* request,
                v1::LookupResponse* response) override;
  Unary* Acquire(Call* call, const v1::AcquireRequest* request,
                 v1::AcquireResponse* response) override;
  Unary* Renew(Call* call, const v1::RenewRequest* request, v1::RenewResponse* response) override;
  Unary* Release(Call* call, const v1::ReleaseRequest* request,
                 v1::ReleaseResponse* response) override;
  Unary* Pin(Call* call, const v1::PinRequest* request, v1::PinResponse* response) override;
  Unary* Unpin(Call* call, const v1::UnpinRequest* request, v1::UnpinResponse* response) override;
  Unary* Fork(Call* call, const v1::ForkRequest* request, v1::ForkResponse* response) override;
  Unary* Seal(Call* call, const v1::SealRequest* request, v1::SealResponse* response) override;
  Unary* Truncate(Call* call, const v1::TruncateRequest* request,
                  v1::TruncateResponse* response) override;
  Unary* Abort(Call* call, const v1::AbortRequest* request, v1::AbortResponse* response) override;
  grpc::ServerWriteReactor<v1::ReadResponse>* Read(Call* call,
                                                   const v1::ReadRequest* request) override;
  Unary* Remove(Call* call, const v1::RemoveRequest* request,
                v1::RemoveResponse* response) override;
  Unary* Describe(Call* call, const v1::DescribeRequest* request,
                  v1::DescribeResponse* response) override;
  Unary* ListSequences(Call* call, const v1::ListSequencesRequest* request,
                       v1::ListSequencesResponse* response) override;
  Unary* Capacity(Call* call, const v1::CapacityRequest* request,
                  v1::CapacityResponse* response) override;
  Unary* Scales(Call* call, const v1::ScalesRequest* request,
                v1::ScalesResponse* response) override;
  Unary* GetQuota(Call* call, const v1::GetQuotaRequest* request,
                  v1::GetQuotaResponse* response) override;
  Unary* SetQuota(Call* call, const v1::SetQuotaRequest* request,
                  v1::SetQuotaResponse* response) override;
  Unary* SetPressure(Call* call, const v1::SetPressureRequest* request,
                     v1::SetPressureResponse* response) override;
  grpc::ServerWriteReactor<v1::SubscribeResponse>* Subscribe(
      Call* call, const v1::SubscribeRequest* request) override;
  Unary* OpenTransport(Call* call, const v1::OpenTransportRequest* request,
                       v1::OpenTransportResponse* response) override;
  Unary* GrantCredit(Call* call, const v1::GrantCreditRequest* request,
                     v1::GrantCreditResponse* response) override;
  Unary* CloseTransport(Call* call, const v1::CloseTransportRequest* request,
                        v1::CloseTransportResponse* response) override;
  Unary* Drain(Call* call, const v1::DrainRequest* request, v1::DrainResponse* response) override;

 private:
  // Runs `work` off gRPC's threads and finishes the call with what it returns.
  template <class Response, class Work>
  Unary* Serve(Call* call, const char* rpc, Response* response, Work work);

  RpcContext& context_;
  const std::function<void()> on_drain_;
};

}  // namespace kvtier::service
