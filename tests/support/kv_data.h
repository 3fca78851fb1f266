#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cachestore/model/model_spec.h"
#include "kernels/element.h"
#include "tests/support/seed.h"

namespace kvtier::testing {

// K or V of one layer, [heads, tokens, dim], in the source dtype.
struct KvTensor {
  kernels::ElementType type = kernels::ElementType::kBf16;
  int heads = 0;
  std::int64_t tokens = 0;
  int dim = 0;
  std::vector<std::byte> bytes;

  std::int64_t row_bytes() const { return std::int64_t{dim} * kernels::ElementBytes(type); }
  const std::byte* Row(int head, std::int64_t token) const {
    return bytes.data() + (head * tokens + token) * row_bytes();
  }
  std::byte* Row(int head, std::int64_t token) {
    return bytes.data() + (head * tokens + token) * row_bytes();
  }
  float Get(int head, std::int64_t token, int channel) const;
  // Rounds to the type.
  void Set(int head, std::int64_t token, int channel, float value);
};

// K and V of one sequence, for every layer of a model. Values as caches hold them: channels of very
// different size and offset, some constant, some of zeros of both signs or subnormals, and outliers
// up to `largest`.
struct KvData {
  struct Layer {
    KvTensor k;
    KvTensor v;
  };
  std::int64_t tokens = 0;
  std::vector<Layer> layers;
};
KvData MakeKvData(const cachestore::ModelSpec& spec, std::int64_t tokens, Random& random,
                  float largest = 30000.0f);

}  // namespace kvtier::testing
