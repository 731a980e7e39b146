// LowBitImage: where a picture of any size goes, and of which pixels, with which weights, each pixel is made.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

using Size = ImageNode::Size;

constexpr int64_t kTableSize = 256;

std::optional<Size> SizeOf(const AttributeReader& node, const char* attribute) {
  const std::vector<int64_t>& sides = node.Ints(attribute);
  if (sides.empty()) return std::nullopt;
  Require(sides.size() == 2, node.op(), ": attribute '", attribute, "' has ", sides.size(),
          " numbers, expected height and width");
  for (const int64_t side : sides) {
    Require(side >= 1 && side <= ImageNode::kMaxSide, node.op(), ": attribute '", attribute, "' holds ", side,
            ", expected 1..", ImageNode::kMaxSide);
  }
  return Size{sides[0], sides[1]};
}

// Half to even, as Python's round.
int64_t RoundedHalf(int64_t value) {
  const int64_t half = value / 2;
  return half + (value % 2 != 0 && half % 2 != 0 ? 1 : 0);
}

// The side of a picture in a letterbox that the other one, which becomes `fitted`, leaves it.
int64_t InProportion(int64_t side, int64_t other, int64_t fitted, int64_t most) {
  return std::clamp<int64_t>((2 * side * fitted + other) / (2 * other), 1, most);
}

double Bilinear(double x) {
  x = std::fabs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

double Bicubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  return x < 2.0 ? (((x - 5.0) * x + 8.0) * x - 4.0) * a : 0.0;
}

int32_t Fixed(double weight) {
  constexpr double one = 1 << ImageNode::kWeightBits;
  return static_cast<int32_t>(weight < 0 ? weight * one - 0.5 : weight * one + 0.5);
}

ImageNode::Taps Copied(int64_t in, int64_t out, int64_t first, int64_t count) {
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  ImageNode::Taps taps;
  taps.most = 1;
  taps.count.assign(static_cast<size_t>(count), 1);
  taps.weights.assign(static_cast<size_t>(count), 1 << ImageNode::kWeightBits);
  double position = scale * 0.5;  // sums are rounded: what is left of the first pixel counts
  for (int64_t o = 0; o < first + count; ++o, position += scale) {
    if (o >= first)
      taps.first.push_back(static_cast<int32_t>(std::min(static_cast<int64_t>(position), in - 1)));
  }
  return taps;
}

}  // namespace

ImageNode ReadImageSizes(const AttributeReader& node) {
  ImageNode out;
  const std::vector<int64_t>& resize = node.Ints("resize");
  if (resize.size() == 1) {
    Require(resize[0] >= 1 && resize[0] <= ImageNode::kMaxSide, node.op(), ": attribute 'resize' holds ",
            resize[0], ", expected 1..", ImageNode::kMaxSide);
    out.shorter_side = resize[0];
  } else {
    out.exact = SizeOf(node, "resize");
  }
  out.letterbox = SizeOf(node, "letterbox");
  out.crop = SizeOf(node, "crop");
  Require(!out.letterbox || (resize.empty() && !out.crop), node.op(),
          ": attribute 'letterbox' says the whole size, expected no 'resize' and no 'crop' beside it");
  const std::string& order = node.String("order");
  Require(order == "rgb" || order == "bgr" || order == "gray", node.op(), ": attribute 'order' is '", order,
          "', expected rgb, bgr or gray");
  out.order = order == "rgb"   ? ImageNode::Order::kRgb
              : order == "bgr" ? ImageNode::Order::kBgr
                               : ImageNode::Order::kGray;
  return out;
}

ImageNode DecodeImage(const NodeReader& node) {
  ImageNode out = ReadImageSizes(node);
  out.centered = node.Flag("centered");
  out.fill = static_cast<uint8_t>(node.Int("fill", 0, 255));

  const std::string& filter = node.String("interpolation");
  Require(filter == "nearest" || filter == "bilinear" || filter == "bicubic", node.op(),
          ": attribute 'interpolation' is '", filter, "', expected bilinear, bicubic or nearest");
  out.filter = filter == "nearest"    ? ImageNode::Filter::kNearest
               : filter == "bilinear" ? ImageNode::Filter::kBilinear
                                      : ImageNode::Filter::kBicubic;
  out.y_signed = node.EncodingOf("y_encoding") == Encoding::kSigned;

  const ConstTensor& table = node.Constant("table", ElementType::kUInt8);
  const int64_t rows = table.shape.size() == 2 ? table.shape[0] : 1;
  Require((table.shape.size() == 1 || table.shape.size() == 2) && table.shape.back() == kTableSize &&
              (rows == 1 || rows == out.Channels()),
          node.op(), ": input 'table' has shape ", ShapeText(table.shape), ", expected [256] or [",
          out.Channels(), ", 256]");
  const auto* bytes = static_cast<const uint8_t*>(table.data);
  for (int64_t c = 0; c < out.Channels(); ++c) {
    const uint8_t* row = bytes + (rows == 1 ? 0 : c * kTableSize);
    out.table.insert(out.table.end(), row, row + kTableSize);
  }
  return out;
}

ImageNode::Placement ImageNode::PlacementOf(const Size& picture) const {
  const int64_t height = picture.height, width = picture.width;
  Require(std::min(height, width) >= 1 && std::max(height, width) <= kMaxSide, "a picture of ", height, "x",
          width, ", expected sides of 1..", kMaxSide, " pixels");
  Placement out{picture, picture, picture, 0, 0};
  if (exact) out.output = out.resized = *exact;
  if (shorter_side) {
    const auto longer = [&](int64_t side, int64_t shorter) {
      const int64_t made =
          static_cast<int64_t>(static_cast<double>(*shorter_side * side) / static_cast<double>(shorter));
      Require(made <= kMaxSide, "a picture of ", height, "x", width, " is resized to ", made,
              " pixels along a side, expected at most ", kMaxSide);
      return made;
    };
    out.resized = {height <= width ? *shorter_side : longer(height, width),
                   width <= height ? *shorter_side : longer(width, height)};
    out.output = out.resized;
  }
  if (letterbox) {
    out.output = *letterbox;
    out.resized =
        letterbox->height * width <= letterbox->width * height
            ? Size{letterbox->height, InProportion(width, height, letterbox->height, letterbox->width)}
            : Size{InProportion(height, width, letterbox->width, letterbox->height), letterbox->width};
    if (centered) {
      out.top = (out.output.height - out.resized.height) / 2;
      out.left = (out.output.width - out.resized.width) / 2;
    }
  }
  if (crop) {
    Require(out.resized.height >= crop->height && out.resized.width >= crop->width, "the crop of ",
            crop->height, "x", crop->width, " is larger than the picture, which is ", out.resized.height, "x",
            out.resized.width, "; resize it to no less");
    out.output = *crop;
    out.top = -RoundedHalf(out.resized.height - crop->height);
    out.left = -RoundedHalf(out.resized.width - crop->width);
  }
  return out;
}

ImageNode::Taps ImageNode::TapsOf(int64_t in, int64_t out, int64_t first, int64_t count) const {
  if (filter == Filter::kNearest || in == out) return Copied(in, out, first, count);
  const double scale = static_cast<double>(in) / static_cast<double>(out), wide = std::max(scale, 1.0);
  const double support = (filter == Filter::kBicubic ? 2.0 : 1.0) * wide, narrow = 1.0 / wide;
  const auto weight = filter == Filter::kBicubic ? Bicubic : Bilinear;
  Taps taps;
  taps.most = std::min(2 * static_cast<int64_t>(std::ceil(support)) + 1, in);
  taps.weights.reserve(static_cast<size_t>(count * taps.most));
  std::vector<double> exact_weights;
  for (int64_t o = first; o < first + count; ++o) {
    const double center = (static_cast<double>(o) + 0.5) * scale;
    const int64_t begin = std::max<int64_t>(static_cast<int64_t>(std::trunc(center - support + 0.5)), 0);
    const int64_t end = std::min(static_cast<int64_t>(std::trunc(center + support + 0.5)), in);
    exact_weights.clear();
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      exact_weights.push_back(weight((static_cast<double>(i) - center + 0.5) * narrow));
      sum += exact_weights.back();
    }
    for (const double each : exact_weights) taps.weights.push_back(Fixed(sum != 0 ? each / sum : each));
    taps.weights.resize(static_cast<size_t>((o - first + 1) * taps.most));
    taps.first.push_back(static_cast<int32_t>(begin));
    taps.count.push_back(static_cast<int32_t>(end - begin));
  }
  return taps;
}

std::vector<int64_t> OutputDims(const ImageNode& node, const FedShape& x) {
  CheckFed(x, ElementType::kUInt8, "x");
  Require(x.dims.size() == 4 && (x.dims[3] == 1 || x.dims[3] == 3), "x has shape ", ShapeText(x.dims),
          ", expected pictures [N, H, W, 3] or [N, H, W, 1]");
  const Size output = node.PlacementOf({x.dims[1], x.dims[2]}).output;
  std::vector<int64_t> y = {x.dims[0], output.height, output.width, node.Channels()};
  BoundedCount(y);
  return y;
}

}  // namespace lowbit
