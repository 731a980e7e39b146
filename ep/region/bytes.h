// Writing and reading the binary form of a compiled region. Numbers are little-endian; the reader trusts no
// length.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/status.h"

namespace lowbit::ep {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

class ByteWriter {
 public:
  template <typename T>
  void Number(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    Raw(&value, sizeof value);
  }
  void Text(const std::string& text) {
    Number(static_cast<uint64_t>(text.size()));
    Raw(text.data(), text.size());
  }
  template <typename T>
  void List(const std::vector<T>& values) {
    Number(static_cast<uint64_t>(values.size()));
    Raw(values.data(), values.size() * sizeof(T));
  }
  // At the next multiple of kAlignment from the beginning.
  void Blob(std::span<const uint8_t> bytes) {
    Number(static_cast<uint64_t>(bytes.size()));
    bytes_.resize((bytes_.size() + kAlignment - 1) / kAlignment * kAlignment);
    Raw(bytes.data(), bytes.size());
  }

  std::vector<uint8_t>& bytes() { return bytes_; }

  static constexpr size_t kAlignment = 64;

 private:
  void Raw(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }

  std::vector<uint8_t> bytes_;
};

// Everything throws Error where the bytes end too early.
class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T Number() {
    static_assert(std::is_arithmetic_v<T>);
    T value;
    std::memcpy(&value, Take(sizeof value).data(), sizeof value);
    return value;
  }
  bool Flag() { return Number<uint8_t>() != 0; }
  // An enum whose last member is `last`.
  template <typename T>
  T Member(T last) {
    const auto value = Number<std::underlying_type_t<T>>();
    Require(value <= static_cast<std::underlying_type_t<T>>(last), "a damaged number, ", +value);
    return static_cast<T>(value);
  }
  std::string Text() {
    const std::span<const uint8_t> text = Take(Count(1));
    return {text.begin(), text.end()};
  }
  template <typename T>
  std::vector<T> List() {
    std::vector<T> values(Count(sizeof(T)));
    const std::span<const uint8_t> raw = Take(values.size() * sizeof(T));
    if (!raw.empty()) std::memcpy(values.data(), raw.data(), raw.size());
    return values;
  }
  std::span<const uint8_t> Blob() {
    const auto size = Number<uint64_t>();
    Take((ByteWriter::kAlignment - at_ % ByteWriter::kAlignment) % ByteWriter::kAlignment);
    return Take(size);
  }
  // How many things follow that take at least `least` bytes each.
  size_t Count(size_t least) {
    const auto count = Number<uint64_t>();
    Require(count <= (bytes_.size() - at_) / least, "a list of ", count, " where ", bytes_.size() - at_,
            " bytes are left");
    return static_cast<size_t>(count);
  }
  size_t Left() const { return bytes_.size() - at_; }

 private:
  std::span<const uint8_t> Take(uint64_t size) {
    Require(size <= Left(), "it ends too early");
    const std::span<const uint8_t> taken = bytes_.subspan(at_, static_cast<size_t>(size));
    at_ += static_cast<size_t>(size);
    return taken;
  }

  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

}  // namespace lowbit::ep
