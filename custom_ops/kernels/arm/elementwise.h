// The elementwise kernel table of ARM.
#pragma once

#include "core/cpu/elementwise_kernels.h"

namespace lowbit {

const ElementwiseKernels& ElementwiseNeon();

}  // namespace lowbit
