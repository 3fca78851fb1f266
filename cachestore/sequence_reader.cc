#include "cachestore/sequence_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "kernels/host_codec.h"

namespace kvtier::cachestore {
namespace {

// A block is one message's at least; clients take messages up to this size.
constexpr std::int64_t kMaxBlockBytes = 8 << 20;

std::vector<float> OfHeads(const std::vector<float>& scales, HeadRange heads) {
  if (scales.size() <= 1) return scales;
  return {scales.begin() + heads.first, scales.begin() + heads.end};
}

// A NaN once seen stays.
float Larger(float a, float b) { return std::isnan(a) || a > b ? a : b; }

// amax / the type's largest value, of each head, or of all together; 1 where that is none. An Inf
// that is stored reads as the largest finite number: it, too, says nothing of the others.
std::vector<float> ScalesFor(std::vector<float> largest, ElementType type, bool per_tensor) {
  if (per_tensor) largest = {std::accumulate(largest.begin(), largest.end(), 0.0f, Larger)};
  const float limit = kernels::LargestFp8(type);
  for (float& scale : largest)
    scale = scale > 0 && scale < FLT_MAX ? std::max(scale / limit, FLT_MIN) : 1.0f;
  return largest;
}

// Scales of the shard's heads; one for all stays one.
StoredScales ScalesOf(const TensorModel& tensor, HeadRange heads) {
  StoredScales stored{tensor.layout.codec, tensor.scales};
  if (stored.scales.empty()) return stored;
  const auto first = tensor.scales.begin();
  stored.scales.assign(first + heads.first,
                       first + (tensor.per_head_scales ? heads.end : heads.first + 1));
  return stored;
}

}  // namespace

struct SequenceReader::Output {
  const BlockTarget& target;
  ElementType element;
  const std::vector<float>& scales;
  std::int64_t first_token;
  std::int64_t tokens;
};

absl::StatusOr<SequenceReader> SequenceReader::Make(std::shared_ptr<const Lease> lease,
                                                    SequencePins pins, const ReadFormat& format,
                                                    Device& device) {
  SequenceReader reader(std::move(lease), std::move(pins), format, device);
  const SequencePins& p = reader.pins_;
  for (int i = 0; i < p.shard.num_layers; ++i) {
    const SequencePins::Layer& layer = p.layers[static_cast<std::size_t>(i)];
    const int index = p.shard.first_layer + i;
    const LayerModel& model = p.model->model().layers[static_cast<std::size_t>(index)];
    LayerOutput out{.layer = index,
                    .first_token = layer.first_token,
                    .tokens = p.first_token + p.tokens - layer.first_token,
                    .heads = p.shard.HeadsIn(model.spec.kv_heads),
                    .k_dim = model.k.dim(),
                    .v_dim = model.v.dim(),
                    .element = format.as.value_or(model.k.source),
                    .k_scales = {},
                    .v_scales = {},
                    .q_scales = OfHeads(model.q_scales, reader.heads(static_cast<std::size_t>(i)))};
    KVT_RETURN_IF_ERROR(reader.CheckRotation(model.k, index));
    KVT_RETURN_IF_ERROR(reader.SetScales(model, out));
    const HeadRange heads = reader.heads(static_cast<std::size_t>(i));
    out.k_code_tokens = LeastCodes(layer.k, heads);
    out.v_code_tokens = out.v_dim > 0 ? LeastCodes(layer.v, heads) : 0;
    KVT_RETURN_IF_ERROR(reader.CheckSize(out));
    reader.layers_.push_back(std::move(out));
  }
  if (format.stored) {
    KVT_RETURN_IF_ERROR(reader.CheckBounds());
  }
  return reader;
}

absl::StatusOr<SequenceReader> SequenceReader::Open(std::shared_ptr<const Lease> lease,
                                                    const ReadRange& asked,
                                                    const ReadFormat& format, Device& device) {
  KVT_RETURN_IF_ERROR(lease->Check());
  ReadRange range = asked;
  range.step_tokens = format.stored ? 0 : std::max(1, format.block_tokens);
  KVT_ASSIGN_OR_RETURN(SequencePins pins, lease->sequence()->Pin(range));
  // It may have ended before the bytes were pinned.
  KVT_RETURN_IF_ERROR(lease->Check());
  return Make(std::move(lease), std::move(pins), format, device);
}

HeadRange SequenceReader::heads(std::size_t layer) const {
  const Shard& shard = pins_.shard;
  const auto index = static_cast<std::size_t>(shard.first_layer) + layer;
  return {shard.first_head, shard.EndHeadIn(pins_.model->model().layers[index].spec.kv_heads)};
}

absl::Status SequenceReader::CheckRotation(const TensorModel& k, int layer) const {
  const bool rotated = k.layout.codec.rotation != kernels::Rotation::kNone;
  if (!format_.stored || !rotated || format_.accept_k_rotation) return absl::OkStatus();
  return Error(Reason::kFormatRefused,
               fmt::format("as is STORED; k of layer {} is rotated (k_rotation=hadamard): set "
                           "accept_k_rotation if the reader turns it back, or read values",
                           layer));
}

absl::Status SequenceReader::SetScales(const LayerModel& model, LayerOutput& out) const {
  const HeadRange heads{pins_.shard.first_head, pins_.shard.first_head + out.heads};
  const StoredScales k = ScalesOf(model.k, heads), v = ScalesOf(model.v, heads);
  if (format_.stored) {
    out.k_scales = k.scales;
    out.v_scales = v.scales;
  } else if (kernels::IsFp8(out.element)) {
    ReadFormat format = format_;
    format.as = out.element;  // the source's, where none is asked for
    KVT_ASSIGN_OR_RETURN(out.k_scales, OutputScales(k, format, format.k_scale, "k_scale"));
    KVT_ASSIGN_OR_RETURN(out.v_scales, OutputScales(v, format, format.v_scale, "v_scale"));
  }
  return absl::OkStatus();
}

// Whether what can't be cut fits a message: a block, or a page as stored.
absl::Status SequenceReader::CheckSize(const LayerOutput& out) const {
  const std::int64_t token_bytes = out.k_bytes_per_token() + out.v_bytes_per_token();
  if (!format_.stored) {
    const std::int64_t block = format_.block_tokens * token_bytes;
    if (block <= kMaxBlockBytes) return absl::OkStatus();
    return Error(Reason::kInvalidField,
                 fmt::format("block_tokens is {}; a block of layer {} would take {} bytes, want at "
                             "most {}",
                             format_.block_tokens, out.layer, block, kMaxBlockBytes));
  }
  const LayerModel& model = pins_.model->model().layers[static_cast<std::size_t>(out.layer)];
  const std::int64_t rows =
      std::min(model.k.layout.page_tokens,
               std::max(model.k.residual.capacity(), model.v.residual.capacity()));
  const std::int64_t page = PartBytes(model.k.layout, out.heads) +
                            PartBytes(model.v.layout, out.heads) + rows * token_bytes;
  if (page <= kMaxBlockBytes) return absl::OkStatus();
  return Error(Reason::kFormatRefused,
               fmt::format("as is STORED; a page of {} heads of layer {} would take {} bytes, want "
                           "at most {}: read fewer heads, or values",
                           out.heads, out.layer, page, kMaxBlockBytes));
}

absl::Status SequenceReader::CheckBounds() const {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    for (const Side side : {Side::kK, Side::kV}) {
      if (side == Side::kV && layers_[i].v_dim == 0) continue;
      const auto name =
          fmt::format("{} of layer {}", side == Side::kK ? "k" : "v", layers_[i].layer);
      const TensorPins& pins = pinned(i, side);
      for (const TensorPins::PinnedPart& part : pins.parts) {
        if (&part.part->model() == pins.model) continue;
        return Error(
            Reason::kFormatRefused,
            fmt::format("as is STORED; pages of {} were stored in fewer bits when room was "
                        "needed: read values",
                        name));
      }
      const std::int64_t first = layers_[i].first_token;
      for (const std::int64_t token : {first, first + layers_[i].tokens}) {
        KVT_RETURN_IF_ERROR(
            CheckGroupBound(pinned(i, side), heads(i), token, pins_.end_token, name));
      }
    }
  }
  return absl::OkStatus();
}

StoredSpan SequenceReader::Span(std::size_t layer, Side side, std::int64_t first_token,
                                std::int64_t tokens) const {
  if (side == Side::kV && layers_[layer].v_dim == 0) return {};
  return StoredSpanOf(pinned(layer, side), heads(layer), first_token, tokens);
}

std::int64_t SequenceReader::StoredBytes(std::size_t layer, std::int64_t first_token,
                                         std::int64_t tokens) const {
  std::int64_t bytes = 0;
  for (const Side side : {Side::kK, Side::kV}) {
    if (side == Side::kV && layers_[layer].v_dim == 0) continue;
    bytes +=
        StoredBytesOf(pinned(layer, side), heads(layer), Span(layer, side, first_token, tokens));
  }
  return bytes;
}

std::int64_t SequenceReader::total_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < layers_.size(); ++i)
    bytes += ChunkBytes(i, layers_[i].first_token, layers_[i].tokens);
  return bytes;
}

absl::StatusOr<bool> SequenceReader::MeasureScales() {
  const bool fp8 = format_.as.has_value() && kernels::IsFp8(*format_.as);
  if (!format_.measure_scales || !fp8) return false;
  for (; measuring_.layer < layers_.size(); measuring_ = {.layer = measuring_.layer + 1}) {
    LayerOutput& out = layers_[measuring_.layer];
    if (measuring_.side == Side::kK) {
      KVT_ASSIGN_OR_RETURN(const bool more, MeasurePage(format_.k_scale, out.k_scales));
      if (more) return true;
      measuring_ = {.layer = measuring_.layer, .side = Side::kV};
    }
    if (out.v_dim == 0) continue;
    KVT_ASSIGN_OR_RETURN(const bool more, MeasurePage(format_.v_scale, out.v_scales));
    if (more) return true;
  }
  return false;
}

// Looks at the next page of the tensor that is being measured, of all heads; after the last there
// are `scales`, and nothing more.
absl::StatusOr<bool> SequenceReader::MeasurePage(const std::optional<float>& asked,
                                                 std::vector<float>& scales) {
  if (asked.has_value()) return false;
  KVT_RETURN_IF_ERROR(lease_->Check());
  const TensorPins& tensor = pinned(measuring_.layer, measuring_.side);
  const HeadRange range = heads(measuring_.layer);
  const std::int64_t page = tensor.model->layout.page_tokens, dim = tensor.model->dim();
  measuring_.largest.resize(static_cast<std::size_t>(range.count()), 0.0f);
  const LayerOutput& layer = layers_[measuring_.layer];
  if (measuring_.tokens == layer.tokens) {
    scales = ScalesFor(measuring_.largest, *format_.as, format_.per_tensor_scales_only);
    return false;
  }
  const std::int64_t first = layer.first_token + measuring_.tokens;
  const std::int64_t count = std::min(page, layer.tokens - measuring_.tokens);
  KVT_RETURN_IF_ERROR(Verify(MutablePinned(measuring_.layer, measuring_.side), first, count));
  std::vector<float> values(static_cast<std::size_t>(count * dim));
  const std::uint64_t saturated = saturated_;
  for (int h = 0; h < range.count(); ++h) {
    const kernels::DecodeRun run{
        .dim = static_cast<int>(dim),
        .tokens = count,
        .out = {reinterpret_cast<std::byte*>(values.data()), ElementType::kFp32, dim}};
    std::vector<DecodeJob> jobs;
    QueueRows(tensor, range.first + h, run, first, jobs);
    KVT_RETURN_IF_ERROR(device_->Decode(jobs));
    const kernels::ConstRows rows{run.out.data, ElementType::kFp32, dim};
    float& most = measuring_.largest[static_cast<std::size_t>(h)];
    most = Larger(most, kernels::LargestMagnitude(rows, static_cast<int>(dim), count));
  }
  saturated_ = saturated;  // what is sent is counted when it is sent
  measuring_.tokens += count;
  KVT_RETURN_IF_ERROR(lease_->Check());
  return true;
}

std::int64_t SequenceReader::pinned_parts() const {
  std::size_t parts = 0;
  for (const SequencePins::Layer& layer : pins_.layers) {
    parts += layer.k.parts.size() + layer.v.parts.size();
  }
  return static_cast<std::int64_t>(parts);
}

std::int64_t SequenceReader::StoredChunkTokens(std::size_t layer, std::int64_t first_token,
                                               std::int64_t bytes) const {
  const std::int64_t page = pins_.model->model().page_tokens;
  const std::int64_t end = pins_.first_token + pins_.tokens;
  std::int64_t until = first_token;
  do {
    const std::int64_t next = std::min(end, (until / page + 1) * page);
    if (until > first_token && StoredBytes(layer, first_token, next - first_token) > bytes) break;
    until = next;
  } while (until < end);
  return until - first_token;
}

std::int64_t SequenceReader::ChunkTokens(std::size_t layer, std::int64_t first_token,
                                         std::int64_t bytes) const {
  const LayerOutput& out = layers_[layer];
  const auto has_codes = [&](Side side) { return Span(layer, side, first_token, 1).pages() > 0; };
  if (format_.stored && (has_codes(Side::kK) || has_codes(Side::kV)))
    return StoredChunkTokens(layer, first_token, bytes);
  std::int64_t tokens =
      std::max<std::int64_t>(1, bytes / (out.k_bytes_per_token() + out.v_bytes_per_token()));
  const std::int64_t page = pins_.model->model().page_tokens;
  if (tokens >= page) tokens = tokens / page * page;
  if (format_.block_tokens > 0) {
    tokens = std::max<std::int64_t>(1, tokens / format_.block_tokens) * format_.block_tokens;
  }
  return tokens;
}

template <class F>
absl::Status SequenceReader::Guarded(F copy) const {
  KVT_RETURN_IF_ERROR(lease_->Check());
  KVT_RETURN_IF_ERROR(copy());
  KVT_RETURN_IF_ERROR(device_->Health());
  return lease_->Check();
}

absl::Status SequenceReader::Fill(std::size_t layer, std::int64_t first_token, std::int64_t tokens,
                                  std::byte* k, std::byte* v) {
  const std::int64_t block = format_.block_tokens > 0 ? format_.block_tokens : tokens;
  const auto target = [&](std::byte* data) {
    return BlockTarget{
        .data = data, .first_token = first_token, .tokens = tokens, .block_tokens = block};
  };
  return Fill(layer, first_token, tokens, target(k), target(v));
}

absl::Status SequenceReader::Fill(std::size_t layer, std::int64_t first_token, std::int64_t tokens,
                                  const BlockTarget& k, const BlockTarget& v) {
  return Guarded([&]() -> absl::Status {
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
  });
}

absl::Status SequenceReader::FillPart(std::size_t layer, Side side, std::int64_t page,
                                      std::byte* out) {
  return Guarded([&]() -> absl::Status {
    TensorPins& tensor = MutablePinned(layer, side);
    KVT_RETURN_IF_ERROR(Verify(tensor, page * tensor.model->layout.page_tokens, 1));
    FillStoredPart(tensor, heads(layer), page, *device_, out);
    return absl::OkStatus();
  });
}

absl::Status SequenceReader::FillRows(std::size_t layer, Side side, const StoredSpan& span,
                                      std::byte* out) {
  return Guarded([&]() -> absl::Status {
    const TensorPins& tensor = pinned(layer, side);
    const HeadRange range = heads(layer);
    const std::int64_t row_bytes = tensor.model->source_row_bytes();
    const bool nhd = format_.layout == TokenLayout::kNhd;
    const std::int64_t head_rows = nhd ? 1 : span.rows, token_rows = nhd ? range.count() : 1;
    if (MostCodes(tensor, range) > span.first_row)
      std::memset(out, 0, static_cast<std::size_t>(span.rows * range.count() * row_bytes));
    std::vector<DecodeJob> jobs;
    for (int h = 0; h < range.count(); ++h) {
      const int head = range.first + h;
      const std::int64_t first = std::clamp(tensor.code_tokens[static_cast<std::size_t>(head)],
                                            span.first_row, span.first_row + span.rows);
      const std::int64_t row = h * head_rows + (first - span.first_row) * token_rows;
      const kernels::DecodeRun run{
          .dim = tensor.model->dim(),
          .tokens = span.first_row + span.rows - first,
          .out = {out + row * row_bytes, tensor.model->source, token_rows * tensor.model->dim()}};
      QueueRows(tensor, head, run, first, jobs);
    }
    return device_->Decode(jobs);
  });
}

void SequenceReader::QueueTensor(const TensorPins& tensor, const Output& out,
                                 std::vector<DecodeJob>& jobs) {
  const std::int64_t row = kernels::RowElements(out.element, tensor.model->dim());
  const std::int64_t element = kernels::ElementBytes(out.element);
  const int heads = pins_.shard.HeadsIn(tensor.model->heads());
  const bool nhd = format_.layout == TokenLayout::kNhd;
  const BlockTarget& target = out.target;
  const std::int64_t end = out.first_token + out.tokens;
  for (std::int64_t token = out.first_token; token < end;) {
    const std::int64_t block = (token - target.first_token) / target.block_tokens;
    const std::int64_t in_block = (token - target.first_token) % target.block_tokens;
    const std::int64_t before = block * target.block_tokens;
    const bool placed = !target.ids.empty();
    const std::int64_t block_tokens =
        placed ? target.block_tokens : std::min(target.block_tokens, target.tokens - before);
    const std::int64_t count = std::min(block_tokens - in_block, end - token);
    const std::int64_t head_stride = nhd ? row : block_tokens * row;
    const std::int64_t token_stride = nhd ? heads * row : row;
    std::byte* const data = target.data +
                            (placed ? target.ids[static_cast<std::size_t>(block)] * target.stride
                                    : before * heads * row * element) +
                            in_block * token_stride * element;
    for (int h = 0; h < heads; ++h) {
      const std::size_t scale = out.scales.size() > 1 ? static_cast<std::size_t>(h) : 0;
      kernels::DecodeRun run{.dim = tensor.model->dim(),
                             .tokens = count,
                             .out_scale = out.scales.empty() ? 1.0f : out.scales[scale],
                             .out = {data + h * head_stride * element, out.element, token_stride}};
      QueueRows(tensor, pins_.shard.first_head + h, run, token, jobs);
    }
    token += count;
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
      // Under pressure it may have been stored as another format than its model's.
      const Part& part = *tensor.parts[static_cast<std::size_t>(page - tensor.first_page)].part;
      run.codec = part.layout().codec;
      run.scale = part.CodeScaleOf(head);
      run.in = part.SliceAt(head);
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
  const HeadRange heads{pins_.shard.first_head, pins_.shard.EndHeadIn(tensor.model->heads())};
  const int page_tokens = tensor.model->layout.page_tokens;
  const std::int64_t last_page = (first_token + tokens - 1) / page_tokens;
  std::vector<std::int64_t> pages;
  std::vector<const Part*> parts;
  for (std::int64_t page = first_token / page_tokens; page <= last_page; ++page) {
    const auto index = static_cast<std::size_t>(page - tensor.first_page);
    if (index >= tensor.parts.size()) continue;
    const TensorPins::PinnedPart& pinned = tensor.parts[index];
    if (!pinned.final || pinned.verified) continue;
    pages.push_back(page);
    parts.push_back(pinned.part.get());
  }
  if (parts.empty()) return absl::OkStatus();
  const std::vector<std::optional<int>> damage = FindDamage(parts, heads, *device_);
  KVT_RETURN_IF_ERROR(device_->Health());
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (damage[i].has_value()) {
      return Error(Reason::kChecksum,
                   fmt::format("page {} head {} does not have the checksum it was stored with",
                               pages[i], *damage[i]));
    }
    tensor.parts[static_cast<std::size_t>(pages[i] - tensor.first_page)].verified = true;
  }
  return absl::OkStatus();
}

}  // namespace kvtier::cachestore
