#include "core/nodes/matmul_shape.h"

#include <algorithm>

#include "core/status.h"

namespace lowbit {

MatmulShape::MatmulShape(const MatmulNode& node)
    : op_(node.op),
      geometry_(node.conv.geometry),
      layout_(node.layout),
      x_type_(StorageOf(node.conv.x.encoding)),
      has_residual_(node.conv.epilogue.has_residual),
      residual_type_(CodeType(node.conv.epilogue.residual_signed)),
      y_type_(node.conv.epilogue.quantized_output ? CodeType(node.conv.epilogue.y_signed)
                                                  : ElementType::kFloat) {}

ConvShape MatmulShape::Images(const FedShape* x, const FedShape* residual) const {
  Require(x != nullptr, op_, ": input 'x' is missing");
  Require(x->type == x_type_, op_,
          ": the element type of x is not the one x_encoding says (unsigned and bipolar: ",
          "uint8, signed: int8)");
  const ConvShape shape = layout_.is_gemm ? GemmShape(x->dims) : ImageShape(x->dims);
  if (has_residual_) {
    Require(residual != nullptr, op_, ": input 'residual' is missing");
    CheckResidual(*residual, shape, x->dims);
  }
  return shape;
}

std::vector<int64_t> MatmulShape::OutputDims(std::span<const int64_t> x, const ConvShape& images) const {
  if (!layout_.is_gemm) {
    const int64_t channels = geometry_.out_channels;
    if (layout_.spatial == 1) return {images.batch, images.out_w, channels};
    if (layout_.spatial == 2) return {images.batch, images.out_h, images.out_w, channels};
    switch (layout_.volume) {
      case VolumeLayout::kWhole:
        return {images.batch, images.out_d, images.out_h, images.out_w, channels};
      case VolumeLayout::kPlanes:
        return {x[0], x[1], images.out_h, images.out_w, channels};
      case VolumeLayout::kColumns:
        return {images.batch, images.out_h, x[2], x[3], channels};
    }
  }
  std::vector<int64_t> y = ToVector(x.first(static_cast<size_t>(GemmAxis(x))));
  y.push_back(geometry_.out_channels);
  return y;
}

int64_t MatmulShape::GemmAxis(std::span<const int64_t> x) const {
  const int64_t rank = static_cast<int64_t>(x.size());
  const int64_t axis = layout_.axis < 0 ? layout_.axis + rank : layout_.axis;
  Require(axis >= 0 && axis < rank, op_, ": attribute 'axis' is ", layout_.axis, ", x has shape ",
          ShapeText(x));
  return axis;
}

ConvShape MatmulShape::GemmShape(std::span<const int64_t> x) const {
  const size_t axis = static_cast<size_t>(GemmAxis(x));
  const int64_t k = ElementCount(x.subspan(axis));
  Require(k == geometry_.in_channels, op_, ": x has shape ", ShapeText(x), ", its dims from ", axis,
          " on hold ", k, " features, expected ", geometry_.in_channels);
  return InferConvShape(geometry_, ElementCount(x.first(axis)), 1, 1);
}

ConvShape MatmulShape::ImageShape(std::span<const int64_t> x) const {
  const size_t rank = static_cast<size_t>(layout_.spatial) + 2;
  Require(x.size() == rank && x.back() == geometry_.in_channels, op_, ": x has shape ", ShapeText(x),
          ", expected rank ", rank, " with ", geometry_.in_channels, " channels last");
  if (layout_.spatial == 1) return InferConvShape(geometry_, x[0], 1, x[1]);
  if (layout_.spatial == 2) return InferConvShape(geometry_, x[0], x[1], x[2]);
  Require(x[1] >= 1 && x[2] >= 1 && x[3] >= 1, op_, ": x has shape ", ShapeText(x),
          ", expected at least one pixel");
  switch (layout_.volume) {
    case VolumeLayout::kPlanes:
      return InferConvShape(geometry_, CheckedProduct(x[0], x[1], "the number of planes"), x[2], x[3]);
    case VolumeLayout::kColumns:
      return InferConvShape(geometry_, x[0], x[1], CheckedProduct(x[2], x[3], "the pixels of a plane"));
    case VolumeLayout::kWhole:
      break;
  }
  return InferConvShape(geometry_, x[0], x[2], x[3], x[1]);
}

void MatmulShape::CheckResidual(const FedShape& residual, const ConvShape& shape,
                                std::span<const int64_t> x) const {
  Require(residual.type == residual_type_, op_,
          ": the residual's element type is not the one residual_encoding says");
  const std::vector<int64_t> y = OutputDims(x, shape);
  Require(std::ranges::equal(residual.dims, y), op_, ": the residual has shape ", ShapeText(residual.dims),
          ", expected the output's, ", ShapeText(y));
}

}  // namespace lowbit
