#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cachestore/model/model.h"

namespace kvtier::cachestore {

// What a model's pages may be stored as under pressure, one smaller than the other. Rung 0 is the
// model itself; rungs()[i] is rung i + 1.
using Rungs = std::vector<std::shared_ptr<const Model>>;

// "fp8(scale=page)>k4v2>kivi2" as its formats. INVALID_ARGUMENT for what is none.
absl::StatusOr<std::vector<std::string>> LadderFrom(const std::string& text);

// Of these formats those that store the model's pages in fewer bytes than the one before. None of a
// model whose source is quantized already.
Rungs RungsOf(const Model& model, const std::vector<std::string>& ladder);

// Of a page, all layers.
std::int64_t ColumnBytes(const Model& model);

}  // namespace kvtier::cachestore
