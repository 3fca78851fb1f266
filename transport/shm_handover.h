#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/shm_region.h"
#include "transport/unique_fd.h"

// How a client hands shared memory to the server: over a Unix socket of packets, one packet each
// way. The client's has the id of the transport that it opened and the memfd; the server's says
// whether it took that. The connection is then the transport's life: whoever closes it, or dies,
// ends it. Only the client waits.
namespace kvtier::transport {

// A path of the file system, or of the abstract namespace with '@' for its zero byte.
// INVALID_ARGUMENT where it is longer than such an address can be.
absl::StatusOr<UniqueFd> ListenForShm(const std::string& address);

// The next client that has connected; none where nobody has.
UniqueFd AcceptShm(const UniqueFd& listener);

struct ShmOffer {
  std::string transport_id;
  UniqueFd memory;
};
// What a client that can be heard has sent. INVALID_ARGUMENT where that is nothing of this
// protocol, UNAVAILABLE where it went.
absl::StatusOr<ShmOffer> ReceiveShm(const UniqueFd& connection);
void AnswerShm(const UniqueFd& connection, const absl::Status& answer);

// The client's side: connects, and waits for no more than `limit` in each step from then on.
// UNAVAILABLE where nobody listens.
absl::StatusOr<UniqueFd> ConnectShm(const std::string& address, absl::Duration limit);

// Hands `memory` over and waits for the answer, which is the result. UNAVAILABLE where none came.
// Keep the connection as long as the transport is to be.
absl::Status HandShm(const UniqueFd& connection, const std::string& transport_id,
                     const UniqueFd& memory);

}  // namespace kvtier::transport
