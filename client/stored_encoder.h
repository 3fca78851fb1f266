#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cachestore/model/part_header.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// Encodes for the server: of a chunk of source values, what its tokens make final travels as codes,
// the rest as values. The server ends up with the same bytes. Thread-safe.
class StoredEncoder {
 public:
  // As the server has the model (ResolveRegistered), and as the stream was opened: its first_head
  // and num_heads (0: to the last), its layout. Not for fused_kv.
  StoredEncoder(std::shared_ptr<const cachestore::Model> model, const v1::AppendOpen& open);

  // Of a chunk of one layer. A tensor that holds what its format can't store is left as it is, and
  // so is a chunk of another size than it says: the server refuses them with the place and the
  // reason. `residual_origin`: of the stream's first ack.
  void Encode(v1::AppendChunk& chunk, std::uint64_t residual_origin = 0) const;

  const cachestore::Model& model() const { return *model_; }

 private:
  struct Values;  // one K or V of a chunk

  cachestore::HeadRange HeadsIn(const cachestore::LayerModel& layer) const;
  void EncodeSide(const Values& values, std::string& rows,
                  google::protobuf::RepeatedPtrField<v1::StoredPart>& parts) const;

  const std::shared_ptr<const cachestore::Model> model_;
  const int first_head_;
  const int num_heads_;
  const bool heads_first_;
};

}  // namespace kvtier::client
