#include "cachestore/requantize.h"

#include <utility>
#include <vector>

#include "cachestore/base/check.h"
#include "cachestore/base/status_macros.h"
#include "kernels/codec_table.h"
#include "kernels/host_codec.h"

namespace kvtier::cachestore {

absl::StatusOr<std::shared_ptr<Part>> Requantize(const Part& from, const TensorModel& to,
                                                 Allocation memory, Device& device) {
  KVT_CHECK(memory.size() >= to.layout.bytes);
  // Whoever reads it has to be told; a new checksum would hide it.
  const Part* const source_part = &from;
  const auto damage = FindDamage({&source_part, 1}, {0, to.heads()}, device);
  KVT_RETURN_IF_ERROR(device.Health());
  if (damage.front().has_value()) return nullptr;
  auto part = std::make_shared<Part>(std::move(memory), to, from.side(), from.k_before_rope());
  const int dim = to.dim(), page_tokens = to.layout.page_tokens;
  const int units = page_tokens / to.layout.unit_tokens;
  const float limit = kernels::MagnitudeLimit(to.layout.codec, dim);
  std::vector<float> values(static_cast<std::size_t>(dim) * static_cast<std::size_t>(page_tokens));
  auto* const bytes = reinterpret_cast<std::byte*>(values.data());
  const kernels::ConstRows source{bytes, ElementType::kFp32, dim};
  device.Zero(
      part->Empty(std::vector<std::int64_t>(static_cast<std::size_t>(to.heads()), page_tokens)));
  HeaderWrites header;
  // What had saturated before counts on.
  part->saturated(0) = static_cast<std::uint64_t>(from.saturated_values());
  for (int head = 0; head < to.heads(); ++head) {
    const DecodeJob decode{{.codec = from.layout().codec,
                            .dim = dim,
                            .scale = from.CodeScaleOf(head),
                            .in = from.SliceAt(head),
                            .tokens = page_tokens,
                            .out = {bytes, ElementType::kFp32, dim}}};
    KVT_RETURN_IF_ERROR(device.Decode({&decode, 1}));
    // Not a NaN either.
    if (!(kernels::LargestMagnitude(source, dim, page_tokens) <= limit)) return nullptr;
    const EncodeJob encode{{.codec = to.layout.codec,
                            .dim = dim,
                            .scale = part->CodeScaleOf(head),
                            .source = source,
                            .units = units,
                            .out = part->UnitAt(head, 0)},
                           &part->saturated(head),
                           part->ChecksumOf(head)};
    KVT_RETURN_IF_ERROR(device.Encode({&encode, 1}));
    part->Hold(units);
    part->TakeNewSaturated();
    part->FinishHead(head, header);
  }
  header.Write(device);
  KVT_RETURN_IF_ERROR(device.Health());
  return part;
}

}  // namespace kvtier::cachestore
