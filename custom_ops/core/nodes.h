// Nodes as plain data: what a node computes, decoded and validated, without a word about who computes it. The
// operators (core/cpu/operators) run them on CPUs; the execution provider's back ends lower them to kernels
// of their own.
//
// Tensors that a model feeds at run time are "fed"; every other input is a constant and part of the node.
// Arrays per channel have as many entries as their spec says channels, or one per row of the weights; what
// the CPU kernels add to a spec (PrepareAffine, PrepareThresholds, FitLine) is not there yet.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "core/conv.h"
#include "core/elementwise.h"
#include "core/fed_matmul.h"
#include "core/node_reader.h"
#include "core/schema.h"
#include "core/types.h"

namespace lowbit {

// How the dims of x and y of a matrix product map to images.
// How a 3-D convolution over [N, D, H, W, C] becomes one over images. A window of one plane, or of one pixel
// in every plane, is a 2-D window: then every kernel applies.
enum class VolumeLayout : uint8_t {
  kWhole,    // N volumes of D planes
  kPlanes,   // N * D images of H x W
  kColumns,  // N images of height D and width H * W
};

struct MatmulLayout {
  int spatial = 2;       // 1, 2 or 3 for convolutions: x is [N, D1.., C]
  bool is_gemm = false;  // x is flattened from `axis` on: rows are images of one pixel
  int64_t axis = -1;
  VolumeLayout volume = VolumeLayout::kWhole;  // of 3 spatial dims
};

// LowBitConv, APConv, LowBitConvTranspose, LowBitGemm, APGemm. Fed: x, and the residual where there is one.
struct MatmulNode {
  const char* op = "";  // the schema's name, for messages
  ConvSpec conv;
  MatmulLayout layout;
};

// LowBitAffine, LowBitRequantize. Fed: x.
struct AffineNode {
  AffineSpec spec;
};

// LowBitLookup. Fed: x.
struct LookupNode {
  bool x_signed = false, y_signed = false;
  int64_t channels = 1;        // 1: one table for all
  std::vector<uint8_t> table;  // [channels, 256], indexed by the byte of the code
};

// What moves from a tensor to another, of codes: `count` channels (the last dim) of every pixel, from `first` on, become
// those from `at` on of the other tensor, which has `channels`.
struct ChannelMove {
  int64_t first = 0, count = 0;
  int64_t at = 0, channels = 0;
  std::vector<uint8_t> table;  // [256], what becomes of the byte of a code; empty: it stays
  // What rounds float32 numbers to those codes, all channels of them; nullopt: they are codes already.
  std::optional<Quantizer> rounding = std::nullopt;
};

// LowBitAdd, LowBitMul with numpy broadcasting. Fed: a, b.
struct BinaryNode {
  BinarySpec spec;
};

// LowBitMatMul with numpy broadcasting of the dims before the last two. Fed: a, b.
struct FedMatmulNode {
  FedMatmulSpec spec;
  std::vector<size_t> a_permutation, b_permutation;  // of the dims as fed; empty: none
};

// LowBitMaxPool. Fed: x.
struct MaxPoolNode {
  bool is_signed = false;
  Window window;
  bool ceil_mode = false;
};

// LowBitAveragePool. Fed: x.
struct AveragePoolNode {
  AverageSpec spec;
  Window window;
  bool ceil_mode = false, count_include_pad = false;
};

// LowBitGlobalAveragePool. Fed: x.
struct GlobalAveragePoolNode {
  GlobalAverageSpec spec;
  float x_scale = 1;
  int32_t x_zero_point = 0;
  bool keep_dims = true;
};

// LowBitConcat. Fed: the tensors to join.
struct ConcatNode {
  struct Part {
    bool copied = false;  // its grid is the output's, which has no bounds of its own
    AffineSpec spec;
  };
  std::vector<Part> parts;
  Quantizer quantizer;
  int64_t axis = 0;  // negative: counted from the end

  size_t Axis(size_t rank) const;  // throws where tensors of that rank have no such axis
};

// LowBitNormalization. Fed: x.
struct NormalizationNode {
  NormalizationSpec spec;
  float x_scale = 1, epsilon = 0;
  int64_t axis = -1, groups = 1;   // the dims from `axis` on are normalized, the last one in groups
  std::vector<float> gamma, beta;  // of one length: 1, the channels, or (one group) all normalized elements
};

// LowBitResize. Fed: x.
struct ResizeNode {
  enum class Mode : uint8_t { kNearest, kLinear, kCubic };
  enum class Coordinates : uint8_t {
    kHalfPixel,
    kPytorchHalfPixel,
    kAlignCorners,
    kAsymmetric,
    kHalfPixelSymmetric
  };
  enum class Nearest : uint8_t { kRoundPreferFloor, kRoundPreferCeil, kFloor, kCeil };
  // The input indices whose weighted sum every output index along one dim is: `count` for each.
  struct Taps {
    int count = 1;
    std::vector<int64_t> indices;
    std::vector<float> weights;
  };
  Mode mode = Mode::kNearest;
  bool is_signed = false;
  std::vector<float> scales;
  std::vector<int64_t> sizes;  // used when scales is empty
  Coordinates coordinates = Coordinates::kHalfPixel;
  Nearest nearest = Nearest::kRoundPreferFloor;

  size_t Spatial() const { return scales.empty() ? sizes.size() : scales.size(); }
  // Output indices along spatial dim `i` for `in` input indices, at least 1. Throws Error.
  int64_t OutputSize(size_t i, int64_t in) const;
  // The input index that every output index along spatial dim `i` copies, for `in` input and `out` output
  // indices, as OutputOf gives them.
  std::vector<int64_t> SourceIndices(size_t i, int64_t in, int64_t out) const;

  // The modes that compute: y = clip(rint(sum * multiplier) + zero point, lo, hi), the sum over weights
  // times f32(x - x_zero_point).
  float cubic_coeff_a = -0.75f;
  bool exclude_outside = false;
  int32_t x_zero_point = 0;
  float multiplier = 1;  // x_scale / y_scale
  Quantizer quantizer;   // its scale is in the multiplier
  Taps TapsOf(size_t i, int64_t in, int64_t out) const;
};

// LowBitImage. Fed: x, pixels.
struct ImageNode {
  enum class Filter : uint8_t { kNearest, kBilinear, kBicubic };
  enum class Order : uint8_t { kRgb, kBgr, kGray };
  struct Size {
    int64_t height = 0, width = 0;
  };
  // Where a picture of some size goes: it is resized, and its first pixel becomes the one at (top, left) of
  // the output, which lies outside of it where a crop cuts pixels off.
  struct Placement {
    Size picture, resized, output;
    int64_t top = 0, left = 0;

    // Columns are resized before rows, each to 8 bits, or the other way round.
    bool RowsFirst() const {
      const int64_t gone = picture.height - resized.height;
      return gone > 0 && gone > 2 * (picture.width - resized.width);
    }
  };
  // Along one side, the weighted sum of pixels that each of several output pixels is; a weight of 1 is
  // 2^kWeightBits.
  struct Taps {
    int64_t most = 0;  // taps of a pixel, at most; each has that many weights, the last ones 0
    std::vector<int32_t> first, count, weights;
  };
  std::optional<int64_t> shorter_side;  // at most one of these three is given
  std::optional<Size> exact, letterbox;
  std::optional<Size> crop;
  bool centered = true;  // the picture in a letterbox
  uint8_t fill = 0;      // the pixels around it
  Filter filter = Filter::kBilinear;
  Order order = Order::kRgb;
  bool y_signed = false;
  std::vector<uint8_t> table;  // [Channels(), 256]

  static constexpr int kWeightBits = 22;
  static constexpr int64_t kMaxSide = int64_t{1} << 24;  // exact in float32, and so are products in float64

  int64_t Channels() const { return order == Order::kGray ? 1 : 3; }
  // Throws Error, also for a picture that has not 1 to kMaxSide pixels along each side.
  Placement PlacementOf(const Size& picture) const;
  // Of `count` output pixels from `first` on, where `in` pixels become `out`.
  Taps TapsOf(int64_t in, int64_t out, int64_t first, int64_t count) const;
};

// LowBitDepthToSpace. Fed: x.
struct DepthToSpaceNode {
  int64_t block = 1;
  bool channels_first = false;  // CRD: channel c * block^2 + i * block + j; else DCR: (i * block + j) * C + c
  bool is_signed = false;
};

// LowBitSoftmax. Fed: x.
struct SoftmaxNode {
  bool x_signed = false;
  int64_t axis = -1;           // negative: counted from the end
  std::vector<int32_t> table;  // [256], indexed by the distance from the largest code of the row
  Quantizer quantizer;

  static constexpr int32_t kMaxEntry = 1 << 24;  // exact in float32
  size_t Axis(size_t rank) const;                // throws where a tensor of that rank has no such axis
};

// LowBitQuantize. Fed: x, float32.
struct QuantizeNode {
  std::vector<Quantizer> grids;  // one per channel, or one for all
  bool to_channels_last = false;
  bool fast_is_exact = false;
};

// LowBitThreshold. Fed: x, float32.
struct ThresholdNode {
  ThresholdSpec spec;
  bool to_channels_last = false;
};

// LowBitDequantize. Fed: x.
struct DequantizeNode {
  AffineSpec spec;  // without affine and quantizer: y = f32(x - x_zero_point[c]) * x_scale[c]
  bool to_channels_first = false;
};

using NodeSpec =
    std::variant<MatmulNode, AffineNode, LookupNode, BinaryNode, FedMatmulNode, MaxPoolNode, AveragePoolNode,
                 GlobalAveragePoolNode, ConcatNode, NormalizationNode, ResizeNode, ImageNode,
                 DepthToSpaceNode, SoftmaxNode, QuantizeNode, ThresholdNode, DequantizeNode>;

// Whether a matmul must bring its weights. A compiled model keeps them packed, elsewhere.
enum class Weights : uint8_t { kNeeded, kMayBeMissing };

// Decodes and validates a node; the parameters are those of CreateOperator. Throws Error.
//
// Where weights may be missing and are, MatmulNode::conv has neither weights nor their values, and nothing
// proves that its accumulators stay inside int32.
NodeSpec DecodeNode(const OpSchema& schema, const AttributeMap& attributes,
                    std::span<const std::optional<ConstTensor>> constants, const std::vector<bool>& present,
                    Weights weights = Weights::kNeeded);

// A tensor as far as a node's output depends on it.
struct TensorShape {
  ElementType type = ElementType::kUInt8;
  std::vector<int64_t> dims;
  bool operator==(const TensorShape&) const = default;
};

// The output of a node for the fed tensors `fed` (in the order of the schema, absent ones left out). Throws
// Error where types, ranks or dims are none of the node's, or a size overflows.
TensorShape OutputOf(const NodeSpec& node, std::span<const TensorShape> fed);

// The images of a matmul for the same tensors; throws as OutputOf does.
ConvShape ImagesOf(const MatmulNode& node, std::span<const TensorShape> fed);

// The shape of a (op) b in numpy's broadcasting. Throws Error.
std::vector<int64_t> BroadcastDims(std::span<const int64_t> a, std::span<const int64_t> b);

// A broadcast loop nest after dropping dims of size 1 and merging neighbours that behave alike. Only the
// innermost level reaches the kernels: there an operand either runs along (stride 1) or stands still (stride
// 0). For [N,H,W,C] (+) [N,1,1,C] the levels are N, H*W (b stands still) and C.
struct BroadcastLevel {
  int64_t size, a_stride, b_stride;
};
// Innermost first, at least one; `y` is BroadcastDims(a, b).
std::vector<BroadcastLevel> BroadcastLevels(std::span<const int64_t> a, std::span<const int64_t> b,
                                            std::span<const int64_t> y);

}  // namespace lowbit
