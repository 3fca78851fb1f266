// Scales of FP8 through the two executables: from a checkpoint, from traffic, and back out.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/element.h"
#include "tests/client/checkpoint.h"
#include "tests/e2e/live_server.h"

namespace kvtier::testing {
namespace {

using kernels::ElementType;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kLayers = 2;
constexpr int kHeads = 2;
constexpr int kDim = 64;
constexpr int kTokens = 100;
constexpr std::size_t kValues = std::size_t{kTokens} * kHeads * kDim;

ElementType TypeOf(const std::string& dtype) {
  if (dtype == "BF16") return ElementType::kBf16;
  if (dtype == "F16") return ElementType::kFp16;
  if (dtype == "F8_E4M3") return ElementType::kE4m3;
  if (dtype == "F8_E5M2") return ElementType::kE5m2;
  return ElementType::kFp32;
}

class Scales : public ::testing::Test {
 protected:
  using ValueAt = std::function<float(int token, int head, int channel)>;

  Finished Run(std::vector<std::string> arguments) {
    arguments.push_back("--server=" + server_.listen());
    return RunKvtier(arguments);
  }
  json RunJson(std::vector<std::string> arguments) {
    arguments.emplace_back("--json");
    const Finished finished = Run(std::move(arguments));
    EXPECT_EQ(finished.code, 0) << finished.output;
    return json::parse(finished.output, nullptr, false);
  }

  // A file for `kvtier put`, fp32, the same values in every layer, of V a tenth.
  std::string WriteKv(const ValueAt& value) {
    std::vector<float> k, v;
    for (int token = 0; token < kTokens; ++token) {
      for (int head = 0; head < kHeads; ++head) {
        for (int channel = 0; channel < kDim; ++channel) {
          k.push_back(value(token, head, channel));
          v.push_back(k.back() / 8);
        }
      }
    }
    std::vector<CheckpointTensor> tensors;
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string name = "layers." + std::to_string(layer);
      tensors.push_back(F32Tensor(name + ".k", k, {kTokens, kHeads, kDim}));
      tensors.push_back(F32Tensor(name + ".v", v, {kTokens, kHeads, kDim}));
    }
    std::string path = folder_ / "kv.safetensors";
    std::ofstream(path, std::ios::binary) << SafetensorsBytes(tensors);
    return path;
  }

  // K of the last layer as a reader has it who multiplies FP8 codes by the scales that came along.
  std::vector<float> Get(const std::string& sequence, const std::string& as,
                         std::vector<std::string> flags = {}) {
    const std::string out = folder_ / "out.safetensors";
    flags.insert(flags.begin(), {"get", "--sequence=" + sequence, "--as=" + as, "--out=" + out});
    const Finished got = Run(flags);
    EXPECT_EQ(got.code, 0) << got.output;
    const auto file = client::SafetensorsReader::Open(out);
    EXPECT_TRUE(file.ok()) << file.status();
    const std::vector<float> values = Decode(*file, "layers.1.k");
    if (!as.starts_with("fp8")) return values;
    const std::vector<float> scales = Decode(*file, "layers.1.k_scale");
    std::vector<float> scaled;
    for (std::size_t i = 0; i < values.size(); ++i)
      scaled.push_back(values[i] * scales[scales.size() == 1 ? 0 : i / kDim % kHeads]);
    return scaled;
  }

  static std::vector<float> Decode(const client::SafetensorsReader& file, const std::string& name) {
    const client::TensorInfo& tensor = *file.Find(name);
    std::vector<std::byte> bytes(tensor.size);
    EXPECT_TRUE(file.Read(tensor, 0, bytes).ok());
    const ElementType type = TypeOf(tensor.dtype);
    std::vector<float> values;
    for (std::size_t at = 0; at < bytes.size(); at += kernels::ElementBytes(type)) {
      values.push_back(kernels::VisitElement(type, [&](auto value) {
        std::memcpy(&value, bytes.data() + at, sizeof value);
        return kernels::ToFloat(value);
      }));
    }
    return values;
  }

  LiveServer server_{{"--memory=64MiB"}};
  TempFolder folder_;
};

// A few channels at +-600, as in models whose K has a bias; the rest within +-4.
float Biased(int token, int head, int channel) {
  if (channel == 5) return 600;
  if (channel == 33 && head == 1) return -600;
  return std::sin(static_cast<float>(token * 7 + head * 3 + channel)) * 4;
}

TEST_F(Scales, ABiasSaturatesAtScaleOneAndObservedScalesRepairIt) {
  const std::string file = WriteKv(Biased);
  const json at_one = RunJson({"put", file, "--sequence=one", "--kv-cache-dtype=fp8"});
  EXPECT_EQ(at_one.at("saturated_values"), 3 * kTokens * kLayers);
  EXPECT_THAT(at_one.at("scales_line").dump(), HasSubstr("Using KV cache scaling factor 1.0"));
  EXPECT_EQ(Get("one", "fp32")[5], 448);  // which is why
  const std::string model = at_one.at("model_id");
  EXPECT_EQ(Run({"remove", "--sequence=one"}).code, 0);

  // What was seen is still known, though the sequence is gone.
  const std::string out = folder_ / "observed";
  const json seen = RunJson({"scales", "--observed", "--model-id=" + model, "--out=" + out});
  EXPECT_EQ(seen.at("layers")[1].at("k_amax"), json({600, 600}));
  EXPECT_EQ(seen.at("layers")[1].at("v_amax"), json({75, 75}));
  EXPECT_EQ(seen.at("layers")[1].at("tokens"), kTokens);
  EXPECT_EQ(seen.at("layers")[1].at("k_scale"), json({1}));

  const json repaired =
      RunJson({"put", file, "--sequence=two", "--kv-cache-dtype=fp8", "--scales=" + out});
  EXPECT_EQ(repaired.at("saturated_values"), 0);
  EXPECT_EQ(repaired.at("scales_line"), "scales: calibrated 2 of 2 layers (observed)");
  EXPECT_THAT(server_.process().Output(), HasSubstr("scales: calibrated 2 of 2 layers (observed)"));
  const std::vector<float> k = Get("two", "fp32");
  ASSERT_EQ(k.size(), kValues);
  for (int token = 0; token < kTokens; ++token) {
    const auto at = static_cast<std::size_t>(token * kHeads * kDim);
    EXPECT_NEAR(k[at + 5], 600, 600 / 16.0);
    EXPECT_NEAR(k[at + kDim + 33], -600, 600 / 16.0);
  }
}

TEST_F(Scales, AnImportedCheckpointRepairsItToo) {
  const std::string file = WriteKv(Biased);
  const std::string checkpoint = folder_ / "checkpoint";
  std::filesystem::create_directory(checkpoint);
  std::vector<CheckpointTensor> tensors;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string module = "model.layers." + std::to_string(layer) + ".self_attn.";
    tensors.push_back(F32Tensor(module + "k_scale", {1.5F, 2}, {2, 1, 1}));
    tensors.push_back(F32Tensor(module + "v_scale", {0.25F, 0.5F}, {2, 1, 1}));
    tensors.push_back(F32Tensor(module + "q_scale", {1, 2, 3, 4}, {4, 1, 1}));
  }
  std::ofstream(checkpoint + "/model.safetensors", std::ios::binary) << SafetensorsBytes(tensors);
  std::ofstream(checkpoint + "/config.json")
      << CheckpointConfigText(kLayers, kHeads, R"("strategy":"attn_head")", 4);

  const std::string scales = folder_ / "scales.json";
  const Finished shown = Run({"scales", checkpoint, "--out=" + scales});
  EXPECT_EQ(shown.code, 0);
  EXPECT_THAT(shown.output,
              AllOf(HasSubstr("model.layers.1.self_attn.k_scale, v_scale, q_scale"),
                    HasSubstr("1.5 to 2 (2 heads)"), HasSubstr("calibrated 2 of 2 layers (")));
  for (const std::string& from : {checkpoint, scales}) {
    const json put =
        RunJson({"put", file, "--sequence=" + from, "--kv-cache-dtype=fp8", "--scales=" + from});
    EXPECT_EQ(put.at("saturated_values"), 0);
    EXPECT_THAT(put.at("scales_line").dump(), HasSubstr("scales: calibrated 2 of 2 layers ("));
    EXPECT_NEAR(Get(from, "bf16")[5], 600, 600 / 16.0);
    const auto read = client::SafetensorsReader::Open(folder_ / "out.safetensors");
    EXPECT_EQ(Decode(*read, "layers.0.q_scale"), (std::vector<float>{2, 4}));
  }
  const Finished e5m2 =
      Run({"put", file, "--sequence=x", "--kv-cache-dtype=fp8_e5m2", "--scales=" + checkpoint});
  EXPECT_EQ(e5m2.code, 2);
  EXPECT_THAT(e5m2.output, HasSubstr("give those of fp8_e5m2 by --k-scale and --v-scale"));
  const Finished guessed = Run({"put", file, "--sequence=x", "--calculate-kv-scales"});
  EXPECT_EQ(guessed.code, 2);
  EXPECT_THAT(guessed.output, HasSubstr("scales --observed"));
}

// Stored with a scale, the values are right whatever the reader asks for. They are 1.5 times powers
// of two, which every type holds exactly once the scale is applied, and no type without.
TEST_F(Scales, EveryReadFormatGivesTheValuesOfTheScaleTheyWereStoredWith) {
  const auto value = [](int token, int head, int channel) {
    const float x = 0.75F * std::exp2(static_cast<float>((token + channel) % 9 - 4));
    return (channel + head) % 2 == 0 ? x : -x;
  };
  const std::string file = WriteKv(value);
  std::vector<float> want;
  for (std::size_t i = 0; i < kValues; ++i) {
    const int at = static_cast<int>(i);
    want.push_back(value(at / (kHeads * kDim), at / kDim % kHeads, at % kDim));
  }
  for (const std::string k_scale : {"0.75", "0.1875,3"}) {
    const std::string sequence = "scaled " + k_scale;
    const json put = RunJson({"put", file, "--sequence=" + sequence, "--kv-cache-dtype=fp8",
                              "--k-scale=" + k_scale, "--v-scale=0.09375"});
    EXPECT_EQ(put.at("scales_line"), "scales: given 2 of 2 layers");
    EXPECT_EQ(put.at("saturated_values"), 0);
    for (const char* as : {"source", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"})
      EXPECT_EQ(Get(sequence, as), want) << as << " of " << k_scale;
    for (const char* asked : {"--k-scale=1.5", "--k-scale=0.375"})
      EXPECT_EQ(Get(sequence, "fp8_e4m3", {asked}), want) << asked << " of " << k_scale;
  }
}

}  // namespace
}  // namespace kvtier::testing
