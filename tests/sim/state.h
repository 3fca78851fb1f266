#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cachestore/base/errors.h"
#include "tests/sim/store_sim.h"

// What the simulation's model knows.
namespace kvtier::sim {

inline constexpr std::int64_t kBlock = 16;
inline constexpr const char* kSpaces[] = {"a", "b"};

inline bool Is(const absl::Status& status, cachestore::Reason reason) {
  return cachestore::ReasonOf(status) == cachestore::ReasonName(reason);
}

inline bool WindowGone(const absl::Status& status) {
  return Is(status, cachestore::Reason::kBehindWindow) || Is(status, cachestore::Reason::kEvicted);
}

inline std::string Unexpected(const char* what, const absl::Status& status) {
  return std::string(what) + ": " + status.ToString();
}

struct StoreSim::ModelState {
  ModelState(std::shared_ptr<cachestore::ModelEntry> registered, testing::Random& random)
      : entry(std::move(registered)), texts(model().request.spec, 4, 160, random) {}

  const Model& model() const { return entry->model(); }
  std::int64_t page() const { return model().page_tokens; }
  std::size_t layers() const { return model().layers.size(); }
  const TensorModel& tensor(std::size_t layer, int side) const {
    const cachestore::LayerModel& of = model().layers[layer];
    return side == 0 ? of.k : of.v;
  }

  bool windowed() const { return !model().windows.empty(); }
  // Of a sequence of `tokens`, the first page that its window needs.
  std::int64_t FirstSeen(std::int64_t tokens) const {
    return windowed() ? model().windows[0].FirstSeenPage(tokens, model().page_tokens) : 0;
  }

  std::shared_ptr<cachestore::ModelEntry> entry;
  Texts texts;
};

struct StoreSim::Held {
  std::int64_t committed() const { return *std::min_element(received.begin(), received.end()); }
  std::int64_t longest() const { return *std::max_element(received.begin(), received.end()); }
  bool together() const { return committed() == longest(); }
  // Of one layer's K or V.
  std::int64_t codes(std::size_t layer, int side) const {
    return std::max(model->tensor(layer, side).residual.CodeTokens(received[layer], origin),
                    frozen[layer][static_cast<std::size_t>(side)]);
  }
  // Pages that are codes everywhere.
  std::int64_t columns() const {
    std::int64_t tokens = committed();
    for (std::size_t layer = 0; layer < received.size(); ++layer) {
      for (const int side : {0, 1}) tokens = std::min(tokens, codes(layer, side));
    }
    return tokens / model->page();
  }
  // Whether it keeps what its window sees of `tokens`, whatever others keep of it.
  bool Sees(std::int64_t tokens) const { return tokens == 0 || model->FirstSeen(tokens) >= begin; }
  void MoveOn() {
    if (!model->windowed()) return;
    const auto kept =
        model->model().windows[0].FirstKeptPage(committed(), columns(), model->model().page_tokens);
    begin = std::max(begin, kept);
  }
  // All layers stand at `tokens`, and have had no more than their rule says as codes.
  void StandAt(std::int64_t tokens) {
    received.assign(model->layers(), tokens);
    frozen.assign(model->layers(), {0, 0});
  }

  cachestore::SequenceKey key;
  ModelState* model = nullptr;
  Content plan;                        // what it is to hold; as far as `received`, what it holds
  std::int64_t told = 0;               // tokens of it that it was said to hold, as a prompt
  std::vector<std::int64_t> received;  // by layer
  std::vector<std::array<std::int64_t, 2>> frozen;  // of K and V: codes that a truncate left
  std::int64_t origin = 0;
  std::int64_t begin = 0;  // the page from which on it keeps its window, or an earlier one
  std::int64_t sealed_tokens = -1;
  bool plain = true;  // shares nothing, was never cut
  std::uint64_t epoch = 0;
  bool gone = false;
  bool lost = false;  // with the device: not even leases read it
  absl::Time last_message;
  std::unique_ptr<cachestore::Writer> writer;

  bool open() const { return sealed_tokens < 0; }
};

struct StoreSim::LeaseOf {
  std::string name_space;
  std::uint64_t id = 0;
  ModelState* model = nullptr;
  HeldPtr held;     // null: of a prompt
  Content content;  // what it holds, and of a sequence what is planned behind
  std::int64_t tokens = 0;
  absl::Time deadline;
  bool ended = false;
  bool sees = true;          // what the window needs of it is leased, too
  bool may_be_lost = false;  // with a sequence in which the prompt may have been found
  bool uncertain = false;    // whether it is on `held` or on what that was before a truncate
};

struct StoreSim::PinOf {
  std::string name_space;
  std::uint64_t id = 0;
  bool hard = false;
  ModelState* model = nullptr;
  HeldPtr held;     // null: of a prompt
  Content content;  // as far as it is pinned
  absl::Time deadline;
};

struct StoreSim::Reading {
  std::optional<cachestore::SequenceReader> reader;
  // Instead: one that follows what it asked for, and how far each layer was given.
  std::optional<cachestore::SequenceFollower> follower;
  cachestore::ReadRange range;
  std::vector<std::int64_t> given;
  ModelState* model = nullptr;
  HeldPtr held;                    // null: of a prompt
  std::shared_ptr<LeaseOf> lease;  // null: by name
  absl::Time deadline;             // by name
  std::int64_t kept_tokens = 0;  // by name: that it has a hold on, followed the most that was given
  bool uncertain = false;        // as a lease's
  Content content;
  KvData data;  // of `content`
  // By name: which of K and V of each layer are codes. Else either may be.
  std::vector<std::array<std::int64_t, 2>> codes;
  std::size_t layer = 0;
  std::int64_t next = 0;
};

}  // namespace kvtier::sim
