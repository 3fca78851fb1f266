#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/test_store.h"

// Sequences that begin as others do.
namespace kvtier::cachestore::testing {

inline constexpr char kSpace[] = "default";
inline constexpr int kPage = 64;
inline constexpr ReadFormat kAsFp32{.as = ElementType::kFp32};

inline SequenceKey Key(const std::string& id) { return {kSpace, id}; }

// A store of one small model in the format that is the test's parameter, and two texts of it.
class TwoTextsTest : public ::testing::TestWithParam<const char*> {
 protected:
  TwoTextsTest(const ModelSpec& spec, const StoreOptions& options, std::int64_t tokens)
      : store_(options), entry_(store_.Register(RequestOf(spec, GetParam(), kPage))) {
    const float largest = LargestFor(GetParam(), spec);
    one_ = kvtier::testing::MakeKvData(spec, tokens, random_, largest);
    other_ = kvtier::testing::MakeKvData(spec, tokens, random_, largest);
  }
  static ModelSpec TwoLayers() { return UniformSpec({.layers = 2, .heads = 2, .dim = 32}); }

  const Model& model() const { return entry_->model(); }

  kvtier::testing::SeededRandom random_;
  TestStore store_;
  std::shared_ptr<ModelEntry> entry_;
  KvData one_, other_;
};

// A prompt of tokens first, first + 1, ...
inline Prompt PromptFrom(std::uint32_t first, std::int64_t tokens) {
  Prompt prompt;
  prompt.token_ids.resize(static_cast<std::size_t>(tokens));
  std::iota(prompt.token_ids.begin(), prompt.token_ids.end(), first);
  return prompt;
}

// `data`, but with the tokens of `other` from `token` on.
inline KvData Diverge(const KvData& data, const KvData& other, std::int64_t token) {
  KvData result = data;
  const auto take = [token](kvtier::testing::KvTensor& to, const kvtier::testing::KvTensor& from) {
    for (int head = 0; head < to.heads; ++head)
      std::memcpy(to.Row(head, token), from.Row(head, token),
                  static_cast<std::size_t>((to.tokens - token) * to.row_bytes()));
  };
  for (std::size_t i = 0; i < data.layers.size() && token < data.tokens; ++i) {
    take(result.layers[i].k, other.layers[i].k);
    if (result.layers[i].v.dim > 0) take(result.layers[i].v, other.layers[i].v);
  }
  return result;
}

inline std::unique_ptr<Writer> OpenWithPrompt(TestStore& store, const std::string& id,
                                              const Model& model, const Prompt& prompt) {
  WriterRequest request;
  request.key = {"default", id};
  request.model_id = model.id;
  request.prompt = prompt;
  return store->OpenWriter(std::move(request)).value();
}

// All layers, which must be alike in heads.
inline void AppendSpan(Writer& writer, const KvData& data, TokenSpan span) {
  if (span.count == 0) return;
  std::vector<int> layers(data.layers.size());
  std::iota(layers.begin(), layers.end(), 0);
  Message message(data, writer.shard(), {}, layers, span);
  const auto ack = writer.Append(message.chunk());
  ASSERT_TRUE(ack.ok()) << ack.status();
  ASSERT_EQ(ack->received_tokens, span.end());
}

inline void ExpectReads(TestStore& store, const std::string& id, const Model& model,
                        const KvData& data, std::int64_t tokens, std::int64_t origin,
                        Random& random) {
  SCOPED_TRACE("sequence " + id + ", " + std::to_string(tokens) + " tokens, begun with " +
               std::to_string(origin));
  const ReadFormat as{.as = ElementType::kFp32};
  SequenceReader reader = store.Read(id, as);
  ASSERT_EQ(reader.pins().tokens, tokens);
  ReadCheck(reader, as, NaiveSequence(model, data, tokens, origin)).Run(random);
}

// Pages that are final in all layers: what others may share.
inline std::int64_t SharablePages(const Model& model, std::int64_t tokens) {
  std::int64_t codes = tokens;
  for (const LayerModel& layer : model.layers) {
    codes = std::min(codes, CodeTokensOf(layer.format, Side::kK, tokens, model.page_tokens));
    codes = std::min(codes, CodeTokensOf(layer.format, Side::kV, tokens, model.page_tokens));
  }
  return codes / model.page_tokens;
}

}  // namespace kvtier::cachestore::testing
