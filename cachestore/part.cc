#include "cachestore/part.h"

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "cachestore/base/check.h"

namespace kvtier::cachestore {

Part::Part(Allocation memory, const TensorModel& model, Side side, bool k_before_rope)
    : model_(model),
      memory_(std::move(memory)),
      header_(MakePartHeader(model, side, k_before_rope)),
      entries_(static_cast<std::size_t>(model.heads())),
      saturated_(static_cast<std::size_t>(model.heads())) {
  memory_.Hold({.header = layout().header_use()});
}

Part::Part(Allocation memory, const Part& other, Device& device)
    : model_(other.model_),
      memory_(std::move(memory)),
      header_(other.header_),
      entries_(other.entries_),
      saturated_(other.saturated_),
      finished_heads_(other.finished_heads_),
      final_(other.final_),
      was_cut_(other.was_cut_) {
  const Transfer all{memory_.data(), other.memory_.data(), memory_.size()};
  device.Copy({&all, 1});
  memory_.Hold(other.memory_.held().use);
}

std::vector<Piece> Part::Empty(absl::Span<const std::int64_t> codes) const {
  std::vector<Piece> empty{{memory_.data(), layout().header_bytes}};
  for (int head = 0; head < layout().heads; ++head) {
    std::byte* const begin = UnitAt(head, codes[static_cast<std::size_t>(head)]);
    std::byte* const end =
        head + 1 < layout().heads ? SliceAt(head + 1) : memory_.data() + memory_.size();
    if (empty.back().memory + empty.back().bytes == begin) {
      empty.back().bytes += end - begin;
    } else if (end > begin) {
      empty.push_back({begin, end - begin});
    }
  }
  return empty;
}

void Part::Cut(std::int64_t token, absl::Span<const std::int64_t> codes, Device& device) {
  if (final_) {
    const std::vector<std::byte> start = FetchHeader(device);
    for (int head = 0; head < layout().heads; ++head)
      saturated_.push_back(EntryOf(start.data(), head).saturated);
    final_ = false;
  }
  was_cut_ = true;
  finished_heads_ = 0;
  header_.tokens = 0;
  header_.checksum = 0;
  entries_.assign(static_cast<std::size_t>(layout().heads), {});
  std::vector<Piece> gone{{memory_.data(), layout().header_bytes}};
  for (int head = 0; head < layout().heads; ++head) {
    const std::int64_t units =
        (codes[static_cast<std::size_t>(head)] - token) / layout().unit_tokens;
    if (units <= 0) continue;
    gone.push_back({UnitAt(head, token), units * layout().unit.total()});
    Hold(-units);
  }
  device.Zero(gone);
}

void Part::Hold(std::int64_t units) {
  memory_.Hold({.codes = units * layout().unit.codes, .scales = units * layout().unit.scales});
}

ChecksumJob Part::ChecksumOf(int head) {
  return {SliceAt(head), layout().slice_bytes, &entries_[static_cast<std::size_t>(head)].checksum};
}

void Part::FinishHead(int head, HeaderWrites& writes) {
  KVT_CHECK(!final_ && finished_heads_ < layout().heads);
  HeadEntry& entry = entries_[static_cast<std::size_t>(head)];
  entry.scale = ScaleOf(head);
  entry.saturated = static_cast<std::uint32_t>(saturated(head));
  if (++finished_heads_ < layout().heads) return;
  header_.tokens = header_.page_tokens;
  std::vector<std::byte> start(static_cast<std::size_t>(layout().header_use()));
  WriteHeader(start.data(), header_);
  for (int of = 0; of < layout().heads; ++of)
    WriteEntry(start.data(), of, entries_[static_cast<std::size_t>(of)]);
  header_.checksum = HeaderChecksum(start.data(), layout().header_use());
  WriteHeader(start.data(), header_);
  writes.Add(memory_.data(), std::move(start));
  entries_ = {};
  saturated_ = {};
  final_ = true;
}

std::vector<std::byte> Part::FetchHeader(Device& device) const {
  std::vector<std::byte> start(static_cast<std::size_t>(layout().header_use()));
  const Transfer fetch{start.data(), memory_.data(), layout().header_use()};
  device.Fetch({&fetch, 1});
  return start;
}

bool Part::HeaderIs(const std::vector<std::byte>& start) const {
  return std::memcmp(start.data(), &header_, kPartHeaderBytes) == 0 &&
         HeaderChecksum(start.data(), layout().header_use()) == header_.checksum;
}

std::vector<std::optional<int>> FindDamage(absl::Span<const Part* const> parts, HeadRange heads,
                                           Device& device) {
  std::vector<std::vector<std::byte>> headers;
  std::vector<Transfer> fetches;
  std::vector<std::uint64_t> checksums(parts.size() * static_cast<std::size_t>(heads.count()));
  std::vector<ChecksumJob> jobs;
  for (const Part* part : parts) {
    const PartLayout& layout = part->layout();
    headers.emplace_back(static_cast<std::size_t>(layout.header_use()));
    fetches.push_back({headers.back().data(), part->data(), layout.header_use()});
    for (int head = heads.first; head < heads.end; ++head)
      jobs.push_back({part->SliceAt(head), layout.slice_bytes, &checksums[jobs.size()]});
  }
  device.Fetch(fetches);
  device.Checksum(jobs);
  std::vector<std::optional<int>> damage;
  const std::uint64_t* checksum = checksums.data();
  for (std::size_t i = 0; i < parts.size(); ++i, checksum += heads.count()) {
    damage.emplace_back();
    for (int head = heads.end - 1; head >= heads.first; --head) {
      if (checksum[head - heads.first] != EntryOf(headers[i].data(), head).checksum)
        damage.back() = head;
    }
    if (!parts[i]->HeaderIs(headers[i])) damage.back() = heads.first;
  }
  return damage;
}

void HeaderWrites::Write(Device& device) {
  std::vector<Transfer> transfers;
  transfers.reserve(writes_.size());
  for (const auto& [to, start] : writes_)
    transfers.push_back({to, start.data(), static_cast<std::int64_t>(start.size())});
  device.Write(transfers);
}

}  // namespace kvtier::cachestore
