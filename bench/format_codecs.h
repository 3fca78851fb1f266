#pragma once

#include <string>
#include <vector>

#include "kernels/codec.h"

namespace kvtier::bench {

struct NamedCodec {
  std::string name;
  kernels::Codec codec;
};

// Those of all formats; K and V apart where they are stored by different codecs.
std::vector<NamedCodec> FormatCodecs(kernels::ElementType source, int page_tokens);

}  // namespace kvtier::bench
