#include "client/download.h"

#include <fmt/format.h>

#include <bit>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "cachestore/base/status_macros.h"
#include "client/kv_file.h"
#include "client/read_check.h"
#include "client/safetensors.h"

namespace kvtier::client {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors and the wire are");

using Scales = google::protobuf::RepeatedField<float>;

// A file being filled from one sequence's chunks.
class SequenceFile {
 public:
  SequenceFile(v1::ReadRequest request, std::string path)
      : request_(std::move(request)), path_(std::move(path)) {}

  absl::Status Begin(const v1::SequenceManifest& sequence);
  absl::Status Take(const v1::ReadChunk& chunk);
  absl::Status Finish() { return writer_->Finish(); }

 private:
  // Places of a layer's tensors in the writer.
  struct LayerPlace {
    std::size_t k = 0;
    std::optional<std::size_t> v;
  };

  std::size_t Declare(SafetensorsHeader& header, const std::string& name, std::uint32_t dim,
                      const v1::LayerManifest& layer) const;
  absl::Status WritePart(std::size_t tensor, std::uint32_t dim, const v1::LayerManifest& layer,
                         std::uint64_t first, const std::string& bytes);

  const v1::ReadRequest request_;
  const std::string path_;
  v1::SequenceManifest sequence_;
  std::vector<LayerPlace> places_;
  std::vector<std::pair<std::size_t, Scales>> scales_;  // tensor and values
  std::optional<SafetensorsWriter> writer_;
};

std::size_t SequenceFile::Declare(SafetensorsHeader& header, const std::string& name,
                                  std::uint32_t dim, const v1::LayerManifest& layer) const {
  const std::uint64_t tokens = LayerTokens(sequence_, layer);
  TensorInfo tensor;
  tensor.name = name;
  std::uint64_t row = dim;
  if (const auto dtype = SafetensorsDtype(layer.dtype())) {
    tensor.dtype = *dtype;
  } else {  // blocks, as bytes
    tensor.dtype = "U8";
    row = *RowBytes(layer.dtype(), dim);
  }
  if (request_.layout() == v1::LAYOUT_HND) {
    tensor.shape = {layer.num_heads(), tokens, row};
  } else {
    tensor.shape = {tokens, layer.num_heads(), row};
  }
  header.tensors.push_back(std::move(tensor));
  return header.tensors.size() - 1;
}

absl::Status SequenceFile::Begin(const v1::SequenceManifest& sequence) {
  sequence_ = sequence;
  SafetensorsHeader header;
  header.metadata = {
      {"sequence", sequence.sequence()},
      {"model_id", sequence.model_id()},
      {"first_token", fmt::format("{}", sequence.first_token())},
      {"end_token", fmt::format("{}", sequence.first_token() + sequence.num_tokens())},
      {"first_head", fmt::format("{}", sequence.first_head())},
      {"layout", request_.layout() == v1::LAYOUT_HND ? "HND" : "NHD"}};
  const auto declare_scales = [&](const std::string& name, const Scales& values) {
    TensorInfo tensor;
    tensor.name = name;
    tensor.dtype = "F32";
    tensor.shape = {static_cast<std::uint64_t>(values.size())};
    scales_.emplace_back(header.tensors.size(), values);
    header.tensors.push_back(std::move(tensor));
  };
  for (const v1::LayerManifest& layer : sequence_.layers()) {
    const std::uint32_t n = layer.layer();
    if (layer.has_first_token()) {
      header.metadata.emplace(LayerTensorName(n, "first_token"),
                              fmt::format("{}", layer.first_token()));
    }
    LayerPlace place;
    place.k = Declare(header, LayerTensorName(n, "k"), layer.k_head_dim(), layer);
    if (layer.v_head_dim() > 0) {
      place.v = Declare(header, LayerTensorName(n, "v"), layer.v_head_dim(), layer);
    }
    places_.push_back(place);
    if (layer.q_scale_size() > 0) declare_scales(LayerTensorName(n, "q_scale"), layer.q_scale());
    if (!IsFp8(layer.dtype())) continue;
    declare_scales(LayerTensorName(n, "k_scale"), layer.k_scale());
    if (place.v) declare_scales(LayerTensorName(n, "v_scale"), layer.v_scale());
  }
  KVT_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                       SafetensorsWriter::Create(path_, std::move(header)));
  writer_.emplace(std::move(writer));
  for (const auto& [tensor, values] : scales_) {
    const std::span<const float> floats(values.data(), static_cast<std::size_t>(values.size()));
    KVT_RETURN_IF_ERROR(writer_->Write(tensor, 0, std::as_bytes(floats)));
  }
  return absl::OkStatus();
}

absl::Status SequenceFile::WritePart(std::size_t tensor, std::uint32_t dim,
                                     const v1::LayerManifest& layer, std::uint64_t first,
                                     const std::string& bytes) {
  const ReadGeometry geometry{.layout = request_.layout(),
                              .block_tokens = request_.block_tokens(),
                              .tokens = LayerTokens(sequence_, layer),
                              .heads = layer.num_heads(),
                              .vector_bytes = *RowBytes(layer.dtype(), dim)};
  const std::uint64_t token_bytes = geometry.heads * geometry.vector_bytes;
  if (token_bytes == 0) return absl::OkStatus();
  const std::span<const std::byte> chunk = std::as_bytes(std::span(bytes));
  return ForEachRun(geometry, first, bytes.size() / token_bytes, [&](const ByteRun& run) {
    return writer_->Write(tensor, run.layer_offset, chunk.subspan(run.chunk_offset, run.size));
  });
}

absl::Status SequenceFile::Take(const v1::ReadChunk& chunk) {
  const std::uint32_t index = chunk.layer() - sequence_.layers(0).layer();
  const v1::LayerManifest& layer = sequence_.layers(static_cast<int>(index));
  const LayerPlace& place = places_[index];
  const std::uint64_t first = chunk.first_token() - FirstToken(sequence_, layer);
  KVT_RETURN_IF_ERROR(WritePart(place.k, layer.k_head_dim(), layer, first, chunk.k()));
  if (!place.v) return absl::OkStatus();
  return WritePart(*place.v, layer.v_head_dim(), layer, first, chunk.v());
}

}  // namespace

absl::StatusOr<DownloadReport> Download(Client& client, const v1::ReadRequest& request,
                                        const std::string& path, const DownloadProgress& progress,
                                        Transfer transfer) {
  if (request.sequences_size() != 1) {
    return absl::InvalidArgumentError(
        fmt::format("{} sequences were asked for; a file holds one", request.sequences_size()));
  }
  if (request.as() == v1::READ_AS_STORED) {
    return absl::InvalidArgumentError(
        "as is STORED; want values for a file: ask for them with Transfer::kStored to have them "
        "travel as codes");
  }
  SequenceFile file(request, path);
  std::uint64_t total = 0;
  std::uint64_t written = 0;
  ReadHandlers handlers;
  handlers.on_manifest = [&](const v1::ReadManifest& manifest) {
    total = manifest.total_bytes();
    return file.Begin(manifest.sequences(0));
  };
  handlers.on_chunk = [&](const v1::ReadChunk& chunk) {
    KVT_RETURN_IF_ERROR(file.Take(chunk));
    written += chunk.k().size() + chunk.v().size();
    if (progress) progress(written, total);
    return absl::OkStatus();
  };
  DownloadReport report;
  const absl::Time start = absl::Now();
  KVT_ASSIGN_OR_RETURN(report.read, client.Read(request, handlers, transfer));
  report.duration = absl::Now() - start;
  KVT_RETURN_IF_ERROR(file.Finish());
  return report;
}

}  // namespace kvtier::client
