#include "cachestore/layer_tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
namespace {

// Values as they are: what the residual stores.
kernels::Codec SourceCodec(ElementType source) {
  return {.id = kernels::CodecId::kRaw, .element = source};
}

void CopyTo(const Allocation& to, const Allocation& from, Device& device) {
  const Transfer all{to.data(), from.data(), from.size()};
  device.Copy({&all, 1});
}

}  // namespace

absl::StatusOr<Allocation> LayerTensor::Memory::Take(std::int64_t bytes) const {
  Allocation taken = arena.Allocate(bytes, owner);
  if (taken) return taken;
  KVT_RETURN_IF_ERROR(Check(bytes));
  return Error(Reason::kBudget,
               fmt::format("of the memory budget of {} bytes {} are free, but not {} in one piece",
                           arena.budget(), arena.Snapshot().free, bytes));
}

absl::Status LayerTensor::Memory::Check(std::int64_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  const std::int64_t quota = owner.name_space->quota();
  if (const std::int64_t held = owner.name_space->held().allocated; bytes > quota - held) {
    return Error(Reason::kQuota,
                 fmt::format("the namespace's quota of {} bytes is full: {} are held, {} more are "
                             "needed; remove sequences or raise the quota",
                             quota, held, bytes));
  }
  if (const std::int64_t free = arena.Snapshot().free; bytes > free) {
    return Error(Reason::kBudget,
                 fmt::format("the memory budget of {} bytes is full: {} are free, {} more are "
                             "needed; remove sequences or start with more memory",
                             arena.budget(), free, bytes));
  }
  return absl::OkStatus();
}

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

LayerTensor::Need LayerTensor::NeedOf(absl::Span<const HeadAdvance> heads) const {
  if (model_->dim() == 0) return {};
  std::int64_t pages = end_page();
  bool writes_residual = false;
  for (const HeadAdvance& head : heads) {
    const std::int64_t codes = CodeTokens(head.head, head.to);
    pages = std::max(pages, (codes + model_->layout.page_tokens - 1) / model_->layout.page_tokens);
    // A block that was begun is filled up in the residual before it's encoded.
    writes_residual |= head.to > codes || head.from < InResidual(head.from, codes);
  }
  return {.pages = pages - end_page(),
          .slot = slot_ == nullptr ? model_->residual.capacity() > 0
                                   : writes_residual && slot_->shared()};
}

std::int64_t LayerTensor::BytesOf(const Need& need) const {
  return need.pages * model_->layout.bytes + (need.slot ? model_->residual_slot_bytes() : 0);
}

absl::StatusOr<LayerTensor::Growth> LayerTensor::Reserve(const Need& need,
                                                         const Memory& memory) const {
  Growth growth;
  for (std::int64_t page = 0; page < need.pages; ++page) {
    KVT_ASSIGN_OR_RETURN(Allocation bytes, memory.Take(model_->layout.bytes));
    growth.parts.push_back(
        std::make_shared<Part>(std::move(bytes), *model_, side_, k_before_rope_));
  }
  if (need.slot) {
    KVT_ASSIGN_OR_RETURN(Allocation bytes, memory.Take(model_->residual_slot_bytes()));
    growth.slot = std::make_shared<ResidualSlot>(std::move(bytes), *model_);
  }
  return growth;
}

void LayerTensor::Grow(Growth growth, absl::Span<const HeadAdvance> heads, Device& device,
                       Batches& batches) {
  for (std::shared_ptr<Part>& part : growth.parts) {
    // No head has had codes there before.
    std::vector<std::int64_t> codes(static_cast<std::size_t>(model_->heads()));
    const std::int64_t first = end_page() * model_->layout.page_tokens;
    for (const HeadAdvance& head : heads) {
      codes[static_cast<std::size_t>(head.head)] = std::clamp<std::int64_t>(
          CodeTokens(head.head, head.to) - first, 0, model_->layout.page_tokens);
    }
    const std::vector<Piece> empty = part->Empty(codes);
    batches.empty.insert(batches.empty.end(), empty.begin(), empty.end());
    held_ += {.use = {.header = model_->layout.header_use()}, .allocated = part->bytes()};
    parts_.push_back(std::move(part));
  }
  if (growth.slot == nullptr) return;
  held_.allocated += growth.slot->memory().size();
  if (slot_ != nullptr) {  // a reader holds the old one: go on in a copy
    CopyTo(growth.slot->memory(), slot_->memory(), device);
    held_.allocated -= slot_->memory().size();
  }
  slot_ = std::move(growth.slot);
  slot_->memory().Hold({.residual = residual_tokens_ * model_->source_row_bytes()});
}

void LayerTensor::Queue(absl::Span<const HeadAdvance> heads, const SourceTensor& source,
                        std::int64_t first_token, Batches& batches) {
  for (const HeadAdvance& head : heads) {
    const HeadQueue queue{head, source, first_token};
    const std::int64_t codes_before = CodeTokens(head.head, head.from);
    const std::int64_t codes = CodeTokens(head.head, head.to);
    const std::int64_t in_residual = InResidual(head.from, codes);
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
    Part& part = PartAt(page);
    const std::byte* from = stored.parts[static_cast<std::size_t>(page - first_page)];
    batches.copy.push_back({part.UnitAt(queue.head.head, in_page),
                            from + came.UnitOffset(queue.head.shard_head, in_page),
                            (until - begin) / layout.unit_tokens * layout.unit.total()});
    batches.copied.push_back(part.ChecksumOf(queue.head.head));
    std::uint64_t& saturated = part.saturated(queue.head.head);
    saturated = std::max<std::uint64_t>(saturated, EntryOf(from, queue.head.shard_head).saturated);
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
    Part& part = PartAt(page);
    jobs.push_back(
        {{.codec = layout.codec,
          .dim = layout.dim,
          .scale = model_->scales.empty() ? 1.0f : model_->scales[static_cast<std::size_t>(head)],
          .source = rows,
          .units = static_cast<int>((until - begin) / layout.unit_tokens),
          .out = part.UnitAt(head, begin - page * layout.page_tokens)},
         &part.saturated(head),
         until == (page + 1) * layout.page_tokens ? part.ChecksumOf(head) : ChecksumJob()});
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
                         HeaderWrites& headers) {
  const PartLayout& layout = model_->layout;
  for (const HeadAdvance& head : heads) {
    std::int64_t begin = CodeTokens(head.head, head.from);
    const std::int64_t end = CodeTokens(head.head, head.to);
    while (begin < end) {
      const std::int64_t page = begin / layout.page_tokens;
      const std::int64_t page_end = (page + 1) * layout.page_tokens;
      const std::int64_t until = std::min(end, page_end);
      Part& part = PartAt(page);
      const std::int64_t units = (until - begin) / layout.unit_tokens;
      part.Hold(units);
      saturated_ += part.TakeNewSaturated();
      held_.use += {.codes = units * layout.unit.codes, .scales = units * layout.unit.scales};
      if (until == page_end) part.FinishHead(head.head, headers);
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

void LayerTensor::Pin(std::int64_t end_token, absl::Span<const std::int64_t> received,
                      TensorPins& pins) const {
  const std::int64_t page_tokens = model_->layout.page_tokens;
  const std::int64_t until = std::min(AlignUp(end_token, page_tokens) / page_tokens, end_page());
  for (std::int64_t page = std::max(pins.end_page(), first_page_); page < until; ++page) {
    const auto& part = parts_[static_cast<std::size_t>(page - first_page_)];
    pins.parts.push_back({.part = part, .final = part->final()});
  }
  bool reads_residual = false;
  for (std::size_t head = 0; head < received.size(); ++head) {
    pins.code_tokens.push_back(CodeTokens(static_cast<int>(head), received[head]));
    reads_residual |= pins.code_tokens.back() < end_token;
  }
  if (reads_residual) pins.residual = ResidualPin(slot_);
}

std::int64_t LayerTensor::FinalPages(std::int64_t most) const {
  const auto end = parts_.begin() + std::min(most, static_cast<std::int64_t>(parts_.size()));
  const auto filling =
      std::find_if(parts_.begin(), end, [](const auto& part) { return !part->final(); });
  return filling - parts_.begin();
}

std::vector<std::shared_ptr<Part>> LayerTensor::TakePages(std::int64_t pages) {
  const auto end = parts_.begin() + pages;
  std::vector<std::shared_ptr<Part>> taken(parts_.begin(), end);
  parts_.erase(parts_.begin(), end);
  first_page_ += pages;
  for (const auto& part : taken) held_ -= part->held();
  return taken;
}

std::int64_t LayerTensor::CopyBytes() const {
  const auto filling =
      std::count_if(parts_.begin(), parts_.end(), [](const auto& part) { return !part->final(); });
  return BytesOf({.pages = filling, .slot = slot_ != nullptr});
}

absl::StatusOr<LayerTensor> LayerTensor::Copy(const Memory& memory) const {
  LayerTensor copy = *this;
  for (std::shared_ptr<Part>& part : copy.parts_) {
    if (part->final()) continue;
    KVT_ASSIGN_OR_RETURN(Allocation bytes, memory.Take(part->bytes()));
    part = std::make_shared<Part>(std::move(bytes), *part, memory.device);
  }
  if (slot_ != nullptr) {
    KVT_ASSIGN_OR_RETURN(Allocation bytes, memory.Take(slot_->memory().size()));
    CopyTo(bytes, slot_->memory(), memory.device);
    bytes.Hold(slot_->memory().held().use);
    copy.slot_ = std::make_shared<ResidualSlot>(std::move(bytes), *model_);
  }
  return copy;
}

}  // namespace kvtier::cachestore
