#include "core/nodes/matmul_shape.h"

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
    if (layout_.spatial == 1) return {images.batch, images.out_w, geometry_.out_channels};
    return {images.batch, images.out_h, images.out_w, geometry_.out_channels};
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
  return InferConvShape(geometry_, x[0], layout_.spatial == 1 ? 1 : x[1], x[rank - 2]);
}

void MatmulShape::CheckResidual(const FedShape& residual, const ConvShape& shape,
                                std::span<const int64_t> x) const {
  Require(residual.type == residual_type_, op_,
          ": the residual's element type is not the one residual_encoding says");
  const std::span<const int64_t> r = residual.dims;
  bool same = r.size() == (layout_.is_gemm ? static_cast<size_t>(GemmAxis(x)) + 1 : x.size());
  same = same && r.back() == geometry_.out_channels;
  if (layout_.is_gemm) {
    for (size_t i = 0; same && i + 1 < r.size(); ++i) same = r[i] == x[i];
  } else {
    same = same && r[0] == shape.batch && r[r.size() - 2] == shape.out_w;
    same = same && (layout_.spatial == 1 || r[1] == shape.out_h);
  }
  Require(same, op_, ": the residual has shape ", ShapeText(r), ", expected the output's: ", shape.batch,
          " x ", shape.out_h, " x ", shape.out_w, " x ", geometry_.out_channels);
}

}  // namespace lowbit
