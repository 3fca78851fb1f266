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

// The first bytes of parts that became final: written together.
class HeaderWrites {
 public:
  void Add(std::byte* to, std::vector<std::byte> start) {
    writes_.emplace_back(to, std::move(start));
  }
  void Write(Device& device);

 private:
  std::vector<std::pair<std::byte*, std::vector<std::byte>>> writes_;
};

// The K or the V of one page. Filling until every head has all its tokens, then final: checksummed,
// never written again. Changed only by its sequence, under the sequence's lock; readers touch only
// tokens that were codes when they pinned it.
class Part {
 public:
  // `model` must outlive the part. What the memory held before stays there: see Empty.
  Part(Allocation memory, const TensorModel& model, Side side, bool k_before_rope);
  // A copy that goes on by itself.
  Part(Allocation memory, const Part& other, Device& device);

  // What of its memory holds no codes where each head has `codes` tokens of them: it has to be
  // zeroed before anybody reads the part.
  std::vector<Piece> Empty(absl::Span<const std::int64_t> codes) const;

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

  // What checksums a head's slice once it is full.
  ChecksumJob ChecksumOf(int head);

  // The head's slice is full, and checksummed. With the last head the part is final, once its
  // header is written.
  void FinishHead(int head, HeaderWrites& writes);

  // Whether these are its first bytes, header and entries. Only of final parts.
  bool HeaderIs(const std::vector<std::byte>& start) const;

 private:
  std::vector<std::byte> FetchHeader(Device& device) const;

  const TensorModel& model_;
  Allocation memory_;
  PartHeader header_;                     // as in memory once it is final
  std::vector<HeadEntry> entries_;        // by head, while it is filling
  std::vector<std::uint64_t> saturated_;  // by head, while it is filling
  int finished_heads_ = 0;
  bool final_ = false;
  bool was_cut_ = false;
};

// Of each of `parts`, all final and of as many heads, the first of `heads` whose slice is no longer
// as it was stored, the first of all where the header or the entries are not.
std::vector<std::optional<int>> FindDamage(absl::Span<const Part* const> parts, HeadRange heads,
                                           Device& device);

}  // namespace kvtier::cachestore
