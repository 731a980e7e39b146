// Nodes on NVIDIA GPUs behind one face: constants packed once per device (PackedNode), all that depends on
// the shapes worked out once per shape (NodePlan), a launch that only enqueues kernels. No ONNX Runtime; the
// execution provider (ep/cuda) is a thin caller. Every kernel equals core/cpu/operators in every element.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/channels_last.h"
#include "core/float_precision.h"
#include "core/nodes.h"
#include "core/nodes/standard_nodes.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/device/queue.h"

namespace lowbit::cuda {

class NodePlan {
 public:
  virtual ~NodePlan() = default;
  // Scratch memory of one launch, which belongs to it until it is done; a multiple of 256.
  virtual size_t WorkspaceBytes() const { return 0; }
  // Enqueues the node; re-entrant, legal during capture, the same sequence of launches at every call. Fed
  // tensors and `y` are device pointers aligned to their elements at least (those inside a region to 256, or
  // to 16 where they are a piece of another), dense, `workspace` is aligned to 256. Throws Error.
  virtual void Launch(std::span<const void* const> fed, void* y, void* workspace, Queue& queue) const = 0;
  // The kernel and its tile, for the printed plan.
  virtual std::string Text() const = 0;
};

// A convolution at a shape, and what makes its residuals where that is a part of the same node: what two
// nodes in a row are to a chain (fused/chain.h).
struct ChainLink {
  std::shared_ptr<const PackedConv> conv;
  ConvShape shape;
  std::shared_ptr<const PackedConv> residuals;
  ConvShape residuals_shape = {};
  TensorPlanes planes = {};
};

struct AffineConv;

class PackedNode {
 public:
  virtual ~PackedNode() = default;
  // `fed` as OutputOf(node, fed) accepted it, `y` what it returned. Throws Error where a size is too large.
  virtual std::shared_ptr<const NodePlan> Plan(std::span<const TensorShape> fed,
                                               const TensorShape& y) const = 0;
  // A fed tensor that `y` may overwrite where they are of one size: every element is read before the same one
  // of `y` is written, by the thread or the block that writes it, and by no other.
  virtual std::optional<size_t> Overwrites() const { return std::nullopt; }
  // Nothing where the node is no convolution.
  virtual std::optional<ChainLink> Link(std::span<const TensorShape> fed) const {
    static_cast<void>(fed);
    return std::nullopt;
  }
  // The node where it is a LowBitConcat, and where it is a function and a convolution that read what that makes: what
  // one kernel may be of both (fused/affine_conv.h). Nothing where it is another one.
  virtual const ConcatNode* Concat() const { return nullptr; }
  virtual std::shared_ptr<const AffineConv> Affine(std::span<const TensorShape> fed) const {
    static_cast<void>(fed);
    return nullptr;
  }
  // Whether the node can store channels of what it makes in other tensors besides, or there alone.
  virtual bool MayStore(std::span<const TensorShape> fed, std::span<const ChannelMove> moves) const {
    static_cast<void>(fed), static_cast<void>(moves);
    return false;
  }
  // The node that does, where MayStore says so: it is fed the tensors behind its own. Where it does not keep its output,
  // that is not written. Throws Error.
  virtual std::unique_ptr<PackedNode> Storing(std::span<const ChannelMove> moves, bool keeps_output) const {
    static_cast<void>(moves), static_cast<void>(keeps_output);
    return nullptr;
  }
  // In how many planes (core/bit_planes.h) the node may read the first tensor that it is fed; 0: in none.
  virtual int PlanesRead() const { return 0; }
  // Whether it may read the second tensor that it is fed, which it adds or multiplies, in so many.
  virtual bool AddsPlanes(int planes) const {
    static_cast<void>(planes);
    return false;
  }
  // Whether it makes planes of planes, as many as there are.
  virtual bool KeepsPlanes() const { return false; }
  // The estimated time; nullopt where it is not known, or no kernel reads and makes such planes.
  virtual std::optional<double> Microseconds(std::span<const TensorShape> fed,
                                             const TensorPlanes& planes) const {
    static_cast<void>(fed), static_cast<void>(planes);
    return std::nullopt;
  }
  // The node that does, where there is an estimate.
  virtual std::unique_ptr<PackedNode> InPlanes(const TensorPlanes& planes) const {
    static_cast<void>(planes);
    return nullptr;
  }
  // Whether a tensor that the node is fed, and what it makes, may lie with the channels last (core/channels_last.h).
  virtual bool MayReadChannelsLast(std::span<const TensorShape> fed, size_t i) const {
    static_cast<void>(fed), static_cast<void>(i);
    return false;
  }
  virtual bool MayMakeChannelsLast(std::span<const TensorShape> fed) const {
    static_cast<void>(fed);
    return false;
  }
  // Whether the node's float tensors have the channels last as ONNX has them, so that their numbers alone may lie otherwise.
  virtual bool KeepsOrder() const { return false; }
  // Whether it turns that tensor by a kernel of its own where it lies as ONNX has it, with the same results.
  virtual bool TurnsChannelsLast(std::span<const TensorShape> fed, size_t i) const {
    static_cast<void>(fed), static_cast<void>(i);
    return false;
  }
  // The node whose tensors do.
  virtual std::unique_ptr<PackedNode> InChannelsLast(const ChannelsLast& last) const {
    static_cast<void>(last);
    return nullptr;
  }
  // The packed constants as bytes, from which the node can be made again without its weights; empty: it packs
  // nothing worth keeping.
  virtual std::vector<uint8_t> Packed() const { return {}; }
};

// Every node but the matrix products (PackMatmul); nullptr never. Throws Error.
std::unique_ptr<PackedNode> PackNode(const NodeSpec& node, const Device& device);
std::unique_ptr<PackedNode> PackStandard(const StandardNode& node, const Device& device,
                                         FloatPrecision precision);
// A float product and the Relu or Clip that alone reads it, as one kernel. Throws Error for other nodes.
std::unique_ptr<PackedNode> PackActivated(const StandardNode& product, const StandardNode& activation,
                                          const Device& device, FloatPrecision precision);
// A float product with constant weights, the Add that alone reads it, and the Relu or Clip that alone reads that, or
// null, as one kernel. Fed: what the product is, then the other operand of the Add. Where that has other dims than the
// product makes they are several kernels. Throws Error for other nodes.
std::unique_ptr<PackedNode> PackAdded(const StandardNode& product, const StandardNode* activation,
                                      const Device& device, FloatPrecision precision);
// A float convolution of few channels, the Relu or Clip behind, or null, and the LowBitQuantize that alone reads that; one
// kernel at most shapes. Throws Error for other nodes.
bool FusesQuantize(const StandardNode& conv, const QuantizeNode& quantize, FloatPrecision precision);
std::unique_ptr<PackedNode> PackQuantized(const StandardNode& conv, const StandardNode* activation,
                                          const QuantizeNode& quantize, const Device& device,
                                          FloatPrecision precision);
// An operation on two float32 tensors and the LowBitQuantize that alone reads it, as one kernel. Throws Error for
// quantizers that do not fit.
bool FusesQuantize(const QuantizeNode& quantize);
std::unique_ptr<PackedNode> PackQuantized(const FloatBinaryOp& op, const QuantizeNode& quantize);
// A Transpose that moves the channels of [N, .., C] to the front, and the global pool that alone reads it, as one
// kernel. Throws Error for other nodes.
bool FusesPool(const TransposeOp& transpose, const FloatPoolOp& pool);
std::unique_ptr<PackedNode> PackPooled(const TransposeOp& transpose, const FloatPoolOp& pool);
// One fed float image, turned so that its channels lie last, in the numbers that products of this precision read.
std::unique_ptr<PackedNode> PackTurn(FloatPrecision precision);
// One fed tensor, copied to an output of as many bytes.
std::unique_ptr<PackedNode> PackCopy(const Device& device);

// Batch and image of the input: what a choice depends on beside the node.
std::string ShapeText(const ConvShape& shape);
// What a configuration is chosen among for a shape that is met first.
struct ConvChoice {
  std::string shape;
  std::vector<ConvConfig> configs;  // the cost model's choice first
  std::function<std::shared_ptr<const NodePlan>(const ConvConfig&)> plan;
  std::vector<TensorShape> fed;
  TensorShape y;
};
// Called while a plan is made. Empty: the cost model's choice.
using ConvChooser = std::function<ConvConfig(const ConvChoice& choice)>;
// `packed`: what Packed() of the same node gave, or empty; the weights may be missing then. Throws Error.
std::unique_ptr<PackedNode> PackMatmul(const MatmulNode& node, const Device& device, ConvChooser choose,
                                       std::span<const uint8_t> packed = {});
// A matrix product and the LowBitDequantize that alone reads it, as one kernel to float32.
bool FusesDequantize(const MatmulNode& matmul, const DequantizeNode& dequantize);
std::unique_ptr<PackedNode> PackDequantizedMatmul(const MatmulNode& matmul, const DequantizeNode& dequantize,
                                                  const Device& device, ConvChooser choose,
                                                  std::span<const uint8_t> packed = {});
// A matrix product of codes without residuals, and the LowBitLookup with one table that alone reads it, as one kernel.
bool FusesLookup(const MatmulNode& matmul, const LookupNode& lookup);
std::unique_ptr<PackedNode> PackMappedMatmul(const MatmulNode& matmul, const LookupNode& lookup,
                                             const Device& device, ConvChooser choose,
                                             std::span<const uint8_t> packed = {});
// The LowBitLookup with one table and the LowBitAdd that alone reads it, as one kernel. Fed: what the table
// reads, the other tensor. `mapped_first`: what the table has is the first operand.
bool FusesMapped(const LookupNode& lookup, const BinaryNode& add, bool mapped_first);
std::unique_ptr<PackedNode> PackMapped(const LookupNode& lookup, const BinaryNode& add, bool mapped_first,
                                       const Device& device);
// A LowBitAffine from codes to codes and the 1x1 convolution that alone reads it. At each shape they are one kernel or
// two, as `both` chooses; the other chooser is of the convolution alone.
struct AffineConvChoosers {
  ConvChooser both, conv;
};
bool FusesAffine(const AffineNode& affine, const MatmulNode& conv, const Device& device);
std::unique_ptr<PackedNode> PackAffineConv(const AffineNode& affine, const MatmulNode& conv,
                                           const Device& device, const AffineConvChoosers& choosers,
                                           std::span<const uint8_t> packed = {});
// Two convolutions, the first of which makes the residuals of the second, which alone reads them. Fed: what
// the first reads, what the second does. At each shape they are one kernel or two, as `both` chooses; the
// other choosers are for the latter.
struct ResidualPairChoosers {
  ConvChooser both, first, second;
};
bool FusesResidual(const MatmulNode& first, const MatmulNode& second, const Device& device);
std::unique_ptr<PackedNode> PackResidualPair(const MatmulNode& first, const MatmulNode& second,
                                             const Device& device, const ResidualPairChoosers& choosers,
                                             std::span<const uint8_t> packed = {});
// A convolution and the LowBitAdd that alone reads it, as one convolution with a residual, which rounds twice. Fed:
// what the convolution reads, the other tensor. Where that has other dims than the convolution makes, they are two
// kernels. `conv_first`: what is made is the first operand.
std::optional<MatmulNode> WithResidual(const MatmulNode& conv, const BinaryNode& add, bool conv_first);
std::unique_ptr<PackedNode> PackConvAdd(const MatmulNode& with_residual, const BinaryNode& add,
                                        bool conv_first, const Device& device, ConvChooser choose,
                                        std::span<const uint8_t> packed = {});
// A convolution, the LowBitLookup with one table that alone reads it, and the LowBitAdd that alone reads that: as
// PackConvAdd, with the codes of the table. Or `lookup` is null, and the addition has a function of its second operand,
// which the convolution makes. Or `add` is a LowBitMul, behind a table or not, where a convolution of one pixel an image and
// all pixels of an image are one kernel, too. made_first: what is made is the first operand.
bool FusesTableSum(const MatmulNode& conv, const LookupNode* lookup, const BinaryNode& add, bool made_first);
std::unique_ptr<PackedNode> PackTableSum(const MatmulNode& conv, const LookupNode* lookup,
                                         const BinaryNode& add, bool made_first, const Device& device,
                                         ConvChooser choose, std::span<const uint8_t> packed = {});
// A product to float32 without residuals, the addition that alone reads it, and the Relu or Clip that alone reads the
// sum, if any. Fed: what the product reads, the other tensor. Where that has other dims than the product makes, they are
// two kernels or three.
bool FusesFloatSum(const MatmulNode& product, const FloatBinaryOp& add,
                   const std::optional<UnaryOp>& activation);
std::unique_ptr<PackedNode> PackFloatSum(const MatmulNode& product, const FloatBinaryOp& add,
                                         const std::optional<UnaryOp>& activation, const Device& device,
                                         ConvChooser choose, std::span<const uint8_t> packed = {});
// LowBitQuantize and the convolution that alone reads it, as one kernel from the float32 image; nullptr where
// this pair has no fused kernel, which FusesQuantize says before.
// `lookup`: what alone reads that, as FusesLookup has it, or null.
bool FusesQuantize(const QuantizeNode& quantize, const MatmulNode& conv, const Device& device);
std::unique_ptr<PackedNode> PackQuantizedConv(const QuantizeNode& quantize, const MatmulNode& conv,
                                              const LookupNode* lookup, const Device& device,
                                              std::span<const uint8_t> packed = {});
// Both, and the LowBitMaxPool that alone reads the convolution, as one kernel at the shapes that have one;
// nullptr as of PackQuantizedConv.
bool FusesPool(const QuantizeNode& quantize, const MatmulNode& conv, const MaxPoolNode& pool,
               const Device& device);
std::unique_ptr<PackedNode> PackPooledConv(const QuantizeNode& quantize, const MatmulNode& conv,
                                           const MaxPoolNode& pool, const Device& device,
                                           std::span<const uint8_t> packed = {});

}  // namespace lowbit::cuda
