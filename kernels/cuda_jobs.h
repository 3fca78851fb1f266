#pragma once

#include <compare>
#include <cstdint>

#include "kernels/codec_run.h"

struct CUstream_st;

// What the kernels take and how they are launched: the one header of the CUDA codecs that the host
// sees, without CUDA's own. All pointers are the device's, those in jobs too.
namespace kvtier::kernels {

// A job's count of what saturated is added to.
using DeviceCount = unsigned long long;
struct DeviceEncode {
  EncodeRun run;
  DeviceCount* saturated = nullptr;
};
struct DeviceDecode {
  DecodeRun run;
  DeviceCount* saturated = nullptr;
};
// `bytes` from `from` to `to`, which do not overlap; zeros where `from` is null.
struct DeviceMove {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::int64_t bytes = 0;
};
// XXH3, 64 bits, seed 0, of more than kShortHash bytes.
struct DeviceHash {
  const std::byte* from = nullptr;
  std::int64_t bytes = 0;
  std::uint64_t* out = nullptr;
};
inline constexpr std::int64_t kShortHash = 240;
// The bits of the largest |x| of rows, an integer by which magnitudes are ordered, and NaN above
// them: the greater of it and what is there.
struct DeviceLargest {
  ConstRows rows;
  int dim = 0;
  std::int64_t tokens = 0;
  DeviceCount* largest = nullptr;
};

// A block's share of a launch: the `index`-th of the tiles that a job's items are cut into.
struct Tile {
  std::uint32_t job = 0;
  std::uint32_t index = 0;
};

// What is launched together: jobs that one kernel does, whatever their shapes.
enum class EncodeKernel : std::uint8_t {
  kCopy,
  kElements,
  kInt8PerTokenHead,
  kFp8PerTokenHead,
  kLlamaQ8,
  kLlamaQ4,
  kNvfp4,
  kNvfp4FourOverSix,
  kInt4PerTokenHead,
  kMlaFp8,
  kFp8Page,
  kKiviChannel2,
  kKiviChannel4,
  kKiviChannel8,
  kKiviToken2,
  kKiviToken4,
  kKiviToken8,
  kRotate,  // rows to fp32, rotated: what a rotated codec takes as its source
};
enum class DecodeKernel : std::uint8_t {
  kCopy,
  kElements,
  kInt8PerTokenHead,
  kFp8PerTokenHead,
  kLlamaQ8,
  kLlamaQ4,
  kNvfp4,
  kInt4PerTokenHead,
  kMlaFp8,
  kFp8Page,
  kKiviChannel2,
  kKiviChannel4,
  kKiviChannel8,
  kKiviToken2,
  kKiviToken4,
  kKiviToken8,
};

// What jobs must have in common to be launched together.
template <class Kernel>
struct LaunchKind {
  Kernel kernel = Kernel::kCopy;
  bool wide = false;  // rows of more than kNarrowDim channels

  friend constexpr auto operator<=>(const LaunchKind&, const LaunchKind&) = default;
};
using EncodeLaunch = LaunchKind<EncodeKernel>;
using DecodeLaunch = LaunchKind<DecodeKernel>;

inline constexpr int kBlockThreads = 128;
inline constexpr int kNarrowDim = 256;

// One launch on a stream, which returns at once; a cudaError_t. `tiles`: blocks of the grid, at
// least one.
int LaunchEncode(EncodeLaunch launch, const DeviceEncode* jobs, const Tile* tiles,
                 std::int64_t count, CUstream_st* stream);
int LaunchDecode(DecodeLaunch launch, const DeviceDecode* jobs, const Tile* tiles,
                 std::int64_t count, CUstream_st* stream);
int LaunchMove(const DeviceMove* jobs, const Tile* tiles, std::int64_t count, CUstream_st* stream);
int LaunchLargest(const DeviceLargest* jobs, const Tile* tiles, std::int64_t count,
                  CUstream_st* stream);
// A block a job.
int LaunchHash(const DeviceHash* jobs, std::int64_t count, CUstream_st* stream);

}  // namespace kvtier::kernels
