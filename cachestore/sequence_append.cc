// One chunk into a sequence: checked, its memory taken, encoded, accounted for.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/sequence.h"
#include "cachestore/stored_append.h"
#include "cachestore/value_check.h"

namespace kvtier::cachestore {
namespace {

// Whether they are heads side by side that have the same tokens.
bool AdvanceAlike(const std::vector<HeadAdvance>& heads) {
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const HeadAdvance& head = heads[i];
    if (head.shard_head != heads[0].shard_head + static_cast<int>(i) ||
        head.from != heads[0].from || head.to != heads[0].to)
      return false;
  }
  return !heads.empty();
}

// What is new of one K or V of a layer.
struct NewValues {
  const LayerTensor& tensor;
  const Chunk& chunk;
  const Chunk::Layer& from;
  const std::vector<HeadAdvance>& heads;
  Device& device;

  const SourceTensor& source() const { return tensor.side() == Side::kK ? from.k : from.v; }
};

// Looks at values where they are, on a device. False where they must be looked at here: where not
// all can be stored, or they are quantized already. `seen`: by head.
absl::StatusOr<bool> CheckOnDevice(const NewValues& values, std::vector<Seen>& seen) {
  const TensorModel& tensor = values.tensor.model();
  const SourceTensor& source = values.source();
  if (!source.stored.parts.empty() || kernels::IsFp8(tensor.source) ||
      kernels::IsBlocks(tensor.source))
    return false;
  std::vector<LargestJob> jobs;
  for (std::size_t i = 0; i < values.heads.size(); ++i) {
    const HeadAdvance& head = values.heads[i];
    seen[i].tokens = head.to - head.from;
    jobs.push_back({source.RowsOf(head.shard_head, head.from - values.chunk.first_token),
                    tensor.dim(), seen[i].tokens, &seen[i].largest});
  }
  values.device.Largest(jobs);
  KVT_RETURN_IF_ERROR(values.device.Health());
  const float limit = LimitOf(tensor, values.chunk.saturate_non_finite);
  const bool fit = std::all_of(seen.begin(), seen.end(),
                               [limit](const Seen& head) { return head.largest <= limit; });
  if (!fit) std::fill(seen.begin(), seen.end(), Seen{});
  return fit;
}

// All of the chunk's rows, copied from the device to here.
SourceTensor FetchSource(const NewValues& values, std::vector<std::byte>& memory) {
  const SourceTensor& source = values.source();
  const int heads = values.heads.back().shard_head + 1;
  const std::int64_t tokens = values.chunk.tokens - (source.stored.end - source.stored.begin);
  if (tokens == 0) return source;
  const std::int64_t elements = (heads - 1) * source.head_stride +
                                (tokens - 1) * source.token_stride +
                                kernels::RowElements(source.type, values.tensor.model().dim());
  memory.resize(static_cast<std::size_t>(elements * kernels::ElementBytes(source.type)));
  const Transfer fetch{memory.data(), source.data, static_cast<std::int64_t>(memory.size())};
  values.device.Fetch({&fetch, 1});
  SourceTensor here = source;
  here.data = memory.data();
  return here;
}

// Checks values as values, codes as codes. `seen`: by head.
absl::Status CheckTensor(const NewValues& values, std::vector<Seen>& seen) {
  const LayerTensor& tensor = values.tensor;
  const Chunk& chunk = values.chunk;
  const std::vector<HeadAdvance>& heads = values.heads;
  SourceTensor source = values.source();
  seen.resize(heads.size());
  if (tensor.model().dim() == 0) return absl::OkStatus();
  std::vector<std::byte> fetched;
  if (chunk.on_device) {
    KVT_ASSIGN_OR_RETURN(const bool done, CheckOnDevice(values, seen));
    if (done) return absl::OkStatus();
    source = FetchSource(values, fetched);
    KVT_RETURN_IF_ERROR(values.device.Health());
  }
  const auto range_of = [&](const HeadAdvance& head) {
    return ValueRange{.layer = values.from.layer,
                      .side = tensor.side(),
                      .head = head.head,
                      .shard_head = head.shard_head,
                      .first_token = chunk.first_token,
                      .begin = head.from,
                      .end = head.to};
  };
  if (source.stored.parts.empty() && AdvanceAlike(heads)) {
    const ValueRange range = range_of(heads.front());
    const std::vector<float> largest =
        CheckHeads(tensor.model(), source, range, heads.size(), chunk.saturate_non_finite);
    for (std::size_t i = 0; i < largest.size(); ++i)
      seen[i] = {.largest = largest[i], .tokens = range.end - range.begin};
    if (!largest.empty()) return absl::OkStatus();
  }
  for (const HeadAdvance& head : heads) {
    ValueRange range = range_of(head);
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
                          {.layer = values.from.layer,
                           .first_token = chunk.first_token,
                           .saturate_non_finite = chunk.saturate_non_finite},
                          absl::MakeSpan(seen));
}

}  // namespace

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
    KVT_RETURN_IF_ERROR(CheckTensor({plan.layer->k, chunk, source, plan.heads, home_.device}, k));
    KVT_RETURN_IF_ERROR(CheckTensor({plan.layer->v, chunk, source, plan.heads, home_.device}, v));
    const bool has_v = plan.layer->v.model().dim() > 0;
    for (std::size_t i = 0; i < plan.heads.size(); ++i) {
      const std::int64_t tokens = has_v ? std::min(k[i].tokens, v[i].tokens) : k[i].tokens;
      plan.observed.push_back(
          {source.layer, plan.heads[i].head, {k[i].largest, v[i].largest, tokens}});
    }
    planned.push_back(std::move(plan));
  }
  return planned;
}

absl::Status Sequence::TakeMemory(std::vector<PlannedLayer>& planned, std::int64_t& needed) {
  needed = 0;
  for (PlannedLayer& plan : planned) {
    plan.k_need = plan.layer->k.NeedOf(plan.heads);
    plan.v_need = plan.layer->v.NeedOf(plan.heads);
    needed += plan.layer->k.BytesOf(plan.k_need) + plan.layer->v.BytesOf(plan.v_need);
  }
  const LayerTensor::Memory memory = Memory();
  KVT_RETURN_IF_ERROR(memory.Check(needed));
  for (PlannedLayer& plan : planned) {
    KVT_ASSIGN_OR_RETURN(plan.k, plan.layer->k.Reserve(plan.k_need, memory));
    KVT_ASSIGN_OR_RETURN(plan.v, plan.layer->v.Reserve(plan.v_need, memory));
  }
  return absl::OkStatus();
}

absl::Status Sequence::RunChunk(const Chunk& chunk, std::vector<PlannedLayer>& planned) {
  LayerTensor::Batches batches;
  for (PlannedLayer& plan : planned) {
    plan.layer->k.Grow(std::move(plan.k), plan.heads, home_.device, batches);
    plan.layer->k.Queue(plan.heads, plan.source->k, chunk.first_token, batches);
    if (plan.layer->v.model().dim() == 0) continue;
    plan.layer->v.Grow(std::move(plan.v), plan.heads, home_.device, batches);
    plan.layer->v.Queue(plan.heads, plan.source->v, chunk.first_token, batches);
  }
  home_.device.Zero(batches.empty);
  home_.device.Write(batches.copy);
  home_.device.Checksum(batches.copied);
  KVT_RETURN_IF_ERROR(home_.device.Encode(batches.fill));
  KVT_RETURN_IF_ERROR(home_.device.Encode(batches.encode));
  KVT_RETURN_IF_ERROR(home_.device.Encode(batches.keep));
  return home_.device.Health();
}

void Sequence::SettleLayer(const PlannedLayer& planned, HeaderWrites& headers) {
  LayerState& layer = *planned.layer;
  for (const HeadAdvance& head : planned.heads)
    layer.received[static_cast<std::size_t>(head.head)] = head.to;
  const auto residual = [&](const LayerTensor& tensor) {
    std::int64_t tokens = 0;
    for (std::size_t head = 0; head < layer.received.size(); ++head)
      tokens += tensor.ResidualTokens(static_cast<int>(head), layer.received[head]);
    return tokens;
  };
  layer.k.Settle(planned.heads, residual(layer.k), headers);
  if (layer.v.model().dim() > 0) layer.v.Settle(planned.heads, residual(layer.v), headers);
}

absl::StatusOr<AppendResult> Sequence::Append(const WriterClaim& claim, const Chunk& chunk,
                                              absl::Time now, std::int64_t& needed) {
  Notices notices;
  MutexLock lock(&mutex_);
  return AppendLocked(claim, chunk, now, needed, notices);
}

absl::StatusOr<AppendResult> Sequence::AppendLocked(const WriterClaim& claim, const Chunk& chunk,
                                                    absl::Time now, std::int64_t& needed,
                                                    Notices& notices) {
  KVT_RETURN_IF_ERROR(CheckWritable(claim));
  KVT_ASSIGN_OR_RETURN(std::vector<PlannedLayer> planned, PlanChunk(claim, chunk));
  KVT_RETURN_IF_ERROR(TakeMemory(planned, needed));
  const std::int64_t saturated_before = Saturated();
  if (const absl::Status status = RunChunk(chunk, planned); !status.ok()) {
    // A device that failed half-way may have overwritten residual that was committed: not even
    // those who have a hold on it may read that.
    DropLocked(status, notices);
    LetGo();
    Report(0);
    return status;
  }
  HeaderWrites headers;
  std::int64_t source_bytes = 0;
  std::int64_t skipped = chunk.tokens;  // what every layer and head had already
  for (const PlannedLayer& plan : planned) {
    const LayerModel& model =
        owner_.model->model().layers[static_cast<std::size_t>(plan.source->layer)];
    for (const HeadAdvance& head : plan.heads) {
      source_bytes +=
          (head.to - head.from) * (model.k.source_row_bytes() + model.v.source_row_bytes());
      skipped = std::min(skipped, head.from - chunk.first_token);
    }
    owner_.model->Observe(plan.observed);
    SettleLayer(plan, headers);
  }
  headers.Write(home_.device);
  KVT_RETURN_IF_ERROR(home_.device.Health());  // not acknowledged: all is lost with the device
  Publish();
  if (!planned.empty()) followers_.Tell(notices);
  last_message_ = now;
  AppendResult result = Standing(claim.shard);
  result.skipped_tokens = skipped;
  result.saturated_values = Saturated() - saturated_before;
  Report(source_bytes);
  return result;
}

}  // namespace kvtier::cachestore
