#include "cachestore/stored_read.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "cachestore/base/checksum.h"
#include "cachestore/base/errors.h"

namespace kvtier::cachestore {
namespace {

const TensorPins::PinnedPart& PartAt(const TensorPins& tensor, std::int64_t page) {
  return tensor.parts[static_cast<std::size_t>(page - tensor.first_page)];
}

// Only what was codes when it was pinned is looked at: an append may be writing the rest.
void FillFillingPart(const TensorPins& tensor, HeadRange heads, std::int64_t page, Device& device,
                     std::byte* out) {
  const PartLayout& layout = tensor.model->layout;
  const Part& part = *PartAt(tensor, page).part;
  std::memset(out, 0, static_cast<std::size_t>(PartBytes(layout, heads.count())));
  const std::vector<std::int64_t> tokens = PartTokens(tensor, heads, page);
  std::vector<Transfer> filled;
  for (int head = heads.first; head < heads.end; ++head) {
    const std::int64_t units =
        tokens[static_cast<std::size_t>(head - heads.first)] / layout.unit_tokens;
    filled.push_back({out + layout.SliceOffset(head - heads.first), part.SliceAt(head),
                      units * layout.unit.total()});
  }
  device.Fetch(filled);
  PartHeader header = MakePartHeader(*tensor.model, part.side(), part.k_before_rope());
  header.tokens = static_cast<std::uint32_t>(*std::min_element(tokens.begin(), tokens.end()));
  for (int head = 0; head < layout.heads; ++head) {
    HeadEntry entry{.scale = part.ScaleOf(head)};
    if (head >= heads.first && head < heads.end)
      entry.checksum = ChecksumOf(out + layout.SliceOffset(head - heads.first), layout.slice_bytes);
    WriteEntry(out, head, entry);
  }
  WriteHeader(out, header);
  header.checksum = HeaderChecksum(out, layout.header_use());
  WriteHeader(out, header);
}

}  // namespace

std::int64_t LeastCodes(const TensorPins& tensor, HeadRange heads) {
  return *std::min_element(tensor.code_tokens.begin() + heads.first,
                           tensor.code_tokens.begin() + heads.end);
}

std::int64_t MostCodes(const TensorPins& tensor, HeadRange heads) {
  return *std::max_element(tensor.code_tokens.begin() + heads.first,
                           tensor.code_tokens.begin() + heads.end);
}

StoredSpan StoredSpanOf(const TensorPins& tensor, HeadRange heads, std::int64_t first_token,
                        std::int64_t tokens) {
  StoredSpan span;
  const std::int64_t page_tokens = tensor.model->layout.page_tokens;
  const std::int64_t end = first_token + tokens;
  if (const std::int64_t codes = std::min(end, MostCodes(tensor, heads)); first_token < codes) {
    span.first_page = first_token / page_tokens;
    span.end_page = (codes + page_tokens - 1) / page_tokens;
  }
  span.first_row = std::clamp(LeastCodes(tensor, heads), first_token, end);
  span.rows = end - span.first_row;
  return span;
}

std::int64_t StoredBytesOf(const TensorPins& tensor, HeadRange heads, const StoredSpan& span) {
  return span.pages() * PartBytes(tensor.model->layout, heads.count()) +
         span.rows * heads.count() * tensor.model->source_row_bytes();
}

absl::Status CheckGroupBound(const TensorPins& tensor, HeadRange heads, std::int64_t token,
                             std::int64_t committed, const std::string& name) {
  const int unit = tensor.model->layout.unit_tokens;
  const std::int64_t codes = LeastCodes(tensor, heads);
  if (token % unit == 0 || token >= codes || token == committed) return absl::OkStatus();
  return Error(
      Reason::kGroupBound,
      fmt::format("a read as stored can't begin or end at token {}: {} is stored in groups "
                  "of {} tokens; the nearest bounds are {} and {}",
                  token, name, unit, token / unit * unit, (token / unit + 1) * unit));
}

void FillStoredPart(const TensorPins& tensor, HeadRange heads, std::int64_t page, Device& device,
                    std::byte* out) {
  const TensorPins::PinnedPart& pinned = PartAt(tensor, page);
  if (!pinned.final) return FillFillingPart(tensor, heads, page, device, out);
  const PartLayout& layout = tensor.model->layout;
  const std::int64_t slices = heads.count() * layout.slice_bytes;
  const std::int64_t end = layout.header_bytes + slices;
  device.Fetch({{out, pinned.part->data(), layout.header_bytes},
                {out + layout.header_bytes, pinned.part->SliceAt(heads.first), slices}});
  std::memset(out + end, 0, static_cast<std::size_t>(PartBytes(layout, heads.count()) - end));
}

std::vector<std::int64_t> PartTokens(const TensorPins& tensor, HeadRange heads, std::int64_t page) {
  const std::int64_t page_tokens = tensor.model->layout.page_tokens;
  std::vector<std::int64_t> tokens;
  for (int head = heads.first; head < heads.end; ++head) {
    const std::int64_t codes = tensor.code_tokens[static_cast<std::size_t>(head)];
    tokens.push_back(std::clamp<std::int64_t>(codes - page * page_tokens, 0, page_tokens));
  }
  return tokens;
}

}  // namespace kvtier::cachestore
