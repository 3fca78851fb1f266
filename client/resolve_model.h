#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "cachestore/model/model.h"
#include "kvtier/v1/kv_tier.pb.h"

// What a server makes of a model, worked out here: how its pages lie.
namespace kvtier::client {

cachestore::LayerSpec LayerSpecOf(const v1::LayerSpec& layer);
std::optional<kernels::ElementType> ElementTypeOf(v1::DType dtype);
v1::DType DtypeOf(kernels::ElementType type);

// The model that a server registered. FAILED_PRECONDITION where it would have another id here:
// client and server are not of one mind about what the request means.
absl::StatusOr<std::shared_ptr<const cachestore::Model>> ResolveRegistered(
    const v1::RegisterModelRequest& request, const v1::RegisterModelResponse& reply);

// One layer of a sequence that is read as stored, as a model of its own. `sequence` says the page
// and the rope.
absl::StatusOr<std::shared_ptr<const cachestore::Model>> ResolveStoredLayer(
    const v1::SequenceManifest& sequence, const v1::LayerManifest& layer);

}  // namespace kvtier::client
