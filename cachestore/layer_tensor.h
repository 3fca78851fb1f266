#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cachestore/arena.h"
#include "cachestore/chunk.h"
#include "cachestore/device/device.h"
#include "cachestore/part.h"
#include "cachestore/residual_slot.h"

namespace kvtier::cachestore {

// Where one head stands before and after an append: tokens [from, to) are new.
struct HeadAdvance {
  int head = 0;
  int shard_head = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
};

// What a reader holds of one K or V: the parts and the residual as they stood, and per head how
// many tokens were codes.
struct TensorPins {
  const TensorModel* model = nullptr;
  std::int64_t first_page = 0;
  struct PinnedPart {
    std::shared_ptr<const Part> part;
    bool final = false;     // when it was pinned
    bool verified = false;  // this reader has compared its checksums
  };
  std::vector<PinnedPart> parts;  // from first_page
  std::int64_t end_page() const { return first_page + static_cast<std::int64_t>(parts.size()); }
  ResidualPin residual;
  std::vector<std::int64_t> code_tokens;  // of every head of the model
};

// The K or the V of one layer of one sequence: its pages and its residual. Knows the residual rule;
// knows nothing of positions, which its sequence passes in. Not thread-safe: the sequence's lock
// guards it.
class LayerTensor {
 public:
  // `first_page`: what lies before it is in columns, and its first token is where the residual rule
  // counts from. `model` must outlive it.
  LayerTensor(const TensorModel& model, Side side, bool k_before_rope, std::int64_t first_page = 0)
      : model_(&model),
        side_(side),
        k_before_rope_(k_before_rope),
        first_page_(first_page),
        origin_(first_page * model.layout.page_tokens) {}

  // Where memory comes from, and whom it is put down to.
  struct Memory {
    Arena& arena;
    const MemoryOwner owner;
    Device& device;

    // RESOURCE_EXHAUSTED when the arena has no such piece, or the owner may not have it.
    absl::StatusOr<Allocation> Take(std::int64_t bytes) const;
    // The same where so much is not free altogether. Nothing is always there.
    absl::Status Check(std::int64_t bytes) const;
  };

  // Memory that an append will need, taken beforehand so that the append itself can't fail
  // half-way.
  struct Growth {
    std::vector<std::shared_ptr<Part>> parts;
    // Set with the first tokens of a format that has a residual, and where the append writes to a
    // slot that a reader holds. A slot stays when it runs empty, until the sequence is sealed: it
    // will be needed again, and pages would have cut up its place meanwhile.
    std::shared_ptr<ResidualSlot> slot;
  };
  // What of it an append needs.
  struct Need {
    std::int64_t pages = 0;
    bool slot = false;
  };
  Need NeedOf(absl::Span<const HeadAdvance> heads) const;
  std::int64_t BytesOf(const Need& need) const;
  // RESOURCE_EXHAUSTED as Memory::Take; nothing is taken then.
  absl::StatusOr<Growth> Reserve(const Need& need, const Memory& memory) const;

  // An append in three batches that must run in this order: tokens that complete a residual block
  // go to the residual; full units become codes; what stays residual is kept.
  struct Batches {
    // Codes that came as such; with `encode`.
    std::vector<Transfer> copy;
    std::vector<ChecksumJob> copied;  // what is full with that
    std::vector<EncodeJob> fill;
    std::vector<EncodeJob> encode;
    std::vector<EncodeJob> keep;
    std::vector<Piece> empty;  // what of new memory stays without codes
  };
  // Puts the memory in place, then the jobs can be queued.
  void Grow(Growth growth, absl::Span<const HeadAdvance> heads, Device& device, Batches& batches);
  void Queue(absl::Span<const HeadAdvance> heads, const SourceTensor& source,
             std::int64_t first_token, Batches& batches);

  // After the batches ran: accounts for them and makes full parts final, but for their headers.
  // `residual_tokens` is what remains over all heads.
  void Settle(absl::Span<const HeadAdvance> heads, std::int64_t residual_tokens,
              HeaderWrites& headers);

  // Of a head's values in a page how many have saturated so far, at the least.
  std::uint64_t SaturatedIn(std::int64_t page, int head) const {
    const auto index = static_cast<std::size_t>(page - first_page_);
    return index < parts_.size() && !parts_[index]->was_cut() ? parts_[index]->saturated(head) : 0;
  }

  // No tokens will follow: an empty residual slot is given back.
  void Seal();

  // Adds to what of the columns is pinned already what is here of the tokens before `end_token`.
  void Pin(std::int64_t end_token, absl::Span<const std::int64_t> received, TensorPins& pins) const;

  // Pages from the first on that are final, and can go to columns; `most` are looked at.
  std::int64_t FinalPages(std::int64_t most) const;
  std::vector<std::shared_ptr<Part>> TakePages(std::int64_t pages);

  // Another that goes on from here by itself: what may still be written is copied.
  absl::StatusOr<LayerTensor> Copy(const Memory& memory) const;
  // What that takes.
  std::int64_t CopyBytes() const;

  // How it is to end before `token`.
  struct Cut {
    std::int64_t token = 0;
    std::vector<std::int64_t> codes;   // by head, as they are
    std::shared_ptr<const Part> page;  // with codes on both sides of the cut; null where none has
    bool copies = false;               // others have that page as it is: it's filled on in a copy
    std::shared_ptr<Part> copy;
  };
  // `column`: the part of a column that the token lies in, where it lies in one. OUT_OF_RANGE where
  // that would cut a group of codes.
  absl::StatusOr<Cut> PlanCut(std::int64_t token, std::shared_ptr<const Part> column,
                              absl::Span<const std::int64_t> received) const;
  std::int64_t BytesOf(const Cut& cut) const { return cut.copies ? model_->layout.bytes : 0; }
  // RESOURCE_EXHAUSTED as Memory::Take.
  absl::Status Reserve(Cut& cut, const Memory& memory) const;
  // Ends it there. What is codes stays codes.
  void Truncate(Cut cut, Device& device);

  // Of `received` tokens of a head those that are codes, and those that are not.
  std::int64_t CodeTokens(int head, std::int64_t received) const {
    const std::int64_t codes = model_->residual.CodeTokens(received, origin_);
    return frozen_.empty() ? codes : std::max(codes, frozen_[static_cast<std::size_t>(head)]);
  }
  std::int64_t ResidualTokens(int head, std::int64_t received) const {
    return received - CodeTokens(head, received);
  }
  std::int64_t origin() const { return origin_; }

  const TensorModel& model() const { return *model_; }
  Side side() const { return side_; }
  bool k_before_rope() const { return k_before_rope_; }
  const MemoryHeld& held() const { return held_; }
  std::uint64_t saturated() const { return saturated_; }

 private:
  struct HeadQueue;  // one head's share of Queue

  void QueueResidual(const HeadQueue& queue, std::int64_t begin, std::int64_t end,
                     std::vector<EncodeJob>& jobs);
  void QueueCodes(const HeadQueue& queue, std::int64_t begin, std::int64_t end, bool from_residual,
                  std::vector<EncodeJob>& jobs);
  void QueueStored(const HeadQueue& queue, std::int64_t begin, std::int64_t end, Batches& batches);
  // Of an append from `from` that makes `codes` tokens codes, those before which come from the
  // residual: what it holds, and the block that it has begun.
  std::int64_t InResidual(std::int64_t from, std::int64_t codes) const {
    return std::min(codes, origin_ + AlignUp(from - origin_, model_->residual.block));
  }
  void HoldResidual(std::int64_t tokens);
  Part& PartAt(std::int64_t page) const {
    return *parts_[static_cast<std::size_t>(page - first_page_)];
  }
  std::int64_t end_page() const { return first_page_ + static_cast<std::int64_t>(parts_.size()); }

  const TensorModel* model_;
  Side side_;
  bool k_before_rope_;
  std::int64_t first_page_;
  std::int64_t origin_;
  // Of each head, how many tokens were codes when it was truncated: they stay codes. Empty if it
  // never was.
  std::vector<std::int64_t> frozen_;
  std::vector<std::shared_ptr<Part>> parts_;  // from first_page_
  std::shared_ptr<ResidualSlot> slot_;
  std::int64_t residual_tokens_ = 0;  // over all heads
  MemoryHeld held_;
  std::uint64_t saturated_ = 0;
};

}  // namespace kvtier::cachestore
