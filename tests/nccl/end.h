#pragma once

#include <cstdint>
#include <vector>

#include "transport/nccl_link.h"

// What both ends of a transfer in these tests agree on, and memory of a device to do it with.
namespace kvtier::transport::testing {

inline constexpr int kGroups = 4;
inline constexpr int kPieces = 8;  // of a group
inline constexpr std::int64_t kPieceBytes = 256 << 10;

// Where this executable takes its first argument for this, it is a worker's end, which does what
// the next one says, with pipes to and from the test, and runs no tests. Its exit code: 0 where
// what it received is what was to be sent.
inline constexpr char kWorkerArgument[] = "--worker";
int RunWorker(const std::string& behaviour, int to_test, int from_test);

// Device memory for all pieces. Its bytes follow from their place, or are zero.
class Pieces {
 public:
  explicit Pieces(bool filled);
  ~Pieces();
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  std::vector<DevicePiece> Group(int group, std::int64_t bytes = kPieceBytes) const;
  // Whether all of it is what a filled one holds.
  bool Good() const;

 private:
  std::byte* device_ = nullptr;
  std::byte* host_ = nullptr;  // pinned
};

}  // namespace kvtier::transport::testing
