#pragma once

#include <cstdint>

#include "kernels/codec_table.h"

namespace kvtier::cachestore {

// Every allocation starts on, and is a multiple of, this many bytes.
inline constexpr std::int64_t kAlignment = 64;
constexpr std::int64_t AlignUp(std::int64_t bytes, std::int64_t to = kAlignment) {
  return (bytes + to - 1) / to * to;
}

// Bytes before the first head slice: a fixed header, then an entry a head. See docs/page_format.md.
inline constexpr std::int64_t kPartHeaderBytes = 64;
inline constexpr std::int64_t kHeadEntryBytes = 16;

// Where things lie in a part, the K or the V of one page: header, then one slice a head, so that a
// range of heads is contiguous. A slice is its units one after another, [page_tokens / unit_tokens]
// of them, rounded up to 16 bytes.
struct PartLayout {
  kernels::Codec codec;
  int heads = 0;
  int dim = 0;
  int page_tokens = 0;
  int unit_tokens = 1;
  kernels::UnitSize unit;
  std::int64_t header_bytes = 0;
  std::int64_t slice_bytes = 0;
  std::int64_t bytes = 0;  // of the allocation

  constexpr std::int64_t SliceOffset(int head) const { return header_bytes + head * slice_bytes; }
  // `token` counts from the page's first and starts a unit.
  constexpr std::int64_t UnitOffset(int head, std::int64_t token) const {
    return SliceOffset(head) + token / unit_tokens * unit.total();
  }
  constexpr std::int64_t header_use() const { return kPartHeaderBytes + kHeadEntryBytes * heads; }
};

inline PartLayout MakePartLayout(const kernels::Codec& codec, int heads, int dim, int page_tokens) {
  PartLayout layout{.codec = codec, .heads = heads, .dim = dim, .page_tokens = page_tokens};
  layout.unit_tokens = kernels::UnitTokens(codec);
  layout.unit = kernels::UnitSizeOf(codec, dim);
  layout.header_bytes = AlignUp(layout.header_use());
  layout.slice_bytes = AlignUp(page_tokens / layout.unit_tokens * layout.unit.total(), 16);
  layout.bytes = AlignUp(layout.header_bytes + heads * layout.slice_bytes);
  return layout;
}

}  // namespace kvtier::cachestore
