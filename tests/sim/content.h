#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cachestore/model/model.h"
#include "cachestore/model/prefix_key.h"
#include "kernels/host_codec.h"
#include "tests/support/kv_data.h"

// What the simulation's sequences hold, and what a read of it must give.
namespace kvtier::sim {

using cachestore::Model;
using cachestore::TensorModel;
using testing::KvData;
using testing::KvTensor;

// Which text each token is of: token i of text t has the K and V that t has at i. So two contents
// that agree in their first texts are the same prefix.
using Content = std::vector<std::uint8_t>;

inline std::int64_t CommonPrefix(const Content& a, const Content& b) {
  std::size_t i = 0;
  while (i < a.size() && i < b.size() && a[i] == b[i]) ++i;
  return static_cast<std::int64_t>(i);
}

// The first `tokens` of a content as a prompt.
inline cachestore::Prompt PromptOf(const Content& content, std::int64_t tokens) {
  cachestore::Prompt prompt;
  for (std::int64_t i = 0; i < tokens; ++i)
    prompt.token_ids.push_back(
        static_cast<std::uint32_t>(content[static_cast<std::size_t>(i)] * 100'000 + i));
  return prompt;
}

// The texts of one model.
class Texts {
 public:
  Texts(const cachestore::ModelSpec& spec, int texts, std::int64_t tokens, testing::Random& random)
      : tokens_(tokens) {
    for (int i = 0; i < texts; ++i)
      texts_.push_back(testing::MakeKvData(spec, tokens, random, 100.0f));
  }

  int count() const { return static_cast<int>(texts_.size()); }
  std::int64_t tokens() const { return tokens_; }

  // K and V of a content, all of its tokens.
  KvData DataOf(const Content& content) const {
    KvData data{.tokens = static_cast<std::int64_t>(content.size()), .layers = {}};
    for (std::size_t layer = 0; layer < texts_[0].layers.size(); ++layer)
      data.layers.push_back({Assemble(content, layer, &KvData::Layer::k),
                             Assemble(content, layer, &KvData::Layer::v)});
    return data;
  }

 private:
  KvTensor Assemble(const Content& content, std::size_t layer,
                    KvTensor KvData::Layer::*side) const {
    const KvTensor& like = texts_[0].layers[layer].*side;
    KvTensor tensor{like.type, like.heads, static_cast<std::int64_t>(content.size()), like.dim, {}};
    tensor.bytes.resize(static_cast<std::size_t>(tensor.heads * tensor.tokens * like.row_bytes()));
    for (int head = 0; head < like.heads; ++head) {
      for (std::int64_t i = 0; i < tensor.tokens; ++i) {
        const KvTensor& text = texts_[content[static_cast<std::size_t>(i)]].layers[layer].*side;
        std::memcpy(tensor.Row(head, i), text.Row(head, i),
                    static_cast<std::size_t>(like.row_bytes()));
      }
    }
    return tensor;
  }

  const std::int64_t tokens_;
  std::vector<KvData> texts_;
};

// One head's rows as fp32: those of the whole units as they read when they are codes, and all as
// they came.
struct ExpectedHead {
  std::vector<float> codes;
  std::vector<float> source;
  std::int64_t whole_units = 0;  // tokens of `codes`
};

inline ExpectedHead Expect(const TensorModel& model, const KvTensor& data, int head) {
  ExpectedHead expected;
  const cachestore::PartLayout& layout = model.layout;
  const auto dim = static_cast<std::size_t>(data.dim);
  const std::int64_t units = data.tokens / layout.unit_tokens;
  expected.whole_units = units * layout.unit_tokens;
  const float scale = model.scales.empty() ? 1.0f : model.scales[static_cast<std::size_t>(head)];
  std::vector<std::byte> codes(static_cast<std::size_t>(units * layout.unit.total()));
  kernels::EncodeOnHost({.codec = layout.codec,
                         .dim = data.dim,
                         .scale = scale,
                         .source = {data.Row(head, 0), data.type, data.dim},
                         .units = static_cast<int>(units),
                         .out = codes.data()});
  expected.codes.resize(static_cast<std::size_t>(expected.whole_units) * dim);
  kernels::DecodeOnHost({.codec = layout.codec,
                         .dim = data.dim,
                         .scale = scale,
                         .in = codes.data(),
                         .tokens = expected.whole_units,
                         .out = {reinterpret_cast<std::byte*>(expected.codes.data()),
                                 kernels::ElementType::kFp32, data.dim}});
  expected.source.resize(static_cast<std::size_t>(data.tokens) * dim);
  for (std::int64_t i = 0; i < data.tokens; ++i) {
    for (int c = 0; c < data.dim; ++c)
      expected.source[static_cast<std::size_t>(i) * dim + static_cast<std::size_t>(c)] =
          data.Get(head, i, c);
  }
  return expected;
}

}  // namespace kvtier::sim
