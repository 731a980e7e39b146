// LowBitConcat.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

// "unsigned,signed" or empty.
std::vector<bool> ReadEncodings(const NodeReader& node, size_t count) {
  std::vector<bool> is_signed;
  const std::string& text = node.String("x_encodings");
  if (text.empty()) return std::vector<bool>(count, false);
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    Require(name == "unsigned" || name == "signed", node.op(), ": attribute 'x_encodings' holds '", name,
            "', expected unsigned or signed");
    is_signed.push_back(name == "signed");
    begin = end + 1;
  }
  Require(is_signed.size() == count, node.op(), ": attribute 'x_encodings' has ", is_signed.size(),
          " entries for ", count, " tensors");
  return is_signed;
}

}  // namespace

ConcatNode DecodeConcat(const NodeReader& node) {
  const size_t count = node.InputCount() - node.Index("x");
  const std::vector<bool> is_signed = ReadEncodings(node, count);
  const std::vector<float> scales = node.FloatsOf("x_scales", static_cast<int64_t>(count));
  const std::vector<int32_t> zero_points = node.Int32sOf("x_zero_points", static_cast<int64_t>(count));
  const Quantizer quantizer = ReadQuantizer(node);

  // Without bounds of its own the output's codes are those of its inputs, which their producers bound.
  const bool clipped = !node.Ints("y_min").empty() || !node.Ints("y_max").empty();
  std::vector<ConcatNode::Part> parts(count);
  for (size_t i = 0; i < count; ++i) {
    Require(std::isfinite(scales[i]) && scales[i] > 0, node.op(), ": input 'x_scales' holds ", scales[i],
            ", expected finite scales > 0");
    node.CheckZeroPoint("x_zero_points", zero_points[i], Storage(is_signed[i]));
    AffineSpec& spec = parts[i].spec;
    parts[i].copied = !clipped && scales[i] == quantizer.scale && zero_points[i] == quantizer.zero_point &&
                      is_signed[i] == quantizer.is_signed;
    spec.x_signed = is_signed[i];
    spec.x_scale = {scales[i]};
    spec.x_zero_point = {zero_points[i]};
    spec.y_scale = {quantizer.scale};
    spec.y_zero_point = {quantizer.zero_point};
    spec.quantizer = quantizer;
  }
  return {std::move(parts), quantizer, node.Int("axis", -kMaxAttribute, kMaxAttribute)};
}

size_t ConcatNode::Axis(size_t rank) const {
  const int64_t dims = static_cast<int64_t>(rank);
  Require(axis >= -dims && axis < dims, "attribute 'axis' is ", axis, ", the tensors have rank ", rank);
  return static_cast<size_t>(axis < 0 ? axis + dims : axis);
}

std::vector<int64_t> OutputDims(const ConcatNode& node, std::span<const FedShape> x) {
  Require(x.size() == node.parts.size(), "got ", x.size(), " tensors to join, expected ", node.parts.size());
  std::vector<int64_t> y;
  for (size_t i = 0; i < x.size(); ++i) {
    CheckFed(x[i], CodeType(node.parts[i].spec.x_signed), "x");
    if (i == 0) {
      y = ToVector(x[i].dims);
      continue;
    }
    const size_t axis = node.Axis(y.size());
    Require(x[i].dims.size() == y.size(), "tensors of shape ", ShapeText(y), " and ", ShapeText(x[i].dims),
            " cannot be joined");
    for (size_t d = 0; d < y.size(); ++d) {
      Require(d == axis || x[i].dims[d] == y[d], "tensors of shape ", ShapeText(y), " and ",
              ShapeText(x[i].dims), " cannot be joined along axis ", axis);
    }
    y[axis] += x[i].dims[axis];
  }
  node.Axis(y.size());
  BoundedCount(y);
  return y;
}

}  // namespace lowbit
