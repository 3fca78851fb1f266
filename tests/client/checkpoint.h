#pragma once

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

// Checkpoints made up for tests. Written by hand, not by the writer of the code under test.
namespace kvtier::testing {

struct CheckpointTensor {
  std::string name;
  std::string dtype;
  std::vector<std::size_t> shape;
  std::string bytes;
};

inline CheckpointTensor F32Tensor(const std::string& name, const std::vector<float>& values,
                                  std::vector<std::size_t> shape) {
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return {name, "F32", std::move(shape), bytes};
}

inline CheckpointTensor F32Tensor(const std::string& name, const std::vector<float>& values) {
  return F32Tensor(name, values, {values.size()});
}

inline std::string SafetensorsBytes(const std::vector<CheckpointTensor>& tensors) {
  nlohmann::ordered_json header;
  std::string data;
  for (const CheckpointTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  const std::string text = header.dump();
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i));
  return length + text + data;
}

// A config.json with `scheme` as its kv_cache_scheme's fields.
inline std::string CheckpointConfigText(int layers, int kv_heads,
                                        const std::string& scheme = R"("strategy":"tensor")",
                                        int query_heads = 8) {
  return R"({"model_type":"llama","num_hidden_layers":)" + std::to_string(layers) +
         R"(,"num_attention_heads":)" + std::to_string(query_heads) + R"(,"num_key_value_heads":)" +
         std::to_string(kv_heads) +
         R"(,"quantization_config":{"quant_method":"compressed-tensors","ignore":["lm_head"],)"
         R"("kv_cache_scheme":{"num_bits":8,"type":"float","symmetric":true,"group_size":null,)"
         R"("actorder":null,"observer":"static_minmax",)" +
         scheme + "}}}";
}

}  // namespace kvtier::testing
