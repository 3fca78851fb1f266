#include "cachestore/sequence.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/stored_append.h"
#include "cachestore/value_check.h"

namespace kvtier::cachestore {
namespace {

// Checks what is new of one K or V of a layer: values as values, codes as codes. `seen`: by head.
absl::Status CheckTensor(const LayerTensor& tensor, const Chunk& chunk, const Chunk::Layer& from,
                         const std::vector<HeadAdvance>& heads, std::vector<Seen>& seen) {
  const SourceTensor& source = tensor.side() == Side::kK ? from.k : from.v;
  seen.resize(heads.size());
  if (tensor.model().dim() == 0) return absl::OkStatus();
  for (const HeadAdvance& head : heads) {
    ValueRange range{.layer = from.layer,
                     .side = tensor.side(),
                     .head = head.head,
                     .shard_head = head.shard_head,
                     .first_token = chunk.first_token,
                     .begin = head.from,
                     .end = head.to};
    Seen& of_head = seen[static_cast<std::size_t>(&head - heads.data())];
    const auto check = [&](std::int64_t begin, std::int64_t end) -> absl::Status {
      range.begin = begin;
      range.end = end;
      KVT_ASSIGN_OR_RETURN(const float largest,
                           CheckValues(tensor.model(), source, range, chunk.saturate_non_finite));
      of_head.largest = std::max(of_head.largest, largest);
      of_head.tokens += std::max<std::int64_t>(0, end - begin);
      return absl::OkStatus();
    };
    if (source.stored.parts.empty()) {
      KVT_RETURN_IF_ERROR(check(head.from, head.to));
      continue;
    }
    KVT_RETURN_IF_ERROR(check(head.from, chunk.first_token + source.stored.begin));
    KVT_RETURN_IF_ERROR(check(std::max(head.from, chunk.first_token + source.stored.end), head.to));
  }
  return CheckStoredPages(tensor, source.stored, heads,
                          {.layer = from.layer,
                           .first_token = chunk.first_token,
                           .saturate_non_finite = chunk.saturate_non_finite},
                          absl::MakeSpan(seen));
}

}  // namespace

Sequence::Sequence(SequenceKey key, std::shared_ptr<ModelEntry> model, const SequenceHome& home,
                   absl::Time now, SequenceStart start)
    : key_(std::move(key)),
      model_(std::move(model)),
      home_(home),
      counts_(!start.for_reader),
      state_(start.for_reader ? SequenceState::kSealed : SequenceState::kOpen),
      path_(std::move(start.path)),
      writers_(model_->model()),
      last_message_(now),
      keys_(std::move(start.keys)) {
  MutexLock lock(&mutex_);
  const bool before_rope = model_->model().request.spec.k_rope == RopeState::kBefore;
  for (const LayerModel& layer : model_->model().layers) {
    layers_.push_back({.received = std::vector<std::int64_t>(
                           static_cast<std::size_t>(layer.spec.kv_heads), PathTokens()),
                       .k = LayerTensor(layer.k, Side::kK, before_rope, path_.pages()),
                       .v = LayerTensor(layer.v, Side::kV, before_rope, path_.pages())});
  }
  indexed_begin_ = indexed_end_ = BlocksIn(PathTokens());
  reported_.appended_tokens = PathTokens();  // counted when they came
  Report(0);
}

Sequence::~Sequence() { Drop(absl::CancelledError("the store is going away")); }

absl::StatusOr<AppendResult> Sequence::Claim(const std::shared_ptr<WriterClaim>& claim,
                                             const std::vector<PrefixKey>& keys, absl::Time now) {
  EndedClaims ended;
  AppendResult standing;
  {
    MutexLock lock(&mutex_);
    KVT_RETURN_IF_ERROR(CheckWritable(*claim));
    KVT_RETURN_IF_ERROR(CheckKeys(keys));
    KVT_RETURN_IF_ERROR(writers_.Add(claim, key_.id, ended));
    TakeKeys(keys);
    last_message_ = now;
    standing = Standing(claim->shard);
  }
  NotifyEnded(ended);
  return standing;
}

bool Sequence::Leave(const std::shared_ptr<WriterClaim>& claim) {
  MutexLock lock(&mutex_);
  writers_.Remove(claim);
  if (state_ == SequenceState::kGone) return true;
  const bool holds = path_.pages() > 0 || Held().allocated > 0;
  if (state_ != SequenceState::kOpen || !writers_.empty() || holds) return false;
  DropLocked(absl::OkStatus());
  return true;
}

absl::Status Sequence::CheckWritable(const WriterClaim& claim) const {
  if (!claim.ended.ok()) return claim.ended;
  if (state_ == SequenceState::kSealed) {
    return Error(Reason::kSealed,
                 fmt::format("sequence \"{}\" is sealed at {} tokens; remove it or take another id",
                             key_.id, Committed()));
  }
  if (state_ == SequenceState::kGone) {
    return Error(Reason::kSequenceGone, fmt::format("sequence \"{}\" was removed", key_.id));
  }
  return absl::OkStatus();
}

absl::Status Sequence::CheckHeld() const {
  if (state_ != SequenceState::kGone) return absl::OkStatus();
  return Error(Reason::kUnknownSequence, fmt::format("sequence \"{}\" is not held", key_.id));
}

absl::StatusOr<std::vector<Sequence::PlannedLayer>> Sequence::PlanChunk(const WriterClaim& claim,
                                                                        const Chunk& chunk) {
  std::vector<PlannedLayer> planned;
  for (const Chunk::Layer& source : chunk.layers) {
    PlannedLayer plan{.source = &source, .layer = &layers_[static_cast<std::size_t>(source.layer)]};
    const int end_head = claim.shard.EndHeadIn(HeadsOf(source.layer));
    for (int head = claim.shard.first_head; head < end_head; ++head) {
      const std::int64_t received = plan.layer->received[static_cast<std::size_t>(head)];
      if (chunk.first_token > received) {
        return Error(Reason::kTokenGap,
                     fmt::format("chunk.first_token is {}; layer {} head {} expects token {}",
                                 chunk.first_token, source.layer, head, received));
      }
      const std::int64_t end = chunk.first_token + chunk.tokens;
      if (end > received)
        plan.heads.push_back({head, head - claim.shard.first_head, received, end});
    }
    if (plan.heads.empty()) continue;
    std::vector<Seen> k, v;
    KVT_RETURN_IF_ERROR(CheckTensor(plan.layer->k, chunk, source, plan.heads, k));
    KVT_RETURN_IF_ERROR(CheckTensor(plan.layer->v, chunk, source, plan.heads, v));
    const bool has_v = plan.layer->v.model().dim() > 0;
    for (std::size_t i = 0; i < plan.heads.size(); ++i) {
      const std::int64_t tokens = has_v ? std::min(k[i].tokens, v[i].tokens) : k[i].tokens;
      plan.observed.push_back(
          {source.layer, plan.heads[i].head, {k[i].largest, v[i].largest, tokens}});
    }
    planned.push_back(std::move(plan));
  }
  for (PlannedLayer& plan : planned) {
    KVT_ASSIGN_OR_RETURN(plan.k, plan.layer->k.Reserve(plan.heads, Memory()));
    if (plan.layer->v.model().dim() == 0) continue;
    KVT_ASSIGN_OR_RETURN(plan.v, plan.layer->v.Reserve(plan.heads, Memory()));
  }
  return planned;
}

absl::Status Sequence::RunChunk(const Chunk& chunk, std::vector<PlannedLayer>& planned) {
  LayerTensor::Batches batches;
  for (PlannedLayer& plan : planned) {
    plan.layer->k.Grow(std::move(plan.k), home_.device);
    plan.layer->k.Queue(plan.heads, plan.source->k, chunk.first_token, batches);
    if (plan.layer->v.model().dim() == 0) continue;
    plan.layer->v.Grow(std::move(plan.v), home_.device);
    plan.layer->v.Queue(plan.heads, plan.source->v, chunk.first_token, batches);
  }
  for (const LayerTensor::Batches::Copy& copy : batches.copy)
    home_.device.Write(copy.to, copy.from, copy.bytes);
  KVT_RETURN_IF_ERROR(home_.device.Encode(batches.fill));
  KVT_RETURN_IF_ERROR(home_.device.Encode(batches.encode));
  return home_.device.Encode(batches.keep);
}

void Sequence::SettleLayer(const PlannedLayer& planned) {
  LayerState& layer = *planned.layer;
  for (const HeadAdvance& head : planned.heads)
    layer.received[static_cast<std::size_t>(head.head)] = head.to;
  const auto residual = [&](const LayerTensor& tensor) {
    std::int64_t tokens = 0;
    for (const std::int64_t received : layer.received) tokens += tensor.ResidualTokens(received);
    return tokens;
  };
  layer.k.Settle(planned.heads, residual(layer.k), home_.device);
  if (layer.v.model().dim() > 0) layer.v.Settle(planned.heads, residual(layer.v), home_.device);
}

absl::StatusOr<AppendResult> Sequence::Append(const WriterClaim& claim, const Chunk& chunk,
                                              absl::Time now) {
  EndedClaims ended;
  absl::StatusOr<AppendResult> result;
  {
    MutexLock lock(&mutex_);
    result = AppendLocked(claim, chunk, now, ended);
  }
  NotifyEnded(ended);
  return result;
}

absl::StatusOr<AppendResult> Sequence::AppendLocked(const WriterClaim& claim, const Chunk& chunk,
                                                    absl::Time now, EndedClaims& ended) {
  KVT_RETURN_IF_ERROR(CheckWritable(claim));
  KVT_ASSIGN_OR_RETURN(std::vector<PlannedLayer> planned, PlanChunk(claim, chunk));
  const std::int64_t saturated_before = Saturated();
  if (const absl::Status status = RunChunk(chunk, planned); !status.ok()) {
    // A device that failed half-way may have overwritten residual that was committed: not even
    // those who have a hold on it may read that.
    ended = DropLocked(status);
    LetGo();
    Report(0);
    return status;
  }
  std::int64_t source_bytes = 0;
  std::int64_t skipped = chunk.tokens;  // what every layer and head had already
  for (const PlannedLayer& plan : planned) {
    const LayerModel& model = model_->model().layers[static_cast<std::size_t>(plan.source->layer)];
    for (const HeadAdvance& head : plan.heads) {
      source_bytes +=
          (head.to - head.from) * (model.k.source_row_bytes() + model.v.source_row_bytes());
      skipped = std::min(skipped, head.from - chunk.first_token);
    }
    model_->Observe(plan.observed);
    SettleLayer(plan);
  }
  Publish();
  last_message_ = now;
  AppendResult result = Standing(claim.shard);
  result.skipped_tokens = skipped;
  result.saturated_values = Saturated() - saturated_before;
  Report(source_bytes);
  return result;
}

absl::Status Sequence::Seal(std::int64_t tokens) {
  EndedClaims ended;
  {
    MutexLock lock(&mutex_);
    KVT_RETURN_IF_ERROR(SealLocked(tokens));
    ended = writers_.EndAll(absl::OkStatus());
  }
  NotifyEnded(ended);
  return absl::OkStatus();
}

absl::Status Sequence::SealLocked(std::int64_t tokens) {
  KVT_RETURN_IF_ERROR(CheckHeld());
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
  for (LayerState& layer : layers_) {
    layer.k.Seal();
    layer.v.Seal();
  }
  Report(0);
  return absl::OkStatus();
}

EndedClaims Sequence::DropLocked(const absl::Status& why) {
  state_ = SequenceState::kGone;
  Unlist();
  if (holds_ == 0) LetGo();
  Report(0);
  return writers_.EndAll(why);
}

void Sequence::LetGo() {
  layers_.clear();
  path_.CutTo(0);
}

absl::StatusOr<std::int64_t> Sequence::Hold(std::int64_t tokens) {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  const std::int64_t committed = Committed();
  if (tokens < 0) tokens = committed;
  if (tokens > committed) {
    return Error(Reason::kUnknownSequence,
                 fmt::format("sequence \"{}\" has {} of {} tokens", key_.id, committed, tokens));
  }
  ++holds_;
  return tokens;
}

void Sequence::Unhold() {
  MutexLock lock(&mutex_);
  KVT_CHECK(holds_ > 0);
  if (--holds_ > 0 || state_ != SequenceState::kGone) return;
  LetGo();
  Report(0);
}

bool Sequence::Drop(const absl::Status& why) {
  EndedClaims ended;
  {
    MutexLock lock(&mutex_);
    if (state_ == SequenceState::kGone) return false;
    ended = DropLocked(why);
  }
  NotifyEnded(ended);
  return true;
}

absl::Status Sequence::DropOpen(const absl::Status& why) {
  EndedClaims ended;
  {
    MutexLock lock(&mutex_);
    if (state_ == SequenceState::kSealed) {
      return Error(Reason::kNotOpen,
                   fmt::format("sequence \"{}\" is sealed; Abort drops open sequences, Remove any",
                               key_.id));
    }
    if (state_ == SequenceState::kOpen) ended = DropLocked(why);
  }
  NotifyEnded(ended);
  return absl::OkStatus();
}

bool Sequence::DropIdle(absl::Time now, absl::Duration deadline) {
  EndedClaims ended;
  {
    MutexLock lock(&mutex_);
    if (state_ != SequenceState::kOpen || last_message_ > now - deadline) return false;
    ended = DropLocked(
        Error(Reason::kSequenceGone, fmt::format("sequence \"{}\" had no message for {}", key_.id,
                                                 absl::FormatDuration(deadline))));
  }
  NotifyEnded(ended);
  return true;
}

absl::StatusOr<SequencePins> Sequence::Pin(const ReadRange& range) const {
  MutexLock lock(&mutex_);
  if (layers_.empty()) {
    return Error(Reason::kLeaseEnded,
                 fmt::format("what was held of sequence \"{}\" is gone", key_.id));
  }
  const std::int64_t committed = std::min(Committed(), range.limit);
  if (range.first_token > committed || range.tokens > committed - range.first_token) {
    return Error(
        Reason::kPastCommitted,
        fmt::format("{} were asked of sequence \"{}\" from token {}; {} are committed",
                    range.tokens < 0 ? "all tokens" : fmt::format("{} tokens", range.tokens),
                    key_.id, range.first_token, committed));
  }
  const std::int64_t end = range.tokens < 0 ? committed : range.first_token + range.tokens;
  SequencePins pins{
      .model = model_,
      .shard = range.shard,
      .first_token = range.first_token,
      .tokens = end - range.first_token,
      .committed_tokens = committed,
      .end_token = Committed(),
      .sealed = state_ == SequenceState::kSealed && counts_ && committed == Committed()};
  for (int layer = range.shard.first_layer; layer < range.shard.end_layer(); ++layer) {
    const auto index = static_cast<std::size_t>(layer);
    const LayerState& state = layers_[index];
    pins.layers.push_back({.k = PinTensor(state.k, index, range, end), .v = {}});
    if (state.v.model().dim() > 0) pins.layers.back().v = PinTensor(state.v, index, range, end);
  }
  return pins;
}

TensorPins Sequence::PinTensor(const LayerTensor& tensor, std::size_t layer, const ReadRange& range,
                               std::int64_t end) const {
  const int page_tokens = model_->model().page_tokens;
  TensorPins pins{.model = &tensor.model(), .first_page = range.first_token / page_tokens};
  const std::int64_t end_page = std::min(AlignUp(end, page_tokens) / page_tokens, path_.pages());
  for (std::int64_t page = pins.first_page; page < end_page; ++page) {
    const Column::Layer& column = path_[page].layer(layer);
    pins.parts.push_back({.part = tensor.side() == Side::kK ? column.k : column.v, .final = true});
  }
  tensor.Pin(end, layers_[layer].received, pins);
  return pins;
}

SequenceDescription Sequence::Describe(bool with_layers) const {
  MutexLock lock(&mutex_);
  SequenceDescription description{.id = key_.id,
                                  .model = model_,
                                  .state = state_,
                                  .committed_tokens = Committed(),
                                  .held = Held(),
                                  .saturated_values = Saturated(),
                                  .layers = {}};
  description.held += path_.held();
  const std::int64_t shared = SharedPages();
  for (std::int64_t page = 0; page < shared; ++page)
    description.saturated_values += path_[page].saturated_values();
  if (!with_layers) return description;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerState& layer = layers_[i];
    LayerDescription& out = description.layers.emplace_back();
    out.received_tokens = *std::min_element(layer.received.begin(), layer.received.end());
    out.k_code_tokens = layer.k.CodeTokens(out.received_tokens);
    const bool has_v = layer.v.model().dim() > 0;
    out.v_code_tokens = has_v ? layer.v.CodeTokens(out.received_tokens) : 0;
    out.k_saturated_values = static_cast<std::int64_t>(layer.k.saturated());
    out.v_saturated_values = static_cast<std::int64_t>(layer.v.saturated());
    for (std::int64_t page = 0; page < shared; ++page) {
      const Column::Layer& column = path_[page].layer(i);
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
  return model_->model().layers[static_cast<std::size_t>(layer)].spec.kv_heads;
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
  model_->Add({.open_sequences = now.open_sequences - reported_.open_sequences,
               .sealed_sequences = now.sealed_sequences - reported_.sealed_sequences,
               .sequence_tokens = now.sequence_tokens - reported_.sequence_tokens,
               .tokens_held = now.tokens_held - reported_.tokens_held,
               .appended_tokens = rise(reported_.appended_tokens, now.appended_tokens),
               .appended_bytes = source_bytes,
               .saturated_values = rise(reported_.saturated_values, now.saturated_values)});
  reported_ = now;
}

}  // namespace kvtier::cachestore
