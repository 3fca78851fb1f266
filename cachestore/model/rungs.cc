#include "cachestore/model/rungs.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {

absl::StatusOr<std::vector<std::string>> LadderFrom(const std::string& text) {
  std::vector<std::string> ladder;
  for (const absl::string_view name : absl::StrSplit(text, '>')) {
    KVT_ASSIGN_OR_RETURN(const Format format,
                         ParseFormat(std::string(absl::StripAsciiWhitespace(name))));
    ladder.push_back(FormatName(format));
  }
  return ladder;
}

std::int64_t ColumnBytes(const Model& model) {
  std::int64_t bytes = 0;
  for (const LayerModel& layer : model.layers) {
    for (const TensorModel* tensor : {&layer.k, &layer.v})
      if (tensor->dim() > 0) bytes += tensor->layout.bytes;
  }
  return bytes;
}

Rungs RungsOf(const Model& model, const std::vector<std::string>& ladder) {
  Rungs rungs;
  std::int64_t least = ColumnBytes(model);
  for (const std::string& format : ladder) {
    ModelRequest request = model.request;
    request.policy.kv_cache_dtype = format;
    request.page_tokens = model.page_tokens;
    request.scales = {};
    // Not every format takes every shape, source or page.
    auto rung = ResolveModel(std::move(request), model.page_tokens);
    if (!rung.ok() || ColumnBytes(**rung) >= least) continue;
    least = ColumnBytes(**rung);
    rungs.push_back(*std::move(rung));
  }
  return rungs;
}

}  // namespace kvtier::cachestore
