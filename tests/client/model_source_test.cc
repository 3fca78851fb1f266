#include "client/model_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/model_config.h"
#include "tests/client/temp_dir.h"
#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::StatusIs;
using kvtier::testing::TempDir;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Shape {
  std::uint32_t kv_heads;
  std::uint32_t k_head_dim;
  std::uint32_t v_head_dim;
};

struct KnownModel {
  const char* name;
  int layers;
  Shape shape;
  int sliding;  // layers with a window
  std::uint32_t window;
  std::uint64_t bytes_per_token;  // 16 bit, all layers
};

int CountKind(const v1::ModelSpec& spec, v1::LayerKind kind) {
  return static_cast<int>(
      std::count_if(spec.layers().begin(), spec.layers().end(),
                    [kind](const v1::LayerSpec& layer) { return layer.kind() == kind; }));
}

std::uint64_t BytesPerToken(const v1::ModelSpec& spec) {
  std::uint64_t values = 0;
  for (const v1::LayerSpec& layer : spec.layers()) {
    values += std::uint64_t{layer.kv_heads()} * (layer.k_head_dim() + layer.v_head_dim());
  }
  return 2 * values;
}

TEST(ModelSource, KnowsTheCachesOfWellKnownModels) {
  const std::vector<KnownModel> models = {
      {"llama-3-8b", 32, {8, 128, 128}, 0, 0, 128 << 10},
      {"llama-3-70b", 80, {8, 128, 128}, 0, 0, 320 << 10},
      {"qwen2.5-7b", 28, {4, 128, 128}, 0, 0, 56 << 10},
      {"smollm2-135m", 30, {3, 64, 64}, 0, 0, 23'040},
      {"gemma-3-27b", 62, {16, 128, 128}, 52, 1024, 496 << 10},
      {"gemma-3-270m", 18, {1, 256, 256}, 15, 512, 18 << 10},
      {"gpt-oss-20b", 24, {8, 64, 64}, 12, 128, 48 << 10},
      {"deepseek-v3", 61, {1, 576, 0}, 0, 0, 61 * 1152},
  };
  for (const KnownModel& model : models) {
    SCOPED_TRACE(model.name);
    const auto config =
        ReadModelConfig(std::string(KVTIER_TEST_DATA "/configs/") + model.name + ".json");
    ASSERT_THAT(config, IsOk());
    EXPECT_EQ(config->engine_dtype, "auto");
    EXPECT_THAT(config->notices, IsEmpty());
    const v1::ModelSpec* spec = &config->spec;
    EXPECT_EQ(spec->name(), model.name);
    EXPECT_EQ(spec->source_dtype(), v1::DTYPE_BF16);
    EXPECT_EQ(spec->k_rope(), v1::ROPE_STATE_AFTER);
    ASSERT_EQ(spec->layers_size(), model.layers);
    EXPECT_EQ(CountKind(*spec, v1::LAYER_KIND_SLIDING_WINDOW), model.sliding);
    EXPECT_EQ(BytesPerToken(*spec), model.bytes_per_token);
    for (const v1::LayerSpec& layer : spec->layers()) {
      EXPECT_EQ(layer.kv_heads(), model.shape.kv_heads);
      EXPECT_EQ(layer.k_head_dim(), model.shape.k_head_dim);
      EXPECT_EQ(layer.v_head_dim(), model.shape.v_head_dim);
      EXPECT_EQ(layer.window(), layer.kind() == v1::LAYER_KIND_SLIDING_WINDOW ? model.window : 0);
      EXPECT_EQ(layer.kind() == v1::LAYER_KIND_MLA, model.shape.v_head_dim == 0);
    }
  }
}

// Places of the windowed layers: Gemma's every sixth is full, gpt-oss alternates from a windowed
// one.
TEST(ModelSource, PutsWindowsWhereTransformersDoes) {
  const auto gemma = ReadModelConfig(KVTIER_TEST_DATA "/configs/gemma-3-27b.json");
  const auto oss = ReadModelConfig(KVTIER_TEST_DATA "/configs/gpt-oss-20b.json");
  ASSERT_THAT(gemma, IsOk());
  ASSERT_THAT(oss, IsOk());
  for (int i = 0; i < gemma->spec.layers_size(); ++i) {
    EXPECT_EQ(gemma->spec.layers(i).kind() == v1::LAYER_KIND_FULL, i % 6 == 5) << i;
  }
  for (int i = 0; i < oss->spec.layers_size(); ++i) {
    EXPECT_EQ(oss->spec.layers(i).kind() == v1::LAYER_KIND_FULL, i % 2 == 1) << i;
  }
}

constexpr char kBase[] =
    R"("num_hidden_layers":4,"num_attention_heads":8,"hidden_size":64,"torch_dtype":"float16")";

absl::StatusOr<v1::ModelSpec> SpecOf(const std::string& text) {
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  if (!config.ok()) return config.status();
  return config->spec;
}

std::string ConfigWith(const std::string& fields) {
  return "{" + std::string(kBase) + (fields.empty() ? "" : "," + fields) + "}";
}

absl::StatusOr<v1::ModelSpec> With(const std::string& fields) { return SpecOf(ConfigWith(fields)); }

// The kinds of the layers, one letter each: f, s.
std::string Kinds(const absl::StatusOr<v1::ModelSpec>& spec) {
  if (!spec.ok()) return std::string(spec.status().message());
  std::string kinds;
  for (const v1::LayerSpec& layer : spec->layers()) {
    kinds += layer.kind() == v1::LAYER_KIND_SLIDING_WINDOW ? 's' : 'f';
  }
  return kinds;
}

TEST(ModelConfig, HeadsAndDimsHaveTransformersDefaults) {
  const auto mha = With("");
  ASSERT_THAT(mha, IsOk());
  EXPECT_EQ(mha->layers(0).kv_heads(), 8u);
  EXPECT_EQ(mha->layers(0).k_head_dim(), 8u);
  EXPECT_EQ(mha->source_dtype(), v1::DTYPE_FP16);
  const auto mqa = With(R"("num_key_value_heads":1,"head_dim":32,"v_head_dim":16)");
  ASSERT_THAT(mqa, IsOk());
  EXPECT_EQ(mqa->layers(3).kv_heads(), 1u);
  EXPECT_EQ(mqa->layers(3).k_head_dim(), 32u);
  EXPECT_EQ(mqa->layers(3).v_head_dim(), 16u);
  const auto null = With(R"("num_key_value_heads":null,"head_dim":null,"kv_lora_rank":null)");
  ASSERT_THAT(null, IsOk());
  EXPECT_EQ(null->layers(0).kv_heads(), 8u);
}

TEST(ModelConfig, WindowsFollowTheFieldThatRules) {
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"sliding_window_pattern":2)")), "sfsf");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"sliding_window_pattern":1)")), "ffff");
  EXPECT_EQ(Kinds(With(R"("sliding_window":null,"sliding_window_pattern":2)")), "ffff");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"use_sliding_window":false)")), "ffff");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"use_sliding_window":true,"max_window_layers":3)")),
            "fffs");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"use_sliding_window":true,"max_window_layers":9)")),
            "ffff");
  EXPECT_EQ(
      Kinds(With(R"("sliding_window":16,"sliding_window_pattern":2,"layer_types":)"
                 R"(["full_attention","full_attention","sliding_attention","full_attention"])")),
      "ffsf");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"model_type":"mistral")")), "ssss");
  EXPECT_EQ(Kinds(With(R"("sliding_window":null,"model_type":"mistral")")), "ffff");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"model_type":"qwen2")")), "ffff");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"model_type":"gemma2")")), "sfsf");
  EXPECT_EQ(Kinds(With(R"("sliding_window":16,"model_type":"cohere2")")), "sssf");
}

TEST(ModelConfig, DtypeMayStandInEitherPlace) {
  const std::string text = R"({"text_config":{"num_hidden_layers":1,"num_attention_heads":2,)"
                           R"("head_dim":8%s},"dtype":"bfloat16"})";
  const auto with = [&text](const std::string& inner) {
    std::string config = text;
    return SpecOf(config.replace(config.find("%s"), 2, inner));
  };
  EXPECT_EQ(with("")->source_dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(with(R"(,"torch_dtype":"torch.float32")")->source_dtype(), v1::DTYPE_FP32);
  const auto none = SpecOf(R"({"num_hidden_layers":1,"num_attention_heads":2,"head_dim":8})");
  ASSERT_THAT(none, IsOk());
  EXPECT_EQ(none->source_dtype(), v1::DTYPE_UNSPECIFIED);
}

// What the weights' quantization says must never reach the cache: AutoAWQ, GPTQ, DeepSeek's FP8,
// compressed-tensors, bitsandbytes.
TEST(ModelConfig, TheWeightsQuantizationChangesNothing) {
  const auto plain = ParseModelConfig(ConfigWith(""));
  ASSERT_THAT(plain, IsOk());
  for (const std::string quantization :
       {R"({"quant_method":"awq","bits":4,"group_size":128,"version":"gemm","zero_point":true})",
        R"({"quant_method":"gptq","bits":4,"group_size":128,"desc_act":false,"sym":true})",
        R"({"quant_method":"fp8","fmt":"e4m3","activation_scheme":"dynamic",)"
        R"("weight_block_size":[128,128]})",
        R"({"quant_method":"compressed-tensors","kv_cache_scheme":null,)"
        R"("config_groups":{"group_0":{"weights":{"num_bits":8,"type":"float"}}}})",
        R"({"quant_method":"bitsandbytes","load_in_4bit":true})", R"("w8a8")"}) {
    SCOPED_TRACE(quantization);
    const auto quantized = ParseModelConfig(ConfigWith(R"("quantization_config":)" + quantization));
    ASSERT_THAT(quantized, IsOk());
    EXPECT_EQ(quantized->spec.SerializeAsString(), plain->spec.SerializeAsString());
    EXPECT_EQ(quantized->engine_dtype, "auto");
    EXPECT_THAT(quantized->notices, IsEmpty());
  }
}

// A scheme for the cache itself is told, and no more: its scales are read where they are.
TEST(ModelConfig, ACacheSchemeIsTold) {
  const auto config = ParseModelConfig(
      ConfigWith(R"("quantization_config":{"quant_method":"compressed-tensors",)"
                 R"("kv_cache_scheme":{"num_bits":8,"type":"float","strategy":"tensor"}})"));
  ASSERT_THAT(config, IsOk());
  EXPECT_EQ(config->engine_dtype, "auto");
  EXPECT_EQ(config->spec.SerializeAsString(), With("")->SerializeAsString());
  EXPECT_THAT(config->notices, ElementsAre(HasSubstr("kv_cache_scheme")));
}

TEST(ModelConfig, TellsTheLongestContext) {
  EXPECT_EQ(ParseModelConfig(ConfigWith(""))->max_position_embeddings, 0u);
  EXPECT_EQ(
      ParseModelConfig(ConfigWith(R"("max_position_embeddings":8192)"))->max_position_embeddings,
      8192u);
  EXPECT_EQ(ReadModelConfig(KVTIER_TEST_DATA "/configs/gemma-3-27b.json")->max_position_embeddings,
            131072u);
}

// DeepSeek-V3.2: its MLA layers are taken, engines keep them as FP8, its indexer is not stored.
TEST(ModelConfig, SparseMlaIsAutoByItsEnginesFormat) {
  const std::string mla = R"("kv_lora_rank":512,"qk_rope_head_dim":64)";
  for (const std::string mark :
       {R"("model_type":"deepseek_v32","index_head_dim":128,"index_topk":2048)",
        R"("model_type":"deepseek_v32")", R"("index_head_dim":128)"}) {
    SCOPED_TRACE(mark);
    const auto config = ParseModelConfig(ConfigWith(mla + "," + mark));
    ASSERT_THAT(config, IsOk());
    EXPECT_EQ(config->spec.layers(0).kind(), v1::LAYER_KIND_MLA);
    EXPECT_EQ(config->spec.layers(0).k_head_dim(), 576u);
    EXPECT_EQ(ResolveAuto(*config, "auto"), "fp8_ds_mla");
    EXPECT_EQ(ResolveAuto(*config, ""), "fp8_ds_mla");
    EXPECT_EQ(ResolveAuto(*config, "bfloat16"), "bfloat16");
    EXPECT_THAT(config->notices,
                ElementsAre(HasSubstr("auto is fp8_ds_mla"), HasSubstr("sparse indexer")));
  }
  const auto plain = ParseModelConfig(ConfigWith(mla));
  ASSERT_THAT(plain, IsOk());
  EXPECT_EQ(ResolveAuto(*plain, "auto"), "auto");
  EXPECT_THAT(plain->notices, IsEmpty());
}

struct Refused {
  std::string fields;
  std::string message;
};

TEST(ModelConfig, DeepNestingIsRefusedNotRepeated) {
  std::string deep(100'000, '[');
  deep += std::string(deep.size(), ']');
  EXPECT_THAT(ParseModelConfig(R"({"num_hidden_layers":)" + deep + "}"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("num_hidden_layers is deeply nested")));
}

TEST(ModelConfig, RefusesWhatItDoesNotUnderstandByField) {
  const std::vector<Refused> refused = {
      {R"("layers_block_type":["mamba"])", "layers_block_type is [\"mamba\"]"},
      {R"("num_kv_shared_layers":2)", "num_kv_shared_layers is 2"},
      {R"("multi_query":true)", "multi_query is true"},
      {R"("is_encoder_decoder":true)", "is_encoder_decoder is true"},
      {R"("num_key_value_heads":[1,2,1,2])", "num_key_value_heads is [1,2,1,2]"},
      {R"("num_key_value_heads":3)", "num_key_value_heads is 3; it must divide"},
      {R"("num_key_value_heads":0)", "num_key_value_heads is 0"},
      {R"("num_key_value_heads":-1)", "num_key_value_heads is -1"},
      {R"("head_dim":1.5)", "head_dim is 1.5"},
      {R"("head_dim":"x")", "head_dim is \"x\""},
      {R"("layer_types":["full_attention"])", "layer_types has 1 entries; num_hidden_layers is 4"},
      {R"("layer_types":["full_attention","linear_attention","full_attention","full_attention"])",
       "layer_types[1] is \"linear_attention\""},
      {R"("layer_types":["full_attention","full_attention","full_attention","sliding_attention"])",
       "sliding_window is missing"},
      {R"("sliding_window":16)", "sliding_window is 16, but neither"},
      {R"("sliding_window":16,"sliding_window_pattern":"LLLG")",
       "sliding_window_pattern is \"LLLG\""},
      {R"("sliding_window":16,"use_sliding_window":true)", "max_window_layers is missing"},
      {R"("model_type":"gemma2")", "sliding_window is missing"},
      {R"("kv_lora_rank":512)", "qk_rope_head_dim is missing"},
      {R"("kv_lora_rank":512,"qk_rope_head_dim":64,"sliding_window":16,"sliding_window_pattern":2)",
       "kv_lora_rank is set"},
      {R"("text_config":[])", "text_config is not an object"},
      {R"("index_head_dim":128)",
       "index_head_dim is 128; an indexer is supported beside MLA alone"},
      {R"("model_type":"deepseek_v32")", "kv_lora_rank is missing"},
      {R"("kv_lora_rank":512,"qk_rope_head_dim":64,"index_head_dim":"x")",
       "index_head_dim is \"x\""},
      {R"("max_position_embeddings":-1)", "max_position_embeddings is -1"},
      {R"("max_position_embeddings":1e30)", "max_position_embeddings is 1e+30"},
  };
  for (const Refused& config : refused) {
    EXPECT_THAT(With(config.fields),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(config.message)));
  }
}

TEST(ModelConfig, RefusesWhatIsMissingByField) {
  EXPECT_THAT(SpecOf("{}"), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("num_hidden_layers is missing")));
  EXPECT_THAT(
      SpecOf(R"({"num_hidden_layers":2})"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("num_attention_heads is missing")));
  EXPECT_THAT(SpecOf(R"({"num_hidden_layers":2,"num_attention_heads":3,"hidden_size":64})"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("head_dim is missing")));
  EXPECT_THAT(
      SpecOf(R"({"num_hidden_layers":1,"num_attention_heads":1,"head_dim":8,"dtype":"int8"})"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dtype is int8")));
  EXPECT_THAT(SpecOf(R"({"num_hidden_layers":100000000000})"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("100000000000")));
  EXPECT_THAT(SpecOf("{"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not a JSON object")));
}

TEST(ModelSource, NamesAModelAfterItsFileOrFolder) {
  const TempDir dir;
  const std::string config = R"({"num_hidden_layers":1,"num_attention_heads":1,"head_dim":8})";
  std::filesystem::create_directory(dir.File("tiny-model"));
  const auto in_folder = ReadModelConfig(dir.Write("tiny-model/config.json", config));
  ASSERT_THAT(in_folder, IsOk());
  EXPECT_EQ(in_folder->spec.name(), "tiny-model");
  const auto by_file = ReadModelConfig(dir.Write("small-0.5b.json", config));
  ASSERT_THAT(by_file, IsOk());
  EXPECT_EQ(by_file->spec.name(), "small-0.5b");
}

TEST(ModelSource, SaysWhichFileWasRefused) {
  const TempDir dir;
  EXPECT_THAT(ReadModelConfig(dir.File("missing.json")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("missing.json")));
  EXPECT_THAT(ReadModelConfig(dir.File("")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cannot be read")));
  EXPECT_THAT(
      ReadModelConfig(dir.Write("bad.json", "{}")),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("bad.json: num_hidden_layers")));
}

TEST(ModelSource, TakesTheSpecFromAFilesShapes) {
  const auto file = KvFile::Open(KVTIER_TEST_DATA "/smollm2-135m-kv.safetensors");
  ASSERT_THAT(file, IsOk());
  const v1::ModelSpec spec = SpecFromKvFile(*file);
  EXPECT_EQ(spec.name(), "smollm2-135m-kv");
  EXPECT_EQ(spec.source_dtype(), v1::DTYPE_BF16);
  ASSERT_EQ(spec.layers_size(), 8);
  EXPECT_EQ(CountKind(spec, v1::LAYER_KIND_FULL), 8);
  EXPECT_EQ(BytesPerToken(spec), 8u * 3 * 128 * 2);
}

TEST(ModelSource, HoldsAFileAgainstItsModel) {
  const auto file = KvFile::Open(KVTIER_TEST_DATA "/smollm2-135m-kv.safetensors");
  ASSERT_THAT(file, IsOk());
  const v1::ModelSpec right = SpecFromKvFile(*file);
  const auto match = [&](void (*change)(v1::ModelSpec&)) {
    v1::ModelSpec spec = right;
    change(spec);
    return MatchSpec(*file, spec);
  };
  EXPECT_THAT(match([](v1::ModelSpec&) {}), IsOk());
  EXPECT_THAT(match([](v1::ModelSpec& spec) { spec.add_layers(); }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("number of layers is 8 in the file, but 9")));
  EXPECT_THAT(match([](v1::ModelSpec& spec) { spec.mutable_layers(2)->set_kv_heads(4); }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layer 2: KV heads is 3")));
  EXPECT_THAT(match([](v1::ModelSpec& spec) { spec.mutable_layers(0)->set_v_head_dim(32); }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layer 0: V head dim is 64")));
  EXPECT_THAT(match([](v1::ModelSpec& spec) { spec.set_source_dtype(v1::DTYPE_FP16); }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("bfloat16, but the model's")));
  v1::ModelSpec without_dtype = right;
  without_dtype.clear_source_dtype();
  EXPECT_THAT(MatchSpec(*file, without_dtype), IsOk());
  EXPECT_EQ(without_dtype.source_dtype(), v1::DTYPE_BF16);
}

}  // namespace
}  // namespace kvtier::client
