#pragma once

#include <cstdint>
#include <string>

#include "cachestore/model/memory_parts.h"
#include "cachestore/model/model.h"

// What a sequence takes, computed from its length: what the store will hold to the byte, since both
// come from the same layouts, residual rules and retention. Pure functions.
namespace kvtier::cachestore {

// What one sequence of `tokens` committed tokens holds.
MemoryHeld PlanSequence(const Model& model, std::int64_t tokens);

// What it holds once it is sealed: residual slots that are empty then are given back.
MemoryHeld PlanSealed(const Model& model, std::int64_t tokens);

// The most that it held on its way there, a token at a time: windows let go of whole pages, and
// not before others are taken.
std::int64_t PlanMostAllocated(const Model& model, std::int64_t tokens);

// What the tokens would take in the source dtype; of Model::windows those that are seen.
std::int64_t SourceBytes(const Model& model, std::int64_t tokens);

// Codes, scales and residual of the same tokens: what a format takes by its formula, before pages,
// headers and alignment.
std::int64_t UnpagedBytes(const Model& model, std::int64_t tokens);

// A length that no budget bounds: where every layer keeps what its window sees.
inline constexpr std::int64_t kAnyTokens = std::int64_t{1} << 40;

// The longest sequence that can be appended into `free` bytes; kAnyTokens at most.
std::int64_t TokensThatFit(const Model& model, std::int64_t free);

// How many sequences of `tokens` tokens fit into `free` bytes.
std::int64_t SequencesThatFit(const Model& model, std::int64_t tokens, std::int64_t free);

// Source bytes over all bytes that a sealed sequence of this length takes; 0 for no tokens.
double CompressionRatio(const Model& model, std::int64_t tokens);

// What vLLM logs of its cache, of an empty store: concurrency is the budget over one request of
// max_tokens, and tokens is that many requests' worth.
struct CapacityFigures {
  std::int64_t tokens = 0;
  double concurrency = 0;
  std::string
      line;  // "KV cache size: N tokens, Maximum concurrency for M tokens per request: C.CCx"
};
// `max_tokens` 0: the model's own.
CapacityFigures PlanCapacity(const Model& model, std::int64_t budget, std::int64_t max_tokens = 0);

// One page of every layer: the least that a budget must hold.
std::int64_t OnePageOfEveryLayer(const Model& model);

}  // namespace kvtier::cachestore
