#include "client/cli/plan/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvtier::client {
namespace {

using cachestore::Model;

std::int64_t NominalCodes(const Model& model, std::int64_t tokens) {
  std::int64_t codes = 0;
  for (const cachestore::LayerModel& layer : model.layers) {
    for (const cachestore::TensorModel* tensor : {&layer.k, &layer.v}) {
      const cachestore::PartLayout& layout = tensor->layout;
      if (layout.dim > 0) codes += tokens * layout.heads * layout.unit.codes / layout.unit_tokens;
    }
  }
  return codes;
}

double Elements(const Model& model, std::int64_t tokens) {
  return static_cast<double>(cachestore::SourceBytes(model, tokens)) /
         kernels::ElementBytes(model.request.spec.source);
}

// Makes one request's bytes those of all; false where 63 bits can't say them.
bool Multiply(FormatFigures& figures, std::int64_t requests) {
  const std::int64_t largest =
      std::max({figures.sealed.allocated, figures.open.allocated, figures.nominal_codes,
                figures.source, figures.unpaged, figures.phases.most_residual});
  std::int64_t product = 0;
  if (__builtin_mul_overflow(largest, requests, &product)) return false;
  for (cachestore::MemoryHeld* held : {&figures.sealed, &figures.open}) {
    held->use = {.codes = held->use.codes * requests,
                 .scales = held->use.scales * requests,
                 .residual = held->use.residual * requests,
                 .header = held->use.header * requests};
    held->allocated *= requests;
  }
  for (std::int64_t* bytes :
       {&figures.nominal_codes, &figures.source, &figures.unpaged, &figures.phases.most_residual}) {
    *bytes *= requests;
  }
  return true;
}

Fits FitsOf(const PlanFlags& flags, const Model& model, std::int64_t tokens) {
  return {.tokens = cachestore::TokensThatFit(model, flags.memory / flags.requests),
          .requests = cachestore::SequencesThatFit(model, tokens, flags.memory),
          .capacity = cachestore::PlanCapacity(model, flags.memory, tokens)};
}

}  // namespace

absl::StatusOr<FormatFigures> FiguresOf(const PlanFlags& flags, const PlannedModel& planned,
                                        const std::string& format, std::int64_t tokens) {
  cachestore::ModelRequest request;
  request.spec = planned.spec;
  request.policy = {
      .kv_cache_dtype = format, .skip_layers = flags.skip_layers, .retention = flags.kept()};
  request.page_tokens = flags.page_tokens;
  FormatFigures figures{.format = format, .tokens = tokens};
  auto resolved = cachestore::ResolveModel(std::move(request), kDefaultPageTokens);
  if (!resolved.ok()) {
    figures.refused = std::string(resolved.status().message());
    return figures;
  }
  figures.model = *std::move(resolved);
  const Model& model = *figures.model;
  figures.sealed = cachestore::PlanSealed(model, tokens);
  figures.open = cachestore::PlanSequence(model, tokens);
  figures.nominal_codes = NominalCodes(model, tokens);
  figures.source = cachestore::SourceBytes(model, tokens);
  figures.unpaged = cachestore::UnpagedBytes(model, tokens);
  figures.phases = cachestore::PhasesFrom(model, tokens);
  figures.asymptote = cachestore::AsymptoteOf(model);
  figures.compression_ratio = cachestore::CompressionRatio(model, tokens);
  const auto stored = static_cast<double>(figures.sealed.allocated);
  figures.bytes_per_token = stored / static_cast<double>(tokens);
  figures.bits_per_element = 8 * stored / Elements(model, tokens);
  if (!Multiply(figures, flags.requests)) {
    return absl::InvalidArgumentError(
        fmt::format("--requests is {}; so many of {} tokens take more bytes than 63 bits can say",
                    flags.requests, tokens));
  }
  if (flags.memory > 0) figures.fits = FitsOf(flags, model, tokens);
  return figures;
}

}  // namespace kvtier::client
