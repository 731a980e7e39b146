// The elementwise kernel table of ARM.
#pragma once

#include "core/elementwise.h"

namespace lowbit {

const ElementwiseKernels& ElementwiseNeon();

}  // namespace lowbit
