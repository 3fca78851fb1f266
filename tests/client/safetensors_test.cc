#include "client/safetensors.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/client/temp_dir.h"
#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::ReadFile;
using kvtier::testing::StatusIs;
using kvtier::testing::TempDir;
using ::testing::HasSubstr;

std::string LittleEndian(std::uint64_t number) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>((number >> (8 * i)) & 0xFF));
  return bytes;
}

std::string FileBytes(const std::string& header, std::size_t data_bytes) {
  return LittleEndian(header.size()) + header + std::string(data_bytes, '\x5A');
}

TensorInfo Declare(const std::string& name, const std::string& dtype,
                   std::vector<std::uint64_t> shape) {
  TensorInfo tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

std::string Bytes(const SafetensorsReader& file, const std::string& name) {
  const TensorInfo* tensor = file.Find(name);
  if (tensor == nullptr) return "no such tensor";
  std::string bytes(tensor->size, '\0');
  EXPECT_THAT(file.Read(*tensor, 0, std::as_writable_bytes(std::span(bytes))), IsOk());
  return bytes;
}

TEST(Safetensors, WritesInAnyOrderWhatItReads) {
  const TempDir dir;
  const std::string path = dir.File("a.safetensors");
  SafetensorsHeader header;
  header.tensors = {Declare("b", "BF16", {2, 3, 4}), Declare("a", "F32", {5}),
                    Declare("empty", "F16", {0, 7}), Declare("scalar", "F8_E4M3", {})};
  header.metadata = {{"layout", "NHD"}};
  auto writer = SafetensorsWriter::Create(path, header);
  ASSERT_THAT(writer, IsOk());
  const std::string b(48, 'b');
  const std::string a = "0123456789abcdefghij";
  const auto bytes = [](const std::string& text) { return std::as_bytes(std::span(text)); };
  EXPECT_THAT(writer->Write(1, 10, bytes(a).subspan(10)), IsOk());
  EXPECT_THAT(writer->Write(3, 0, bytes("s").first(1)), IsOk());
  EXPECT_THAT(writer->Write(0, 0, bytes(b)), IsOk());
  EXPECT_THAT(writer->Write(1, 0, bytes(a).first(10)), IsOk());
  ASSERT_THAT(writer->Finish(), IsOk());

  const auto file = SafetensorsReader::Open(path);
  ASSERT_THAT(file, IsOk());
  ASSERT_EQ(file->tensors().size(), 4u);
  EXPECT_EQ(file->Find("b")->shape, (std::vector<std::uint64_t>{2, 3, 4}));
  EXPECT_EQ(file->Find("b")->dtype, "BF16");
  EXPECT_EQ(Bytes(*file, "b"), b);
  EXPECT_EQ(Bytes(*file, "a"), a);
  EXPECT_EQ(Bytes(*file, "empty"), "");
  EXPECT_EQ(Bytes(*file, "scalar"), "s");
  EXPECT_EQ(file->metadata().at("layout"), "NHD");
  EXPECT_EQ(file->Find("c"), nullptr);
  EXPECT_EQ(dir.entries(), 1);
}

// A program that maps the file finds its data aligned.
TEST(Safetensors, DataStartsAtAMultipleOfEight) {
  for (std::size_t length = 1; length <= 8; ++length) {
    SafetensorsHeader header;
    header.tensors = {Declare(std::string(length, 'n'), "U8", {1})};
    const auto text = BuildSafetensorsHeader(header);
    ASSERT_THAT(text, IsOk());
    EXPECT_EQ(text->size() % 8, 0u);
  }
}

TEST(Safetensors, ReadsPartsOfATensorOnly) {
  const TempDir dir;
  const std::string path =
      dir.Write("a", FileBytes(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4));
  const auto file = SafetensorsReader::Open(path);
  ASSERT_THAT(file, IsOk());
  std::vector<std::byte> out(3);
  EXPECT_THAT(file->Read(file->tensors()[0], 1, out), IsOk());
  EXPECT_THAT(file->Read(file->tensors()[0], 2, out),
              StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("[2, 5) of tensor x")));
  EXPECT_THAT(file->Read(file->tensors()[0], std::numeric_limits<std::uint64_t>::max(), out),
              StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("tensor x")));
}

TEST(Safetensors, AnUnfinishedFileLeavesNothing) {
  const TempDir dir;
  const std::string path = dir.Write("a", "what was here before");
  SafetensorsHeader header;
  header.tensors = {Declare("x", "U8", {4})};
  {
    auto writer = SafetensorsWriter::Create(path, header);
    ASSERT_THAT(writer, IsOk());
    EXPECT_THAT(writer->Write(0, 0, std::vector<std::byte>(3)), IsOk());
    EXPECT_THAT(writer->Finish(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                           HasSubstr("tensor x got 3 of its 4 bytes")));
    EXPECT_EQ(dir.entries(), 2);
  }
  EXPECT_EQ(dir.entries(), 1);
  EXPECT_EQ(ReadFile(path), "what was here before");
}

TEST(Safetensors, WriterRefusesWhatDoesNotFit) {
  const TempDir dir;
  SafetensorsHeader header;
  header.tensors = {Declare("x", "U8", {4})};
  auto writer = SafetensorsWriter::Create(dir.File("a"), header);
  ASSERT_THAT(writer, IsOk());
  EXPECT_THAT(writer->Write(0, 2, std::vector<std::byte>(3)),
              StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("[2, 5) of tensor x")));
  EXPECT_THAT(writer->Write(1, 0, std::vector<std::byte>(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("index 1")));
}

TEST(Safetensors, WriterRefusesAPlaceItCannotReplace) {
  const TempDir dir;
  EXPECT_THAT(SafetensorsWriter::Create("/dev/null", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  EXPECT_THAT(SafetensorsWriter::Create(dir.File("no/such/folder"), {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no/such/folder")));
}

TEST(Safetensors, WriterRefusesTwoTensorsOfOneName) {
  const TempDir dir;
  SafetensorsHeader header;
  header.tensors = {Declare("x", "U8", {4}), Declare("x", "U8", {4})};
  EXPECT_THAT(SafetensorsWriter::Create(dir.File("a"), header),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("x is declared twice")));
}

struct LyingFile {
  const char* name;
  std::string bytes;
  std::vector<std::string> message;  // each a part of it
};

std::vector<LyingFile> LyingFiles() {
  const std::string good = R"({"x":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}})";
  return {
      {"empty", "", {"0 bytes"}},
      {"seven bytes", "1234567", {"7 bytes"}},
      {"length past the end", LittleEndian(1000) + good, {"1000", std::to_string(good.size())}},
      {"length of all ones", LittleEndian(~std::uint64_t{0}) + good, {"18446744073709551615"}},
      {"length cut short", LittleEndian(good.size() - 1) + good, {"not valid JSON"}},
      {"truncated data", FileBytes(good, 7), {"tensor x", "[0, 8]", "7 bytes"}},
      {"data behind the last tensor", FileBytes(good, 9), {"tensor x", "byte 8", "9 bytes"}},
      {"no JSON", FileBytes("{]", 0), {"not valid JSON at its byte 2"}},
      {"no object", FileBytes("[1]", 0), {"array"}},
      {"tensor is a number", FileBytes(R"({"x":1})", 0), {"tensor x", "number"}},
      {"no dtype",
       FileBytes(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", 1),
       {"tensor x has no dtype"}},
      {"unknown dtype",
       FileBytes(R"({"x":{"dtype":"F7","shape":[1],"data_offsets":[0,1]}})", 1),
       {"tensor x", "F7"}},
      {"no shape",
       FileBytes(R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", 1),
       {"tensor x has no shape"}},
      {"negative extent",
       FileBytes(R"({"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1),
       {"tensor x", "shape", "[-1]"}},
      {"fraction",
       FileBytes(R"({"x":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1),
       {"tensor x", "shape", "[1.0]"}},
      {"size overflows",
       FileBytes(R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
                 0),
       {"tensor x", "4294967296, 4294967296", "64 bits"}},
      {"overflow behind a zero",
       FileBytes(R"({"x":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})",
                 0),
       {"tensor x", "64 bits"}},
      {"half a byte",
       FileBytes(R"({"x":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1),
       {"tensor x", "whole number of bytes"}},
      {"size of another shape",
       FileBytes(R"({"x":{"dtype":"F16","shape":[2,2],"data_offsets":[0,6]}})", 6),
       {"tensor x", "6 bytes", "[2, 2] of F16", "8"}},
      {"backward offsets",
       FileBytes(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}})", 2),
       {"tensor x", "[2, 1]"}},
      {"three offsets",
       FileBytes(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}})", 1),
       {"tensor x", "[0, 1, 1]"}},
      {"overlap",
       FileBytes(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                 R"("y":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                 6),
       {"tensor y begins at byte 2", "tensor x ends at 4"}},
      {"gap",
       FileBytes(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                 R"("y":{"dtype":"U8","shape":[4],"data_offsets":[6,10]}})",
                 10),
       {"tensor y begins at byte 6", "tensor x ends at 4"}},
      {"one name twice",
       FileBytes(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                 R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                 1),
       {"\"x\" twice"}},
      {"one field twice",
       FileBytes(R"({"x":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1),
       {"\"shape\" twice"}},
      {"metadata is no object", FileBytes(R"({"__metadata__":"a"})", 0), {"__metadata__"}},
      {"metadata holds a number",
       FileBytes(R"({"__metadata__":{"a":1}})", 0),
       {"__metadata__", "a"}},
  };
}

TEST(Safetensors, RefusesALyingFileByTensorAndNumbers) {
  const TempDir dir;
  for (const LyingFile& lying : LyingFiles()) {
    SCOPED_TRACE(lying.name);
    const auto file = SafetensorsReader::Open(dir.Write("lying", lying.bytes));
    EXPECT_THAT(file, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(dir.File("lying"))));
    for (const std::string& part : lying.message) {
      EXPECT_THAT(std::string(file.status().message()), HasSubstr(part));
    }
  }
}

// Two equal inner keys in two tensors are no duplicate.
TEST(Safetensors, TakesTwoTensorsOfOneShape) {
  const TempDir dir;
  const auto file = SafetensorsReader::Open(
      dir.Write("a", FileBytes(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                               R"("y":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                               2)));
  ASSERT_THAT(file, IsOk());
  EXPECT_EQ(file->tensors().size(), 2u);
}

TEST(Safetensors, RefusesWhatIsNoFile) {
  const TempDir dir;
  EXPECT_THAT(SafetensorsReader::Open(dir.File("missing")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("missing")));
  EXPECT_THAT(SafetensorsReader::Open(dir.File("")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
}

// A good header with bytes changed at random either still describes its data or is refused; it
// never reads outside. The sanitizers are the judge.
TEST(Safetensors, SurvivesDamagedHeaders) {
  const std::string good = R"({"__metadata__":{"a":"b"},)"
                           R"("x":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]},)"
                           R"("y":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})";
  ASSERT_THAT(ParseSafetensorsHeader(good, 16), IsOk());
  std::mt19937 random(20260);
  int refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string damaged = good;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i) {
      damaged[random() % damaged.size()] = static_cast<char>(random() % 128);
    }
    const auto header = ParseSafetensorsHeader(damaged, 16);
    if (!header.ok()) {
      ++refused;
      continue;
    }
    std::uint64_t bytes = 0;
    for (const TensorInfo& tensor : header->tensors) bytes += tensor.size;
    EXPECT_EQ(bytes, 16u) << damaged;
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace kvtier::client
