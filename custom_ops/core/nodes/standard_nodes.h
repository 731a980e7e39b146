// Standard ONNX nodes that stand between lowbit nodes, as plain data. The execution provider runs them so
// that a region need not end there; they compute what ONNX says in float32 (or move elements of any type),
// without any claim to be fast.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "core/node_reader.h"
#include "core/nodes.h"
#include "core/schema.h"
#include "core/types.h"

namespace lowbit {

// Reshape, Flatten, Squeeze, Unsqueeze, Identity, Dropout, Cast to the same type: the same elements under
// other dims. `dims` as Reshape writes them: -1 once for the rest; 0 (with copy_zero) for the dim of x at
// that place. The other ops are turned into dims when the shape of x is known.
struct ReshapeOp {
  enum class Kind : uint8_t { kReshape, kFlatten, kSqueeze, kUnsqueeze, kSame };
  Kind kind = Kind::kSame;
  std::vector<int64_t>
      dims;  // kReshape: the new dims; kSqueeze, kUnsqueeze: the axes (kSqueeze: empty for all)
  bool copy_zero = true;
  int64_t axis = 1;  // kFlatten
};

struct TransposeOp {
  std::vector<int64_t> perm;  // empty: reversed
};
// The dim of x that every dim of y is. Throws Error where x has another rank.
std::vector<size_t> PermOf(const TransposeOp& op, size_t rank);

struct SliceOp {
  std::vector<int64_t> starts, ends, axes, steps;  // as long as one another; steps are not 0
};
// Along one dim of x: y takes `count` elements, from `begin` on, `step` apart.
struct SliceRange {
  int64_t begin = 0, step = 1, count = 0;
};
// One range per dim of x, every element inside x. Throws Error.
std::vector<SliceRange> RangesOf(const SliceOp& op, std::span<const int64_t> x);

// One of the parts that Split cuts x into: a node of several outputs is one of these for each.
struct SplitOp {
  int64_t axis = 0;
  std::vector<int64_t> sizes;  // of all parts; empty: equal ones, the last smaller where `uneven` allows it
  bool uneven = false;
  int64_t parts = 1, part = 0;
};
// As of a Slice that takes this part. Throws Error where the parts are not all of x.
std::vector<SliceRange> RangesOf(const SplitOp& op, std::span<const int64_t> x);

// Constant padding. `value` holds the bytes of one element.
struct PadOp {
  std::vector<int64_t> pads;  // begins, then ends, of every dim of `axes`, at least 0
  std::vector<int64_t> axes;  // empty: all
  std::vector<uint8_t> value;
};
struct PadWidth {
  int64_t begin = 0, end = 0;
};
// One per dim of x. Throws Error where x has another rank.
std::vector<PadWidth> WidthsOf(const PadOp& op, size_t rank);

// Resize of mode nearest: elements of any type.
struct NearestOp {
  ResizeNode along;           // one scale or size for each of the axes
  std::vector<int64_t> axes;  // empty: all
};
// Which entry of the scales or sizes is that of every dim of x. Throws Error where x has another rank.
std::vector<std::optional<size_t>> EntriesOf(const NearestOp& op, size_t rank);

// Concat of equal types. Fed: the tensors to join.
struct JoinOp {
  int64_t axis = 0;
};

// Integers or float16 to float32, or float32 to float16: the nearest one, of two the even one.
struct CastOp {
  ElementType to = ElementType::kFloat;
};

// x is float32 for everything below.
struct SoftmaxOp {
  int64_t axis = -1;
  bool flattened = false;  // before opset 13: over all dims from `axis` on, as if they were one
  bool log = false;
};

enum class UnaryKind : uint8_t { kRelu, kClip, kSigmoid, kTanh, kLeakyRelu, kHardSigmoid, kHardSwish };
struct UnaryOp {
  UnaryKind kind = UnaryKind::kRelu;
  float a = 0, b = 0;  // kClip: min, max; kLeakyRelu: alpha; kHardSigmoid: alpha, beta
};

enum class FloatBinaryKind : uint8_t { kAdd, kSub, kMul, kDiv };
struct FloatBinaryOp {  // numpy broadcasting; fed: a, b
  FloatBinaryKind kind = FloatBinaryKind::kAdd;
};

// y = alpha * A B + beta * C with constant B and C (MatMul: alpha 1, no C; A has any rank but 0).
struct FloatGemmOp {
  int64_t k = 0, n = 0;
  bool transpose_a = false;
  std::vector<float> weights;  // [n, k]: B transposed, times alpha
  std::vector<float> bias;     // [n] or empty: C times beta
  bool is_matmul = false;
};

// MatMul of two fed tensors of rank 2 or more, with numpy broadcasting of the dims before the last two. Fed:
// a, b.
struct FloatMatmulOp {};

// Where a window's pads come from.
enum class AutoPad : uint8_t { kExplicit, kSameUpper, kSameLower };

// NCHW or NCW, constant weights [out, in / group, kh, kw].
struct FloatConvOp {
  int64_t in_channels = 0, out_channels = 0, group = 1;
  Window window;  // without its pads unless auto_pad is kExplicit
  AutoPad auto_pad = AutoPad::kExplicit;
  std::vector<float> weights, bias;  // bias may be empty
};

// NCHW or NCW; the global pools take any number of spatial dims and have no window.
struct FloatPoolOp {
  enum class Kind : uint8_t { kMax, kAverage, kGlobalMax, kGlobalAverage };
  Kind kind = Kind::kMax;
  Window window;  // as in FloatConvOp; every pad is smaller than the kernel
  AutoPad auto_pad = AutoPad::kExplicit;
  bool ceil_mode = false, count_include_pad = false;
};

// The window with its pads for this x. Throws Error.
Window WindowOf(const FloatConvOp& op, std::span<const int64_t> x);
Window WindowOf(const FloatPoolOp& op, std::span<const int64_t> x);

// QuantizeLinear and DequantizeLinear, per tensor or along the last axis, are lowbit nodes.
using StandardNode = std::variant<ReshapeOp, TransposeOp, SliceOp, SplitOp, PadOp, NearestOp, JoinOp, CastOp,
                                  SoftmaxOp, UnaryOp, FloatBinaryOp, FloatGemmOp, FloatMatmulOp, FloatConvOp,
                                  FloatPoolOp, QuantizeNode, DequantizeNode>;

// An input of a node of ONNX's own domain, as far as it is known before a run.
struct StandardInput {
  bool present = false;
  std::optional<ElementType> type;           // nullopt: none that lowbit knows (int64, ...)
  std::optional<std::vector<int64_t>> dims;  // -1 where a dim is open; nullopt: not even the rank is known
  std::optional<ConstTensor> constant;       // the value of an initializer
  std::optional<std::vector<int64_t>> constant_ints;  // the elements of an int64 or int32 initializer
};

// The outputs that a node lists, and the one that is meant. Ops other than Split have one.
struct StandardOutputs {
  size_t count = 1, meant = 0;
};

// Decodes and validates a node. Throws Error with the reason, where lowbit does not run the op or not this
// form of it.
StandardNode DecodeStandard(std::string_view op, int since_version, const AttributeMap& attributes,
                            std::span<const StandardInput> inputs, StandardOutputs outputs = {});

// Which of a node's `inputs` inputs are fed; the others are part of it.
std::vector<size_t> FedInputs(const StandardNode& node, size_t inputs);

// The output for the fed tensors. Throws Error where types, ranks or dims are none of the node's, or a size
// overflows.
TensorShape OutputOf(const StandardNode& node, std::span<const TensorShape> fed);

// An axis counted from the end where it is negative. Throws Error where there is none such.
size_t AxisOf(int64_t axis, size_t rank);

}  // namespace lowbit
