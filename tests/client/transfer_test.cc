#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "client/download.h"
#include "client/error_reason.h"
#include "client/model_source.h"
#include "client/upload.h"
#include "tests/client/fake_server.h"
#include "tests/client/temp_dir.h"
#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::ErrorWithReason;
using kvtier::testing::FakeServer;
using kvtier::testing::FakeService;
using kvtier::testing::IsOk;
using kvtier::testing::StatusIs;
using kvtier::testing::TempDir;
using ::testing::HasSubstr;

constexpr char kSample[] = KVTIER_TEST_DATA "/smollm2-135m-kv.safetensors";
constexpr std::uint64_t kTokenBytes = std::uint64_t{3} * 64 * 2;  // of K; of V as many

std::string Bytes(const SafetensorsReader& file, const std::string& name) {
  const TensorInfo* tensor = file.Find(name);
  if (tensor == nullptr) return "no such tensor";
  std::string bytes(tensor->size, '\0');
  EXPECT_THAT(file.Read(*tensor, 0, std::as_writable_bytes(std::span(bytes))), IsOk());
  return bytes;
}

class FileTransfer : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = KvFile::Open(kSample);
    ASSERT_THAT(opened, IsOk());
    file_ = std::make_unique<KvFile>(*std::move(opened));
    auto client = Client::Connect(server_.address(), ClientOptions());
    ASSERT_THAT(client, IsOk());
    client_ = *std::move(client);
    v1::RegisterModelRequest request;
    *request.mutable_spec() = SpecFromKvFile(*file_);
    ASSERT_THAT(client_->RegisterModel(request), IsOk());
    options_.append.open.set_sequence("s");
  }

  FakeService& service() { return server_.service(); }

  v1::ReadRequest ReadAll() const {
    v1::ReadRequest request;
    request.add_sequences()->set_sequence("s");
    return request;
  }

  const TempDir dir_;
  FakeServer server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<KvFile> file_;
  UploadOptions options_;
};

TEST_F(FileTransfer, UploadsLayerByLayerInChunks) {
  options_.chunk_tokens = 100;
  std::vector<std::uint64_t> told;
  options_.on_progress = [&](std::uint64_t bytes) { told.push_back(bytes); };
  const auto report = Upload(*client_, *file_, options_);
  ASSERT_THAT(report, IsOk());
  ASSERT_EQ(service().chunks.size(), 8u * 6);
  for (std::size_t i = 0; i < service().chunks.size(); ++i) {
    EXPECT_EQ(service().chunks[i].first_layer(), i / 6);
    EXPECT_EQ(service().chunks[i].first_token(), i % 6 * 100);
    EXPECT_EQ(service().chunks[i].num_tokens(), i % 6 == 5 ? 12u : 100u);
  }
  const FakeService::Sequence& stored = service().sequences["s"];
  EXPECT_TRUE(stored.sealed);
  for (std::uint32_t layer = 0; layer < 8; ++layer) {
    EXPECT_EQ(stored.layers.at(layer).k, Bytes(file_->file(), LayerTensorName(layer, "k")));
    EXPECT_EQ(stored.layers.at(layer).v, Bytes(file_->file(), LayerTensorName(layer, "v")));
  }
  EXPECT_EQ(report->sent_bytes, file_->bytes());
  EXPECT_EQ(report->append.committed_tokens, 512u);
  EXPECT_GT(report->duration, absl::ZeroDuration());
  ASSERT_EQ(told.size(), 48u);
  EXPECT_EQ(told.back(), file_->bytes());
}

TEST_F(FileTransfer, CutsChunksToTheServersLargestMessage) {
  options_.chunk_tokens = 256;
  options_.max_message_bytes = 10 * 2 * kTokenBytes + 128;
  ASSERT_THAT(Upload(*client_, *file_, options_), IsOk());
  EXPECT_EQ(service().chunks.front().num_tokens(), 10u);
  EXPECT_EQ(service().chunks.size(), 8u * 52);
}

// The cut must hold for the message as it is encoded, not only for its payload.
TEST_F(FileTransfer, ACutChunksMessageIsWithinTheLimit) {
  for (std::uint64_t limit = 2 * kTokenBytes + 128; limit < 8 * kTokenBytes; limit += 77) {
    options_.max_message_bytes = limit;
    const auto tokens = ChunkTokens(*file_, 0, options_);
    ASSERT_THAT(tokens, IsOk());
    v1::AppendRequest request;
    v1::AppendChunk& chunk = *request.mutable_chunk();
    chunk.set_first_layer(~0u);
    chunk.set_num_layers(~0u);
    chunk.set_first_token(~std::uint64_t{0});
    chunk.set_num_tokens(*tokens);
    chunk.set_k(std::string(*tokens * kTokenBytes, 'k'));
    chunk.set_v(std::string(*tokens * kTokenBytes, 'v'));
    EXPECT_LE(request.ByteSizeLong(), limit);
  }
}

TEST_F(FileTransfer, SaysWhenNotOneTokenFits) {
  options_.max_message_bytes = 2 * kTokenBytes;
  EXPECT_THAT(Upload(*client_, *file_, options_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("one token of layers.0.k takes 768 bytes; the server takes "
                                 "messages of at most 768")));
}

TEST_F(FileTransfer, LeavesASequenceOpenIfAskedTo) {
  options_.seal = false;
  ASSERT_THAT(Upload(*client_, *file_, options_), IsOk());
  EXPECT_FALSE(service().sequences["s"].sealed);
}

TEST_F(FileTransfer, GoesOnWhereTheSequenceStands) {
  options_.seal = false;
  ASSERT_THAT(Upload(*client_, *file_, options_), IsOk());
  const std::size_t before = service().chunks.size();
  options_.seal = true;
  const auto again = Upload(*client_, *file_, options_);
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->first_token, 512u);
  EXPECT_EQ(again->sent_bytes, 0u);
  EXPECT_EQ(service().chunks.size(), before);
  EXPECT_TRUE(service().sequences["s"].sealed);
}

TEST_F(FileTransfer, PassesTheServersErrorOn) {
  service().on_chunk = [](const v1::AppendChunk&, int number) {
    return number < 5 ? grpc::Status::OK
                      : ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "the budget is full",
                                        "BUDGET");
  };
  const auto report = Upload(*client_, *file_, options_);
  EXPECT_THAT(report, StatusIs(absl::StatusCode::kResourceExhausted, "the budget is full"));
  EXPECT_EQ(ErrorReason(report.status()), "BUDGET");
}

TEST_F(FileTransfer, DownloadsWhatWasUploaded) {
  ASSERT_THAT(Upload(*client_, *file_, options_), IsOk());
  std::uint64_t told = 0;
  const auto report = Download(*client_, ReadAll(), dir_.File("out"),
                               [&](std::uint64_t bytes, std::uint64_t total) {
                                 told = bytes;
                                 EXPECT_EQ(total, file_->bytes());
                               });
  ASSERT_THAT(report, IsOk());
  EXPECT_EQ(told, file_->bytes());
  EXPECT_EQ(report->read.summary.saturated_values(), 3u);
  const auto out = KvFile::Open(dir_.File("out"));
  ASSERT_THAT(out, IsOk());
  EXPECT_EQ(out->tokens(), 512u);
  for (std::uint32_t layer = 0; layer < 8; ++layer) {
    for (const char* part : {"k", "v"}) {
      const std::string name = LayerTensorName(layer, part);
      EXPECT_EQ(Bytes(out->file(), name), Bytes(file_->file(), name)) << name;
    }
  }
}

TEST_F(FileTransfer, DownloadsHeadsFirst) {
  ASSERT_THAT(Upload(*client_, *file_, options_), IsOk());
  v1::ReadRequest request = ReadAll();
  request.set_layout(v1::LAYOUT_HND);
  request.set_first_layer(2);
  request.set_num_layers(1);
  request.mutable_sequences(0)->set_first_token(100);
  request.mutable_sequences(0)->set_num_tokens(20);
  ASSERT_THAT(Download(*client_, request, dir_.File("out"), {}), IsOk());
  const auto out = SafetensorsReader::Open(dir_.File("out"));
  ASSERT_THAT(out, IsOk());
  ASSERT_EQ(out->tensors().size(), 2u);
  EXPECT_EQ(out->Find("layers.2.k")->shape, (std::vector<std::uint64_t>{3, 20, 64}));
  EXPECT_EQ(out->metadata().at("layout"), "HND");
  EXPECT_EQ(out->metadata().at("first_token"), "100");
  const std::string source = Bytes(file_->file(), "layers.2.k");
  std::string expected;
  for (std::uint64_t head = 0; head < 3; ++head) {
    for (std::uint64_t token = 100; token < 120; ++token) {
      expected += source.substr((token * 3 + head) * 128, 128);
    }
  }
  EXPECT_EQ(Bytes(*out, "layers.2.k"), expected);
}

TEST_F(FileTransfer, WritesTheScalesOfFp8) {
  ASSERT_THAT(Upload(*client_, *file_, options_), IsOk());
  v1::ReadRequest request = ReadAll();
  request.set_as(v1::READ_AS_FP8_E4M3);
  ASSERT_THAT(Download(*client_, request, dir_.File("out"), {}), IsOk());
  const auto out = SafetensorsReader::Open(dir_.File("out"));
  ASSERT_THAT(out, IsOk());
  EXPECT_EQ(out->tensors().size(), 4u * 8);
  EXPECT_EQ(out->Find("layers.7.k")->dtype, "F8_E4M3");
  EXPECT_EQ(out->Find("layers.7.k_scale")->dtype, "F32");
  EXPECT_EQ(out->Find("layers.7.k_scale")->shape, (std::vector<std::uint64_t>{1}));
  EXPECT_EQ(out->Find("layers.7.v_scale")->shape, (std::vector<std::uint64_t>{3}));
  EXPECT_EQ(Bytes(*out, "layers.7.k_scale"), std::string("\x00\x00\x00\x3F", 4));  // 0.5
  EXPECT_EQ(Bytes(*out, "layers.7.v_scale").substr(8), std::string("\x00\x00\x80\x3E", 4));
}

TEST_F(FileTransfer, ABrokenDownloadLeavesNoFile) {
  ASSERT_THAT(Upload(*client_, *file_, options_), IsOk());
  service().on_read = [](v1::ReadResponse& message) {
    if (message.has_chunk() && message.chunk().layer() == 5) message.Clear();
  };
  EXPECT_THAT(Download(*client_, ReadAll(), dir_.File("out"), {}),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("layer 5 ended at token 0")));
  EXPECT_EQ(dir_.entries(), 0);
  v1::ReadRequest unknown;
  unknown.add_sequences()->set_sequence("unknown");
  EXPECT_THAT(Download(*client_, unknown, dir_.File("out"), {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("unknown")));
  EXPECT_EQ(dir_.entries(), 0);
}

}  // namespace
}  // namespace kvtier::client
