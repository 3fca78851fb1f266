#include "client/stored_encoder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cachestore/base/checksum.h"
#include "kernels/host_codec.h"

namespace kvtier::client {
namespace {

using cachestore::HeadEntry;
using cachestore::PartHeader;
using cachestore::PartLayout;
using cachestore::TensorModel;

}  // namespace

struct StoredEncoder::Values {
  TensorModel tensor;  // of the stream's heads
  cachestore::Side side = cachestore::Side::kK;
  bool k_before_rope = false;
  bool heads_first = false;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  std::int64_t residual_origin = 0;
  const std::byte* data = nullptr;

  std::int64_t bytes() const { return tokens * tensor.heads() * tensor.source_row_bytes(); }
  std::int64_t first_page() const {
    const std::int64_t page = tensor.layout.page_tokens;
    return (first_token + page - 1) / page;
  }
  std::int64_t end_page() const {
    return tensor.residual.CodeTokens(first_token + tokens, residual_origin) /
           tensor.layout.page_tokens;
  }
  kernels::ConstRows RowsOf(int head, std::int64_t token) const {
    const std::int64_t row = token - first_token;
    const std::int64_t at = heads_first ? head * tokens + row : row * tensor.heads() + head;
    return {data + at * tensor.source_row_bytes(), tensor.source,
            (heads_first ? 1 : tensor.heads()) * kernels::RowElements(tensor.source, tensor.dim())};
  }
  bool Fit() const;
  std::string PartOf(std::int64_t page) const;
};

// Whether the format takes all values that would be encoded.
bool StoredEncoder::Values::Fit() const {
  // Sources that are codes already travel as they are, and the server looks at them.
  if (kernels::IsFp8(tensor.source) || kernels::IsBlocks(tensor.source)) return true;
  const float limit = kernels::MagnitudeLimit(tensor.layout.codec, tensor.dim());
  const std::int64_t begin = first_page() * tensor.layout.page_tokens;
  const std::int64_t end = end_page() * tensor.layout.page_tokens;
  for (int head = 0; head < tensor.heads(); ++head) {
    if (!(kernels::LargestMagnitude(RowsOf(head, begin), tensor.dim(), end - begin) <= limit))
      return false;
  }
  return true;
}

std::string StoredEncoder::Values::PartOf(std::int64_t page) const {
  const PartLayout& layout = tensor.layout;
  std::string bytes(static_cast<std::size_t>(layout.bytes), '\0');
  auto* const part = reinterpret_cast<std::byte*>(bytes.data());
  PartHeader header = MakePartHeader(tensor, side, k_before_rope);
  header.tokens = header.page_tokens;
  for (int head = 0; head < layout.heads; ++head) {
    HeadEntry entry;
    if (!tensor.scales.empty()) entry.scale = tensor.scales[static_cast<std::size_t>(head)];
    entry.saturated = static_cast<std::uint32_t>(
        kernels::EncodeOnHost({.codec = layout.codec,
                               .dim = layout.dim,
                               .scale = tensor.scales.empty() ? 1.0f : entry.scale,
                               .source = RowsOf(head, page * layout.page_tokens),
                               .units = layout.page_tokens / layout.unit_tokens,
                               .out = part + layout.SliceOffset(head)}));
    entry.checksum = cachestore::ChecksumOf(part + layout.SliceOffset(head), layout.slice_bytes);
    header.saturated += entry.saturated;
    cachestore::WriteEntry(part, head, entry);
  }
  cachestore::WriteHeader(part, header);
  header.checksum = cachestore::HeaderChecksum(part, layout.header_use());
  cachestore::WriteHeader(part, header);
  return bytes;
}

StoredEncoder::StoredEncoder(std::shared_ptr<const cachestore::Model> model,
                             const v1::AppendOpen& open)
    : model_(std::move(model)),
      first_head_(static_cast<int>(open.first_head())),
      num_heads_(static_cast<int>(open.num_heads())),
      heads_first_(open.layout() == v1::LAYOUT_HND) {}

cachestore::HeadRange StoredEncoder::HeadsIn(const cachestore::LayerModel& layer) const {
  const int all = layer.spec.kv_heads;
  return {std::min(first_head_, all),
          num_heads_ == 0 ? all : std::min(all, first_head_ + num_heads_)};
}

void StoredEncoder::Encode(v1::AppendChunk& chunk, std::uint64_t residual_origin) const {
  if (chunk.first_layer() >= model_->layers.size() || chunk.num_layers() > 1) return;
  const cachestore::LayerModel& layer = model_->layers[chunk.first_layer()];
  const bool before_rope = model_->request.spec.k_rope == cachestore::RopeState::kBefore;
  const auto values = [&](const TensorModel& tensor, cachestore::Side side,
                          const std::string& rows) {
    return Values{cachestore::HeadsOf(tensor, HeadsIn(layer)),
                  side,
                  before_rope,
                  heads_first_,
                  static_cast<std::int64_t>(chunk.first_token()),
                  chunk.num_tokens(),
                  static_cast<std::int64_t>(residual_origin),
                  reinterpret_cast<const std::byte*>(rows.data())};
  };
  EncodeSide(values(layer.k, cachestore::Side::kK, chunk.k()), *chunk.mutable_k(),
             *chunk.mutable_k_parts());
  if (layer.v.dim() == 0) return;
  EncodeSide(values(layer.v, cachestore::Side::kV, chunk.v()), *chunk.mutable_v(),
             *chunk.mutable_v_parts());
}

void StoredEncoder::EncodeSide(const Values& values, std::string& rows,
                               google::protobuf::RepeatedPtrField<v1::StoredPart>& parts) const {
  const std::int64_t first = values.first_page(), end = values.end_page();
  if (rows.size() != static_cast<std::size_t>(values.bytes()) || first >= end || !values.Fit())
    return;
  for (std::int64_t page = first; page < end; ++page) {
    v1::StoredPart& part = *parts.Add();
    part.set_page(static_cast<std::uint32_t>(page));
    part.set_data(values.PartOf(page));
  }
  // The rows before and behind the pages move together: of all heads at once, or head by head.
  const std::int64_t page_tokens = values.tensor.layout.page_tokens;
  const std::int64_t runs = heads_first_ ? values.tensor.heads() : 1;
  const auto row = static_cast<std::size_t>(values.bytes() / values.tokens / runs);
  const auto begin = static_cast<std::size_t>(first * page_tokens - values.first_token) * row;
  const auto behind = static_cast<std::size_t>(end * page_tokens - values.first_token) * row;
  const auto all = static_cast<std::size_t>(values.tokens) * row;
  std::string left;
  left.reserve(static_cast<std::size_t>(runs) * (all - (behind - begin)));
  for (std::size_t run = 0; run < static_cast<std::size_t>(runs); ++run) {
    left.append(rows, run * all, begin);
    left.append(rows, run * all + behind, all - behind);
  }
  rows = std::move(left);
}

}  // namespace kvtier::client
