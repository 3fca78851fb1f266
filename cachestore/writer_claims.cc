#include "cachestore/writer_claims.h"

#include <fmt/format.h>

#include <algorithm>

#include "cachestore/base/errors.h"

namespace kvtier::cachestore {
namespace {

bool Overlap(const Shard& a, const Shard& b) {
  return a.first_layer < b.end_layer() && b.first_layer < a.end_layer() &&
         a.first_head < b.end_head() && b.first_head < a.end_head();
}

// Calls f(layer, head, epoch) for each of the shard's.
template <class F>
void ForEach(const Shard& shard, std::vector<std::vector<std::uint64_t>>& epochs, F f) {
  for (int layer = shard.first_layer; layer < shard.end_layer(); ++layer) {
    auto& heads = epochs[static_cast<std::size_t>(layer)];
    for (int head = shard.first_head; head < shard.EndHeadIn(static_cast<int>(heads.size()));
         ++head)
      f(layer, head, heads[static_cast<std::size_t>(head)]);
  }
}

void End(const std::shared_ptr<WriterClaim>& claim, const absl::Status& why, Notices& notices) {
  claim->ended = why;
  if (claim->on_end) notices.Add([claim, why] { claim->on_end(why); });
}

}  // namespace

WriterClaims::WriterClaims(const Model& model) {
  for (const LayerModel& layer : model.layers)
    epochs_.emplace_back(static_cast<std::size_t>(layer.spec.kv_heads));
}

absl::Status WriterClaims::CheckEpoch(std::uint64_t epoch, const std::string& sequence) const {
  std::uint64_t highest = 0;
  for (const auto& heads : epochs_)
    highest = std::max(highest, *std::max_element(heads.begin(), heads.end()));
  if (epoch >= highest) return absl::OkStatus();
  return Error(Reason::kOldEpoch,
               fmt::format("writer_epoch is {}; sequence \"{}\" has had a writer of epoch {}",
                           epoch, sequence, highest));
}

void WriterClaims::TakeOver(std::uint64_t epoch, Notices& notices) {
  for (auto& heads : epochs_) std::fill(heads.begin(), heads.end(), epoch);
  EndAll(Error(Reason::kOldEpoch,
               fmt::format("the sequence was truncated by a writer of epoch {}", epoch)),
         notices);
}

absl::Status WriterClaims::Add(const std::shared_ptr<WriterClaim>& claim,
                               const std::string& sequence, Notices& notices) {
  const Shard& shard = claim->shard;
  absl::Status older;
  ForEach(shard, epochs_, [&](int layer, int head, std::uint64_t seen) {
    if (claim->epoch >= seen || !older.ok()) return;
    older = Error(Reason::kOldEpoch,
                  fmt::format("writer_epoch is {}; layer {} head {} of sequence \"{}\" has had a "
                              "writer of epoch {}",
                              claim->epoch, layer, head, sequence, seen));
  });
  if (!older.ok()) return older;
  for (const std::shared_ptr<WriterClaim>& other : live_) {
    if (!Overlap(other->shard, shard) || other->epoch != claim->epoch) continue;
    return Error(Reason::kWriterExists,
                 fmt::format("writer_epoch is {}; another stream of that epoch is sending layers "
                             "or heads of this shard "
                             "of sequence \"{}\"; a higher epoch would take over",
                             claim->epoch, sequence));
  }
  const auto stays = std::partition(
      live_.begin(), live_.end(), [&](const auto& other) { return !Overlap(other->shard, shard); });
  for (auto other = stays; other != live_.end(); ++other) {
    End(*other,
        Error(Reason::kOldEpoch, fmt::format("a writer of epoch {} took over from epoch {}",
                                             claim->epoch, (*other)->epoch)),
        notices);
  }
  live_.erase(stays, live_.end());
  live_.push_back(claim);
  ForEach(shard, epochs_, [&](int, int, std::uint64_t& seen) { seen = claim->epoch; });
  return absl::OkStatus();
}

void WriterClaims::EndAll(const absl::Status& why, Notices& notices) {
  for (const std::shared_ptr<WriterClaim>& claim : live_) End(claim, why, notices);
  live_.clear();
}

}  // namespace kvtier::cachestore
