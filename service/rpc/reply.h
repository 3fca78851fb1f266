#pragma once

#include "cachestore/sequence.h"
#include "cachestore/sequence_reader.h"
#include "kvtier/v1/kv_tier.pb.h"

// Domain to proto.
namespace kvtier::service {

v1::MemoryParts ToProto(const cachestore::MemoryParts& parts);
v1::MemoryParts ToProto(const cachestore::MemoryHeld& held);
v1::ModelSpec ToProto(const cachestore::ModelSpec& spec);
v1::SequenceInfo ToProto(const cachestore::SequenceDescription& description);
v1::LayerInfo ToProto(const cachestore::LayerDescription& layer,
                      const cachestore::LayerModel& model, int index);
v1::SequenceManifest ManifestOf(const cachestore::SequenceReader& reader);
v1::DType ToProto(kernels::ElementType type);
void FillScales(const cachestore::ModelEntry& entry, v1::ScalesResponse& response);
v1::RopeState ToProto(cachestore::RopeState rope);

}  // namespace kvtier::service
