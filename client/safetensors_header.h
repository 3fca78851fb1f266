#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier::client {

// One tensor of a safetensors file. `offset` counts from the start of the data, behind the header.
struct TensorInfo {
  std::string name;
  std::string dtype;  // as the file spells it: "BF16"
  std::vector<std::uint64_t> shape;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;  // bytes
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;              // by offset
  std::map<std::string, std::string> metadata;  // of "__metadata__"
};

// The header's length field and the header itself never pass this (the reference's limit).
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

// Bits of one element, or nothing for a name that the format does not know.
std::optional<std::uint64_t> SafetensorsDtypeBits(const std::string& dtype);

// Product of shape and dtype in bytes. INVALID_ARGUMENT names the tensor if its dtype is unknown,
// its size does not fit 64 bits or is no whole number of bytes.
absl::StatusOr<std::uint64_t> SafetensorsSize(const TensorInfo& tensor);

// Reads a header's JSON. Every tensor's place and size are checked against its shape, its
// neighbours and `data_size`, the bytes that follow the header; INVALID_ARGUMENT names the tensor
// and the numbers. As in the reference, tensors cover the data without gap or overlap.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(const std::string& json,
                                                         std::uint64_t data_size);

// Lays the tensors out one behind the other in the order given (sets offset and size) and writes
// the header: length field and JSON, padded so that the data starts at a multiple of 8.
absl::StatusOr<std::string> BuildSafetensorsHeader(SafetensorsHeader& header);

}  // namespace kvtier::client
