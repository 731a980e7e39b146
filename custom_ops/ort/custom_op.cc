#include "ort/custom_op.h"

#include <limits>

#include "core/selection.h"
#include "ort/node_kernel.h"
#include "ort/shape_inference.h"

namespace lowbit::ort {
namespace {

const OpSchema& SchemaOf(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op)->schema; }

// Undefined means: any, checked when the kernel is created (constants) and at every call (fed tensors).
ONNXTensorElementDataType TypeOf(TypeRule rule) {
  switch (rule) {
    case TypeRule::kUInt8:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    case TypeRule::kInt32:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case TypeRule::kFloat:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case TypeRule::kCodes:
    case TypeRule::kCodesOrFloat:
      break;
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

OrtCustomOpInputOutputCharacteristic CharacteristicOf(const InputSchema& input) {
  if (input.variadic) return INPUT_OUTPUT_VARIADIC;
  return input.optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
}

OrtStatus* MakeKernel(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info,
                      void** kernel) noexcept {
  *kernel = nullptr;
  try {
    *kernel = new NodeKernel(SchemaOf(op), info);
    return nullptr;
  } catch (...) {
    return StatusFromException("");  // the message names the node
  }
}

OrtStatus* RunKernel(void* kernel, OrtKernelContext* context) noexcept {
  const NodeKernel* node = static_cast<const NodeKernel*>(kernel);
  try {
    node->Compute(context);
    return nullptr;
  } catch (...) {
    return StatusFromException(node->where());
  }
}

[[maybe_unused]] OrtStatus* InferOutputShape(const OrtCustomOp* op, OrtShapeInferContext* context) noexcept {
  try {
    InferShape(SchemaOf(op), context);
    return nullptr;
  } catch (...) {
    return nullptr;  // ONNX Runtime drops the status of this callback; MakeKernel repeats the error and names
                     // the node
  }
}

}  // namespace

CustomOp::CustomOp(const OpSchema& op_schema) : OrtCustomOp{}, schema(&op_schema) {
  version = kApiVersion;
  GetName = [](const OrtCustomOp* op) { return SchemaOf(op).name; };
  GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };

  GetInputTypeCount = [](const OrtCustomOp* op) { return SchemaOf(op).inputs.size(); };
  GetInputType = [](const OrtCustomOp* op, size_t i) { return TypeOf(SchemaOf(op).inputs[i].type); };
  GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    return CharacteristicOf(SchemaOf(op).inputs[i]);
  };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };

  // ONNX Runtime derives an output of undefined type from the one input of undefined type; ours depends on
  // attributes and on which inputs are given. An output that is variadic and heterogeneous (of which a node
  // has exactly one) is left alone, so that the shape inference callback can state its type.
  GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  GetOutputType = [](const OrtCustomOp* op, size_t) { return TypeOf(SchemaOf(op).output_type); };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_VARIADIC; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };

  CreateKernelV2 = MakeKernel;
  KernelComputeV2 = RunKernel;
  KernelDestroy = [](void* kernel) { delete static_cast<NodeKernel*>(kernel); };
  // An .ort file states every shape, and a minimal build of ONNX Runtime asks nobody.
  if constexpr (!kMinimal) InferOutputShapeFn = InferOutputShape;
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return std::numeric_limits<int>::max(); };
}

}  // namespace lowbit::ort
