#include "cachestore/value_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "kernels/codec_table.h"
#include "kernels/host_codec.h"

namespace kvtier::cachestore {
namespace {

float ValueAt(const kernels::ConstRows& rows, int channel) {
  const std::byte* at = rows.data + std::int64_t{channel} * kernels::ElementBytes(rows.type);
  return kernels::VisitElement(rows.type, [&](auto element) {
    return kernels::ToFloat(*reinterpret_cast<const decltype(element)*>(at));
  });
}

absl::Status Refuse(const TensorModel& tensor, const ValueRange& range, std::int64_t token,
                    int channel, float value) {
  const bool finite = std::isfinite(value);
  const std::string place = fmt::format("{} of layer {}, head {}, token {}, channel {} is {}",
                                        range.side == Side::kK ? "k" : "v", range.layer, range.head,
                                        token, channel, value);
  if (!finite) return Error(Reason::kNonFiniteValue, place + "; want a finite number");
  const kernels::Codec& codec = tensor.layout.codec;
  return Error(
      Reason::kValueOutOfRange,
      fmt::format("{}; {}{} takes magnitudes up to {}", place, kernels::RowOf(codec.id).name,
                  codec.rotation == kernels::Rotation::kNone ? "" : " of rotated keys",
                  kernels::MagnitudeLimit(codec, tensor.dim())));
}

// Of a source in blocks only their scales can be wrong.
absl::Status CheckBlocks(const TensorModel& tensor, const SourceTensor& source,
                         const ValueRange& range) {
  const int bytes =
      tensor.source == kernels::ElementType::kQ8 ? kernels::kLlamaQ8Bytes : kernels::kLlamaQ4Bytes;
  for (std::int64_t token = range.begin; token < range.end; ++token) {
    const kernels::ConstRows row = source.RowsOf(range.shard_head, token - range.first_token);
    for (int block = 0; block < tensor.dim() / kernels::kLlamaBlock; ++block) {
      kernels::Fp16 d{};
      std::memcpy(&d, row.data + std::int64_t{block} * bytes, sizeof d);
      const float scale = kernels::ToFloat(d);
      if (!std::isfinite(scale))
        return Refuse(tensor, range, token, block * kernels::kLlamaBlock, scale);
    }
  }
  return absl::OkStatus();
}

}  // namespace

float LimitOf(const TensorModel& tensor, bool saturate_non_finite) {
  return TakesNonFinite(tensor, saturate_non_finite)
             ? std::numeric_limits<float>::max()
             : kernels::MagnitudeLimit(tensor.layout.codec, tensor.dim());
}

bool TakesNonFinite(const TensorModel& tensor, bool saturate_non_finite) {
  const kernels::Codec& codec = tensor.layout.codec;
  if (kernels::IsFp8(tensor.source)) return true;  // kept, and counted
  return saturate_non_finite && codec.id == kernels::CodecId::kFp8 &&
         codec.rotation == kernels::Rotation::kNone;
}

std::vector<float> CheckHeads(const TensorModel& tensor, const SourceTensor& source,
                              const ValueRange& range, std::size_t heads,
                              bool saturate_non_finite) {
  if (kernels::IsFp8(tensor.source) || kernels::IsBlocks(tensor.source) || range.begin >= range.end)
    return {};
  std::vector<float> largest(heads);
  kernels::LargestMagnitudes(source.RowsOf(range.shard_head, range.begin - range.first_token),
                             tensor.dim(), range.end - range.begin, source.head_stride, largest);
  const float limit = LimitOf(tensor, saturate_non_finite);
  const bool fit = std::all_of(largest.begin(), largest.end(),
                               [limit](float magnitude) { return magnitude <= limit; });
  return fit ? largest : std::vector<float>();
}

absl::StatusOr<float> CheckValues(const TensorModel& tensor, const SourceTensor& source,
                                  const ValueRange& range, bool saturate_non_finite) {
  if (range.begin >= range.end) return 0.0f;
  // Kept as they are; what they stand for is not looked at.
  if (kernels::IsFp8(tensor.source)) return 0.0f;
  if (kernels::IsBlocks(tensor.source)) {
    KVT_RETURN_IF_ERROR(CheckBlocks(tensor, source, range));
    return 0.0f;
  }
  const bool take_all = TakesNonFinite(tensor, saturate_non_finite);
  const float limit = LimitOf(tensor, saturate_non_finite);
  const kernels::ConstRows rows = source.RowsOf(range.shard_head, range.begin - range.first_token);
  const auto fits = [limit](float magnitude) { return magnitude <= limit; };  // false for NaN
  float largest = kernels::LargestMagnitude(rows, tensor.dim(), range.end - range.begin);
  if (fits(largest)) return largest;
  largest = 0;
  for (std::int64_t token = range.begin; token < range.end; ++token) {
    const kernels::ConstRows row = source.RowsOf(range.shard_head, token - range.first_token);
    for (int channel = 0; channel < tensor.dim(); ++channel) {
      const float value = ValueAt(row, channel);
      if (fits(std::fabs(value))) {
        largest = std::max(largest, std::fabs(value));
      } else if (!take_all) {
        return Refuse(tensor, range, token, channel, value);
      }
    }
  }
  return largest;
}

}  // namespace kvtier::cachestore
