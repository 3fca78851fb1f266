// Stores a corner of the real sample as kivi(2,2,4,4) and prints what the store then holds, as
// JSON: what draw_kivi.py draws.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "cachestore/device/host_device.h"
#include "cachestore/store.h"

namespace {

using kvtier::cachestore::TensorPins;
using nlohmann::json;

constexpr std::int64_t kTokens = 15;
constexpr std::int64_t kChannels = 8;
constexpr int kGroup = 4;
constexpr int kBits = 2;

class SystemClock final : public kvtier::cachestore::Clock {
 public:
  absl::Time Now() const override { return absl::Now(); }
};

// The first kTokens x kChannels of a [tokens, 3, 64] bf16 tensor's head 0.
std::vector<std::uint16_t> Corner(const std::string& path, const std::string& name) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof length);
  std::string header(length, '\0');
  file.read(header.data(), static_cast<std::streamsize>(length));
  const std::int64_t begin = json::parse(header).at(name).at("data_offsets")[0];
  std::vector<std::uint16_t> values(kTokens * kChannels);
  for (std::int64_t token = 0; token < kTokens; ++token) {
    file.seekg(static_cast<std::streamoff>(8 + length) + begin + token * 3 * 64 * 2);
    file.read(reinterpret_cast<char*>(values.data() + token * kChannels), kChannels * 2);
  }
  return values;
}

template <class F>
json Grid(std::int64_t tokens, F value) {
  json rows = json::array();
  for (std::int64_t token = 0; token < tokens; ++token) {
    json row = json::array();
    for (std::int64_t channel = 0; channel < kChannels; ++channel)
      row.push_back(value(token, channel));
    rows.push_back(row);
  }
  return rows;
}

int CodeAt(const std::byte* codes, std::int64_t element) {
  return static_cast<int>(codes[element / 4]) >> (element % 4 * kBits) & 3;
}

json Describe(const TensorPins& pins, bool is_k) {
  const std::byte* slice = pins.parts[0].part->SliceAt(0);
  const std::int64_t unit = pins.model->layout.unit.total();
  const std::int64_t codes = pins.code_tokens[0];
  json out;
  out["codes"] = Grid(codes, [&](std::int64_t token, std::int64_t channel) {
    // K: a unit is a group of tokens, one byte a channel. V: a unit is a token.
    if (is_k) return CodeAt(slice + token / kGroup * unit + channel, token % kGroup);
    return CodeAt(slice + token * unit, channel);
  });
  out["residual"] = Grid(kTokens - codes, [&](std::int64_t row, std::int64_t channel) {
    const auto* values =
        reinterpret_cast<const kvtier::kernels::Bf16*>(pins.residual->RowAt(0, codes + row));
    return kvtier::kernels::ToFloat(values[channel]);
  });
  return out;
}

absl::StatusOr<json> Store(const std::string& sample) {
  using namespace kvtier::cachestore;  // NOLINT(google-build-using-namespace)
  const SystemClock clock;
  HostDevice device;
  auto store = Store::Create({.memory = 1 << 20}, device, clock);
  if (!store.ok()) return store.status();
  ModelRequest request;
  request.spec.name = "figure";
  request.spec.layers = {
      {.kv_heads = 1, .k_head_dim = int{kChannels}, .v_head_dim = int{kChannels}}};
  request.policy.kv_cache_dtype = "kivi(2,2,4,4)";
  const auto model = (*store)->RegisterModel(request);
  if (!model.ok()) return model.status();
  const SequenceKey key{"default", "figure"};
  auto writer = (*store)->OpenWriter({.key = key, .model_id = (*model)->model().id});
  if (!writer.ok()) return writer.status();
  const auto k = Corner(sample, "layers.3.k");
  const auto v = Corner(sample, "layers.3.v");
  const auto source = [](const std::vector<std::uint16_t>& values) {
    return SourceTensor{.data = reinterpret_cast<const std::byte*>(values.data()),
                        .token_stride = kChannels};
  };
  Chunk chunk{.tokens = kTokens, .layers = {{.layer = 0, .k = source(k), .v = source(v)}}};
  if (auto taken = (*writer)->Append(chunk); !taken.ok()) return taken.status();
  auto reader = (*store)->OpenReader(key, "", {}, {});
  if (!reader.ok()) return reader.status();
  const auto& layer = reader->pins().layers[0];
  return json{{"tokens", kTokens},
              {"group", kGroup},
              {"k", Describe(layer.k, true)},
              {"v", Describe(layer.v, false)}};
}

}  // namespace

// usage: kivi_codes SAMPLE.safetensors [EXPECTED.json]; with the latter, exit 1 where what is held
// differs from it.
// NOLINTNEXTLINE(bugprone-exception-escape): it ends the program, with a trace
int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const auto held = Store(argv[1]);
  if (!held.ok()) {
    std::cerr << held.status() << '\n';
    return 1;
  }
  if (argc == 2) {
    std::cout << held->dump() << '\n';
    return 0;
  }
  if (json::parse(std::ifstream(argv[2])) == *held) return 0;
  std::cerr << argv[2]
            << " is not what the store holds; draw the figure anew (docs/figures/draw_kivi.py)\n";
  return 1;
}
