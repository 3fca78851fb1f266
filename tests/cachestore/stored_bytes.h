#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "cachestore/sequence.h"
#include "tests/support/device.h"

namespace kvtier::cachestore::testing {

using kvtier::testing::BytesAt;

// All bytes that a sequence holds for one K or V: its parts from the header to the last byte of
// padding, and each head's residual in token order.
struct StoredTensor {
  std::vector<std::vector<std::byte>> parts;
  std::vector<std::vector<std::byte>> residual;
};

inline StoredTensor StoredTensorOf(Device& device, const TensorPins& pins, std::int64_t tokens) {
  StoredTensor stored;
  for (const TensorPins::PinnedPart& pinned : pins.parts) {
    stored.parts.push_back(BytesAt(device, pinned.part->data(), pinned.part->bytes()));
  }
  for (std::size_t head = 0; head < pins.code_tokens.size(); ++head) {
    std::vector<std::byte>& rows = stored.residual.emplace_back();
    for (std::int64_t token = pins.code_tokens[head]; token < tokens; ++token) {
      const auto row = BytesAt(device, pins.residual->RowAt(static_cast<int>(head), token),
                               pins.model->source_row_bytes());
      rows.insert(rows.end(), row.begin(), row.end());
    }
  }
  return stored;
}

// K, then V, of every layer of `pins`, which must be of whole sequences whose heads stand alike.
inline std::vector<StoredTensor> StoredBytesOf(Device& device, const SequencePins& pins) {
  std::vector<StoredTensor> stored;
  for (const SequencePins::Layer& layer : pins.layers) {
    stored.push_back(StoredTensorOf(device, layer.k, pins.tokens));
    stored.emplace_back();
    if (layer.v.model != nullptr) stored.back() = StoredTensorOf(device, layer.v, pins.tokens);
  }
  return stored;
}

// Where two lists of byte strings differ first; empty where they don't.
inline std::string DifferenceOf(const std::vector<std::vector<std::byte>>& a,
                                const std::vector<std::vector<std::byte>>& b) {
  if (a.size() != b.size()) return fmt::format("{} pieces and {}", a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const auto at = std::mismatch(a[i].begin(), a[i].end(), b[i].begin(), b[i].end());
    return fmt::format("piece {}, byte {} of {} and {}", i, at.first - a[i].begin(), a[i].size(),
                       b[i].size());
  }
  return {};
}

inline std::string DifferenceOf(const std::vector<StoredTensor>& a,
                                const std::vector<StoredTensor>& b) {
  if (a.size() != b.size()) return "number of layers";
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto place = fmt::format("{} of layer {}: ", i % 2 == 0 ? "k" : "v", i / 2);
    if (const std::string parts = DifferenceOf(a[i].parts, b[i].parts); !parts.empty())
      return place + "parts: " + parts;
    if (const std::string residual = DifferenceOf(a[i].residual, b[i].residual); !residual.empty())
      return place + "residual: " + residual;
  }
  return {};
}

}  // namespace kvtier::cachestore::testing
