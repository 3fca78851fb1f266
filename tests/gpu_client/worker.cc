#include "tests/gpu_client/worker.h"

#include <cstdio>
#include <memory>

#include "client/gpu_client.h"

namespace kvtier::testing {

int RunWorker(const std::string& address, const std::string& model_id) {
  constexpr std::int64_t kTokens = 64, kBytes = kTokens * 2 * 64 * 2;  // of SmallModel
  const auto client =
      client::Client::Connect(address, {.transport = client::Transport::kInline}).value();
  const auto gpu = client::GpuClient::Make(*client, {.path = client::GpuOptions::Path::kNccl,
                                                     .nccl_library = KVTIER_NCCL,
                                                     .tell = {}})
                       .value();
  if (model_id.empty()) {
    v1::ReadRequest request;
    request.add_sequences()->set_sequence("held");
    const client::GpuMemory memory = client::AllocateOnGpu(1 << 20).value();
    while (true) {
      const auto read = gpu->Read(request, [&](const v1::SequenceManifest&) {
        const client::GpuTensor all{.data = memory.get()};
        return std::vector<client::GpuLayerTarget>(2, {.k = all, .v = all});
      });
      if (!read.ok()) return 4;
    }
  }
  client::AppendOptions options;
  options.open.set_sequence("s");
  options.open.set_model_id(model_id);
  auto append = gpu->OpenAppend(options);
  if (!append.ok()) {
    std::fprintf(stderr, "%s\n", append.status().ToString().c_str());
    return 1;
  }
  const client::GpuMemory memory = client::AllocateOnGpu(kBytes).value();
  const client::GpuStream computes = client::MakeGpuStream().value();
  if (cudaMemsetAsync(memory.get(), 0, kBytes, computes.get()) != cudaSuccess) return 2;
  for (std::uint64_t first = 0;; first += kTokens) {
    client::GpuChunk chunk;
    chunk.place.set_num_layers(1);
    chunk.place.set_first_token(first);
    chunk.place.set_num_tokens(kTokens);
    chunk.k = chunk.v = {memory.get(), kBytes};
    const absl::Status sent = (*append)->Send(chunk, computes.get());
    if (!sent.ok()) std::fprintf(stderr, "%s\n", sent.ToString().c_str());
    if (!sent.ok()) return 3;
  }
}

}  // namespace kvtier::testing
