#include "client/checkpoint_scales.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "client/scale_names.h"
#include "tests/cachestore/model_shapes.h"
#include "tests/client/checkpoint.h"
#include "tests/client/temp_dir.h"
#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::CheckpointConfigText;
using kvtier::testing::CheckpointTensor;
using kvtier::testing::F32Tensor;
using kvtier::testing::IsOk;
using kvtier::testing::SafetensorsBytes;
using kvtier::testing::StatusIs;
using kvtier::testing::TempDir;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kAnyStrategy[] = R"("dynamic":false)";
constexpr char kPerHead[] = R"("strategy":"attn_head")";

class Checkpoint : public ::testing::Test {
 protected:
  void WriteConfig(const std::string& text) { folder_.Write("config.json", text); }
  void WriteFile(const std::vector<CheckpointTensor>& tensors,
                 const std::string& name = "model.safetensors") {
    folder_.Write(name, SafetensorsBytes(tensors));
  }
  absl::StatusOr<CheckpointScales> Read(const CheckpointScalesOptions& options = {}) {
    return ReadCheckpointScales(folder_.File(""), options);
  }
  // Two layers with the given tensor in place of layer 1's k_scale.
  absl::StatusOr<CheckpointScales> ReadWith(const CheckpointTensor& tensor) {
    WriteFile({Scale(0, "k", {0.5F}), Scale(0, "v", {0.25F}), tensor, Scale(1, "v", {0.25F})});
    return Read();
  }
  static std::string Name(int layer, const std::string& side) {
    return "model.layers." + std::to_string(layer) + ".self_attn." + side + "_scale";
  }
  static CheckpointTensor Scale(int layer, const std::string& side,
                                const std::vector<float>& values) {
    return F32Tensor(Name(layer, side), values);
  }

  TempDir folder_;
};

auto IsRefused(const ::testing::Matcher<std::string>& message) {
  return StatusIs(absl::StatusCode::kInvalidArgument, message);
}

// ---- names ----

struct Names {
  const char* writer;
  const char* k;
  const char* v;
  const char* q;  // may be null
};

// As checkpoints in use spell them; N stands for the layer.
const std::vector<Names> kPublished = {
    {"LLM Compressor", "model.layers.N.self_attn.k_scale", "model.layers.N.self_attn.v_scale",
     "model.layers.N.self_attn.q_scale"},
    {"LLM Compressor, multimodal", "model.language_model.layers.N.self_attn.k_scale",
     "model.language_model.layers.N.self_attn.v_scale",
     "model.language_model.layers.N.self_attn.q_scale"},
    {"another multimodal prefix", "language_model.model.layers.N.self_attn.k_scale",
     "language_model.model.layers.N.self_attn.v_scale", nullptr},
    {"deprecated, one for both", "model.layers.N.self_attn.kv_scale",
     "model.layers.N.self_attn.kv_scale", nullptr},
    {"ModelOpt", "model.layers.N.self_attn.k_proj.k_scale",
     "model.layers.N.self_attn.v_proj.v_scale", "model.layers.N.self_attn.q_proj.q_scale"},
    {"fused", "model.layers.N.self_attn.qkv_proj.k_scale",
     "model.layers.N.self_attn.qkv_proj.v_scale", nullptr},
    {"fused, mangled", "model.layers.N.self_attn.qkqkv_proj.k_scale",
     "model.layers.N.self_attn.qkqkv_proj.v_scale", nullptr},
    {"NemotronH", "backbone.layers.N.mixer.k_proj.k_scale",
     "backbone.layers.N.mixer.v_proj.v_scale", nullptr},
    {"HYV3", "model.layers.N.self_attn.k_cache.scale", "model.layers.N.self_attn.v_cache.scale",
     "model.layers.N.self_attn.q.scale"},
    {"plain", "model.layers.N.k_scale", "model.layers.N.v_scale", "model.layers.N.q_scale"},
    {"Quark", "model.layers.N.self_attn.k_proj.output_scale",
     "model.layers.N.self_attn.v_proj.output_scale",
     "model.layers.N.self_attn.q_proj.output_scale"},
    {"TensorRT-LLM", "transformer.layers.N.attention.kv_cache_scaling_factor",
     "transformer.layers.N.attention.kv_cache_scaling_factor", nullptr},
    {"vLLM at run time", "model.layers.N.self_attn.attn.k_scale",
     "model.layers.N.self_attn.attn.v_scale", "model.layers.N.self_attn.attn.q_scale"},
    {"MLA", "model.layers.N.self_attn.mla_attn.k_scale",
     "model.layers.N.self_attn.mla_attn.v_scale", nullptr},
    {"MLA at run time", "model.layers.N.self_attn.mla_attn.mla_attn.k_scale",
     "model.layers.N.self_attn.mla_attn.mla_attn.v_scale", nullptr},
};

std::string At(std::string name, int layer) {
  return name.replace(name.find(".N.") + 1, 1, std::to_string(layer));
}

class PublishedNames : public Checkpoint, public ::testing::WithParamInterface<Names> {};

TEST_P(PublishedNames, AreReadEveryOne) {
  const Names& names = GetParam();
  const bool both = std::string(names.k) == names.v;
  WriteConfig(CheckpointConfigText(12, 2, kAnyStrategy));
  std::vector<CheckpointTensor> tensors;
  for (int layer = 0; layer < 12; ++layer) {
    const auto n = static_cast<float>(layer + 1);
    tensors.push_back(F32Tensor(At(names.k, layer), {0.5F * n}));
    if (!both) tensors.push_back(F32Tensor(At(names.v, layer), {0.25F * n}));
    if (names.q != nullptr) tensors.push_back(F32Tensor(At(names.q, layer), {0.125F * n}));
  }
  WriteFile(tensors);
  const auto scales = Read();
  ASSERT_THAT(scales, IsOk()) << names.writer;
  EXPECT_EQ(scales->calibrated, 12);
  ASSERT_EQ(scales->layers.size(), 12U);
  for (int layer = 0; layer < 12; ++layer) {
    const LayerCalibration& read = scales->layers[static_cast<std::size_t>(layer)];
    const auto n = static_cast<float>(layer + 1);
    EXPECT_EQ(read.layer, layer);
    EXPECT_THAT(read.k.values, ElementsAre(0.5F * n));
    EXPECT_THAT(read.v.values, ElementsAre((both ? 0.5F : 0.25F) * n));
    EXPECT_EQ(read.k.tensor, At(names.k, layer));
    EXPECT_EQ(read.v.tensor, At(names.v, layer));
    if (names.q != nullptr) {
      EXPECT_THAT(read.q.values, ElementsAre(0.125F * n));
    } else {
      EXPECT_THAT(read.q.values, IsEmpty());
    }
  }
  EXPECT_THAT(scales->warnings, IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, PublishedNames, ::testing::ValuesIn(kPublished),
                         [](const auto& test) {
                           return cachestore::testing::TestNameOf(test.param.writer);
                         });

TEST(ScaleNames, EveryRowIsReadInEveryModule) {
  for (const ScaleNaming& row : ScaleNamings()) {
    for (const char* module : AttentionModules()) {
      const std::string name = std::string("model.layers.31.") + module + "." + row.name;
      const auto parsed = ParseScaleName(name);
      ASSERT_TRUE(parsed.has_value()) << name;
      EXPECT_EQ(parsed->layer, 31) << name;
      EXPECT_EQ(parsed->side, row.side) << name;
    }
  }
}

TEST(ScaleNames, OtherTensorsAreNone) {
  for (const char* name :
       {"model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale", "model.layers.0.self_attn.k_zero_point",
        "model.layers.0.self_attn.prob_output_scale", "model.layers.0.mlp.down_proj.output_scale",
        "model.layers.0.self_attn.o_proj.output_scale", "mtp.layers.0.self_attn.k_scale",
        "vision_tower.encoder.layers.0.self_attn.k_proj.output_scale",
        "model.visual.layers.0.self_attn.k_scale", "model.layers..self_attn.k_scale",
        "model.layers.x.self_attn.k_scale", "model.layers.123456.self_attn.k_scale",
        "model.layers.0", "layers", "", "k_scale", "model.layers.0.self_attn.",
        "model.layers.0.self_attn.self_attn.k_scale"}) {
    EXPECT_FALSE(ParseScaleName(name).has_value()) << name;
  }
}

// ---- values ----

TEST_F(Checkpoint, ShapesAndTypesBecomeFp32) {
  WriteConfig(CheckpointConfigText(2, 2, kAnyStrategy));
  WriteFile({F32Tensor(Name(0, "k"), {0.5F}, {}),
             {Name(0, "v"), "BF16", {1}, std::string("\x37\x3d", 2)},  // 0.0446777
             {Name(1, "k"), "F16", {2, 1, 1}, std::string("\x00\x3c\xcd\x2c", 4)},
             F32Tensor(Name(1, "v"), {0.1F, 0.2F}, {2})});
  const auto scales = Read();
  ASSERT_THAT(scales, IsOk());
  EXPECT_THAT(scales->layers[0].k.values, ElementsAre(0.5F));
  EXPECT_THAT(scales->layers[0].v.values, ElementsAre(0.044677734375F));
  EXPECT_THAT(scales->layers[1].k.values, ElementsAre(1.0F, 0.0750122070F));
  EXPECT_THAT(scales->layers[1].v.values, ElementsAre(0.1F, 0.2F));
}

TEST_F(Checkpoint, AScaleThatCannotBeIsRefusedByTensorAndFile) {
  WriteConfig(CheckpointConfigText(2, 2, kAnyStrategy));
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0F, -0.0F, -0.5F, std::nanf(""), inf, -inf, 1e-40F}) {
    EXPECT_THAT(ReadWith(Scale(1, "k", {bad})),
                IsRefused(AllOf(HasSubstr("model.safetensors: tensor " + Name(1, "k")),
                                HasSubstr("want a finite normal number above 0"))))
        << bad;
    EXPECT_THAT(ReadWith(Scale(1, "k", {1, bad})), IsRefused(HasSubstr("at index 1"))) << bad;
  }
  EXPECT_THAT(ReadWith(Scale(1, "k", {1, 2, 3})),
              IsRefused(AllOf(HasSubstr(Name(1, "k") + " has the shape [3]"),
                              HasSubstr("want 1 value or 2 (one per head)"))));
  EXPECT_THAT(ReadWith(F32Tensor(Name(1, "k"), {}, {0})), IsRefused(HasSubstr("the shape [0]")));
  EXPECT_THAT(ReadWith({Name(1, "k"), "F8_E4M3", {1}, "x"}),
              IsRefused(HasSubstr("is F8_E4M3; want BF16, F16 or F32")));
  EXPECT_THAT(ReadWith(Scale(1, "k", {0.5F})), IsOk());
}

TEST_F(Checkpoint, TheStrategySaysHowManyValuesThereAre) {
  WriteConfig(CheckpointConfigText(2, 2));
  EXPECT_THAT(ReadWith(Scale(1, "k", {1, 2})),
              IsRefused(HasSubstr("want 1 value (strategy tensor)")));
  WriteConfig(CheckpointConfigText(2, 2, kPerHead));
  EXPECT_THAT(ReadWith(Scale(1, "k", {1, 2})),
              IsRefused(HasSubstr(Name(0, "k") + " has the shape [1]; want 2 values")));
}

TEST_F(Checkpoint, ZeroPointsAreIgnored) {
  WriteConfig(CheckpointConfigText(1, 2));
  WriteFile({Scale(0, "k", {2}),
             Scale(0, "v", {4}),
             {"model.layers.0.self_attn.k_zero_point", "F8_E4M3", {1}, std::string(1, '\0')}});
  EXPECT_THAT(Read(), IsOk());
}

TEST_F(Checkpoint, AllOnesAreWarnedOf) {
  WriteConfig(CheckpointConfigText(1, 2));
  WriteFile({Scale(0, "k", {1}), Scale(0, "v", {1})});
  EXPECT_THAT(Read()->warnings, ElementsAre(HasSubstr("every scale is 1.0")));
  WriteFile({Scale(0, "k", {1}), Scale(0, "v", {2})});
  EXPECT_THAT(Read()->warnings, IsEmpty());
}

TEST_F(Checkpoint, ScalesOfNoModelAreWarnedOfByTensor) {
  WriteConfig(CheckpointConfigText(2, 2));
  WriteFile({Scale(0, "k", {0.01f}), Scale(0, "v", {1.27e-21f}), Scale(1, "k", {75776.0f}),
             Scale(1, "v", {1000.0f})});
  EXPECT_THAT(Read()->warnings,
              ElementsAre(AllOf(HasSubstr(Name(0, "v")), HasSubstr(Name(1, "k")),
                                Not(HasSubstr(Name(0, "k"))), Not(HasSubstr(Name(1, "v"))))));

  WriteConfig(CheckpointConfigText(1, 2));
  WriteFile({Scale(0, "kv", {1e-8f})});
  EXPECT_THAT(Read()->warnings, ElementsAre(EndsWith(": " + Name(0, "kv"))));
}

// ---- which layers ----

TEST_F(Checkpoint, SomeLayersWithoutScalesAreRefusedByName) {
  WriteConfig(CheckpointConfigText(4, 2));
  WriteFile({Scale(0, "k", {2}), Scale(0, "v", {2}), Scale(2, "k", {2}), Scale(3, "k", {2}),
             Scale(3, "v", {2})});
  EXPECT_THAT(Read(), IsRefused(AllOf(HasSubstr("found 2 of 4 layers"),
                                      HasSubstr("layer 1 (k_scale, v_scale), layer 2 (v_scale)"),
                                      Not(HasSubstr("layer 3")))));
  const auto partial = Read({.allow_partial = true});
  ASSERT_THAT(partial, IsOk());
  EXPECT_EQ(partial->calibrated, 2);
  EXPECT_THAT(partial->layers[1].k.values, ElementsAre(1));
  EXPECT_THAT(partial->layers[1].k.tensor, IsEmpty());
  EXPECT_THAT(partial->layers[2].k.values, ElementsAre(2));
  EXPECT_THAT(partial->layers[2].v.values, ElementsAre(1));
  EXPECT_THAT(partial->warnings, ElementsAre(HasSubstr("1.0 stands in for: layer 1")));
}

TEST_F(Checkpoint, NoScalesAtAllAreRefusedEvenIfSomeMayMiss) {
  WriteConfig(CheckpointConfigText(2, 2));
  WriteFile({F32Tensor("model.layers.0.new_attention.k_scale", {2})});
  EXPECT_THAT(
      Read({.allow_partial = true}),
      IsRefused(AllOf(HasSubstr("found 0 of 2 layers"),
                      HasSubstr("model.layers.0.new_attention.k_scale is named in no way"))));
}

TEST_F(Checkpoint, QueryScalesAreOfAllLayersOrOfNone) {
  WriteConfig(CheckpointConfigText(2, 2));
  WriteFile({Scale(0, "k", {2}), Scale(0, "v", {2}), Scale(1, "k", {2}), Scale(1, "v", {2}),
             Scale(1, "q", {3})});
  EXPECT_THAT(Read(), IsRefused(HasSubstr("missing: layer 0 (q_scale)")));
}

TEST_F(Checkpoint, HybridsHaveScalesWhereTheyHaveAttention) {
  const std::string heads = R"("num_attention_heads":4,"num_key_value_heads":2)";
  for (
      const char* layers :
      {R"("layer_types":["linear_attention","full_attention","linear_attention","full_attention"])",
       R"("layers_block_type":["mamba","attention","mamba","attention"])",
       R"("hybrid_override_pattern":"M*-*")", R"("full_attention_interval":2)",
       R"("attn_layer_period":2,"attn_layer_offset":1)", R"("attn_layer_indices":[1,3])"}) {
    WriteConfig(R"({"text_config":{"num_hidden_layers":4,)" + heads + "," + layers + "}}");
    WriteFile({Scale(1, "k", {2}), Scale(1, "v", {2}), Scale(3, "k", {3}), Scale(3, "v", {3})});
    const auto scales = Read();
    ASSERT_THAT(scales, IsOk()) << layers;
    ASSERT_EQ(scales->layers.size(), 2U) << layers;
    EXPECT_EQ(scales->layers[1].layer, 3);
    EXPECT_THAT(scales->warnings, IsEmpty());
  }
}

TEST_F(Checkpoint, ScalesOfLayersBeyondTheModelAreIgnoredAndNamed) {
  WriteConfig(CheckpointConfigText(1, 2));
  WriteFile({Scale(0, "k", {2}), Scale(0, "v", {2}), Scale(1, "k", {0})});
  EXPECT_THAT(Read()->warnings, ElementsAre(HasSubstr(Name(1, "k"))));
}

TEST_F(Checkpoint, MlaHasOneScaleForItsLatent) {
  WriteConfig(R"({"num_hidden_layers":1,"num_attention_heads":16,"num_key_value_heads":16,)"
              R"("kv_lora_rank":512})");
  WriteFile({F32Tensor("model.layers.0.self_attn.mla_attn.k_scale", {2})});
  const auto scales = Read({.tp_size = 8, .tp_rank = 3});
  ASSERT_THAT(scales, IsOk());
  EXPECT_EQ(scales->calibrated, 1);
  EXPECT_THAT(scales->layers[0].k.values, ElementsAre(2));
}

// ---- tensor parallelism ----

TEST_F(Checkpoint, RanksTakeTheirHeads) {
  WriteConfig(CheckpointConfigText(1, 4, kPerHead));
  WriteFile({F32Tensor(Name(0, "k"), {1, 2, 3, 4}, {4, 1, 1}),
             F32Tensor(Name(0, "v"), {5, 6, 7, 8}, {4, 1, 1}),
             F32Tensor(Name(0, "q"), {1, 9, 2, 3, 8, 1, 1, 1}, {8, 1, 1})});
  struct Rank {
    int size;
    int rank;
    std::vector<float> k;
    std::vector<float> q;  // the larger of each KV head's two query heads
  };
  for (const Rank& rank :
       {Rank{1, 0, {1, 2, 3, 4}, {9, 3, 8, 1}}, Rank{2, 1, {3, 4}, {8, 1}}, Rank{4, 2, {3}, {8}},
        Rank{8, 0, {1}, {9}}, Rank{8, 1, {1}, {9}}, Rank{8, 5, {3}, {8}}, Rank{8, 7, {4}, {1}}}) {
    const auto scales = Read({.tp_size = rank.size, .tp_rank = rank.rank});
    ASSERT_THAT(scales, IsOk());
    EXPECT_EQ(scales->layers[0].k.values, rank.k) << rank.size << " " << rank.rank;
    EXPECT_EQ(scales->layers[0].q.values, rank.q) << rank.size << " " << rank.rank;
  }
  EXPECT_THAT(Read({.tp_size = 3}), IsRefused(HasSubstr("tp_size is 3; 4 KV heads")));
  EXPECT_THAT(Read({.tp_size = 6}), IsRefused(HasSubstr("tp_size is 6")));
  EXPECT_THAT(Read({.tp_size = 0}), IsRefused(HasSubstr("tp_size is 0; want 1 or more")));
  EXPECT_THAT(Read({.tp_size = 2, .tp_rank = 2}),
              IsRefused(HasSubstr("tp_rank is 2; want 0 to 1")));
  EXPECT_THAT(Read({.tp_size = 2, .tp_rank = -1}), IsRefused(HasSubstr("tp_rank is -1")));
}

// ---- config.json ----

TEST_F(Checkpoint, SchemesThatCannotBeServedAreRefusedByKey) {
  WriteFile({Scale(0, "k", {2}), Scale(0, "v", {2})});
  const std::vector<std::pair<std::string, std::string>> refused = {
      {R"("strategy":"channel")", "kv_cache_scheme.strategy is \"channel\"; want \"tensor\" or"},
      {R"("strategy":"token")", "kv_cache_scheme.strategy is \"token\""},
      {R"("num_bits":4)", "kv_cache_scheme.num_bits is 4; want 8"},
      {R"("type":"int")", "kv_cache_scheme.type is \"int\"; want \"float\""},
      {R"("symmetric":false)", "kv_cache_scheme.symmetric is false"},
      {R"("dynamic":true)", "kv_cache_scheme.dynamic is true"},
  };
  for (const auto& [scheme, message] : refused) {
    WriteConfig(CheckpointConfigText(1, 2, scheme));
    EXPECT_THAT(Read(), IsRefused(AllOf(HasSubstr("config.json: "), HasSubstr(message))));
  }
  const auto with = [&](const std::string& fields) {
    WriteConfig(R"({"num_hidden_layers":1,"num_attention_heads":2,)" + fields + "}");
    return Read();
  };
  EXPECT_THAT(with(R"("quantization_config":{"calculate_kv_scales":true})"),
              IsRefused(AllOf(HasSubstr("calculate_kv_scales"), HasSubstr("--observed"))));
  EXPECT_THAT(with(R"("calculate_kv_scales":true)"), IsRefused(HasSubstr("calculate_kv_scales")));
  EXPECT_THAT(with(R"("quantization_config":{"kv_cache_quant_algo":"NVFP4"})"),
              IsRefused(HasSubstr("kv_cache_quant_algo is \"NVFP4\"; want FP8")));
  EXPECT_THAT(with(R"("quantization":{"kv_cache_quant_algo":"FP8"})"), IsOk());
  EXPECT_THAT(with(R"("quantization_config":{"kv_cache_scheme":null,"new":[1]})"), IsOk());
  folder_.Write("hf_quant_config.json", R"({"quantization":{"kv_cache_quant_algo":"INT8"}})");
  EXPECT_THAT(with(R"("x":1)"), IsRefused(HasSubstr("hf_quant_config.json: kv_cache_quant_algo")));
}

TEST_F(Checkpoint, ABrokenConfigIsRefused) {
  WriteFile({Scale(0, "k", {2}), Scale(0, "v", {2})});
  EXPECT_THAT(Read(), IsRefused(HasSubstr("config.json cannot be read")));
  for (const char* text : {"", "[]", "{", "{\"num_hidden_layers\":-1}", "{\"num_hidden_layers\":0}",
                           "{\"num_hidden_layers\":99999999999}", "{}",
                           R"({"num_hidden_layers":2,"quantization_config":{"kv_cache_scheme":3}})",
                           R"({"num_hidden_layers":2,"num_kv_shared_layers":2})"}) {
    WriteConfig(text);
    EXPECT_THAT(Read(), IsRefused(HasSubstr("config.json"))) << text;
  }
  // Periods that no layer count is a multiple of, lists that are none.
  for (const char* field :
       {R"("full_attention_interval":4294967296)", R"("attn_layer_period":0)", R"("layer_types":3)",
        R"("attn_layer_indices":3)", R"("hybrid_override_pattern":[])"}) {
    WriteConfig(R"({"num_hidden_layers":1,"num_attention_heads":1,)" + std::string(field) + "}");
    static_cast<void>(Read());  // an answer, whichever
  }
}

// ---- files ----

TEST_F(Checkpoint, ScalesAreFoundInEveryFileOfTheIndexOrOfTheDirectory) {
  WriteConfig(CheckpointConfigText(2, 2));
  WriteFile({Scale(0, "k", {2}), Scale(1, "v", {5})}, "model-00001-of-00002.safetensors");
  WriteFile({Scale(0, "v", {3}), Scale(1, "k", {4})}, "model-00002-of-00002.safetensors");
  EXPECT_THAT(Read(), IsOk());
  // Without the index, another file's other scale would be a contradiction.
  WriteFile({Scale(0, "k", {7})}, "old.safetensors");
  EXPECT_THAT(Read(), IsRefused(AllOf(HasSubstr("old.safetensors: tensor " + Name(0, "k")),
                                      HasSubstr("is another scale than"))));
  folder_.Write("model.safetensors.index.json",
                R"({"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
                R"("b":"model-00002-of-00002.safetensors"}})");
  const auto scales = Read();
  ASSERT_THAT(scales, IsOk());
  EXPECT_THAT(scales->layers[0].k.values, ElementsAre(2));
  EXPECT_THAT(scales->layers[1].v.values, ElementsAre(5));
  for (const char* index : {"", "{}", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})",
                            R"({"weight_map":{"a":"../x.safetensors"}})"}) {
    folder_.Write("model.safetensors.index.json", index);
    EXPECT_THAT(Read(), IsRefused(HasSubstr("weight_map"))) << index;
  }
  folder_.Write("model.safetensors.index.json", R"({"weight_map":{"a":"gone.safetensors"}})");
  EXPECT_THAT(Read().status().ToString(), HasSubstr("gone.safetensors"));
}

TEST_F(Checkpoint, ADirectoryWithoutFilesIsRefused) {
  WriteConfig(CheckpointConfigText(2, 2));
  EXPECT_THAT(Read(), IsRefused(HasSubstr("holds no safetensors file")));
}

// Whatever the bytes are: an answer, and never scales that can't be.
TEST_F(Checkpoint, DamagedFilesDoNoHarm) {
  WriteConfig(CheckpointConfigText(1, 2, kAnyStrategy));
  const std::string good = SafetensorsBytes({Scale(0, "k", {2}), Scale(0, "v", {2, 3})});
  for (std::size_t length = 0; length < good.size(); ++length) {
    folder_.Write("model.safetensors", good.substr(0, length));
    EXPECT_FALSE(Read().ok()) << length;
  }
  for (std::size_t at = 0; at < good.size(); ++at) {
    for (const char change : {'\x01', '\x80', '\xff'}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ change);
      folder_.Write("model.safetensors", bad);
      const auto scales = Read();
      if (!scales.ok()) continue;
      for (const SideScales* side : {&scales->layers[0].k, &scales->layers[0].v}) {
        for (const float value : side->values) EXPECT_TRUE(std::isnormal(value) && value > 0);
      }
    }
  }
}

}  // namespace
}  // namespace kvtier::client
