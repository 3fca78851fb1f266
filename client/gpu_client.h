#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/gpu_transport.h"

namespace kvtier::client {

struct GpuOptions {
  int device = 0;  // as CUDA counts
  // kAuto: NCCL where both ends have it, else by way of this host's memory, as the client's own
  // options say from there on. kNccl: only that. kHost: never NCCL.
  enum class Path { kAuto, kNccl, kHost } path = Path::kAuto;
  std::string nccl_library = "libnccl.so.2";  // a path, or a name that the loader finds
  // Of connecting, and for which nothing may move while something is to.
  absl::Duration deadline = absl::Seconds(30);
  // Is told how values travel, and why, when that is chosen; may call nothing of this client.
  std::function<void(const std::string&)> tell;
};

// Where one layer of a sequence goes. A V of dim 0 takes none.
struct GpuLayerTarget {
  GpuTensor k;
  GpuTensor v;
};
// Says where the layers of a sequence go, in the manifest's order; once for each sequence, again
// where the read is tried again.
using PlaceOnGpu =
    std::function<absl::StatusOr<std::vector<GpuLayerTarget>>(const v1::SequenceManifest&)>;

// K and V of some layers and tokens in GPU memory, each densely packed as AppendChunk has it.
struct GpuChunk {
  v1::AppendChunk place;  // first_layer, num_layers, first_token, num_tokens
  transport::DevicePiece k;
  transport::DevicePiece v;  // none of a fused K and V, or of a V of dim 0
};

class GpuAppend;

// Appends from and reads into the memory of one GPU of this process. `client` must outlive it.
// Thread-safe; each append for itself.
class GpuClient {
 public:
  // INTERNAL where CUDA doesn't work here; with kNccl FAILED_PRECONDITION says why there is none.
  static absl::StatusOr<std::unique_ptr<GpuClient>> Make(Client& client, const GpuOptions& options);

  // All of it is there when it returns, whatever stream looks. After an error what is in the
  // targets may be anything; nothing is written there any more. Goes without READ_AS_STORED, and
  // follow needs num_tokens.
  absl::StatusOr<ReadResult> Read(const v1::ReadRequest& request, const PlaceOnGpu& place);

  absl::StatusOr<std::unique_ptr<GpuAppend>> OpenAppend(const AppendOptions& options);

  // How values travel: "nccl" or "host"; empty before that was chosen.
  std::string transport() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class GpuAppend;

  GpuClient(Client& client, GpuOptions options) : client_(client), options_(std::move(options)) {}

  // Null: by way of the host.
  template <class T>
  absl::StatusOr<std::shared_ptr<T>> Transport(std::shared_ptr<T> GpuClient::*open)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<transport::NcclRuntime>> Nccl()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <class T>
  void Forget(std::shared_ptr<T> GpuClient::*open, const std::shared_ptr<T>& which)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Tell(const std::string& name, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<ReadResult> ReadBy(const std::shared_ptr<GpuReadTransport>& transport,
                                    const v1::ReadRequest& request, const PlaceOnGpu& place);

  Client& client_;
  const GpuOptions options_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<transport::NcclRuntime> nccl_ ABSL_GUARDED_BY(mutex_);
  // Why there never will be NCCL, or not before then.
  absl::Status no_nccl_ ABSL_GUARDED_BY(mutex_);
  absl::Time again_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::shared_ptr<GpuReadTransport> reads_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<GpuAppendTransport> appends_ ABSL_GUARDED_BY(mutex_);
  std::string name_ ABSL_GUARDED_BY(mutex_);
};

// One append stream, as AppendStream, of values in GPU memory.
class GpuAppend {
 public:
  ~GpuAppend();

  const v1::AppendResponse& opened() const { return stream_->opened(); }
  AppendProgress progress() const { return stream_->progress(); }

  // K and V may be filled on `after` still: what was put on that stream before runs first. They
  // must stay as they are until the chunk is acknowledged (progress().chunks), or the stream has
  // ended.
  absl::Status Send(const GpuChunk& chunk, CUstream_st* after);
  absl::StatusOr<AppendProgress> Finish();

 private:
  friend class GpuClient;
  struct Host;  // by way of host memory

  GpuAppend(GpuClient& client, std::shared_ptr<GpuAppendTransport> transport,
            std::unique_ptr<AppendStream> stream);
  absl::Status SendByHost(const GpuChunk& chunk, CUstream_st* after);

  GpuClient& client_;
  const std::shared_ptr<GpuAppendTransport> transport_;  // null: by way of host memory
  const std::unique_ptr<AppendStream> stream_;
  std::unique_ptr<Host> host_;
  bool finished_ = false;
};

}  // namespace kvtier::client
