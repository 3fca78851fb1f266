#include "cachestore/model/part_header.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>
#include <vector>

#include "cachestore/base/checksum.h"
#include "cachestore/base/errors.h"

namespace kvtier::cachestore {
namespace {

std::byte* EntryAt(std::byte* part, int head) {
  return part + kPartHeaderBytes + head * kHeadEntryBytes;
}

absl::Status Damaged(const std::string& name, const std::string& what, std::uint64_t got,
                     std::uint64_t want) {
  return Error(Reason::kChecksum, fmt::format("{}: {} has the checksum {:016x}, and says {:016x}",
                                              name, what, got, want));
}

}  // namespace

PartHeader MakePartHeader(const TensorModel& tensor, Side side, bool k_before_rope) {
  const PartLayout& layout = tensor.layout;
  PartHeader header;
  header.side = side;
  header.codec = layout.codec.id;
  header.element = layout.codec.element;
  header.source = tensor.source;
  header.bits = layout.codec.bits;
  header.rotation = layout.codec.rotation;
  header.k_before_rope = k_before_rope ? 1 : 0;
  header.group = layout.codec.group;
  header.heads = static_cast<std::uint16_t>(layout.heads);
  header.dim = static_cast<std::uint32_t>(layout.dim);
  header.page_tokens = static_cast<std::uint32_t>(layout.page_tokens);
  header.slice_bytes = static_cast<std::uint32_t>(layout.slice_bytes);
  return header;
}

TensorModel HeadsOf(const TensorModel& tensor, HeadRange heads) {
  TensorModel out = tensor;
  const PartLayout& layout = tensor.layout;
  out.layout = MakePartLayout(layout.codec, heads.count(), layout.dim, layout.page_tokens);
  if (!tensor.scales.empty())
    out.scales = {tensor.scales.begin() + heads.first, tensor.scales.begin() + heads.end};
  return out;
}

std::int64_t PartBytes(const PartLayout& layout, int heads) {
  return AlignUp(layout.header_bytes + heads * layout.slice_bytes);
}

std::uint64_t HeaderChecksum(const std::byte* part, std::int64_t header_use) {
  std::vector<std::byte> bytes(part, part + header_use);
  std::memset(bytes.data() + offsetof(PartHeader, checksum), 0, sizeof(PartHeader::checksum));
  return ChecksumOf(bytes.data(), header_use);
}

PartHeader HeaderOf(const std::byte* part) {
  PartHeader header;
  std::memcpy(&header, part, sizeof header);
  return header;
}

HeadEntry EntryOf(const std::byte* part, int head) {
  HeadEntry entry;
  std::memcpy(&entry, part + kPartHeaderBytes + head * kHeadEntryBytes, sizeof entry);
  return entry;
}

void WriteHeader(std::byte* part, const PartHeader& header) {
  std::memcpy(part, &header, sizeof header);
}

void WriteEntry(std::byte* part, int head, const HeadEntry& entry) {
  std::memcpy(EntryAt(part, head), &entry, sizeof entry);
}

std::string HeaderDifference(const PartHeader& got, const PartHeader& want) {
  struct Field {
    const char* name;
    std::uint64_t got, want;
  };
  const auto number = [](auto value) { return static_cast<std::uint64_t>(value); };
  const Field fields[] = {
      {"magic", got.magic, want.magic},
      {"version", got.version, want.version},
      {"side", number(got.side), number(want.side)},
      {"codec", number(got.codec), number(want.codec)},
      {"element", number(got.element), number(want.element)},
      {"source", number(got.source), number(want.source)},
      {"bits", got.bits, want.bits},
      {"k_before_rope", got.k_before_rope, want.k_before_rope},
      {"group", got.group, want.group},
      {"heads", got.heads, want.heads},
      {"dim", got.dim, want.dim},
      {"page_tokens", got.page_tokens, want.page_tokens},
      {"slice_bytes", got.slice_bytes, want.slice_bytes},
      {"rotation", number(got.rotation), number(want.rotation)},
  };
  for (const Field& field : fields) {
    if (field.got != field.want)
      return fmt::format("{} is {}; want {}", field.name, field.got, field.want);
  }
  // Whatever else there is: reserved today, and fields that this list forgot.
  PartHeader rest = got;
  rest.tokens = want.tokens;
  rest.saturated = want.saturated;
  rest.checksum = want.checksum;
  if (std::memcmp(&rest, &want, sizeof rest) == 0) return {};
  return "a reserved field is not 0; want 0";
}

absl::Status CheckPart(absl::Span<const std::byte> part, const PartLayout& layout,
                       const PartHeader& want, HeadRange heads, const std::string& name) {
  if (part.size() != static_cast<std::size_t>(PartBytes(layout, heads.count()))) {
    return Error(Reason::kInvalidField, fmt::format("{} has {} bytes; want {}", name, part.size(),
                                                    PartBytes(layout, heads.count())));
  }
  const PartHeader header = HeaderOf(part.data());
  if (const std::string difference = HeaderDifference(header, want); !difference.empty())
    return Error(Reason::kInvalidField, fmt::format("{}: {}", name, difference));
  if (header.tokens > header.page_tokens) {
    return Error(Reason::kInvalidField, fmt::format("{}: tokens is {}; want at most {}", name,
                                                    header.tokens, header.page_tokens));
  }
  const std::uint64_t checksum = HeaderChecksum(part.data(), layout.header_use());
  if (checksum != header.checksum) return Damaged(name, "the header", checksum, header.checksum);
  for (int i = 0; i < heads.count(); ++i) {
    const HeadEntry entry = EntryOf(part.data(), heads.first + i);
    const std::uint64_t slice = ChecksumOf(part.data() + layout.SliceOffset(i), layout.slice_bytes);
    if (slice != entry.checksum)
      return Damaged(name, fmt::format("the slice of head {}", heads.first + i), slice,
                     entry.checksum);
  }
  return absl::OkStatus();
}

}  // namespace kvtier::cachestore
