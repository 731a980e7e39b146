// Decoding and shapes of ONNX's own nodes, op set by op set.
#include "core/nodes/standard_nodes.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/expect.h"
#include "tests/nodes/nodes_test.h"

namespace lowbit {
namespace {

using Ints = std::vector<int64_t>;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max(), kLowest = std::numeric_limits<int64_t>::min();

TensorShape Floats(Ints dims) { return {ElementType::kFloat, std::move(dims)}; }
TensorShape Bytes(Ints dims) { return {ElementType::kUInt8, std::move(dims)}; }

StandardInput Fed(ElementType type = ElementType::kFloat, std::optional<Ints> dims = {}) {
  return {true, type, std::move(dims), {}, {}};
}
StandardInput Constant(Ints values) { return {true, {}, {}, {}, std::move(values)}; }
// `values` must outlive the input.
StandardInput Constant(const std::vector<float>& values, Ints shape) {
  return {true, ElementType::kFloat, shape, ConstTensor{ElementType::kFloat, shape, values.data()}, {}};
}
StandardInput Constant(const std::vector<uint8_t>& values, ElementType type, Ints shape) {
  return {true, type, shape, ConstTensor{type, shape, values.data()}, {}};
}
const StandardInput kAbsent;

using Inputs = std::vector<StandardInput>;

bool Refuses(std::string_view op, int version, const AttributeMap& attributes, const Inputs& inputs) {
  return Throws([&] { DecodeStandard(op, version, attributes, inputs); });
}
bool Refuses(const StandardNode& node, const std::vector<TensorShape>& fed) {
  return Throws([&] { OutputOf(node, fed); });
}
Ints DimsOf(const StandardNode& node, const TensorShape& x) {
  return OutputOf(node, std::vector<TensorShape>{x}).dims;
}

void TestUnknown() {
  Expect(Refuses("Einsum", 12, {}, {Fed()}), "an op that lowbit does not run");
  Expect(Refuses("Relu", 14, {{"invented", int64_t{1}}}, {Fed()}), "an attribute nobody knows");
  Expect(Refuses("Relu", 14, {}, {}) && Refuses("Relu", 14, {}, {Fed(ElementType::kInt32)}),
         "no input, or integers");
  Expect(Refuses("Relu", 14, {}, {{true, {}, {}, {}, {}}}), "an input of a foreign type");
  Expect(Refuses("Softmax", 13, {{"axis", 1.0f}}, {Fed()}), "an attribute of another kind");
}

void TestReshape() {
  const auto reshape = [](Ints dims, int64_t allow_zero = 0) {
    return DecodeStandard("Reshape", 14, {{"allowzero", allow_zero}},
                          Inputs{Fed(), Constant(std::move(dims))});
  };
  Expect(DimsOf(reshape({0, -1}), Floats({2, 3, 4})) == Ints({2, 12}), "copied and open dims");
  Expect(DimsOf(reshape({0, 5}, 1), Floats({0, 3})) == Ints({0, 5}), "allowzero");
  Expect(Refuses(reshape({5, -1}), {Floats({2, 3})}) && Refuses(reshape({1, 1, 0}), {Floats({1})}),
         "elements that do not fit");
  Expect(Refuses(reshape({0, -1}), {Floats({0, 3})}), "an open dim beside no elements");
  Expect(Refuses(reshape({1 << 30, 1 << 30, 1 << 30}), {Floats({1})}), "a product that overflows");
  Expect(Throws([&] { reshape({-1, -1}); }) && Throws([&] { reshape({-2}); }) &&
             Throws([&] { reshape({kHuge}); }) && Throws([&] { reshape({0, -1}, 1); }) &&
             Throws([&] { reshape(Ints(1000, 1)); }),
         "shapes that say nothing");
  Expect(Refuses("Reshape", 14, {}, {Fed(), Fed()}), "a shape that is computed");
  const StandardNode flatten = DecodeStandard("Flatten", 13, {{"axis", int64_t{-1}}}, Inputs{Fed()});
  Expect(DimsOf(flatten, Bytes({2, 3, 4})) == Ints({6, 4}), "Flatten from the last axis on");
  Expect(DimsOf(DecodeStandard("Flatten", 9, {}, Inputs{Fed()}), Floats({2})) == Ints({2, 1}),
         "nothing left");
  Expect(Refuses(DecodeStandard("Flatten", 9, {}, Inputs{Fed()}), {Floats({})}), "axis 1 of a scalar");
}

void TestSqueeze() {
  const StandardNode old = DecodeStandard("Squeeze", 11, {{"axes", Ints{0, -1}}}, Inputs{Fed()});
  const StandardNode now = DecodeStandard("Squeeze", 13, {}, Inputs{Fed(), Constant(Ints{0, -1})});
  const StandardNode all = DecodeStandard("Squeeze", 13, {}, Inputs{Fed()});
  for (const StandardNode& node : {old, now, all}) {
    Expect(DimsOf(node, Floats({1, 3, 1})) == Ints({3}), "Squeeze by attribute, by input, of all");
  }
  Expect(Refuses(now, {Floats({2, 3, 1})}), "a dim above 1");
  Expect(DimsOf(now, Floats({1})).empty(), "an axis twice, as ONNX Runtime");
  Expect(Refuses("Squeeze", 13, {{"axes", Ints{0}}}, {Fed()}), "an attribute of an older op set");
  Expect(Refuses("Squeeze", 13, {}, {Fed(), StandardInput{}}), "axes without a name, as ONNX Runtime");
  const StandardNode wide = DecodeStandard("Unsqueeze", 13, {}, Inputs{Fed(), Constant(Ints{0, -1})});
  Expect(DimsOf(wide, Floats({3})) == Ints({1, 3, 1}), "Unsqueeze counts in the output");
  Expect(
      Refuses("Unsqueeze", 13, {}, {Fed(), Constant(Ints(100, 0))}) && Refuses("Unsqueeze", 11, {}, {Fed()}),
      "too many axes, or none");
  Expect(Refuses("Unsqueeze", 13, {}, {Fed(), Constant(Ints{kLowest})}), "an axis beyond any rank");
}

void TestSame() {
  Expect(DimsOf(DecodeStandard("Identity", 16, {}, Inputs{Fed()}), Floats({2, 3})) == Ints({2, 3}),
         "Identity");
  Expect(DimsOf(DecodeStandard("Cast", 13, {{"to", int64_t{1}}}, Inputs{Fed()}), Floats({2})) == Ints({2}),
         "a Cast to the same type");
  constexpr int64_t kOnnxFloat = 1, kOnnxUInt8 = 2, kOnnxFloat16 = 10;
  const auto cast = [](ElementType from, int64_t to) {
    return OutputOf(DecodeStandard("Cast", 13, {{"to", to}}, Inputs{Fed(from)}),
                    std::vector<TensorShape>{{from, {2, 3}}});
  };
  for (const ElementType from :
       {ElementType::kUInt8, ElementType::kInt8, ElementType::kInt32, ElementType::kFloat16}) {
    const TensorShape y = cast(from, kOnnxFloat);
    Expect(y.type == ElementType::kFloat && y.dims == Ints({2, 3}), "a Cast to float32");
    Expect(Refuses("Cast", 13, {{"to", kOnnxFloat16 + 1}}, {Fed(from)}), "a Cast to float64");
  }
  Expect(cast(ElementType::kFloat, kOnnxFloat16).type == ElementType::kFloat16, "a Cast to float16");
  Expect(Refuses("Cast", 13, {{"to", kOnnxUInt8}}, {Fed()}), "a Cast of float32 to integers");
  Expect(Refuses("Cast", 13, {{"to", kOnnxFloat16}}, {Fed(ElementType::kInt32)}),
         "a Cast of integers to float16");
  Expect(Refuses("Flatten", 13, {}, {Fed(ElementType::kFloat16)}), "float16 is only cast");
  Expect(!Refuses("Dropout", 13, {}, {Fed()}) && Refuses("Dropout", 13, {}, {Fed(), kAbsent, Fed()}),
         "Dropout outside of training");
}

void TestTranspose() {
  const auto transpose = [](Ints perm) {
    return DecodeStandard("Transpose", 13, {{"perm", std::move(perm)}}, Inputs{Fed()});
  };
  Expect(DimsOf(transpose({0, 3, 1, 2}), Floats({1, 4, 5, 3})) == Ints({1, 3, 4, 5}), "Transpose");
  Expect(DimsOf(DecodeStandard("Transpose", 1, {}, Inputs{Fed()}), Bytes({2, 3})) == Ints({3, 2}),
         "reversed");
  Expect(Refuses(transpose({1, 0}), {Floats({1})}), "of another rank");
  for (const Ints& perm : {Ints{0, 0}, Ints{1}, Ints{-1, 0}, Ints{kHuge, 0}}) {
    Expect(Throws([&] { transpose(perm); }), "no permutation");
  }
}

void TestSlice() {
  const auto slice = [](Ints starts, Ints ends, Ints axes, Ints steps) {
    return DecodeStandard("Slice", 13, {},
                          Inputs{Fed(), Constant(std::move(starts)), Constant(std::move(ends)),
                                 Constant(std::move(axes)), Constant(std::move(steps))});
  };
  Expect(DimsOf(slice({1, -3}, {kHuge, -1}, {0, -1}, {2, 1}), Floats({6, 9, 5})) == Ints({3, 9, 2}), "Slice");
  const StandardNode back = slice({-1}, {kLowest}, {0}, {-2});
  const SliceRange range = RangesOf(std::get<SliceOp>(back), Ints{6})[0];
  Expect(range.begin == 5 && range.step == -2 && range.count == 3, "backwards");
  Expect(DimsOf(back, Floats({0})) == Ints({0}), "backwards through nothing");
  Expect(DimsOf(slice({4}, {2}, {0}, {1}), Floats({6})) == Ints({0}), "nothing");
  Expect(Refuses(back, {Floats({})}) && Refuses(slice({0, 0}, {1, 1}, {0, -1}, {1, 1}), {Floats({4})}),
         "an axis that is not there, or twice");
  Expect(Throws([&] { slice({0}, {1}, {0}, {0}); }) && Throws([&] { slice({0}, {1}, {0}, {kLowest}); }) &&
             Throws([&] { slice({0}, {1, 2}, {0}, {1}); }),
         "steps and lengths");
  const AttributeMap attributes = {{"starts", Ints{1}}, {"ends", Ints{3}}};
  Expect(DimsOf(DecodeStandard("Slice", 1, attributes, Inputs{Fed()}), Floats({6, 2})) == Ints({2, 2}),
         "before op set 10");
  Expect(Refuses("Slice", 13, {}, {Fed(), Fed(), Constant(Ints{1})}), "a start that is computed");
}

void TestSplit() {
  constexpr int64_t kAxis = -1;
  const auto part = [](int version, const AttributeMap& attributes, const Inputs& inputs, size_t count,
                       size_t meant, const Ints& x) {
    const StandardNode node = DecodeStandard("Split", version, attributes, inputs, {count, meant});
    const SliceRange range = RangesOf(std::get<SplitOp>(node), x).back();
    Expect(DimsOf(node, Floats(x)).back() == range.count && range.step == 1, "what a part takes");
    return Ints{range.begin, range.count};
  };
  const Inputs x = {Fed()}, sized = {Fed(), Constant(Ints{2, 0, 3})};
  Expect(part(2, {{"axis", kAxis}, {"split", Ints{1, 4}}}, x, 2, 1, {6, 5}) == Ints({1, 4}),
         "sizes before 13");
  Expect(part(13, {{"axis", kAxis}}, sized, 3, 1, {5}) == Ints({2, 0}) &&
             part(18, {{"axis", kAxis}}, sized, 3, 2, {1, 5}) == Ints({2, 3}),
         "sizes from 13 on, none among them");
  Expect(part(11, {{"axis", kAxis}}, x, 3, 2, {2, 6}) == Ints({4, 2}) &&
             part(13, {}, x, 1, 0, {4}) == Ints({0, 4}),
         "equal parts");
  const AttributeMap four = {{"axis", kAxis}, {"num_outputs", int64_t{4}}};
  Expect(part(18, four, x, 4, 0, {7}) == Ints({0, 2}) && part(18, four, x, 4, 3, {7}) == Ints({6, 1}) &&
             part(18, four, x, 4, 3, {6}) == Ints({6, 0}) && part(18, four, x, 4, 1, {0}) == Ints({0, 0}),
         "a last part that is smaller");
  const auto refuses = [](int version, const AttributeMap& attributes, const Inputs& inputs, size_t count,
                          const Ints& dims) {
    return Throws([&] {
      const StandardNode node = DecodeStandard("Split", version, attributes, inputs, {count, 0});
      OutputOf(node, std::vector<TensorShape>{Floats(dims)});
    });
  };
  Expect(refuses(13, {}, sized, 3, {6}) && refuses(13, {}, sized, 2, {5}) &&
             refuses(13, {}, {Fed(), Constant(Ints{-1, 6})}, 2, {5}) &&
             refuses(13, {}, {Fed(), Constant(Ints{kHuge, kHuge})}, 2, {5}),
         "sizes that are not those of the parts");
  Expect(refuses(13, {}, x, 2, {5}) && refuses(18, four, x, 4, {5}), "parts that cannot be equal");
  Expect(refuses(18, {}, x, 2, {4}) && refuses(18, {{"num_outputs", int64_t{2}}}, sized, 2, {4}) &&
             refuses(18, {{"num_outputs", int64_t{3}}}, x, 2, {4}),
         "from 18 on either sizes or a number, that of the outputs");
  Expect(refuses(13, {{"axis", int64_t{1}}}, x, 2, {4}) && refuses(13, {}, x, 2, {}) &&
             refuses(13, {}, {Fed(), Fed()}, 2, {4}) && refuses(2, {{"split", Ints{}}}, x, 2, {4}),
         "an axis that is not there, sizes that are computed, or none");
}

void TestPad() {
  const std::vector<float> one = {1.0f}, two = {1.0f, 2.0f};
  const StandardNode pad = DecodeStandard(
      "Pad", 18, {}, Inputs{Fed(), Constant(Ints{1, 2}), Constant(one, {}), Constant(Ints{-1})});
  Expect(DimsOf(pad, Floats({2, 3})) == Ints({2, 6}), "Pad along an axis");
  Expect(std::get<PadOp>(pad).value == std::vector<uint8_t>({0, 0, 0x80, 0x3f}), "with the bytes of 1");
  const AttributeMap old = {{"pads", Ints{0, 1, 0, 0}}, {"value", 1.0f}};
  const StandardNode before = DecodeStandard("Pad", 2, old, Inputs{Fed()});
  Expect(DimsOf(before, Floats({2, 3})) == Ints({2, 4}), "before op set 11");
  Expect(Refuses(before, {Floats({2})}) && Refuses(before, {Floats({2, kHuge / 8})}), "rank and size");
  Expect(Refuses("Pad", 13, {{"mode", std::string("reflect")}}, {Fed(), Constant(Ints{1, 1})}),
         "other modes");
  Expect(Refuses("Pad", 13, {}, {Fed(), Constant(Ints{-1, 1})}) &&
             Refuses("Pad", 13, {}, {Fed(), Constant(Ints{kHuge, 1})}) &&
             Refuses("Pad", 13, {}, {Fed(), Constant(Ints{1, 1}), Constant(two, {2})}) &&
             Refuses("Pad", 13, {}, {Fed(ElementType::kUInt8), Constant(Ints{1, 1}), Constant(one, {})}) &&
             Refuses("Pad", 18, {}, {Fed(), Constant(Ints{1, 1}), kAbsent, Constant(Ints{0, 1})}),
         "pads below 0 or too large, values that are none");
}

void TestResize() {
  const std::vector<float> twice = {1.0f, 1.0f, 2.0f, 2.5f}, none;
  const AttributeMap copies = {{"coordinate_transformation_mode", std::string("asymmetric")},
                               {"nearest_mode", std::string("floor")}};
  const StandardNode scaled =
      DecodeStandard("Resize", 13, copies, Inputs{Fed(), kAbsent, Constant(twice, {4})});
  Expect(DimsOf(scaled, Floats({2, 3, 4, 5})) == Ints({2, 3, 8, 12}), "Resize by scales");
  Expect(Refuses(scaled, {Floats({2, 3, 4})}) && Refuses(scaled, {Floats({2, 0, 4, 5})}), "rank and size");
  AttributeMap some = copies;
  some["axes"] = Ints{-1, 1};
  const StandardNode sized = DecodeStandard(
      "Resize", 19, some, Inputs{Fed(), Constant(none, {0}), Constant(none, {0}), Constant(Ints{7, 6})});
  Expect(DimsOf(sized, Bytes({2, 3, 4, 5})) == Ints({2, 6, 4, 7}), "of bytes, some axes, to sizes");
  const auto entries = EntriesOf(std::get<NearestOp>(sized), 4);
  Expect(!entries[0] && entries[1] == size_t{1} && !entries[2] && entries[3] == size_t{0}, "of which axes");
  Expect(
      Refuses("Resize", 10, {}, {Fed(), Constant(twice, {4})}) &&
          Refuses("Resize", 13, {{"mode", std::string("linear")}}, {Fed(), kAbsent, Constant(twice, {4})}) &&
          Refuses("Resize", 19, {{"keep_aspect_ratio_policy", std::string("not_larger")}},
                  {Fed(), kAbsent, kAbsent, Constant(Ints{7})}) &&
          Refuses("Resize", 19, {{"antialias", int64_t{1}}}, {Fed(), kAbsent, Constant(twice, {4})}) &&
          Refuses("Resize", 13, {{"nearest_mode", std::string("best")}},
                  {Fed(), kAbsent, Constant(twice, {4})}),
      "other modes");
  Expect(Refuses("Resize", 13, {}, {Fed()}) && Refuses("Resize", 13, {}, {Fed(), kAbsent, Fed()}) &&
             Refuses("Resize", 13, {}, {Fed(), Fed(), Constant(twice, {4})}) &&
             Refuses("Resize", 13, {}, {Fed(), kAbsent, kAbsent, Constant(Ints{0})}) &&
             Refuses("Resize", 13, {}, {Fed(), kAbsent, Constant(twice, {4}), Constant(Ints{1, 2, 3, 4})}) &&
             Refuses("Resize", 18, {{"axes", Ints{1}}}, {Fed(), kAbsent, Constant(twice, {4})}),
         "scales and sizes that are computed, wrong, or both");
}

void TestConcat() {
  const StandardNode join = DecodeStandard("Concat", 13, {{"axis", int64_t{-1}}}, Inputs{Fed(), Fed()});
  Expect(FedInputs(join, 2) == std::vector<size_t>({0, 1}), "all inputs are fed");
  const auto of = [&](const TensorShape& a, const TensorShape& b) {
    return OutputOf(join, std::vector<TensorShape>{a, b}).dims;
  };
  Expect(of(Floats({2, 3}), Floats({2, 5})) == Ints({2, 8}), "Concat");
  Expect(Refuses(join, {Floats({2, 3}), Floats({3, 3})}) && Refuses(join, {Floats({2}), Floats({2, 3})}) &&
             Refuses(join, {Floats({2}), Bytes({2})}) && Refuses(join, {Floats({}), Floats({})}),
         "tensors that cannot be joined");
  Expect(Refuses("Concat", 13, {}, {Fed()}) && Refuses("Concat", 13, {{"axis", int64_t{0}}}, {}) &&
             Refuses("Concat", 13, {{"axis", int64_t{0}}}, {Fed(), Fed(ElementType::kInt8)}),
         "no axis, no inputs, several types");
}

void TestFloatElementwise() {
  const auto old = std::get<SoftmaxOp>(DecodeStandard("LogSoftmax", 11, {}, Inputs{Fed()}));
  const auto now = std::get<SoftmaxOp>(DecodeStandard("Softmax", 13, {}, Inputs{Fed()}));
  Expect(old.flattened && old.axis == 1 && old.log && !now.flattened && now.axis == -1 && !now.log,
         "Softmax changed with op set 13");
  Expect(Refuses(StandardNode(old), {Floats({2})}) && Refuses(StandardNode(now), {Bytes({2})}),
         "axis and type");

  const std::vector<float> six = {6.0f}, nan = {std::nanf("")};
  const auto clip =
      std::get<UnaryOp>(DecodeStandard("Clip", 13, {}, Inputs{Fed(), kAbsent, Constant(six, {})}));
  const auto before = std::get<UnaryOp>(DecodeStandard("Clip", 6, {{"max", 6.0f}}, Inputs{Fed()}));
  for (const UnaryOp& op : {clip, before}) {
    Expect(op.a == std::numeric_limits<float>::lowest() && op.b == 6.0f, "Clip by input or attribute");
  }
  Expect(Refuses("Clip", 13, {}, {Fed(), Fed()}) && Refuses("Clip", 13, {}, {Fed(), Constant(nan, {})}),
         "a bound that is computed, or no number");
  const auto leaky = std::get<UnaryOp>(DecodeStandard("LeakyRelu", 16, {}, Inputs{Fed()}));
  const auto hard = std::get<UnaryOp>(DecodeStandard("HardSigmoid", 6, {{"beta", 0.25f}}, Inputs{Fed()}));
  Expect(leaky.a == 0.01f && hard.a == 0.2f && hard.b == 0.25f, "defaults of activations");

  const StandardNode add = DecodeStandard("Add", 14, {}, Inputs{Fed(), Fed()});
  Expect(OutputOf(add, std::vector<TensorShape>{Floats({2, 1}), Floats({3})}) == Floats({2, 3}),
         "Add broadcasts");
  Expect(Refuses(add, {Floats({2}), Floats({3})}) && Refuses(add, {Floats({2})}), "or does not");
  Expect(Refuses("Add", 6, {}, {Fed(), Fed()}) && Refuses("Add", 14, {}, {Fed(), Fed(ElementType::kInt32)}),
         "older broadcasting, integers");
}

void TestGemm() {
  const std::vector<float> b = {1, 2, 3, 4, 5, 6}, c = {1, 2, 3};
  const AttributeMap attributes = {{"alpha", 2.0f}, {"beta", 0.5f}};
  const StandardNode node =
      DecodeStandard("Gemm", 13, attributes, Inputs{Fed(), Constant(b, {2, 3}), Constant(c, {1, 3})});
  const auto& gemm = std::get<FloatGemmOp>(node);
  Expect(gemm.weights == std::vector<float>({2, 8, 4, 10, 6, 12}), "B is transposed, times alpha");
  Expect(gemm.bias == std::vector<float>({0.5f, 1, 1.5f}), "C is times beta");
  Expect(DimsOf(node, Floats({5, 2})) == Ints({5, 3}), "Gemm");
  Expect(Refuses(node, {Floats({5, 3})}) && Refuses(node, {Floats({2})}), "features and rank");
  const auto turned = std::get<FloatGemmOp>(
      DecodeStandard("Gemm", 13, {{"transB", int64_t{1}}}, Inputs{Fed(), Constant(b, {3, 2})}));
  Expect(turned.weights == b && turned.k == 2 && turned.n == 3 && turned.bias.empty(), "transB");
  const StandardNode product = DecodeStandard("MatMul", 13, {}, Inputs{Fed(), Constant(b, {2, 3})});
  Expect(DimsOf(product, Floats({4, 5, 2})) == Ints({4, 5, 3}) && DimsOf(product, Floats({2})) == Ints({3}),
         "MatMul of many dims, and of a vector");
  Expect(Refuses(product, {Floats({})}), "a scalar is no factor");
  Expect(Refuses("MatMul", 13, {}, {Fed(), Fed()}) && Refuses("MatMul", 13, {}, {Fed(), Constant(b, {6})}) &&
             Refuses("Gemm", 13, {}, {Fed(), Constant(b, {2, 3}), Constant(b, {2, 3})}) &&
             Refuses("Gemm", 13, {}, {Fed(), Constant(b, {0, 3})}),
         "factors that lowbit does not take");
}

void TestMatMul() {
  StandardInput a = Fed(), b = Fed();
  Expect(Refuses("MatMul", 13, {}, {a, b}), "ranks that are not known");
  a.dims = b.dims = Ints{-1, 2, 3};
  const StandardNode node = DecodeStandard("MatMul", 13, {}, Inputs{a, b});
  Expect(FedInputs(node, 2) == std::vector<size_t>({0, 1}), "both are fed");
  const auto dims = [&](Ints x, Ints y) {
    return OutputOf(node, std::vector<TensorShape>{Floats(std::move(x)), Floats(std::move(y))}).dims;
  };
  Expect(dims({4, 1, 5, 2}, {3, 2, 7}) == Ints({4, 3, 5, 7}), "dims before the last two broadcast");
  Expect(Refuses(node, {Floats({5, 2}), Floats({3, 7})}) &&
             Refuses(node, {Floats({2, 5, 2}), Floats({3, 2, 7})}) &&
             Refuses(node, {Floats({2}), Floats({2, 7})}) && Refuses(node, {Floats({5, 2})}),
         "features, batches, rank, one operand");
  b.dims = Ints{2};
  Expect(Refuses("MatMul", 13, {}, {a, b}), "a vector");
  StandardInput many = Constant(std::vector<float>(8), {2, 2, 2});
  many.dims = Ints{2, 2, 2};
  Expect(std::holds_alternative<FloatMatmulOp>(DecodeStandard("MatMul", 13, {}, Inputs{a, many})),
         "constant matrices are fed");
}

void TestConv() {
  const std::vector<float> w(2 * 3 * 3 * 3, 1.0f), bias = {1, 2};
  const Inputs inputs = {Fed(), Constant(w, {2, 3, 3, 3}), Constant(bias, {2})};
  const StandardNode node =
      DecodeStandard("Conv", 11, {{"strides", Ints{2, 1}}, {"pads", Ints{1, 0, 1, 2}}}, inputs);
  Expect(DimsOf(node, Floats({1, 3, 7, 8})) == Ints({1, 2, 4, 8}), "Conv with explicit pads");
  Expect(Refuses(node, {Floats({1, 4, 7, 8})}) && Refuses(node, {Floats({1, 3, 8})}) &&
             Refuses(node, {Floats({1, 3, 0, 8})}),
         "channels, rank, pixels");
  const StandardNode upper =
      DecodeStandard("Conv", 11, {{"auto_pad", std::string("SAME_UPPER")}, {"strides", Ints{2, 2}}}, inputs);
  const StandardNode lower =
      DecodeStandard("Conv", 11, {{"auto_pad", std::string("SAME_LOWER")}, {"strides", Ints{2, 2}}}, inputs);
  const Ints x = {1, 3, 8, 7};
  const Window up = WindowOf(std::get<FloatConvOp>(upper), x),
               low = WindowOf(std::get<FloatConvOp>(lower), x);
  Expect(up.pad_begin[1] == 0 && up.pad_end[1] == 1 && up.pad_begin[2] == 1 && up.pad_end[2] == 1 &&
             low.pad_begin[1] == 1 && low.pad_end[1] == 0,
         "auto_pad shares the pads out");
  Expect(DimsOf(upper, Floats(x)) == Ints({1, 2, 4, 4}), "SAME divides by the stride");
  const StandardNode line = DecodeStandard("Conv", 1, {}, Inputs{Fed(), Constant(w, {6, 3, 3})});
  Expect(DimsOf(line, Floats({2, 3, 9})) == Ints({2, 6, 7}), "one spatial dim");
  Expect(Refuses("Conv", 11, {{"group", int64_t{4}}}, inputs) &&
             Refuses("Conv", 11, {{"group", kHuge}}, inputs) &&
             Refuses("Conv", 11, {{"strides", Ints{0, 1}}}, inputs) &&
             Refuses("Conv", 11, {{"pads", Ints{-1, 0, 0, 0}}}, inputs) &&
             Refuses("Conv", 11, {{"dilations", Ints{1}}}, inputs) &&
             Refuses("Conv", 11, {{"kernel_shape", Ints{5, 5}}}, inputs) &&
             Refuses("Conv", 11, {{"auto_pad", std::string("SOME")}}, inputs),
         "attributes out of range");
  Expect(Refuses("Conv", 11, {}, {Fed(), Fed()}) && Refuses("Conv", 11, {}, {Fed(), Constant(w, {54})}) &&
             Refuses("Conv", 11, {}, {Fed(), Constant(w, {2, 3, 3, 3}), Constant(w, {54})}),
         "weights that are computed or of another rank, a bias of another length");
}

void TestPools() {
  const AttributeMap attributes = {
      {"kernel_shape", Ints{3, 3}}, {"strides", Ints{2, 2}}, {"ceil_mode", int64_t{1}}};
  const StandardNode pool = DecodeStandard("MaxPool", 12, attributes, Inputs{Fed()});
  Expect(DimsOf(pool, Floats({1, 5, 6, 7})) == Ints({1, 5, 3, 3}), "MaxPool");
  Expect(Refuses(pool, {Floats({6})}) && Refuses(pool, {Floats({})}), "rank");
  for (const char* const op : {"MaxPool", "AveragePool"}) {
    const auto height = [&](int64_t kernel, int64_t stride) {
      return DecodeStandard(
          op, 12,
          {{"kernel_shape", Ints{kernel, 1}}, {"strides", Ints{stride, 1}}, {"ceil_mode", int64_t{0}}},
          Inputs{Fed()});
    };
    const auto one = Floats({1, 5, 1, 7});
    Expect(DimsOf(height(3, 3), one) == Ints({1, 5, 1, 7}) &&
               DimsOf(height(2, 1), one) == Ints({1, 5, 0, 7}) &&
               DimsOf(height(4, 2), one) == Ints({1, 5, 0, 7}) && Refuses(height(3, 1), {one}) &&
               Refuses(height(5, 2), {one}),
           "a window larger than the image gives what it gives in ONNX Runtime");
  }
  const StandardNode whole = DecodeStandard("GlobalAveragePool", 1, {}, Inputs{Fed()});
  Expect(DimsOf(whole, Floats({2, 5, 6, 7, 8})) == Ints({2, 5, 1, 1, 1}), "a global pool");
  Expect(Refuses(whole, {Floats({2, 5})}) && Refuses(whole, {Floats({2, 5, 0})}), "of no pixels");
  Expect(Refuses("MaxPool", 12, {}, {Fed()}) &&
             Refuses("MaxPool", 12, {{"kernel_shape", Ints{2, 2, 2}}}, {Fed()}) &&
             Refuses("MaxPool", 12, {{"kernel_shape", Ints{2}}, {"pads", Ints{2, 0}}}, {Fed()}) &&
             Refuses("AveragePool", 19, {{"kernel_shape", Ints{2}}, {"dilations", Ints{2}}}, {Fed()}) &&
             Refuses("MaxPool", 12, {{"kernel_shape", Ints{2}}}, {Fed(ElementType::kUInt8)}),
         "windows that lowbit does not take");
}

void TestQuantizeLinear() {
  const std::vector<float> scale = {0.5f}, scales = {0.5f, 2.0f}, zero = {0.0f};
  const std::vector<uint8_t> point = {250}, points = {1, 2};
  const StandardNode quantize = DecodeStandard(
      "QuantizeLinear", 13, {}, Inputs{Fed(), Constant(scale, {}), Constant(point, ElementType::kInt8, {})});
  const auto& grid = std::get<QuantizeNode>(quantize).grids.at(0);
  Expect(grid.zero_point == -6 && grid.is_signed && grid.lo == -128 && grid.hi == 127,
         "QuantizeLinear to int8");
  Expect(
      OutputOf(quantize, std::vector<TensorShape>{Floats({2, 3})}) == TensorShape{ElementType::kInt8, {2, 3}},
      "its output");
  const Inputs channels = {Fed(ElementType::kUInt8, Ints{-1, 4, 2}), Constant(scales, {2}),
                           Constant(points, ElementType::kUInt8, {2})};
  const StandardNode dequantize = DecodeStandard("DequantizeLinear", 13, {{"axis", int64_t{2}}}, channels);
  Expect(std::get<DequantizeNode>(dequantize).spec.x_zero_point == std::vector<int32_t>({1, 2}),
         "per channel");
  Expect(DimsOf(dequantize, Bytes({1, 4, 2})) == Ints({1, 4, 2}), "along the last axis");
  Expect(Refuses(dequantize, {Bytes({1, 4, 3})}) && Refuses("DequantizeLinear", 13, {}, channels),
         "another number of channels, another axis");
  Expect(Refuses("QuantizeLinear", 13, {}, {Fed(), Constant(zero, {})}) &&
             Refuses("QuantizeLinear", 13, {}, {Fed(), Fed()}) &&
             Refuses("QuantizeLinear", 13, {},
                     {Fed(), Constant(scale, {}), Constant(points, ElementType::kUInt8, {2})}) &&
             Refuses("QuantizeLinear", 21, {{"output_dtype", int64_t{5}}}, {Fed(), Constant(scale, {})}) &&
             Refuses("QuantizeLinear", 21, {{"block_size", int64_t{16}}}, {Fed(), Constant(scale, {})}) &&
             Refuses("DequantizeLinear", 13, {}, {Fed(ElementType::kInt32), Constant(scale, {})}),
         "grids that lowbit does not take");
}

}  // namespace

void TestStandardNodes() {
  TestUnknown();
  TestReshape();
  TestSqueeze();
  TestSame();
  TestTranspose();
  TestSlice();
  TestSplit();
  TestPad();
  TestResize();
  TestConcat();
  TestFloatElementwise();
  TestGemm();
  TestMatMul();
  TestConv();
  TestPools();
  TestQuantizeLinear();
}

}  // namespace lowbit
