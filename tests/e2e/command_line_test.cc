// The main job through the two executables: real K and V in, out in every type, and what the
// command line says about it.
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "client/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"

namespace kvtier::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kSample = KVTIER_TEST_DATA "/smollm2-135m-kv.safetensors";

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Header and payload of a safetensors file, read independently of the client's reader.
struct Tensors {
  json header;
  std::string payload;

  explicit Tensors(const std::string& path) {
    const std::string raw = ReadFile(path);
    const std::uint64_t length = *reinterpret_cast<const std::uint64_t*>(raw.data());
    header = json::parse(raw.substr(8, length));
    payload = raw.substr(8 + length);
  }
  std::string Bytes(const std::string& name) const {
    const std::size_t begin = header.at(name).at("data_offsets")[0];
    const std::size_t end = header.at(name).at("data_offsets")[1];
    return payload.substr(begin, end - begin);
  }
};

class CommandLine : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = std::make_unique<LiveServer>(std::vector<std::string>{"--memory=256MiB"});
  }
  static void TearDownTestSuite() { server_.reset(); }

  static Finished Run(std::vector<std::string> arguments) {
    arguments.push_back("--server=" + server_->listen());
    return RunKvtier(arguments);
  }
  static json RunJson(std::vector<std::string> arguments) {
    arguments.emplace_back("--json");
    const Finished finished = Run(std::move(arguments));
    EXPECT_EQ(finished.code, 0) << finished.output;
    return json::parse(finished.output, nullptr, false);
  }

  static std::unique_ptr<LiveServer> server_;
  TempFolder folder_;
};
std::unique_ptr<LiveServer> CommandLine::server_;

TEST_F(CommandLine, AutoGivesTheBytesBack) {
  const json put = RunJson({"put", kSample, "--sequence=exact", "--chunk-tokens=100"});
  EXPECT_EQ(put.at("tokens"), 512);
  EXPECT_EQ(put.at("source_bytes"), 512 * 8 * 2 * 3 * 64 * 2);
  const std::string out = folder_ / "out.safetensors";
  RunJson({"get", "--sequence=exact", "--as=source", "--out=" + out});
  const Tensors source(kSample);
  const Tensors served(out);
  for (int layer = 0; layer < 8; ++layer) {
    for (const char* side : {"k", "v"}) {
      const std::string name = "layers." + std::to_string(layer) + "." + side;
      EXPECT_EQ(served.header.at(name).at("dtype"), "BF16");
      EXPECT_EQ(served.Bytes(name), source.Bytes(name)) << name;
    }
  }
}

TEST_F(CommandLine, RangesOfLayersHeadsAndTokensAreSlicesOfTheWhole) {
  RunJson({"put", kSample, "--sequence=sliced"});
  const std::string out = folder_ / "slice.safetensors";
  RunJson({"get", "--sequence=sliced", "--out=" + out, "--layers=2:4", "--heads=1:3",
           "--tokens=100:107"});
  const Tensors source(kSample);
  const Tensors served(out);
  EXPECT_FALSE(served.header.contains("layers.1.k"));
  const std::string whole = source.Bytes("layers.3.v");
  std::string want;
  for (std::size_t token = 100; token < 107; ++token)
    want += whole.substr((token * 3 + 1) * 128, 256);
  EXPECT_EQ(served.header.at("layers.3.v").at("shape"), json({7, 2, 64}));
  EXPECT_EQ(served.Bytes("layers.3.v"), want);
}

TEST_F(CommandLine, HndIsTheTransposeOfNhd) {
  RunJson({"put", kSample, "--sequence=transposed", "--kv-cache-dtype=kivi4"});
  const std::string nhd = folder_ / "nhd.safetensors";
  const std::string hnd = folder_ / "hnd.safetensors";
  RunJson({"get", "--sequence=transposed", "--out=" + nhd, "--as=fp16"});
  RunJson({"get", "--sequence=transposed", "--out=" + hnd, "--as=fp16", "--layout=HND"});
  const std::string by_token = Tensors(nhd).Bytes("layers.5.k");
  const std::string by_head = Tensors(hnd).Bytes("layers.5.k");
  std::string want;
  for (std::size_t head = 0; head < 3; ++head) {
    for (std::size_t token = 0; token < 512; ++token)
      want += by_token.substr((token * 3 + head) * 128, 128);
  }
  EXPECT_EQ(by_head, want);
}

TEST_F(CommandLine, EveryFormatIsReadAsEveryType) {
  const std::vector<std::pair<std::string, std::string>> types = {{"bf16", "BF16"},
                                                                  {"fp16", "F16"},
                                                                  {"fp32", "F32"},
                                                                  {"fp8_e4m3", "F8_E4M3"},
                                                                  {"fp8_e5m2", "F8_E5M2"}};
  for (const char* format :
       {"auto", "float16", "bfloat16", "fp8", "fp8_e5m2", "int8_per_token_head",
        "fp8_per_token_head", "q8_0", "q4_0", "kivi2", "kivi4", "k4v2", "kivi(8,4,64,64)"}) {
    const std::string name = std::string("as ") + format;
    const json put =
        RunJson({"put", kSample, "--sequence=" + name, std::string("--kv-cache-dtype=") + format});
    const json encoded = RunJson({"put", kSample, "--sequence=" + name + " here",
                                  std::string("--kv-cache-dtype=") + format, "--transfer=stored"});
    EXPECT_EQ(encoded.at("memory"), put.at("memory")) << format;
    EXPECT_EQ(encoded.at("saturated_values"), put.at("saturated_values")) << format;
    for (const auto& [as, dtype] : types) {
      const std::string out = folder_ / "typed.safetensors";
      RunJson({"get", "--sequence=" + name, "--as=" + as, "--out=" + out});
      const Tensors served(out);
      EXPECT_EQ(served.header.at("layers.0.k").at("dtype"), dtype) << format;
      EXPECT_EQ(served.header.contains("layers.0.k_scale"), as.starts_with("fp8")) << format;
      const std::string decoded = folder_ / "decoded.safetensors";
      RunJson({"get", "--sequence=" + name, "--as=" + as, "--out=" + decoded, "--transfer=stored"});
      EXPECT_TRUE(ReadFile(decoded) == ReadFile(out)) << format << " as " << as;
    }
    EXPECT_EQ(Run({"remove", "--sequence=" + name}).code, 0);
    EXPECT_EQ(Run({"remove", "--sequence=" + name + " here"}).code, 0);
  }
}

TEST_F(CommandLine, Fp8IsStoredWithItsScaleAndServedWithIt) {
  RunJson({"put", kSample, "--sequence=scaled", "--kv-cache-dtype=fp8", "--k-scale=0.05,0.06,0.07",
           "--v-scale=0.02"});
  const std::string out = folder_ / "fp8.safetensors";
  RunJson({"get", "--sequence=scaled", "--as=fp8_e4m3", "--out=" + out});
  const Tensors served(out);
  EXPECT_EQ(served.header.at("layers.7.k_scale").at("shape"), json({3}));
  EXPECT_EQ(served.header.at("layers.7.v_scale").at("shape"), json({1}));
  const std::string scales = served.Bytes("layers.7.k_scale");
  EXPECT_EQ(reinterpret_cast<const float*>(scales.data())[1], 0.06f);
}

TEST_F(CommandLine, Fp8ScalesAreMeasuredIfAskedFor) {
  RunJson({"put", kSample, "--sequence=measured", "--kv-cache-dtype=kivi4"});
  const std::string out = folder_ / "fp8.safetensors";
  const json get =
      RunJson({"get", "--sequence=measured", "--as=fp8_e4m3", "--measure-scales", "--out=" + out});
  EXPECT_EQ(get.at("saturated_values"), 0);
  const Tensors served(out);
  EXPECT_EQ(served.header.at("layers.7.v_scale").at("shape"), json({3}));
  const std::string scales = served.Bytes("layers.7.v_scale");
  const std::string codes = served.Bytes("layers.7.v");
  for (std::size_t head = 0; head < 3; ++head) {
    EXPECT_GT(reinterpret_cast<const float*>(scales.data())[head], 0);
    bool full = false;  // the largest magnitude is the type's largest value
    for (std::size_t token = 0; token < 512; ++token) {
      for (std::size_t i = 0; i < 64; ++i)
        full |= (codes[(token * 3 + head) * 64 + i] & 0x7f) == 0x7e;
    }
    EXPECT_TRUE(full) << head;
  }
  EXPECT_THAT(Run({"get", "--sequence=measured", "--measure-scales", "--out=" + out}).output,
              HasSubstr("measure_scales is set; it goes with FP8 output only"));
}

TEST_F(CommandLine, TensorsThatAreNotKOrVAreIgnoredAndNamed) {
  const json put = RunJson({"put", kSample, "--sequence=named"});
  EXPECT_THAT(put.at("ignored_tensors").dump(), HasSubstr("layers.0.q"));
}

// A file of MLA layers under DeepSeek-V3.2's config: `auto` is asked for by the engines' name.
TEST_F(CommandLine, AutoOfASparseMlaConfigIsItsEnginesFormat) {
  const std::string file = folder_ / "latent.safetensors";
  const std::string header =
      R"({"layers.0.k":{"dtype":"BF16","shape":[2,1,576],"data_offsets":[0,2304]}})";
  const std::uint64_t length = header.size();
  std::ofstream(file, std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), sizeof length) << header
      << std::string(2304, '\0');
  const std::string config = folder_ / "deepseek-v32.json";
  std::ofstream(config) << R"({"model_type":"deepseek_v32","index_head_dim":128,)"
                           R"("num_hidden_layers":1,"kv_lora_rank":512,"qk_rope_head_dim":64})";
  const std::vector<std::string> put = {"put", file, "--sequence=latent", "--model=" + config};
  const Finished by_auto = Run(put);
  EXPECT_THAT(by_auto.output, HasSubstr("fp8_ds_mla"));
  std::vector<std::string> as_source = put;
  as_source.insert(as_source.end(), {"--sequence=source", "--kv-cache-dtype=bfloat16"});
  as_source.erase(as_source.begin() + 2);
  const json stored = RunJson(as_source);
  EXPECT_EQ(stored.at("kv_cache_dtype"), "bfloat16");
  EXPECT_THAT(stored.at("notices").dump(), HasSubstr("sparse indexer"));
}

TEST_F(CommandLine, ListDescribeCapacityRemove) {
  RunJson({"put", kSample, "--sequence=seen", "--kv-cache-dtype=kivi2", "--namespace=team"});
  EXPECT_THAT(RunJson({"list", "--namespace=team"}).dump(), HasSubstr("seen"));
  const json described = RunJson({"describe", "--sequence=seen", "--namespace=team"});
  EXPECT_THAT(described.dump(), HasSubstr("kivi2"));
  EXPECT_THAT(RunJson({"capacity"}).dump(), HasSubstr("more_tokens"));
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"list"}, {"describe", "--sequence=seen"}, {"capacity"}}) {
    std::vector<std::string> human = command;
    human.emplace_back("--namespace=team");
    const Finished finished = Run(human);
    EXPECT_EQ(finished.code, 0) << finished.output;
    EXPECT_THAT(finished.output, HasSubstr("kivi2")) << command[0];
  }
  EXPECT_EQ(Run({"remove", "--sequence=seen", "--namespace=team"}).code, 0);
  EXPECT_EQ(Run({"remove", "--sequence=seen", "--namespace=team"}).code, 1);
}

TEST_F(CommandLine, PlanShowsTheNominalCodesOfAKnownShape) {
  const std::vector<std::pair<std::string, std::int64_t>> codes = {
      {"auto", std::int64_t{4} << 30},
      {"fp8", std::int64_t{2} << 30},
      {"kivi2", std::int64_t{1} << 29}};
  for (const auto& [format, bytes] : codes) {
    const Finished finished = RunKvtier({"plan", "--layers=32", "--kv-heads=8", "--head-dim=128",
                                         "--tokens=32768", "--kv-cache-dtype=" + format, "--json"});
    ASSERT_EQ(finished.code, 0) << finished.output;
    EXPECT_EQ(json::parse(finished.output).at("formats")[0].at("nominal_code_bytes"), bytes)
        << format;
  }
}

TEST_F(CommandLine, ABrokenFileIsRefusedBeforeAnythingIsSent) {
  const std::string raw = ReadFile(kSample);
  const std::string truncated = folder_ / "truncated.safetensors";
  std::ofstream(truncated, std::ios::binary) << raw.substr(0, raw.size() / 2);
  const Finished cut = Run({"put", truncated, "--sequence=cut"});
  EXPECT_EQ(cut.code, 2);
  EXPECT_THAT(cut.output, AllOf(HasSubstr("layers.3.v"), HasSubstr("but the file has")));

  std::string lie = raw;
  lie.replace(lie.find("[512,3,64]"), 10, "[999,3,64]");
  const std::string lying = folder_ / "lying.safetensors";
  std::ofstream(lying, std::ios::binary) << lie;
  const Finished lied = Run({"put", lying, "--sequence=lied"});
  EXPECT_EQ(lied.code, 2);
  EXPECT_THAT(lied.output, AllOf(HasSubstr("layers."), HasSubstr("999")));
  EXPECT_EQ(Run({"describe", "--sequence=lied"}).code, 1);
}

TEST_F(CommandLine, TheServersNoIsExit1AndBadUsageIsExit2) {
  const Finished unknown =
      Run({"get", "--sequence=nobody", "--out=" + (folder_ / "x.safetensors")});
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.output, HasSubstr("\"nobody\""));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "x.safetensors"));
  EXPECT_EQ(Run({"put", kSample, "--sequence=f", "--kv-cache-dtype=fp7"}).code, 1);
  EXPECT_EQ(Run({"get", "--sequence=nobody"}).code, 2);
  EXPECT_EQ(Run({"frobnicate"}).code, 2);
  EXPECT_EQ(Run({"plan", "--layers=2000000000", "--kv-heads=1", "--head-dim=64"}).code, 2);
  const Finished bytes = Run({"describe", "--sequence=\xff\xfe"});
  EXPECT_EQ(bytes.code, 2);
  EXPECT_THAT(bytes.output, HasSubstr("not UTF-8"));
}

}  // namespace
}  // namespace kvtier::testing
