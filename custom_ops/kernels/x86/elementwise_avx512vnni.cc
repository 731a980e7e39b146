#include "kernels/x86/elementwise.h"

namespace lowbit {

const ElementwiseKernels& ElementwiseAvx512() { return ElementwiseReference(); }

}  // namespace lowbit
