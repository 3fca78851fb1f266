#include "cachestore/sequence.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
namespace {

// Where a read begins in a layer.
std::int64_t FirstWithinWindow(const LayerSpec& layer, const ReadRange& range, std::int64_t end,
                               int page_tokens) {
  if (!range.within_windows || layer.kind != LayerKind::kSlidingWindow) return range.first_token;
  const std::int64_t seen = std::max(range.first_token, end - layer.window);
  if (range.step_tokens == 0) return std::max(range.first_token, seen / page_tokens * page_tokens);
  return seen - (seen - range.first_token) % range.step_tokens;
}

}  // namespace

Sequence::Sequence(SequenceKey key, Owner owner, const SequenceHome& home, absl::Time now,
                   SequenceStart start)
    : key_(std::move(key)),
      owner_(std::move(owner)),
      home_(home),
      counts_(!start.for_reader),
      end_(owner_.node_place(), this),
      state_(start.for_reader ? SequenceState::kSealed : SequenceState::kOpen),
      path_(std::move(start.path)),
      windows_(owner_.model->model(), path_),
      writers_(owner_.model->model()),
      last_message_(now),
      blocks_(std::move(start.blocks)) {
  MutexLock lock(&mutex_);
  // Of the columns some may have been evicted since they were found.
  const bool kept = home_.evictor.AddEnd(end_, path_.NodeAt(path_.pages()));
  if (kept) {
    StartLayers();
  } else {
    GuardEnd();
  }
  // A window may have moved on.
  if (counts_ && !windows_.Reach(path_, std::max(PathTokens(), start.tokens))) {
    home_.evictor.MoveBack(end_, nullptr);
    CutPath(0);
    StartLayers();
  }
  begun_pages_ = path_.pages();
  lost_tokens_ = 0;
  reported_.appended_tokens = PathTokens();  // counted when they came
  Report(0);
}

std::shared_ptr<Sequence> Sequence::ForReader(SequenceKey key, const Owner& owner,
                                              const SequenceHome& home, absl::Time now, Path path) {
  SequenceStart start{.path = std::move(path), .blocks = NoBlocks(), .for_reader = true};
  auto sequence = std::make_shared<Sequence>(std::move(key), owner, home, now, std::move(start));
  // Not before it can be found by its weak pointer.
  home.evictor.Unguard(sequence->end_, Evictor::Use::kNone);
  return sequence;
}

void Sequence::StartLayers() {
  layers_.clear();
  const bool before_rope = owner_.model->model().request.spec.k_rope == RopeState::kBefore;
  for (const LayerModel& layer : owner_.model->model().layers) {
    layers_.push_back({.received = std::vector<std::int64_t>(
                           static_cast<std::size_t>(layer.spec.kv_heads), PathTokens()),
                       .k = LayerTensor(layer.k, Side::kK, before_rope, path_.pages()),
                       .v = LayerTensor(layer.v, Side::kV, before_rope, path_.pages())});
  }
  indexed_begin_ = indexed_end_ = BlocksIn(PathTokens());
}

Sequence::~Sequence() { Drop(absl::CancelledError("the store is going away")); }

absl::StatusOr<AppendResult> Sequence::Claim(const std::shared_ptr<WriterClaim>& claim,
                                             const HashBlocksPtr& blocks, absl::Time now) {
  Notices notices;
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckWritable(*claim));
  KVT_RETURN_IF_ERROR(CheckBlocks(*blocks));
  KVT_RETURN_IF_ERROR(writers_.Add(claim, key_.id, notices));
  TakeBlocks(blocks);
  last_message_ = now;
  return Standing(claim->shard);
}

bool Sequence::Leave(const std::shared_ptr<WriterClaim>& claim) {
  Notices notices;
  MutexLock lock(&mutex_);
  writers_.Remove(claim);
  if (state_ == SequenceState::kGone) return true;
  const bool holds = path_.pages() > 0 || Held().allocated > 0;
  if (state_ != SequenceState::kOpen || !writers_.empty() || holds) return false;
  DropLocked(Error(Reason::kSequenceGone,
                   fmt::format("sequence \"{}\" held nothing when its last writer left", key_.id)),
             notices);
  return true;
}

absl::Status Sequence::CheckWritable(const WriterClaim& claim) const {
  if (!claim.ended.ok()) return claim.ended;
  KVT_RETURN_IF_ERROR(CheckOpen());
  if (state_ == SequenceState::kGone) {
    return Error(Reason::kSequenceGone, fmt::format("sequence \"{}\" was removed", key_.id));
  }
  return absl::OkStatus();
}

absl::Status Sequence::CheckOpen() const {
  if (state_ != SequenceState::kSealed) return absl::OkStatus();
  return Error(
      Reason::kSealed,
      fmt::format("sequence \"{}\" is sealed at {} tokens; fork it, remove it or take another id",
                  key_.id, sealed_tokens_));
}

absl::Status Sequence::CheckHeld() const {
  if (state_ != SequenceState::kGone) return absl::OkStatus();
  return Error(Reason::kUnknownSequence, fmt::format("sequence \"{}\" is not held", key_.id));
}

absl::Status Sequence::Seal(std::int64_t tokens) {
  Notices notices;
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(SealLocked(tokens));
  writers_.EndAll(absl::OkStatus(), notices);
  followers_.Tell(notices);
  return absl::OkStatus();
}

absl::Status Sequence::SealLocked(std::int64_t tokens) {
  KVT_RETURN_IF_ERROR(CheckHeld());
  if (state_ == SequenceState::kSealed) {
    if (tokens == sealed_tokens_) return absl::OkStatus();
    return Error(Reason::kIncomplete,
                 fmt::format("tokens is {}; sequence \"{}\" was sealed with {}", tokens, key_.id,
                             sealed_tokens_));
  }
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    for (std::size_t head = 0; head < layers_[layer].received.size(); ++head) {
      const std::int64_t received = layers_[layer].received[head];
      if (received == tokens) continue;
      return Error(Reason::kIncomplete,
                   fmt::format("tokens is {}; layer {} head {} of sequence \"{}\" has received {}",
                               tokens, layer, head, key_.id, received));
    }
  }
  state_ = SequenceState::kSealed;
  sealed_tokens_ = tokens;
  home_.evictor.Unguard(end_, Evictor::Use::kWritten);
  for (LayerState& layer : layers_) {
    layer.k.Seal();
    layer.v.Seal();
  }
  Report(0);
  return absl::OkStatus();
}

void Sequence::DropLocked(const absl::Status& why, Notices& notices) {
  state_ = SequenceState::kGone;
  Unlist();
  if (holds_ == 0) LetGo();
  Report(0);
  writers_.EndAll(why, notices);
  EndFollowers(why, notices);
}

void Sequence::LetGo() {
  home_.evictor.Remove(end_);
  layers_.clear();
  CutPath(0);
}

void Sequence::CutPath(std::int64_t pages) {
  windows_.CutTo(path_, pages);
  path_.CutTo(pages);
}

bool Sequence::Drop(const absl::Status& why) {
  Notices notices;
  MutexLock lock(&mutex_);
  if (state_ == SequenceState::kGone) return false;
  DropLocked(why, notices);
  return true;
}

absl::Status Sequence::DropOpen(const absl::Status& why) {
  Notices notices;
  MutexLock lock(&mutex_);
  if (state_ == SequenceState::kSealed) {
    return Error(
        Reason::kNotOpen,
        fmt::format("sequence \"{}\" is sealed; Abort drops open sequences, Remove any", key_.id));
  }
  if (state_ == SequenceState::kOpen) DropLocked(why, notices);
  return absl::OkStatus();
}

bool Sequence::DropIdle(absl::Time now, absl::Duration deadline) {
  Notices notices;
  MutexLock lock(&mutex_);
  if (state_ != SequenceState::kOpen || last_message_ > now - deadline) return false;
  DropLocked(Error(Reason::kSequenceGone, fmt::format("sequence \"{}\" had no message for {}",
                                                      key_.id, absl::FormatDuration(deadline))),
             notices);
  return true;
}

absl::StatusOr<SequencePins> Sequence::Pin(const ReadRange& range) {
  MutexLock lock(&mutex_);
  if (layers_.empty()) {
    return Error(Reason::kLeaseEnded,
                 fmt::format("what was held of sequence \"{}\" is gone", key_.id));
  }
  const std::int64_t committed =
      std::min(range.received ? LeastReceived(range.shard) : Committed(), range.limit);
  const auto within = [&](std::int64_t tokens) {
    return range.first_token <= tokens && range.tokens <= tokens - range.first_token;
  };
  // Only who has no lease, and so was not told how much is here, can ask for more.
  if (range.limit > sealed_tokens_ && committed < sealed_tokens_ && within(sealed_tokens_) &&
      (range.tokens < 0 || !within(committed)))
    return EvictedFrom(committed);
  if (!within(committed)) {
    return Error(
        Reason::kPastCommitted,
        fmt::format("{} were asked of sequence \"{}\" from token {}; {} are committed",
                    range.tokens < 0 ? "all tokens" : fmt::format("{} tokens", range.tokens),
                    key_.id, range.first_token, committed));
  }
  const std::int64_t end = range.tokens < 0 ? committed : range.first_token + range.tokens;
  held_tokens_ = std::max(held_tokens_, end);
  SequencePins pins{
      .model = owner_.model,
      .shard = range.shard,
      .first_token = range.first_token,
      .tokens = end - range.first_token,
      .committed_tokens = std::min(Committed(), range.limit),
      .end_token = Committed(),
      .sealed = state_ == SequenceState::kSealed && counts_ && committed == Committed()};
  for (int layer = range.shard.first_layer; layer < range.shard.end_layer(); ++layer) {
    KVT_ASSIGN_OR_RETURN(SequencePins::Layer pinned,
                         PinLayer(static_cast<std::size_t>(layer), range, end));
    pins.layers.push_back(std::move(pinned));
  }
  return pins;
}

absl::StatusOr<SequencePins::Layer> Sequence::PinLayer(std::size_t layer, const ReadRange& range,
                                                       std::int64_t end) const {
  const int page_tokens = owner_.model->model().page_tokens;
  const LayerState& state = layers_[layer];
  const LayerModel& model = owner_.model->model().layers[layer];
  const std::int64_t first = FirstWithinWindow(model.spec, range, end, page_tokens);
  const bool has_v = model.v.dim() > 0;
  SequencePins::Layer pins{.first_token = first, .k = {.model = &state.k.model()}, .v = {}};
  if (has_v) pins.v.model = &state.v.model();
  pins.k.first_page = pins.v.first_page = first / page_tokens;
  const std::int64_t end_page = std::min(AlignUp(end, page_tokens) / page_tokens, path_.pages());
  bool gone = false;
  for (std::int64_t page = pins.k.first_page; page < end_page; ++page) {
    Column::Layer column = path_[page].layer(layer);
    gone |= column.k == nullptr;
    pins.k.parts.push_back({.part = std::move(column.k), .final = true});
    if (has_v) pins.v.parts.push_back({.part = std::move(column.v), .final = true});
  }
  if (gone) return BehindWindow(layer, range, end);
  state.k.Pin(end, state.received, pins.k);
  if (has_v) state.v.Pin(end, state.received, pins.v);
  return pins;
}

absl::Status Sequence::BehindWindow(std::size_t layer, const ReadRange& range,
                                    std::int64_t end) const {
  const LayerModel& model = owner_.model->model().layers[layer];
  const int window = model.spec.window;
  const std::int64_t kept = windows_.FirstToken(static_cast<std::size_t>(model.window_index));
  if (kept >= Committed() || (range.within_windows && kept > end - window && end == Committed()))
    return WindowEvicted();
  std::string instead = "set within_windows, or read from there on";
  if (range.received) instead = "read what is here within_windows, and follow from its end";
  if (range.within_windows) {
    instead = kept > end - window
                  ? fmt::format("read up to token {} or further", kept + window)
                  : fmt::format(
                        "the block of {} tokens in which the window begins does: take "
                        "blocks that divide page_tokens, {}, and a multiple of them as "
                        "first_token",
                        range.step_tokens, owner_.model->model().page_tokens);
  }
  return Error(
      Reason::kBehindWindow,
      fmt::format("tokens before {} of layer {} of sequence \"{}\" are gone: its window is "
                  "{} (retention=window); {}",
                  kept, layer, key_.id, window, instead));
}

SequenceDescription Sequence::Describe(bool with_layers) const {
  MutexLock lock(&mutex_);
  SequenceDescription description{
      .id = key_.id,
      .model = owner_.model,
      .state = state_,
      .committed_tokens = Committed(),
      .evicted_tokens = std::max<std::int64_t>(0, sealed_tokens_ - Committed()),
      .held = Held(),
      .saturated_values = Saturated(),
      .layers = {},
      .lowered_pages = {}};
  description.held += path_.held();
  const std::int64_t shared = SharedPages();
  for (std::int64_t page = 0; page < shared; ++page)
    description.saturated_values += path_[page].saturated_values();
  if (!with_layers) return description;
  description.lowered_pages.resize(owner_.model->rungs().size());
  for (std::int64_t page = 0; page < path_.pages(); ++page) {
    const int rung = home_.evictor.RungOf(path_[page].node());
    if (rung > 0) ++description.lowered_pages[static_cast<std::size_t>(rung - 1)];
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerState& layer = layers_[i];
    LayerDescription& out = description.layers.emplace_back();
    out.received_tokens = *std::min_element(layer.received.begin(), layer.received.end());
    const auto least_codes = [&](const LayerTensor& tensor) {
      std::int64_t least = out.received_tokens;
      for (std::size_t head = 0; head < layer.received.size(); ++head)
        least = std::min(least, tensor.CodeTokens(static_cast<int>(head), layer.received[head]));
      return least;
    };
    out.k_code_tokens = least_codes(layer.k);
    const bool has_v = layer.v.model().dim() > 0;
    out.v_code_tokens = has_v ? least_codes(layer.v) : 0;
    out.k_saturated_values = static_cast<std::int64_t>(layer.k.saturated());
    out.v_saturated_values = static_cast<std::int64_t>(layer.v.saturated());
    for (std::int64_t page = 0; page < shared; ++page) {
      const Column::Layer& column = path_[page].layer(i);
      if (column.k == nullptr) continue;  // what went behind a window is known of all layers only
      out.k_saturated_values += column.k->saturated_values();
      if (has_v) out.v_saturated_values += column.v->saturated_values();
    }
  }
  return description;
}

AppendResult Sequence::Standing(const Shard& shard) const {
  return {.received_tokens = LeastReceived(shard),
          .committed_tokens = Committed(),
          .residual_origin = layers_[0].k.origin()};
}

int Sequence::HeadsOf(int layer) const {
  return owner_.model->model().layers[static_cast<std::size_t>(layer)].spec.kv_heads;
}

std::int64_t Sequence::LeastReceived(const Shard& shard) const {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int layer = shard.first_layer; layer < shard.end_layer(); ++layer) {
    for (int head = shard.first_head; head < shard.EndHeadIn(HeadsOf(layer)); ++head) {
      least = std::min(
          least, layers_[static_cast<std::size_t>(layer)].received[static_cast<std::size_t>(head)]);
    }
  }
  return least;
}

std::int64_t Sequence::Committed() const {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const LayerState& layer : layers_) {
    for (const std::int64_t received : layer.received) least = std::min(least, received);
  }
  return layers_.empty() ? 0 : least;
}

MemoryHeld Sequence::Held() const {
  MemoryHeld held;
  for (const LayerState& layer : layers_) {
    held += layer.k.held();
    held += layer.v.held();
  }
  return held;
}

std::int64_t Sequence::Saturated() const {
  std::uint64_t saturated = 0;
  for (const LayerState& layer : layers_) saturated += layer.k.saturated() + layer.v.saturated();
  return static_cast<std::int64_t>(saturated);
}

void Sequence::Report(std::int64_t source_bytes) {
  if (!counts_) return;
  const bool gone = state_ == SequenceState::kGone;
  const std::int64_t committed = Committed(), saturated = Saturated();
  const ModelTotals now{.open_sequences = state_ == SequenceState::kOpen ? 1 : 0,
                        .sealed_sequences = state_ == SequenceState::kSealed ? 1 : 0,
                        .sequence_tokens = gone ? 0 : committed,
                        .tokens_held = committed - PathTokens(),
                        .appended_tokens = committed,
                        .saturated_values = saturated};
  // Counters only rise: what went when the sequence went is not taken back.
  const auto rise = [](std::int64_t from, std::int64_t to) {
    return std::max<std::int64_t>(0, to - from);
  };
  owner_.model->Add({.open_sequences = now.open_sequences - reported_.open_sequences,
                     .sealed_sequences = now.sealed_sequences - reported_.sealed_sequences,
                     .sequence_tokens = now.sequence_tokens - reported_.sequence_tokens,
                     .tokens_held = now.tokens_held - reported_.tokens_held,
                     .appended_tokens = rise(reported_.appended_tokens, now.appended_tokens),
                     .appended_bytes = source_bytes,
                     .saturated_values = rise(reported_.saturated_values, now.saturated_values)});
  reported_ = now;
}

}  // namespace kvtier::cachestore
