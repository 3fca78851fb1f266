#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/model/plan.h"
#include "cachestore/store.h"
#include "tests/cachestore/message.h"
#include "tests/cachestore/model_shapes.h"
#include "tests/support/device.h"
#include "tests/support/faulty_device.h"
#include "tests/support/kv_data.h"
#include "tests/support/manual_clock.h"
#include "tests/support/status_matchers.h"

namespace kvtier::cachestore::testing {

using kvtier::testing::KvData;

inline std::int64_t SumOf(const MemoryParts& parts) {
  return parts.use.total() + parts.slack + parts.staging + parts.free;
}

// A store, with a device that can fail and a clock that the test moves.
class TestStore {
 public:
  explicit TestStore(std::int64_t memory) : TestStore(StoreOptions{.memory = memory}) {}
  explicit TestStore(const StoreOptions& options)
      : store_(Store::Create(options, device, clock).value()) {}

  Store& operator*() { return *store_; }
  Store* operator->() { return store_.get(); }

  std::shared_ptr<ModelEntry> Register(ModelRequest request) {
    return store_->RegisterModel(std::move(request)).value();
  }

  std::unique_ptr<Writer> OpenWriter(const std::string& id, const Model& model, Shard shard = {},
                                     std::uint64_t epoch = 0) {
    WriterRequest request;
    request.key = {"default", id};
    request.model_id = model.id;
    request.shard = shard;
    request.epoch = epoch;
    return store_->OpenWriter(std::move(request)).value();
  }

  // All layers and heads of tokens [0, tokens), each run of layers with as many heads in one
  // message.
  void AppendAtOnce(const std::string& id, const Model& model, const KvData& data,
                    std::int64_t tokens) {
    const auto& layers = model.layers;
    for (int first = 0, end = 0; first < static_cast<int>(layers.size()); first = end) {
      const auto heads = [&](int i) { return layers[static_cast<std::size_t>(i)].spec.kv_heads; };
      while (end < static_cast<int>(layers.size()) && heads(end) == heads(first)) ++end;
      const auto writer = OpenWriter(id, model, {.first_layer = first, .num_layers = end - first});
      std::vector<int> all(static_cast<std::size_t>(end - first));
      std::iota(all.begin(), all.end(), first);
      Message message(data, writer->shard(), {}, all, {0, tokens});
      ASSERT_THAT(writer->Append(message.chunk()), kvtier::testing::IsOk());
    }
  }

  // Everything committed, unless `range` asks for less.
  SequenceReader Read(const std::string& id, const ReadFormat& format = {}, ReadRange range = {}) {
    return store_->OpenReader({"default", id}, "", range, format).value();
  }

  const std::unique_ptr<Device> base = kvtier::testing::MakeDevice();
  kvtier::testing::FaultyDevice device{*base};
  kvtier::testing::ManualClock clock;

 private:
  std::unique_ptr<Store> store_;
};

}  // namespace kvtier::cachestore::testing
