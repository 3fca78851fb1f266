// The simulation's followers: reads that take what a sequence receives, as it comes.

#include <fmt/format.h>

#include "tests/sim/state.h"
#include "tests/sim/store_sim.h"

namespace kvtier::sim {

using cachestore::Reason;

std::string StoreSim::Follow() {
  const HeldPtr held = Any();
  if (held == nullptr) return "";
  auto reading = std::make_unique<Reading>();
  reading->model = held->model;
  reading->held = held;
  reading->deadline = clock_.Now() + absl::Seconds(30);
  reading->range.first_token = random_.OneIn(2) ? 0 : random_.Between(0, 160);
  reading->range.first_token =
      std::max(reading->range.first_token, held->begin * held->model->page());
  if (random_.OneIn(2)) reading->range.tokens = random_.Between(0, 160);
  reading->given.assign(held->received.size(), reading->range.first_token);
  auto follower =
      store_->Follow({held->key, "", [] {}}, reading->range, {.as = kernels::ElementType::kFp32});
  if (!follower.ok()) return Unexpected("follow", follower.status());
  reading->follower.emplace(*std::move(follower));
  readings_.push_back(std::move(reading));
  return "";
}

std::string StoreSim::GoOnFollowing(Reading& reading, bool& over) {
  auto next = reading.follower->Next(random_.Between(1, 20'000));
  const Held& held = *reading.held;
  const auto ends = [&](Reason reason) {
    over = true;
    ++tally_.reads_ended;
    return Is(next.status(), reason) ? "" : Unexpected("follow what ended", next.status());
  };
  if (Ended(reading)) return ends(Reason::kLeaseEnded);
  const bool gone = Is(next.status(), Reason::kSequenceGone);
  if (held.gone || (gone && reading.uncertain)) return ends(Reason::kSequenceGone);
  reading.uncertain = false;
  const std::int64_t first = reading.range.first_token;
  std::int64_t end = std::numeric_limits<std::int64_t>::max();
  if (reading.range.tokens >= 0) end = first + reading.range.tokens;
  if (!held.open()) {
    if (reading.range.tokens < 0) end = std::max(first, held.sealed_tokens);
    if (end > held.sealed_tokens) return ends(Reason::kPastCommitted);
    if (end > held.committed()) return ends(Reason::kEvicted);
  }
  if (!next.ok()) return Unexpected("follow", next.status());
  if (next->has_value()) return CheckPiece(reading, **next, end);
  for (std::size_t layer = 0; layer < reading.given.size(); ++layer) {
    if (reading.given[layer] < std::min(end, held.received[layer]))
      return fmt::format("nothing to follow, though layer {} has {} tokens and gave {}", layer,
                         held.received[layer], reading.given[layer]);
  }
  over = reading.follower->done();
  const bool done = held.committed() >= end;
  return over == done ? "" : fmt::format("follows to {} of {}: {}", held.committed(), end, over);
}

std::string StoreSim::CheckPiece(Reading& reading, cachestore::SequenceReader& piece,
                                 std::int64_t end) {
  const Held& held = *reading.held;
  const cachestore::SequencePins& pins = piece.pins();
  reading.layer = static_cast<std::size_t>(pins.shard.first_layer);
  std::int64_t& given = reading.given[reading.layer];
  if (pins.first_token != given || pins.tokens < 1 ||
      given + pins.tokens > std::min(end, held.received[reading.layer]))
    return fmt::format("a piece of {} tokens from {}; {} were given", pins.tokens, pins.first_token,
                       given);
  given += pins.tokens;
  reading.kept_tokens = std::max(reading.kept_tokens, given);
  // As it reads at this moment.
  reading.content.assign(held.plan.begin(), held.plan.begin() + held.longest());
  reading.data = held.model->texts.DataOf(reading.content);
  reading.codes.clear();
  for (std::size_t layer = 0; layer < held.received.size(); ++layer)
    reading.codes.push_back({held.codes(layer, 0), held.codes(layer, 1)});
  const cachestore::LayerOutput& out = piece.layers()[0];
  std::vector<float> k(static_cast<std::size_t>(pins.tokens * out.k_dim)),
      v(static_cast<std::size_t>(pins.tokens * out.v_dim));
  const absl::Status status =
      piece.Fill(0, pins.first_token, pins.tokens, reinterpret_cast<std::byte*>(k.data()),
                 reinterpret_cast<std::byte*>(v.data()));
  if (!status.ok()) return Unexpected("fill a piece", status);
  tally_.rows_followed += 2 * pins.tokens;
  for (const int side : {0, 1}) {
    std::string wrong = CompareRows(reading, side, pins.first_token, side == 0 ? k : v);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace kvtier::sim
