#include "client/observed_scales.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/checkpoint_scales.h"
#include "client/scales_file.h"
#include "tests/client/temp_dir.h"
#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::StatusIs;
using kvtier::testing::TempDir;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void AddLayer(v1::ScalesResponse& observed, const std::vector<float>& k,
              const std::vector<float>& v) {
  v1::LayerObservation& layer = *observed.add_layers();
  layer.set_layer(static_cast<std::uint32_t>(observed.layers_size() - 1));
  layer.mutable_k_amax()->Assign(k.begin(), k.end());
  layer.mutable_v_amax()->Assign(v.begin(), v.end());
}

v1::ScalesResponse TwoLayers() {
  v1::ScalesResponse observed;
  AddLayer(observed, {448, 224}, {44.8F, 4.48F});
  AddLayer(observed, {1, 2}, {3, 4});
  return observed;
}

class ObservedScales : public ::testing::Test {
 protected:
  TempDir folder_;
};

TEST_F(ObservedScales, AreReadBackAsACheckpointsPerTensor) {
  const std::string out = folder_.File("new/folder");
  ASSERT_THAT(WriteObservedScales(TwoLayers(), {.headroom = 2}, out), IsOk());
  const auto scales = ReadScales(out, {});
  ASSERT_THAT(scales, IsOk());
  EXPECT_EQ(scales->calibrated, 2);
  EXPECT_EQ(scales->source, "folder");
  EXPECT_THAT(scales->layers[0].k.values, ElementsAre(2));
  EXPECT_THAT(scales->layers[0].v.values, ElementsAre(0.2F));
  EXPECT_THAT(scales->layers[1].k.values, ElementsAre(static_cast<float>(2 * 2 / 448.0)));
  EXPECT_EQ(scales->layers[1].v.tensor, "model.layers.1.self_attn.v_scale");
}

TEST_F(ObservedScales, AreReadBackAsACheckpointsPerHead) {
  const std::string out = folder_.File("heads");
  ASSERT_THAT(WriteObservedScales(TwoLayers(), {.headroom = 1, .per_head = true}, out), IsOk());
  const auto scales = ReadScales(out, {.tp_size = 2, .tp_rank = 1});
  ASSERT_THAT(scales, IsOk());
  EXPECT_THAT(scales->layers[0].k.values, ElementsAre(0.5F));
  EXPECT_THAT(scales->layers[1].v.values, ElementsAre(static_cast<float>(4 / 448.0)));
}

TEST_F(ObservedScales, LayersNeverObservedAreRefusedByName) {
  v1::ScalesResponse observed = TwoLayers();
  AddLayer(observed, {0, 0}, {1, 1});
  AddLayer(observed, {1, 1}, {0, 1});
  const std::string out = folder_.File("out");
  EXPECT_THAT(WriteObservedScales(observed, {}, out),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("layer 2 (amax 0)")));
  EXPECT_THAT(WriteObservedScales(observed, {.per_head = true}, out),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("layer 2 (head 0: amax 0)"),
                             HasSubstr("layer 3 (head 0: amax 0)"))));
  EXPECT_EQ(folder_.entries(), 0);
}

TEST_F(ObservedScales, NoCheckpointIsOverwritten) {
  folder_.Write("config.json", "mine");
  EXPECT_THAT(WriteObservedScales(TwoLayers(), {}, folder_.File("")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("config.json exists")));
  EXPECT_EQ(kvtier::testing::ReadFile(folder_.File("config.json")), "mine");
}

TEST_F(ObservedScales, LayersMayDifferInHeadsButNotPerHead) {
  v1::ScalesResponse observed = TwoLayers();
  AddLayer(observed, {1, 2, 3}, {});  // MLA: no V
  EXPECT_THAT(WriteObservedScales(observed, {.per_head = true}, folder_.File("a")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("differ in KV heads")));
  ASSERT_THAT(WriteObservedScales(observed, {}, folder_.File("b")), IsOk());
  const auto scales = ReadScales(folder_.File("b"), {});
  ASSERT_THAT(scales, IsOk());
  EXPECT_EQ(scales->layers[2].v.values, scales->layers[2].k.values);
}

// ---- JSON, and the request ----

CheckpointScales Sample() {
  CheckpointScales scales{.source = "llama", .calibrated = 2};
  scales.layers.push_back({0, {{0.1F, 0.2F}, "k0"}, {{0.3F}, "v0"}, {{0.7F}, "q0"}});
  scales.layers.push_back({1, {{1e-30F, 3e30F}, "k1"}, {{0.5F}, "v1"}, {{0.9F}, "q1"}});
  return scales;
}

v1::RegisterModelRequest Request(const std::string& dtype, int layers = 2) {
  v1::RegisterModelRequest request;
  for (int i = 0; i < layers; ++i) request.mutable_spec()->add_layers();
  request.mutable_policy()->set_kv_cache_dtype(dtype);
  return request;
}

TEST_F(ObservedScales, JsonIsReadBackToTheBit) {
  const auto scales = ReadScales(folder_.Write("s.json", ScalesToJson(Sample())), {});
  ASSERT_THAT(scales, IsOk());
  EXPECT_EQ(scales->source, "llama");
  EXPECT_EQ(scales->calibrated, 2);
  EXPECT_THAT(scales->layers[0].k.values, ElementsAre(0.1F, 0.2F));
  EXPECT_THAT(scales->layers[1].k.values, ElementsAre(1e-30F, 3e30F));
  EXPECT_THAT(scales->layers[1].q.values, ElementsAre(0.9F));
  EXPECT_EQ(scales->layers[0].v.tensor, "v0");
}

TEST_F(ObservedScales, JsonThatCannotBeIsRefusedByPlace) {
  const auto read = [&](const std::string& text) {
    return ReadScales(folder_.Write("s.json", text), {}).status().ToString();
  };
  for (const char* text : {"", "{", "[]", "{}", R"({"layers":{}})"})
    EXPECT_THAT(read(text), HasSubstr("\"layers\"")) << text;
  EXPECT_THAT(read(R"({"layers":[1]})"), HasSubstr("layers[0] is not an object"));
  for (const char* value : {"0", "[0]", "[-1]", "[1e300]", "[\"1\"]", "[null]", "\"x\""}) {
    EXPECT_THAT(read(R"({"layers":[{},{"v_scale":)" + std::string(value) + "}]}"),
                HasSubstr("layers[1].v_scale"))
        << value;
  }
}

TEST_F(ObservedScales, GoIntoARequestForTheLayersThatAreQuantized) {
  v1::RegisterModelRequest request = Request("fp8");
  ASSERT_THAT(SetScales(Sample(), request), IsOk());
  EXPECT_EQ(request.scales_source(), "calibrated (llama)");
  ASSERT_EQ(request.scales_size(), 2);
  EXPECT_THAT(request.scales(0).k_scale(), ElementsAre(0.1F, 0.2F));
  EXPECT_THAT(request.scales(1).q_scale(), ElementsAre(0.9F));

  request = Request("fp8");
  request.mutable_policy()->add_kv_cache_dtype_skip_layers("sliding_window");
  request.mutable_spec()->mutable_layers(0)->set_kind(v1::LAYER_KIND_SLIDING_WINDOW);
  ASSERT_THAT(SetScales(Sample(), request), IsOk());
  ASSERT_EQ(request.scales_size(), 1);
  EXPECT_EQ(request.scales(0).layer(), 1U);
}

TEST_F(ObservedScales, DoNotFitE5m2OrAnotherModel) {
  v1::RegisterModelRequest request = Request("fp8_e5m2");
  EXPECT_THAT(SetScales(Sample(), request),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("fp8_e5m2"), HasSubstr("--k-scale and --v-scale"))));
  request = Request("fp8", 3);
  EXPECT_THAT(SetScales(Sample(), request),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("llama has scales for 2 layers; the model has 3")));
}

}  // namespace
}  // namespace kvtier::client
