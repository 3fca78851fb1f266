#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client.h"

namespace kvtier::client {

struct DownloadReport {
  ReadResult read;
  absl::Duration duration;  // from the request to the last byte written, the file's part included
};

// Bytes written so far, of how many.
using DownloadProgress = std::function<void(std::uint64_t bytes, std::uint64_t total)>;

// Reads one sequence into a safetensors file: `layers.N.k` and `layers.N.v` in the request's
// layout, [tokens, heads, dim] or [heads, tokens, dim], and for FP8 `layers.N.k_scale` and
// `v_scale` (F32, [1] or [heads]). The file appears when it is whole; after an error there is none.
absl::StatusOr<DownloadReport> Download(Client& client, const v1::ReadRequest& request,
                                        const std::string& path, const DownloadProgress& progress,
                                        Transfer transfer = Transfer::kValues);

}  // namespace kvtier::client
