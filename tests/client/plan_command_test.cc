// `kvtier plan` as it is typed: what it prints as text, JSON, CSV and drawing, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cli/cli.h"
#include "tests/client/temp_dir.h"
#include "tests/support/seed.h"

namespace kvtier::client {
namespace {

using kvtier::testing::SeededRandom;
using kvtier::testing::TempDir;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

struct Answer {
  int code = -1;
  std::string out;
  std::string err;
};

Answer Plan(std::vector<std::string> arguments) {
  std::ostringstream out, err;
  Terminal terminal{.out = out, .err = err, .err_is_tty = false, .now = absl::Now};
  arguments.insert(arguments.begin(), "plan");
  const int code = RunCli(std::move(arguments), terminal);
  return {code, out.str(), err.str()};
}

json PlanJson(std::vector<std::string> arguments) {
  arguments.emplace_back("--json");
  const Answer answer = Plan(std::move(arguments));
  EXPECT_EQ(answer.code, 0) << answer.err;
  return json::parse(answer.out, nullptr, false);
}

std::string Config(const std::string& name) {
  return KVTIER_TEST_DATA "/configs/" + name + ".json";
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::vector<std::string> kModels = {"deepseek-v3", "gemma-3-270m", "gemma-3-27b",
                                          "gpt-oss-20b", "llama-3-70b",  "llama-3-8b",
                                          "qwen2.5-7b",  "smollm2-135m"};
const std::vector<std::string> kShape = {"--layers=4", "--kv-heads=2", "--head-dim=64"};

std::vector<std::string> Shape(const std::vector<std::string>& more) {
  std::vector<std::string> flags = kShape;
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

TEST(PlanCommand, ShowsTheFormulaWithItsNumbers) {
  EXPECT_THAT(Plan({"--model=" + Config("llama-3-8b")}).out,
              HasSubstr("M_KV = 2 * L * B * T * H_KV * d * b\n"
                        "     = 2 * 32 * 1 * 32,768 * 8 * 128 * 2\n"
                        "     = 4,294,967,296 bytes = 4.00 GiB\n"));
  EXPECT_THAT(Plan({"--model=" + Config("deepseek-v3"), "--tokens=1000", "--requests=3"}).out,
              HasSubstr("M_KV = L * B * T * H_KV * d * b\n"
                        "     = 61 * 3 * 1,000 * 1 * 576 * 2\n"
                        "     = 210,816,000 bytes"));
  EXPECT_THAT(Plan({"--model=" + Config("gemma-3-27b"), "--tokens=4096", "--retention=window"}).out,
              HasSubstr("M_KV = B * b * sum of L * T * H_KV * (d_K + d_V)\n"
                        "     = 1 * 2 * (52 * 1,024 * 16 * (128 + 128)\n"
                        "              + 10 * 4,096 * 16 * (128 + 128))\n"
                        "     = 771,751,936 bytes"));
  const json plan = PlanJson({"--model=" + Config("llama-3-8b"), "--requests=2"});
  EXPECT_EQ(plan.at("m_kv").at("bytes"), std::int64_t{8} << 30);
  EXPECT_EQ(plan.at("formats").at(0).at("source_bytes"), std::int64_t{8} << 30);
}

// However the weights are quantized, the cache is planned as that of the bf16 model.
TEST(PlanCommand, TheWeightsQuantizationChangesNoFigure) {
  const TempDir dir;
  json config = json::parse(ReadFile(Config("llama-3-8b")));
  const std::string plain = Plan({"--model=" + dir.Write("m.json", config.dump())}).out;
  for (const char* quantization :
       {R"({"quant_method":"awq","bits":4,"group_size":128})",
        R"({"quant_method":"gptq","bits":4,"group_size":128,"desc_act":false})",
        R"({"quant_method":"fp8","weight_block_size":[128,128]})"}) {
    config["quantization_config"] = json::parse(quantization);
    EXPECT_EQ(Plan({"--model=" + dir.Write("m.json", config.dump())}).out, plain);
  }
}

TEST(PlanCommand, LinesAreAtMostATerminalWide) {
  for (const std::string& model : kModels) {
    for (const std::string retention : {"all", "window"}) {
      const Answer answer = Plan({"--model=" + Config(model), "--memory=640GiB", "--tokens=120000",
                                  "--requests=3", "--retention=" + retention});
      ASSERT_EQ(answer.code, 0) << answer.err;
      for (const absl::string_view line : absl::StrSplit(answer.out, '\n'))
        EXPECT_LE(line.size(), 100u) << line;
    }
  }
}

TEST(PlanCommand, AShapeThatAFormatRefusesIsARowWithItsReason) {
  const std::vector<std::string> shape = {"--layers=2", "--kv-heads=2", "--head-dim=100"};
  const Answer all = Plan(shape);
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.out,
              HasSubstr("refused: spec.layers[0].k_head_dim is 100; q8_0 needs a multiple"));
  EXPECT_THAT(all.out, HasSubstr("\nint8_per_token_head"));
  std::vector<std::string> named = shape;
  named.insert(named.end(), {"--kv-cache-dtype=auto", "--kv-cache-dtype=q8_0"});
  const Answer asked = Plan(named);
  EXPECT_EQ(asked.code, 2);
  EXPECT_THAT(asked.err, HasSubstr("k_head_dim is 100; q8_0 needs a multiple of 32"));
  EXPECT_THAT(asked.out, IsEmpty());
  const json plan = PlanJson(shape);
  const auto refused =
      std::find_if(plan.at("formats").begin(), plan.at("formats").end(),
                   [](const json& format) { return format.at("kv_cache_dtype") == "q8_0"; });
  ASSERT_NE(refused, plan.at("formats").end());
  EXPECT_THAT(refused->at("refused").get<std::string>(), HasSubstr("multiple of 32"));
}

TEST(PlanCommand, AllFormatsRefusedIsARefusal) {
  const Answer answer = Plan(Shape({"--kv-cache-dtype-skip-layers=4"}));
  EXPECT_EQ(answer.code, 2);
  EXPECT_THAT(answer.err,
              HasSubstr("kv_cache_dtype_skip_layers has \"4\"; want layer indices 0 to 3"));
}

TEST(PlanCommand, ShapesByFlags) {
  const json mla = PlanJson({"--layers=2", "--kv-heads=1", "--head-dim=576", "--v-head-dim=0",
                             "--tokens=100", "--kv-cache-dtype=auto"});
  EXPECT_EQ(mla.at("m_kv").at("bytes"), 2 * 576 * 2 * 100);
  const json uneven = PlanJson({"--layers=2", "--kv-heads=3", "--head-dim=192", "--v-head-dim=128",
                                "--tokens=100", "--kv-cache-dtype=auto", "--dtype=float32"});
  EXPECT_EQ(uneven.at("m_kv").at("bytes"), 2 * 3 * (192 + 128) * 4 * 100);
  const json windowed = PlanJson(Shape({"--window=16", "--full-every=2", "--tokens=100",
                                        "--retention=window", "--kv-cache-dtype=auto"}));
  EXPECT_EQ(windowed.at("m_kv").at("bytes"), (2 * 16 + 2 * 100) * 2 * 128 * 2);
  EXPECT_EQ(windowed.at("layer_groups").at(0).at("window"), 16);
  EXPECT_EQ(windowed.at("layer_groups").at(0).at("tokens_kept"), 16);
}

TEST(PlanCommand, WhatFitsIsPerRequest) {
  const auto tokens = [](const std::string& requests, const std::string& memory) {
    return PlanJson(
               Shape({"--kv-cache-dtype=auto", "--requests=" + requests, "--memory=" + memory}))
        .at("formats")
        .at(0)
        .at("tokens_that_fit")
        .get<std::int64_t>();
  };
  EXPECT_GT(tokens("1", "64MiB"), 0);
  EXPECT_EQ(tokens("3", "192MiB"), tokens("1", "64MiB"));
  const json endless = PlanJson(Shape({"--window=100", "--retention=window", "--memory=1GiB"}));
  EXPECT_TRUE(endless.at("formats").at(0).at("tokens_that_fit").is_null());
  EXPECT_THAT(Plan(Shape({"--window=100", "--retention=window", "--memory=1GiB"})).out,
              HasSubstr(" any "));
}

TEST(PlanCommand, PhasesAndAsymptote) {
  const json at_512 =
      PlanJson({"--model=" + Config("llama-3-8b"), "--tokens=512", "--kv-cache-dtype=kivi2"})
          .at("formats")
          .at(0);
  const json& phases = at_512.at("phases");
  EXPECT_EQ(phases.at("tokens"), 128);
  // 127 tokens of K and 128 of V.
  EXPECT_EQ(phases.at("most_residual_bytes"), 32 * 8 * 128 * (127 + 128) * 2);
  EXPECT_LT(phases.at("least_ratio"), phases.at("mean_ratio"));
  EXPECT_LT(phases.at("mean_ratio"), phases.at("most_ratio"));
  EXPECT_LT(at_512.at("compression_ratio"), at_512.at("asymptotic").at("compression_ratio"));
  EXPECT_NEAR(at_512.at("asymptotic").at("unpaged_ratio").get<double>(), 16.0 / 3, 1e-12);
  EXPECT_EQ(at_512.at("unpaged_bytes"), 32 * 8 * (512 * 48 + 384 * 48 + 128 * 256));
}

TEST(PlanCommand, CsvHasARowForEachFormatAndLength) {
  const Answer answer = Plan({"--model=" + Config("gemma-3-270m"), "--csv", "--kv-cache-dtype=auto",
                              "--kv-cache-dtype=kivi(2,2,32,64)"});
  ASSERT_EQ(answer.code, 0) << answer.err;
  std::vector<std::string> lines = absl::StrSplit(answer.out, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 1u + 2 * 7);  // 512 to 32,768
  EXPECT_THAT(lines[0], StartsWith("model,kv_cache_dtype,page_tokens,retention,tokens,requests,"));
  EXPECT_THAT(lines[1], StartsWith("gemma-3-270m,auto,128,all,512,1,9437184,"));
  EXPECT_THAT(lines[7], StartsWith("gemma-3-270m,auto,128,all,32768,1,"));
  EXPECT_THAT(lines[8], StartsWith("gemma-3-270m,\"kivi(2,2,32,64)\",128,all,512,1,"));
  const std::string refused =
      Plan({"--layers=1", "--kv-heads=1", "--head-dim=100", "--csv", "--context-lengths=7"}).out;
  for (const absl::string_view line : absl::StrSplit(refused, '\n', absl::SkipEmpty())) {
    EXPECT_EQ(std::count(line.begin(), line.end(), ','), 19) << line;
  }
  EXPECT_THAT(refused, HasSubstr("\nmodel,q8_0,,all,,1,"));
}

TEST(PlanCommand, SparseMlaIsPlannedInItsEnginesFormat) {
  const TempDir dir;
  json config = json::parse(ReadFile(Config("deepseek-v3")));
  config["model_type"] = "deepseek_v32";
  config["index_head_dim"] = 128;
  const std::string path = dir.Write("deepseek-v32.json", config.dump());
  const Answer text = Plan({"--model=" + path});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("fp8_ds_mla"), HasSubstr("sparse indexer")));
  const json plan = PlanJson({"--model=" + path});
  EXPECT_EQ(plan.at("formats").at(0).at("kv_cache_dtype"), "fp8_ds_mla");
  EXPECT_EQ(plan.at("notices").size(), 2u);
  EXPECT_EQ(PlanJson({"--model=" + path, "--kv-cache-dtype=bfloat16"})
                .at("formats")
                .at(0)
                .at("stored_bytes"),
            PlanJson({"--model=" + Config("deepseek-v3"), "--kv-cache-dtype=auto"})
                .at("formats")
                .at(0)
                .at("stored_bytes"));
}

TEST(PlanCommand, DrawsThePlot) {
  const TempDir dir;
  for (const auto& [name, start] : {std::pair<std::string, std::string>{"ratio.svg", "<?xml"},
                                    {"it's \"here\".png", "\x89PNG"}}) {
    const std::string path = dir.File(name);
    const Answer answer = Plan({"--model=" + Config("gemma-3-270m"), "--plot=" + path});
    ASSERT_EQ(answer.code, 0) << answer.err;
    const std::string drawing = ReadFile(path);
    EXPECT_THAT(drawing.substr(0, 8), StartsWith(start));
    if (!name.ends_with("svg")) continue;
    for (const char* text : {"auto, float16, bfloat16", "kivi2", "gemma-3-270m: bfloat16 bytes"}) {
      EXPECT_NE(drawing.find(text), std::string::npos) << text;
    }
  }
}

struct BadUsage {
  std::vector<std::string> flags;
  std::string message;
};

TEST(PlanCommand, RefusesByTheFlagsName) {
  const std::vector<BadUsage> refused = {
      {{}, "--layers, --kv-heads and --head-dim, or --model, are needed"},
      {{"--layers=2", "--kv-heads=0", "--head-dim=64"},
       "--kv-heads: Value 0 not in range 1 to 1024"},
      {{"--layers=2", "--kv-heads=1025", "--head-dim=64"}, "--kv-heads"},
      {{"--layers=2", "--kv-heads=1", "--head-dim=99999999999"}, "--head-dim"},
      {Shape({"--v-head-dim=-1"}), "--v-head-dim"},
      {Shape({"--window=0"}), "--window"},
      {Shape({"--window=10", "--v-head-dim=0"}), "--window is 10 with --v-head-dim 0"},
      {Shape({"--full-every=2"}), "--window"},
      {Shape({"--tokens=0"}), "--tokens"},
      {Shape({"--tokens=99999999999999999999"}), "--tokens"},
      {Shape({"--requests=0"}), "--requests"},
      {Shape({"--memory=1ZiB"}), "--memory"},
      {Shape({"--memory=0"}), "--memory"},
      {Shape({"--page-tokens=100"}), "page_tokens is 100; want 0, or a multiple of 16"},
      {Shape({"--dtype=int8"}), "--dtype"},
      {Shape({"--retention=none"}), "--retention"},
      {Shape({"--context-lengths=512,x"}), "--context-lengths"},
      {Shape({"--context-lengths=0"}), "--context-lengths"},
      {Shape({"--plot=ratio.pdf"}), "--plot is ratio.pdf; want a name that ends in .svg or .png"},
      {Shape({"--plot=/nonexistent/ratio.svg"}),
       "--plot: /nonexistent/ratio.svg cannot be written"},
      {Shape({"--csv", "--json"}), "--csv"},
      {Shape({"--kv-cache-dtype=fp7"}), "kv_cache_dtype is \"fp7\"; want one of auto"},
      {Shape({"--kv-cache-dtype=kivi(3,2,32,128)"}), "kivi k_bits is 3; want 2, 4 or 8"},
      {Shape({"--model=x.json"}), "--model"},
      {{"--model=/nonexistent.json"}, "/nonexistent.json cannot be read as a file"},
  };
  for (const BadUsage& usage : refused) {
    const Answer answer = Plan(usage.flags);
    EXPECT_EQ(answer.code, 2) << usage.message;
    EXPECT_THAT(answer.err, HasSubstr(usage.message));
    EXPECT_THAT(answer.out, IsEmpty());
  }
}

// The largest that flags and config allow is planned or refused, never wrapped around.
TEST(PlanCommand, HugeNumbersDoNotOverflow) {
  const std::vector<std::string> huge = {"--layers=64", "--kv-heads=1024", "--head-dim=1024",
                                         "--dtype=float32", "--tokens=67108864"};
  std::vector<std::string> flags = huge;
  flags.insert(flags.end(), {"--kv-cache-dtype=auto", "--memory=1EiB"});
  const json plan = PlanJson(flags).at("formats").at(0);
  EXPECT_EQ(plan.at("source_bytes").get<std::int64_t>(), std::int64_t{1} << 55);
  EXPECT_GE(plan.at("stored_bytes").get<std::int64_t>(), std::int64_t{1} << 55);
  EXPECT_GT(plan.at("tokens_that_fit").get<std::int64_t>(), 67108864);
  flags.emplace_back("--requests=1073741824");
  const Answer answer = Plan(flags);
  EXPECT_EQ(answer.code, 2);
  EXPECT_THAT(answer.err, HasSubstr("--requests is 1073741824"));
  const TempDir dir;
  json config = json::parse(ReadFile(Config("llama-3-8b")));
  config["max_position_embeddings"] = std::int64_t{1} << 40;
  EXPECT_EQ(Plan({"--csv", "--model=" + dir.Write("long.json", config.dump())}).code, 0);
}

// Configs with bytes changed, cut or doubled: planned, or refused with a reason.
TEST(PlanCommand, ABrokenConfigIsAnswered) {
  SeededRandom random;
  const TempDir dir;
  int planned = 0;
  for (int i = 0; i < 150; ++i) {
    std::string text = ReadFile(Config(random.Pick(kModels)));
    for (std::int64_t change = random.Between(1, 6); change > 0; --change) {
      const auto at = static_cast<std::size_t>(random.Between(0, std::ssize(text) - 1));
      switch (random.Between(0, 3)) {
        case 0:
          text[at] = static_cast<char>(random.Between(0, 255));
          break;
        case 1:
          text.insert(at, std::string(1, "0123456789-.eE\"[]{},:null"[random.Between(0, 24)]));
          break;
        case 2:
          text.insert(at, "9999999999999999999");
          break;
        default:
          text.erase(at, static_cast<std::size_t>(random.Between(1, 20)));
      }
    }
    const Answer answer = Plan(
        {"--kv-cache-dtype=kivi2", "--tokens=100000", "--model=" + dir.Write("broken.json", text)});
    if (answer.code == 0) {
      ++planned;
      EXPECT_THAT(answer.out, Not(ContainsRegex(" -[0-9]")));  // no negative figure
      continue;
    }
    EXPECT_EQ(answer.code, 2) << text;
    EXPECT_THAT(answer.err, StartsWith("kvtier plan: ")) << text;
  }
  EXPECT_LT(planned, 150);
}

}  // namespace
}  // namespace kvtier::client
