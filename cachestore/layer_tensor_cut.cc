// A layer tensor that ends earlier than it did.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/layer_tensor.h"

namespace kvtier::cachestore {

absl::StatusOr<LayerTensor::Cut> LayerTensor::PlanCut(
    std::int64_t token, std::shared_ptr<const Part> column,
    absl::Span<const std::int64_t> received) const {
  const std::int64_t unit = model_->layout.unit_tokens, page_tokens = model_->layout.page_tokens;
  Cut cut{.token = token, .codes = {}, .page = std::move(column), .copies = false, .copy = nullptr};
  for (std::size_t head = 0; head < received.size(); ++head)
    cut.codes.push_back(CodeTokens(static_cast<int>(head), received[head]));
  const bool cuts_codes = *std::max_element(cut.codes.begin(), cut.codes.end()) > token;
  if (cuts_codes && token % unit != 0) {
    const std::int64_t before = token / unit * unit;
    return Error(
        Reason::kGroupBound,
        fmt::format("tokens is {}, inside a group of {} tokens that are codes; {} and {} are "
                    "its bounds",
                    token, unit, before, before + unit));
  }
  cut.copies = cut.page != nullptr;
  if (cut.copies && &cut.page->model() != model_ && cuts_codes) {
    const std::int64_t before = token / page_tokens * page_tokens;
    return Error(Reason::kGroupBound,
                 fmt::format("tokens is {}, inside a page that was stored in fewer bits when room "
                             "was needed; {} and {} are its bounds",
                             token, before, before + page_tokens));
  }
  const std::int64_t page = token / page_tokens;
  if (cut.copies || !cuts_codes || token % page_tokens == 0 || page < first_page_) return cut;
  cut.page = parts_[static_cast<std::size_t>(page - first_page_)];
  cut.copies = cut.page.use_count() > 2;  // ours and the cut's; a reader may have pinned it
  return cut;
}

absl::Status LayerTensor::Reserve(Cut& cut, const Memory& memory) const {
  if (!cut.copies) return absl::OkStatus();
  KVT_ASSIGN_OR_RETURN(Allocation bytes, memory.Take(model_->layout.bytes));
  cut.copy = std::make_shared<Part>(std::move(bytes), *cut.page, memory.device);
  return absl::OkStatus();
}

void LayerTensor::Truncate(Cut cut, Device& device) {
  const std::int64_t page_tokens = model_->layout.page_tokens;
  const std::int64_t page = cut.token / page_tokens;
  const bool cuts_page = cut.page != nullptr;
  // What a reader that let go of it has read lies before what follows: ours goes after its did.
  cut.page.reset();
  if (page < first_page_) {
    parts_.clear();
    first_page_ = page;
    origin_ = std::min(origin_, first_page_ * page_tokens);
    if (cut.copy != nullptr) parts_.push_back(std::move(cut.copy));
  } else {
    const std::int64_t most = *std::max_element(cut.codes.begin(), cut.codes.end());
    const std::int64_t pages =
        (std::min(most, cut.token) + page_tokens - 1) / page_tokens - first_page_;
    if (cut.copy != nullptr)
      parts_[static_cast<std::size_t>(page - first_page_)] = std::move(cut.copy);
    parts_.resize(static_cast<std::size_t>(std::max<std::int64_t>(0, pages)));
  }
  if (cuts_page) {
    std::vector<std::int64_t> in_page;
    in_page.reserve(cut.codes.size());
    for (const std::int64_t of_head : cut.codes)
      in_page.push_back(std::min(of_head, (page + 1) * page_tokens) - page * page_tokens);
    parts_.back()->Cut(cut.token - page * page_tokens, in_page, device);
  }
  std::int64_t residual = 0;
  frozen_ = std::move(cut.codes);
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
