#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cachestore/base/checksum.h"
#include "cachestore/model/part_header.h"
#include "kernels/host_codec.h"
#include "tests/support/kv_data.h"

namespace kvtier::cachestore::testing {

// Brings the checksums of a part of some heads up to what it holds.
inline void Checksums(std::vector<std::byte>& part, const PartLayout& layout) {
  for (int head = 0; head < layout.heads; ++head) {
    HeadEntry entry = EntryOf(part.data(), head);
    entry.checksum = ChecksumOf(part.data() + layout.SliceOffset(head), layout.slice_bytes);
    WriteEntry(part.data(), head, entry);
  }
  PartHeader header = HeaderOf(part.data());
  header.checksum = HeaderChecksum(part.data(), layout.header_use());
  WriteHeader(part.data(), header);
}

// A final part of some heads, encoded head by head from the values: what a client sends.
inline std::vector<std::byte> MakePart(const TensorModel& tensor, Side side,
                                       const kvtier::testing::KvTensor& data, HeadRange heads,
                                       std::int64_t page) {
  const TensorModel shard = HeadsOf(tensor, heads);
  const PartLayout& layout = shard.layout;
  std::vector<std::byte> part(static_cast<std::size_t>(layout.bytes));
  PartHeader header = MakePartHeader(shard, side, false);
  header.tokens = header.page_tokens;
  for (int head = 0; head < heads.count(); ++head) {
    HeadEntry entry;
    if (!shard.scales.empty()) entry.scale = shard.scales[static_cast<std::size_t>(head)];
    entry.saturated = static_cast<std::uint32_t>(kernels::EncodeOnHost(
        {.codec = layout.codec,
         .dim = layout.dim,
         .scale = shard.scales.empty() ? 1.0f : entry.scale,
         .source = {data.Row(heads.first + head, page * layout.page_tokens), data.type, data.dim},
         .units = layout.page_tokens / layout.unit_tokens,
         .out = part.data() + layout.SliceOffset(head)}));
    header.saturated += entry.saturated;
    WriteEntry(part.data(), head, entry);
  }
  WriteHeader(part.data(), header);
  Checksums(part, layout);
  return part;
}

}  // namespace kvtier::cachestore::testing
