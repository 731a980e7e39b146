// What decoding and the shapes of several kinds of nodes share.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/elementwise.h"
#include "core/node_reader.h"
#include "core/types.h"

namespace lowbit {

// A fed tensor as far as a node's output depends on it. The dims lie elsewhere: shapes are computed at every
// run.
struct FedShape {
  ElementType type = ElementType::kUInt8;
  std::span<const int64_t> dims;
};

// The type of 8-bit codes whose encoding is attribute `encoding`.
OperandType ReadCodes(const NodeReader& node, std::string_view encoding);

// y_bits, y_encoding, y_min and y_max: storage and clip bounds of the output codes.
Quantizer ReadOutputRange(const NodeReader& node);
// The same with the scalars y_scale and y_zero_point; without y_scale the output is float32.
Quantizer ReadQuantizer(const NodeReader& node);

// Length of a scalar-or-[C] constant: 1 or C; 1-element tensors of any rank count as scalars.
int64_t ConstantLength(const NodeReader& node, std::string_view input, ElementType type);

// [lowest, highest] code of an 8-bit tensor, whatever its y_bits.
inline OperandType Storage(bool is_signed) {
  return {8, is_signed ? Encoding::kSigned : Encoding::kUnsigned};
}
inline ElementType CodeType(bool is_signed) { return is_signed ? ElementType::kInt8 : ElementType::kUInt8; }
inline ElementType OutputTypeOf(const Quantizer& q) {
  return q.quantized ? CodeType(q.is_signed) : ElementType::kFloat;
}

// ElementCount with the tighter bound 2^46, beyond any memory: byte counts and strides then never overflow.
int64_t BoundedCount(std::span<const int64_t> shape);

// Requires the element type and sane dims of fed tensor `what`.
void CheckFed(const FedShape& tensor, ElementType type, std::string_view what);

// Requires that x's last dim is `channels`, unless channels is 1.
void RequireChannels(std::span<const int64_t> x, int64_t channels);

// The shape of the codes that a float x becomes, its channels moved last where asked for; `channels` of them,
// or any number if that is 1.
std::vector<int64_t> ShapeOfCodes(std::span<const int64_t> x, bool to_channels_last, int64_t channels);

inline std::vector<int64_t> ToVector(std::span<const int64_t> dims) { return {dims.begin(), dims.end()}; }

}  // namespace lowbit
