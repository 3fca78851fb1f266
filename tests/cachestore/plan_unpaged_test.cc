// The planner's formulas, without pages, headers and slack, against footprints of known models that
// other code worked out from the formats' definitions; windowed layers keep what their window sees.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cachestore/model/format.h"
#include "cachestore/model/plan.h"
#include "cachestore/model/plan_curve.h"
#include "tests/cachestore/model_shapes.h"

namespace kvtier::cachestore {
namespace {

LayerSpec Full(int kv_heads, int head_dim) {
  return {.kv_heads = kv_heads, .k_head_dim = head_dim, .v_head_dim = head_dim};
}

LayerSpec Sliding(int window, int kv_heads, int head_dim) {
  LayerSpec layer = Full(kv_heads, head_dim);
  layer.kind = LayerKind::kSlidingWindow;
  layer.window = window;
  return layer;
}

ModelSpec Layers(int first_count, const LayerSpec& first, int second_count = 0,
                 const LayerSpec& second = {}) {
  ModelSpec spec{.name = "known", .layers = {}};
  spec.layers.assign(static_cast<std::size_t>(first_count), first);
  spec.layers.insert(spec.layers.end(), static_cast<std::size_t>(second_count), second);
  return spec;
}

std::shared_ptr<const Model> Resolve(const ModelSpec& spec, const std::string& format,
                                     const std::vector<std::string>& skip = {}) {
  ModelRequest request;
  request.spec = spec;
  request.policy = {.kv_cache_dtype = format, .skip_layers = skip, .retention = Retention::kWindow};
  return ResolveModel(request, 128).value();
}

double KibPerToken(const Model& model, std::int64_t tokens) {
  return static_cast<double>(UnpagedBytes(model, tokens)) / 1024 / static_cast<double>(tokens);
}

double Ratio(const Model& model, std::int64_t tokens) {
  return static_cast<double>(SourceBytes(model, tokens)) /
         static_cast<double>(UnpagedBytes(model, tokens));
}

// A number as it was printed: equal when it rounds to that. An exact half may go either way.
MATCHER_P(PrintedAs, printed, fmt::format("is printed as {}", printed)) {
  const std::string text = printed;
  const std::size_t point = text.find('.');
  const auto digits = point == std::string::npos ? 0 : text.size() - point - 1;
  return std::abs(arg - std::stod(text)) <=
         0.5000001 * std::pow(10.0, -static_cast<double>(digits));
}

// KiB a token, averaged over the sequence, and the ratio to 16 bit: in the source dtype (and GiB of
// the sequence), fp8, int8_per_token_head, nvfp4, kivi4, kivi2; then kivi2's ratio 127 tokens
// later.
constexpr char kFootprints[] = R"(
llama-3-8b  512    128    0.062 64/2.00   66/1.94    36/3.56    51.0/2.51  37.0/3.46  2.86
llama-3-8b  4096   128    0.5   64/2.00   66/1.94    36/3.56    41.4/3.09  25.6/5.00  4.72
llama-3-8b  32768  128    4.0   64/2.00   66/1.94    36/3.56    40.2/3.19  24.2/5.29  5.25
llama-3-8b  131072 128    16.0  64/2.00   66/1.94    36/3.56    40.0/3.20  24.05/5.32 5.31
qwen2.5-7b  512    56     0.027 28/2.00   28.9/1.94  15.75/3.56 22.3/2.51  16.2/3.46  2.86
qwen2.5-7b  4096   56     0.219 28        28.9       15.75      18.1/3.09  11.2/5.00  4.72
qwen2.5-7b  32768  56     1.75  28        28.9       15.75      17.6/3.19  10.6/5.29  5.25
qwen2.5-7b  131072 56     7.0   28        28.9       15.75      17.5/3.20  10.5/5.32  5.31
llama-3-70b 512    320    0.156 160       165/1.94   90/3.56    127.5/2.51 92.5/3.46  2.86
llama-3-70b 4096   320    1.25  160       165        90         103.4/3.09 64.1/5.00  4.72
llama-3-70b 32768  320    10    160       165        90         100.4/3.19 60.5/5.29  5.25
llama-3-70b 131072 320    40    160       165        90         100.1/3.20 60.1/5.32  5.31
gemma-3-27b 512    496    0.242 248       255.8/1.94 139.5/3.56 197.6/2.51 143.4/3.46 2.86
gemma-3-27b 4096   184    0.719 92        94.9       51.8       62.8/2.93  40.8/4.51  3.93
gemma-3-27b 32768  93     2.906 46.5      48.0       26.2       29.7/3.13  18.2/5.10  4.89
gemma-3-27b 131072 83.2   10.41 41.6      42.9       23.4       26.2/3.18  15.8/5.27  5.20
deepseek-v3 512    68.6   0.034 34.3/2.00 34.6/1.99  -          21.4/3.20  12.9/5.33  2.87
deepseek-v3 32768  68.6   2.14  34.3/2.00 34.6/1.99  -          21.4/3.20  12.9/5.33  5.25
deepseek-v3 131072 68.6   8.58  34.3/2.00 34.6/1.99  -          21.4/3.20  12.9/5.33  -
gpt-oss-20b 512    30     0.015 15/2.00   15.9/1.88  8.44/3.56  13.5/2.22  10.5/2.86  2.19
gpt-oss-20b 4096   24.8   0.097 12.4      13.1/1.88  6.96/3.56  8.25/3.00  5.25/4.71  4.25
gpt-oss-20b 32768  24.1   0.753 12.05     12.8       6.78       7.59/3.17  4.59/5.24  5.16
gpt-oss-20b 131072 24.0   3.003 12.0      12.8       6.76       7.52/3.19  4.52/5.31  5.29
)";

struct Row {
  std::string model;
  std::int64_t tokens = 0;
  std::string source_kib;
  std::string source_gib;
  std::string fp8, int8, nvfp4, kivi4, kivi2;  // "37.0/3.46", "28", or "-"
  std::string later;
};

std::vector<Row> Rows() {
  std::vector<Row> rows;
  std::istringstream lines(kFootprints);
  for (Row row; lines >> row.model >> row.tokens >> row.source_kib >> row.source_gib >> row.fp8 >>
                row.int8 >> row.nvfp4 >> row.kivi4 >> row.kivi2 >> row.later;) {
    rows.push_back(row);
  }
  return rows;
}

const std::map<std::string, ModelSpec> kModels = {
    {"llama-3-8b", Layers(32, Full(8, 128))},
    {"qwen2.5-7b", Layers(28, Full(4, 128))},
    {"llama-3-70b", Layers(80, Full(8, 128))},
    {"gemma-3-27b", Layers(52, Sliding(1024, 16, 128), 10, Full(16, 128))},
    {"gpt-oss-20b", Layers(12, Sliding(128, 8, 64), 12, Full(8, 64))},
    {"deepseek-v3", Layers(61, {.kind = LayerKind::kMla, .kv_heads = 1, .k_head_dim = 576})}};

void ExpectCell(const Row& row, const std::string& format, const std::string& cell) {
  if (cell == "-") return;
  SCOPED_TRACE(fmt::format("{} at {} as {}", row.model, row.tokens, format));
  const auto model = Resolve(kModels.at(row.model), format);
  const std::size_t slash = cell.find('/');
  EXPECT_THAT(KibPerToken(*model, row.tokens), PrintedAs(cell.substr(0, slash)));
  if (slash == std::string::npos) return;
  EXPECT_THAT(Ratio(*model, row.tokens), PrintedAs(cell.substr(slash + 1)));
}

TEST(PlanUnpaged, EqualsFootprintsWorkedOutApart) {
  const std::vector<Row> rows = Rows();
  ASSERT_EQ(rows.size(), 23u);
  for (const Row& row : rows) {
    ExpectCell(row, "auto", row.source_kib + "/1");
    ExpectCell(row, "fp8", row.fp8);
    ExpectCell(row, "int8_per_token_head", row.int8);
    ExpectCell(row, "fp8_per_token_head", row.int8);
    ExpectCell(row, "nvfp4", row.nvfp4);
    ExpectCell(row, "kivi4", row.kivi4);
    ExpectCell(row, "kivi2", row.kivi2);
    SCOPED_TRACE(fmt::format("{} at {}", row.model, row.tokens));
    const ModelSpec& spec = kModels.at(row.model);
    EXPECT_THAT(static_cast<double>(SourceBytes(*Resolve(spec, "auto"), row.tokens)) / (1 << 30),
                PrintedAs(row.source_gib));
    if (row.later == "-") continue;
    EXPECT_THAT(Ratio(*Resolve(spec, "kivi2"), row.tokens + 127), PrintedAs(row.later));
  }
}

// DeepSeek's own FP8 cell.
TEST(PlanUnpaged, SparseMlaCell) {
  const auto model = Resolve(kModels.at("deepseek-v3"), "fp8_ds_mla");
  EXPECT_THAT(KibPerToken(*model, 4096), PrintedAs("39.1"));
  EXPECT_THAT(Ratio(*model, 4096), PrintedAs("1.76"));
}

TEST(PlanUnpaged, SkippedWindowsKeep16Bit) {
  struct Skipped {
    const ModelSpec& spec;
    const char* format;
    std::vector<std::string> ratios;
  };
  const std::vector<std::int64_t> lengths = {512, 4096, 32768, 131072};
  for (const Skipped& row :
       {Skipped{kModels.at("gemma-3-27b"), "kivi2", {"1.13", "1.53", "3.31", "4.55"}},
        Skipped{kModels.at("gemma-3-27b"), "fp8", {"1.09", "1.28", "1.75", "1.92"}},
        Skipped{kModels.at("gpt-oss-20b"), "kivi2", {"2.32", "4.46", "5.20", "5.30"}},
        Skipped{kModels.at("gpt-oss-20b"), "fp8", {"1.67", "1.94", "1.99", "2.00"}}}) {
    const auto model = Resolve(row.spec, row.format, {"sliding_window"});
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      EXPECT_THAT(Ratio(*model, lengths[i]), PrintedAs(row.ratios[i])) << lengths[i];
    }
  }
}

TEST(PlanUnpaged, TheResidualWeighsOnShortSequences) {
  EXPECT_THAT(Ratio(*Resolve(kModels.at("llama-3-8b"), "kivi(2,2,32,32)"), 512), PrintedAs("4.70"));
  EXPECT_THAT(Ratio(*Resolve(kModels.at("llama-3-8b"), "kivi2"), 512), PrintedAs("3.46"));
  EXPECT_THAT(Ratio(*Resolve(kModels.at("llama-3-8b"), "kivi(2,2,32,256)"), 512),
              PrintedAs("2.56"));
}

TEST(PlanUnpaged, Asymptotes) {
  const auto unpaged = [](const std::string& format) {
    return AsymptoteOf(*Resolve(kModels.at("llama-3-8b"), format)).unpaged_ratio;
  };
  EXPECT_DOUBLE_EQ(unpaged("auto"), 1);
  EXPECT_DOUBLE_EQ(unpaged("kivi2"), 16 / 3.0);
  EXPECT_DOUBLE_EQ(unpaged("kivi(2,2,64,128)"), 16 / 2.5);
  EXPECT_DOUBLE_EQ(unpaged("kivi(2,2,128,128)"), 16 / 2.25);
  EXPECT_DOUBLE_EQ(unpaged("kivi4"), 16 / 5.0);
}

}  // namespace
}  // namespace kvtier::cachestore
