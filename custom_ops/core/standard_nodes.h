// Standard ONNX nodes that stand between lowbit nodes, as plain data. The execution provider runs them so that
// a region need not end there; they compute what ONNX says in float32 (or move elements of any type), without
// any claim to be fast.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/node_reader.h"
#include "core/types.h"

namespace lowbit {

// Reshape, Flatten, Squeeze, Unsqueeze, Identity, Dropout, Cast to the same type: the same elements under other
// dims. `dims` as Reshape writes them: -1 once for the rest; 0 (with copy_zero) for the dim of x at that place.
// The other ops are turned into dims when the shape of x is known.
struct ReshapeOp {
  enum class Kind : uint8_t { kReshape, kFlatten, kSqueeze, kUnsqueeze, kSame };
  Kind kind = Kind::kSame;
  std::vector<int64_t> dims;  // kReshape: the new dims; kSqueeze, kUnsqueeze: the axes
  bool copy_zero = true;
  int64_t axis = 1;  // kFlatten
};

struct TransposeOp {
  std::vector<int64_t> perm;  // empty: reversed
};

struct SliceOp {
  std::vector<int64_t> starts, ends, axes, steps;  // axes and steps are filled in
};

// Constant padding. `value` holds the bytes of one element.
struct PadOp {
  std::vector<int64_t> pads;  // begins, then ends, of every dim of `axes`
  std::vector<int64_t> axes;  // empty: all
  std::vector<uint8_t> value;
};

// Concat of equal types.
struct JoinOp {
  int64_t axis = 0;
};

// x is float32 for everything below.
struct SoftmaxOp {
  int64_t axis = -1;
  bool log = false;
};

enum class UnaryKind : uint8_t { kRelu, kClip, kSigmoid, kTanh, kLeakyRelu, kHardSigmoid, kHardSwish };
struct UnaryOp {
  UnaryKind kind = UnaryKind::kRelu;
  float a = 0, b = 0;  // kClip: min, max; kLeakyRelu: alpha; kHardSigmoid: alpha, beta
};

enum class FloatBinaryKind : uint8_t { kAdd, kSub, kMul, kDiv };
struct FloatBinaryOp {  // numpy broadcasting, both operands fed
  FloatBinaryKind kind = FloatBinaryKind::kAdd;
};

// y = alpha * A B + beta * C with constant B and C (MatMul: alpha 1, no C; A has any rank above 1).
struct FloatGemmOp {
  int64_t k = 0, n = 0;
  bool transpose_a = false;
  std::vector<float> weights;  // [n, k]: B transposed, times alpha
  std::vector<float> bias;     // [n] or empty: C times beta
  bool is_matmul = false;
};

// NCHW, constant weights [out, in / group, kh, kw].
struct FloatConvOp {
  int64_t in_channels = 0, out_channels = 0, group = 1;
  Window window;
  bool same_upper = false, same_lower = false;  // auto_pad
  std::vector<float> weights, bias;             // bias may be empty
};

// NCHW.
struct FloatPoolOp {
  enum class Kind : uint8_t { kMax, kAverage, kGlobalMax, kGlobalAverage };
  Kind kind = Kind::kMax;
  Window window;
  bool ceil_mode = false, count_include_pad = false;
};

using StandardNode = std::variant<ReshapeOp, TransposeOp, SliceOp, PadOp, JoinOp, SoftmaxOp, UnaryOp,
                                  FloatBinaryOp, FloatGemmOp, FloatConvOp, FloatPoolOp>;

}  // namespace lowbit
