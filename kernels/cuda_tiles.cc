#include "kernels/cuda_tiles.h"

#include <cstdlib>

#include "kernels/codec_table.h"

namespace kvtier::kernels {
namespace {

// Of kernels that differ in the bits of a code, one after the other: 2, 4, 8.
template <class Kernel>
Kernel OfBits(Kernel of_two, int bits) {
  const int further = bits == 2 ? 0 : (bits == 4 ? 1 : 2);
  return static_cast<Kernel>(static_cast<int>(of_two) + further);
}

// Where encoders and decoders go by the same name.
template <class Kernel>
Kernel KernelOf(const Codec& codec) {
  switch (codec.id) {
    case CodecId::kRaw:
    case CodecId::kFp8:
      return Kernel::kElements;
    case CodecId::kInt8PerTokenHead:
      return Kernel::kInt8PerTokenHead;
    case CodecId::kFp8PerTokenHead:
      return Kernel::kFp8PerTokenHead;
    case CodecId::kLlamaQ8:
      return Kernel::kLlamaQ8;
    case CodecId::kLlamaQ4:
      return Kernel::kLlamaQ4;
    case CodecId::kNvfp4:
    case CodecId::kNvfp4FourOverSix:
      return Kernel::kNvfp4;
    case CodecId::kInt4PerTokenHead:
      return Kernel::kInt4PerTokenHead;
    case CodecId::kMlaFp8:
      return Kernel::kMlaFp8;
    case CodecId::kFp8Page:
      return Kernel::kFp8Page;
    case CodecId::kKiviChannel:
      return OfBits(Kernel::kKiviChannel2, codec.bits);
    case CodecId::kKiviToken:
      return OfBits(Kernel::kKiviToken2, codec.bits);
  }
  std::abort();  // a CodecId comes from this program or from a checked header
}

}  // namespace

EncodeLaunch LaunchOf(const EncodeRun& run) {
  const bool wide = run.dim > kNarrowDim;
  if (StoresAsIs(run.codec, run.source.type)) return {EncodeKernel::kCopy};
  if (run.codec.id == CodecId::kNvfp4FourOverSix) return {EncodeKernel::kNvfp4FourOverSix, wide};
  return {KernelOf<EncodeKernel>(run.codec), wide};
}

DecodeLaunch LaunchOf(const DecodeRun& run) {
  const bool same_scale = run.codec.id != CodecId::kFp8 || run.scale == run.out_scale;
  if (StoresAsIs(run.codec, run.out.type) && same_scale) return {DecodeKernel::kCopy};
  return {KernelOf<DecodeKernel>(run.codec), run.dim > kNarrowDim};
}

Items ItemsOf(const EncodeRun& run, EncodeKernel kernel) {
  switch (kernel) {
    case EncodeKernel::kKiviChannel2:
    case EncodeKernel::kKiviChannel4:
    case EncodeKernel::kKiviChannel8:
      return {std::int64_t{run.units} * Octets(run.dim), kBlockThreads};
    case EncodeKernel::kKiviToken2:
    case EncodeKernel::kKiviToken4:
    case EncodeKernel::kKiviToken8:
      return {std::int64_t{run.units} * (run.dim / run.codec.group), kBlockThreads};
    case EncodeKernel::kFp8Page:
      return {run.units, 1};
    default:
      return {run.units, kTileRows};
  }
}

Items ItemsOf(const DecodeRun& run) { return {run.tokens, kTileRows}; }

}  // namespace kvtier::kernels
