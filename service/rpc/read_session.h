#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

// What one Read call sends, message by message: manifest, chunks, summary. Not thread-safe.
class ReadSession {
 public:
  // kWorked: there is more to do before there is a message; others may go first. kWaiting: there is
  // nothing to send before news comes. kNoRoom: nor before the reader gives room back.
  enum class Step { kWorked, kMessage, kWaiting, kNoRoom, kEnd };

  virtual ~ReadSession() = default;
  // Writes the next message, or does some of the work for it.
  virtual absl::StatusOr<Step> Next(v1::ReadResponse& out) = 0;
  // One that waits ends then, if nothing comes.
  virtual absl::Time deadline() const { return absl::InfiniteFuture(); }
};

// `on_news`: from any thread, outside locks.
// Of what is held now: chunks in manifest order.
std::unique_ptr<ReadSession> MakeReadSession(RpcContext& context, const v1::ReadRequest& request,
                                             std::function<void()> on_news);
// Of sequences as they are received (ReadRequest.follow).
std::unique_ptr<ReadSession> MakeFollowSession(RpcContext& context, const v1::ReadRequest& request,
                                               std::function<void()> on_news);

absl::Status CheckSequences(const v1::ReadRequest& request);

}  // namespace kvtier::service
