// Random lowbit nodes; what they must give is computed by the CPU operators with their reference kernels.
#include "kernels/cuda/tests/node_cases.h"

#include <algorithm>
#include <functional>
#include <map>

#include "core/cpu/operator.h"
#include "core/status.h"

namespace lowbit::cuda::test {
namespace {

ElementType CodeType(bool is_signed) { return is_signed ? ElementType::kInt8 : ElementType::kUInt8; }

void FeedCodes(Case& c, Draw& draw, bool is_signed, std::vector<int64_t> dims) {
  c.data.push_back(draw.Codes(Count(dims)));
  c.fed.push_back({CodeType(is_signed), std::move(dims)});
}

void FeedFloats(Case& c, Draw& draw, float scale, std::vector<int64_t> dims) {
  c.data.push_back(Bytes(draw.Floats(Count(dims), scale)));
  c.fed.push_back({ElementType::kFloat, std::move(dims)});
}

// Places of the fed tensors among the inputs of the schema.
std::vector<size_t> Places(const Case& c) {
  if (c.kind == "add" || c.kind == "mul" || c.kind == "fed_matmul") return {0, 3};
  std::vector<size_t> out(c.fed.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = i + (c.kind == "concat" ? 4 : 0);
  return out;
}

void Finish(Case& c, NodeSpec node) {
  c.y = OutputOf(node, c.fed);
  OperatorOptions options;
  options.use_reference = true;
  const std::vector<size_t> places = Places(c);
  std::vector<std::optional<ConstTensor>> inputs(places.back() + 1);
  for (size_t i = 0; i < places.size(); ++i) {
    inputs[places[i]] = ConstTensor{c.fed[i].type, c.fed[i].dims, c.data[i].data()};
  }
  c.expected.resize(static_cast<size_t>(Count(c.y.dims)) * ElementSize(c.y.type));
  InlineThreadPool pool;
  CreateOperator(node, options)->Run(inputs, c.expected.data(), pool);
  c.node = std::move(node);
}

AffineSpec DrawAffine(Draw& draw, int64_t channels, bool has_affine, bool grids) {
  AffineSpec spec;
  spec.x_signed = draw.Coin();
  spec.channels = channels;
  spec.has_affine = has_affine;
  spec.quantizer = draw.Grid();
  const float x_scale = draw.Scale(), y_scale = draw.Scale();
  const int32_t x_zero = draw.ZeroPoint(spec.x_signed), y_zero = spec.quantizer.zero_point;
  const bool ties = draw.Coin(0.3);
  for (int64_t i = 0; i < channels; ++i) {
    spec.x_scale.push_back(grids ? draw.Scale() : x_scale);
    spec.x_zero_point.push_back(grids ? draw.ZeroPoint(spec.x_signed) : x_zero);
    spec.y_scale.push_back(grids ? draw.Scale() : y_scale);
    spec.y_zero_point.push_back(grids ? draw.ZeroPoint(spec.quantizer.is_signed) : y_zero);
    if (!has_affine) continue;
    spec.scale.push_back(ties ? 0.5f : draw.Real(-2, 2));
    spec.shift.push_back(ties ? 0.25f : draw.Real(-2, 2));
  }
  return spec;
}

Case MakeAffine(Draw& draw) {
  Case c;
  const int64_t channels = draw.Channels();
  AffineNode node{DrawAffine(draw, draw.Coin() ? channels : 1, true, false)};
  node.spec.quantizer.quantized = draw.Coin(0.8);
  FeedCodes(c, draw, node.spec.x_signed, draw.Shape(channels));
  Finish(c, node);
  return c;
}

// Long enough for threads that repeat.
Case MakeLargeAffine(Draw& draw) {
  Case c;
  const int64_t channels = draw.Of<int64_t>({4, 36, 64});
  AffineNode node{DrawAffine(draw, channels, true, false)};
  FeedCodes(c, draw, node.spec.x_signed, {1300000 / channels + draw.Int(0, 7), channels});
  Finish(c, node);
  return c;
}

Case MakeRequantize(Draw& draw) {
  Case c;
  const int64_t channels = draw.Channels();
  AffineNode node{DrawAffine(draw, draw.Coin() ? channels : 1, false, true)};
  FeedCodes(c, draw, node.spec.x_signed, draw.Shape(channels));
  Finish(c, node);
  return c;
}

Case MakeLookup(Draw& draw) {
  Case c;
  const int64_t channels = draw.Channels();
  LookupNode node;
  node.x_signed = draw.Coin();
  node.y_signed = draw.Coin();
  node.channels = draw.Coin() ? channels : 1;
  node.table = draw.Codes(node.channels * 256);
  FeedCodes(c, draw, node.x_signed, draw.Shape(channels));
  Finish(c, node);
  return c;
}

// One operand of a broadcast to `y`.
std::vector<int64_t> Operand(Draw& draw, const std::vector<int64_t>& y) {
  if (draw.Coin(0.3)) return y;
  std::vector<int64_t> dims(y.begin() + draw.Int(0, static_cast<int64_t>(y.size())), y.end());
  for (auto& d : dims) {
    if (draw.Coin(0.35)) d = 1;
  }
  return dims;
}

Case MakeBinary(Draw& draw, BinaryKind kind) {
  Case c;
  c.kind = kind == BinaryKind::kAdd ? "add" : "mul";
  BinaryNode node;
  BinarySpec& spec = node.spec;
  spec.kind = kind;
  spec.a_signed = draw.Coin();
  spec.b_signed = draw.Coin();
  spec.a_scale = draw.Scale();
  spec.b_scale = draw.Scale();
  spec.a_zero_point = draw.ZeroPoint(spec.a_signed);
  spec.b_zero_point = draw.ZeroPoint(spec.b_signed);
  if (kind == BinaryKind::kAdd && draw.Coin(0.3)) {
    for (int i = 0; i < 256; ++i)
      spec.b_table.push_back(static_cast<float>(draw.Int(-300, 300)) * spec.b_scale);
  }
  spec.quantizer = draw.Grid();
  spec.quantizer.quantized = draw.Coin(0.8);
  const std::vector<int64_t> shape = draw.Shape(draw.Channels());
  FeedCodes(c, draw, spec.a_signed, Operand(draw, shape));
  FeedCodes(c, draw, spec.b_signed, draw.Coin(0.4) ? c.fed[0].dims : Operand(draw, shape));
  Finish(c, node);
  return c;
}

// A table of one operand's codes and the addition as one node. What it must make is what both make in turn.
Case MakeMappedAdd(Draw& draw) {
  Case c = MakeBinary(draw, BinaryKind::kAdd);
  const auto node = std::get<BinaryNode>(std::get<NodeSpec>(c.node));
  Require(node.spec.b_table.empty(), "a table of its own");
  c.mapped_first = draw.Coin();
  const size_t mapped = c.mapped_first ? 0 : 1;
  const bool is_signed = c.mapped_first ? node.spec.a_signed : node.spec.b_signed;
  c.lookup = LookupNode{draw.Coin(), is_signed, 1, draw.Codes(256)};
  const TensorShape x{CodeType(c.lookup->x_signed), c.fed[mapped].dims};
  const std::vector<uint8_t> codes = c.data[mapped];
  for (uint8_t& byte : c.data[mapped]) byte = c.lookup->table[byte];
  Finish(c, node);
  c.fed[mapped] = x;
  c.data[mapped] = codes;
  if (!c.mapped_first) {
    std::swap(c.fed[0], c.fed[1]);
    std::swap(c.data[0], c.data[1]);
  }
  return c;
}

Window DrawWindow(Draw& draw, bool dilates) {
  Window w;
  w.spatial = draw.Coin(0.8) ? 2 : 1;
  const bool common = draw.Coin(0.4);
  for (size_t d = w.spatial == 2 ? 1 : 2; d < kMaxSpatial; ++d) {
    w.kernel[d] = common ? 3 : draw.Int(1, 5);
    w.stride[d] = common ? 2 : draw.Int(1, 4);
    w.dilation[d] = dilates && !common && draw.Coin(0.4) ? draw.Int(1, 9) : 1;
    w.pad_begin[d] = common ? 1 : draw.Int(0, w.kernel[d] - 1);
    w.pad_end[d] = common ? 1 : draw.Int(0, w.kernel[d] - 1);
  }
  return w;
}

std::vector<int64_t> ImageShape(Draw& draw, int spatial) {
  std::vector<int64_t> dims = {draw.Int(1, 3)};
  for (int i = 0; i < spatial; ++i) dims.push_back(draw.Coin(0.2) ? 1 : draw.Int(1, 15));
  dims.push_back(draw.Channels());
  return dims;
}

// [.., rows, columns] as it lies in memory before `permutation` makes it that.
std::vector<int64_t> Unpermuted(Draw& draw, const std::vector<int64_t>& dims,
                                std::vector<size_t>& permutation) {
  if (draw.Coin(0.3)) return dims;
  permutation.resize(dims.size());
  for (size_t i = 0; i < permutation.size(); ++i) permutation[i] = i;
  for (size_t i = 0; i + 1 < permutation.size(); ++i) {
    std::swap(permutation[i], permutation[static_cast<size_t>(draw.Int(
                                  static_cast<int64_t>(i), static_cast<int64_t>(permutation.size()) - 1))]);
  }
  std::vector<int64_t> out(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) out[permutation[i]] = dims[i];
  return out;
}

Case MakeFedMatmul(Draw& draw) {
  Case c;
  c.kind = "fed_matmul";
  FedMatmulNode node;
  FedMatmulSpec& spec = node.spec;
  spec.a_signed = draw.Coin();
  spec.b_signed = draw.Coin();
  spec.a_zero_point = draw.ZeroPoint(spec.a_signed);
  spec.b_zero_point = draw.ZeroPoint(spec.b_signed);
  spec.quantizer = draw.Grid();
  spec.quantizer.quantized = draw.Coin(0.8);
  spec.multiplier = draw.Coin(0.3) ? 0x1p-9f : draw.Real(0.0001f, 0.01f);
  // Multiples of 4 are fetched as words; 64 and 32 are the sizes of tiles.
  const auto size = [&](int64_t most) {
    return draw.Coin() ? draw.Int(1, most) : draw.Of<int64_t>({4, 32, 60, 64, 68, 128});
  };
  const int64_t m = size(140), n = size(140), k = size(100);
  std::vector<int64_t> a, b;
  for (int64_t rank = draw.Int(0, 2); rank > 0; --rank) {
    a.push_back(draw.Int(1, 3));
    b.push_back(draw.Coin(0.7) ? a.back() : 1);
    if (draw.Coin(0.2)) a.back() = 1;
  }
  if (draw.Coin(0.2)) b.clear();
  a.insert(a.end(), {m, k});
  b.insert(b.end(), {k, n});
  FeedCodes(c, draw, spec.a_signed, Unpermuted(draw, a, node.a_permutation));
  FeedCodes(c, draw, spec.b_signed, Unpermuted(draw, b, node.b_permutation));
  Finish(c, node);
  return c;
}

Case MakeSoftmax(Draw& draw) {
  Case c;
  SoftmaxNode node;
  node.x_signed = draw.Coin();
  std::vector<int64_t> dims = draw.Shape(draw.Coin(0.1) ? draw.Int(500, 6000) : draw.Channels());
  if (draw.Coin(0.3)) dims = {draw.Int(1, 3), draw.Int(1, 20), draw.Int(1, 80)};
  node.axis = draw.Coin() ? -1 : draw.Int(0, static_cast<int64_t>(dims.size()) - 1);
  node.quantizer = draw.Grid();
  const float decay = draw.Real(0, 0.3f);
  for (int i = 0; i < 256; ++i) {
    const float entry = std::exp(-decay * static_cast<float>(i)) * SoftmaxNode::kMaxEntry;
    node.table.push_back(draw.Coin(0.1) && i > 0 ? 0 : std::max(1, static_cast<int32_t>(entry)));
  }
  FeedCodes(c, draw, node.x_signed, dims);
  Finish(c, node);
  return c;
}

Case MakeMaxPool(Draw& draw) {
  Case c;
  MaxPoolNode node;
  node.is_signed = draw.Coin();
  node.window = DrawWindow(draw, true);
  node.ceil_mode = draw.Coin();
  FeedCodes(c, draw, node.is_signed, ImageShape(draw, node.window.spatial));
  Finish(c, node);
  return c;
}

Case MakeAveragePool(Draw& draw) {
  Case c;
  AveragePoolNode node;
  node.spec.x_signed = draw.Coin();
  node.spec.x_scale = draw.Scale();
  node.spec.x_zero_point = draw.ZeroPoint(node.spec.x_signed);
  node.spec.quantizer = draw.Grid();
  node.spec.quantizer.quantized = draw.Coin(0.8);
  node.window = DrawWindow(draw, false);
  node.ceil_mode = draw.Coin();
  node.count_include_pad = draw.Coin();
  FeedCodes(c, draw, node.spec.x_signed, ImageShape(draw, node.window.spatial));
  Finish(c, node);
  return c;
}

Case MakeGlobalAveragePool(Draw& draw) {
  Case c;
  GlobalAveragePoolNode node;
  node.spec.x_signed = draw.Coin();
  node.x_scale = draw.Scale();
  node.x_zero_point = draw.ZeroPoint(node.spec.x_signed);
  node.spec.quantizer = draw.Grid();
  node.spec.quantizer.quantized = draw.Coin(0.8);
  node.keep_dims = draw.Coin();
  std::vector<int64_t> dims = {draw.Int(1, 3)};
  for (int64_t rank = draw.Int(0, 3); rank > 0; --rank) dims.push_back(draw.Int(1, rank == 1 ? 70 : 8));
  dims.push_back(draw.Channels());
  FeedCodes(c, draw, node.spec.x_signed, dims);
  Finish(c, node);
  return c;
}

Case MakeConcat(Draw& draw) {
  Case c;
  c.kind = "concat";
  ConcatNode node;
  node.quantizer = draw.Grid();
  const bool round = draw.Coin(0.6);  // sizes that leave 16-byte vectors
  std::vector<int64_t> dims = draw.Shape(round ? 16 * draw.Int(1, 5) : draw.Channels());
  const auto rank = static_cast<int64_t>(dims.size());
  node.axis = draw.Coin(0.6) ? -1 : draw.Int(-rank, rank - 1);
  const auto axis = static_cast<size_t>(node.axis < 0 ? node.axis + rank : node.axis);
  const int64_t parts = draw.Coin(0.1) ? draw.Int(57, 120) : draw.Int(1, 5);
  if (parts > 5) dims.resize(std::max<size_t>(axis + 1, 2), 2);
  for (int64_t i = 0; i < parts; ++i) {
    ConcatNode::Part part;
    part.copied = draw.Coin();
    AffineSpec& spec = part.spec;
    spec.x_signed = part.copied ? node.quantizer.is_signed : draw.Coin();
    spec.x_scale = {part.copied ? node.quantizer.scale : draw.Scale()};
    spec.x_zero_point = {part.copied ? node.quantizer.zero_point : draw.ZeroPoint(spec.x_signed)};
    spec.y_scale = {node.quantizer.scale};
    spec.y_zero_point = {node.quantizer.zero_point};
    spec.quantizer = node.quantizer;
    node.parts.push_back(part);
    std::vector<int64_t> own = dims;
    if (i > 0) own[axis] = round ? 16 * draw.Int(0, 4) : draw.Int(1, 9);
    FeedCodes(c, draw, spec.x_signed, own);
  }
  Finish(c, node);
  return c;
}

Case MakeResize(Draw& draw) {
  Case c;
  ResizeNode node;
  node.is_signed = draw.Coin();
  node.coordinates = static_cast<ResizeNode::Coordinates>(draw.Int(0, 3));
  node.nearest = static_cast<ResizeNode::Nearest>(draw.Int(0, 3));
  const auto spatial = static_cast<int>(draw.Int(1, 3));
  const int64_t mode = draw.Int(0, 2);
  for (int i = 0; i < spatial; ++i) {
    if (mode == 0) node.sizes.push_back(draw.Int(1, 19));
    if (mode == 1) node.scales.push_back(draw.Real(0.3f, 3.5f));
    if (mode == 2) node.scales.push_back(static_cast<float>(draw.Int(1, 3)));
  }
  FeedCodes(c, draw, node.is_signed, ImageShape(draw, spatial));
  Finish(c, node);
  return c;
}

// Pictures that grow and shrink, cut off, in letterboxes, in either order of sides.
Case MakeImage(Draw& draw) {
  Case c;
  ImageNode node;
  node.filter = static_cast<ImageNode::Filter>(draw.Int(0, 2));
  node.order = static_cast<ImageNode::Order>(draw.Int(0, 2));
  node.y_signed = draw.Coin();
  node.fill = static_cast<uint8_t>(draw.Int(0, 255));
  node.centered = draw.Coin();
  node.table = draw.Codes(node.Channels() * 256);
  const ImageNode::Size size = {draw.Int(1, 60), draw.Int(1, 60)};
  const int64_t mode = draw.Int(0, 3);
  if (mode == 0) node.exact = size;
  if (mode == 1) node.shorter_side = std::min<int64_t>(size.height, 24);
  if (mode == 2) node.letterbox = size;
  const std::vector<int64_t> dims = {draw.Int(1, 3), draw.Int(1, 90), draw.Int(1, 90), draw.Coin() ? 3 : 1};
  if (mode != 2 && draw.Coin()) {
    const ImageNode::Size resized = node.PlacementOf({dims[1], dims[2]}).resized;
    node.crop = {draw.Int(1, std::min<int64_t>(resized.height, 40)),
                 draw.Int(1, std::min<int64_t>(resized.width, 40))};
  }
  FeedCodes(c, draw, false, dims);
  Finish(c, node);
  return c;
}

Case MakeDepthToSpace(Draw& draw) {
  Case c;
  DepthToSpaceNode node;
  node.block = draw.Int(1, 4);
  node.channels_first = draw.Coin();
  node.is_signed = draw.Coin();
  FeedCodes(c, draw, node.is_signed,
            {draw.Int(1, 3), draw.Int(1, 9), draw.Int(1, 9),
             node.block * node.block * (draw.Coin() ? 16 : draw.Int(1, 20))});
  Finish(c, node);
  return c;
}

// Shapes of a float x whose channels may move last.
std::vector<int64_t> PlanesShape(Draw& draw, int64_t channels, bool moves) {
  if (!moves) return draw.Shape(channels);
  if (draw.Coin(0.15)) return {draw.Int(1, 3), channels, draw.Int(300, 400), draw.Int(3, 5)};
  std::vector<int64_t> dims = {draw.Int(1, 3), channels};
  for (int64_t rank = draw.Int(0, 3); rank > 0; --rank) dims.push_back(draw.Int(1, 14));
  return dims;
}

Case MakeQuantize(Draw& draw) {
  Case c;
  QuantizeNode node;
  node.to_channels_last = draw.Coin(0.7);
  const int64_t channels = draw.Coin(0.3) ? draw.Int(1, 4) : draw.Channels();
  const Quantizer q = draw.Grid();
  node.grids.assign(static_cast<size_t>(draw.Coin(0.3) ? channels : 1), q);
  for (size_t i = 1; i < node.grids.size(); ++i) node.grids[i].scale = draw.Scale();
  FeedFloats(c, draw, q.scale, PlanesShape(draw, channels, node.to_channels_last));
  Finish(c, node);
  return c;
}

Case MakeThreshold(Draw& draw) {
  Case c;
  ThresholdNode node;
  ThresholdSpec& spec = node.spec;
  node.to_channels_last = draw.Coin(0.7);
  const int64_t channels = draw.Channels();
  spec.channels = draw.Coin() ? channels : 1;
  spec.count = draw.Coin(0.3) ? 255 : draw.Int(1, 20);
  spec.y_signed = draw.Coin();
  const float scale = draw.Real(0.01f, 1.0f);
  for (int64_t i = 0; i < spec.channels; ++i) {
    std::vector<float> row(static_cast<size_t>(spec.count));
    for (auto& t : row) t = (static_cast<float>(draw.Int(-300, 300)) + 0.5f) * scale;
    if (draw.Coin(0.2)) row[0] = std::numeric_limits<float>::infinity();
    if (draw.Coin(0.2)) row[0] = -std::numeric_limits<float>::infinity();
    std::sort(row.begin(), row.end());
    spec.thresholds.insert(spec.thresholds.end(), row.begin(), row.end());
    spec.dir.push_back(draw.Coin(0.7) ? 1.0f : -1.0f);
    spec.base.push_back(spec.y_signed ? -128 : 0);
  }
  FeedFloats(c, draw, scale, PlanesShape(draw, channels, node.to_channels_last));
  Finish(c, node);
  return c;
}

Case MakeDequantize(Draw& draw) {
  Case c;
  DequantizeNode node;
  node.to_channels_first = draw.Coin(0.7);
  const int64_t channels = draw.Coin(0.3) ? draw.Int(1, 4) : draw.Channels();
  node.spec = DrawAffine(draw, draw.Coin() ? channels : 1, false, true);
  node.spec.quantizer = Quantizer();
  node.spec.quantizer.quantized = false;
  std::vector<int64_t> dims = PlanesShape(draw, channels, node.to_channels_first);
  if (node.to_channels_first) std::rotate(dims.begin() + 1, dims.begin() + 2, dims.end());
  FeedCodes(c, draw, node.spec.x_signed, dims);
  Finish(c, node);
  return c;
}

using Maker = std::function<Case(Draw&)>;

const std::map<std::string, Maker>& Makers() {
  static const auto& makers = *new std::map<std::string, Maker>{
      {"affine", MakeAffine},
      {"affine_large", MakeLargeAffine},
      {"requantize", MakeRequantize},
      {"lookup", MakeLookup},
      {"add", [](Draw& draw) { return MakeBinary(draw, BinaryKind::kAdd); }},
      {"mapped_add", MakeMappedAdd},
      {"mul", [](Draw& draw) { return MakeBinary(draw, BinaryKind::kMul); }},
      {"fed_matmul", MakeFedMatmul},
      {"softmax_codes", MakeSoftmax},
      {"max_pool", MakeMaxPool},
      {"average_pool", MakeAveragePool},
      {"global_average_pool", MakeGlobalAveragePool},
      {"concat", MakeConcat},
      {"resize", MakeResize},
      {"image", MakeImage},
      {"depth_to_space", MakeDepthToSpace},
      {"quantize", MakeQuantize},
      {"threshold", MakeThreshold},
      {"dequantize", MakeDequantize},
  };
  return makers;
}

}  // namespace

std::span<const std::string> Kinds() {
  static const auto& kinds = *[] {
    auto* out = new std::vector<std::string>;
    for (const auto& [name, maker] : Makers()) out->push_back(name);
    return out;
  }();
  return kinds;
}

Case MakeCase(const std::string& kind, Draw& draw) {
  Case c = Makers().at(kind)(draw);
  c.kind = kind;
  return c;
}

}  // namespace lowbit::cuda::test
