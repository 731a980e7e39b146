// What the elementwise operators share: reading their quantizers, checking fed tensors, cutting work into
// tasks.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/elementwise.h"
#include "core/node_reader.h"
#include "core/operator.h"

namespace lowbit {

using FedTensors = std::span<const std::optional<ConstTensor>>;

// The type of 8-bit codes whose encoding is attribute `encoding`.
OperandType ReadCodes(const NodeReader& node, std::string_view encoding);

// y_bits, y_encoding, y_min and y_max: storage and clip bounds of the output codes.
Quantizer ReadOutputRange(const NodeReader& node);
// The same with the scalars y_scale and y_zero_point; without y_scale the output is float32.
Quantizer ReadQuantizer(const NodeReader& node);

// [lowest, highest] code of an 8-bit tensor, whatever its y_bits.
inline OperandType Storage(bool is_signed) {
  return {8, is_signed ? Encoding::kSigned : Encoding::kUnsigned};
}
inline ElementType OutputElementType(const Quantizer& q) {
  return q.quantized ? StorageOf(Storage(q.is_signed).encoding) : ElementType::kFloat;
}

// Length of a scalar-or-[C] constant: 1 or C; 1-element tensors of any rank count as scalars.
int64_t ConstantLength(const NodeReader& node, std::string_view input, ElementType type);

// Input `index` as fed, checked for presence, element type and sane dims.
const ConstTensor& Fed(FedTensors inputs, size_t index, ElementType type, std::string_view what);
inline const uint8_t* FedBytes(FedTensors inputs, size_t index) {
  return static_cast<const uint8_t*>(inputs[index]->data);
}

// ElementCount with the tighter bound 2^46, beyond any memory: byte counts and strides then never overflow.
int64_t BoundedCount(std::span<const int64_t> shape);

// Requires that x's last dim is `channels`, unless channels is 1.
void RequireChannels(const ConstTensor& x, int64_t channels);

// The shape of the codes that a float x becomes, its channels moved last where asked for; `channels` of them,
// or any number if that is 1.
std::vector<int64_t> ShapeOfCodes(const ConstTensor& x, bool to_channels_last, int64_t channels);

const ElementwiseKernels& SelectElementwise(const OperatorOptions& options, bool fast_is_exact);

// Calls fn(begin, end) on ranges that cover [0, total), in parallel. `cost` is the work of one index, in
// bytes moved. A range holds about 2 us of work: handing one to a spinning thread costs well below 1 us.
// Ranges begin at multiples of `alignment`.
void ParallelRanges(ThreadPool& pool, int64_t total, int64_t cost,
                    const std::function<void(int64_t, int64_t)>& fn, int64_t alignment = 1);

// "affine" + "avx2" -> "affine_avx2".
OperatorPlan ElementwisePlan(const char* op, const ElementwiseKernels& kernels);

}  // namespace lowbit
