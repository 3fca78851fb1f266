#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

// By what a prefix is found again: a chain of keys, one a hash block, each of which stands for all
// that comes before it. The same in every process, version and language: docs/prefix_keys.md has
// the bytes and examples. Pure functions.
namespace kvtier::cachestore {

// SHA-256: prompts come from people who don't trust each other, and whoever finds two with one key
// could have one answered from the other's K and V.
using PrefixKey = std::array<std::uint8_t, 32>;

// What belongs to a hash block beside its tokens: the hash of an image whose placeholder tokens lie
// in it, say.
struct ExtraKey {
  std::int64_t block = 0;
  std::string key;
};

// A prompt from its first token: token ids, or instead the engine's own hash of each hash block.
struct Prompt {
  std::string salt;     // prompts of different salts share nothing
  std::string adapter;  // as LoRA names it
  std::vector<std::uint32_t> token_ids;
  std::vector<std::string> block_hashes;
  std::vector<ExtraKey> extra_keys;  // by block, ascending, at most one a block
};

inline constexpr std::size_t kMaxSaltBytes = 256;
inline constexpr std::size_t kMaxBlockHashBytes = 64;
inline constexpr std::size_t kMaxExtraKeyBytes = 4096;
// Keys are kept as long as their sequence, outside the budget.
inline constexpr std::int64_t kMaxPromptBlocks = 131'072;

// INVALID_ARGUMENT: token ids and block hashes both, too many, a name that is too long, extra keys
// out of order or past the end. `field`: what messages call the prompt.
absl::Status CheckPrompt(const Prompt& prompt, int hash_block_tokens,
                         const std::string& field = "prompt");

// Whole hash blocks that a prompt has; what is behind them has no key.
std::int64_t BlocksOf(const Prompt& prompt, int hash_block_tokens);

// Everything but tokens that tells one prefix from another. All prompts of a root that are placed
// on servers by it lie together.
PrefixKey RootKeyOf(const std::string& name_space, const std::string& model_id,
                    const Prompt& prompt);

// The keys of the prompt's whole hash blocks, in order. Of a prompt that CheckPrompt takes.
std::vector<PrefixKey> PrefixKeysOf(const std::string& name_space, const std::string& model_id,
                                    int hash_block_tokens, const Prompt& prompt);

}  // namespace kvtier::cachestore
