#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cachestore/model/model.h"
#include "cachestore/part.h"
#include "kernels/host_codec.h"
#include "tests/cachestore/message.h"
#include "tests/support/kv_data.h"

// What a read must give, by the rules alone: no pages, no slots, no appends.
namespace kvtier::cachestore::testing {

// How many of `tokens` received tokens are codes.
inline std::int64_t CodeTokensOf(const std::string& format_name, Side side, std::int64_t tokens,
                                 int page_tokens) {
  const Format format = ParseFormat(format_name).value();
  if (format.page_scale) return tokens - tokens % page_tokens;
  if (format.kind != Format::Kind::kKivi) return tokens;
  const std::int64_t residual = format.residual_tokens;
  if (side == Side::kV) return tokens < residual ? 0 : tokens - residual;
  return residual > 0 ? tokens - tokens % residual : tokens - tokens % format.group;
}

// A whole head encoded as one run; the rest as it came.
class NaiveTensor {
 public:
  // `received`: by head. `origin`: tokens that came from other sequences, where the residual rule
  // begins. `data` must outlive it.
  NaiveTensor(const LayerModel& layer, Side side, const kvtier::testing::KvTensor& data,
              const std::vector<std::int64_t>& received, std::int64_t origin = 0)
      : model_(side == Side::kK ? layer.k : layer.v), data_(data) {
    for (int head = 0; head < data.heads; ++head) {
      const std::int64_t own = received[static_cast<std::size_t>(head)] - origin;
      const auto codes = origin + CodeTokensOf(layer.format, side, own, model_.layout.page_tokens);
      code_tokens_.push_back(codes);
      codes_.push_back(Encode(head, codes));
    }
  }

  std::int64_t code_tokens(int head) const { return code_tokens_[static_cast<std::size_t>(head)]; }

  // One head's rows as `type`, [tokens, dim]; FP8 is value / out_scale.
  std::vector<std::byte> Read(int head, TokenSpan span, kernels::ElementType type,
                              float out_scale) const {
    const std::int64_t row_bytes = std::int64_t{data_.dim} * kernels::ElementBytes(type);
    std::vector<std::byte> out(static_cast<std::size_t>(span.count * row_bytes));
    const std::int64_t from_codes =
        std::max<std::int64_t>(0, std::min(span.count, code_tokens(head) - span.first));
    kernels::DecodeOnHost({.codec = model_.layout.codec,
                           .dim = data_.dim,
                           .scale = ScaleOf(head),
                           .in = codes_[static_cast<std::size_t>(head)].data(),
                           .first_token = span.first,
                           .tokens = from_codes,
                           .out_scale = out_scale,
                           .out = {out.data(), type, data_.dim}});
    for (std::int64_t i = from_codes; i < span.count; ++i)
      Convert(head, span.first + i, type, out_scale, out.data() + i * row_bytes);
    return out;
  }

 private:
  float ScaleOf(int head) const {
    return model_.scales.empty() ? 1.0f : model_.scales[static_cast<std::size_t>(head)];
  }

  std::vector<std::byte> Encode(int head, std::int64_t tokens) const {
    const PartLayout& layout = model_.layout;
    const auto units = static_cast<int>(tokens / layout.unit_tokens);
    std::vector<std::byte> codes(static_cast<std::size_t>(units * layout.unit.total()));
    kernels::EncodeOnHost({.codec = layout.codec,
                           .dim = data_.dim,
                           .scale = ScaleOf(head),
                           .source = {data_.Row(head, 0), data_.type, data_.dim},
                           .units = units,
                           .out = codes.data()});
    return codes;
  }

  // A source row as `type`: untouched, or rounded once.
  void Convert(int head, std::int64_t token, kernels::ElementType type, float out_scale,
               std::byte* out) const {
    if (type == data_.type) {
      std::memcpy(out, data_.Row(head, token), static_cast<std::size_t>(data_.row_bytes()));
      return;
    }
    kernels::VisitElement(type, [&](auto element) {
      using T = decltype(element);
      for (int c = 0; c < data_.dim; ++c) {
        const float value = data_.Get(head, token, c);
        const T stored = kernels::Saturate<T>(sizeof(T) == 1 ? value / out_scale : value);
        std::memcpy(out + c * static_cast<std::ptrdiff_t>(sizeof(T)), &stored, sizeof(T));
      }
    });
  }

  const TensorModel& model_;
  const kvtier::testing::KvTensor& data_;
  std::vector<std::int64_t> code_tokens_;
  std::vector<std::vector<std::byte>> codes_;  // by head
};

}  // namespace kvtier::cachestore::testing
