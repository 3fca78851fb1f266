// A layer tensor that ends earlier than it did.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/layer_tensor.h"

namespace kvtier::cachestore {

std::vector<std::int64_t> LayerTensor::CodesOf(absl::Span<const std::int64_t> received) const {
  std::vector<std::int64_t> codes;
  for (std::size_t head = 0; head < received.size(); ++head)
    codes.push_back(CodeTokens(static_cast<int>(head), received[head]));
  return codes;
}

absl::Status LayerTensor::CheckCut(const CutPoint& cut,
                                   absl::Span<const std::int64_t> received) const {
  const std::int64_t unit = model_->layout.unit_tokens;
  const std::vector<std::int64_t> codes = CodesOf(received);
  const auto cuts = [&](std::int64_t of_head) { return cut.token < of_head; };
  if (cut.token % unit == 0 || std::none_of(codes.begin(), codes.end(), cuts))
    return absl::OkStatus();
  const std::int64_t before = cut.token / unit * unit;
  return Error(
      Reason::kGroupBound,
      fmt::format("tokens is {}, inside a group of {} tokens that are codes; {} and {} are "
                  "its bounds",
                  cut.token, unit, before, before + unit));
}

std::shared_ptr<const Part> LayerTensor::PartCut(const CutPoint& cut,
                                                 absl::Span<const std::int64_t> received) const {
  if (cut.column != nullptr) return cut.column;
  const std::int64_t page = cut.token / model_->layout.page_tokens;
  if (cut.token % model_->layout.page_tokens == 0 || page < first_page_ || page >= end_page())
    return nullptr;
  const std::vector<std::int64_t> codes = CodesOf(received);
  const bool has_codes = *std::max_element(codes.begin(), codes.end()) > cut.token;
  return has_codes ? parts_[static_cast<std::size_t>(page - first_page_)] : nullptr;
}

bool LayerTensor::CopiesCut(const CutPoint& cut, absl::Span<const std::int64_t> received) const {
  const std::shared_ptr<const Part> part = PartCut(cut, received);
  // Two: the page's and ours. A reader may have pinned it; what one that let go has read lies
  // before what follows, since ours is let go after its was.
  return part != nullptr && (cut.column != nullptr || part.use_count() > 2);
}

std::int64_t LayerTensor::CutBytes(const CutPoint& cut,
                                   absl::Span<const std::int64_t> received) const {
  return CopiesCut(cut, received) ? model_->layout.bytes : 0;
}

absl::StatusOr<std::shared_ptr<Part>> LayerTensor::ReserveCut(
    const CutPoint& cut, absl::Span<const std::int64_t> received, const Memory& memory) const {
  if (!CopiesCut(cut, received)) return nullptr;
  KVT_ASSIGN_OR_RETURN(Allocation bytes, memory.Take(model_->layout.bytes));
  return std::make_shared<Part>(std::move(bytes), *PartCut(cut, received), memory.device);
}

void LayerTensor::Truncate(const CutPoint& cut, absl::Span<const std::int64_t> received,
                           std::shared_ptr<Part> copy, Device& device) {
  const std::int64_t page_tokens = model_->layout.page_tokens;
  const std::int64_t page = cut.token / page_tokens;
  const std::vector<std::int64_t> codes = CodesOf(received);
  const bool cuts_part = PartCut(cut, received) != nullptr;
  if (page < first_page_) {
    parts_.clear();
    first_page_ = page;
    origin_ = std::min(origin_, first_page_ * page_tokens);
    if (copy != nullptr) parts_.push_back(std::move(copy));
  } else {
    const std::int64_t most = *std::max_element(codes.begin(), codes.end());
    const std::int64_t pages =
        (std::min(most, cut.token) + page_tokens - 1) / page_tokens - first_page_;
    if (copy != nullptr) parts_[static_cast<std::size_t>(page - first_page_)] = std::move(copy);
    parts_.resize(static_cast<std::size_t>(std::max<std::int64_t>(0, pages)));
  }
  if (cuts_part) {
    std::vector<std::int64_t> in_page;
    in_page.reserve(codes.size());
    for (const std::int64_t of_head : codes)
      in_page.push_back(std::min(of_head, (page + 1) * page_tokens) - page * page_tokens);
    parts_.back()->Cut(cut.token - page * page_tokens, in_page, device);
  }
  std::int64_t residual = 0;
  frozen_ = codes;
  for (std::int64_t& of_head : frozen_) {
    of_head = std::min(of_head, cut.token);
    residual += cut.token - of_head;
  }
  HoldResidual(residual);
  held_ = {};
  for (const auto& part : parts_) held_ += part->held();
  if (slot_ != nullptr) held_ += slot_->memory().held();
}

}  // namespace kvtier::cachestore
