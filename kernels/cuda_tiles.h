#pragma once

#include <cstdint>

#include "kernels/codec_run.h"
#include "kernels/cuda_jobs.h"

// How jobs are cut into the blocks of a launch. The kernels and who launches them both read it.
namespace kvtier::kernels {

// Rows of a tile, for kernels that take rows.
inline constexpr int kTileRows = 32;
// Bytes of a tile that is moved.
inline constexpr std::int64_t kTileBytes = 16 << 10;
// Values that a thread takes at a time, of consecutive channels.
inline constexpr int kOctet = 8;
// Octets of a row that one of a warp's lanes has, of wide rows.
inline constexpr int kWideOctets = kMaxHeadDim / kNarrowDim;
static_assert(kNarrowDim == 32 * kOctet);
// Blocks that a multiprocessor holds at once, at the least: a thread may have 64 registers, of wide
// rows 128. The build fails where those are not enough.
template <int kOctets>
inline constexpr int kBlocksAtOnce = kOctets == 1 ? 8 : 4;

constexpr int Octets(int dim) { return (dim + kOctet - 1) / kOctet; }

EncodeLaunch LaunchOf(const EncodeRun& run);
DecodeLaunch LaunchOf(const DecodeRun& run);

// Items of a job and of a tile of it: rows, pages, octets of channels or groups, whichever a
// kernel takes.
struct Items {
  std::int64_t count = 0;
  std::int64_t tile = 1;

  std::int64_t tiles() const { return (count + tile - 1) / tile; }
};
Items ItemsOf(const EncodeRun& run, EncodeKernel kernel);
Items ItemsOf(const DecodeRun& run);
inline Items ItemsOf(const DeviceMove& move) { return {move.bytes, kTileBytes}; }
inline Items ItemsOf(const DeviceLargest& job) { return {job.tokens, kTileRows}; }

}  // namespace kvtier::kernels
