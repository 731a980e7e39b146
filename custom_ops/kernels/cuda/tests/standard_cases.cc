// Random standard nodes; what they must give is computed here by plain loops, sums in double.
#include <functional>
#include <map>

#include "core/status.h"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/tests/node_cases.h"

namespace lowbit::cuda::test {
namespace {

using Dims = std::vector<int64_t>;

// Calls fn(index) for every index of a tensor, in order.
void ForEachIndex(const Dims& dims, const std::function<void(const Dims&)>& fn) {
  Dims index(dims.size(), 0);
  for (int64_t left = Count(dims); left > 0; --left) {
    fn(index);
    for (size_t d = dims.size(); d-- > 0;) {
      if (++index[d] < dims[d]) break;
      index[d] = 0;
    }
  }
}

int64_t OffsetOf(const Dims& dims, const Dims& index) {
  int64_t offset = 0;
  for (size_t d = 0; d < dims.size(); ++d) offset = offset * dims[d] + index[d];
  return offset;
}

const float* FloatsOf(const std::vector<uint8_t>& bytes) {
  return reinterpret_cast<const float*>(bytes.data());
}

void FeedAny(Case& c, Draw& draw, ElementType type, Dims dims) {
  c.data.push_back(draw.Codes(Count(dims) * static_cast<int64_t>(ElementSize(type))));
  c.fed.push_back({type, std::move(dims)});
}
void FeedReals(Case& c, Draw& draw, Dims dims) {
  std::vector<float> values(static_cast<size_t>(Count(dims)));
  for (auto& v : values) v = draw.Real(-4, 4);
  c.data.push_back(Bytes(values));
  c.fed.push_back({ElementType::kFloat, std::move(dims)});
}

// The output where every element of y is the element of x that `source` names, or `fill`.
using Source = std::function<std::optional<int64_t>(const Dims& index)>;
void FinishMove(Case& c, StandardNode node, const Source& source, const std::vector<uint8_t>& fill = {}) {
  c.y = OutputOf(node, c.fed);
  c.node = std::move(node);
  const size_t size = ElementSize(c.y.type);
  ForEachIndex(c.y.dims, [&](const Dims& index) {
    const std::optional<int64_t> from = source(index);
    const uint8_t* element = from ? c.data[0].data() + static_cast<size_t>(*from) * size : fill.data();
    c.expected.insert(c.expected.end(), element, element + size);
  });
}

// The output where every element of y is a number.
using Value = std::function<double(const Dims& index)>;
void FinishReals(Case& c, StandardNode node, float tolerance, const Value& value) {
  c.y = OutputOf(node, c.fed);
  c.node = std::move(node);
  c.tolerance = tolerance;
  std::vector<float> y;
  ForEachIndex(c.y.dims, [&](const Dims& index) { y.push_back(static_cast<float>(value(index))); });
  c.expected = Bytes(y);
}

ElementType DrawType(Draw& draw) { return draw.Coin() ? ElementType::kUInt8 : ElementType::kFloat; }

Case MakeCopy(Draw& draw) {
  Case c;
  const Dims dims = draw.Shape(draw.Channels());
  FeedAny(c, draw, DrawType(draw), dims);
  FinishMove(c, ReshapeOp{ReshapeOp::Kind::kReshape, {-1}, true, 1},
             [](const Dims& index) { return index[0]; });
  return c;
}

Case MakeTranspose(Draw& draw) {
  Case c;
  Dims dims = draw.Shape(draw.Channels());
  if (draw.Coin(0.3)) dims = {draw.Int(1, 2), draw.Int(30, 70), draw.Int(5, 12), draw.Int(5, 12)};
  TransposeOp op;
  for (size_t i = 0; i < dims.size(); ++i) op.perm.push_back(static_cast<int64_t>(i));
  for (size_t i = 0; i + 1 < dims.size(); ++i) {
    std::swap(op.perm[i], op.perm[static_cast<size_t>(
                              draw.Int(static_cast<int64_t>(i), static_cast<int64_t>(dims.size()) - 1))]);
  }
  const Dims perm = op.perm;
  if (draw.Coin(0.1)) op.perm.clear();
  const bool reversed = op.perm.empty();
  FeedAny(c, draw, DrawType(draw), dims);
  FinishMove(c, op, [&](const Dims& index) {
    Dims from(index.size());
    for (size_t i = 0; i < index.size(); ++i) {
      from[reversed ? index.size() - 1 - i : static_cast<size_t>(perm[i])] = index[i];
    }
    return OffsetOf(dims, from);
  });
  return c;
}

Case MakeSlice(Draw& draw) {
  Case c;
  const Dims dims = draw.Shape(draw.Coin() ? 32 : draw.Channels());
  SliceOp op;
  Dims begin(dims.size(), 0), step(dims.size(), 1);
  for (size_t i = 0; i < dims.size(); ++i) {
    if (draw.Coin(0.4)) continue;
    const bool back = draw.Coin(0.3);
    begin[i] = draw.Int(0, dims[i] - 1);
    step[i] = draw.Int(1, 3) * (back ? -1 : 1);
    op.starts.push_back(draw.Coin() ? begin[i] : begin[i] - dims[i]);
    op.ends.push_back(back ? -1000 : 1000);
    op.axes.push_back(draw.Coin() ? static_cast<int64_t>(i)
                                  : static_cast<int64_t>(i) - static_cast<int64_t>(dims.size()));
    op.steps.push_back(step[i]);
  }
  FeedAny(c, draw, DrawType(draw), dims);
  FinishMove(c, op, [&](const Dims& index) {
    Dims from(index.size());
    for (size_t i = 0; i < index.size(); ++i) from[i] = begin[i] + index[i] * step[i];
    return OffsetOf(dims, from);
  });
  return c;
}

Case MakeSplit(Draw& draw) {
  Case c;
  const Dims dims = draw.Shape(draw.Coin() ? 32 : draw.Channels());
  const auto axis = static_cast<size_t>(draw.Int(0, static_cast<int64_t>(dims.size()) - 1));
  SplitOp op;
  op.axis = static_cast<int64_t>(axis) - (draw.Coin() ? static_cast<int64_t>(dims.size()) : 0);
  op.parts = draw.Int(1, 4);
  op.part = draw.Int(0, op.parts - 1);
  int64_t begin = 0;
  if (draw.Coin()) {
    int64_t left = dims[axis];
    for (int64_t i = 0; i < op.parts; ++i) {
      op.sizes.push_back(i + 1 == op.parts ? left : draw.Int(0, left));
      if (i < op.part) begin += op.sizes.back();
      left -= op.sizes.back();
    }
  } else {
    op.uneven = draw.Coin();
    begin = op.part * ((dims[axis] + op.parts - 1) / op.parts);
  }
  FeedAny(c, draw, DrawType(draw), dims);
  FinishMove(c, op, [&](const Dims& index) {
    Dims from = index;
    from[axis] += begin;
    return OffsetOf(dims, from);
  });
  return c;
}

Case MakePad(Draw& draw) {
  Case c;
  const bool round = draw.Coin();
  const Dims dims = draw.Shape(round ? 16 * draw.Int(1, 3) : draw.Channels());
  PadOp op;
  const size_t rank = dims.size();
  op.pads.assign(2 * rank, 0);
  for (size_t i = 0; i < 2 * rank; ++i) {
    if (draw.Coin()) op.pads[i] = draw.Int(0, 3) * (round && i % rank == rank - 1 ? 16 : 1);
  }
  const ElementType type = DrawType(draw);
  op.value = draw.Codes(static_cast<int64_t>(ElementSize(type)));
  FeedAny(c, draw, type, dims);
  FinishMove(
      c, op,
      [&](const Dims& index) -> std::optional<int64_t> {
        Dims from(index.size());
        for (size_t i = 0; i < index.size(); ++i) {
          from[i] = index[i] - op.pads[i];
          if (from[i] < 0 || from[i] >= dims[i]) return std::nullopt;
        }
        return OffsetOf(dims, from);
      },
      op.value);
  return c;
}

Case MakeNearest(Draw& draw) {
  Case c;
  Dims dims = draw.Shape(draw.Coin() ? 32 : draw.Channels());
  if (dims.size() > 4) dims.erase(dims.begin());
  NearestOp op;
  op.along.coordinates = ResizeNode::Coordinates::kAsymmetric;
  op.along.nearest = ResizeNode::Nearest::kFloor;
  Dims times(dims.size(), 1), part(dims.size(), 1);  // larger or smaller by a whole number
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i + 1 < dims.size() || draw.Coin(0.2)) times[i] = draw.Int(1, 3);
    if (times[i] == 1 && draw.Coin(0.2)) part[i] = draw.Int(1, std::min<int64_t>(dims[i], 4));
    dims[i] = dims[i] / part[i] * part[i];
    if (times[i] == part[i] && draw.Coin()) continue;
    op.axes.push_back(static_cast<int64_t>(i) - (draw.Coin() ? static_cast<int64_t>(dims.size()) : 0));
    op.along.sizes.push_back(dims[i] * times[i] / part[i]);
  }
  if (op.axes.empty()) {
    op.along.sizes = dims;
  } else if (draw.Coin()) {
    for (const int64_t axis : op.axes) {
      const size_t i = AxisOf(axis, dims.size());
      op.along.scales.push_back(static_cast<float>(times[i]) / static_cast<float>(part[i]));
    }
    op.along.sizes.clear();
  }
  FeedAny(c, draw, DrawType(draw), dims);
  FinishMove(c, op, [&](const Dims& index) {
    Dims from(index.size());
    for (size_t i = 0; i < index.size(); ++i) from[i] = index[i] / times[i] * part[i];
    return OffsetOf(dims, from);
  });
  return c;
}

Case MakeJoin(Draw& draw) {
  Case c;
  const Dims dims = draw.Shape(draw.Coin() ? 32 : draw.Channels());
  const auto axis = static_cast<size_t>(draw.Int(0, static_cast<int64_t>(dims.size()) - 1));
  const ElementType type = DrawType(draw);
  std::vector<uint8_t> joined;
  Dims begins = {0};
  for (int64_t i = draw.Int(1, 4); i > 0; --i) {
    Dims own = dims;
    own[axis] = draw.Int(1, 40);
    begins.push_back(begins.back() + own[axis]);
    FeedAny(c, draw, type, own);
  }
  const JoinOp op{static_cast<int64_t>(axis)};
  c.y = OutputOf(StandardNode(op), c.fed);
  c.node = op;
  ForEachIndex(c.y.dims, [&](const Dims& index) {
    size_t part = 0;
    while (index[axis] >= begins[part + 1]) ++part;
    Dims from = index;
    from[axis] -= begins[part];
    const size_t size = ElementSize(type);
    const uint8_t* element =
        c.data[part].data() + static_cast<size_t>(OffsetOf(c.fed[part].dims, from)) * size;
    c.expected.insert(c.expected.end(), element, element + size);
  });
  return c;
}

Case MakeSoftmax(Draw& draw) {
  Case c;
  Dims dims = {draw.Int(1, 4), draw.Int(1, 4), draw.Coin(0.1) ? draw.Int(500, 3000) : draw.Channels()};
  dims.erase(dims.begin(), dims.begin() + draw.Int(0, 2));
  SoftmaxOp op;
  op.axis = draw.Coin() ? -1 : draw.Int(0, static_cast<int64_t>(dims.size()) - 1);
  op.log = draw.Coin(0.3);
  op.flattened = draw.Coin(0.3);
  FeedReals(c, draw, dims);
  const size_t axis = AxisOf(op.axis, dims.size());
  const float* x = FloatsOf(c.data[0]);
  const int64_t inner =
      op.flattened ? 1 : Count(Dims(dims.begin() + static_cast<int64_t>(axis) + 1, dims.end()));
  const int64_t size =
      op.flattened ? Count(Dims(dims.begin() + static_cast<int64_t>(axis), dims.end())) : dims[axis];
  FinishReals(c, op, op.log ? 2e-6f : 1e-6f, [&](const Dims& index) {
    const int64_t at = OffsetOf(dims, index), first = at / (size * inner) * size * inner + at % inner;
    double largest = -1e30, sum = 0;
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, double{x[first + i * inner]});
    for (int64_t i = 0; i < size; ++i) sum += std::exp(x[first + i * inner] - largest);
    const double shifted = x[at] - largest;
    return op.log ? shifted - std::log(sum) : std::exp(shifted) / sum;
  });
  return c;
}

double UnaryValue(const UnaryOp& op, double v) {
  switch (op.kind) {
    case UnaryKind::kRelu:
      return std::max(v, 0.0);
    case UnaryKind::kClip:
      return std::min<double>(std::max<double>(v, op.a), op.b);
    case UnaryKind::kSigmoid:
      return 1 / (1 + std::exp(-v));
    case UnaryKind::kTanh:
      return std::tanh(v);
    case UnaryKind::kLeakyRelu:
      return v < 0 ? op.a * v : v;
    case UnaryKind::kHardSigmoid:
      return std::min(1.0, std::max(0.0, op.a * v + op.b));
    case UnaryKind::kHardSwish:
      return v * std::min(1.0, std::max(0.0, v / 6 + 0.5));
  }
  return v;
}

Case MakeUnary(Draw& draw) {
  Case c;
  const UnaryOp op{static_cast<UnaryKind>(draw.Int(0, 6)), draw.Real(-1, 0.5f), draw.Real(0.6f, 2)};
  FeedReals(c, draw, draw.Shape(draw.Channels()));
  const float* x = FloatsOf(c.data[0]);
  FinishReals(c, op, 2e-6f,
              [&](const Dims& index) { return UnaryValue(op, x[OffsetOf(c.fed[0].dims, index)]); });
  return c;
}

// Makes infinite what is no number: which bits a NaN gets is the device's choice.
template <typename Word>
void KeepNumbers(std::vector<uint8_t>& bytes, Word exponent, Word mantissa) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(Word)) {
    Word word = 0;
    std::memcpy(&word, &bytes[at], sizeof word);
    if ((word & exponent) == exponent) word &= static_cast<Word>(~mantissa);
    std::memcpy(&bytes[at], &word, sizeof word);
  }
}

Case MakeCast(Draw& draw) {
  Case c;
  const auto from = static_cast<ElementType>(draw.Int(0, 4));
  const CastOp op{from == ElementType::kFloat ? ElementType::kFloat16 : ElementType::kFloat};
  const Dims dims = draw.Shape(draw.Channels());
  if (from == ElementType::kFloat && draw.Coin()) {
    FeedReals(c, draw, dims);
  } else {
    FeedAny(c, draw, from, dims);  // any bits: numbers of all sizes, infinite ones
    if (from == ElementType::kFloat16) KeepNumbers<uint16_t>(c.data[0], 0x7C00, 0x03FF);
    if (from == ElementType::kFloat) KeepNumbers<uint32_t>(c.data[0], 0x7F800000, 0x007FFFFF);
  }
  c.y = OutputOf(StandardNode(op), c.fed);
  c.node = op;
  std::vector<float> y;
  for (int64_t i = 0; i < Count(dims); ++i) y.push_back(static_cast<float>(NumberAt(c.data[0], from, i)));
  std::vector<uint16_t> halves(y.size());
  std::transform(y.begin(), y.end(), halves.begin(), ToHalf);
  c.expected = op.to == ElementType::kFloat16 ? Bytes(halves) : Bytes(y);
  return c;
}

Dims Operand(Draw& draw, const Dims& y) {
  if (draw.Coin(0.3)) return y;
  Dims dims(y.begin() + draw.Int(0, static_cast<int64_t>(y.size())), y.end());
  for (auto& d : dims) {
    if (draw.Coin(0.35)) d = 1;
  }
  return dims;
}

float ElementAt(const Dims& dims, const std::vector<uint8_t>& data, const Dims& index) {
  int64_t offset = 0;
  for (size_t d = 0; d < dims.size(); ++d) {
    offset = offset * dims[d] + (dims[d] == 1 ? 0 : index[index.size() - dims.size() + d]);
  }
  return FloatsOf(data)[offset];
}

// With a LowBitQuantize behind the node.
void QuantizeOutput(Case& c, Draw& draw) {
  const Quantizer q = draw.Grid();
  c.quantizer = QuantizeNode{.grids = {q}};
  c.y.type = q.is_signed ? ElementType::kInt8 : ElementType::kUInt8;
  std::vector<uint8_t> codes;
  for (int64_t i = 0; i < Count(c.y.dims); ++i) {
    const float rounded = std::rint(FloatsOf(c.expected)[i] / q.scale) + static_cast<float>(q.zero_point);
    const float code = std::fmin(std::fmax(rounded, static_cast<float>(q.lo)), static_cast<float>(q.hi));
    codes.push_back(static_cast<uint8_t>(static_cast<int32_t>(code)));
  }
  c.expected = std::move(codes);
}

Case MakeFloatBinary(Draw& draw) {
  Case c;
  const FloatBinaryOp op{static_cast<FloatBinaryKind>(draw.Int(0, 3))};
  const Dims shape = draw.Shape(draw.Channels());
  FeedReals(c, draw, Operand(draw, shape));
  FeedReals(c, draw, Operand(draw, shape));
  FinishReals(c, op, 0, [&](const Dims& index) -> double {
    const float a = ElementAt(c.fed[0].dims, c.data[0], index);
    const float b = ElementAt(c.fed[1].dims, c.data[1], index);
    switch (op.kind) {
      case FloatBinaryKind::kAdd:
        return a + b;
      case FloatBinaryKind::kSub:
        return a - b;
      case FloatBinaryKind::kMul:
        return a * b;
      case FloatBinaryKind::kDiv:
        return a / b;
    }
    return 0;
  });
  if (draw.Coin(0.4)) QuantizeOutput(c, draw);
  return c;
}

std::vector<float> Reals(Draw& draw, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  for (auto& v : out) v = draw.Real(-1, 1);
  return out;
}

// Operands as Tensor Cores get them; the two numbers of 3xtf32 have as many bits as float32, but for one.
std::function<double(float)> OperandOf(FloatPrecision precision) {
  return [precision](float v) {
    if (precision == FloatPrecision::kFloat16) return double{FromHalf(ToHalf(v))};
    return double{precision == FloatPrecision::kTf32 ? RoundToTf32(v) : v};
  };
}

void DrawProduct(Draw& draw, Case& c) {
  c.precision = draw.Of({FloatPrecision::kFloat32, FloatPrecision::kWinograd, FloatPrecision::k3xTf32,
                         FloatPrecision::kTf32, FloatPrecision::kFloat16});
  if (draw.Coin(0.4))
    c.activation = draw.Coin() ? UnaryOp{UnaryKind::kRelu} : UnaryOp{UnaryKind::kClip, -1, 2};
}
double Activated(const Case& c, double v) { return c.activation ? UnaryValue(*c.activation, v) : v; }
// What a sum of products is made of.
struct Term {
  float x, w;
};
using TermAt = std::function<Term(int64_t k)>;

// In float32, as the kernels promise it: tiles change no bit.
float SumOf(const SumSlices& slices, int64_t length, const TermAt& term) {
  std::vector<float> sums;
  for (int64_t slice = 0; slice < slices.count; ++slice) {
    float sum = 0;
    const auto begin = [&](int64_t s) {
      return std::min(length, s * slices.steps / slices.count * slices.step);
    };
    for (int64_t k = begin(slice); k < begin(slice + 1); ++k) {
      const auto [x, w] = term(slices.ElementAt(k));
      sum = std::fma(w, x, sum);
    }
    sums.push_back(sum);
  }
  for (; sums.size() > 1; sums.resize((sums.size() + 1) / 2)) {
    for (size_t i = 0; 2 * i < sums.size(); ++i) {
      sums[i] = 2 * i + 1 < sums.size() ? sums[2 * i] + sums[2 * i + 1] : sums[2 * i];
    }
  }
  return sums[0];
}

// Whether a node's products are other numbers than those of its operands.
bool IsTransformed(const FloatGemmOp&, FloatPrecision) { return false; }
bool IsTransformed(const FloatConvOp& op, FloatPrecision precision) {
  return precision == FloatPrecision::kWinograd && HasWinograd(op);
}

// What a fed tensor is added to: of the same dims, of others that become those, or of one dim more.
std::vector<float> WithAdded(Case& c, Draw& draw, const std::vector<float>& sums) {
  const Dims made = c.y.dims;
  Dims dims = draw.Coin(0.6) ? made : Operand(draw, made);
  if (draw.Coin(0.1)) dims = made, dims.insert(dims.begin(), 2);
  FeedReals(c, draw, dims);
  c.adds = true;
  const TensorShape operands[] = {c.y, c.fed[1]};
  c.y = OutputOf(StandardNode(FloatBinaryOp{}), operands);
  std::vector<float> out;
  ForEachIndex(c.y.dims, [&](const Dims& index) {
    const auto in = [&](const Dims& operand) {
      Dims own(index.end() - static_cast<std::ptrdiff_t>(operand.size()), index.end());
      for (size_t d = 0; d < own.size(); ++d) own[d] = operand[d] == 1 ? 0 : own[d];
      return OffsetOf(operand, own);
    };
    out.push_back(sums[static_cast<size_t>(in(made))] + FloatsOf(c.data[1])[in(dims)]);
  });
  return out;
}

// The products of a node, term(index, k) of the output at an index and its bias, as its kernels make them: in float32 in
// every bit, on Tensor Cores and where they are transformed within a tolerance.
template <typename Op, typename TermOf, typename BiasOf>
void FinishProducts(Case& c, Draw& draw, const Op& op, int64_t length, int tiles, const TermOf& term,
                    const BiasOf& bias) {
  const bool is_transformed = IsTransformed(op, c.precision);
  const bool has_units = HasTensorProduct(op, draw.RunsOn(), c.precision);
  if (!is_transformed) c.tiling.emplace();
  constexpr int64_t kFewProducts = 128;  // kernels that are no tiles may sum those
  if (draw.Coin(length <= kFewProducts ? 0.6 : 0.8)) {
    const auto slices = static_cast<int>(is_transformed || has_units ? 1 << draw.Int(0, 4) : draw.Int(1, 64));
    if (is_transformed) {
      c.winograd = WinogradTiling{draw.Coin() ? 2 : 4, slices,
                                  static_cast<int>(draw.Int(-1, WinogradTiling::kTiles - 1))};
    } else {
      *c.tiling = {static_cast<int>(draw.Int(0, (has_units ? FloatTiling::kTensorTiles : tiles) - 1)),
                   slices};
    }
    c.is_older = draw.Coin(0.3);
  }
  if (is_transformed || has_units) {
    const auto operand = OperandOf(c.precision);
    double largest = 0;
    FinishReals(c, op, 0, [&](const Dims& index) {
      double magnitude = 0;
      double sum = bias(index);
      for (int64_t k = 0; k < length; ++k) {
        const auto [x, w] = term(index, k);
        const double product = operand(x) * operand(w);
        sum += product, magnitude += std::fabs(product);
      }
      largest = std::max(largest, magnitude);
      return sum;
    });
    // Of the sum of all magnitudes: Tensor Cores add in an order of their own, transformed numbers are larger.
    c.tolerance = static_cast<float>(std::max(1.0, largest) * (is_transformed ? 0x1p-17 : 0x1p-19));
  } else {
    const SumSlices slices = SlicesOf(op, c.fed[0], OutputOf(StandardNode(op), c.fed), *c.tiling);
    FinishReals(c, op, 0, [&](const Dims& index) {
      return SumOf(slices, length, [&](int64_t k) { return term(index, k); }) + bias(index);
    });
  }
  std::vector<float> sums(FloatsOf(c.expected), FloatsOf(c.expected) + Count(c.y.dims));
  if (draw.Coin(0.4)) sums = WithAdded(c, draw, sums);
  for (float& sum : sums) sum = static_cast<float>(Activated(c, sum));
  c.expected = Bytes(sums);
}

Case MakeGemm(Draw& draw) {
  Case c;
  DrawProduct(draw, c);
  FloatGemmOp op;
  op.k = draw.Int(1, 300);
  op.n = draw.Int(1, 150);
  op.is_matmul = draw.Coin();
  op.transpose_a = !op.is_matmul && draw.Coin();
  op.weights = Reals(draw, op.k * op.n);
  if (!op.is_matmul && draw.Coin()) op.bias = Reals(draw, op.n);
  const int64_t m = draw.Coin() ? draw.Int(1, 32) : draw.Int(33, 150);
  if (op.is_matmul && draw.Coin()) {
    FeedReals(c, draw, {draw.Int(1, 4), m, op.k});
  } else {
    FeedReals(c, draw, op.transpose_a ? Dims{op.k, m} : Dims{m, op.k});
  }
  const float* x = FloatsOf(c.data[0]);
  const auto term = [&](const Dims& index, int64_t k) {
    int64_t j = 0;
    for (size_t d = 0; d + 1 < index.size(); ++d) j = j * c.y.dims[d] + index[d];
    return Term{x[op.transpose_a ? k * m + j : j * op.k + k],
                op.weights[static_cast<size_t>(index.back() * op.k + k)]};
  };
  FinishProducts(c, draw, op, op.k, FloatTiling::kTiles, term, [&](const Dims& index) {
    return op.bias.empty() ? 0 : op.bias[static_cast<size_t>(index.back())];
  });
  return c;
}

// Dims before the last two of either operand are those of the other, 1 or missing.
Case MakeMatmul(Draw& draw) {
  Case c;
  DrawProduct(draw, c);
  const int64_t m = draw.Int(1, 80), k = draw.Coin(0.05) ? 0 : draw.Int(1, 100), n = draw.Int(1, 80);
  Dims a = draw.Coin(0.3) ? Dims{}
           : draw.Coin()  ? Dims{draw.Int(1, 4)}
                          : Dims{draw.Int(1, 3), draw.Int(1, 4)};
  Dims b = a;
  for (Dims* const batch : {&a, &b}) {
    if (draw.Coin(0.2)) batch->clear();
    for (int64_t& dim : *batch) dim = draw.Coin(0.8) ? dim : 1;
  }
  const Dims a_batch = a, b_batch = b;
  a.insert(a.end(), {m, k});
  b.insert(b.end(), {k, n});
  FeedReals(c, draw, a);
  FeedReals(c, draw, b);
  const float *left = FloatsOf(c.data[0]), *right = FloatsOf(c.data[1]);
  // Where an operand has the matrix for these dims of the output.
  const auto matrix_of = [](const Dims& batch, const Dims& index) {
    Dims own(index.end() - 2 - static_cast<std::ptrdiff_t>(batch.size()), index.end() - 2);
    for (size_t d = 0; d < own.size(); ++d) own[d] = batch[d] == 1 ? 0 : own[d];
    return OffsetOf(batch, own);
  };
  FinishReals(c, FloatMatmulOp{}, 2e-5f, [&](const Dims& index) {
    const int64_t i = index[index.size() - 2], j = index.back();
    const float* const row = left + (matrix_of(a_batch, index) * m + i) * k;
    const float* const column = right + matrix_of(b_batch, index) * k * n + j;
    double sum = 0;
    for (int64_t at = 0; at < k; ++at) sum += double{row[at]} * double{column[at * n]};
    return Activated(c, sum);
  });
  return c;
}

Window DrawWindow(Draw& draw, int64_t most) {
  Window w;
  w.spatial = draw.Coin(0.8) ? 2 : 1;
  for (size_t d = w.spatial == 2 ? 1 : 2; d < kMaxSpatial; ++d) {
    w.kernel[d] = draw.Int(1, most);
    w.stride[d] = draw.Int(1, 3);
    w.dilation[d] = draw.Coin(0.7) ? 1 : draw.Int(2, 3);
    w.pad_begin[d] = draw.Int(0, w.kernel[d] - 1);
    w.pad_end[d] = draw.Int(0, w.kernel[d] - 1);
  }
  return w;
}

Dims PlanesShape(Draw& draw, int64_t channels, int spatial) {
  Dims dims = {draw.Int(1, 2), channels};
  for (int i = 0; i < spatial; ++i) dims.push_back(draw.Int(3, 14));
  return dims;
}

// Calls fn(offset of the pixel in its plane, tap) for the taps inside the image, and counts those inside the
// padded image.
int64_t ForEachTap(const Window& w, const Dims& x, const Dims& index,
                   const std::function<void(int64_t, int64_t)>& fn) {
  const size_t width = x.size() - 1;
  const bool flat = w.spatial == 1;
  const int64_t in_h = flat ? 1 : x[width - 1], in_w = x[width];
  const int64_t oy = flat ? 0 : index[width - 1], ox = index[width];
  int64_t padded = 0;
  for (int64_t i = 0; i < w.kernel[1]; ++i) {
    for (int64_t j = 0; j < w.kernel[2]; ++j) {
      const int64_t y = oy * w.stride[1] + i * w.dilation[1] - w.pad_begin[1];
      const int64_t column = ox * w.stride[2] + j * w.dilation[2] - w.pad_begin[2];
      if (y < in_h + w.pad_end[1] && column < in_w + w.pad_end[2]) ++padded;
      if (y >= 0 && y < in_h && column >= 0 && column < in_w) fn(y * in_w + column, i * w.kernel[2] + j);
    }
  }
  return padded;
}

Case MakeConv(Draw& draw) {
  Case c;
  DrawProduct(draw, c);
  FloatConvOp op;
  op.group = draw.Coin(0.6) ? 1 : draw.Int(2, 6);
  const bool depthwise = op.group > 1 && draw.Coin();
  const bool is_deep = op.group == 1 && draw.Coin(0.05);  // sums of many slices
  const int64_t channels = is_deep          ? 16 * draw.Int(12, 40)
                           : draw.Coin(0.3) ? 32 * draw.Int(1, 2)
                                            : draw.Int(1, draw.Coin() ? 12 : 40);
  op.in_channels = op.group * (depthwise ? 1 : channels);
  const int64_t most_outputs = is_deep || draw.Coin() ? 40 : 150 / op.group;
  op.out_channels = op.group * (depthwise ? 1 : draw.Int(1, most_outputs));
  op.window = DrawWindow(draw, 3);
  if (UsesTensorCores(c.precision) && draw.Coin()) {  // as images with the channels last have them
    op.group = 1;
    op.in_channels = 8 * draw.Int(1, 18);
    op.out_channels = draw.Coin() ? 8 * draw.Int(1, 36) : draw.Int(8, 40);
  }
  if (c.precision == FloatPrecision::kWinograd && draw.Coin(0.9)) {
    op.group = 1;
    op.window.spatial = 2;
    for (size_t d = 1; d < kMaxSpatial; ++d) {
      op.window.kernel[d] = 3;
      op.window.stride[d] = op.window.dilation[d] = 1;
      op.window.pad_begin[d] = draw.Int(0, 2);
      op.window.pad_end[d] = draw.Int(0, 2);
    }
  }
  const bool has_few_channels = c.precision != FloatPrecision::kWinograd && draw.Coin(0.4);
  if (has_few_channels) {
    op.group = 1;
    op.in_channels = draw.Int(1, 4);
    op.window = DrawWindow(draw, 7);
    op.window.dilation = {1, 1, 1};
  }
  const bool has_patches = IsTransformed(op, c.precision) && draw.Coin(0.25);
  if (has_patches) op.in_channels = draw.Int(5, 90);
  Dims planes = PlanesShape(draw, op.in_channels, op.window.spatial);
  if (has_patches) planes = {1, op.in_channels, draw.Int(1, 30), draw.Int(13, 30)};
  if (has_few_channels && draw.Coin(0.3)) {
    op.window.spatial = 2;
    op.out_channels = draw.Int(1, 40);
    planes = {draw.Int(1, 2), op.in_channels, draw.Int(1, 12), draw.Int(20, 300)};
  }
  if (c.precision == FloatPrecision::kFloat32 && draw.Coin(0.2)) {  // images that tiles of 28 columns divide
    op.group = draw.Coin(0.8) ? 1 : 2;
    op.in_channels = op.group * 16 * draw.Int(1, 4);
    op.out_channels = op.group * draw.Int(8, 90);
    op.window = {};
    op.window.spatial = 2;
    const int64_t kernel = 2 * draw.Int(0, 2) + 1;
    for (size_t d = 1; d < kMaxSpatial; ++d) {
      op.window.kernel[d] = kernel;
      op.window.pad_begin[d] = op.window.pad_end[d] = kernel / 2;
    }
    const int64_t width = draw.Coin() ? 7 : 14 * draw.Int(1, 3);
    planes = {draw.Int(1, 2), op.in_channels,
              draw.Coin(0.8) ? (width == 7 ? 7 : 2) * draw.Int(1, 2) : draw.Int(1, 9), width};
  }
  if (c.precision == FloatPrecision::kFloat32 &&
      draw.Coin(0.2)) {  // windows of one channel, outputs in fours
    op.group = op.in_channels = 1;
    op.out_channels = draw.Int(1, 40);
    op.window = {};
    op.window.spatial = 2;
    const int64_t side = draw.Int(1, 2);
    for (size_t d = 1; d < kMaxSpatial; ++d) {
      op.window.kernel[d] = 2 * side + 1;
      op.window.pad_begin[d] = op.window.pad_end[d] = side;
    }
    op.window.pad_begin[1] = draw.Int(0, 3);
    op.window.pad_end[2] += 4 * draw.Int(0, 1);
    planes = {draw.Int(1, 3), 1, draw.Int(5, 14), 4 * draw.Int(1, 40)};
  }
  if (draw.Coin(0.2)) {
    op.auto_pad = draw.Coin() ? AutoPad::kSameUpper : AutoPad::kSameLower;
    op.window.pad_begin = op.window.pad_end = {0, 0};
  }
  const int64_t group_in = op.in_channels / op.group, taps = op.window.kernel[1] * op.window.kernel[2];
  op.weights = Reals(draw, op.out_channels * group_in * taps);
  if (draw.Coin()) op.bias = Reals(draw, op.out_channels);
  FeedReals(c, draw, planes);
  const Dims dims = c.fed[0].dims;
  const Window window = WindowOf(op, dims);
  const int64_t plane = Count(Dims(dims.begin() + 2, dims.end()));
  // The pixel of each tap of an output, -1 outside the image.
  Dims last;
  std::vector<int64_t> pixels;
  const auto term = [&](const Dims& index, int64_t k) {
    if (index != last) {
      pixels.assign(static_cast<size_t>(taps), -1);
      ForEachTap(window, dims, index,
                 [&](int64_t pixel, int64_t tap) { pixels[static_cast<size_t>(tap)] = pixel; });
      last = index;
    }
    const int64_t out = index[1], group = out / (op.out_channels / op.group);
    const int64_t channel = (index[0] * op.in_channels) + group * group_in + k / taps;
    const int64_t pixel = pixels[static_cast<size_t>(k % taps)];
    return Term{pixel < 0 ? 0 : FloatsOf(c.data[0])[channel * plane + pixel],
                op.weights[static_cast<size_t>(out * group_in * taps + k)]};
  };
  const auto bias = [&](const Dims& index) {
    return op.bias.empty() ? 0 : op.bias[static_cast<size_t>(index[1])];
  };
  if (c.precision != FloatPrecision::kFloat32 || op.in_channels > 4 || op.group > 1 || draw.Coin()) {
    FinishProducts(c, draw, op, group_in * taps, FloatTiling::kTiles - 1, term, bias);
    return c;
  }
  const Dims made = OutputOf(StandardNode(op), c.fed).dims;
  const SumSlices slices = SlicesOf(op, c.fed[0], {ElementType::kFloat, made});
  FinishReals(c, op, 0, [&](const Dims& index) {
    const float sum = SumOf(slices, group_in * taps, [&](int64_t k) { return term(index, k); });
    return Activated(c, sum + bias(index));
  });
  QuantizeOutput(c, draw);
  c.quantizer->to_channels_last = true;
  if (!FusesQuantize(StandardNode(op), *c.quantizer, c.precision)) Fail("no kernel makes such codes");
  c.y = OutputOf(NodeSpec(*c.quantizer), std::vector<TensorShape>{{ElementType::kFloat, made}});
  std::vector<uint8_t> codes;
  ForEachIndex(c.y.dims, [&](Dims index) {
    index.insert(index.begin() + 1, index.back());
    index.pop_back();
    codes.push_back(c.expected[static_cast<size_t>(OffsetOf(made, index))]);
  });
  c.expected = std::move(codes);
  return c;
}

// With a Transpose in front of the node that moves the channels to the front.
void FeedChannelsLast(Case& c) {
  const Dims dims = c.fed[0].dims;
  const int64_t channels = dims[1], plane = Count(Dims(dims.begin() + 2, dims.end()));
  const float* x = FloatsOf(c.data[0]);
  std::vector<float> moved;
  for (int64_t i = 0; i < dims[0] * plane; ++i) {
    for (int64_t j = 0; j < channels; ++j) {
      moved.push_back(x[(i / plane * channels + j) * plane + i % plane]);
    }
  }
  c.data[0] = Bytes(moved);
  std::rotate(c.fed[0].dims.begin() + 1, c.fed[0].dims.begin() + 2, c.fed[0].dims.end());
  const auto rank = static_cast<int64_t>(dims.size());
  c.transpose = TransposeOp{{0, rank - 1}};
  for (int64_t i = 1; i < rank - 1; ++i) c.transpose->perm.push_back(i);
}

Case MakePool(Draw& draw) {
  Case c;
  FloatPoolOp op;
  op.kind = static_cast<FloatPoolOp::Kind>(draw.Int(0, 3));
  op.ceil_mode = draw.Coin();
  op.count_include_pad = draw.Coin();
  op.window = DrawWindow(draw, 4);
  c.precision = draw.Of({FloatPrecision::kFloat32, FloatPrecision::k3xTf32, FloatPrecision::kFloat16});
  FeedReals(c, draw,
            PlanesShape(draw, draw.Coin() ? 8 * draw.Int(1, 20) : draw.Int(1, 20), op.window.spatial));
  const Dims& dims = c.fed[0].dims;
  const int64_t plane = Count(Dims(dims.begin() + 2, dims.end()));
  const bool global =
      op.kind == FloatPoolOp::Kind::kGlobalMax || op.kind == FloatPoolOp::Kind::kGlobalAverage;
  const bool max = op.kind == FloatPoolOp::Kind::kMax || op.kind == FloatPoolOp::Kind::kGlobalMax;
  const Window window = global ? Window() : WindowOf(op, dims);
  FinishReals(c, op, 1e-5f, [&](const Dims& index) {
    const float* x = FloatsOf(c.data[0]) + (index[0] * dims[1] + index[1]) * plane;
    double sum = 0, largest = -std::numeric_limits<float>::max();
    int64_t inside = 0, padded = plane;
    const auto add = [&](int64_t pixel, int64_t) {
      sum += x[pixel];
      largest = std::max(largest, double{x[pixel]});
      ++inside;
    };
    if (global) {
      for (int64_t pixel = 0; pixel < plane; ++pixel) add(pixel, 0);
    } else {
      padded = ForEachTap(window, dims, index, add);
    }
    return max ? largest : sum / static_cast<double>(op.count_include_pad && !global ? padded : inside);
  });
  if (global && draw.Coin()) FeedChannelsLast(c);
  return c;
}

using Maker = std::function<Case(Draw&)>;

const std::map<std::string, Maker>& Makers() {
  static const auto& makers = *new std::map<std::string, Maker>{
      {"copy", MakeCopy},
      {"transpose", MakeTranspose},
      {"slice", MakeSlice},
      {"split", MakeSplit},
      {"pad", MakePad},
      {"nearest", MakeNearest},
      {"join", MakeJoin},
      {"softmax", MakeSoftmax},
      {"cast", MakeCast},
      {"unary", MakeUnary},
      {"float_binary", MakeFloatBinary},
      {"float_gemm", MakeGemm},
      {"float_conv", MakeConv},
      {"float_pool", MakePool},
      {"float_matmul", MakeMatmul},
  };
  return makers;
}

}  // namespace

std::span<const std::string> StandardKinds() {
  static const auto& kinds = *[] {
    auto* out = new std::vector<std::string>;
    for (const auto& [name, maker] : Makers()) out->push_back(name);
    return out;
  }();
  return kinds;
}

Case MakeStandardCase(const std::string& kind, Draw& draw) {
  Case c = Makers().at(kind)(draw);
  c.kind = kind;
  return c;
}

}  // namespace lowbit::cuda::test
