#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::testing {

inline grpc::Status ErrorWithReason(grpc::StatusCode code, const std::string& message,
                                    const std::string& reason) {
  google::rpc::ErrorInfo info;
  info.set_domain("kvtier");
  info.set_reason(reason);
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  status.add_details()->PackFrom(info);
  return grpc::Status(code, message, status.SerializeAsString());
}

// A server that keeps what it is sent as it is: enough of kvtier's contract for the client's side
// of it, with places to go wrong on purpose. Source is two bytes a value; FP8 output is the high
// byte.
class FakeService : public v1::KvTierService::Service {
 public:
  struct Layer {
    std::string k, v;  // [tokens, heads, dim]
    std::uint64_t tokens = 0;
  };
  struct Sequence {
    std::string model_id;
    bool sealed = false;
    std::map<std::uint32_t, Layer> layers;
  };

  // Set before calls.
  std::uint64_t max_message_bytes = 1 << 20;
  std::uint32_t read_chunk_tokens = 7;
  std::function<grpc::Status(const v1::AppendChunk&, int number)> on_chunk;  // before it is kept
  std::function<void(v1::ReadResponse&)> on_read;  // may change a message; clear it to leave it out

  grpc::Status RegisterModel(grpc::ServerContext*, const v1::RegisterModelRequest* request,
                             v1::RegisterModelResponse* reply) override {
    const std::lock_guard lock(mutex);
    if (request->policy().kv_cache_dtype() == "nonsense") {
      return ErrorWithReason(grpc::StatusCode::INVALID_ARGUMENT,
                             "policy.kv_cache_dtype is nonsense", "UNKNOWN_FORMAT");
    }
    registered = *request;
    reply->set_model_id("model-1");
    reply->set_kv_cache_dtype(request->policy().kv_cache_dtype());
    reply->set_page_tokens(128);
    reply->set_capacity_line("KV cache size: 1,000 tokens, Maximum concurrency ...");
    reply->set_scales_line("scales: none");
    reply->add_notices("a notice");
    reply->set_max_message_bytes(max_message_bytes);
    reply->set_capacity_tokens(1000);
    return grpc::Status::OK;
  }

  grpc::Status Append(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::AppendResponse, v1::AppendRequest>* stream) override {
    const grpc::Status status = TakeAppend(*stream);
    if (context->IsCancelled()) ++cancelled;
    return status;
  }

  grpc::Status Seal(grpc::ServerContext*, const v1::SealRequest* request,
                    v1::SealResponse* reply) override {
    const std::lock_guard lock(mutex);
    Sequence& sequence = sequences[request->sequence()];
    if (Committed(sequence) != request->tokens()) {
      return ErrorWithReason(grpc::StatusCode::FAILED_PRECONDITION, "tokens differ", "INCOMPLETE");
    }
    sequence.sealed = true;
    reply->set_tokens(request->tokens());
    return grpc::Status::OK;
  }

  grpc::Status Abort(grpc::ServerContext*, const v1::AbortRequest* request,
                     v1::AbortResponse*) override {
    return Drop(request->sequence());
  }
  grpc::Status Remove(grpc::ServerContext*, const v1::RemoveRequest* request,
                      v1::RemoveResponse*) override {
    return Drop(request->sequence());
  }

  grpc::Status Read(grpc::ServerContext* context, const v1::ReadRequest* request,
                    grpc::ServerWriter<v1::ReadResponse>* writer) override {
    const std::lock_guard lock(mutex);
    last_read = *request;
    v1::ReadResponse manifest;
    for (const v1::SequenceRange& range : request->sequences()) {
      if (!sequences.contains(range.sequence())) return NoSequence(range.sequence());
      AddManifest(*request, range, *manifest.mutable_manifest());
    }
    const v1::ReadManifest kept = manifest.manifest();
    Write(*writer, manifest);
    for (int s = 0; s < kept.sequences_size(); ++s) {
      for (const v1::LayerManifest& layer : kept.sequences(s).layers()) {
        WriteLayer(*request, kept.sequences(s), s, layer, *writer);
      }
    }
    v1::ReadResponse summary;
    summary.mutable_summary()->set_saturated_values(3);
    Write(*writer, summary);
    if (context->IsCancelled()) ++cancelled;
    return grpc::Status::OK;
  }

  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeRequest* request,
                        v1::DescribeResponse* reply) override {
    const std::lock_guard lock(mutex);
    if (!sequences.contains(request->sequence())) return NoSequence(request->sequence());
    *reply->mutable_info() = InfoOf(request->sequence());
    *reply->mutable_spec() = registered.spec();
    reply->set_page_tokens(128);
    for (const auto& [index, layer] : sequences[request->sequence()].layers) {
      v1::LayerInfo& added = *reply->add_layers();
      added.set_layer(index);
      added.set_kv_cache_dtype("auto");
      added.set_received_tokens(layer.tokens);
    }
    return grpc::Status::OK;
  }

  // Two a page, so that callers meet a second one.
  grpc::Status ListSequences(grpc::ServerContext*, const v1::ListSequencesRequest* request,
                             v1::ListSequencesResponse* reply) override {
    const std::lock_guard lock(mutex);
    for (auto it = sequences.upper_bound(request->page_token()); it != sequences.end(); ++it) {
      if (reply->sequences_size() == 2) {
        reply->set_next_page_token(reply->sequences(1).sequence());
        break;
      }
      *reply->add_sequences() = InfoOf(it->first);
    }
    return grpc::Status::OK;
  }

  grpc::Status Capacity(grpc::ServerContext*, const v1::CapacityRequest* request,
                        v1::CapacityResponse* reply) override {
    reply->set_budget_bytes(1 << 20);
    reply->mutable_memory()->set_free(1 << 20);
    v1::ModelCapacity& model = *reply->add_models();
    model.set_model_id("model-1");
    model.set_name("tiny");
    model.set_kv_cache_dtype(request->kv_cache_dtype().empty() ? "auto"
                                                               : request->kv_cache_dtype());
    model.set_more_tokens(12'345);
    return grpc::Status::OK;
  }

  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest*,
                     v1::DrainResponse* reply) override {
    reply->set_boot_id("boot-1");
    return grpc::Status::OK;
  }

  std::mutex mutex;
  std::map<std::string, Sequence> sequences;
  v1::RegisterModelRequest registered;
  v1::AppendOpen opened;
  v1::ReadRequest last_read;
  std::vector<v1::AppendChunk> chunks;  // without their payload, as they came
  std::atomic<int> cancelled = 0;

 private:
  using AppendStream = grpc::ServerReaderWriter<v1::AppendResponse, v1::AppendRequest>;

  static grpc::Status NoSequence(const std::string& sequence) {
    return ErrorWithReason(grpc::StatusCode::NOT_FOUND, "sequence " + sequence + " is not held",
                           "UNKNOWN_SEQUENCE");
  }

  grpc::Status Drop(const std::string& sequence) {
    const std::lock_guard lock(mutex);
    return sequences.erase(sequence) > 0 ? grpc::Status::OK : NoSequence(sequence);
  }

  std::uint64_t Committed(const Sequence& sequence) const {
    if (static_cast<int>(sequence.layers.size()) < registered.spec().layers_size()) return 0;
    std::uint64_t tokens = sequence.layers.empty() ? 0 : ~std::uint64_t{0};
    for (const auto& [index, layer] : sequence.layers) tokens = std::min(tokens, layer.tokens);
    return tokens;
  }

  grpc::Status TakeAppend(AppendStream& stream) {
    v1::AppendRequest request;
    if (!stream.Read(&request) || !request.has_open()) {
      return {grpc::StatusCode::INVALID_ARGUMENT, "the first message is not open"};
    }
    v1::AppendResponse ack;
    {
      const std::lock_guard lock(mutex);
      opened = request.open();
      Sequence& sequence = sequences[opened.sequence()];
      sequence.model_id = opened.model_id();
      ack.set_received_tokens(Committed(sequence));
      ack.set_committed_tokens(Committed(sequence));
    }
    stream.Write(ack);
    for (int number = 0; stream.Read(&request); ++number) {
      if (on_chunk) {
        const grpc::Status status = on_chunk(request.chunk(), number);
        if (!status.ok()) return status;
      }
      stream.Write(TakeChunk(*request.mutable_chunk()));
    }
    return grpc::Status::OK;
  }

  v1::AppendResponse TakeChunk(v1::AppendChunk& chunk) {
    const std::lock_guard lock(mutex);
    Sequence& sequence = sequences[opened.sequence()];
    Layer& layer = sequence.layers[chunk.first_layer()];
    layer.k += chunk.k();
    layer.v += chunk.v();
    layer.tokens += chunk.num_tokens();
    chunk.clear_k();
    chunk.clear_v();
    chunks.push_back(chunk);
    v1::AppendResponse ack;
    ack.set_received_tokens(layer.tokens);
    ack.set_committed_tokens(Committed(sequence));
    ack.set_skipped_tokens(1);
    ack.set_saturated_values(2);
    ack.set_chunks(chunks.size());
    return ack;
  }

  v1::SequenceInfo InfoOf(const std::string& name) {
    const Sequence& sequence = sequences[name];
    v1::SequenceInfo info;
    info.set_sequence(name);
    info.set_model_id(sequence.model_id);
    info.set_kv_cache_dtype("auto");
    info.set_state(sequence.sealed ? v1::SEQUENCE_STATE_SEALED : v1::SEQUENCE_STATE_OPEN);
    info.set_committed_tokens(Committed(sequence));
    std::uint64_t bytes = 0;
    for (const auto& [index, layer] : sequence.layers) bytes += layer.k.size() + layer.v.size();
    info.set_source_bytes(bytes);
    info.mutable_memory()->set_codes(bytes / 4);
    info.mutable_memory()->set_slack(bytes / 4);
    return info;
  }

  static bool AsFp8(const v1::ReadRequest& request) { return request.as() == v1::READ_AS_FP8_E4M3; }

  void AddManifest(const v1::ReadRequest& request, const v1::SequenceRange& range,
                   v1::ReadManifest& manifest) {
    const Sequence& held = sequences[range.sequence()];
    v1::SequenceManifest& sequence = *manifest.add_sequences();
    sequence.set_sequence(range.sequence());
    sequence.set_model_id(held.model_id);
    sequence.set_first_token(range.first_token());
    sequence.set_num_tokens(range.num_tokens() > 0 ? range.num_tokens()
                                                   : Committed(held) - range.first_token());
    sequence.set_first_head(request.first_head());
    const int layers = request.num_layers() > 0
                           ? static_cast<int>(request.first_layer() + request.num_layers())
                           : registered.spec().layers_size();
    for (int i = static_cast<int>(request.first_layer()); i < layers; ++i) {
      const v1::LayerSpec& spec = registered.spec().layers(i);
      v1::LayerManifest& layer = *sequence.add_layers();
      layer.set_layer(static_cast<std::uint32_t>(i));
      layer.set_num_heads(request.num_heads() > 0 ? request.num_heads()
                                                  : spec.kv_heads() - request.first_head());
      layer.set_k_head_dim(spec.k_head_dim());
      layer.set_v_head_dim(spec.v_head_dim());
      layer.set_dtype(AsFp8(request) ? v1::DTYPE_FP8_E4M3 : v1::DTYPE_BF16);
      if (AsFp8(request)) {
        layer.add_k_scale(0.5F);
        for (std::uint32_t h = 0; h < layer.num_heads(); ++h) layer.add_v_scale(0.25F);
      }
      manifest.set_total_bytes(manifest.total_bytes() +
                               sequence.num_tokens() * layer.num_heads() *
                                   (layer.k_head_dim() + layer.v_head_dim()) *
                                   (AsFp8(request) ? 1 : 2));
    }
  }

  // Tokens [first, first + count) of a layer's part as one block.
  static std::string Block(const v1::ReadRequest& request, const v1::LayerManifest& layer,
                           const std::string& held, std::uint64_t dim, std::uint64_t all_heads,
                           std::uint64_t first, std::uint64_t count) {
    std::string block;
    const auto add = [&](std::uint64_t token, std::uint64_t head) {
      const std::uint64_t vector = (first + token) * all_heads + request.first_head() + head;
      for (std::uint64_t d = 0; d < dim; ++d) {
        if (!AsFp8(request)) block.push_back(held[(vector * dim + d) * 2]);
        block.push_back(held[(vector * dim + d) * 2 + 1]);
      }
    };
    const std::uint64_t heads = layer.num_heads();
    for (std::uint64_t i = 0; i < count * heads; ++i) {
      if (request.layout() == v1::LAYOUT_HND) {
        add(i % count, i / count);
      } else {
        add(i / heads, i % heads);
      }
    }
    return block;
  }

  void WriteLayer(const v1::ReadRequest& request, const v1::SequenceManifest& sequence, int index,
                  const v1::LayerManifest& layer, grpc::ServerWriter<v1::ReadResponse>& writer) {
    const Layer& held = sequences[sequence.sequence()].layers[layer.layer()];
    const std::uint64_t heads =
        registered.spec().layers(static_cast<int>(layer.layer())).kv_heads();
    const std::uint64_t block = request.block_tokens();
    // Whole blocks, two a chunk, where there are blocks.
    const std::uint64_t step = block > 0 ? 2 * block : read_chunk_tokens;
    for (std::uint64_t done = 0; done < sequence.num_tokens(); done += step) {
      const std::uint64_t count = std::min(step, sequence.num_tokens() - done);
      v1::ReadResponse message;
      v1::ReadChunk& chunk = *message.mutable_chunk();
      chunk.set_sequence_index(static_cast<std::uint32_t>(index));
      chunk.set_layer(layer.layer());
      chunk.set_first_token(sequence.first_token() + done);
      chunk.set_num_tokens(static_cast<std::uint32_t>(count));
      const std::uint64_t in_block = block > 0 ? block : count;
      for (std::uint64_t b = 0; b < count; b += in_block) {
        const std::uint64_t first = sequence.first_token() + done + b;
        const std::uint64_t tokens = std::min(in_block, count - b);
        *chunk.mutable_k() +=
            Block(request, layer, held.k, layer.k_head_dim(), heads, first, tokens);
        *chunk.mutable_v() +=
            Block(request, layer, held.v, layer.v_head_dim(), heads, first, tokens);
      }
      Write(writer, message);
    }
  }

  void Write(grpc::ServerWriter<v1::ReadResponse>& writer, v1::ReadResponse message) {
    if (on_read) on_read(message);
    if (message.message_case() != v1::ReadResponse::MESSAGE_NOT_SET) writer.Write(message);
  }
};

// The service behind a real port of this machine.
class FakeServer {
 public:
  FakeServer() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(16 << 20);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  FakeServer(const FakeServer&) = delete;
  FakeServer& operator=(const FakeServer&) = delete;
  ~FakeServer() { server_->Shutdown(std::chrono::system_clock::now()); }

  FakeService& service() { return service_; }
  const std::string& address() const { return address_; }

 private:
  FakeService service_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace kvtier::testing
