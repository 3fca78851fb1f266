#include <cstring>
#include <span>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/error_reason.h"
#include "client/read_check.h"
#include "tests/e2e/live_server.h"
#include "tests/e2e/subject.h"

namespace kvtier::conformance {
namespace {

v1::Prompt ToProto(const Prompt& prompt) {
  v1::Prompt out;
  out.set_salt(prompt.salt);
  out.set_adapter(prompt.adapter);
  out.mutable_token_ids()->Add(prompt.token_ids.begin(), prompt.token_ids.end());
  return out;
}

std::string RowsOf(const testing::KvTensor& tensor, std::int64_t first, std::int64_t count) {
  std::string bytes;
  for (std::int64_t token = first; token < first + count; ++token) {
    for (int head = 0; head < tensor.heads; ++head)
      bytes.append(reinterpret_cast<const char*>(tensor.Row(head, token)),
                   static_cast<std::size_t>(tensor.row_bytes()));
  }
  return bytes;
}

class BehindServer final : public Subject {
 public:
  explicit BehindServer(client::Transport transport)
      : server_({"--memory=" + std::to_string(kMemory), "--evict-above=100", "--evict-until=100"}),
        client_(server_.Connect({.transport = transport})) {}

  absl::StatusOr<std::string> Register(const cachestore::ModelRequest& model) override {
    const cachestore::ModelSpec& spec = model.spec;
    v1::RegisterModelRequest request;
    request.mutable_spec()->set_name(spec.name);
    request.mutable_spec()->set_revision(spec.revision);
    request.mutable_spec()->set_source_dtype(v1::DTYPE_BF16);
    for (const cachestore::LayerSpec& layer : spec.layers) {
      v1::LayerSpec& out = *request.mutable_spec()->add_layers();
      if (layer.window > 0) out.set_kind(v1::LAYER_KIND_SLIDING_WINDOW);
      out.set_window(static_cast<std::uint32_t>(layer.window));
      out.set_kv_heads(static_cast<std::uint32_t>(layer.kv_heads));
      out.set_k_head_dim(static_cast<std::uint32_t>(layer.k_head_dim));
      out.set_v_head_dim(static_cast<std::uint32_t>(layer.v_head_dim));
    }
    request.mutable_policy()->set_kv_cache_dtype(model.policy.kv_cache_dtype);
    if (model.policy.retention == cachestore::Retention::kWindow)
      request.mutable_policy()->set_retention(v1::RETENTION_WINDOW);
    request.set_page_tokens(static_cast<std::uint32_t>(model.page_tokens));
    KVT_ASSIGN_OR_RETURN(const auto response, client().RegisterModel(request));
    return response.model_id();
  }
  absl::StatusOr<Standing> Append(const Write& write) override {
    client::AppendOptions options;
    options.open.set_sequence(write.sequence);
    options.open.set_model_id(write.model_id);
    options.open.set_writer_epoch(write.epoch);
    *options.open.mutable_prompt() = ToProto(write.prompt);
    KVT_ASSIGN_OR_RETURN(const auto stream, client().OpenAppend(options));
    const auto begun = static_cast<std::int64_t>(stream->opened().received_tokens());
    if (write.count > 0) {
      v1::AppendChunk chunk;
      chunk.set_num_layers(static_cast<std::uint32_t>(write.data->layers.size()));
      chunk.set_first_token(static_cast<std::uint64_t>(write.first));
      chunk.set_num_tokens(static_cast<std::uint32_t>(write.count));
      for (const KvData::Layer& layer : write.data->layers) {
        chunk.mutable_k()->append(RowsOf(layer.k, write.first, write.count));
        chunk.mutable_v()->append(RowsOf(layer.v, write.first, write.count));
      }
      KVT_RETURN_IF_ERROR(stream->Send(std::move(chunk)));
    }
    KVT_ASSIGN_OR_RETURN(const client::AppendProgress progress, stream->Finish());
    return Standing{begun, static_cast<std::int64_t>(progress.received_tokens),
                    static_cast<std::int64_t>(progress.committed_tokens)};
  }
  absl::Status Seal(const std::string& sequence, std::int64_t tokens) override {
    auto request = Named<v1::SealRequest>(sequence);
    request.set_tokens(static_cast<std::uint64_t>(tokens));
    return client().Seal(request).status();
  }
  absl::Status Abort(const std::string& sequence) override {
    return client().Abort(Named<v1::AbortRequest>(sequence)).status();
  }
  absl::Status Remove(const std::string& sequence) override {
    return client().Remove(Named<v1::RemoveRequest>(sequence)).status();
  }
  absl::Status Truncate(const std::string& sequence, std::int64_t tokens,
                        std::uint64_t epoch) override {
    auto request = Named<v1::TruncateRequest>(sequence);
    request.set_tokens(static_cast<std::uint64_t>(tokens));
    request.set_writer_epoch(epoch);
    return client().Truncate(request).status();
  }
  absl::StatusOr<std::int64_t> Fork(const std::string& sequence, const std::string& fork,
                                    std::int64_t tokens) override {
    auto request = Named<v1::ForkRequest>(sequence);
    request.set_new_sequence(fork);
    if (tokens >= 0) request.set_tokens(static_cast<std::uint64_t>(tokens));
    KVT_ASSIGN_OR_RETURN(const auto response, client().Fork(request));
    return static_cast<std::int64_t>(response.tokens());
  }
  absl::StatusOr<std::int64_t> Lookup(const std::string& model_id, const Prompt& prompt) override {
    v1::LookupRequest request;
    request.set_model_id(model_id);
    *request.add_prompts() = ToProto(prompt);
    KVT_ASSIGN_OR_RETURN(const auto response, client().Lookup(request));
    return static_cast<std::int64_t>(response.tokens(0));
  }
  absl::StatusOr<Grant> Acquire(const std::string& model_id, const Prompt& prompt) override {
    v1::AcquireRequest request;
    request.set_model_id(model_id);
    *request.mutable_prompt() = ToProto(prompt);
    return Acquire(request);
  }
  absl::StatusOr<Grant> Acquire(const std::string& sequence) override {
    return Acquire(Named<v1::AcquireRequest>(sequence));
  }
  absl::Status Renew(std::uint64_t lease_id) override {
    v1::RenewRequest request;
    request.set_lease_id(lease_id);
    return client().Renew(request).status();
  }
  void Release(std::uint64_t lease_id) override {
    v1::ReleaseRequest request;
    request.set_lease_id(lease_id);
    client().Release(request).IgnoreError();
  }
  absl::StatusOr<Grant> Pin(const std::string& sequence) override {
    auto request = Named<v1::PinRequest>(sequence);
    request.set_kind(v1::PIN_KIND_HARD);
    KVT_ASSIGN_OR_RETURN(const auto response, client().Pin(request));
    return Grant{response.pin_id(), static_cast<std::int64_t>(response.tokens())};
  }
  absl::StatusOr<Rows> Read(const Range& range) override {
    v1::ReadRequest request;
    request.set_as(v1::READ_AS_FP32);
    request.set_within_windows(range.within_windows);
    v1::SequenceRange& wanted = *request.add_sequences();
    wanted.set_sequence(range.sequence);
    wanted.set_lease_id(range.lease_id);
    wanted.set_first_token(static_cast<std::uint64_t>(range.first));
    wanted.set_num_tokens(static_cast<std::uint64_t>(range.tokens));
    std::vector<std::pair<Rows, Rows>> layers;
    const auto place = [&](const v1::SequenceManifest& manifest)
        -> absl::StatusOr<std::vector<client::LayerTarget>> {
      std::vector<client::LayerTarget> targets;
      layers.reserve(static_cast<std::size_t>(manifest.layers_size()));
      for (const v1::LayerManifest& layer : manifest.layers()) {
        const auto rows = client::LayerTokens(manifest, layer) * layer.num_heads();
        auto& [k, v] =
            layers.emplace_back(Rows(rows * layer.k_head_dim()), Rows(rows * layer.v_head_dim()));
        targets.push_back(
            {std::as_writable_bytes(std::span(k)), std::as_writable_bytes(std::span(v))});
      }
      return targets;
    };
    KVT_RETURN_IF_ERROR(client().ReadInto(request, place).status());
    Rows rows;
    for (const auto& [k, v] : layers) {
      rows.insert(rows.end(), k.begin(), k.end());
      rows.insert(rows.end(), v.begin(), v.end());
    }
    return rows;
  }
  absl::StatusOr<std::int64_t> Committed(const std::string& sequence) override {
    KVT_ASSIGN_OR_RETURN(const auto response,
                         client().Describe(Named<v1::DescribeRequest>(sequence)));
    return static_cast<std::int64_t>(response.info().committed_tokens());
  }
  absl::StatusOr<std::int64_t> SetQuota(std::int64_t bytes) override {
    v1::SetQuotaRequest request;
    request.set_quota_bytes(static_cast<std::uint64_t>(bytes));
    KVT_ASSIGN_OR_RETURN(const auto response, client().SetQuota(request));
    return static_cast<std::int64_t>(response.held_bytes());
  }
  std::int64_t free_bytes() override { return server_.FreeBytes(); }
  std::string ReasonOf(const absl::Status& status) const override {
    return client::ErrorReason(status);
  }

 private:
  template <class Request>
  static Request Named(const std::string& sequence) {
    Request request;
    request.set_sequence(sequence);
    return request;
  }
  absl::StatusOr<Grant> Acquire(const v1::AcquireRequest& request) {
    KVT_ASSIGN_OR_RETURN(const auto response, client().Acquire(request));
    return Grant{response.lease_id(), static_cast<std::int64_t>(response.tokens())};
  }
  client::Client& client() { return *client_; }

  testing::LiveServer server_;
  const std::unique_ptr<client::Client> client_;
};

}  // namespace

std::unique_ptr<Subject> StoreBehindServer() {
  return std::make_unique<BehindServer>(client::Transport::kInline);
}
std::unique_ptr<Subject> StoreBySharedMemory() {
  return std::make_unique<BehindServer>(client::Transport::kShm);
}

}  // namespace kvtier::conformance
