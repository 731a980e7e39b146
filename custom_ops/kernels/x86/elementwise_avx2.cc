#include "kernels/x86/elementwise.h"

namespace lowbit {

const ElementwiseKernels& ElementwiseAvx2() { return ElementwiseReference(); }

}  // namespace lowbit
