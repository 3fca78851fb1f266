#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cachestore/arena.h"
#include "cachestore/device/device.h"
#include "cachestore/model/model.h"
#include "cachestore/model/part_header.h"

namespace kvtier::cachestore {

// The K or the V of one page. Filling until every head has all its tokens, then final: checksummed,
// never written again. Changed only by its sequence, under the sequence's lock; readers touch only
// tokens that were codes when they pinned it.
class Part {
 public:
  // `model` must outlive the part. Zeroes the memory.
  Part(Allocation memory, const TensorModel& model, Side side, bool k_before_rope, Device& device);
  // A copy that goes on by itself.
  Part(Allocation memory, const Part& other, Device& device);

  // Its tokens from `token` on go, of which `codes[head]` were codes, and it is filling again. What
  // has been counted as saturated stays counted, though some of that may be among them. Nobody may
  // have it pinned.
  void Cut(std::int64_t token, absl::Span<const std::int64_t> codes, Device& device);

  Side side() const { return header_.side; }
  bool k_before_rope() const { return header_.k_before_rope != 0; }
  float ScaleOf(int head) const {
    return model_.scales.empty() ? 0.0f : model_.scales[static_cast<std::size_t>(head)];
  }
  // What codes count in: 1 where the format takes no scale known beforehand.
  float CodeScaleOf(int head) const { return model_.scales.empty() ? 1.0f : ScaleOf(head); }
  const std::byte* data() const { return memory_.data(); }
  std::byte* UnitAt(int head, std::int64_t token) const {
    return memory_.data() + layout().UnitOffset(head, token);
  }
  std::byte* SliceAt(int head) const { return memory_.data() + layout().SliceOffset(head); }
  const TensorModel& model() const { return model_; }
  const PartLayout& layout() const { return model_.layout; }
  bool final() const { return final_; }
  std::int64_t bytes() const { return memory_.size(); }
  MemoryHeld held() const { return memory_.held(); }
  void GiveTo(MemoryOwner owner) { memory_.GiveTo(std::move(owner)); }
  std::int64_t saturated_values() const { return static_cast<std::int64_t>(header_.saturated); }

  // Counts a head's values that saturated in this part; filled by the device. While it is filling.
  std::uint64_t& saturated(int head) { return saturated_[static_cast<std::size_t>(head)]; }

  // How many values saturated since the last call. While it is filling.
  std::uint64_t TakeNewSaturated() {
    const std::uint64_t all =
        std::accumulate(saturated_.begin(), saturated_.end(), std::uint64_t{0});
    return all - std::exchange(header_.saturated, all);
  }

  // Whether the count of what saturated is exact.
  bool was_cut() const { return was_cut_; }

  // `units` more units of a head hold codes.
  void Hold(std::int64_t units);

  // The head's slice is full: checksums it, and the header once it was the last head's.
  void FinishHead(int head, Device& device);

  // The first of `heads` whose slice is no longer as it was stored; the first of all where the
  // header or the entries are not. Only for final parts.
  std::optional<int> FindDamage(HeadRange heads, Device& device) const;

 private:
  void WriteEntry(int head, const HeadEntry& entry, Device& device);

  const TensorModel& model_;
  Allocation memory_;
  PartHeader header_;                     // as in memory, but for `saturated`
  std::vector<std::uint64_t> saturated_;  // by head, while it is filling
  int finished_heads_ = 0;
  bool final_ = false;
  bool was_cut_ = false;
};

}  // namespace kvtier::cachestore
