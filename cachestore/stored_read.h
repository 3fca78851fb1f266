#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cachestore/device/device.h"
#include "cachestore/layer_tensor.h"

// A read as stored of one K or V, as it was pinned: parts as they lie in the pages, then what is
// not codes as source. Heads may stand apart: parts go as far as any head's codes, rows begin where
// the first head's codes end.
namespace kvtier::cachestore {

// What there is for some tokens: parts of pages [first_page, end_page), and source rows of tokens
// [first_row, first_row + rows).
struct StoredSpan {
  std::int64_t first_page = 0;
  std::int64_t end_page = 0;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;

  std::int64_t pages() const { return end_page - first_page; }
};

// Tokens that are codes in every head, and in any.
std::int64_t LeastCodes(const TensorPins& tensor, HeadRange heads);
std::int64_t MostCodes(const TensorPins& tensor, HeadRange heads);

StoredSpan StoredSpanOf(const TensorPins& tensor, HeadRange heads, std::int64_t first_token,
                        std::int64_t tokens);
std::int64_t StoredBytesOf(const TensorPins& tensor, HeadRange heads, const StoredSpan& span);

// OUT_OF_RANGE unless `token` is a bound of groups, is not codes, or is `committed`. `name` is the
// tensor.
absl::Status CheckGroupBound(const TensorPins& tensor, HeadRange heads, std::int64_t token,
                             std::int64_t committed, const std::string& name);

// Writes a page's part, PartBytes of the heads. A part that was filling is sent as it stood, with
// its checksums. `tokens`: how many are codes, of each head.
void FillStoredPart(const TensorPins& tensor, HeadRange heads, std::int64_t page, Device& device,
                    std::byte* out);
std::vector<std::int64_t> PartTokens(const TensorPins& tensor, HeadRange heads, std::int64_t page);

}  // namespace kvtier::cachestore
