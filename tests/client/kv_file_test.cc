#include "client/kv_file.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/safetensors.h"
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

TensorInfo Declare(const std::string& name, const std::string& dtype,
                   std::vector<std::uint64_t> shape) {
  TensorInfo tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

absl::StatusOr<KvFile> OpenWith(std::vector<TensorInfo> tensors) {
  const TempDir dir;
  SafetensorsHeader header;
  header.tensors = std::move(tensors);
  auto writer = SafetensorsWriter::Create(dir.File("kv.safetensors"), header);
  EXPECT_THAT(writer, IsOk());
  for (std::size_t i = 0; i < writer->tensors().size(); ++i) {
    EXPECT_THAT(writer->Write(i, 0, std::vector<std::byte>(writer->tensors()[i].size)), IsOk());
  }
  EXPECT_THAT(writer->Finish(), IsOk());
  return KvFile::Open(dir.File("kv.safetensors"));
}

TEST(KvFile, ReadsTheSampleAndNamesWhatItIgnores) {
  const auto file = KvFile::Open(KVTIER_TEST_DATA "/smollm2-135m-kv.safetensors");
  ASSERT_THAT(file, IsOk());
  ASSERT_EQ(file->layers().size(), 8u);
  EXPECT_EQ(file->tokens(), 512u);
  EXPECT_EQ(file->dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(file->layers()[3].heads(), 3u);
  EXPECT_EQ(file->layers()[3].k_head_dim(), 64u);
  EXPECT_EQ(file->layers()[3].v_head_dim(), 64u);
  EXPECT_EQ(file->layers()[3].k.name, "layers.3.k");
  EXPECT_EQ(file->bytes(), 8u * 2 * 512 * 3 * 64 * 2);
  EXPECT_THAT(file->ignored_tensors(),
              ElementsAre("layers.0.q", "layers.1.q", "layers.2.q", "layers.3.q", "layers.4.q",
                          "layers.5.q", "layers.6.q", "layers.7.q"));
}

TEST(KvFile, LayersMayDifferInHeadsAndDims) {
  const auto file =
      OpenWith({Declare("layers.1.v", "F32", {4, 1, 8}), Declare("layers.0.k", "F32", {4, 2, 16}),
                Declare("layers.0.v", "F32", {4, 2, 8}), Declare("layers.1.k", "F32", {4, 1, 8})});
  ASSERT_THAT(file, IsOk());
  EXPECT_EQ(file->layers()[0].heads(), 2u);
  EXPECT_EQ(file->layers()[0].k_head_dim(), 16u);
  EXPECT_EQ(file->layers()[0].v_head_dim(), 8u);
  EXPECT_EQ(file->layers()[1].heads(), 1u);
  EXPECT_THAT(file->ignored_tensors(), IsEmpty());
}

TEST(KvFile, AFileWithoutAnyVIsOneOfLatents) {
  const auto file = OpenWith(
      {Declare("layers.0.k", "F16", {4, 1, 576}), Declare("layers.1.k", "F16", {4, 1, 576})});
  ASSERT_THAT(file, IsOk());
  EXPECT_EQ(file->layers()[1].k_head_dim(), 576u);
  EXPECT_EQ(file->layers()[1].v_head_dim(), 0u);
}

// Names that only look like a layer's are other tensors.
TEST(KvFile, TakesExactNamesOnly) {
  const auto file = OpenWith(
      {Declare("layers.0.k", "BF16", {1, 1, 8}), Declare("layers.0.v", "BF16", {1, 1, 8}),
       Declare("layers.00.k", "I8", {1}), Declare("layers.+1.k", "I8", {1}),
       Declare("layers.1.k.x", "I8", {1}), Declare("layers..k", "I8", {1}),
       Declare("model.layers.1.k", "I8", {1}), Declare("layers.99999999999.k", "I8", {1})});
  ASSERT_THAT(file, IsOk());
  EXPECT_EQ(file->layers().size(), 1u);
  EXPECT_EQ(file->ignored_tensors().size(), 6u);
}

struct BadFile {
  std::vector<TensorInfo> tensors;
  std::string message;
};

TEST(KvFile, RefusesAFileByItsTensor) {
  const TensorInfo k = Declare("layers.0.k", "BF16", {4, 2, 8});
  const TensorInfo v = Declare("layers.0.v", "BF16", {4, 2, 8});
  const std::vector<BadFile> bad = {
      {{Declare("weights", "BF16", {4})}, "no tensor is named layers.N.k"},
      {{v}, "layers.0.k is missing"},
      {{k}, "layers.0.v is missing"},
      {{Declare("layers.0.k", "BF16", {4, 1, 8}), Declare("layers.1.k", "BF16", {4, 1, 8}),
        Declare("layers.1.v", "BF16", {4, 1, 8})},
       "layers.0.v is missing"},
      {{k, v, Declare("layers.2.k", "BF16", {4, 2, 8}), Declare("layers.2.v", "BF16", {4, 2, 8})},
       "layers.1.k is missing"},
      {{k, Declare("layers.0.v", "BF16", {4, 3, 8})},
       "layers.0.v has 3 heads, but layers.0.k has 2"},
      {{k, Declare("layers.0.v", "BF16", {5, 2, 8})},
       "layers.0.v has 5 tokens, but layers.0.k has 4"},
      {{k, Declare("layers.0.v", "F16", {4, 2, 8})}, "layers.0.v is F16, but layers.0.k is BF16"},
      {{Declare("layers.0.k", "F8_E4M3", {4, 2, 8}), v},
       "layers.0.k is F8_E4M3; BF16, F16 and F32"},
      {{Declare("layers.0.k", "BF16", {4, 16}), v}, "layers.0.k has shape [4, 16]"},
      {{Declare("layers.0.k", "BF16", {0, 2, 8}), v}, "layers.0.k has shape [0, 2, 8]"},
  };
  for (const BadFile& file : bad) {
    EXPECT_THAT(OpenWith(file.tensors),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(file.message)));
  }
}

}  // namespace
}  // namespace kvtier::client
