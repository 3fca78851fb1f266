#include "tests/support/kv_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace kvtier::testing {
namespace {

// How the values of one channel of one head are spread.
struct Channel {
  float offset = 0;
  float spread = 0;
};

Channel MakeChannel(Random& random) {
  std::normal_distribution<float> normal;
  switch (random.Between(0, 11)) {
    case 0:
      return {.offset = normal(random.engine()), .spread = 0};
    case 1:
      return {};
    case 2:
      return {.offset = 0, .spread = 1e-6f};
    case 3:
      return {.offset = 40 * normal(random.engine()), .spread = 4};
    default:
      return {.offset = 0, .spread = std::exp(normal(random.engine()))};
  }
}

KvTensor MakeTensor(kernels::ElementType type, int heads, std::int64_t tokens, int dim) {
  KvTensor tensor{.type = type, .heads = heads, .tokens = tokens, .dim = dim, .bytes = {}};
  tensor.bytes.resize(static_cast<std::size_t>(heads * tokens * tensor.row_bytes()));
  return tensor;
}

void Fill(KvTensor& tensor, Random& random, float largest) {
  std::normal_distribution<float> normal;
  for (int head = 0; head < tensor.heads; ++head) {
    for (int channel = 0; channel < tensor.dim; ++channel) {
      const Channel spread = MakeChannel(random);
      for (std::int64_t token = 0; token < tensor.tokens; ++token) {
        float value = spread.offset + spread.spread * normal(random.engine());
        if (random.OneIn(2000)) value = largest * (random.OneIn(2) ? 1.0f : -1.0f);
        if (value == 0.0f && random.OneIn(2)) value = -0.0f;
        tensor.Set(head, token, channel, std::clamp(value, -largest, largest));
      }
    }
  }
}

}  // namespace

float KvTensor::Get(int head, std::int64_t token, int channel) const {
  return kernels::VisitElement(type, [&](auto element) {
    std::memcpy(&element, Row(head, token) + channel * kernels::ElementBytes(type), sizeof element);
    return kernels::ToFloat(element);
  });
}

void KvTensor::Set(int head, std::int64_t token, int channel, float value) {
  kernels::VisitElement(type, [&](auto element) {
    element = kernels::FromFloat<decltype(element)>(value);
    std::memcpy(Row(head, token) + channel * kernels::ElementBytes(type), &element, sizeof element);
  });
}

KvData MakeKvData(const cachestore::ModelSpec& spec, std::int64_t tokens, Random& random,
                  float largest) {
  KvData data{.tokens = tokens, .layers = {}};
  for (const cachestore::LayerSpec& layer : spec.layers) {
    data.layers.push_back({MakeTensor(spec.source, layer.kv_heads, tokens, layer.k_head_dim),
                           MakeTensor(spec.source, layer.kv_heads, tokens, layer.v_head_dim)});
    Fill(data.layers.back().k, random, largest);
    Fill(data.layers.back().v, random, largest);
  }
  return data;
}

}  // namespace kvtier::testing
