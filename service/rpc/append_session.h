#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "cachestore/store.h"
#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/rpc_context.h"
#include "service/rpc/wire.h"

namespace kvtier::service {

// The protocol of one append stream: an open, then chunks. One message at a time, in order.
class AppendSession {
 public:
  // `on_end` as WriterRequest has it.
  AppendSession(RpcContext& context, std::function<void(const absl::Status&)> on_end)
      : context_(context), on_end_(std::move(on_end)) {}

  absl::StatusOr<v1::AppendResponse> Open(const v1::AppendOpen& open);
  absl::StatusOr<v1::AppendResponse> Take(const v1::AppendChunk& chunk);

 private:
  v1::AppendResponse Ack(const cachestore::AppendResult& result) const;

  RpcContext& context_;
  const std::function<void(const absl::Status&)> on_end_;
  SourceLayout layout_;
  std::unique_ptr<cachestore::Writer> writer_;
  std::uint64_t chunks_ = 0;
};

}  // namespace kvtier::service
