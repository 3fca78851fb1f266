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

bool Overlap(const Shard& a, const Shard& b) {
  return a.first_layer < b.end_layer() && b.first_layer < a.end_layer() &&
         a.first_head < b.end_head() && b.first_head < a.end_head();
}

void NotifyEnded(const std::vector<std::shared_ptr<WriterClaim>>& claims) {
  for (const std::shared_ptr<WriterClaim>& claim : claims) {
    if (claim->on_end) claim->on_end(claim->ended);
  }
}

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

Sequence::Sequence(SequenceKey key, std::shared_ptr<ModelEntry> model, Arena& arena, Device& device,
                   absl::Time now)
    : key_(std::move(key)),
      model_(std::move(model)),
      arena_(arena),
      device_(device),
      last_message_(now) {
  absl::MutexLock lock(&mutex_);
  const bool before_rope = model_->model().request.spec.k_rope == RopeState::kBefore;
  for (const LayerModel& layer : model_->model().layers) {
    layers_.push_back(
        {.heads = std::vector<HeadState>(static_cast<std::size_t>(layer.spec.kv_heads)),
         .k = LayerTensor(layer.k, Side::kK, before_rope),
         .v = LayerTensor(layer.v, Side::kV, before_rope)});
  }
  Report(0);
}

Sequence::~Sequence() { Drop(absl::CancelledError("the store is going away")); }

absl::StatusOr<AppendResult> Sequence::Claim(const std::shared_ptr<WriterClaim>& claim,
                                             absl::Time now) {
  std::vector<std::shared_ptr<WriterClaim>> ended;
  AppendResult standing;
  {
    absl::MutexLock lock(&mutex_);
    KVT_RETURN_IF_ERROR(CheckWritable(*claim));
    const Shard& shard = claim->shard;
    for (int layer = shard.first_layer; layer < shard.end_layer(); ++layer) {
      for (int head = shard.first_head; head < shard.EndHeadIn(HeadsOf(layer)); ++head) {
        const std::uint64_t seen = layers_[layer].heads[head].epoch;
        if (claim->epoch >= seen) continue;
        return Error(
            Reason::kOldEpoch,
            fmt::format("writer_epoch is {}; layer {} head {} of sequence \"{}\" has had a "
                        "writer of epoch {}",
                        claim->epoch, layer, head, key_.id, seen));
      }
    }
    for (const std::shared_ptr<WriterClaim>& other : writers_) {
      if (!Overlap(other->shard, shard) || other->epoch != claim->epoch) continue;
      return Error(Reason::kWriterExists,
                   fmt::format("writer_epoch is {}; another stream of that epoch is sending layers "
                               "or heads of this shard "
                               "of sequence \"{}\"; a higher epoch would take over",
                               claim->epoch, key_.id));
    }
    const auto stays = std::partition(writers_.begin(), writers_.end(), [&](const auto& other) {
      return !Overlap(other->shard, shard);
    });
    for (auto other = stays; other != writers_.end(); ++other) {
      (*other)->ended =
          Error(Reason::kOldEpoch, fmt::format("a writer of epoch {} took over from epoch {}",
                                               claim->epoch, (*other)->epoch));
      ended.push_back(*other);
    }
    writers_.erase(stays, writers_.end());
    writers_.push_back(claim);
    for (int layer = shard.first_layer; layer < shard.end_layer(); ++layer) {
      for (int head = shard.first_head; head < shard.EndHeadIn(HeadsOf(layer)); ++head)
        layers_[layer].heads[head].epoch = claim->epoch;
    }
    last_message_ = now;
    standing = Standing(shard);
  }
  NotifyEnded(ended);
  return standing;
}

bool Sequence::Leave(const std::shared_ptr<WriterClaim>& claim) {
  absl::MutexLock lock(&mutex_);
  std::erase(writers_, claim);
  if (state_ == SequenceState::kGone) return true;
  if (state_ != SequenceState::kOpen || !writers_.empty() || Held().allocated > 0) return false;
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

absl::StatusOr<std::vector<Sequence::PlannedLayer>> Sequence::PlanChunk(const WriterClaim& claim,
                                                                        const Chunk& chunk) {
  std::vector<PlannedLayer> planned;
  for (const Chunk::Layer& source : chunk.layers) {
    PlannedLayer plan{.source = &source, .layer = &layers_[static_cast<std::size_t>(source.layer)]};
    const int end_head = claim.shard.EndHeadIn(HeadsOf(source.layer));
    for (int head = claim.shard.first_head; head < end_head; ++head) {
      const std::int64_t received = plan.layer->heads[static_cast<std::size_t>(head)].received;
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
    KVT_ASSIGN_OR_RETURN(plan.k, plan.layer->k.Reserve(plan.heads, arena_, device_));
    if (plan.layer->v.model().dim() == 0) continue;
    KVT_ASSIGN_OR_RETURN(plan.v, plan.layer->v.Reserve(plan.heads, arena_, device_));
  }
  return planned;
}

absl::Status Sequence::RunChunk(const Chunk& chunk, std::vector<PlannedLayer>& planned) {
  LayerTensor::Batches batches;
  for (PlannedLayer& plan : planned) {
    plan.layer->k.Grow(std::move(plan.k), device_);
    plan.layer->k.Queue(plan.heads, plan.source->k, chunk.first_token, batches);
    if (plan.layer->v.model().dim() == 0) continue;
    plan.layer->v.Grow(std::move(plan.v), device_);
    plan.layer->v.Queue(plan.heads, plan.source->v, chunk.first_token, batches);
  }
  for (const LayerTensor::Batches::Copy& copy : batches.copy)
    device_.Write(copy.to, copy.from, copy.bytes);
  KVT_RETURN_IF_ERROR(device_.Encode(batches.fill));
  KVT_RETURN_IF_ERROR(device_.Encode(batches.encode));
  return device_.Encode(batches.keep);
}

void Sequence::SettleLayer(const PlannedLayer& planned) {
  LayerState& layer = *planned.layer;
  for (const HeadAdvance& head : planned.heads)
    layer.heads[static_cast<std::size_t>(head.head)].received = head.to;
  const auto residual = [&](const LayerTensor& tensor) {
    std::int64_t tokens = 0;
    for (const HeadState& head : layer.heads)
      tokens += tensor.model().residual.ResidualTokens(head.received);
    return tokens;
  };
  layer.k.Settle(planned.heads, residual(layer.k), device_);
  if (layer.v.model().dim() > 0) layer.v.Settle(planned.heads, residual(layer.v), device_);
}

absl::StatusOr<AppendResult> Sequence::Append(const WriterClaim& claim, const Chunk& chunk,
                                              absl::Time now) {
  std::vector<std::shared_ptr<WriterClaim>> ended;
  absl::StatusOr<AppendResult> result;
  {
    absl::MutexLock lock(&mutex_);
    result = AppendLocked(claim, chunk, now, ended);
  }
  NotifyEnded(ended);
  return result;
}

absl::StatusOr<AppendResult> Sequence::AppendLocked(
    const WriterClaim& claim, const Chunk& chunk, absl::Time now,
    std::vector<std::shared_ptr<WriterClaim>>& ended) {
  KVT_RETURN_IF_ERROR(CheckWritable(claim));
  KVT_ASSIGN_OR_RETURN(std::vector<PlannedLayer> planned, PlanChunk(claim, chunk));
  const std::int64_t saturated_before = Saturated();
  if (const absl::Status status = RunChunk(chunk, planned); !status.ok()) {
    // A device that failed half-way may have overwritten residual that was committed.
    ended = DropLocked(status);
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
  last_message_ = now;
  AppendResult result = Standing(claim.shard);
  result.skipped_tokens = skipped;
  result.saturated_values = Saturated() - saturated_before;
  Report(source_bytes);
  return result;
}

absl::Status Sequence::Seal(std::int64_t tokens) {
  std::vector<std::shared_ptr<WriterClaim>> over;
  {
    absl::MutexLock lock(&mutex_);
    KVT_RETURN_IF_ERROR(SealLocked(tokens));
    over = std::exchange(writers_, {});
  }
  for (const std::shared_ptr<WriterClaim>& claim : over) {
    if (claim->on_end) claim->on_end(absl::OkStatus());
  }
  return absl::OkStatus();
}

absl::Status Sequence::SealLocked(std::int64_t tokens) {
  if (state_ == SequenceState::kGone) {
    return Error(Reason::kUnknownSequence, fmt::format("sequence \"{}\" is not held", key_.id));
  }
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    for (std::size_t head = 0; head < layers_[layer].heads.size(); ++head) {
      const std::int64_t received = layers_[layer].heads[head].received;
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

std::vector<std::shared_ptr<WriterClaim>> Sequence::DropLocked(const absl::Status& why) {
  state_ = SequenceState::kGone;
  layers_.clear();
  for (const std::shared_ptr<WriterClaim>& claim : writers_) claim->ended = why;
  Report(0);
  return std::exchange(writers_, {});
}

bool Sequence::Drop(const absl::Status& why) {
  std::vector<std::shared_ptr<WriterClaim>> ended;
  {
    absl::MutexLock lock(&mutex_);
    if (state_ == SequenceState::kGone) return false;
    ended = DropLocked(why);
  }
  NotifyEnded(ended);
  return true;
}

absl::Status Sequence::DropOpen(const absl::Status& why) {
  std::vector<std::shared_ptr<WriterClaim>> ended;
  {
    absl::MutexLock lock(&mutex_);
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

bool Sequence::DropIdle(absl::Time before, const absl::Status& why) {
  std::vector<std::shared_ptr<WriterClaim>> ended;
  {
    absl::MutexLock lock(&mutex_);
    if (state_ != SequenceState::kOpen || last_message_ > before) return false;
    ended = DropLocked(why);
  }
  NotifyEnded(ended);
  return true;
}

absl::StatusOr<SequencePins> Sequence::Pin(const ReadRange& range) const {
  absl::MutexLock lock(&mutex_);
  if (state_ == SequenceState::kGone) {
    return Error(Reason::kUnknownSequence, fmt::format("sequence \"{}\" is not held", key_.id));
  }
  const std::int64_t committed = Committed();
  if (range.first_token > committed || range.tokens > committed - range.first_token) {
    return Error(
        Reason::kPastCommitted,
        fmt::format("{} were asked of sequence \"{}\" from token {}; {} are committed",
                    range.tokens < 0 ? "all tokens" : fmt::format("{} tokens", range.tokens),
                    key_.id, range.first_token, committed));
  }
  const std::int64_t end = range.tokens < 0 ? committed : range.first_token + range.tokens;
  SequencePins pins{.model = model_,
                    .shard = range.shard,
                    .first_token = range.first_token,
                    .tokens = end - range.first_token,
                    .committed_tokens = committed,
                    .sealed = state_ == SequenceState::kSealed};
  for (int layer = range.shard.first_layer; layer < range.shard.end_layer(); ++layer) {
    const LayerState& state = layers_[static_cast<std::size_t>(layer)];
    std::vector<std::int64_t> received;
    for (const HeadState& head : state.heads) received.push_back(head.received);
    pins.layers.push_back({.k = state.k.Pin(range.first_token, end, received), .v = {}});
    if (state.v.model().dim() > 0)
      pins.layers.back().v = state.v.Pin(range.first_token, end, received);
  }
  return pins;
}

SequenceDescription Sequence::Describe(bool with_layers) const {
  absl::MutexLock lock(&mutex_);
  SequenceDescription description{.id = key_.id,
                                  .model = model_,
                                  .state = state_,
                                  .committed_tokens = Committed(),
                                  .held = Held(),
                                  .saturated_values = Saturated(),
                                  .layers = {}};
  if (!with_layers) return description;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerState& layer = layers_[i];
    LayerDescription& out = description.layers.emplace_back();
    out.received_tokens =
        LeastReceived({static_cast<int>(i), 1, 0, static_cast<int>(layer.heads.size())});
    out.k_code_tokens = layer.k.model().residual.CodeTokens(out.received_tokens);
    const bool has_v = layer.v.model().dim() > 0;
    out.v_code_tokens = has_v ? layer.v.model().residual.CodeTokens(out.received_tokens) : 0;
    out.k_saturated_values = static_cast<std::int64_t>(layer.k.saturated());
    out.v_saturated_values = static_cast<std::int64_t>(layer.v.saturated());
  }
  return description;
}

AppendResult Sequence::Standing(const Shard& shard) const {
  return {.received_tokens = LeastReceived(shard), .committed_tokens = Committed()};
}

int Sequence::HeadsOf(int layer) const {
  return model_->model().layers[static_cast<std::size_t>(layer)].spec.kv_heads;
}

std::int64_t Sequence::LeastReceived(const Shard& shard) const {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int layer = shard.first_layer; layer < shard.end_layer(); ++layer) {
    for (int head = shard.first_head; head < shard.EndHeadIn(HeadsOf(layer)); ++head) {
      least = std::min(
          least,
          layers_[static_cast<std::size_t>(layer)].heads[static_cast<std::size_t>(head)].received);
    }
  }
  return least;
}

std::int64_t Sequence::Committed() const {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const LayerState& layer : layers_) {
    for (const HeadState& head : layer.heads) least = std::min(least, head.received);
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
  ModelTotals now;
  now.open_sequences = state_ == SequenceState::kOpen ? 1 : 0;
  now.sealed_sequences = state_ == SequenceState::kSealed ? 1 : 0;
  now.tokens_held = Committed();
  now.held = Held();
  ModelTotals delta = now;
  delta.open_sequences -= reported_.open_sequences;
  delta.sealed_sequences -= reported_.sealed_sequences;
  delta.tokens_held -= reported_.tokens_held;
  delta.held.use -= reported_.held.use;
  delta.held.allocated -= reported_.held.allocated;
  // Counters only rise: what went when the sequence went is not taken back.
  delta.appended_bytes = source_bytes;
  delta.appended_tokens = std::max<std::int64_t>(0, delta.tokens_held);
  const std::int64_t saturated = Saturated();
  delta.saturated_values = std::max<std::int64_t>(0, saturated - reported_.saturated_values);
  now.saturated_values = saturated;
  reported_ = now;
  model_->Add(delta);
}

}  // namespace kvtier::cachestore
