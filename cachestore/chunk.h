#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cachestore/shard.h"
#include "kernels/codec_run.h"

namespace kvtier::cachestore {

// Tokens that come as codes: whole final parts of the shard's heads (docs/page_format.md), of
// consecutive pages. `begin` and `end` count the chunk's tokens.
struct StoredPages {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<const std::byte*> parts;
  int heads = 0;  // of each part
};

// New values of one K or V: the shard's heads, the chunk's tokens, in the source dtype, but for
// those that come as codes, which the rows leave out. Strides count elements. Memory that must stay
// readable while the append runs; of values that change meanwhile anything may be stored, and
// nothing else is hurt.
struct SourceTensor {
  const std::byte* data = nullptr;
  kernels::ElementType type = kernels::ElementType::kBf16;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
  StoredPages stored = {};

  // `chunk_token` is none of the stored ones.
  kernels::ConstRows RowsOf(int shard_head, std::int64_t chunk_token) const {
    if (chunk_token >= stored.end) chunk_token -= stored.end - stored.begin;
    const std::int64_t offset = shard_head * head_stride + chunk_token * token_stride;
    return {data + offset * kernels::ElementBytes(type), type, token_stride};
  }
};

// One message of an append stream: some layers of the shard, K and V together, `tokens` tokens from
// `first_token`.
struct Chunk {
  struct Layer {
    int layer = 0;
    SourceTensor k;
    SourceTensor v;
  };
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  std::vector<Layer> layers;
  bool saturate_non_finite = false;
  bool on_device = false;  // values, not what comes as codes: in memory that the device reserved
};

}  // namespace kvtier::cachestore
