#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/base/clock.h"
#include "service/rpc/transports.h"
#include "transport/unique_fd.h"

namespace kvtier::service {

// Takes the memory that clients hand over on a Unix socket, and closes a transport when its client
// goes. One thread; a client that is slow or sends nonsense keeps none waiting but itself.
class ShmServer {
 public:
  // `address`: a path; "@NAME" of the abstract namespace. What it's given must outlive it.
  static absl::StatusOr<std::unique_ptr<ShmServer>> Start(const std::string& address,
                                                          Transports& transports,
                                                          const cachestore::Clock& clock);
  ~ShmServer();
  ShmServer(const ShmServer&) = delete;
  ShmServer& operator=(const ShmServer&) = delete;

 private:
  struct Client {
    std::shared_ptr<transport::UniqueFd> connection;
    std::string transport_id;  // empty until it has handed memory over
    absl::Time since;
  };

  ShmServer(const std::string& address, transport::UniqueFd listener, transport::UniqueFd stop,
            Transports& transports, const cachestore::Clock& clock);
  void Run();
  void Accept();
  // Whether it is done with.
  bool Serve(Client& client);

  const std::string address_;
  const transport::UniqueFd listener_;
  const transport::UniqueFd stop_;  // readable: end
  Transports& transports_;
  const cachestore::Clock& clock_;
  // Of the thread.
  std::vector<Client> clients_;
  absl::Time accepts_from_;  // after there was no descriptor for another
  std::thread thread_;
};

}  // namespace kvtier::service
