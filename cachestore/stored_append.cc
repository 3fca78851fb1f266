#include "cachestore/stored_append.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/value_check.h"
#include "kernels/host_codec.h"

namespace kvtier::cachestore {
namespace {

constexpr std::int64_t kTokensAtOnce = 64;

// The largest magnitude that a head's slice reads as; nothing where a value is not finite.
std::optional<float> LargestFinite(const PartLayout& layout, const std::byte* slice, float scale) {
  float largest = 0;
  std::vector<float> values(static_cast<std::size_t>(kTokensAtOnce * layout.dim));
  kernels::DecodeRun run{.codec = layout.codec,
                         .dim = layout.dim,
                         .scale = scale,
                         .in = slice,
                         .out = {reinterpret_cast<std::byte*>(values.data()),
                                 kernels::ElementType::kFp32, layout.dim}};
  for (; run.first_token < layout.page_tokens; run.first_token += kTokensAtOnce) {
    run.tokens = std::min(kTokensAtOnce, layout.page_tokens - run.first_token);
    // An Inf saturates.
    if (kernels::DecodeOnHost(run) > 0) return std::nullopt;
    const kernels::ConstRows rows{run.out.data, run.out.type, run.out.token_stride};
    const float found = kernels::LargestMagnitude(rows, layout.dim, run.tokens);
    if (!std::isfinite(found)) return std::nullopt;
    largest = std::max(largest, found);
  }
  return largest;
}

absl::Status Refuse(const std::string& message) { return Error(Reason::kInvalidField, message); }

// The counts, and the scales.
absl::Status CheckEntries(const TensorModel& tensor, const std::byte* part,
                          const std::string& name) {
  const PartLayout& layout = tensor.layout;
  const PartHeader header = HeaderOf(part);
  if (header.tokens != header.page_tokens) {
    return Refuse(fmt::format("{}: tokens is {}; want a final part, of {}", name, header.tokens,
                              header.page_tokens));
  }
  const std::int64_t most = std::int64_t{layout.page_tokens} * layout.dim;
  std::uint64_t saturated = 0;
  for (int head = 0; head < layout.heads; ++head) {
    const HeadEntry entry = EntryOf(part, head);
    if (entry.saturated > most) {
      return Refuse(fmt::format("{}: saturated of head {} is {}; want at most {}", name, head,
                                entry.saturated, most));
    }
    saturated += entry.saturated;
    const bool known = !tensor.scales.empty();
    const float want = known ? tensor.scales[static_cast<std::size_t>(head)] : 0.0f;
    if (known ? entry.scale != want : !(std::isfinite(entry.scale) && entry.scale >= 0)) {
      return Refuse(fmt::format("{}: scale of head {} is {}; want {}", name, head, entry.scale,
                                known ? fmt::format("{}", want) : "a finite number from 0"));
    }
  }
  if (header.saturated != saturated) {
    return Refuse(fmt::format("{}: saturated is {}; want {}, what its heads have together", name,
                              header.saturated, saturated));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStoredPages(const LayerTensor& tensor, const StoredPages& pages,
                              absl::Span<const HeadAdvance> heads, const StoredCheck& check,
                              absl::Span<Seen> seen) {
  if (pages.parts.empty() || heads.empty()) return absl::OkStatus();
  const int first_head = heads[0].head - heads[0].shard_head;
  const TensorModel shard = HeadsOf(tensor.model(), {first_head, first_head + pages.heads});
  const PartLayout& layout = shard.layout;
  const PartHeader want = MakePartHeader(shard, tensor.side(), tensor.k_before_rope());
  const std::int64_t first_page = (check.first_token + pages.begin) / layout.page_tokens;
  for (std::size_t i = 0; i < pages.parts.size(); ++i) {
    const std::int64_t page = first_page + static_cast<std::int64_t>(i);
    const auto name = fmt::format("chunk.{}_parts[{}], page {} of layer {}",
                                  tensor.side() == Side::kK ? "k" : "v", i, page, check.layer);
    const absl::Span<const std::byte> part(pages.parts[i], static_cast<std::size_t>(layout.bytes));
    KVT_RETURN_IF_ERROR(CheckPart(part, layout, want, {0, layout.heads}, name));
    KVT_RETURN_IF_ERROR(CheckEntries(shard, part.data(), name));
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadAdvance& head = heads[h];
      // Nothing of the page is new to a head whose codes go past it.
      if (tensor.CodeTokens(head.head, head.from) >= (page + 1) * layout.page_tokens) continue;
      const HeadEntry entry = EntryOf(part.data(), head.shard_head);
      if (const std::uint64_t counted = tensor.SaturatedIn(page, head.head);
          entry.saturated < counted) {
        return Refuse(
            fmt::format("{}: saturated of head {} is {}; want at least {}, counted of "
                        "its tokens that are here already",
                        name, head.shard_head, entry.saturated, counted));
      }
      if (TakesNonFinite(shard, check.saturate_non_finite)) continue;
      const std::optional<float> largest =
          LargestFinite(layout, part.data() + layout.SliceOffset(head.shard_head), entry.scale);
      if (largest.has_value()) {
        seen[h].largest = std::max(seen[h].largest, *largest);
        seen[h].tokens +=
            (page + 1) * layout.page_tokens - std::max(head.from, page * layout.page_tokens);
        continue;
      }
      return Error(Reason::kNonFiniteValue,
                   fmt::format("{}: a value of head {} is not finite as it reads; want finite "
                               "numbers",
                               name, head.shard_head));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvtier::cachestore
