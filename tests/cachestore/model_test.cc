#include "cachestore/model/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "tests/cachestore/model_shapes.h"
#include "tests/support/status_matchers.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IrregularSpec;
using ::testing::IsEmpty;
using testing::RequestOf;
using testing::UniformSpec;

constexpr int kDefaultPage = 128;

absl::StatusOr<std::shared_ptr<const Model>> Resolve(const ModelRequest& request) {
  return ResolveModel(request, kDefaultPage);
}

ModelRequest Fp8WithScales(std::vector<LayerScales> scales, const std::string& dtype = "fp8") {
  ModelRequest request = RequestOf(UniformSpec({.layers = 2, .heads = 4, .dim = 64}), dtype);
  request.scales = std::move(scales);
  return request;
}

void ExpectInvalid(const ModelRequest& request, const std::string& message) {
  EXPECT_THAT(Resolve(request), Refuses(Reason::kInvalidField, HasSubstr(message)));
}

TEST(Model, ShapesThatCannotBeAreRefusedByField) {
  const auto with = [](auto change) {
    ModelRequest request = RequestOf(UniformSpec({.layers = 2, .heads = 4, .dim = 64}), "auto");
    change(request.spec);
    return request;
  };
  ExpectInvalid(with([](ModelSpec& s) { s.name = ""; }), "spec.name has 0 bytes; want 1 to 256");
  ExpectInvalid(with([](ModelSpec& s) { s.name = std::string(257, 'x'); }), "has 257 bytes");
  ExpectInvalid(with([](ModelSpec& s) { s.revision = std::string(300, 'x'); }), "spec.revision");
  ExpectInvalid(with([](ModelSpec& s) { s.name = "a\nb"; }), "spec.name has a control character");
  ExpectInvalid(with([](ModelSpec& s) { s.revision = "\x7f"; }), "spec.revision has a control");
  ExpectInvalid(with([](ModelSpec& s) {
                  s.layers.assign(65, s.layers[0]);
                  for (LayerSpec& layer : s.layers) layer.kv_heads = 1024;
                }),
                "kv_heads of all spec.layers together is 66560; want 1 to 65536");
  ExpectInvalid(with([](ModelSpec& s) { s.layers.clear(); }), "number of spec.layers is 0");
  ExpectInvalid(with([](ModelSpec& s) { s.hash_block_tokens = 0; }), "spec.hash_block_tokens is 0");
  ExpectInvalid(with([](ModelSpec& s) { s.layers[1].kv_heads = 0; }),
                "spec.layers[1].kv_heads is 0; want 1 to 1024");
  ExpectInvalid(with([](ModelSpec& s) { s.layers[1].k_head_dim = 1025; }),
                "spec.layers[1].k_head_dim is 1025; want 1 to 1024");
  ExpectInvalid(with([](ModelSpec& s) { s.layers[0].v_head_dim = 0; }),
                "spec.layers[0].v_head_dim is 0; want 1 to 1024");
  ExpectInvalid(with([](ModelSpec& s) { s.layers[0].window = 5; }),
                "spec.layers[0].window is 5 on a full layer");
  ExpectInvalid(with([](ModelSpec& s) { s.layers[0].kind = LayerKind::kSlidingWindow; }),
                "spec.layers[0].window is 0; want 1");
  EXPECT_THAT(Resolve(RequestOf(IrregularSpec(), "auto")), IsOk());
}

TEST(Model, HeadDimsMustSuitTheFormat) {
  ModelSpec spec = UniformSpec({.layers = 2, .heads = 1, .dim = 96});
  EXPECT_THAT(Resolve(RequestOf(spec, "kivi(2,2,64,0)")),
              Refuses(Reason::kFormatRefused,
                      HasSubstr("spec.layers[0].v_head_dim is 96; kivi(2,2,64,0) needs a multiple "
                                "of 64")));
  EXPECT_THAT(Resolve(RequestOf(spec, "kivi2")), IsOk());
  spec.layers[1].k_head_dim = 97;
  EXPECT_THAT(Resolve(RequestOf(spec, "kivi2")),
              Refuses(Reason::kFormatRefused, HasSubstr("spec.layers[1].k_head_dim is 97")));
  spec.layers[1].k_head_dim = 98;
  EXPECT_THAT(Resolve(RequestOf(spec, "int8_per_token_head")),
              Refuses(Reason::kFormatRefused, HasSubstr("needs a multiple of 4")));
}

TEST(Model, DeepSeeksCellIsForMlaLayersOf576Channels) {
  const auto layer = [](LayerKind kind, int k, int v) {
    ModelSpec spec = UniformSpec({});
    spec.layers[0] = {.kind = kind, .kv_heads = 1, .k_head_dim = k, .v_head_dim = v};
    return Resolve(RequestOf(spec, "fp8_ds_mla"));
  };
  EXPECT_THAT(layer(LayerKind::kMla, 576, 0), IsOk());
  EXPECT_THAT(layer(LayerKind::kMla, 512, 0),
              Refuses(Reason::kFormatRefused, HasSubstr("k_head_dim is 512; fp8_ds_mla needs a")));
  EXPECT_THAT(layer(LayerKind::kFull, 576, 576),
              Refuses(Reason::kFormatRefused, HasSubstr("fp8_ds_mla needs mla layers")));
}

TEST(Model, AGroupThatIsAPageIsAsLongAsThePage) {
  const auto model = Resolve(RequestOf(UniformSpec({}), "fp8(scale=page)", 48)).value();
  for (const TensorModel& tensor : {model->layers[0].k, model->layers[0].v}) {
    EXPECT_EQ(tensor.layout.unit_tokens, 48);
    EXPECT_EQ(tensor.residual.capacity(), 48);
  }
}

TEST(Model, PageTokensAreAMultipleOf16AndOfEveryGroup) {
  const ModelSpec spec = UniformSpec({.dim = 96});
  const auto page = [&](const char* dtype, int asked) {
    return Resolve(RequestOf(spec, dtype, asked)).value()->page_tokens;
  };
  EXPECT_EQ(page("auto", 0), 128);
  EXPECT_EQ(page("auto", 16), 16);
  EXPECT_EQ(page("kivi2", 0), 128);
  EXPECT_EQ(page("kivi2", 96), 96);
  EXPECT_EQ(page("kivi(2,2,24,24)", 0), 144);  // 48 is the least multiple, 128 rounded up
  EXPECT_EQ(page("kivi(2,2,96,0)", 0), 192);
  EXPECT_EQ(ResolveModel(RequestOf(spec, "auto"), 1).value()->page_tokens, 16);
  ExpectInvalid(RequestOf(spec, "auto", 24),
                "page_tokens is 24; want 0, or a multiple of 16 up to 8192");
  ExpectInvalid(RequestOf(spec, "kivi2", 48), "page_tokens is 48; want 0, or a multiple of 32");
  ExpectInvalid(RequestOf(spec, "kivi(2,2,24,24)", 128), "a multiple of 48");
  ExpectInvalid(RequestOf(spec, "auto", -16), "page_tokens is -16");
  ExpectInvalid(RequestOf(spec, "auto", 8208), "page_tokens is 8208");
}

TEST(Model, SkippedLayersKeepTheSourceDtype) {
  ModelRequest request = RequestOf(IrregularSpec(), "kivi4");
  request.policy.skip_layers = {"sliding_window", "0"};
  const auto model = Resolve(request).value();
  EXPECT_EQ(model->format, "kivi4");
  EXPECT_EQ(model->layers[0].format, "auto");
  EXPECT_EQ(model->layers[1].format, "kivi4");
  EXPECT_EQ(model->layers[2].format, "auto");
  EXPECT_EQ(model->layers[3].format, "kivi4");
  EXPECT_EQ(model->layers[2].k.layout.codec.id, kernels::CodecId::kRaw);
  EXPECT_EQ(model->layers[2].k.residual, ResidualRule{});
  EXPECT_EQ(model->layers[1].v.layout.codec.id, kernels::CodecId::kKiviToken);
  for (const char* bad : {"4", "-1", "x", "", "1.0", "99999", "sliding"}) {
    request.policy.skip_layers = {bad};
    ExpectInvalid(request, "policy.kv_cache_dtype_skip_layers has \"" + std::string(bad) +
                               "\"; want layer indices 0 to 3 or \"sliding_window\"");
  }
}

// A skipped layer need not suit the format, nor its groups the page.
TEST(Model, SkippedLayersAreNotHeldToTheFormat) {
  ModelSpec spec = UniformSpec({.layers = 2, .dim = 64});
  spec.layers[1].v_head_dim = 65;
  ModelRequest request = RequestOf(spec, "kivi2");
  request.policy.skip_layers = {"1"};
  EXPECT_THAT(Resolve(request), IsOk());
  request.policy.skip_layers = {"0", "1"};
  request.page_tokens = 48;
  EXPECT_THAT(Resolve(request), IsOk());
}

TEST(Model, ScalesAreOneForAllOrOneAHead) {
  const auto model = Resolve(Fp8WithScales({{.layer = 1, .k = {0.5f}, .v = {1, 2, 3, 4}},
                                            {.layer = 0, .k = {2}, .v = {0.25f}}}))
                         .value();
  EXPECT_THAT(model->layers[0].k.scales, ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(model->layers[1].k.scales, ElementsAre(0.5f, 0.5f, 0.5f, 0.5f));
  EXPECT_THAT(model->layers[1].v.scales, ElementsAre(1, 2, 3, 4));
  EXPECT_FALSE(model->layers[1].k.per_head_scales);
  EXPECT_TRUE(model->layers[1].v.per_head_scales);
  EXPECT_THAT(Resolve(Fp8WithScales({})).value()->layers[0].k.scales, ElementsAre(1, 1, 1, 1));
}

TEST(Model, ScalesThatCannotBeAreRefusedByName) {
  const LayerScales good{.layer = 0, .k = {1}, .v = {1}};
  const auto second = [&](std::vector<float> k, std::vector<float> v) {
    return Fp8WithScales({good, {.layer = 1, .k = std::move(k), .v = std::move(v)}});
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  ExpectInvalid(second({0}, {1}), "scales of layer 1 k_scale is 0; want a finite normal number");
  ExpectInvalid(second({1}, {-1}), "scales of layer 1 v_scale is -1");
  ExpectInvalid(second({kNan}, {1}), "scales of layer 1 k_scale is nan");
  ExpectInvalid(second({1}, {kInf}), "scales of layer 1 v_scale is inf");
  ExpectInvalid(second({1e-40f}, {1}), "scales of layer 1 k_scale is 1e-40");
  ExpectInvalid(second({1, 2, 3}, {1}), "k_scale has 3 values; want 1 or 4 (one per KV head)");
  ExpectInvalid(second({1, 2, 3, 0}, {1}), "k_scale is 0");
  LayerScales query = good;
  query.layer = 1;
  query.q = {1, 2};
  ExpectInvalid(Fp8WithScales({good, query}), "q_scale has 2 values; want 1 or 4");
  query.q = {-1};
  ExpectInvalid(Fp8WithScales({good, query}), "scales of layer 1 q_scale is -1");
  ExpectInvalid(second({}, {1}), "scales of layer 1: k_scale is missing");
  ExpectInvalid(second({1}, {}), "scales of layer 1: v_scale is missing");
  ExpectInvalid(Fp8WithScales({good}),
                "scales of layer 1 are missing while other layers have some");
  ExpectInvalid(Fp8WithScales({good, good}), "scales of layer 0: want each of layers 0 to 1 once");
  ExpectInvalid(Fp8WithScales({{.layer = 2, .k = {1}, .v = {1}}}), "scales of layer 2: want each");
  ExpectInvalid(Fp8WithScales({good}, "kivi2"),
                "scales of layer 0: the layer is stored as kivi2, which takes no scale");
}

TEST(Model, ScalesLineSaysWhereTheyComeFrom) {
  const auto line = [](ModelRequest request, const char* source = "") {
    request.scales_source = source;
    return Resolve(request).value()->scales_line;
  };
  const std::vector<LayerScales> both = {{.layer = 0, .k = {2}, .v = {2}},
                                         {.layer = 1, .k = {2}, .v = {1}}};
  EXPECT_THAT(line(Fp8WithScales(both)), HasSubstr("scales: given 2 of 2 layers"));
  EXPECT_EQ(line(Fp8WithScales(both), "calibrated (a/b)"),
            "scales: calibrated 2 of 2 layers (a/b)");
  EXPECT_EQ(line(Fp8WithScales(both), "calibrated (a (b))"),
            "scales: calibrated 2 of 2 layers (a (b))");
  EXPECT_THAT(line(Fp8WithScales({})), HasSubstr("Using KV cache scaling factor 1.0 for fp8_e4m3"));
  // One layer at 1.0 is enough for the warning; how many have other scales is noted then.
  const ModelRequest half = Fp8WithScales({both[0], {.layer = 1, .k = {1}, .v = {1}}});
  EXPECT_THAT(line(half), HasSubstr("Using KV cache scaling factor 1.0 for fp8_e4m3"));
  EXPECT_THAT(Resolve(half).value()->notices, ElementsAre("scales: given 1 of 2 layers"));
  EXPECT_THAT(line(Fp8WithScales({}, "fp8_e5m2")), IsEmpty());
  EXPECT_EQ(Resolve(Fp8WithScales({}, "fp8_e5m2")).value()->unit_scale_layers, 2);
  EXPECT_THAT(line(Fp8WithScales({}, "kivi2")), IsEmpty());
  EXPECT_EQ(Resolve(Fp8WithScales(both)).value()->unit_scale_layers, 0);
  EXPECT_EQ(Resolve(Fp8WithScales(both)).value()->scaled_layers, 2);
}

TEST(Model, WhatAFormatIsKnownToLoseGetsANotice) {
  const auto notices = [](const char* dtype, std::vector<LayerScales> scales = {}) {
    ModelRequest request = RequestOf(UniformSpec({.dim = 64}), dtype);
    request.scales = std::move(scales);
    return Resolve(request).value()->notices;
  };
  EXPECT_THAT(notices("kivi2"), ElementsAre(HasSubstr("4-bit keys")));
  EXPECT_THAT(notices("k4v2"), IsEmpty());
  EXPECT_THAT(notices("auto"), IsEmpty());
  EXPECT_THAT(notices("nvfp4"), ElementsAre(HasSubstr("nvfp4 at scale 1.0 loses")));
  EXPECT_THAT(notices("nvfp4", {{.layer = 0, .k = {0.01f}, .v = {0.01f}}}), IsEmpty());
  EXPECT_THAT(Resolve(RequestOf(IrregularSpec(), "kivi4")).value()->notices,
              ElementsAre(HasSubstr("the latent of MLA")));
}

TEST(Model, SourceBytesPerTokenAreOfAllLayers) {
  const auto model = Resolve(RequestOf(IrregularSpec(), "kivi2")).value();
  EXPECT_EQ(model->source_bytes_per_token,
            2 * (2 * (40 + 32) + 2 * (32 + 64) + 4 * (32 + 32) + 1 * 72));
}

ModelRequest Golden() {
  ModelRequest request = RequestOf(IrregularSpec(), "fp8", 64);
  request.policy.skip_layers = {"sliding_window", "3"};
  request.scales = {{.layer = 0, .k = {0.5f}, .v = {0.25f, 2}},
                    {.layer = 1, .k = {1.5f}, .v = {3}}};
  return request;
}

// The id goes into clients' hands and, later, into keys: it must never change by itself.
TEST(ModelId, IsTheSameInEveryVersion) {
  EXPECT_EQ(Resolve(Golden()).value()->id, "6ff5c095d4edc64ebe523695fdf72150");
}

TEST(ModelId, IsThatOfWhatWasAskedForWithNamesResolved) {
  const std::string id = Resolve(Golden()).value()->id;
  ModelRequest same = Golden();
  same.policy.kv_cache_dtype = "fp8_e4m3";
  same.policy.skip_layers = {"3", "sliding_window", "3"};
  same.scales_source = "calibrated (x)";
  same.max_tokens = 77;
  EXPECT_EQ(Resolve(same).value()->id, id);
  EXPECT_EQ(FirstDifference(Golden(), Golden()), "");
}

// Every field is in the id, and is named where two requests differ in it alone.
TEST(ModelId, DiffersInEveryFieldAndSaysWhich) {
  const auto base = Resolve(Golden()).value();
  const auto differs = [&](const char* path, auto change) {
    ModelRequest request = Golden();
    change(request);
    const auto other = Resolve(request);
    ASSERT_THAT(other, IsOk()) << path;
    EXPECT_NE((*other)->id, base->id) << path;
    EXPECT_EQ(FirstDifference(base->request, (*other)->request), path);
  };
  differs("spec.name", [](ModelRequest& r) { r.spec.name = "other"; });
  differs("spec.revision", [](ModelRequest& r) { r.spec.revision = "2"; });
  differs("spec.source_dtype", [](ModelRequest& r) { r.spec.source = ElementType::kFp16; });
  differs("spec.k_rope", [](ModelRequest& r) { r.spec.k_rope = RopeState::kBefore; });
  differs("spec.hash_block_tokens", [](ModelRequest& r) { r.spec.hash_block_tokens = 32; });
  differs("spec.layers.1.k_head_dim", [](ModelRequest& r) { r.spec.layers[1].k_head_dim = 48; });
  differs("spec.layers.1.v_head_dim", [](ModelRequest& r) { r.spec.layers[1].v_head_dim = 48; });
  differs("spec.layers.2.kv_heads", [](ModelRequest& r) { r.spec.layers[2].kv_heads = 3; });
  differs("spec.layers.2.window", [](ModelRequest& r) { r.spec.layers[2].window = 65; });
  differs("spec.layers.3.kind", [](ModelRequest& r) {
    r.spec.layers[3].kind = LayerKind::kFull;
    r.spec.layers[3].v_head_dim = 1;
  });
  differs("policy.kv_cache_dtype", [](ModelRequest& r) { r.policy.kv_cache_dtype = "fp8_e5m2"; });
  differs("page_tokens", [](ModelRequest& r) { r.page_tokens = 128; });
  differs("scales.1.k.0", [](ModelRequest& r) { r.scales[1].k[0] = std::nextafter(1.5f, 2.0f); });
  differs("scales.0.v.1", [](ModelRequest& r) { r.scales[0].v[1] = 4; });
  differs("scales.0.q", [](ModelRequest& r) { r.scales[0].q = {4}; });
}

}  // namespace
}  // namespace kvtier::cachestore
