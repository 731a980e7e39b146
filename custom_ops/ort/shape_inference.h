#pragma once

#include "core/schema.h"
#include "ort/ort_api.h"

namespace lowbit::ort {

// Sets the output shape as far as it is known. What cannot be inferred is left to the run; a node that can
// never work is reported when its kernel is created, with its name.
void InferShape(const OpSchema& schema, OrtShapeInferContext* context);

}  // namespace lowbit::ort
