#pragma once

#include <memory>

#include "cachestore/arena.h"
#include "cachestore/device/device.h"
#include "cachestore/eviction/evictor.h"
#include "cachestore/model_registry.h"
#include "cachestore/name_space.h"

namespace kvtier::cachestore {

// What a store's sequences live in and from.
struct SequenceHome {
  Arena& arena;
  Device& device;
  Evictor& evictor;
};

// Whose K and V it is.
struct Owner {
  std::shared_ptr<ModelEntry> model;
  std::shared_ptr<Namespace> name_space;

  EvictionNode::Place node_place() const {
    return {name_space->candidates, static_cast<int>(model->rungs().size())};
  }
  MemoryOwner memory() const { return {&model->memory(), name_space->memory}; }
};

}  // namespace kvtier::cachestore
