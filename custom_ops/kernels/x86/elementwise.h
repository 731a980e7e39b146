// The elementwise kernel tables of the x86 levels.
#pragma once

#include "core/cpu/elementwise_kernels.h"

namespace lowbit {

const ElementwiseKernels& ElementwiseSse41();
const ElementwiseKernels& ElementwiseAvx2();
const ElementwiseKernels& ElementwiseAvx512();

}  // namespace lowbit
