#include "service/rpc/event_reply.h"

#include <cstdint>
#include <vector>

namespace kvtier::service {
namespace {

using cachestore::HashBlocks;
using Hashes = google::protobuf::RepeatedPtrField<std::string>;

std::string BytesOf(const cachestore::PrefixKey& key) { return {key.begin(), key.end()}; }

Hashes HashesOf(const HashBlocks& blocks) {
  Hashes hashes;
  for (const cachestore::PrefixKey& key : blocks.keys) hashes.Add(BytesOf(key));
  return hashes;
}

void Fill(const HashBlocks& blocks, v1::BlockStored& stored) {
  stored.set_model_id(blocks.root->model_id);
  *stored.mutable_block_hashes() = HashesOf(blocks);
  if (blocks.parent.has_value()) stored.set_parent_block_hash(BytesOf(*blocks.parent));
  stored.set_block_size(static_cast<std::uint32_t>(blocks.root->block_tokens));
  stored.mutable_token_ids()->Add(blocks.token_ids.begin(), blocks.token_ids.end());
  stored.mutable_engine_block_hashes()->Add(blocks.hashes.begin(), blocks.hashes.end());
  stored.set_lora_name(blocks.root->adapter);
  for (const cachestore::ExtraKey& extra : blocks.extra_keys)
    (*stored.mutable_extra_keys())[static_cast<std::uint32_t>(extra.block - blocks.first)] =
        extra.key;
}

}  // namespace

v1::SubscribeResponse ToProto(const cachestore::EventBatch& batch, const std::string& medium) {
  using Kind = cachestore::BlockEvent::Kind;
  v1::SubscribeResponse response;
  response.set_log_id(batch.position.log_id);
  response.set_number(batch.position.number);
  for (const cachestore::BlockEvent& event : batch.events) {
    v1::BlockEvent& out = *response.add_events();
    switch (event.kind) {
      case Kind::kStored:
        Fill(*event.blocks, *out.mutable_block_stored());
        out.mutable_block_stored()->set_medium(medium);
        break;
      case Kind::kRemoved:
        *out.mutable_block_removed()->mutable_block_hashes() = HashesOf(*event.blocks);
        out.mutable_block_removed()->set_medium(medium);
        break;
      case Kind::kAllCleared:
        out.mutable_all_blocks_cleared();
        break;
    }
  }
  return response;
}

}  // namespace kvtier::service
