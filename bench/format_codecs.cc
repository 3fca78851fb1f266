#include "bench/format_codecs.h"

#include "cachestore/model/format.h"

namespace kvtier::bench {

using kernels::Codec;
using kernels::ElementType;

std::vector<NamedCodec> FormatCodecs(ElementType source, int page_tokens) {
  std::vector<std::string> names = cachestore::FormatNames();
  for (const char* with_options :
       {"fp8_e4m3(scale=page)", "kivi2(scales=fp8_e4m3)", "q4_0(k_rotation=hadamard)"})
    names.emplace_back(with_options);
  std::vector<NamedCodec> formats;
  for (const std::string& name : names) {
    const cachestore::Format format = cachestore::ParseFormat(name).value();
    const Codec k = cachestore::KFormat(format, source, page_tokens).codec;
    const Codec v = cachestore::VFormat(format, source, page_tokens).codec;
    if (k == v) {
      formats.push_back({name, k});
    } else {
      formats.push_back({name + " K", k});
      formats.push_back({name + " V", v});
    }
  }
  return formats;
}

}  // namespace kvtier::bench
