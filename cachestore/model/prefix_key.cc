#include "cachestore/model/prefix_key.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <memory>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
namespace {

constexpr char kVersion[] = "kvtier prefix 1";
enum Content : std::uint8_t { kTokenIds = 0, kBlockHash = 1 };

// Fields are written with their lengths before them, so that no two lists of fields are the same
// bytes.
class Hasher {
 public:
  void Bytes(const void* bytes, std::size_t size) {
    text_.append(static_cast<const char*>(bytes), size);
  }
  void Number(std::uint32_t number) {
    for (int shift = 0; shift < 32; shift += 8) text_.push_back(static_cast<char>(number >> shift));
  }
  void Text(const std::string& text) {
    Number(static_cast<std::uint32_t>(text.size()));
    text_ += text;
  }

  // The key of what was written since the last one.
  PrefixKey Finish() {
    PrefixKey key;
    KVT_CHECK(EVP_DigestInit_ex2(context_.get(), algorithm_.get(), nullptr) == 1 &&
              EVP_DigestUpdate(context_.get(), text_.data(), text_.size()) == 1 &&
              EVP_DigestFinal_ex(context_.get(), key.data(), nullptr) == 1);
    text_.clear();
    return key;
  }

 private:
  struct Free {
    void operator()(EVP_MD* algorithm) const { EVP_MD_free(algorithm); }
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  const std::unique_ptr<EVP_MD, Free> algorithm_{EVP_MD_fetch(nullptr, "SHA256", nullptr)};
  const std::unique_ptr<EVP_MD_CTX, Free> context_{EVP_MD_CTX_new()};
  std::string text_;
};

absl::Status CheckSize(const std::string& field, const std::string& value, std::size_t least,
                       std::size_t most) {
  if (value.size() >= least && value.size() <= most) return absl::OkStatus();
  return Error(Reason::kInvalidField,
               fmt::format("{} has {} bytes; want {} to {}", field, value.size(), least, most));
}

PrefixKey RootKey(Hasher& hasher, const std::string& name_space, const std::string& model_id,
                  const Prompt& prompt) {
  hasher.Text(kVersion);
  hasher.Text(name_space);
  hasher.Text(prompt.salt);
  hasher.Text(model_id);
  hasher.Text(prompt.adapter);
  return hasher.Finish();
}

}  // namespace

absl::Status CheckPrompt(const Prompt& prompt, int hash_block_tokens, const std::string& field) {
  KVT_RETURN_IF_ERROR(CheckSize(field + ".salt", prompt.salt, 0, kMaxSaltBytes));
  KVT_RETURN_IF_ERROR(CheckSize(field + ".adapter", prompt.adapter, 0, kMaxSaltBytes));
  if (!prompt.token_ids.empty() && !prompt.block_hashes.empty()) {
    return Error(Reason::kInvalidField,
                 fmt::format("{0}.token_ids has {1} entries and {0}.block_hashes {2}; want one of "
                             "the two",
                             field, prompt.token_ids.size(), prompt.block_hashes.size()));
  }
  const std::int64_t blocks = BlocksOf(prompt, hash_block_tokens);
  if (blocks > kMaxPromptBlocks) {
    return Error(Reason::kInvalidField, fmt::format("{} has {} hash blocks; want at most {}", field,
                                                    blocks, kMaxPromptBlocks));
  }
  for (std::size_t i = 0; i < prompt.block_hashes.size(); ++i) {
    const std::string& hash = prompt.block_hashes[i];
    if (!hash.empty() && hash.size() <= kMaxBlockHashBytes) continue;
    return CheckSize(fmt::format("{}.block_hashes[{}]", field, i), hash, 1, kMaxBlockHashBytes);
  }
  std::int64_t before = -1;
  for (std::size_t i = 0; i < prompt.extra_keys.size(); ++i) {
    const ExtraKey& extra = prompt.extra_keys[i];
    const auto name = fmt::format("{}.extra_keys[{}]", field, i);
    KVT_RETURN_IF_ERROR(CheckSize(name + ".key", extra.key, 1, kMaxExtraKeyBytes));
    // One beyond the whole blocks belongs to tokens that have no key yet.
    if (extra.block > before && extra.block <= blocks) {
      before = extra.block;
      continue;
    }
    return Error(Reason::kInvalidField, fmt::format("{}.block is {}; want {} to {}, ascending",
                                                    name, extra.block, before + 1, blocks));
  }
  return absl::OkStatus();
}

std::int64_t BlocksOf(const Prompt& prompt, int hash_block_tokens) {
  return static_cast<std::int64_t>(prompt.block_hashes.empty()
                                       ? prompt.token_ids.size() /
                                             static_cast<std::size_t>(hash_block_tokens)
                                       : prompt.block_hashes.size());
}

PrefixKey RootKeyOf(const std::string& name_space, const std::string& model_id,
                    const Prompt& prompt) {
  Hasher hasher;
  return RootKey(hasher, name_space, model_id, prompt);
}

std::vector<PrefixKey> PrefixKeysOf(const std::string& name_space, const std::string& model_id,
                                    int hash_block_tokens, const Prompt& prompt) {
  const std::int64_t blocks = BlocksOf(prompt, hash_block_tokens);
  std::vector<PrefixKey> keys;
  if (blocks == 0) return keys;  // as of every stream that says no prompt
  Hasher hasher;
  PrefixKey key = RootKey(hasher, name_space, model_id, prompt);
  keys.reserve(static_cast<std::size_t>(blocks));
  auto extra = prompt.extra_keys.begin();
  for (std::int64_t block = 0; block < blocks; ++block) {
    hasher.Bytes(key.data(), key.size());
    if (prompt.block_hashes.empty()) {
      hasher.Number(kTokenIds);
      hasher.Number(static_cast<std::uint32_t>(hash_block_tokens));
      for (int i = 0; i < hash_block_tokens; ++i)
        hasher.Number(prompt.token_ids[static_cast<std::size_t>(block * hash_block_tokens + i)]);
    } else {
      hasher.Number(kBlockHash);
      hasher.Text(prompt.block_hashes[static_cast<std::size_t>(block)]);
    }
    const bool has_extra = extra != prompt.extra_keys.end() && extra->block == block;
    hasher.Text(has_extra ? extra->key : std::string());
    if (has_extra) ++extra;
    key = hasher.Finish();
    keys.push_back(key);
  }
  return keys;
}

}  // namespace kvtier::cachestore
