#include "client/safetensors_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/json_quote.h"

namespace kvtier::client {
namespace {

using nlohmann::json;

struct DtypeRow {
  const char* name;
  std::uint64_t bits;
};

constexpr std::array kDtypes = {
    DtypeRow{"BOOL", 8},    DtypeRow{"F4", 4},   DtypeRow{"F6_E2M3", 6}, DtypeRow{"F6_E3M2", 6},
    DtypeRow{"U8", 8},      DtypeRow{"I8", 8},   DtypeRow{"F8_E5M2", 8}, DtypeRow{"F8_E4M3", 8},
    DtypeRow{"F8_E8M0", 8}, DtypeRow{"I16", 16}, DtypeRow{"U16", 16},    DtypeRow{"F16", 16},
    DtypeRow{"BF16", 16},   DtypeRow{"I32", 32}, DtypeRow{"U32", 32},    DtypeRow{"F32", 32},
    DtypeRow{"C64", 64},    DtypeRow{"F64", 64}, DtypeRow{"I64", 64},    DtypeRow{"U64", 64},
};

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

// A header that names a key twice means something else to each reader, so it is refused; the
// parser alone would keep the last.
absl::StatusOr<json> ParseWithoutDuplicates(const std::string& text) {
  std::vector<std::set<std::string>> seen;  // keys met, by depth of the open objects
  std::optional<std::string> duplicate;
  const auto note_keys = [&](int depth, json::parse_event_t event, const json& value) {
    if (event != json::parse_event_t::key) return true;
    seen.resize(static_cast<std::size_t>(depth));
    if (!seen.back().insert(value.get<std::string>()).second && !duplicate) {
      duplicate = value.get<std::string>();
    }
    return true;
  };
  try {
    json parsed = json::parse(text, note_keys);
    if (duplicate) return Invalid(fmt::format("the header names \"{}\" twice", *duplicate));
    return parsed;
  } catch (const json::parse_error& error) {
    return Invalid(fmt::format("the header is not valid JSON at its byte {}", error.byte));
  }
}

constexpr std::size_t kMaxRank = 16;

absl::StatusOr<std::vector<std::uint64_t>> ParseNumbers(const std::string& tensor,
                                                        const json& entry, const char* field) {
  const auto found = entry.find(field);
  if (found == entry.end()) return Invalid(fmt::format("tensor {} has no {}", tensor, field));
  std::vector<std::uint64_t> numbers;
  bool whole = found->is_array() && found->size() <= kMaxRank;
  for (const json& number : *found) {
    whole = whole && number.is_number_unsigned();
    if (whole) numbers.push_back(number.get<std::uint64_t>());
  }
  if (!whole) {
    return Invalid(
        fmt::format("tensor {} has {} {}; a list of at most {} non-negative integers is needed",
                    tensor, field, Quote(*found), kMaxRank));
  }
  return numbers;
}

absl::StatusOr<TensorInfo> ParseTensor(const std::string& name, const json& entry,
                                       std::uint64_t data_size) {
  if (!entry.is_object()) {
    return Invalid(fmt::format("tensor {} is {}; an object is needed", name, entry.type_name()));
  }
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) {
    return Invalid(fmt::format("tensor {} has no dtype", name));
  }
  TensorInfo tensor;
  tensor.name = name;
  tensor.dtype = dtype->get<std::string>();
  KVT_ASSIGN_OR_RETURN(tensor.shape, ParseNumbers(name, entry, "shape"));
  KVT_ASSIGN_OR_RETURN(const std::uint64_t size, SafetensorsSize(tensor));
  KVT_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> offsets,
                       ParseNumbers(name, entry, "data_offsets"));
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    return Invalid(fmt::format("tensor {} has data_offsets [{}]; [begin, end] is needed", name,
                               fmt::join(offsets, ", ")));
  }
  if (offsets[1] > data_size) {
    return Invalid(
        fmt::format("tensor {} has data_offsets [{}, {}], but the file has {} bytes of data", name,
                    offsets[0], offsets[1], data_size));
  }
  if (offsets[1] - offsets[0] != size) {
    return Invalid(fmt::format("tensor {} has {} bytes, but shape [{}] of {} takes {}", name,
                               offsets[1] - offsets[0], fmt::join(tensor.shape, ", "), tensor.dtype,
                               size));
  }
  tensor.offset = offsets[0];
  tensor.size = size;
  return tensor;
}

absl::Status CheckCoverage(const std::vector<TensorInfo>& tensors, std::uint64_t data_size) {
  std::uint64_t end = 0;
  std::string before = "the header";
  for (const TensorInfo& tensor : tensors) {
    if (tensor.offset != end) {
      return Invalid(
          fmt::format("tensor {} begins at byte {} of the data, but {} ends at {}; "
                      "neither overlap nor gap is allowed",
                      tensor.name, tensor.offset, before, end));
    }
    end = tensor.offset + tensor.size;
    before = fmt::format("tensor {}", tensor.name);
  }
  if (end != data_size) {
    return Invalid(fmt::format("{} ends at byte {} of the data, but the file has {} bytes of it",
                               before, end, data_size));
  }
  return absl::OkStatus();
}

absl::Status ParseMetadata(const json& entry, std::map<std::string, std::string>& metadata) {
  if (!entry.is_object()) return Invalid("__metadata__ is no object of strings");
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) {
      return Invalid(fmt::format("__metadata__ holds {} that is no string", key));
    }
    metadata[key] = value.get<std::string>();
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<std::uint64_t> SafetensorsDtypeBits(const std::string& dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (dtype == row.name) return row.bits;
  }
  return std::nullopt;
}

absl::StatusOr<std::uint64_t> SafetensorsSize(const TensorInfo& tensor) {
  const std::optional<std::uint64_t> bits = SafetensorsDtypeBits(tensor.dtype);
  if (!bits) {
    return Invalid(fmt::format("tensor {} has the unknown dtype {}", tensor.name, tensor.dtype));
  }
  // A dimension of 0 makes the tensor empty whatever the others say; they may not hide behind it.
  std::uint64_t product = *bits;
  bool empty = false;
  for (const std::uint64_t extent : tensor.shape) {
    empty = empty || extent == 0;
    if (extent != 0 && product > std::numeric_limits<std::uint64_t>::max() / extent) {
      return Invalid(fmt::format("tensor {} has shape [{}], whose size does not fit 64 bits",
                                 tensor.name, fmt::join(tensor.shape, ", ")));
    }
    product *= std::max<std::uint64_t>(extent, 1);
  }
  if (empty) return 0;
  if (product % 8 != 0) {
    return Invalid(fmt::format("tensor {} has shape [{}] of {}, which is no whole number of bytes",
                               tensor.name, fmt::join(tensor.shape, ", "), tensor.dtype));
  }
  return product / 8;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(const std::string& json_text,
                                                         std::uint64_t data_size) {
  KVT_ASSIGN_OR_RETURN(const json root, ParseWithoutDuplicates(json_text));
  if (!root.is_object()) {
    return Invalid(fmt::format("the header is {}; an object is needed", root.type_name()));
  }
  SafetensorsHeader header;
  for (const auto& [name, entry] : root.items()) {
    if (name == "__metadata__") {
      KVT_RETURN_IF_ERROR(ParseMetadata(entry, header.metadata));
      continue;
    }
    KVT_ASSIGN_OR_RETURN(TensorInfo tensor, ParseTensor(name, entry, data_size));
    header.tensors.push_back(std::move(tensor));
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return std::pair(a.offset, a.size) < std::pair(b.offset, b.size);
                   });
  KVT_RETURN_IF_ERROR(CheckCoverage(header.tensors, data_size));
  return header;
}

absl::StatusOr<std::string> BuildSafetensorsHeader(SafetensorsHeader& header) {
  json root = json::object();
  if (!header.metadata.empty()) root["__metadata__"] = header.metadata;
  std::uint64_t end = 0;
  for (TensorInfo& tensor : header.tensors) {
    KVT_ASSIGN_OR_RETURN(tensor.size, SafetensorsSize(tensor));
    if (root.contains(tensor.name)) {
      return Invalid(fmt::format("tensor {} is declared twice", tensor.name));
    }
    if (tensor.size > std::numeric_limits<std::int64_t>::max() - end) {
      return Invalid(fmt::format("tensor {} ends past what a file can hold", tensor.name));
    }
    tensor.offset = end;
    end += tensor.size;
    root[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.offset, end}}};
  }
  std::string text = root.dump(-1, ' ', false, json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kMaxSafetensorsHeader) {
    return Invalid(fmt::format("the header takes {} bytes; at most {} are allowed", text.size(),
                               kMaxSafetensorsHeader));
  }
  std::string length;
  for (unsigned shift = 0; shift < 64; shift += 8) {
    length.push_back(static_cast<char>((std::uint64_t{text.size()} >> shift) & 0xFF));
  }
  return length + text;
}

}  // namespace kvtier::client
