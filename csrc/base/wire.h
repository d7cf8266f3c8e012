// Bytes that cross process borders: little-endian, every read checked. A malformed input throws MR_PROTOCOL and
// nothing is allocated before its size has been checked.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace mr {

static_assert(std::endian::native == std::endian::little, "the wire format is written for little-endian hosts");

using Bytes = std::vector<uint8_t>;
using ByteView = std::span<const uint8_t>;

class Writer {
 public:
  template <typename T>
    requires std::is_arithmetic_v<T>
  Writer& put(T value) {
    const auto* p = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), p, p + sizeof value);
    return *this;
  }
  Writer& raw(ByteView data) {
    bytes_.insert(bytes_.end(), data.begin(), data.end());
    return *this;
  }
  Writer& blob(ByteView data) {
    if (data.size() > UINT32_MAX)
      throw Error(MR_RESOURCE_EXHAUSTED, "a field of " + std::to_string(data.size()) + " bytes is over 4 GiB");
    return put(static_cast<uint32_t>(data.size())).raw(data);
  }
  Writer& text(std::string_view s) { return blob({reinterpret_cast<const uint8_t*>(s.data()), s.size()}); }
  Bytes take() { return std::move(bytes_); }
  const Bytes& bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(ByteView data) : data_(data) {}

  template <typename T>
    requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>)  // a bool of any other byte is no value at all
  T get() {
    T value;
    std::memcpy(&value, raw(sizeof value).data(), sizeof value);
    return value;
  }
  ByteView raw(size_t length) {
    if (length > data_.size())
      throw Error(MR_PROTOCOL, "truncated data: " + std::to_string(length) + " bytes wanted, " +
                                   std::to_string(data_.size()) + " left");
    ByteView out = data_.first(length);
    data_ = data_.subspan(length);
    return out;
  }
  ByteView blob(size_t limit) {
    const auto length = get<uint32_t>();
    if (length > limit)
      throw Error(MR_PROTOCOL,
                  "a field of " + std::to_string(length) + " bytes is over its limit of " + std::to_string(limit));
    return raw(length);
  }
  std::string text(size_t limit) {
    ByteView b = blob(limit);
    return {reinterpret_cast<const char*>(b.data()), b.size()};
  }
  ByteView rest() { return raw(data_.size()); }
  void end() const {
    if (!data_.empty()) throw Error(MR_PROTOCOL, std::to_string(data_.size()) + " bytes too many");
  }

 private:
  ByteView data_;
};

}  // namespace mr
