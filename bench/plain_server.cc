#include "bench/plain_server.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::bench {
namespace {

constexpr std::int64_t kReadChunkBytes = 1 << 20;  // as kvtierd's default

class DiscardReactor final : public grpc::ServerBidiReactor<v1::AppendRequest, v1::AppendResponse> {
 public:
  DiscardReactor() { StartRead(&request_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    response_.set_chunks(response_.chunks() + (request_.has_chunk() ? 1 : 0));
    StartWrite(&response_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::CANCELLED);
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  v1::AppendRequest request_;
  v1::AppendResponse response_;
};

// Sends the sequence that the request names as "LAYERS HEADS DIM TOKENS".
class ReadyBytesReactor final : public grpc::ServerWriteReactor<v1::ReadResponse> {
 public:
  explicit ReadyBytesReactor(const v1::ReadRequest& request) {
    long long tokens = 0;
    std::sscanf(request.sequences(0).sequence().c_str(), "%d %d %d %lld", &layers_, &heads_, &dim_,
                &tokens);
    tokens_ = tokens;
    Manifest(*response_.mutable_manifest());
    StartWrite(&response_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok || done_) return Finish(ok ? grpc::Status::OK : grpc::Status::CANCELLED);
    if (layer_ == layers_) {
      done_ = true;
      response_.mutable_summary();
      return StartWrite(&response_);
    }
    const std::int64_t row = std::int64_t{heads_} * dim_ * 2;
    const std::int64_t count =
        std::min(std::max<std::int64_t>(1, kReadChunkBytes / (2 * row)), tokens_ - sent_);
    v1::ReadChunk& chunk = *response_.mutable_chunk();
    chunk.set_layer(static_cast<std::uint32_t>(layer_));
    chunk.set_first_token(static_cast<std::uint64_t>(sent_));
    chunk.set_num_tokens(static_cast<std::uint32_t>(count));
    chunk.mutable_k()->resize(static_cast<std::size_t>(count * row));
    chunk.mutable_v()->resize(static_cast<std::size_t>(count * row));
    sent_ += count;
    if (sent_ == tokens_) {
      sent_ = 0;
      ++layer_;
    }
    StartWrite(&response_);
  }
  void OnDone() override { delete this; }

 private:
  void Manifest(v1::ReadManifest& manifest) const {
    v1::SequenceManifest& sequence = *manifest.add_sequences();
    sequence.set_sequence(std::to_string(layers_) + " " + std::to_string(heads_) + " " +
                          std::to_string(dim_) + " " + std::to_string(tokens_));
    sequence.set_num_tokens(static_cast<std::uint64_t>(tokens_));
    sequence.set_committed_tokens(static_cast<std::uint64_t>(tokens_));
    for (int i = 0; i < layers_; ++i) {
      v1::LayerManifest& layer = *sequence.add_layers();
      layer.set_layer(static_cast<std::uint32_t>(i));
      layer.set_num_heads(static_cast<std::uint32_t>(heads_));
      layer.set_k_head_dim(static_cast<std::uint32_t>(dim_));
      layer.set_v_head_dim(static_cast<std::uint32_t>(dim_));
      layer.set_dtype(v1::DTYPE_BF16);
    }
    manifest.set_total_bytes(static_cast<std::uint64_t>(tokens_ * layers_ * heads_ * dim_ * 4));
  }

  v1::ReadResponse response_;
  int layers_ = 0, heads_ = 0, dim_ = 0;
  std::int64_t tokens_ = 0;
  int layer_ = 0;
  std::int64_t sent_ = 0;
  bool done_ = false;
};

class PlainService final : public v1::KvTierService::CallbackService {
 public:
  grpc::ServerBidiReactor<v1::AppendRequest, v1::AppendResponse>* Append(
      grpc::CallbackServerContext*) override {
    return new DiscardReactor;  // deletes itself when done
  }
  grpc::ServerWriteReactor<v1::ReadResponse>* Read(grpc::CallbackServerContext*,
                                                   const v1::ReadRequest* request) override {
    return new ReadyBytesReactor(*request);  // deletes itself when done
  }
};

}  // namespace

int RunPlainServer(const char* ready_file) {
  PlainService service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  builder.SetMaxReceiveMessageSize(16 << 20);
  const auto server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  const std::string draft = std::string(ready_file) + ".new";
  std::ofstream(draft) << "{\"listen\":\"127.0.0.1:" << port << "\"}\n";
  if (std::rename(draft.c_str(), ready_file) != 0) return 1;
  server->Wait();
  return 0;
}

}  // namespace kvtier::bench
