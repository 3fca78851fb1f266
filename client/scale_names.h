#pragma once

#include <optional>
#include <span>
#include <string>

// How checkpoints name the scales of K, V and Q.
namespace kvtier::client {

enum class ScaleSide { kK, kV, kQ, kKv };  // kKv: one for both

struct ScaleNaming {
  const char* writer;
  const char* name;  // what follows the attention module's name
  ScaleSide side;
};

// All that are known, one row each. vLLM renames most of them to one when it loads; here each is
// read as it was written.
std::span<const ScaleNaming> ScaleNamings();

// The attention modules of a layer: "self_attn" and the like.
std::span<const char* const> AttentionModules();

struct ScaleName {
  int layer = 0;
  ScaleSide side = ScaleSide::kK;
};

// What the tensor of this name scales; nothing if it is no scale of the language model's K, V or Q.
// Towers beside it (vision, audio, multi-token prediction) have layer numbers of their own.
std::optional<ScaleName> ParseScaleName(const std::string& name);

// Whether a name looks like a scale of K or V; for saying what was not understood.
bool LooksLikeScale(const std::string& name);

}  // namespace kvtier::client
