#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cachestore/model/model.h"

// The first bytes of a part, and whether a part that came from elsewhere is what it says: the same
// for the store that keeps parts and for clients that send and take them. Host memory only.
namespace kvtier::cachestore {

enum class Side : std::uint8_t { kK = 0, kV = 1 };

// The first bytes of every part, little endian; docs/page_format.md describes them. A change of
// layout is a new version.
struct PartHeader {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  Side side = Side::kK;
  kernels::CodecId codec = kernels::CodecId::kRaw;
  kernels::ElementType element = kernels::ElementType::kBf16;  // stored
  kernels::ElementType source = kernels::ElementType::kBf16;
  std::uint8_t bits = 0;
  std::uint8_t k_before_rope = 0;
  std::uint16_t group = 0;
  std::uint16_t heads = 0;
  std::uint32_t dim = 0;
  std::uint32_t page_tokens = 0;
  std::uint32_t tokens = 0;  // filled; page_tokens once final
  std::uint32_t slice_bytes = 0;
  std::uint64_t saturated = 0;  // over all heads
  kernels::Rotation rotation = kernels::Rotation::kNone;
  std::uint8_t reserved[15] = {};
  std::uint64_t checksum = 0;  // XXH3-64 of the header and the head entries, this field 0

  static constexpr std::uint32_t kMagic = 0x5054564bu;  // "KVTP"
  static constexpr std::uint16_t kVersion = 1;
};
static_assert(sizeof(PartHeader) == kPartHeaderBytes, "PartHeader is a byte layout");

// One a head, after the header.
struct HeadEntry {
  std::uint64_t checksum =
      0;  // XXH3-64 of the head's slice, codes and scales together; 0 until the slice is full
  float scale = 0;              // where one is known beforehand; else 0
  std::uint32_t saturated = 0;  // values that did not fit; 0 until the slice is full
};
static_assert(sizeof(HeadEntry) == kHeadEntryBytes, "HeadEntry is a byte layout");

// Heads [first, end) of a tensor.
struct HeadRange {
  int first = 0;
  int end = 0;

  constexpr int count() const { return end - first; }
};

// The header of a part that holds nothing yet.
PartHeader MakePartHeader(const TensorModel& tensor, Side side, bool k_before_rope);

// What a tensor is to who holds some of its heads only.
TensorModel HeadsOf(const TensorModel& tensor, HeadRange heads);

// Bytes of a part with the slices of some heads: all of it where they are all.
std::int64_t PartBytes(const PartLayout& layout, int heads);

// Of a header and the entries behind it, whatever the header's own checksum says.
std::uint64_t HeaderChecksum(const std::byte* part, std::int64_t header_use);

PartHeader HeaderOf(const std::byte* part);
HeadEntry EntryOf(const std::byte* part, int head);
void WriteHeader(std::byte* part, const PartHeader& header);
void WriteEntry(std::byte* part, int head, const HeadEntry& entry);

// The first field that is not as `want` has it, "codec is 5; want 6"; empty where there is none.
// What differs from part to part, counts and checksum, is not looked at.
std::string HeaderDifference(const PartHeader& got, const PartHeader& want);

// Whether `part`, PartBytes of `heads` long, is a part of such a tensor, and its header, entries
// and slices have the checksums that they say. INVALID_ARGUMENT where it is another thing,
// DATA_LOSS where it is damaged; `name` begins the message.
absl::Status CheckPart(absl::Span<const std::byte> part, const PartLayout& layout,
                       const PartHeader& want, HeadRange heads, const std::string& name);

}  // namespace kvtier::cachestore
