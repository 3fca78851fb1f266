// Keys of prefixes: the bytes that every client must make, and what tells two prefixes apart.

#include "cachestore/model/prefix_key.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "tests/support/status_matchers.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using nlohmann::json;
using ::testing::HasSubstr;

std::string Hex(const PrefixKey& key) {
  std::string text;
  for (const std::uint8_t byte : key) text += fmt::format("{:02x}", byte);
  return text;
}

std::string FromHex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

Prompt PromptOf(const json& vector) {
  Prompt prompt;
  prompt.salt = FromHex(vector.value("salt", ""));
  prompt.adapter = vector.value("adapter", "");
  prompt.token_ids = vector.value("token_ids", std::vector<std::uint32_t>());
  for (const std::string& hash : vector.value("block_hashes", std::vector<std::string>()))
    prompt.block_hashes.push_back(FromHex(hash));
  for (const auto& [block, key] : vector.value("extra_keys", std::map<std::string, std::string>()))
    prompt.extra_keys.push_back({std::stoi(block), FromHex(key)});
  return prompt;
}

Prompt TokensFrom(std::uint32_t first, std::size_t count) {
  Prompt prompt;
  prompt.token_ids.resize(count);
  std::iota(prompt.token_ids.begin(), prompt.token_ids.end(), first);
  return prompt;
}

constexpr char kModel[] = "0123456789abcdef0123456789abcdef";

std::vector<PrefixKey> KeysOf(const Prompt& prompt, int block = 4) {
  return PrefixKeysOf("default", kModel, block, prompt);
}

TEST(PrefixKey, HasTheBytesOfTheGoldenVectors) {
  std::ifstream file(KVTIER_TEST_DATA "/prefix_keys.json");
  const json vectors = json::parse(file);
  ASSERT_GE(vectors.size(), 4u);
  for (const json& vector : vectors) {
    SCOPED_TRACE(vector.dump());
    const Prompt prompt = PromptOf(vector);
    const std::string name_space = vector.at("namespace");
    const std::string model_id = vector.at("model_id");
    const int block = vector.at("hash_block_tokens");
    ASSERT_THAT(CheckPrompt(prompt, block), IsOk());
    EXPECT_EQ(Hex(RootKeyOf(name_space, model_id, prompt)), vector.at("root_key"));
    std::vector<std::string> keys;
    for (const PrefixKey& key : PrefixKeysOf(name_space, model_id, block, prompt))
      keys.push_back(Hex(key));
    EXPECT_EQ(json(keys), vector.at("prefix_keys"));
  }
}

// A key stands for all tokens before it, and a later token changes no key before its block.
TEST(PrefixKey, IsAChain) {
  const Prompt prompt = TokensFrom(0, 43);
  const std::vector<PrefixKey> keys = KeysOf(prompt);
  ASSERT_EQ(keys.size(), 10u);
  for (std::size_t token = 0; token < 43; ++token) {
    Prompt other = prompt;
    other.token_ids[token] += 1;
    const std::vector<PrefixKey> changed = KeysOf(other);
    for (std::size_t block = 0; block < keys.size(); ++block)
      EXPECT_EQ(changed[block] == keys[block], block < token / 4) << token << ", " << block;
  }
  Prompt longer = TokensFrom(0, 1000);
  std::vector<PrefixKey> more = KeysOf(longer);
  EXPECT_TRUE(std::equal(keys.begin(), keys.end(), more.begin()));
  EXPECT_EQ(std::set<PrefixKey>(more.begin(), more.end()).size(), more.size());
}

TEST(PrefixKey, EachFieldAloneMakesAnother) {
  const Prompt base = TokensFrom(0, 8);
  std::set<PrefixKey> seen = {KeysOf(base)[0]};
  const auto expect_new = [&](const PrefixKey& key, const char* what) {
    EXPECT_TRUE(seen.insert(key).second) << what;
  };
  expect_new(PrefixKeysOf("other", kModel, 4, base)[0], "namespace");
  expect_new(PrefixKeysOf("default", "another", 4, base)[0], "model id: source, revision, format");
  expect_new(KeysOf(base, 2)[0], "tokens of a block");
  expect_new(KeysOf(base)[1], "place");
  Prompt other = base;
  other.salt = "a";
  expect_new(KeysOf(other)[0], "salt");
  other = base;
  other.adapter = "a";
  expect_new(KeysOf(other)[0], "adapter, of the salt's bytes");
  other = base;
  other.extra_keys = {{0, "a"}};
  expect_new(KeysOf(other)[0], "extra key");
  Prompt hashes;
  hashes.block_hashes = {std::string(16, '\0')};
  expect_new(KeysOf(hashes)[0], "the engine's hash");
  // Where one field ends and the next begins counts, too.
  Prompt ab = base, a_b = base;
  ab.salt = "ab";
  a_b.salt = "a";
  a_b.adapter = "b";
  expect_new(KeysOf(ab)[0], "salt ab");
  expect_new(KeysOf(a_b)[0], "salt a, adapter b");
}

TEST(PrefixKey, RefusesByField) {
  const auto expect = [](const Prompt& prompt, const char* message) {
    EXPECT_THAT(CheckPrompt(prompt, 4), Refuses(Reason::kInvalidField, HasSubstr(message)));
  };
  const Prompt base = TokensFrom(0, 9);  // two blocks and a token
  EXPECT_THAT(CheckPrompt(base, 4), IsOk());
  EXPECT_THAT(CheckPrompt({}, 4), IsOk());
  Prompt prompt = base;
  prompt.block_hashes = {"h"};
  expect(prompt, "prompt.token_ids has 9 entries and prompt.block_hashes 1; want one of the two");
  prompt = base;
  prompt.salt = std::string(257, 's');
  expect(prompt, "prompt.salt has 257 bytes; want 0 to 256");
  prompt = base;
  prompt.adapter = std::string(257, 's');
  expect(prompt, "prompt.adapter has 257 bytes");
  prompt.adapter.clear();
  prompt.token_ids.resize(static_cast<std::size_t>(4 * (kMaxPromptBlocks + 1)));
  expect(prompt, "prompt has 131073 hash blocks; want at most 131072");
  prompt = {};
  prompt.block_hashes = {"h", ""};
  expect(prompt, "prompt.block_hashes[1] has 0 bytes; want 1 to 64");
  prompt.block_hashes = {std::string(65, 'h')};
  expect(prompt, "prompt.block_hashes[0] has 65 bytes");
  prompt = base;
  prompt.extra_keys = {{0, ""}};
  expect(prompt, "prompt.extra_keys[0].key has 0 bytes");
  prompt.extra_keys = {{1, "a"}, {1, "b"}};
  expect(prompt, "prompt.extra_keys[1].block is 1; want 2 to 2, ascending");
  prompt.extra_keys = {{2, "a"}};
  EXPECT_THAT(CheckPrompt(prompt, 4), IsOk());
  prompt.extra_keys = {{3, "a"}};
  expect(prompt, "prompt.extra_keys[0].block is 3; want 0 to 2, ascending");
  prompt.extra_keys = {{-1, "a"}};
  expect(prompt, "prompt.extra_keys[0].block is -1");
}

}  // namespace
}  // namespace kvtier::cachestore
