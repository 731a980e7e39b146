// Decoding and shapes of lowbit nodes. What a file can do wrong with attributes and constants, tests/hostile
// feeds to whole sessions; here stands what the operators do not show.
#include "core/nodes.h"

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/expect.h"
#include "tests/nodes/nodes_test.h"

namespace lowbit {
namespace {

// A node under construction.
class Builder {
 public:
  explicit Builder(const char* op)
      : schema_(*FindOpSchema(op)), constants_(schema_.inputs.size()), present_(schema_.inputs.size()) {}

  Builder& Set(const char* name, AttributeValue value) {
    attributes_[name] = std::move(value);
    return *this;
  }
  Builder& Feed(const char* name) {
    present_[Index(name)] = true;
    return *this;
  }
  Builder& Floats(const char* name, std::vector<float> values) {
    return Give(name, ElementType::kFloat, std::move(values));
  }
  Builder& Ints(const char* name, std::vector<int32_t> values) {
    return Give(name, ElementType::kInt32, std::move(values));
  }
  Builder& Bytes(const char* name, std::vector<uint8_t> values) {
    return Give(name, ElementType::kUInt8, std::move(values));
  }
  NodeSpec Decode(Weights weights = Weights::kNeeded) const {
    return DecodeNode(schema_, attributes_, constants_, present_, weights);
  }

 private:
  size_t Index(std::string_view name) const {
    size_t i = 0;
    while (name != schema_.inputs[i].name) ++i;
    return i;
  }
  template <typename T>
  Builder& Give(const char* name, ElementType type, std::vector<T> values) {
    const auto kept = std::make_shared<const std::vector<T>>(std::move(values));
    const size_t i = Index(name);
    constants_[i] = ConstTensor{type, {static_cast<int64_t>(kept->size())}, kept->data()};
    present_[i] = true;
    kept_.push_back(kept);
    return *this;
  }

  const OpSchema& schema_;
  AttributeMap attributes_;
  std::vector<std::optional<ConstTensor>> constants_;
  std::vector<bool> present_;
  std::vector<std::shared_ptr<const void>> kept_;  // the constants' values
};

using Ints = std::vector<int64_t>;

TensorShape Codes(Ints dims) { return {ElementType::kUInt8, std::move(dims)}; }
TensorShape Floats(Ints dims) { return {ElementType::kFloat, std::move(dims)}; }
TensorShape Signed(Ints dims) { return {ElementType::kInt8, std::move(dims)}; }

bool Gives(const NodeSpec& node, const std::vector<TensorShape>& fed, const TensorShape& y) {
  return OutputOf(node, fed) == y;
}
bool Refuses(const NodeSpec& node, const std::vector<TensorShape>& fed) {
  return Throws([&] { OutputOf(node, fed); });
}

// 3 to 2 channels, 3x3 with a stride of 2, weights 0..53.
Builder Conv() {
  std::vector<uint8_t> weights(54);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<uint8_t>(i);
  return Builder("LowBitConv")
      .Set("in_channels", int64_t{3})
      .Set("out_channels", int64_t{2})
      .Set("kernel_shape", Ints{3, 3})
      .Set("strides", Ints{2, 2})
      .Set("pads", Ints{1, 1, 1, 1})
      .Feed("x")
      .Floats("x_scale", {0.5f})
      .Ints("x_zero_point", {3})
      .Bytes("w", weights)
      .Floats("w_scale", {0.25f, 0.5f})
      .Ints("w_zero_point", {0})
      .Floats("y_scale", {2.0f})
      .Ints("y_zero_point", {7});
}

void TestConv() {
  const NodeSpec node = Conv().Decode();
  const auto& matmul = std::get<MatmulNode>(node);
  Expect(std::string(matmul.op) == "LowBitConv", "a matmul knows its op");
  Expect(matmul.conv.geometry.K() == 27 && matmul.conv.weights.size() == 54, "geometry and weights");
  Expect(matmul.conv.epilogue.multiplier == std::vector<float>({0.0625f, 0.125f}), "multipliers");
  Expect(Gives(node, {Codes({2, 7, 9, 3})}, Codes({2, 4, 5, 2})), "a convolution's output");
  const ConvShape images = ImagesOf(matmul, std::vector<TensorShape>{Codes({2, 7, 9, 3})});
  Expect(images == ConvShape{2, 7, 9, 4, 5}, "a convolution's images");
  Expect(Refuses(node, {}) && Refuses(node, {Signed({2, 7, 9, 3})}), "no x, or one of another type");
  Expect(Refuses(node, {Codes({2, 7, 9, 4})}) && Refuses(node, {Codes({7, 9, 3})}), "channels and rank");
  Expect(Refuses(node, {Codes({1 << 20, 1 << 20, 9, 3})}), "an output beyond 2^31 elements");
}

void TestResidual() {
  const NodeSpec node = Conv()
                            .Feed("residual")
                            .Set("residual_encoding", std::string("signed"))
                            .Floats("residual_scale", {1.0f})
                            .Ints("residual_zero_point", {0})
                            .Floats("inner_scale", {1.0f})
                            .Ints("inner_zero_point", {0})
                            .Decode();
  const TensorShape x = Codes({1, 4, 4, 3});
  Expect(Gives(node, {x, Signed({1, 2, 2, 2})}, Codes({1, 2, 2, 2})), "a residual of the output's shape");
  Expect(Refuses(node, {x}) && Refuses(node, {x, Codes({1, 2, 2, 2})}), "no residual, or of another type");
  Expect(Refuses(node, {x, Signed({1, 2, 2, 1})}) && Refuses(node, {x, Signed({2, 2, 2})}),
         "a residual of another shape");
}

Builder ConvWithoutWeights(int64_t out_channels) {
  return Builder("LowBitConv")
      .Set("in_channels", int64_t{3})
      .Set("out_channels", out_channels)
      .Set("kernel_shape", Ints{1, 1})
      .Feed("x")
      .Floats("x_scale", {1.0f})
      .Ints("x_zero_point", {0})
      .Floats("w_scale", {1.0f})
      .Ints("w_zero_point", {0})
      .Floats("y_scale", {1.0f});
}

void TestMissingWeights() {
  Expect(Throws([] { ConvWithoutWeights(2).Decode(); }), "weights are needed");
  const NodeSpec node = ConvWithoutWeights(2).Decode(Weights::kMayBeMissing);
  Expect(std::get<MatmulNode>(node).conv.weights.empty(), "weights may be missing where said so");
  Expect(Gives(node, {Codes({1, 5, 5, 3})}, Codes({1, 5, 5, 2})), "shapes need no weights");
  Expect(Throws([] { ConvWithoutWeights(int64_t{1} << 29).Decode(Weights::kMayBeMissing); }),
         "without weights a claim of many channels is not believed");
  Expect(Throws([] {
           Builder("LowBitQuantize").Feed("x").Ints("y_zero_point", {0}).Decode(Weights::kMayBeMissing);
         }),
         "other constants may not");
}

void TestGemm() {
  const NodeSpec node = Builder("LowBitGemm")
                            .Set("in_features", int64_t{6})
                            .Set("out_features", int64_t{2})
                            .Set("axis", int64_t{-2})
                            .Set("epilogue", std::string("float"))
                            .Feed("x")
                            .Floats("x_scale", {1.0f})
                            .Ints("x_zero_point", {0})
                            .Bytes("w", std::vector<uint8_t>(12, 1))
                            .Floats("w_scale", {1.0f})
                            .Ints("w_zero_point", {0})
                            .Decode();
  Expect(Gives(node, {Codes({4, 5, 2, 3})}, Floats({4, 5, 2})), "a Gemm flattens from its axis on");
  Expect(Refuses(node, {Codes({4, 5, 2, 2})}) && Refuses(node, {Codes({6})}), "features and rank");
}

void TestElementwise() {
  const NodeSpec add = Builder("LowBitAdd")
                           .Feed("a")
                           .Floats("a_scale", {1.0f})
                           .Ints("a_zero_point", {0})
                           .Feed("b")
                           .Floats("b_scale", {1.0f})
                           .Ints("b_zero_point", {0})
                           .Floats("y_scale", {1.0f})
                           .Set("b_encoding", std::string("signed"))
                           .Decode();
  Expect(Gives(add, {Codes({2, 1, 4}), Signed({3, 1})}, Codes({2, 3, 4})), "operands broadcast");
  Expect(Refuses(add, {Codes({2, 3}), Signed({2, 4})}) && Refuses(add, {Codes({2, 3})}), "or do not");
  const int64_t huge = int64_t{1} << 40;
  Expect(Refuses(add, {Codes({huge, 1}), Signed({1, huge})}), "a product of sizes beyond memory");
  Expect(Refuses(add, {Codes({-1, 1}), Signed({1, 1})}), "negative dims");

  const NodeSpec requantize = Builder("LowBitRequantize")
                                  .Feed("x")
                                  .Floats("x_scale", {1.0f, 2.0f})
                                  .Ints("x_zero_point", {0})
                                  .Floats("y_scale", {1.0f})
                                  .Ints("y_zero_point", {0})
                                  .Decode();
  Expect(std::get<AffineNode>(requantize).spec.y_scale.size() == 2, "arrays are as long as the channels");
  Expect(Refuses(requantize, {Codes({4, 3})}), "channels stand last");

  const NodeSpec quantize = Builder("LowBitQuantize")
                                .Feed("x")
                                .Floats("y_scale", {0.5f})
                                .Ints("y_zero_point", {0})
                                .Set("to_channels_last", int64_t{1})
                                .Decode();
  Expect(Gives(quantize, {Floats({1, 3, 4, 5})}, Codes({1, 4, 5, 3})), "channels move last");
  Expect(Refuses(quantize, {Codes({1, 3, 4, 5})}) && Refuses(quantize, {Floats({1})}), "type and rank");
}

void TestImages() {
  const NodeSpec pool = Builder("LowBitMaxPool")
                            .Feed("x")
                            .Set("kernel_shape", Ints{3, 3})
                            .Set("strides", Ints{2, 2})
                            .Set("ceil_mode", int64_t{1})
                            .Decode();
  Expect(Gives(pool, {Codes({1, 6, 7, 2})}, Codes({1, 3, 3, 2})), "ceil_mode counts the last window");
  Expect(Refuses(pool, {Codes({1, 2, 7, 2})}), "a window that does not fit");

  const NodeSpec resize = Builder("LowBitResize")
                              .Feed("x")
                              .Set("scales", std::vector<float>{2.0f, 0.5f})
                              .Set("coordinate_transformation_mode", std::string("asymmetric"))
                              .Set("nearest_mode", std::string("floor"))
                              .Decode();
  Expect(Gives(resize, {Codes({1, 3, 4, 2})}, Codes({1, 6, 2, 2})), "a resized image");
  const auto& spec = std::get<ResizeNode>(resize);
  Expect(
      spec.SourceIndices(0, 3, 6) == Ints({0, 0, 1, 1, 2, 2}) && spec.SourceIndices(1, 4, 2) == Ints({0, 2}),
      "where its pixels come from");

  const NodeSpec blend = Builder("LowBitResize")
                             .Feed("x")
                             .Floats("x_scale", {0.5f})
                             .Ints("x_zero_point", {3})
                             .Floats("y_scale", {0.25f})
                             .Set("scales", std::vector<float>{2.0f, 2.0f})
                             .Set("mode", std::string("linear"))
                             .Set("y_encoding", std::string("signed"))
                             .Decode();
  Expect(Gives(blend, {Codes({1, 2, 3, 4})}, Signed({1, 4, 6, 4})), "codes of a type of their own");
  const auto& computed = std::get<ResizeNode>(blend);
  const ResizeNode::Taps taps = computed.TapsOf(0, 2, 4);
  Expect(computed.multiplier == 2.0f && taps.count == 2, "one multiplier, two taps");
  Expect(taps.indices == Ints({0, 1, 0, 1, 0, 1, 1, 1}) &&
             taps.weights == std::vector<float>({1, 0, 0.75f, 0.25f, 0.25f, 0.75f, 1, 0}),
         "the pixels around a position, the edge beyond it");

  const NodeSpec blocks = Builder("LowBitDepthToSpace").Feed("x").Set("blocksize", int64_t{2}).Decode();
  Expect(Gives(blocks, {Codes({1, 3, 4, 8})}, Codes({1, 6, 8, 2})), "channels become pixels");
  const int64_t most = std::numeric_limits<int64_t>::max();
  Expect(Refuses(blocks, {Codes({0, most, 4, 8})}), "a size that overflows");
}

}  // namespace

void TestNodes() {
  TestConv();
  TestResidual();
  TestMissingWeights();
  TestGemm();
  TestElementwise();
  TestImages();
}

}  // namespace lowbit
