#include "service/rpc/capacity_reply.h"

#include <memory>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/capacity.h"
#include "cachestore/model/plan.h"
#include "service/rpc/reply.h"

namespace kvtier::service {
namespace {

using cachestore::Model;
using cachestore::ModelTotals;

v1::ModelCapacity ReplyOf(const Model& model, const ModelTotals& totals, std::int64_t free) {
  const cachestore::ModelCapacity capacity = cachestore::CapacityOf(model, totals, free);
  v1::ModelCapacity out;
  out.set_model_id(model.id);
  out.set_name(model.request.spec.name);
  out.set_kv_cache_dtype(model.format);
  out.set_sequences(totals.sequences());
  out.set_tokens_held(totals.tokens_held);
  out.set_source_bytes(capacity.source_bytes);
  out.set_stored_bytes(capacity.stored_bytes);
  out.set_compression_ratio(capacity.compression_ratio);
  out.set_more_tokens(capacity.more_tokens);
  out.set_more_sequences(capacity.more_sequences);
  out.set_mean_tokens(capacity.mean_tokens);
  out.set_layers(static_cast<std::uint32_t>(model.layers.size()));
  out.set_unit_scale_layers(static_cast<std::uint32_t>(model.unit_scale_layers));
  out.set_bytes_per_token(capacity.bytes_per_token);
  out.set_planned_compression_ratio(capacity.planned_compression_ratio);
  return out;
}

// The model as it would be with another kv_cache_dtype. Scales belong to the format they were given
// for.
absl::StatusOr<std::shared_ptr<const Model>> InFormat(const Model& model,
                                                      const std::string& kv_cache_dtype) {
  cachestore::ModelRequest request = model.request;
  request.policy.kv_cache_dtype = kv_cache_dtype;
  request.page_tokens = 0;
  request.scales.clear();
  return cachestore::ResolveModel(std::move(request), model.page_tokens);
}

}  // namespace

void FillRegistration(const Model& model, std::int64_t max_tokens, std::int64_t budget,
                      v1::RegisterModelResponse& response) {
  const cachestore::CapacityFigures figures = cachestore::PlanCapacity(
      model, budget, max_tokens > 0 ? max_tokens : cachestore::kDefaultMaxTokens);
  response.set_model_id(model.id);
  response.set_page_tokens(static_cast<std::uint32_t>(model.page_tokens));
  response.set_kv_cache_dtype(model.format);
  response.set_capacity_line(figures.line);
  response.set_capacity_tokens(figures.tokens);
  response.set_scales_line(model.scales_line);
  for (const std::string& notice : model.notices) response.add_notices(notice);
}

absl::Status FillCapacity(const cachestore::Store& store, const v1::CapacityRequest& request,
                          v1::CapacityResponse& response) {
  const cachestore::MemoryParts memory = store.memory();
  response.set_budget_bytes(store.budget());
  *response.mutable_memory() = ToProto(memory);
  if (request.model_id().empty() && !request.kv_cache_dtype().empty()) {
    return cachestore::Error(
        cachestore::Reason::kInvalidField,
        "kv_cache_dtype is set and model_id is not; name the model to ask about");
  }
  std::int64_t source_bytes = 0;
  std::int64_t stored_bytes = 0;
  for (const auto& entry : store.Models()) {
    const ModelTotals totals = entry->totals();
    response.set_sequences(response.sequences() + totals.sequences());
    response.set_tokens_held(response.tokens_held() + totals.tokens_held);
    source_bytes += cachestore::SourceBytesHeld(entry->model(), totals);
    stored_bytes += totals.held.allocated;
    if (!request.model_id().empty()) continue;
    *response.add_models() = ReplyOf(entry->model(), totals, memory.free);
  }
  if (stored_bytes > 0) {
    response.set_compression_ratio(static_cast<double>(source_bytes) /
                                   static_cast<double>(stored_bytes));
  }
  if (request.model_id().empty()) return absl::OkStatus();
  KVT_ASSIGN_OR_RETURN(const auto entry, store.FindModel(request.model_id()));
  *response.add_models() = ReplyOf(entry->model(), entry->totals(), memory.free);
  if (request.kv_cache_dtype().empty()) return absl::OkStatus();
  KVT_ASSIGN_OR_RETURN(const auto other, InFormat(entry->model(), request.kv_cache_dtype()));
  *response.add_models() = ReplyOf(*other, ModelTotals{}, memory.free);
  return absl::OkStatus();
}

}  // namespace kvtier::service
