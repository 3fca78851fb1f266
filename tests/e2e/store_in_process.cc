#include <numeric>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/device/host_device.h"
#include "cachestore/store.h"
#include "tests/cachestore/message.h"
#include "tests/e2e/subject.h"
#include "tests/support/manual_clock.h"

namespace kvtier::conformance {
namespace {

using cachestore::SequenceKey;
using cachestore::Store;

class InProcess final : public Subject {
 public:
  InProcess() : store_(Store::Create({.memory = kMemory}, device_, clock_).value()) {}

  absl::StatusOr<std::string> Register(const cachestore::ModelRequest& model) override {
    KVT_ASSIGN_OR_RETURN(const auto entry, store_->RegisterModel(model));
    return entry->model().id;
  }
  absl::StatusOr<Standing> Append(const Write& write) override {
    cachestore::WriterRequest request;
    request.key = Key(write.sequence);
    request.model_id = write.model_id;
    request.epoch = write.epoch;
    request.prompt = write.prompt;
    KVT_ASSIGN_OR_RETURN(const auto writer, store_->OpenWriter(std::move(request)));
    const std::int64_t begun = writer->standing().received_tokens;
    if (write.count == 0) return Standing{begun, begun, writer->standing().committed_tokens};
    std::vector<int> layers(write.data->layers.size());
    std::iota(layers.begin(), layers.end(), 0);
    cachestore::testing::Message message(*write.data, writer->shard(), {}, layers,
                                         {write.first, write.count});
    KVT_ASSIGN_OR_RETURN(const cachestore::AppendResult ack, writer->Append(message.chunk()));
    return Standing{begun, ack.received_tokens, ack.committed_tokens};
  }
  absl::Status Seal(const std::string& sequence, std::int64_t tokens) override {
    return store_->Seal(Key(sequence), tokens);
  }
  absl::Status Abort(const std::string& sequence) override { return store_->Abort(Key(sequence)); }
  absl::Status Remove(const std::string& sequence) override {
    return store_->Remove(Key(sequence));
  }
  absl::Status Truncate(const std::string& sequence, std::int64_t tokens,
                        std::uint64_t epoch) override {
    return store_->Truncate(Key(sequence), tokens, epoch);
  }
  absl::StatusOr<std::int64_t> Fork(const std::string& sequence, const std::string& fork,
                                    std::int64_t tokens) override {
    return store_->Fork(Key(sequence), fork, tokens);
  }
  absl::StatusOr<std::int64_t> Lookup(const std::string& model_id, const Prompt& prompt) override {
    KVT_ASSIGN_OR_RETURN(const std::vector<std::int64_t> tokens,
                         store_->Lookup(kSpace, model_id, {prompt}));
    return tokens[0];
  }
  absl::StatusOr<Grant> Acquire(const std::string& model_id, const Prompt& prompt) override {
    return Of(store_->Acquire(kSpace, model_id, prompt, absl::ZeroDuration()));
  }
  absl::StatusOr<Grant> Acquire(const std::string& sequence) override {
    return Of(store_->Acquire(Key(sequence), absl::ZeroDuration()));
  }
  absl::Status Renew(std::uint64_t lease_id) override {
    return store_->Renew(kSpace, lease_id, absl::ZeroDuration()).status();
  }
  void Release(std::uint64_t lease_id) override { store_->Release(kSpace, lease_id); }
  absl::StatusOr<Grant> Pin(const std::string& sequence) override {
    return Of(store_->AddPin(Key(sequence), {cachestore::PinKind::kHard, absl::ZeroDuration()}));
  }
  absl::StatusOr<Rows> Read(const Range& range) override {
    const cachestore::ReadRange wanted{.first_token = range.first,
                                       .tokens = range.tokens == 0 ? -1 : range.tokens,
                                       .within_windows = range.within_windows};
    const cachestore::ReadFormat as{.as = kernels::ElementType::kFp32};
    KVT_ASSIGN_OR_RETURN(auto reader,
                         range.lease_id != 0
                             ? store_->OpenReader(kSpace, range.lease_id, "", wanted, as)
                             : store_->OpenReader(Key(range.sequence), "", wanted, as));
    Rows rows;
    for (std::size_t i = 0; i < reader.layers().size(); ++i) {
      const cachestore::LayerOutput& layer = reader.layers()[i];
      Rows k(static_cast<std::size_t>(layer.tokens * layer.heads * layer.k_dim));
      Rows v(static_cast<std::size_t>(layer.tokens * layer.heads * layer.v_dim));
      KVT_RETURN_IF_ERROR(reader.Fill(i, layer.first_token, layer.tokens,
                                      reinterpret_cast<std::byte*>(k.data()),
                                      reinterpret_cast<std::byte*>(v.data())));
      rows.insert(rows.end(), k.begin(), k.end());
      rows.insert(rows.end(), v.begin(), v.end());
    }
    return rows;
  }
  absl::StatusOr<std::int64_t> Committed(const std::string& sequence) override {
    KVT_ASSIGN_OR_RETURN(const auto description, store_->Describe(Key(sequence)));
    return description.committed_tokens;
  }
  absl::StatusOr<std::int64_t> SetQuota(std::int64_t bytes) override {
    KVT_ASSIGN_OR_RETURN(const cachestore::QuotaStanding standing, store_->SetQuota(kSpace, bytes));
    return standing.held;
  }
  std::int64_t free_bytes() override { return store_->memory().free; }
  std::string ReasonOf(const absl::Status& status) const override {
    return cachestore::ReasonOf(status);
  }

 private:
  static constexpr char kSpace[] = "default";
  static SequenceKey Key(const std::string& id) { return {kSpace, id}; }
  static absl::StatusOr<Grant> Of(const absl::StatusOr<cachestore::Grant>& grant) {
    KVT_RETURN_IF_ERROR(grant.status());
    return Grant{grant->id, grant->tokens};
  }

  cachestore::HostDevice device_;
  testing::ManualClock clock_;
  const std::unique_ptr<Store> store_;
};

}  // namespace

std::unique_ptr<Subject> StoreInProcess() { return std::make_unique<InProcess>(); }

}  // namespace kvtier::conformance
