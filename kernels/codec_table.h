#pragma once

#include "kernels/codec.h"

namespace kvtier::kernels {

// What is the same for every use of a codec; one row a CodecId. Sizes, checks, tests and documents
// read this table.
struct CodecRow {
  CodecId id;
  const char* name;
  int (*unit_tokens)(const Codec&);
  UnitSize (*unit_size)(const Codec&, int dim);
  int (*dim_multiple)(const Codec&);  // head dims must be a multiple of this
  // Largest |value read as fp32 - source value| where nothing saturates, as a share of the group's
  // stored scale; for kRaw and kFp8, of the source value. Subnormal values and scales aside. An
  // fp32 source of KIVI errs by 2^-11 of its group's minimum besides, which rounds to fp16.
  double (*error_budget)(const Codec&);
  // Larger magnitudes are refused: they would not fit what is stored of them.
  float largest_magnitude;
};

const CodecRow& RowOf(CodecId id);

// Tokens of one unit: 1, or the group length where groups run along tokens.
inline int UnitTokens(const Codec& codec) { return RowOf(codec.id).unit_tokens(codec); }
// Bytes of one unit of one head of `dim` channels.
inline UnitSize UnitSizeOf(const Codec& codec, int dim) {
  return RowOf(codec.id).unit_size(codec, dim);
}
inline int DimMultiple(const Codec& codec) { return RowOf(codec.id).dim_multiple(codec); }

}  // namespace kvtier::kernels
