// Shape inference of every op, from the schema's own words ("Shape of x.", "[N, D1.., C]").
#include <algorithm>
#include <cmath>
#include <map>

#include "core/node_reader.h"
#include "core/nodes/node_kinds.h"
#include "core/schema.h"
#include "core/status.h"

namespace lowbit {
namespace {

using Dims = std::vector<Dim>;

// What an inference function sees: one node without its constants' values.
struct Node {
  const OpSchema& schema;
  const AttributeReader& attributes;
  const std::vector<Shape>& inputs;
  const std::vector<bool>& present;

  size_t Index(std::string_view name) const {
    size_t i = 0;
    while (name != schema.inputs[i].name) ++i;
    return i;
  }
  bool Has(std::string_view name) const { return present[Index(name)]; }
  const Shape& X() const { return inputs[0]; }
};

bool SameDim(const Dim& a, const Dim& b) {
  return (a.value && b.value && *a.value == *b.value) || (!a.symbol.empty() && a.symbol == b.symbol);
}

void RequireRank(const Node& node, const Dims& dims, size_t rank) {
  Require(dims.size() == rank, node.schema.name, ": input '", node.schema.inputs[0].name, "' has rank ",
          dims.size(), ", expected ", rank);
}

// Applies `size` to a known dim. An unknown one survives, with its symbol, only where every size maps to
// itself.
template <typename Function>
Dim MapDim(const Dim& dim, bool identity, Function size) {
  if (dim.value) return {size(*dim.value), {}};
  return identity ? dim : Dim{};
}

// x, or as many unknown dims as the window says it must have.
Dims SpatialInput(const Node& node, const Window& window) {
  return node.X() ? *node.X() : Dims(static_cast<size_t>(window.spatial) + 2);
}

Dims MapSpatial(const Node& node, const Window& window, const Dim& channels, bool ceil_mode, bool transposed,
                const std::vector<int64_t>& output_padding) {
  const Dims x = SpatialInput(node, window);
  RequireRank(node, x, static_cast<size_t>(window.spatial) + 2);
  Dims y = {x[0]};
  for (int s = 0; s < window.spatial; ++s) {
    const int i = s + kMaxSpatial - window.spatial;
    const size_t d = static_cast<size_t>(i), axis = static_cast<size_t>(s) + 1;
    const int64_t extra = output_padding.empty() ? 0 : output_padding[static_cast<size_t>(s)];
    const bool same =
        window.stride[d] == 1 && window.pad_begin[d] + window.pad_end[d] == window.Extent(i) - 1 + extra;
    y.push_back(MapDim(x[axis], same, [&](int64_t size) {
      return transposed ? TransposedOutputSize(window, i, size, extra)
                        : WindowOutputSize(window, i, size, ceil_mode);
    }));
  }
  y.push_back(channels);
  return y;
}

Shape InferConv(const Node& node) {
  const bool transposed = std::string_view(node.schema.name) == "LowBitConvTranspose";
  const int64_t in_channels = node.attributes.Int("in_channels", 1, kMaxAttribute);
  const Dim channels = node.X() && !node.X()->empty() ? node.X()->back() : Dim{};
  Require(!channels.value || *channels.value == in_channels, node.schema.name, ": x has ",
          channels.value.value_or(0), " channels, attribute 'in_channels' says ", in_channels);
  const Window window = ReadWindow(node.attributes, true);
  Require(!transposed || window.spatial < 3, node.schema.name, ": attribute 'kernel_shape' has ",
          window.spatial, " numbers, expected 1 or 2");
  const std::vector<int64_t> padding =
      transposed ? node.attributes.Ints("output_padding") : std::vector<int64_t>{};
  Require(padding.empty() || static_cast<int>(padding.size()) == window.spatial, node.schema.name,
          ": attribute 'output_padding' has ", padding.size(), " numbers, expected ", window.spatial);
  return MapSpatial(node, window, {node.attributes.Int("out_channels", 1, kMaxAttribute), {}}, false,
                    transposed, padding);
}

// An axis beyond this is not worth a shape of that many unknown dims.
constexpr int64_t kMaxKnownAxis = 16;

Shape InferGemm(const Node& node) {
  const int64_t axis = node.attributes.Int("axis", -kMaxAttribute, kMaxAttribute);
  const Dim features{node.attributes.Int("out_features", 1, kMaxAttribute), {}};
  if (!node.X()) {  // a negative axis counts from the unknown end
    if (axis < 0 || axis > kMaxKnownAxis) return std::nullopt;
    Dims y(static_cast<size_t>(axis));
    y.push_back(features);
    return y;
  }
  const int64_t rank = static_cast<int64_t>(node.X()->size());
  const int64_t first = axis < 0 ? axis + rank : axis;
  Require(first >= 0 && first < rank, node.schema.name, ": attribute 'axis' is ", axis, ", x has rank ",
          rank);
  Dims y(node.X()->begin(), node.X()->begin() + first);
  y.push_back(features);
  return y;
}

Shape InferSameShape(const Node& node) { return node.X(); }

Dim BroadcastDim(const Node& node, const Dim& a, const Dim& b) {
  if (SameDim(a, b)) return a;
  if (a.value && *a.value == 1) return b;
  if (b.value && *b.value == 1) return a;
  Require(!a.value || !b.value, node.schema.name, ": dimensions ", a.value.value_or(0), " and ",
          b.value.value_or(0), " do not broadcast");
  // A known size above 1 wins over an unknown one, which can only be 1 or that size.
  if (a.value) return a;
  if (b.value) return b;
  return {};
}

Dims BroadcastShapes(const Node& node, const Dims& a, const Dims& b) {
  Dims y(std::max(a.size(), b.size()));
  const Dim one{1, {}};
  for (size_t i = 1; i <= y.size(); ++i) {
    const Dim& da = i <= a.size() ? a[a.size() - i] : one;
    const Dim& db = i <= b.size() ? b[b.size() - i] : one;
    y[y.size() - i] = BroadcastDim(node, da, db);
  }
  return y;
}

Shape InferBroadcast(const Node& node) {
  const Shape &a = node.inputs[node.Index("a")], &b = node.inputs[node.Index("b")];
  if (!a || !b) return std::nullopt;
  return BroadcastShapes(node, *a, *b);
}

// The dims of an operand of LowBitMatMul, permuted.
Dims PermutedDims(const Node& node, const char* input, const char* attribute) {
  const Dims& given = *node.inputs[node.Index(input)];
  const std::vector<int64_t>& permutation = node.attributes.Ints(attribute);
  Require(given.size() >= 2, node.schema.name, ": input '", input, "' has rank ", given.size(),
          ", expected at least 2");
  if (permutation.empty()) return given;
  Require(permutation.size() == given.size(), node.schema.name, ": attribute '", attribute, "' permutes ",
          permutation.size(), " dims, input '", input, "' has rank ", given.size());
  Dims dims;
  for (const int64_t axis : permutation) {
    Require(axis >= 0 && axis < static_cast<int64_t>(given.size()), node.schema.name, ": attribute '",
            attribute, "' holds ", axis);
    dims.push_back(given[static_cast<size_t>(axis)]);
  }
  return dims;
}

Shape InferMatMul(const Node& node) {
  if (!node.inputs[node.Index("a")] || !node.inputs[node.Index("b")]) return std::nullopt;
  Dims a = PermutedDims(node, "a", "a_perm"), b = PermutedDims(node, "b", "b_perm");
  const Dim &rows = a[a.size() - 2], &columns = b.back(), &a_depth = a.back(), &b_depth = b[b.size() - 2];
  Require(!a_depth.value || !b_depth.value || *a_depth.value == *b_depth.value, node.schema.name, ": ",
          a_depth.value.value_or(0), " columns of a meet ", b_depth.value.value_or(0), " rows of b");
  Dims y = BroadcastShapes(node, {a.begin(), a.end() - 2}, {b.begin(), b.end() - 2});
  y.push_back(rows);
  y.push_back(columns);
  return y;
}

Shape InferPool(const Node& node) {
  const bool dilations = std::string_view(node.schema.name) == "LowBitMaxPool";
  const Window window = ReadWindow(node.attributes, dilations);
  const Dim channels = node.X() && !node.X()->empty() ? node.X()->back() : Dim{};
  return MapSpatial(node, window, channels, node.attributes.Flag("ceil_mode"), false, {});
}

Shape InferGlobalPool(const Node& node) {
  if (!node.X()) return std::nullopt;
  const Dims& x = *node.X();
  Require(x.size() >= 2, node.schema.name, ": x has rank ", x.size(), ", expected at least 2");
  Dims y = {x.front()};
  if (node.attributes.Flag("keepdims")) y.insert(y.end(), x.size() - 2, Dim{1, {}});
  y.push_back(x.back());
  return y;
}

Shape InferConcat(const Node& node) {
  const size_t first = node.Index("x");
  const auto known = std::find_if(node.inputs.begin() + static_cast<std::ptrdiff_t>(first), node.inputs.end(),
                                  [](const Shape& s) { return s.has_value(); });
  if (known == node.inputs.end()) return std::nullopt;
  Dims y = **known;
  const int64_t rank = static_cast<int64_t>(y.size());
  Require(rank >= 1, node.schema.name, ": the inputs are scalars");
  const int64_t given = node.attributes.Int("axis", -rank, rank - 1);
  const size_t axis = static_cast<size_t>(given < 0 ? given + rank : given);

  int64_t sum = 0;
  bool sum_known = true;
  for (size_t i = first; i < node.inputs.size(); ++i) {
    if (!node.inputs[i]) {
      sum_known = false;
      continue;
    }
    const Dims& x = *node.inputs[i];
    Require(x.size() == y.size(), node.schema.name, ": inputs of rank ", y.size(), " and ", x.size());
    for (size_t d = 0; d < y.size(); ++d) {
      if (d == axis) continue;
      Require(!x[d].value || !y[d].value || *x[d].value == *y[d].value, node.schema.name, ": input ",
              i - first, " has ", x[d].value.value_or(0), " in dimension ", d, ", expected ",
              y[d].value.value_or(0));
      if (x[d].value) y[d] = x[d];
    }
    if (x[axis].value) {
      Require(!__builtin_add_overflow(sum, *x[axis].value, &sum), node.schema.name,
              ": the joined dimension overflows");
    } else {
      sum_known = false;
    }
  }
  if (node.inputs.size() > first + 1) y[axis] = sum_known ? Dim{sum, {}} : Dim{};
  return y;
}

Shape InferNormalization(const Node& node) {
  if (!node.X()) return std::nullopt;
  const int64_t rank = static_cast<int64_t>(node.X()->size());
  Require(rank >= 1, node.schema.name, ": x is a scalar, expected rank 1 or more");
  node.attributes.Int("axis", -rank, rank - 1);
  return node.X();
}

Shape InferResize(const Node& node) {
  if (!node.X()) return std::nullopt;
  const Dims& x = *node.X();
  Require(x.size() >= 3, node.schema.name, ": x has rank ", x.size(), ", expected at least 3");
  const std::vector<float>& scales = node.attributes.Floats("scales");
  const std::vector<int64_t>& sizes = node.attributes.Ints("sizes");
  const size_t spatial = x.size() - 2, given = scales.empty() ? sizes.size() : scales.size();
  Require(given == spatial, node.schema.name, ": ", given, " scales or sizes for ", spatial,
          " spatial dimensions");
  Dims y = {x.front()};
  for (size_t i = 0; i < spatial; ++i) {
    if (scales.empty()) {
      Require(sizes[i] >= 1 && sizes[i] <= kMaxAttribute, node.schema.name, ": attribute 'sizes' holds ",
              sizes[i]);
      y.push_back({sizes[i], {}});
      continue;
    }
    const float scale = scales[i];
    Require(std::isfinite(scale) && scale > 0 && scale <= float(1 << 20), node.schema.name,
            ": attribute 'scales' holds ", scale, ", expected a finite scale > 0");
    y.push_back(MapDim(x[i + 1], scale == 1.0f, [&](int64_t size) {
      const float out = std::floor(static_cast<float>(size) * scale);
      Require(out >= 1 && out <= static_cast<float>(kMaxAttribute), node.schema.name, ": scale ", scale,
              " makes ", out, " of ", size, " pixels");
      return static_cast<int64_t>(out);
    }));
  }
  y.push_back(x.back());
  return y;
}

Shape InferSoftmax(const Node& node) {
  if (!node.X()) return std::nullopt;
  const int64_t rank = static_cast<int64_t>(node.X()->size());
  Require(rank >= 1, node.schema.name, ": x is a scalar");
  static_cast<void>(node.attributes.Int("axis", -rank, rank - 1));
  return node.X();
}

bool HasAttribute(const OpSchema& schema, std::string_view name) {
  return FindAttribute(schema, name) != nullptr;
}

Shape InferDepthToSpace(const Node& node) {
  const int64_t block = node.attributes.Int("blocksize", 1, kMaxAttribute);
  if (!node.X()) return Dims(4);
  Dims y = *node.X();
  RequireRank(node, y, 4);
  for (const size_t axis : {1, 2}) {
    y[axis] = MapDim(y[axis], block == 1,
                     [&](int64_t size) { return CheckedProduct(size, block, "the output's size"); });
  }
  y[3] = MapDim(y[3], block == 1, [&](int64_t channels) {
    Require(channels % (block * block) == 0, node.schema.name, ": x has ", channels,
            " channels, expected a multiple of ", block * block);
    return channels / (block * block);
  });
  return y;
}

Shape InferImage(const Node& node) {
  const ImageNode sizes = ReadImageSizes(node.attributes);
  Dims y(4);
  if (node.X()) {
    RequireRank(node, *node.X(), 4);
    y = *node.X();
  }
  y[3] = {sizes.Channels(), {}};
  std::optional<ImageNode::Size> output = sizes.crop        ? sizes.crop
                                          : sizes.letterbox ? sizes.letterbox
                                                            : sizes.exact;
  if (y[1].value && y[2].value) output = sizes.PlacementOf({*y[1].value, *y[2].value}).output;
  if (output) {
    y[1] = {output->height, {}};
    y[2] = {output->width, {}};
  } else if (sizes.shorter_side) {
    y[1] = y[2] = {};
  }
  return y;
}

// Channels move between place 1 and the last place.
Shape InferMovedChannels(const Node& node) {
  if (!node.X()) return std::nullopt;
  const bool to_last = HasAttribute(node.schema, "to_channels_last");
  Dims y = *node.X();
  if (!node.attributes.Flag(to_last ? "to_channels_last" : "to_channels_first")) return y;
  Require(y.size() >= 2, node.schema.name, ": x has rank ", y.size(), ", expected at least 2");
  if (to_last) {
    std::rotate(y.begin() + 1, y.begin() + 2, y.end());
  } else {
    std::rotate(y.begin() + 1, y.end() - 1, y.end());
  }
  return y;
}

using InferFunction = Shape (*)(const Node&);
const std::map<std::string_view, InferFunction>& InferFunctions() {
  static const std::map<std::string_view, InferFunction> functions = {
      {"LowBitConv", InferConv},
      {"APConv", InferConv},
      {"LowBitConvTranspose", InferConv},
      {"LowBitGemm", InferGemm},
      {"APGemm", InferGemm},
      {"LowBitAffine", InferSameShape},
      {"LowBitLookup", InferSameShape},
      {"LowBitAdd", InferBroadcast},
      {"LowBitMul", InferBroadcast},
      {"LowBitMatMul", InferMatMul},
      {"LowBitMaxPool", InferPool},
      {"LowBitAveragePool", InferPool},
      {"LowBitGlobalAveragePool", InferGlobalPool},
      {"LowBitConcat", InferConcat},
      {"LowBitNormalization", InferNormalization},
      {"LowBitResize", InferResize},
      {"LowBitImage", InferImage},
      {"LowBitDepthToSpace", InferDepthToSpace},
      {"LowBitSoftmax", InferSoftmax},
      {"LowBitRequantize", InferSameShape},
      {"LowBitQuantize", InferMovedChannels},
      {"LowBitThreshold", InferMovedChannels},
      {"LowBitDequantize", InferMovedChannels},
  };
  return functions;
}

// A matmul says by its epilogue what it writes; the other ops by whether they are given a y_scale.
bool WritesFloat(const Node& node) {
  if (node.schema.output_type == TypeRule::kFloat) return true;
  if (node.schema.output_type != TypeRule::kCodesOrFloat) return false;
  if (HasAttribute(node.schema, "epilogue")) {
    const std::string& epilogue = node.attributes.String("epilogue");
    return epilogue == "float" || (epilogue == "tail" && !node.Has("y_scale"));
  }
  return !node.Has("y_scale");
}

ElementType InferType(const Node& node) {
  if (WritesFloat(node)) return ElementType::kFloat;
  // Ops that only move codes have no y_encoding, or do not read it: their output is stored as their input.
  const bool moves =
      std::string_view(node.schema.name) == "LowBitResize" && node.attributes.String("mode") == "nearest";
  const char* encoding = !moves && HasAttribute(node.schema, "y_encoding") ? "y_encoding" : "x_encoding";
  return StorageOf(node.attributes.EncodingOf(encoding));
}

}  // namespace

InferredOutput InferOutput(const OpSchema& schema, const AttributeMap& attributes,
                           const std::vector<Shape>& inputs, const std::vector<bool>& present) {
  Require(inputs.size() == present.size() && inputs.size() >= schema.inputs.size(), schema.name, ": ",
          inputs.size(), " inputs, expected ", schema.inputs.size());
  const AttributeReader reader(schema, attributes);
  const Node node{schema, reader, inputs, present};
  const auto infer = InferFunctions().find(schema.name);
  Require(infer != InferFunctions().end(), schema.name, ": no shape inference");
  return {infer->second(node), InferType(node)};
}

}  // namespace lowbit
