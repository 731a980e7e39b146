#include "kernels/x86/elementwise.h"

namespace lowbit {

const ElementwiseKernels& ElementwiseSse41() { return ElementwiseReference(); }

}  // namespace lowbit
