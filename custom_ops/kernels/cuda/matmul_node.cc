// Matrix products of the node family as nodes: dims to images, packed constants, a plan per shape.
#include <cstdint>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/cuda_node.h"

namespace lowbit::cuda {
namespace {

ConvShape ImagesOf(const ConvGeometry& geometry, const MatmulLayout& layout,
                   const std::vector<int64_t>& dims) {
  const int64_t rank = static_cast<int64_t>(dims.size());
  if (!layout.is_gemm) {
    Require(rank == layout.spatial + 2 && dims.back() == geometry.in_channels, "x has rank ", rank, " and ",
            dims.empty() ? 0 : dims.back(), " channels last, expected rank ", layout.spatial + 2, " and ",
            geometry.in_channels, " channels");
    return InferConvShape(geometry, dims[0], layout.spatial == 1 ? 1 : dims[1],
                          dims[static_cast<size_t>(rank) - 2]);
  }
  const int64_t axis = layout.axis < 0 ? layout.axis + rank : layout.axis;
  Require(axis >= 0 && axis < rank, "attribute 'axis' is ", layout.axis, ", x has rank ", rank);
  const std::span<const int64_t> all = dims;
  const int64_t k = ElementCount(all.subspan(static_cast<size_t>(axis)));
  Require(k == geometry.in_channels, "the dims of x from ", axis, " on hold ", k, " features, expected ",
          geometry.in_channels);
  return InferConvShape(geometry, ElementCount(all.first(static_cast<size_t>(axis))), 1, 1);
}

class MatmulPlan final : public NodePlan {
 public:
  MatmulPlan(std::shared_ptr<const ConvPlan> plan, bool has_residual)
      : plan_(std::move(plan)), has_residual_(has_residual) {}

  size_t WorkspaceBytes() const override { return PlanWorkspaceBytes(*plan_); }
  void Launch(std::span<const void* const> fed, void* y, void* workspace, Queue& queue) const override {
    const size_t expected = has_residual_ ? 2 : 1;
    Require(fed.size() == expected, "a convolution was fed ", fed.size(), " tensors, expected ", expected);
    LaunchConv(*plan_, fed[0], has_residual_ ? fed[1] : nullptr, y, workspace, queue);
  }
  std::string Text() const override { return PlanConfig(*plan_).Text(); }

 private:
  std::shared_ptr<const ConvPlan> plan_;
  bool has_residual_;
};

class PackedMatmul final : public PackedNode {
 public:
  PackedMatmul(const MatmulNode& node, const Device& device, ConvChooser choose,
               std::span<const uint8_t> packed, const std::optional<CodeGrid>& dequantized = std::nullopt)
      : geometry_(node.conv.geometry),
        layout_(node.layout),
        has_residual_(node.conv.epilogue.has_residual),
        choose_(std::move(choose)),
        conv_(PackConv(node.conv, device, packed, dequantized)) {}

  std::shared_ptr<const NodePlan> Plan(std::span<const TensorShape> fed, const TensorShape&) const override {
    Require(!fed.empty(), "a convolution was fed no tensor");
    const ConvShape shape = ImagesOf(geometry_, layout_, fed[0].dims);
    // Nothing to compute, nothing to choose.
    const bool chooses = choose_ && shape.OutPixels() > 0;
    const auto plan = chooses ? PlanConv(conv_, shape, choose_(conv_, shape)) : PlanConv(conv_, shape);
    return std::make_shared<const MatmulPlan>(plan, has_residual_);
  }
  // A tile's residuals are read by the block that stores its codes, before it does.
  std::optional<size_t> Overwrites() const override {
    return has_residual_ ? std::optional<size_t>(1) : std::nullopt;
  }
  std::vector<uint8_t> Packed() const override { return SavePacked(*conv_); }

 private:
  ConvGeometry geometry_;
  MatmulLayout layout_;
  bool has_residual_;
  ConvChooser choose_;
  std::shared_ptr<const PackedConv> conv_;
};

// Floats in, quantized on the way into the convolution.
class PackedPixels final : public PackedNode {
 public:
  PackedPixels(const QuantizeNode& quantize, const MatmulNode& node, std::shared_ptr<const PackedConv> conv)
      : geometry_(node.conv.geometry),
        has_residual_(node.conv.epilogue.has_residual),
        conv_(std::move(conv)) {
    quantizer_.planes = quantize.to_channels_last;
    quantizer_.lo = quantize.grids.front().lo;
    quantizer_.hi = quantize.grids.front().hi;
    for (size_t c = 0; c < static_cast<size_t>(geometry_.in_channels); ++c) {
      const Quantizer& grid = quantize.grids[quantize.grids.size() == 1 ? 0 : c];
      quantizer_.scale.push_back(grid.scale);
      quantizer_.zero_point.push_back(grid.zero_point);
    }
  }

  std::shared_ptr<const NodePlan> Plan(std::span<const TensorShape> fed, const TensorShape&) const override {
    Require(!fed.empty() && fed[0].dims.size() == 4, "an image was expected, of rank 4");
    const std::vector<int64_t>& dims = fed[0].dims;
    const size_t first = quantizer_.planes ? 2 : 1;
    Require(dims[quantizer_.planes ? 1 : 3] == geometry_.in_channels, "the image has ",
            dims[quantizer_.planes ? 1 : 3], " channels, expected ", geometry_.in_channels);
    const ConvShape shape = InferConvShape(geometry_, dims[0], dims[first], dims[first + 1]);
    return std::make_shared<const MatmulPlan>(PlanPixels(conv_, shape, quantizer_), has_residual_);
  }
  std::vector<uint8_t> Packed() const override { return SavePacked(*conv_); }

 private:
  ConvGeometry geometry_;
  bool has_residual_;
  PixelQuantizer quantizer_;
  std::shared_ptr<const PackedConv> conv_;
};

}  // namespace

bool FusesQuantize(const QuantizeNode& quantize, const MatmulNode& conv, const Device&) {
  const size_t grids = quantize.grids.size();
  return !conv.layout.is_gemm && conv.layout.spatial == 2 && FitsPixels(conv.conv) &&
         (grids == 1 || grids == static_cast<size_t>(conv.conv.geometry.in_channels)) &&
         quantize.grids.front().is_signed == (conv.conv.x.encoding == Encoding::kSigned);
}

std::unique_ptr<PackedNode> PackQuantizedConv(const QuantizeNode& quantize, const MatmulNode& conv,
                                              const Device& device, ConvChooser,
                                              std::span<const uint8_t> packed) {
  if (!FusesQuantize(quantize, conv, device)) return nullptr;
  auto constants = PackConv(conv.conv, device, packed);
  // Weights whose zero points leave int8 need sums of codes: two kernels then.
  const std::vector<ConvConfig> candidates = CandidateConfigs(*constants, {1, 64, 64, 1, 1});
  if (candidates.front().algorithm != Algorithm::kImage) return nullptr;
  return std::make_unique<PackedPixels>(quantize, conv, std::move(constants));
}

// Products alone: the large outputs of convolutions take the faster epilogues that end in codes.
bool FusesDequantize(const MatmulNode& matmul, const DequantizeNode& dequantize) {
  const AffineSpec& grid = dequantize.spec;
  return matmul.layout.is_gemm && matmul.conv.epilogue.quantized_output && grid.channels == 1 &&
         !grid.has_affine && !grid.quantizer.quantized && !dequantize.to_channels_first;
}

std::unique_ptr<PackedNode> PackDequantizedMatmul(const MatmulNode& matmul, const DequantizeNode& dequantize,
                                                  const Device& device, ConvChooser choose,
                                                  std::span<const uint8_t> packed) {
  const AffineSpec& grid = dequantize.spec;
  return std::make_unique<PackedMatmul>(
      matmul, device, std::move(choose), packed,
      CodeGrid{grid.x_signed, grid.x_scale.front(), grid.x_zero_point.front()});
}

std::unique_ptr<PackedNode> PackMatmul(const MatmulNode& node, const Device& device, ConvChooser choose,
                                       std::span<const uint8_t> packed) {
  return std::make_unique<PackedMatmul>(node, device, std::move(choose), packed);
}

}  // namespace lowbit::cuda
