#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/codec.h"

namespace kvtier::kernels {

// How fast this thread encodes and decodes, on 16-bit data in heads of [128 tokens, head dim]. Data
// that is much larger than the cache gives what a server sees. Not thread-safe.
class CodecSpeed {
 public:
  // Takes three times `bytes` and touches them, so that no page fault is timed. source: 16 bits.
  CodecSpeed(std::size_t bytes, ElementType source);

  // GB of 16-bit data a second of this thread's CPU time: where others share the machine, their
  // turns do not count. Medians of `runs` over all data, in which the codecs take turns, so that
  // all meet the same neighbours on the machine. progress(done, all) is called after each turn.
  struct Speed {
    double encode = 0, decode = 0;
  };
  using Progress = std::function<void(int done, int all)>;
  std::vector<Speed> Measure(const std::vector<Codec>& codecs, int runs, const Progress& progress);
  // Memcpy's, which takes turns with the codecs.
  double copy() const;

  // 128, or the least that the codec takes.
  static int DimFor(const Codec& codec);

 private:
  double Copy();
  double Encode(const Codec& codec);
  double Decode(const Codec& codec);  // what Encode(codec) stored
  std::size_t HeadBytes(const Codec& codec) const;
  std::size_t StoredHeadBytes(const Codec& codec) const;

  const std::size_t bytes_;
  const std::unique_ptr<std::byte[]> values_, stored_, read_;
  const ElementType source_;
  std::vector<double> copies_;
};

}  // namespace kvtier::kernels
