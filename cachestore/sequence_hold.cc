// What keeps a sequence from eviction, and what it loses when nothing does.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

absl::StatusOr<std::int64_t> Sequence::Keep(std::int64_t tokens) {
  KVT_RETURN_IF_ERROR(CheckHeld());
  GuardEnd();
  Report(0);
  const std::int64_t committed = Committed();
  const bool held = tokens <= committed && (tokens >= 0 || committed > 0 || sealed_tokens_ == 0);
  const std::int64_t kept = tokens < 0 ? committed : tokens;
  // Of a sequence as it is, what a window let go of is not missed.
  if (held && (windows_.Reach(path_, kept) || tokens < 0)) {
    windows_.Want(kept);
    return kept;
  }
  home_.evictor.Unguard(end_, Evictor::Use::kNone);
  if (held) return WindowsMovedOn(Reason::kBehindWindow, kept);
  return Error(Reason::kUnknownSequence,
               fmt::format("sequence \"{}\" has {} of {} tokens", key_.id, committed,
                           tokens < 0 ? sealed_tokens_ : tokens));
}

absl::StatusOr<std::int64_t> Sequence::Hold(std::int64_t tokens) {
  MutexLock lock(&mutex_);
  KVT_ASSIGN_OR_RETURN(tokens, Keep(tokens));
  ++holds_;
  held_tokens_ = std::max(held_tokens_, tokens);
  return tokens;
}

absl::StatusOr<std::int64_t> Sequence::AddPin(PinKind kind, std::int64_t tokens) {
  MutexLock lock(&mutex_);
  KVT_ASSIGN_OR_RETURN(tokens, Keep(tokens));
  if (kind == PinKind::kHard) {
    ++hard_pins_;
    return tokens;
  }
  if (++soft_pins_ == 1) home_.evictor.SetPinned(end_, true);
  home_.evictor.Unguard(end_, Evictor::Use::kNone);
  return tokens;
}

void Sequence::RemovePin(PinKind kind, std::int64_t tokens) {
  MutexLock lock(&mutex_);
  windows_.Unwant(tokens);
  LetGoBehindWindows();
  if (kind == PinKind::kSoft) {
    if (--soft_pins_ == 0) home_.evictor.SetPinned(end_, false);
    return;
  }
  --hard_pins_;
  if (state_ != SequenceState::kGone) home_.evictor.Unguard(end_, Evictor::Use::kNone);
}

void Sequence::Unhold(std::int64_t tokens) {
  MutexLock lock(&mutex_);
  KVT_CHECK(holds_ > 0);
  windows_.Unwant(tokens);
  LetGoBehindWindows();
  if (--holds_ == 0) held_tokens_ = 0;
  if (state_ != SequenceState::kGone) {
    home_.evictor.Unguard(end_, Evictor::Use::kRead);
  } else if (holds_ == 0) {
    LetGo();
    Report(0);
  }
}

absl::Status Sequence::WindowEvicted() const {
  return Error(Reason::kEvicted,
               fmt::format("sequence \"{}\" was sealed with {} tokens; those from token {} on were "
                           "evicted, and what windows need of those before went earlier "
                           "(retention=window): remove it and append it anew",
                           key_.id, sealed_tokens_, Committed()));
}

absl::Status Sequence::WindowsMovedOn(Reason reason, std::int64_t tokens) const {
  const std::int64_t committed = Committed(), least = windows_.least_hit();
  if (least > committed && state_ == SequenceState::kSealed) return WindowEvicted();
  return Error(reason,
               fmt::format("tokens is {}; of sequence \"{}\", which has {}, the windows have "
                           "moved on from there (retention=window): want 0, or at least {}",
                           tokens, key_.id, committed, least));
}

void Sequence::LetGoBehindWindows() {
  if (owner_.model->model().windows.empty() || !followers_.empty()) return;
  windows_.MoveOn(path_, Committed());
}

void Sequence::GuardEnd() {
  while (!home_.evictor.Guard(end_)) CutEvicted();
}

void Sequence::CutEvicted() {
  const std::int64_t before = Committed();
  Unlist();
  while (home_.evictor.ColumnEvicted(end_)) {
    home_.evictor.StandBehind(end_, path_.NodeAt(path_.pages() - 1));
    CutPath(path_.pages() - 1);
  }
  StartLayers();
  lost_tokens_ += before - Committed();
}

Sequence::Loss Sequence::LoseEvicted() {
  Notices notices;
  MutexLock lock(&mutex_);
  Loss loss;
  if (state_ == SequenceState::kGone) return loss;
  const bool evicted = home_.evictor.Evicted(end_);
  if (evicted) CutEvicted();
  loss.tokens = std::exchange(lost_tokens_, 0);  // some by who found it before us
  const bool own = path_.pages() > begun_pages_ || Committed() > PathTokens();
  loss.gone = !own && holds_ == 0 && hard_pins_ == 0 && (evicted || loss.tokens > 0);
  Report(0);
  if (loss.gone) DropLocked(EvictedFrom(Committed()), notices);
  return loss;
}

absl::Status Sequence::EvictedFrom(std::int64_t tokens) const {
  return Error(Reason::kEvicted,
               fmt::format("sequence \"{}\" was sealed with {} tokens; those from token {} on were "
                           "evicted",
                           key_.id, sealed_tokens_, tokens));
}

}  // namespace kvtier::cachestore
