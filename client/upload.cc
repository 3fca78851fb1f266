#include "client/upload.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "cachestore/base/status_macros.h"
#include "client/read_check.h"

namespace kvtier::client {
namespace {

// What a chunk's message has besides K and V: field tags, lengths and four numbers, with room.
constexpr std::uint64_t kMessageOverhead = 128;

// What a part has besides its bytes, as a message says it, with room.
constexpr std::uint64_t kPartOverhead = 64;

// As values or as codes, whichever is more: a page of codes has a header.
std::uint64_t MostTokenBytes(const cachestore::TensorModel& tensor, std::uint64_t values) {
  const auto part = static_cast<std::uint64_t>(tensor.layout.bytes) + kPartOverhead;
  const auto tokens = static_cast<std::uint64_t>(tensor.layout.page_tokens);
  return std::max(values, (part + tokens - 1) / tokens);
}

std::uint64_t TokenBytes(const TensorInfo& tensor) { return tensor.size / tensor.shape[0]; }

// Tokens [first, first + count) of a [tokens, heads, dim] tensor lie together.
absl::Status ReadTokens(const KvFile& file, const TensorInfo& tensor, const v1::AppendChunk& chunk,
                        std::string& out) {
  out.resize(chunk.num_tokens() * TokenBytes(tensor));
  return file.file().Read(tensor, chunk.first_token() * TokenBytes(tensor),
                          std::as_writable_bytes(std::span(out)));
}

absl::Status SendLayer(AppendStream& stream, const KvFile& file, std::uint32_t index,
                       const UploadOptions& options, UploadReport& report) {
  const KvFileLayer& layer = file.layers()[index];
  KVT_ASSIGN_OR_RETURN(const std::uint32_t chunk_tokens, ChunkTokens(file, index, options));
  for (std::uint64_t token = report.first_token; token < file.tokens(); token += chunk_tokens) {
    v1::AppendChunk chunk;
    chunk.set_first_layer(index);
    chunk.set_num_layers(1);
    chunk.set_first_token(token);
    chunk.set_num_tokens(
        static_cast<std::uint32_t>(std::min<std::uint64_t>(chunk_tokens, file.tokens() - token)));
    KVT_RETURN_IF_ERROR(ReadTokens(file, layer.k, chunk, *chunk.mutable_k()));
    if (layer.v) {
      KVT_RETURN_IF_ERROR(ReadTokens(file, *layer.v, chunk, *chunk.mutable_v()));
    }
    report.sent_bytes += chunk.k().size() + chunk.v().size();
    if (options.encoder != nullptr)
      options.encoder->Encode(chunk, stream.opened().residual_origin());
    report.transferred_bytes += ChunkBytes(chunk);
    KVT_RETURN_IF_ERROR(stream.Send(std::move(chunk)));
    if (options.on_progress) options.on_progress(report.sent_bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::uint32_t> ChunkTokens(const KvFile& file, std::uint32_t index,
                                          const UploadOptions& options) {
  const KvFileLayer& layer = file.layers()[index];
  std::uint64_t token_bytes = TokenBytes(layer.k) + (layer.v ? TokenBytes(*layer.v) : 0);
  if (options.encoder != nullptr) {
    const cachestore::LayerModel& model = options.encoder->model().layers[index];
    token_bytes = MostTokenBytes(model.k, TokenBytes(layer.k)) +
                  (layer.v ? MostTokenBytes(model.v, TokenBytes(*layer.v)) : 0);
  }
  const std::uint64_t wanted = std::max<std::uint32_t>(options.chunk_tokens, 1);
  if (options.max_message_bytes == 0) return static_cast<std::uint32_t>(wanted);
  const std::uint64_t room =
      options.max_message_bytes - std::min(options.max_message_bytes, kMessageOverhead);
  if (room < token_bytes) {
    return absl::InvalidArgumentError(
        fmt::format("one token of {} takes {} bytes; the server takes messages of at most {}",
                    layer.k.name, token_bytes, options.max_message_bytes));
  }
  return static_cast<std::uint32_t>(std::min(wanted, room / token_bytes));
}

absl::StatusOr<UploadReport> Upload(Client& client, const KvFile& file,
                                    const UploadOptions& options) {
  UploadReport report;
  const absl::Time start = absl::Now();
  AppendOptions append = options.append;
  append.expected_bytes = file.bytes();
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<AppendStream> stream, client.OpenAppend(append));
  report.first_token = stream->opened().received_tokens();
  for (std::uint32_t layer = 0; layer < file.layers().size(); ++layer) {
    KVT_RETURN_IF_ERROR(SendLayer(*stream, file, layer, options, report));
  }
  KVT_ASSIGN_OR_RETURN(report.append, stream->Finish());
  if (options.seal) {
    v1::SealRequest request;
    request.set_namespace_(options.append.open.namespace_());
    request.set_sequence(options.append.open.sequence());
    request.set_tokens(file.tokens());
    KVT_RETURN_IF_ERROR(client.Seal(request).status());
  }
  report.duration = absl::Now() - start;
  return report;
}

}  // namespace kvtier::client
