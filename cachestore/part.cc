#include "cachestore/part.h"

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "cachestore/base/check.h"

namespace kvtier::cachestore {

Part::Part(Allocation memory, const TensorModel& model, Side side, bool k_before_rope,
           Device& device)
    : model_(model),
      memory_(std::move(memory)),
      header_(MakePartHeader(model, side, k_before_rope)),
      saturated_(static_cast<std::size_t>(model.heads())) {
  device.Zero(memory_.data(), memory_.size());
  memory_.Hold({.header = layout().header_use()});
  device.Write(memory_.data(), &header_, kPartHeaderBytes);
  for (int head = 0; head < layout().heads; ++head)
    WriteEntry(head, {.scale = ScaleOf(head)}, device);
}

Part::Part(Allocation memory, const Part& other, Device& device)
    : model_(other.model_),
      memory_(std::move(memory)),
      header_(other.header_),
      saturated_(other.saturated_),
      finished_heads_(other.finished_heads_),
      final_(other.final_),
      was_cut_(other.was_cut_) {
  device.Copy(memory_.data(), other.memory_.data(), memory_.size());
  memory_.Hold(other.memory_.held().use);
}

void Part::Cut(std::int64_t token, absl::Span<const std::int64_t> codes, Device& device) {
  if (final_) {
    std::vector<std::byte> start(static_cast<std::size_t>(layout().header_use()));
    device.Fetch(start.data(), memory_.data(), layout().header_use());
    for (int head = 0; head < layout().heads; ++head)
      saturated_.push_back(EntryOf(start.data(), head).saturated);
    final_ = false;
  }
  was_cut_ = true;
  finished_heads_ = 0;
  header_.tokens = 0;
  header_.checksum = 0;
  device.Write(memory_.data(), &header_, kPartHeaderBytes);
  for (int head = 0; head < layout().heads; ++head) {
    WriteEntry(head, {.scale = ScaleOf(head)}, device);
    const std::int64_t units =
        (codes[static_cast<std::size_t>(head)] - token) / layout().unit_tokens;
    if (units <= 0) continue;
    device.Zero(UnitAt(head, token), units * layout().unit.total());
    Hold(-units);
  }
}

void Part::Hold(std::int64_t units) {
  memory_.Hold({.codes = units * layout().unit.codes, .scales = units * layout().unit.scales});
}

void Part::WriteEntry(int head, const HeadEntry& entry, Device& device) {
  device.Write(memory_.data() + kPartHeaderBytes + head * kHeadEntryBytes, &entry, kHeadEntryBytes);
}

void Part::FinishHead(int head, Device& device) {
  KVT_CHECK(!final_ && finished_heads_ < layout().heads);
  WriteEntry(head,
             {.checksum = device.Checksum(SliceAt(head), layout().slice_bytes),
              .scale = ScaleOf(head),
              .saturated = static_cast<std::uint32_t>(saturated(head))},
             device);
  if (++finished_heads_ < layout().heads) return;
  header_.tokens = header_.page_tokens;
  device.Write(memory_.data(), &header_, kPartHeaderBytes);
  header_.checksum = device.Checksum(memory_.data(), layout().header_use());
  device.Write(memory_.data() + offsetof(PartHeader, checksum), &header_.checksum,
               sizeof header_.checksum);
  saturated_ = {};
  final_ = true;
}

std::optional<int> Part::FindDamage(HeadRange heads, Device& device) const {
  std::vector<std::byte> start(static_cast<std::size_t>(layout().header_use()));
  device.Fetch(start.data(), memory_.data(), layout().header_use());
  if (std::memcmp(start.data(), &header_, kPartHeaderBytes) != 0 ||
      HeaderChecksum(start.data(), layout().header_use()) != header_.checksum)
    return heads.first;
  for (int head = heads.first; head < heads.end; ++head) {
    const std::uint64_t stored = EntryOf(start.data(), head).checksum;
    if (device.Checksum(SliceAt(head), layout().slice_bytes) != stored) return head;
  }
  return std::nullopt;
}

}  // namespace kvtier::cachestore
