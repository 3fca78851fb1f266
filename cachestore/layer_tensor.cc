#include "cachestore/layer_tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"

namespace kvtier::cachestore {
namespace {

// Values as they are: what the residual stores.
kernels::Codec SourceCodec(ElementType source) {
  return {.id = kernels::CodecId::kRaw, .element = source};
}

absl::Status OutOfBudget(const Arena& arena, std::int64_t wanted) {
  return Error(
      Reason::kBudget,
      fmt::format("the memory budget of {} bytes is full: {} are free, {} more are needed; remove "
                  "sequences or start with more memory",
                  arena.budget(), arena.Snapshot().free, wanted));
}

}  // namespace

struct LayerTensor::HeadQueue {
  const HeadAdvance& head;
  const SourceTensor& source;
  std::int64_t first_token;

  kernels::ConstRows RowsFrom(std::int64_t token) const {
    return source.RowsOf(head.shard_head, token - first_token);
  }
  std::int64_t stored_begin() const { return first_token + source.stored.begin; }
  std::int64_t stored_end() const { return first_token + source.stored.end; }

  // Calls f for what of [begin, end) lies before the stored tokens, and for what lies behind them:
  // pages are cut off, so units stay whole.
  template <class F>
  void AroundStored(std::int64_t begin, std::int64_t end, F f) const {
    if (source.stored.parts.empty()) return f(begin, end);
    f(begin, std::min(end, stored_begin()));
    f(std::max(begin, stored_end()), end);
  }
};

absl::StatusOr<LayerTensor::Growth> LayerTensor::Reserve(absl::Span<const HeadAdvance> heads,
                                                         Arena& arena, Device& device) const {
  Growth growth;
  std::int64_t pages = static_cast<std::int64_t>(parts_.size());
  bool writes_residual = false;
  for (const HeadAdvance& head : heads) {
    const std::int64_t codes = model_->residual.CodeTokens(head.to);
    pages = std::max(pages, (codes + model_->layout.page_tokens - 1) / model_->layout.page_tokens);
    // A block that was begun is filled up in the residual before it's encoded.
    writes_residual |= head.to > codes || model_->residual.ResidualTokens(head.from) > 0;
  }
  for (std::int64_t page = static_cast<std::int64_t>(parts_.size()); page < pages; ++page) {
    Allocation memory = arena.Allocate(model_->layout.bytes);
    if (!memory) return OutOfBudget(arena, model_->layout.bytes);
    growth.parts.push_back(
        std::make_shared<Part>(std::move(memory), *model_, side_, k_before_rope_, device));
  }
  const bool takes_slot =
      slot_ == nullptr ? model_->residual.capacity() > 0 : writes_residual && slot_->shared();
  if (takes_slot) {
    Allocation memory = arena.Allocate(model_->residual_slot_bytes());
    if (!memory) return OutOfBudget(arena, model_->residual_slot_bytes());
    growth.slot = std::make_shared<ResidualSlot>(std::move(memory), *model_);
  }
  return growth;
}

void LayerTensor::Grow(Growth growth, Device& device) {
  for (std::shared_ptr<Part>& part : growth.parts) {
    held_ += {.use = {.header = model_->layout.header_use()}, .allocated = part->bytes()};
    parts_.push_back(std::move(part));
  }
  if (growth.slot == nullptr) return;
  held_.allocated += growth.slot->memory().size();
  if (slot_ != nullptr) {  // a reader holds the old one: go on in a copy
    device.Copy(growth.slot->memory().data(), slot_->memory().data(), slot_->memory().size());
    held_.allocated -= slot_->memory().size();
  }
  slot_ = std::move(growth.slot);
  slot_->memory().Hold({.residual = residual_tokens_ * model_->source_row_bytes()});
}

void LayerTensor::Queue(absl::Span<const HeadAdvance> heads, const SourceTensor& source,
                        std::int64_t first_token, Batches& batches) {
  for (const HeadAdvance& head : heads) {
    const HeadQueue queue{head, source, first_token};
    const std::int64_t codes_before = model_->residual.CodeTokens(head.from);
    const std::int64_t codes = model_->residual.CodeTokens(head.to);
    // Codes up to here come from the residual: what it holds, and the block that it has begun.
    const std::int64_t in_residual = std::min(codes, AlignUp(head.from, model_->residual.block));
    queue.AroundStored(head.from, in_residual, [&](std::int64_t begin, std::int64_t end) {
      QueueResidual(queue, begin, end, batches.fill);
    });
    queue.AroundStored(codes_before, in_residual, [&](std::int64_t begin, std::int64_t end) {
      QueueCodes(queue, begin, end, true, batches.encode);
    });
    queue.AroundStored(std::max(in_residual, codes_before), codes,
                       [&](std::int64_t begin, std::int64_t end) {
                         QueueCodes(queue, begin, end, false, batches.encode);
                       });
    QueueResidual(queue, std::max(codes, head.from), head.to, batches.keep);
    QueueStored(queue, std::max(codes_before, queue.stored_begin()), queue.stored_end(), batches);
  }
}

// Of a page that is new to the head in part only, what was codes already stays, and what was
// residual comes from the part: a unit that is half of each could come from nowhere else.
void LayerTensor::QueueStored(const HeadQueue& queue, std::int64_t begin, std::int64_t end,
                              Batches& batches) {
  const PartLayout& layout = model_->layout;
  const std::int64_t first_page = queue.stored_begin() / layout.page_tokens;
  const StoredPages& stored = queue.source.stored;
  const PartLayout came =
      MakePartLayout(layout.codec, stored.heads, layout.dim, layout.page_tokens);
  while (begin < end) {
    const std::int64_t page = begin / layout.page_tokens;
    const std::int64_t until = (page + 1) * layout.page_tokens;
    const std::int64_t in_page = begin - page * layout.page_tokens;
    Part& part = *parts_[static_cast<std::size_t>(page)];
    const std::byte* from = stored.parts[static_cast<std::size_t>(page - first_page)];
    batches.copy.push_back({part.UnitAt(queue.head.head, in_page),
                            from + came.UnitOffset(queue.head.shard_head, in_page),
                            (until - begin) / layout.unit_tokens * layout.unit.total()});
    part.saturated(queue.head.head) = EntryOf(from, queue.head.shard_head).saturated;
    begin = until;
  }
}

void LayerTensor::QueueResidual(const HeadQueue& queue, std::int64_t begin, std::int64_t end,
                                std::vector<EncodeJob>& jobs) {
  while (begin < end) {
    const std::int64_t until_wrap = slot_->capacity() - begin % slot_->capacity();
    const std::int64_t count = std::min(end - begin, until_wrap);
    jobs.push_back({{.codec = SourceCodec(model_->source),
                     .dim = model_->dim(),
                     .source = queue.RowsFrom(begin),
                     .units = static_cast<int>(count),
                     .out = slot_->RowAt(queue.head.head, begin)}});
    begin += count;
  }
}

void LayerTensor::QueueCodes(const HeadQueue& queue, std::int64_t begin, std::int64_t end,
                             bool from_residual, std::vector<EncodeJob>& jobs) {
  const PartLayout& layout = model_->layout;
  const int head = queue.head.head;
  while (begin < end) {
    const std::int64_t page = begin / layout.page_tokens;
    std::int64_t until = std::min(end, (page + 1) * layout.page_tokens);
    kernels::ConstRows rows;
    if (from_residual) {
      until = std::min(until, begin + slot_->capacity() - begin % slot_->capacity());
      rows = {slot_->RowAt(head, begin), model_->source, model_->dim()};
    } else {
      rows = queue.RowsFrom(begin);
    }
    Part& part = *parts_[static_cast<std::size_t>(page)];
    jobs.push_back(
        {{.codec = layout.codec,
          .dim = layout.dim,
          .scale = model_->scales.empty() ? 1.0f : model_->scales[static_cast<std::size_t>(head)],
          .source = rows,
          .units = static_cast<int>((until - begin) / layout.unit_tokens),
          .out = part.UnitAt(head, begin - page * layout.page_tokens)},
         &part.saturated(head)});
    begin = until;
  }
}

void LayerTensor::HoldResidual(std::int64_t tokens) {
  const MemoryUse delta{.residual = (tokens - residual_tokens_) * model_->source_row_bytes()};
  residual_tokens_ = tokens;
  held_.use += delta;
  if (slot_ != nullptr) slot_->memory().Hold(delta);
}

void LayerTensor::Settle(absl::Span<const HeadAdvance> heads, std::int64_t residual_tokens,
                         Device& device) {
  const PartLayout& layout = model_->layout;
  for (const HeadAdvance& head : heads) {
    std::int64_t begin = model_->residual.CodeTokens(head.from);
    const std::int64_t end = model_->residual.CodeTokens(head.to);
    while (begin < end) {
      const std::int64_t page = begin / layout.page_tokens;
      const std::int64_t page_end = (page + 1) * layout.page_tokens;
      const std::int64_t until = std::min(end, page_end);
      Part& part = *parts_[static_cast<std::size_t>(page)];
      const std::int64_t units = (until - begin) / layout.unit_tokens;
      part.Hold(units);
      saturated_ += part.TakeNewSaturated();
      held_.use += {.codes = units * layout.unit.codes, .scales = units * layout.unit.scales};
      if (until == page_end) part.FinishHead(head.head, device);
      begin = until;
    }
  }
  HoldResidual(residual_tokens);
}

void LayerTensor::Seal() {
  if (slot_ == nullptr || residual_tokens_ > 0) return;
  held_.allocated -= slot_->memory().size();
  slot_.reset();
}

TensorPins LayerTensor::Pin(std::int64_t first_token, std::int64_t end_token,
                            absl::Span<const std::int64_t> received) const {
  TensorPins pins{.model = model_, .first_page = first_token / model_->layout.page_tokens};
  const std::int64_t end_page =
      AlignUp(end_token, model_->layout.page_tokens) / model_->layout.page_tokens;
  for (std::int64_t page = pins.first_page;
       page < std::min(end_page, static_cast<std::int64_t>(parts_.size())); ++page) {
    const std::shared_ptr<Part>& part = parts_[static_cast<std::size_t>(page)];
    pins.parts.push_back({.part = part, .final = part->final()});
  }
  bool reads_residual = false;
  for (const std::int64_t tokens : received) {
    pins.code_tokens.push_back(model_->residual.CodeTokens(tokens));
    reads_residual |= pins.code_tokens.back() < end_token;
  }
  if (reads_residual) pins.residual = ResidualPin(slot_);
  return pins;
}

}  // namespace kvtier::cachestore
