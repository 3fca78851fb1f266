#include "client/kv_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <map>
#include <utility>

#include "cachestore/base/status_macros.h"

namespace kvtier::client {
namespace {

struct DtypeRow {
  const char* safetensors;
  v1::DType dtype;
};

constexpr std::array kDtypes = {DtypeRow{"BF16", v1::DTYPE_BF16}, DtypeRow{"F16", v1::DTYPE_FP16},
                                DtypeRow{"F32", v1::DTYPE_FP32},
                                DtypeRow{"F8_E4M3", v1::DTYPE_FP8_E4M3},
                                DtypeRow{"F8_E5M2", v1::DTYPE_FP8_E5M2}};

constexpr char kPrefix[] = "layers.";

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

struct Place {
  std::uint32_t layer = 0;
  char part = 'k';
};

// "layers.12.k" and nothing like it: no sign, no leading zero, no further word.
std::optional<Place> ParseName(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* begin = name.data() + std::string_view(kPrefix).size();
  const char* end = name.data() + name.size();
  Place place;
  const auto [rest, error] = std::from_chars(begin, end, place.layer);
  if (error != std::errc() || (*begin == '0' && rest != begin + 1)) return std::nullopt;
  const std::string_view ending(rest, end);
  if (ending != ".k" && ending != ".v") return std::nullopt;
  place.part = ending[1];
  return place;
}

absl::Status CheckTensor(const TensorInfo& tensor) {
  if (tensor.dtype != "BF16" && tensor.dtype != "F16" && tensor.dtype != "F32") {
    return Invalid(
        fmt::format("{} is {}; BF16, F16 and F32 are allowed", tensor.name, tensor.dtype));
  }
  // The wire counts heads, dims and a chunk's tokens in 32 bits.
  const bool sized = std::all_of(tensor.shape.begin(), tensor.shape.end(), [](std::uint64_t n) {
    return n >= 1 && n <= std::numeric_limits<std::uint32_t>::max();
  });
  if (tensor.shape.size() != 3 || !sized) {
    return Invalid(fmt::format("{} has shape [{}]; [tokens, kv_heads, head_dim] is needed",
                               tensor.name, fmt::join(tensor.shape, ", ")));
  }
  return absl::OkStatus();
}

absl::Status CheckAgreement(const TensorInfo& tensor, const TensorInfo& other) {
  if (tensor.dtype != other.dtype) {
    return Invalid(fmt::format("{} is {}, but {} is {}; one dtype is needed", tensor.name,
                               tensor.dtype, other.name, other.dtype));
  }
  if (tensor.shape[0] != other.shape[0]) {
    return Invalid(fmt::format("{} has {} tokens, but {} has {}", tensor.name, tensor.shape[0],
                               other.name, other.shape[0]));
  }
  return absl::OkStatus();
}

using Parts = std::map<std::uint32_t, std::map<char, TensorInfo>>;

absl::StatusOr<std::vector<KvFileLayer>> Assemble(Parts parts) {
  // Only a file that has no V anywhere is one of MLA latents; a single V that is missing is a
  // fault.
  const bool latent = std::none_of(parts.begin(), parts.end(),
                                   [](const auto& layer) { return layer.second.contains('v'); });
  std::vector<KvFileLayer> layers;
  for (auto& [layer, tensors] : parts) {
    const std::string k_name = LayerTensorName(layers.size(), "k");
    const std::string v_name = LayerTensorName(layers.size(), "v");
    if (layer != layers.size() || !tensors.contains('k')) {
      return Invalid(fmt::format("{} is missing", k_name));
    }
    KvFileLayer assembled{.k = std::move(tensors.at('k')), .v = std::nullopt};
    if (tensors.contains('v')) assembled.v = std::move(tensors.at('v'));
    if (!assembled.v && (!latent || assembled.heads() != 1)) {
      return Invalid(fmt::format("{} is missing", v_name));
    }
    if (assembled.v && assembled.v->shape[1] != assembled.heads()) {
      return Invalid(fmt::format("{} has {} heads, but {} has {}", v_name, assembled.v->shape[1],
                                 k_name, assembled.heads()));
    }
    layers.push_back(std::move(assembled));
  }
  return layers;
}

}  // namespace

KvFile::KvFile(SafetensorsReader file) : file_(std::move(file)) {}

absl::StatusOr<KvFile> KvFile::Open(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(SafetensorsReader reader, SafetensorsReader::Open(path));
  KvFile file(std::move(reader));
  const auto annotate = [&path](const absl::Status& status) {
    return Invalid(fmt::format("{}: {}", path, std::string(status.message())));
  };
  Parts parts;
  const TensorInfo* first = nullptr;
  for (const TensorInfo& tensor : file.file_.tensors()) {
    const std::optional<Place> place = ParseName(tensor.name);
    if (!place) {
      file.ignored_tensors_.push_back(tensor.name);
      continue;
    }
    absl::Status status = CheckTensor(tensor);
    if (first == nullptr) first = &tensor;
    if (status.ok()) status = CheckAgreement(tensor, *first);
    if (!status.ok()) return annotate(status);
    parts[place->layer][place->part] = tensor;
  }
  if (first == nullptr) return annotate(Invalid("no tensor is named layers.N.k or layers.N.v"));
  file.dtype_ = *DtypeFromSafetensors(first->dtype);
  absl::StatusOr<std::vector<KvFileLayer>> layers = Assemble(std::move(parts));
  if (!layers.ok()) return annotate(layers.status());
  file.layers_ = *std::move(layers);
  std::sort(file.ignored_tensors_.begin(), file.ignored_tensors_.end());
  return file;
}

std::uint64_t KvFile::bytes() const {
  std::uint64_t bytes = 0;
  for (const KvFileLayer& layer : layers_) bytes += layer.k.size + (layer.v ? layer.v->size : 0);
  return bytes;
}

std::optional<v1::DType> DtypeFromSafetensors(const std::string& dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (dtype == row.safetensors) return row.dtype;
  }
  return std::nullopt;
}

std::optional<std::string> SafetensorsDtype(v1::DType dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (dtype == row.dtype) return row.safetensors;
  }
  return std::nullopt;
}

std::string LayerTensorName(std::uint64_t layer, const std::string& part) {
  return fmt::format("{}{}.{}", kPrefix, layer, part);
}

}  // namespace kvtier::client
