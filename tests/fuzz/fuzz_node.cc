// Nodes of ai.lowbit: their attributes, and the types, shapes and elements of their constants.
#include <fuzzer/FuzzedDataProvider.h>

#include <deque>
#include <string>
#include <vector>

#include "core/nodes.h"
#include "core/schema.h"
#include "core/status.h"

namespace lowbit {
namespace {

constexpr const char* kWords[] = {"unsigned",   "signed", "bipolar", "requantize", "float",
                                  "thresholds", "tail",   "bias",    "affine",     "bias,relu",
                                  "residual",   "silu",   "nearest", "linear"};
constexpr int64_t kNumbers[] = {-1,        0,        1, 2, 3, 4, 8, 255, 256, 1 << 20, int64_t{1} << 31,
                                INT64_MAX, INT64_MIN};

int64_t DrawnInt(FuzzedDataProvider& in) {
  return in.ConsumeBool() ? in.PickValueInArray(kNumbers) : in.ConsumeIntegral<int64_t>();
}

template <typename T, typename Draw>
std::vector<T> DrawnList(FuzzedDataProvider& in, Draw draw) {
  std::vector<T> list(in.ConsumeIntegralInRange<size_t>(0, 8));
  for (T& each : list) each = draw();
  return list;
}

AttributeValue DrawnAttribute(FuzzedDataProvider& in, AttributeKind kind) {
  switch (kind) {
    case AttributeKind::kInt:
      return DrawnInt(in);
    case AttributeKind::kFloat:
      return in.ConsumeFloatingPoint<float>();
    case AttributeKind::kString:
      return in.ConsumeBool() ? std::string(in.PickValueInArray(kWords)) : in.ConsumeRandomLengthString(12);
    case AttributeKind::kInts:
      return DrawnList<int64_t>(in, [&] { return DrawnInt(in); });
    case AttributeKind::kFloats:
      return DrawnList<float>(in, [&] { return in.ConsumeFloatingPoint<float>(); });
  }
  return int64_t{0};
}

std::vector<int64_t> DrawnDims(FuzzedDataProvider& in, int64_t most) {
  std::vector<int64_t> dims(in.ConsumeIntegralInRange<size_t>(0, 5));
  for (int64_t& dim : dims) dim = in.ConsumeIntegralInRange<int64_t>(0, most);
  return dims;
}

// A constant in a block that is as long as it is.
ConstTensor DrawnConstant(FuzzedDataProvider& in, std::deque<std::vector<uint8_t>>& kept) {
  ConstTensor constant{static_cast<ElementType>(in.ConsumeIntegralInRange<int>(0, 3)), DrawnDims(in, 6),
                       nullptr};
  size_t bytes = ElementSize(constant.type);
  for (const int64_t dim : constant.shape) bytes *= static_cast<size_t>(dim);
  std::vector<uint8_t>& data = kept.emplace_back(in.ConsumeBytes<uint8_t>(bytes));
  data.resize(bytes);
  constant.data = data.data();
  return constant;
}

void Try(FuzzedDataProvider& in) {
  const std::span<const OpSchema> schemas = OpSchemas();
  const OpSchema& schema = schemas[in.ConsumeIntegralInRange<size_t>(0, schemas.size() - 1)];
  AttributeMap attributes;
  for (const AttributeSchema& attribute : schema.attributes) {
    if (!in.ConsumeBool()) continue;
    const bool is_of_its_kind = in.ConsumeIntegralInRange<int>(0, 15) != 0;
    const AttributeKind kind =
        is_of_its_kind ? attribute.kind : static_cast<AttributeKind>(in.ConsumeIntegralInRange<int>(0, 4));
    attributes.insert_or_assign(attribute.name, DrawnAttribute(in, kind));
  }
  size_t count = schema.inputs.size();
  if (schema.inputs.back().variadic) count += in.ConsumeIntegralInRange<size_t>(0, 6);
  std::deque<std::vector<uint8_t>> kept;
  std::vector<std::optional<ConstTensor>> constants(count);
  std::vector<bool> present(count);
  std::vector<Shape> shapes(count);
  std::vector<TensorShape> fed;
  for (size_t i = 0; i < count; ++i) {
    const int what = in.ConsumeIntegralInRange<int>(0, 7);
    present[i] = what != 0;
    if (what == 0) continue;
    const InputSchema& input = schema.inputs[std::min(i, schema.inputs.size() - 1)];
    if (input.constant != (what == 1)) {
      constants[i] = DrawnConstant(in, kept);
    } else {
      fed.push_back(
          {static_cast<ElementType>(in.ConsumeIntegralInRange<int>(0, 3)), DrawnDims(in, INT32_MAX)});
    }
    shapes[i].emplace();
    for (const int64_t dim : constants[i] ? constants[i]->shape : fed.back().dims)
      shapes[i]->push_back({dim, {}});
  }
  try {
    static_cast<void>(InferOutput(schema, attributes, shapes, present));
  } catch (const Error&) {
    // It was refused, as it should be.
  }
  static_cast<void>(OutputOf(DecodeNode(schema, attributes, constants, present), fed));
}

}  // namespace
}  // namespace lowbit

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  try {
    lowbit::Try(in);
  } catch (const lowbit::Error&) {
    // It was refused, as it should be.
  }
  return 0;
}
