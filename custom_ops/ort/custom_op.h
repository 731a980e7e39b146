// The one wrapper that turns every schema entry into an op of ONNX Runtime.
#pragma once

#include "core/schema.h"
#include "ort/ort_api.h"

namespace lowbit::ort {

struct CustomOp : OrtCustomOp {
  explicit CustomOp(const OpSchema& op_schema);
  const OpSchema* schema;
};

}  // namespace lowbit::ort
