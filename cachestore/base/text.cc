#include "cachestore/base/text.h"

#include <fmt/format.h>

#include <algorithm>

#include "cachestore/base/errors.h"

namespace kvtier::cachestore {

absl::Status CheckText(const std::string& field, const std::string& text, std::size_t least,
                       std::size_t most) {
  if (text.size() < least || text.size() > most) {
    return Error(Reason::kInvalidField,
                 fmt::format("{} has {} bytes; want {} to {}", field, text.size(), least, most));
  }
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (std::none_of(text.begin(), text.end(), control)) return absl::OkStatus();
  return Error(Reason::kInvalidField,
               fmt::format("{} has a control character; want printable text", field));
}

}  // namespace kvtier::cachestore
