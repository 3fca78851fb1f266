#pragma once

#include <span>

#include "kernels/codec.h"

namespace kvtier::kernels {

// What is the same for every use of a codec; one row a CodecId. Sizes, checks, tests, documents and
// `kvtier formats` read this table.
struct CodecRow {
  CodecId id;
  const char* name;
  // For people: which values share a scale, and of what type it is; whose bytes these are, and
  // whether exactly; which backends of engines read them as they are stored.
  const char* group;
  const char* scale;
  const char* equal_to;
  const char* read_by;
  bool takes_scale;  // one that is known beforehand, per tensor or head; 1.0 if none is given

  int (*unit_tokens)(const Codec&);
  UnitSize (*unit_size)(const Codec&, int dim);
  int (*dim_multiple)(const Codec&);  // head dims must be a multiple of this
  // Largest |value read as fp32 - source value| where nothing saturates, as a share of the group's
  // stored scale; for kRaw, kFp8, kMlaFp8 and kFp8Page, of the source value. Subnormal values and
  // scales aside. An fp32 source of KIVI errs by 2^-11 of its group's minimum besides, which
  // rounds to fp16.
  double (*error_budget)(const Codec&);
  // Larger magnitudes are refused: they would not fit what is stored of them.
  float (*largest_magnitude)(const Codec&);
};

std::span<const CodecRow> CodecRows();
const CodecRow& RowOf(CodecId id);

// Tokens of one unit: 1, or the group length where groups run along tokens.
inline int UnitTokens(const Codec& codec) { return RowOf(codec.id).unit_tokens(codec); }
// Bytes of one unit of one head of `dim` channels.
inline UnitSize UnitSizeOf(const Codec& codec, int dim) {
  return RowOf(codec.id).unit_size(codec, dim);
}
// Head dims must be a multiple of this: the codec's own, and 2 where rows are rotated.
int DimMultiple(const Codec& codec);
// Whether values of this type are what the codec stores, byte for byte; of kFp8, where the scale is
// the same.
bool StoresAsIs(const Codec& codec, ElementType type);
// Larger magnitudes are refused at append: the codec's own limit, and what a rotation may make of
// `dim` values.
float MagnitudeLimit(const Codec& codec, int dim);

}  // namespace kvtier::kernels
