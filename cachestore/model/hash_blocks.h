#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cachestore/model/prefix_key.h"

namespace kvtier::cachestore {

// What all hash blocks of a prompt have in common, its salt aside.
struct PromptRoot {
  std::string model_id;
  int block_tokens = 0;
  std::string adapter;
};

// Hash blocks of a prompt, one behind another: their keys, and what these were made of.
struct HashBlocks {
  std::shared_ptr<const PromptRoot> root;
  std::int64_t first = 0;                // of the prompt
  std::optional<PrefixKey> parent;       // the key before; none of block 0
  std::vector<PrefixKey> keys;           // one a block
  std::vector<std::uint32_t> token_ids;  // root->block_tokens a block; or instead
  std::vector<std::string> hashes;       // the engine's, one a block
  std::vector<ExtraKey> extra_keys;      // by block of the prompt

  std::int64_t size() const { return static_cast<std::int64_t>(keys.size()); }
};

using HashBlocksPtr = std::shared_ptr<const HashBlocks>;

// Some of them, by their index in `keys`.
struct BlockRange {
  HashBlocksPtr blocks;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  bool empty() const { return begin >= end; }
  std::int64_t size() const { return end - begin; }
  absl::Span<const PrefixKey> keys() const;
};

inline HashBlocksPtr NoBlocks() {
  static const auto* const none = new HashBlocksPtr(std::make_shared<HashBlocks>());
  return *none;
}

inline BlockRange AllOf(HashBlocksPtr blocks) {
  const std::int64_t end = blocks->size();
  return {std::move(blocks), 0, end};
}

// All of a prompt that CheckPrompt takes; what is behind them is left out.
HashBlocksPtr HashBlocksOf(const std::string& name_space, const std::string& model_id,
                           int block_tokens, Prompt prompt);

// A copy of those alone; of their keys alone.
HashBlocksPtr CopyOf(const BlockRange& range);
HashBlocksPtr KeysOf(const BlockRange& range);

}  // namespace kvtier::cachestore
