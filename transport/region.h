#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::transport {

// Memory that a transport carries K and V in.
class Region {
 public:
  Region(std::byte* data, std::int64_t size) : data_(data), size_(size) {}
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t size() const { return size_; }

  // The `bytes` from `offset` on; null where not all of them are inside.
  std::byte* At(std::uint64_t offset, std::uint64_t bytes) const {
    const auto size = static_cast<std::uint64_t>(size_);
    return offset <= size && bytes <= size - offset ? data_ + offset : nullptr;
  }

 protected:
  ~Region() = default;

 private:
  std::byte* const data_;
  const std::int64_t size_;
};

}  // namespace kvtier::transport
