#include "client/checkpoint_scales.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/checkpoint_config.h"
#include "client/json_quote.h"
#include "client/safetensors.h"
#include "client/scale_names.h"
#include "client/text_file.h"
#include "kernels/element.h"

namespace kvtier::client {
namespace {

using kernels::ElementType;
using nlohmann::json;

constexpr std::size_t kMaxNamed = 32;  // layers that one message names
constexpr char kIndex[] = "model.safetensors.index.json";

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

// ---- files ----

absl::StatusOr<std::set<std::string>> FilesOfIndex(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  const json index = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object())
    return Invalid(fmt::format("{} has no object \"weight_map\"", path));
  std::set<std::string> files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos) {
      return Invalid(fmt::format("{}: weight_map.{} is {}; want the name of a file beside it", path,
                                 tensor, Quote(file)));
    }
    files.insert(file.get<std::string>());
  }
  return files;
}

absl::StatusOr<std::set<std::string>> FilesOf(const std::string& directory) {
  const std::filesystem::path index = std::filesystem::path(directory) / kIndex;
  if (std::filesystem::exists(index)) return FilesOfIndex(index.string());
  std::set<std::string> files;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(directory, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (entry->path().extension() == ".safetensors") files.insert(entry->path().filename());
  }
  if (files.empty()) return Invalid(fmt::format("{} holds no safetensors file", directory));
  return files;
}

// ---- one tensor ----

// What one may hold: `one` value for all heads, or one for each of `heads` (0: not known).
struct Lengths {
  bool one = true;
  bool each = true;
  int heads = 0;

  bool Fit(std::uint64_t count) const {
    return (one && count == 1) || (each && heads > 0 && count == static_cast<std::uint64_t>(heads));
  }
  std::string ToString() const {
    if (!each) return "1 value (strategy tensor)";
    const std::string all = heads > 0 ? fmt::format("{}", heads) : "a known number of";
    return one ? fmt::format("1 value or {} (one per head)", all)
               : fmt::format("{} values (strategy attn_head)", all);
  }
};

Lengths LengthsOf(const CheckpointConfig& config, ScaleSide side) {
  return {.one = !config.per_head.value_or(false),
          .each = config.per_head.value_or(true),
          .heads = side == ScaleSide::kQ ? config.query_heads : config.kv_heads};
}

std::optional<ElementType> ElementOf(const std::string& dtype) {
  if (dtype == "BF16") return ElementType::kBf16;
  if (dtype == "F16") return ElementType::kFp16;
  if (dtype == "F32") return ElementType::kFp32;
  return std::nullopt;
}

absl::StatusOr<std::vector<float>> ReadScale(const SafetensorsReader& file,
                                             const TensorInfo& tensor, const Lengths& lengths) {
  const auto refuse = [&](const std::string& what) {
    return Invalid(fmt::format("{}: tensor {} {}", file.path(), tensor.name, what));
  };
  const std::optional<ElementType> element = ElementOf(tensor.dtype);
  if (!element) return refuse(fmt::format("is {}; want BF16, F16 or F32", tensor.dtype));
  const auto width = static_cast<std::uint64_t>(kernels::ElementBytes(*element));
  if (!lengths.Fit(tensor.size / width)) {
    return refuse(
        fmt::format("has the shape {}; want {}", json(tensor.shape).dump(), lengths.ToString()));
  }
  std::vector<std::byte> bytes(tensor.size);
  KVT_RETURN_IF_ERROR(file.Read(tensor, 0, bytes));
  std::vector<float> values;
  for (std::size_t at = 0; at < bytes.size(); at += width) {
    values.push_back(kernels::VisitElement(*element, [&](auto value) {
      std::memcpy(&value, bytes.data() + at, sizeof value);
      return kernels::ToFloat(value);
    }));
    if (const float value = values.back(); !std::isnormal(value) || value < 0) {
      return refuse(fmt::format("has {} at index {}; want a finite normal number above 0", value,
                                values.size() - 1));
    }
  }
  return values;
}

// ---- all tensors ----

struct Found {
  SideScales scales;
  std::string file;
};

// What the files hold: by layer and side, and what was not taken.
class Collection {
 public:
  explicit Collection(const CheckpointConfig& config) : config_(config) {}

  absl::Status Take(const SafetensorsReader& file) {
    for (const TensorInfo& tensor : file.tensors()) {
      const std::optional<ScaleName> name = ParseScaleName(tensor.name);
      if (!name) {
        if (unknown_.empty() && LooksLikeScale(tensor.name)) unknown_ = tensor.name;
        continue;
      }
      if (!std::binary_search(config_.kv_layers.begin(), config_.kv_layers.end(), name->layer)) {
        outside_.push_back(tensor.name);
        continue;
      }
      KVT_ASSIGN_OR_RETURN(std::vector<float> values,
                           ReadScale(file, tensor, LengthsOf(config_, name->side)));
      const Found found{{std::move(values), tensor.name}, file.path()};
      if (name->side != ScaleSide::kKv) {
        KVT_RETURN_IF_ERROR(Add(name->layer, name->side, found));
        continue;
      }
      KVT_RETURN_IF_ERROR(Add(name->layer, ScaleSide::kK, found));
      KVT_RETURN_IF_ERROR(Add(name->layer, ScaleSide::kV, found));
    }
    return absl::OkStatus();
  }

  SideScales Side(int layer, ScaleSide side) const {
    const auto found = found_.find({layer, side});
    return found == found_.end() ? SideScales{} : found->second.scales;
  }
  const std::string& unknown() const { return unknown_; }  // the first such name; may be empty
  const std::vector<std::string>& outside() const { return outside_; }

 private:
  // Under two names or in two files the same scale may stand twice, but not two scales.
  absl::Status Add(int layer, ScaleSide side, const Found& found) {
    const auto [at, added] = found_.emplace(std::pair(layer, side), found);
    if (added || at->second.scales.values == found.scales.values) return absl::OkStatus();
    return Invalid(fmt::format("{}: tensor {} is another scale than {} of {} for the same layer",
                               found.file, found.scales.tensor, at->second.scales.tensor,
                               at->second.file));
  }

  const CheckpointConfig& config_;
  std::map<std::pair<int, ScaleSide>, Found> found_;
  std::string unknown_;
  std::vector<std::string> outside_;
};

// Fills the layers; says of each layer that lacks something what that is.
std::vector<std::string> Arrange(const Collection& found, const CheckpointConfig& config,
                                 CheckpointScales& scales) {
  for (const int layer : config.kv_layers) {
    scales.layers.push_back({.layer = layer,
                             .k = found.Side(layer, ScaleSide::kK),
                             .v = found.Side(layer, ScaleSide::kV),
                             .q = found.Side(layer, ScaleSide::kQ)});
  }
  const bool with_q = std::any_of(scales.layers.begin(), scales.layers.end(),
                                  [](const LayerCalibration& l) { return !l.q.values.empty(); });
  std::vector<std::string> missing;
  for (const LayerCalibration& layer : scales.layers) {
    std::vector<std::string> sides;
    if (layer.k.values.empty()) sides.emplace_back("k_scale");
    if (layer.v.values.empty() && !config.mla) sides.emplace_back("v_scale");
    if (sides.empty()) ++scales.calibrated;
    if (layer.q.values.empty() && with_q) sides.emplace_back("q_scale");
    if (!sides.empty())
      missing.push_back(fmt::format("layer {} ({})", layer.layer, fmt::join(sides, ", ")));
  }
  return missing;
}

std::string Shorten(const std::vector<std::string>& names) {
  const auto shown = names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kMaxNamed));
  std::string text = fmt::format("{}", fmt::join(names.begin(), shown, ", "));
  if (shown != names.end()) text += fmt::format(" and {} more", names.end() - shown);
  return text;
}

// ---- tensor parallelism ----

// As vLLM does: heads are split over the ranks, or where there are fewer heads than ranks, each is
// given to several ranks in a row.
absl::Status TakeRank(int heads, const CheckpointScalesOptions& options,
                      std::vector<float>& values) {
  if (values.size() <= 1) return absl::OkStatus();
  if (heads % options.tp_size == 0) {
    const std::ptrdiff_t share = heads / options.tp_size;
    values = {values.begin() + options.tp_rank * share,
              values.begin() + (options.tp_rank + 1) * share};
    return absl::OkStatus();
  }
  if (options.tp_size % heads == 0) {
    values = {values[static_cast<std::size_t>(options.tp_rank / (options.tp_size / heads))]};
    return absl::OkStatus();
  }
  return Invalid(fmt::format("tp_size is {}; {} KV heads can't be split or repeated over so many",
                             options.tp_size, heads));
}

// One per query head becomes one per KV head: the largest of those that it serves.
absl::Status ReduceQuery(const CheckpointConfig& config, SideScales& q) {
  if (q.values.size() <= 1) return absl::OkStatus();
  if (config.kv_heads == 0 || config.query_heads % config.kv_heads != 0) {
    return Invalid(
        fmt::format("tensor {} has a scale per query head; {} query heads do not fall "
                    "into {} groups, one per KV head",
                    q.tensor, config.query_heads, config.kv_heads));
  }
  const auto group = static_cast<std::ptrdiff_t>(config.query_heads / config.kv_heads);
  std::vector<float> largest;
  for (auto first = q.values.begin(); first != q.values.end(); first += group)
    largest.push_back(*std::max_element(first, first + group));
  q.values = std::move(largest);
  return absl::OkStatus();
}

bool AllOne(const CheckpointScales& scales) {
  const auto ones = [](const SideScales& side) {
    return std::all_of(side.values.begin(), side.values.end(), [](float x) { return x == 1.0f; });
  };
  return std::all_of(scales.layers.begin(), scales.layers.end(),
                     [&](const LayerCalibration& l) { return ones(l.k) && ones(l.v); });
}

// Tensors whose values no model's K, V or Q would give: LLM Compressor writes what memory held of
// what calibration has not seen.
std::vector<std::string> Implausible(const CheckpointScales& scales) {
  std::vector<std::string> tensors;
  for (const LayerCalibration& layer : scales.layers) {
    for (const SideScales* side : {&layer.k, &layer.v, &layer.q}) {
      const auto strange = [](float x) { return x < 1e-6f || x > 1e3f; };
      const bool named = !tensors.empty() && tensors.back() == side->tensor;  // K's and V's in one
      if (!named && std::any_of(side->values.begin(), side->values.end(), strange))
        tensors.push_back(side->tensor);
    }
  }
  return tensors;
}

absl::Status CheckOptions(const CheckpointScalesOptions& options) {
  if (options.tp_size < 1)
    return Invalid(fmt::format("tp_size is {}; want 1 or more", options.tp_size));
  if (options.tp_rank >= 0 && options.tp_rank < options.tp_size) return absl::OkStatus();
  return Invalid(fmt::format("tp_rank is {}; want 0 to {}", options.tp_rank, options.tp_size - 1));
}

std::string NameOf(const std::string& directory) {
  std::error_code ignored;
  const std::filesystem::path path =
      std::filesystem::absolute(directory, ignored).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

// Refuses a checkpoint without scales, and one with some; 1.0 stands in where that is allowed.
absl::Status CheckComplete(const std::string& directory, const Collection& found,
                           const std::vector<std::string>& missing, bool allow_partial,
                           CheckpointScales& scales) {
  if (missing.empty()) return absl::OkStatus();
  const std::string what = fmt::format("found {} of {} layers with KV scales in {}",
                                       scales.calibrated, scales.layers.size(), directory);
  const std::string hint =
      found.unknown().empty()
          ? ""
          : fmt::format("; tensor {} is named in no way that is known", found.unknown());
  if (scales.calibrated == 0) return Invalid(what + hint);
  if (!allow_partial)
    return Invalid(fmt::format("{}; missing: {}{}", what, Shorten(missing), hint));
  for (LayerCalibration& layer : scales.layers) {
    for (SideScales* side : {&layer.k, &layer.v}) {
      if (side->values.empty()) side->values = {1.0f};
    }
  }
  scales.warnings.push_back(
      fmt::format("{}; 1.0 stands in for: {}{}", what, Shorten(missing), hint));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CheckpointScales> ReadCheckpointScales(const std::string& directory,
                                                      const CheckpointScalesOptions& options) {
  KVT_RETURN_IF_ERROR(CheckOptions(options));
  KVT_ASSIGN_OR_RETURN(const CheckpointConfig config, ReadCheckpointConfig(directory));
  KVT_ASSIGN_OR_RETURN(const std::set<std::string> files, FilesOf(directory));
  Collection found(config);
  for (const std::string& name : files) {
    KVT_ASSIGN_OR_RETURN(const SafetensorsReader file,
                         SafetensorsReader::Open(fmt::format("{}/{}", directory, name)));
    KVT_RETURN_IF_ERROR(found.Take(file));
  }
  CheckpointScales scales{.source = NameOf(directory), .layers = {}, .warnings = {}};
  const std::vector<std::string> missing = Arrange(found, config, scales);
  KVT_RETURN_IF_ERROR(CheckComplete(directory, found, missing, options.allow_partial, scales));
  if (const std::vector<std::string> tensors = Implausible(scales); !tensors.empty()) {
    scales.warnings.push_back(fmt::format(
        "below 1e-6 or above 1000, so hardly calibrated on these tensors: {}", Shorten(tensors)));
  }
  for (LayerCalibration& layer : scales.layers) {
    KVT_RETURN_IF_ERROR(ReduceQuery(config, layer.q));
    for (SideScales* side : {&layer.k, &layer.v, &layer.q}) {
      KVT_RETURN_IF_ERROR(TakeRank(config.kv_heads, options, side->values));
    }
  }
  if (!found.outside().empty()) {
    scales.warnings.push_back(
        fmt::format("ignored, of layers that keep no K and V: {}", Shorten(found.outside())));
  }
  if (AllOne(scales)) scales.warnings.emplace_back("every scale is 1.0: was it calibrated?");
  return scales;
}

}  // namespace kvtier::client
