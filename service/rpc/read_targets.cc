#include "service/rpc/read_targets.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

using cachestore::BlockTarget;

// No message has to be small for it, but others wait while one is worked on.
constexpr std::int64_t kChunkBytes = 4 << 20;
constexpr std::uint64_t kLeastRing = 64 << 10;
// So that some are filled while the reader works on others.
constexpr std::int64_t kChunksInRing = 4;

}  // namespace

absl::StatusOr<ReadTargets> ReadTargets::Open(Transports& transports,
                                              const v1::ReadRequest& request,
                                              std::function<void()> on_news) {
  ReadTargets targets;
  if (!request.has_target()) return targets;
  const v1::ReadTarget& target = request.target();
  targets.request_ = &request;
  KVT_ASSIGN_OR_RETURN(Transports::Found found,
                       transports.Find(target.transport_id(), "target.transport_id"));
  targets.memory_ = std::move(found.memory);
  targets.nccl_ = std::move(found.nccl);
  if (targets.nccl_ != nullptr) {
    KVT_RETURN_IF_ERROR(targets.OpenNccl(std::move(on_news)));
    return targets;
  }
  if (target.layers_size() > 0) return targets;
  if (target.offset() % kShmAlignment != 0) {
    return Refuse(
        fmt::format("target.offset is {}; want a multiple of {}", target.offset(), kShmAlignment));
  }
  std::byte* const data = targets.memory_->At(target.offset(), target.bytes());
  if (data == nullptr) {
    return Refuse(fmt::format("target.offset is {} and bytes {}; the transport's memory has {}",
                              target.offset(), target.bytes(), targets.memory_->size()));
  }
  if (!target.ring()) return targets;
  if (target.bytes() < kLeastRing) {
    return Refuse(
        fmt::format("target.bytes of a ring is {}; want at least {}", target.bytes(), kLeastRing));
  }
  KVT_ASSIGN_OR_RETURN(
      std::shared_ptr<RingCredit> credit,
      transports.OpenRing(target.transport_id(), target.read_id(), std::move(on_news)));
  targets.ring_.emplace(data, static_cast<std::int64_t>(target.bytes()), std::move(credit));
  return targets;
}

absl::Status ReadTargets::OpenNccl(std::function<void()> on_news) {
  const v1::ReadTarget& target = request_->target();
  if (!nccl_->sends())
    return Refuse("target.transport_id is of an NCCL transport for appends; want one for reads");
  if (target.ring() || target.layers_size() > 0 || target.offset() != 0 || target.bytes() != 0)
    return Refuse(
        "target says where values go, and the transport is NCCL; want transport_id alone");
  nccl_news_ = nccl_->Watch(std::move(on_news));
  return absl::OkStatus();
}

bool ReadTargets::whole() const {
  return memory_ != nullptr && nccl_ == nullptr && !ring_.has_value() &&
         request_->target().layers_size() == 0;
}

absl::Status ReadTargets::Add(const v1::SequenceRange& wanted,
                              const cachestore::SequenceReader& reader,
                              const cachestore::ReadRange& range) {
  if (memory_ == nullptr || nccl_ != nullptr || ring_.has_value()) return absl::OkStatus();
  const std::vector<cachestore::LayerOutput>& layers = reader.layers();
  const v1::ReadTarget& target = request_->target();
  const bool in_blocks = target.layers_size() > 0;
  if (range.tokens < 0) {
    return Refuse(
        "follow and target are set and sequences.num_tokens is 0; want how many, so that "
        "there is room for them");
  }
  if (in_blocks && static_cast<std::size_t>(target.layers_size()) != layers.size()) {
    return Refuse(fmt::format("target.layers has {} entries; the read is of {} layers",
                              target.layers_size(), layers.size()));
  }
  if (in_blocks) {
    KVT_RETURN_IF_ERROR(CheckBlockIds(wanted, range.tokens));
  }
  std::vector<LayerTarget>& added = sequences_.emplace_back(layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const cachestore::LayerOutput& layer = layers[i];
    // Blocks count from the sequence's first token, wherever the layer's window begins.
    const bool later = request_->within_windows() && !in_blocks;
    const std::int64_t from = later ? layer.first_token : range.first_token;
    const std::int64_t tokens = range.first_token + range.tokens - from;
    const Shape k{"k", layer.k_bytes_per_token(), from, tokens};
    const Shape v{"v", layer.v_bytes_per_token(), from, tokens};
    if (in_blocks) {
      const v1::LayerBlocks& blocks = target.layers(static_cast<int>(i));
      KVT_ASSIGN_OR_RETURN(added[i].k,
                           InBlocks(k, {blocks.k_offset(), blocks.k_block_stride()}, wanted));
      KVT_ASSIGN_OR_RETURN(added[i].v,
                           InBlocks(v, {blocks.v_offset(), blocks.v_block_stride()}, wanted));
      continue;
    }
    KVT_ASSIGN_OR_RETURN(added[i].k, Next(k));
    KVT_ASSIGN_OR_RETURN(added[i].v, Next(v));
  }
  return absl::OkStatus();
}

absl::StatusOr<BlockTarget> ReadTargets::Next(const Shape& shape) {
  const v1::ReadTarget& target = request_->target();
  const auto bytes = static_cast<std::uint64_t>(shape.tokens * shape.token_bytes);
  if (bytes > target.bytes() - used_) {
    return Refuse(fmt::format(
        "target.bytes is {}; the read needs more: {} bytes for {} of a layer's {} tokens",
        target.bytes(), bytes, shape.name, shape.tokens));
  }
  std::byte* const data = memory_->At(target.offset() + used_, bytes);
  used_ += bytes;
  const auto block_tokens = static_cast<std::int64_t>(request_->block_tokens());
  return BlockTarget{
      .data = data,
      .first_token = shape.first_token,
      .tokens = shape.tokens,
      .block_tokens = block_tokens > 0 ? block_tokens : std::max<std::int64_t>(1, shape.tokens)};
}

absl::Status ReadTargets::CheckBlockIds(const v1::SequenceRange& wanted,
                                        std::int64_t tokens) const {
  const std::int64_t block_tokens = request_->block_tokens();
  const std::int64_t blocks = (tokens + block_tokens - 1) / block_tokens;
  if (wanted.block_ids_size() == blocks) return absl::OkStatus();
  return Refuse(fmt::format("sequences.block_ids has {} entries; {} tokens take {} blocks of {}",
                            wanted.block_ids_size(), tokens, blocks, block_tokens));
}

absl::StatusOr<BlockTarget> ReadTargets::InBlocks(const Shape& shape, const Blocks& blocks,
                                                  const v1::SequenceRange& wanted) const {
  const std::int64_t block_tokens = request_->block_tokens();
  const auto& ids = wanted.block_ids();
  const auto size = static_cast<std::uint64_t>(memory_->size());
  const auto block_bytes = static_cast<std::uint64_t>(block_tokens * shape.token_bytes);
  const std::uint64_t last = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
  // The stride is below 2^63 and the id below 2^32: neither product nor sum can pass the check by
  // wrapping around, once stride and offset are inside.
  const bool inside = blocks.stride <= size && blocks.offset <= size &&
                      (last == 0 || blocks.stride <= size / last) &&
                      memory_->At(blocks.offset + last * blocks.stride, block_bytes) != nullptr;
  if (blocks.offset % kShmAlignment != 0 || blocks.stride % kShmAlignment != 0) {
    return Refuse(
        fmt::format("target.layers has {0}_offset {1} and {0}_block_stride {2}; want "
                    "multiples of {3}",
                    shape.name, blocks.offset, blocks.stride, kShmAlignment));
  }
  if (!inside && !ids.empty()) {
    return Refuse(
        fmt::format("target.layers has {0}_offset {1} and {0}_block_stride {2}; block {3} of {4} "
                    "bytes would not end in the transport's memory of {5}",
                    shape.name, blocks.offset, blocks.stride, last, block_bytes, size));
  }
  return BlockTarget{.data = memory_->At(std::min(blocks.offset, size), 0),
                     .first_token = shape.first_token,
                     .tokens = shape.tokens,
                     .block_tokens = block_tokens,
                     .ids = {ids.data(), static_cast<std::size_t>(ids.size())},
                     .stride = static_cast<std::int64_t>(blocks.stride)};
}

void ReadTargets::SayOffsets(std::size_t sequence, v1::SequenceManifest& manifest) const {
  if (!whole()) return;
  for (int i = 0; i < manifest.layers_size(); ++i) {
    const LayerTarget& layer = sequences_[sequence][static_cast<std::size_t>(i)];
    manifest.mutable_layers(i)->set_k_offset(
        static_cast<std::uint64_t>(layer.k.data - memory_->data()));
    manifest.mutable_layers(i)->set_v_offset(
        static_cast<std::uint64_t>(layer.v.data - memory_->data()));
  }
}

std::int64_t ReadTargets::ChunkBytes(std::int64_t message_bytes) const {
  if (memory_ == nullptr) return message_bytes;
  if (nccl_ != nullptr) return nccl_->slot_bytes();
  return ring_.has_value() ? std::min(kChunkBytes, ring_->size() / kChunksInRing) : kChunkBytes;
}

absl::StatusOr<std::optional<ChunkRoom>> ReadTargets::Room(std::size_t sequence, std::size_t layer,
                                                           std::int64_t bytes) {
  if (memory_ == nullptr) return ChunkRoom{};
  if (nccl_ != nullptr) return NcclRoom(bytes);
  if (!ring_.has_value()) return ChunkRoom{.target = &sequences_[sequence][layer]};
  if (bytes > ring_->size()) {
    return Refuse(fmt::format("target.bytes of the ring is {}; want at least {}, for a chunk",
                              ring_->size(), bytes));
  }
  std::byte* const at = ring_->Take(bytes);
  if (at == nullptr) return std::nullopt;
  return ChunkRoom{.at = at, .base = memory_->data()};
}

absl::StatusOr<std::optional<ChunkRoom>> ReadTargets::NcclRoom(std::int64_t bytes) {
  KVT_RETURN_IF_ERROR(nccl_->channel().status());
  if (bytes > nccl_->slot_bytes()) {
    return Refuse(fmt::format(
        "a chunk has {} bytes; over NCCL one has at most {}, a quarter of --nccl-memory: "
        "ask for smaller blocks",
        bytes, nccl_->slot_bytes()));
  }
  std::shared_ptr<NcclTransport::Slot> slot = nccl_->TakeSlot();
  if (slot == nullptr) return std::nullopt;
  std::byte* at = slot->data();
  if (request_->as() == v1::READ_AS_STORED) {
    parts_.resize(static_cast<std::size_t>(bytes));
    at = parts_.data();
  }
  return ChunkRoom{.at = at, .base = at, .slot = std::move(slot)};
}

absl::Status ReadTargets::Filled(const ChunkRoom& room, std::int64_t bytes, v1::ReadChunk& chunk) {
  if (room.slot == nullptr) return absl::OkStatus();
  if (request_->as() == v1::READ_AS_STORED) room.slot->Write(parts_);
  KVT_ASSIGN_OR_RETURN(const std::uint64_t transfer, nccl_->Send(room.slot, bytes));
  chunk.set_transfer(transfer);
  chunk.set_transfer_bytes(static_cast<std::uint64_t>(bytes));
  return absl::OkStatus();
}

}  // namespace kvtier::service
