// A sequence that ends earlier than it did: rejected speculative tokens.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

LayerTensor::CutPoint Sequence::CutPointOf(std::int64_t tokens, std::size_t layer,
                                           Side side) const {
  const std::int64_t page = tokens / owner_.model->model().page_tokens;
  const bool inside = page < path_.pages() && tokens % owner_.model->model().page_tokens != 0;
  if (!inside) return {tokens, nullptr};
  const Column::Layer& column = path_[page].layer(layer);
  return {tokens, side == Side::kK ? column.k : column.v};
}

template <class F>
absl::Status Sequence::ForEachCut(std::int64_t tokens, F f) {
  std::size_t place = 0;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    for (LayerTensor* tensor : {&layers_[i].k, &layers_[i].v}) {
      if (tensor->model().dim() == 0) continue;
      const LayerTensor::CutPoint cut = CutPointOf(tokens, i, tensor->side());
      KVT_RETURN_IF_ERROR(f(*tensor, cut, layers_[i].received, place++));
    }
  }
  return absl::OkStatus();
}

absl::Status Sequence::Truncate(std::int64_t tokens, std::uint64_t epoch, absl::Time now,
                                bool& copies, std::int64_t& needed) {
  EndedClaims ended;
  {
    MutexLock lock(&mutex_);
    KVT_RETURN_IF_ERROR(CheckHeld());
    KVT_RETURN_IF_ERROR(CheckOpen());
    KVT_RETURN_IF_ERROR(writers_.CheckEpoch(epoch, key_.id));
    if (const std::int64_t committed = Committed(); tokens > committed) {
      return Error(Reason::kPastCommitted,
                   fmt::format("tokens is {}; sequence \"{}\" has {} committed", tokens, key_.id,
                               committed));
    }
    using Received = std::vector<std::int64_t>;
    needed = 0;
    KVT_RETURN_IF_ERROR(
        ForEachCut(tokens, [&](const LayerTensor& tensor, const LayerTensor::CutPoint& cut,
                               const Received& received, std::size_t) {
          needed += tensor.CutBytes(cut, received);
          return tensor.CheckCut(cut, received);
        }));
    copies = tokens < held_tokens_;
    if (copies) return absl::OkStatus();
    if (needed > 0) {
      KVT_RETURN_IF_ERROR(Memory().Check(needed));
    }
    std::vector<std::shared_ptr<Part>> parts;
    KVT_RETURN_IF_ERROR(ForEachCut(tokens,
                                   [&](const LayerTensor& tensor, const LayerTensor::CutPoint& cut,
                                       const Received& received, std::size_t) -> absl::Status {
                                     KVT_ASSIGN_OR_RETURN(
                                         std::shared_ptr<Part> part,
                                         tensor.ReserveCut(cut, received, Memory()));
                                     parts.push_back(std::move(part));
                                     return absl::OkStatus();
                                   }));
    ended = writers_.TakeOver(epoch);
    CutTo(tokens, std::move(parts));
    last_message_ = now;
  }
  NotifyEnded(ended);
  return absl::OkStatus();
}

void Sequence::CutTo(std::int64_t tokens, std::vector<std::shared_ptr<Part>> parts) {
  const absl::Status cut =
      ForEachCut(tokens, [&](LayerTensor& tensor, const LayerTensor::CutPoint& point,
                             const std::vector<std::int64_t>& received, std::size_t place) {
        tensor.Truncate(point, received, std::move(parts[place]), home_.device);
        return absl::OkStatus();
      });
  KVT_CHECK(cut.ok());
  for (LayerState& layer : layers_) std::fill(layer.received.begin(), layer.received.end(), tokens);
  Unlist();
  // What follows will be other tokens than the prompt said.
  keys_.resize(std::min(keys_.size(), static_cast<std::size_t>(BlocksIn(tokens))));
  const std::int64_t pages = std::min(path_.pages(), tokens / owner_.model->model().page_tokens);
  home_.evictor.MoveBack(end_, path_.NodeAt(pages));
  path_.CutTo(pages);
  indexed_begin_ = indexed_end_ = std::min<std::int64_t>(std::ssize(keys_), BlocksIn(PathTokens()));
  Publish();
  Report(0);
}

absl::Status Sequence::Supersede(std::uint64_t epoch, EndedClaims& ended) {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  KVT_RETURN_IF_ERROR(CheckOpen());
  KVT_RETURN_IF_ERROR(writers_.CheckEpoch(epoch, key_.id));
  ended = writers_.TakeOver(epoch);
  DropLocked(absl::OkStatus());  // of no writer any more
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Sequence>> Sequence::Successor(absl::Time now,
                                                              std::int64_t& needed) {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  KVT_RETURN_IF_ERROR(CheckOpen());
  KVT_RETURN_IF_ERROR(CheckRoomForCopy(needed));
  auto successor = std::make_shared<Sequence>(key_, owner_, home_, now,
                                              SequenceStart{.path = path_, .keys = keys_});
  KVT_RETURN_IF_ERROR(CopyEndTo(*successor));
  MutexLock successor_lock(&successor->mutex_);
  successor->writers_ = writers_.WithoutWriters();
  return successor;
}

}  // namespace kvtier::cachestore
