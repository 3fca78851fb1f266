#include "cachestore/sequence_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
namespace {

// A block is one message's at least; clients take messages up to this size.
constexpr std::int64_t kMaxBlockBytes = 8 << 20;

absl::StatusOr<std::vector<float>> OutputScales(const TensorModel& tensor, ElementType as,
                                                const ReadFormat& format,
                                                const std::optional<float>& asked,
                                                const char* field) {
  if (asked.has_value()) {
    if (std::isnormal(*asked) && *asked > 0) return std::vector<float>{*asked};
    return Error(Reason::kInvalidField,
                 fmt::format("{} is {}; want a finite normal number above 0", field, *asked));
  }
  const kernels::Codec& codec = tensor.layout.codec;
  if (codec.id != kernels::CodecId::kFp8 || codec.element != as) return std::vector<float>{1.0f};
  if (!tensor.per_head_scales) return std::vector<float>{tensor.scales.front()};
  if (format.per_tensor_scales_only) {
    return Error(Reason::kFormatRefused,
                 fmt::format("per_tensor_scales_only is set; the layer is stored as {} with a "
                             "scale per head: give {} or take "
                             "per-head scales",
                             kernels::ElementName(as), field));
  }
  return tensor.scales;
}

// Scales of the shard's heads; one for all stays one.
std::vector<float> OfHeads(const std::vector<float>& scales, const Shard& shard) {
  if (scales.size() <= 1) return scales;
  const int heads = static_cast<int>(scales.size());
  return {scales.begin() + shard.first_head, scales.begin() + shard.EndHeadIn(heads)};
}

std::int64_t LeastCodes(const TensorPins& tensor, const Shard& shard) {
  const auto first = tensor.code_tokens.begin() + shard.first_head;
  return *std::min_element(first, first + shard.HeadsIn(tensor.model->heads()));
}

}  // namespace

struct SequenceReader::Output {
  std::byte* data;
  ElementType element;
  const std::vector<float>& scales;
  std::int64_t first_token;
  std::int64_t tokens;
};

absl::StatusOr<SequenceReader> SequenceReader::Make(SequencePins pins, const ReadFormat& format,
                                                    Device& device) {
  SequenceReader reader(std::move(pins), format, device);
  const SequencePins& p = reader.pins_;
  for (int i = 0; i < p.shard.num_layers; ++i) {
    const SequencePins::Layer& layer = p.layers[static_cast<std::size_t>(i)];
    const int index = p.shard.first_layer + i;
    const LayerModel& model = p.model->model().layers[static_cast<std::size_t>(index)];
    LayerOutput out{.layer = index,
                    .heads = p.shard.HeadsIn(model.spec.kv_heads),
                    .k_dim = model.k.dim(),
                    .v_dim = model.v.dim(),
                    .element = format.as.value_or(model.k.source),
                    .k_scales = {},
                    .v_scales = {},
                    .q_scales = OfHeads(model.q_scales, p.shard)};
    if (kernels::IsFp8(out.element)) {
      KVT_ASSIGN_OR_RETURN(const std::vector<float> k,
                           OutputScales(model.k, out.element, format, format.k_scale, "k_scale"));
      KVT_ASSIGN_OR_RETURN(const std::vector<float> v,
                           OutputScales(model.v, out.element, format, format.v_scale, "v_scale"));
      out.k_scales = OfHeads(k, p.shard);
      out.v_scales = OfHeads(v, p.shard);
    }
    out.k_code_tokens = LeastCodes(layer.k, p.shard);
    out.v_code_tokens = out.v_dim > 0 ? LeastCodes(layer.v, p.shard) : 0;
    const std::int64_t block =
        format.block_tokens * (out.k_bytes_per_token() + out.v_bytes_per_token());
    if (block > kMaxBlockBytes) {
      return Error(
          Reason::kInvalidField,
          fmt::format("block_tokens is {}; a block of layer {} would take {} bytes, want at "
                      "most {}",
                      format.block_tokens, out.layer, block, kMaxBlockBytes));
    }
    reader.layers_.push_back(std::move(out));
  }
  return reader;
}

std::int64_t SequenceReader::total_bytes() const {
  std::int64_t bytes = 0;
  for (const LayerOutput& layer : layers_) {
    bytes += pins_.tokens * (layer.k_bytes_per_token() + layer.v_bytes_per_token());
  }
  return bytes;
}

std::int64_t SequenceReader::pinned_parts() const {
  std::size_t parts = 0;
  for (const SequencePins::Layer& layer : pins_.layers) {
    parts += layer.k.parts.size() + layer.v.parts.size();
  }
  return static_cast<std::int64_t>(parts);
}

std::int64_t SequenceReader::ChunkTokens(std::size_t layer, std::int64_t bytes) const {
  const LayerOutput& out = layers_[layer];
  std::int64_t tokens =
      std::max<std::int64_t>(1, bytes / (out.k_bytes_per_token() + out.v_bytes_per_token()));
  const std::int64_t page = pins_.model->model().page_tokens;
  if (tokens >= page) tokens = tokens / page * page;
  if (format_.block_tokens > 0) {
    tokens = std::max<std::int64_t>(1, tokens / format_.block_tokens) * format_.block_tokens;
  }
  return tokens;
}

absl::Status SequenceReader::Fill(std::size_t layer, std::int64_t first_token, std::int64_t tokens,
                                  std::byte* k, std::byte* v) {
  const LayerOutput& out = layers_[layer];
  SequencePins::Layer& pinned = pins_.layers[layer];
  KVT_RETURN_IF_ERROR(Verify(pinned.k, first_token, tokens));
  std::vector<DecodeJob> jobs;
  QueueTensor(pinned.k, {k, out.element, out.k_scales, first_token, tokens}, jobs);
  if (out.v_dim > 0) {
    KVT_RETURN_IF_ERROR(Verify(pinned.v, first_token, tokens));
    QueueTensor(pinned.v, {v, out.element, out.v_scales, first_token, tokens}, jobs);
  }
  return device_->Decode(jobs);
}

void SequenceReader::QueueTensor(const TensorPins& tensor, const Output& out,
                                 std::vector<DecodeJob>& jobs) {
  const std::int64_t row = kernels::RowElements(out.element, tensor.model->dim());
  const int heads = pins_.shard.HeadsIn(tensor.model->heads());
  const std::int64_t block = format_.block_tokens > 0 ? format_.block_tokens : out.tokens;
  for (std::int64_t begin = 0; begin < out.tokens; begin += block) {
    const std::int64_t count = std::min(block, out.tokens - begin);
    const bool nhd = format_.layout == TokenLayout::kNhd;
    const std::int64_t head_stride = nhd ? row : count * row;
    const std::int64_t token_stride = nhd ? heads * row : row;
    std::byte* data = out.data + begin * heads * row * kernels::ElementBytes(out.element);
    for (int h = 0; h < heads; ++h) {
      const std::size_t scale = out.scales.size() > 1 ? static_cast<std::size_t>(h) : 0;
      kernels::DecodeRun run{.dim = tensor.model->dim(),
                             .tokens = count,
                             .out_scale = out.scales.empty() ? 1.0f : out.scales[scale],
                             .out = {data + h * head_stride * kernels::ElementBytes(out.element),
                                     out.element, token_stride}};
      QueueRows(tensor, pins_.shard.first_head + h, run, out.first_token + begin, jobs);
    }
  }
}

// Cuts one head's rows where pages end, where codes end, and where the residual wraps.
void SequenceReader::QueueRows(const TensorPins& tensor, int head, kernels::DecodeRun run,
                               std::int64_t first_token, std::vector<DecodeJob>& jobs) {
  const PartLayout& layout = tensor.model->layout;
  const std::int64_t codes = tensor.code_tokens[static_cast<std::size_t>(head)];
  std::int64_t token = first_token;
  const std::int64_t end = first_token + run.tokens;
  while (token < end) {
    std::int64_t until;  // where what lies together ends
    if (token < codes) {
      const std::int64_t page = token / layout.page_tokens;
      until = std::min({end, codes, (page + 1) * layout.page_tokens});
      run.codec = layout.codec;
      run.scale = tensor.model->scales.empty()
                      ? 1.0f
                      : tensor.model->scales[static_cast<std::size_t>(head)];
      run.in = tensor.parts[static_cast<std::size_t>(page - tensor.first_page)].part->SliceAt(head);
      run.first_token = token - page * layout.page_tokens;
    } else {
      until =
          std::min(end, token + tensor.residual->capacity() - token % tensor.residual->capacity());
      run.codec = {.id = kernels::CodecId::kRaw, .element = tensor.model->source};
      run.in = tensor.residual->RowAt(head, token);
      run.first_token = 0;
    }
    run.tokens = until - token;
    jobs.push_back({run, &saturated_});
    run.out.data += run.tokens * run.out.token_stride * kernels::ElementBytes(run.out.type);
    token = until;
  }
}

absl::Status SequenceReader::Verify(TensorPins& tensor, std::int64_t first_token,
                                    std::int64_t tokens) const {
  const int page_tokens = tensor.model->layout.page_tokens;
  const std::int64_t last_page = (first_token + tokens - 1) / page_tokens;
  for (std::int64_t page = first_token / page_tokens; page <= last_page; ++page) {
    const auto index = static_cast<std::size_t>(page - tensor.first_page);
    if (index >= tensor.parts.size() || !tensor.parts[index].unverified) continue;
    for (int head = pins_.shard.first_head; head < pins_.shard.EndHeadIn(tensor.model->heads());
         ++head) {
      if (tensor.parts[index].part->Verify(head, *device_)) continue;
      return Error(
          Reason::kChecksum,
          fmt::format("page {} head {} does not have the checksum it was stored with", page, head));
    }
    tensor.parts[index].unverified = false;
  }
  return absl::OkStatus();
}

}  // namespace kvtier::cachestore
