#include "cachestore/model/hash_blocks.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvtier::cachestore {
namespace {

HashBlocks WithKeysOf(const BlockRange& range) {
  HashBlocks copy;
  copy.root = range.blocks->root;
  copy.first = range.blocks->first + range.begin;
  copy.keys = {range.keys().begin(), range.keys().end()};
  return copy;
}

}  // namespace

absl::Span<const PrefixKey> BlockRange::keys() const {
  if (empty()) return {};
  return absl::MakeConstSpan(blocks->keys)
      .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size()));
}

HashBlocksPtr HashBlocksOf(const std::string& name_space, const std::string& model_id,
                           int block_tokens, Prompt prompt) {
  if (BlocksOf(prompt, block_tokens) == 0) return NoBlocks();  // as of streams that say none
  auto blocks = std::make_shared<HashBlocks>();
  blocks->keys = PrefixKeysOf(name_space, model_id, block_tokens, prompt);
  blocks->root =
      std::make_shared<PromptRoot>(PromptRoot{model_id, block_tokens, std::move(prompt.adapter)});
  blocks->token_ids = std::move(prompt.token_ids);
  blocks->hashes = std::move(prompt.block_hashes);
  blocks->extra_keys = std::move(prompt.extra_keys);
  if (!blocks->token_ids.empty())
    blocks->token_ids.resize(blocks->keys.size() * static_cast<std::size_t>(block_tokens));
  std::erase_if(blocks->extra_keys,
                [&](const ExtraKey& extra) { return extra.block >= blocks->size(); });
  return blocks;
}

HashBlocksPtr KeysOf(const BlockRange& range) {
  return std::make_shared<HashBlocks>(WithKeysOf(range));
}

HashBlocksPtr CopyOf(const BlockRange& range) {
  const HashBlocks& all = *range.blocks;
  if (range.empty()) return NoBlocks();
  if (range.begin == 0 && range.end == all.size()) return range.blocks;
  auto copy = std::make_shared<HashBlocks>(WithKeysOf(range));
  copy->parent =
      range.begin == 0 ? all.parent : all.keys[static_cast<std::size_t>(range.begin - 1)];
  const auto slice = [&](const auto& from, std::int64_t each, auto& to) {
    if (!from.empty())
      to.assign(from.begin() + range.begin * each, from.begin() + range.end * each);
  };
  slice(all.token_ids, all.root->block_tokens, copy->token_ids);
  slice(all.hashes, 1, copy->hashes);
  std::copy_if(all.extra_keys.begin(), all.extra_keys.end(), std::back_inserter(copy->extra_keys),
               [&](const ExtraKey& extra) {
                 return extra.block >= copy->first && extra.block < all.first + range.end;
               });
  return copy;
}

}  // namespace kvtier::cachestore
