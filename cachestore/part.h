#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cachestore/arena.h"
#include "cachestore/device/device.h"
#include "cachestore/model/model.h"

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
  std::uint64_t saturated = 0;
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
  float scale = 0;  // FP8 with a scale known beforehand; else 0
  std::uint32_t reserved = 0;

  bool operator==(const HeadEntry&) const = default;
};
static_assert(sizeof(HeadEntry) == kHeadEntryBytes, "HeadEntry is a byte layout");

// The K or the V of one page. Filling until every head has all its tokens, then final: checksummed,
// never written again. Changed only by its sequence, under the sequence's lock; readers touch only
// tokens that were codes when they pinned it.
class Part {
 public:
  // `model` must outlive the part. Zeroes the memory.
  Part(Allocation memory, const TensorModel& model, Side side, bool k_before_rope, Device& device);

  std::byte* UnitAt(int head, std::int64_t token) const {
    return memory_.data() + layout().UnitOffset(head, token);
  }
  std::byte* SliceAt(int head) const { return memory_.data() + layout().SliceOffset(head); }
  const PartLayout& layout() const { return model_.layout; }
  bool final() const { return final_; }
  std::int64_t bytes() const { return memory_.size(); }

  // Counts values that saturated in this part; filled by the device.
  std::uint64_t* saturated() { return &header_.saturated; }

  // How many values saturated since the last call.
  std::uint64_t TakeNewSaturated() {
    return header_.saturated - std::exchange(counted_saturated_, header_.saturated);
  }

  // `units` more units of a head hold codes.
  void Hold(std::int64_t units);

  // The head's slice is full: checksums it, and the header once it was the last head's.
  void FinishHead(int head, Device& device);

  // Whether the header and the head's entry and slice are still as they were stored. Only for final
  // parts.
  bool Verify(int head, Device& device) const;

 private:
  void WriteHeader(Device& device);
  float ScaleOf(int head) const {
    return model_.scales.empty() ? 0.0f : model_.scales[static_cast<std::size_t>(head)];
  }

  const TensorModel& model_;
  Allocation memory_;
  PartHeader header_;
  std::uint64_t counted_saturated_ = 0;
  int finished_heads_ = 0;
  bool final_ = false;
};

}  // namespace kvtier::cachestore
