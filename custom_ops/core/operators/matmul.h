// The operators that sum products of codes: LowBitConv, LowBitConvTranspose, LowBitGemm and their AP names.
// Each file beside this one decodes its own geometry; everything else is common.
#pragma once

#include <memory>

#include "core/conv.h"
#include "core/node_reader.h"
#include "core/operator.h"

namespace lowbit {

// Decodes and validates the operands, the constants and the epilogue of a node of the given geometry, and
// proves that no accumulator leaves int32. Throws Error.
ConvSpec ParseMatmul(const NodeReader& node, const ConvGeometry& geometry);

// The geometry of a convolution from its attributes.
ConvGeometry ParseConvGeometry(const AttributeReader& attributes, bool transposed);

// How the dims of x and y map to images.
struct MatmulLayout {
  int spatial = 2;       // 1 or 2 for convolutions: x is [N, D1.., C]
  bool is_gemm = false;  // x is flattened from `axis` on: rows are images of one pixel
  int64_t axis = -1;
};

// Chooses a kernel and lets it pack the weights. The operator keeps nothing of `spec` but its geometry, so
// that the unpacked weights die with the caller's copy.
std::unique_ptr<Operator> CreateMatmul(const NodeReader& node, const ConvSpec& spec,
                                       const MatmulLayout& layout, const OperatorOptions& options);

}  // namespace lowbit
