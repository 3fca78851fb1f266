// A sequence that ends earlier than it did: rejected speculative tokens.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

std::shared_ptr<const Part> Sequence::ColumnPart(std::int64_t token, std::size_t layer,
                                                 Side side) const {
  const int page_tokens = owner_.model->model().page_tokens;
  const std::int64_t page = token / page_tokens;
  if (page >= path_.pages() || token % page_tokens == 0) return nullptr;
  const Column::Layer column = path_[page].layer(layer);
  return side == Side::kK ? column.k : column.v;
}

absl::StatusOr<std::vector<Sequence::PlannedCut>> Sequence::PlanCuts(std::int64_t tokens) {
  std::vector<PlannedCut> cuts;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    for (LayerTensor* tensor : {&layers_[i].k, &layers_[i].v}) {
      if (tensor->model().dim() == 0) continue;
      KVT_ASSIGN_OR_RETURN(
          LayerTensor::Cut cut,
          tensor->PlanCut(tokens, ColumnPart(tokens, i, tensor->side()), layers_[i].received));
      cuts.push_back({tensor, std::move(cut)});
    }
  }
  return cuts;
}

absl::Status Sequence::ReserveCuts(std::vector<PlannedCut>& cuts, std::int64_t& needed) const {
  needed = 0;
  for (const PlannedCut& planned : cuts) needed += planned.tensor->BytesOf(planned.cut);
  KVT_RETURN_IF_ERROR(Memory().Check(needed));
  for (PlannedCut& planned : cuts) {
    KVT_RETURN_IF_ERROR(planned.tensor->Reserve(planned.cut, Memory()));
  }
  return absl::OkStatus();
}

absl::Status Sequence::Truncate(std::int64_t tokens, std::uint64_t epoch, absl::Time now,
                                bool& copies, std::int64_t& needed) {
  Notices notices;
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  KVT_RETURN_IF_ERROR(CheckOpen());
  KVT_RETURN_IF_ERROR(writers_.CheckEpoch(epoch, key_.id));
  if (const std::int64_t committed = Committed(); tokens > committed) {
    return Error(
        Reason::kPastCommitted,
        fmt::format("tokens is {}; sequence \"{}\" has {} committed", tokens, key_.id, committed));
  }
  KVT_ASSIGN_OR_RETURN(std::vector<PlannedCut> cuts, PlanCuts(tokens));
  if (!windows_.Reach(path_, tokens)) return WindowsMovedOn(Reason::kTruncateTooShort, tokens);
  copies = tokens < held_tokens_;
  if (absl::Status room = copies ? absl::OkStatus() : ReserveCuts(cuts, needed);
      copies || !room.ok()) {
    LetGoBehindWindows();
    return room;
  }
  writers_.TakeOver(epoch, notices);
  CutTo(tokens, std::move(cuts));
  last_message_ = now;
  return absl::OkStatus();
}

void Sequence::CutTo(std::int64_t tokens, std::vector<PlannedCut> cuts) {
  for (PlannedCut& planned : cuts) planned.tensor->Truncate(std::move(planned.cut), home_.device);
  for (LayerState& layer : layers_) std::fill(layer.received.begin(), layer.received.end(), tokens);
  Unlist();
  // What follows will be other tokens than the prompt said.
  blocks_ = CopyOf(BlocksOf(tokens));
  const std::int64_t pages = std::min(path_.pages(), tokens / owner_.model->model().page_tokens);
  home_.evictor.MoveBack(end_, path_.NodeAt(pages));
  CutPath(pages);
  indexed_begin_ = indexed_end_ = BlocksOf(PathTokens()).end;
  Publish();
  Report(0);
}

absl::Status Sequence::Supersede(std::uint64_t epoch, Notices& notices) {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  KVT_RETURN_IF_ERROR(CheckOpen());
  KVT_RETURN_IF_ERROR(writers_.CheckEpoch(epoch, key_.id));
  writers_.TakeOver(epoch, notices);
  DropLocked(
      Error(Reason::kSequenceGone,
            fmt::format("sequence \"{}\" was truncated before what had been read of it", key_.id)),
      notices);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Sequence>> Sequence::Successor(absl::Time now,
                                                              std::int64_t& needed) {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  KVT_RETURN_IF_ERROR(CheckOpen());
  KVT_RETURN_IF_ERROR(CheckRoomForCopy(needed));
  auto successor = std::make_shared<Sequence>(
      key_, owner_, home_, now,
      SequenceStart{.path = path_, .tokens = Committed(), .blocks = blocks_});
  KVT_RETURN_IF_ERROR(CopyEndTo(*successor));
  MutexLock successor_lock(&successor->mutex_);
  successor->writers_ = writers_.WithoutWriters();
  return successor;
}

}  // namespace kvtier::cachestore
