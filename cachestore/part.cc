#include "cachestore/part.h"

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "cachestore/base/check.h"

namespace kvtier::cachestore {

Part::Part(Allocation memory, const TensorModel& model, Side side, bool k_before_rope,
           Device& device)
    : model_(model), memory_(std::move(memory)) {
  const PartLayout& l = layout();
  header_.side = side;
  header_.codec = l.codec.id;
  header_.element = l.codec.element;
  header_.source = model.source;
  header_.bits = l.codec.bits;
  header_.rotation = l.codec.rotation;
  header_.k_before_rope = k_before_rope ? 1 : 0;
  header_.group = l.codec.group;
  header_.heads = static_cast<std::uint16_t>(l.heads);
  header_.dim = static_cast<std::uint32_t>(l.dim);
  header_.page_tokens = static_cast<std::uint32_t>(l.page_tokens);
  header_.slice_bytes = static_cast<std::uint32_t>(l.slice_bytes);
  device.Zero(memory_.data(), memory_.size());
  memory_.Hold({.header = l.header_use()});
  WriteHeader(device);
}

void Part::Hold(std::int64_t units) {
  memory_.Hold({.codes = units * layout().unit.codes, .scales = units * layout().unit.scales});
}

void Part::WriteHeader(Device& device) {
  std::vector<HeadEntry> entries(static_cast<std::size_t>(layout().heads));
  const std::int64_t entry_bytes = kHeadEntryBytes * layout().heads;
  if (finished_heads_ > 0)
    device.Fetch(entries.data(), memory_.data() + kPartHeaderBytes, entry_bytes);
  for (int h = 0; h < layout().heads; ++h) entries[static_cast<std::size_t>(h)].scale = ScaleOf(h);
  device.Write(memory_.data() + kPartHeaderBytes, entries.data(), entry_bytes);
  device.Write(memory_.data(), &header_, kPartHeaderBytes);
}

void Part::FinishHead(int head, Device& device) {
  KVT_CHECK(!final_ && finished_heads_ < layout().heads);
  const std::uint64_t checksum = device.Checksum(SliceAt(head), layout().slice_bytes);
  std::byte* entry = memory_.data() + kPartHeaderBytes + head * kHeadEntryBytes;
  device.Write(entry + offsetof(HeadEntry, checksum), &checksum, sizeof checksum);
  if (++finished_heads_ < layout().heads) return;
  header_.tokens = header_.page_tokens;
  WriteHeader(device);
  header_.checksum = device.Checksum(memory_.data(), layout().header_use());
  device.Write(memory_.data() + offsetof(PartHeader, checksum), &header_.checksum,
               sizeof header_.checksum);
  final_ = true;
}

bool Part::Verify(int head, Device& device) const {
  PartHeader header;
  HeadEntry entry;
  device.Fetch(&header, memory_.data(), kPartHeaderBytes);
  device.Fetch(&entry, memory_.data() + kPartHeaderBytes + head * kHeadEntryBytes, kHeadEntryBytes);
  const HeadEntry want{.checksum = device.Checksum(SliceAt(head), layout().slice_bytes),
                       .scale = ScaleOf(head)};
  return std::memcmp(&header, &header_, kPartHeaderBytes) == 0 && entry == want;
}

}  // namespace kvtier::cachestore
