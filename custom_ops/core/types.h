// Operand types: the bit width and the encoding of quantization codes. Tensors as nodes see them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lowbit {

// How a code q of `bits` bits stands for an integer value v (the real number is scale * v):
//   unsigned  q in [0, 2^bits)               v = q - zero_point      stored as uint8
//   signed    q in [-2^(bits-1), 2^(bits-1)) v = q - zero_point      stored as int8
//   bipolar   q in {0, 1}, 1 bit only        v = 2q - 1              stored as uint8, no zero point
enum class Encoding : uint8_t { kUnsigned, kSigned, kBipolar };

struct OperandType {
  int bits = 8;
  Encoding encoding = Encoding::kUnsigned;

  constexpr int32_t MinCode() const { return encoding == Encoding::kSigned ? -(1 << (bits - 1)) : 0; }
  constexpr int32_t MaxCode() const {
    return encoding == Encoding::kSigned ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
  }
  constexpr bool operator==(const OperandType&) const = default;
};

// Element types that a lowbit node reads or writes.
enum class ElementType : uint8_t { kUInt8, kInt8, kInt32, kFloat, kFloat16 };

constexpr size_t ElementSize(ElementType type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 2};
  return kSizes[static_cast<size_t>(type)];
}

constexpr const char* TypeName(ElementType type) {
  constexpr const char* kNames[] = {"uint8", "int8", "int32", "float32", "float16"};
  return kNames[static_cast<size_t>(type)];
}

constexpr ElementType StorageOf(Encoding encoding) {
  return encoding == Encoding::kSigned ? ElementType::kInt8 : ElementType::kUInt8;
}

struct ConstTensor {
  ElementType type = ElementType::kUInt8;
  std::vector<int64_t> shape;
  const void* data = nullptr;
};

}  // namespace lowbit
