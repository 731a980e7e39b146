#include "kernels/common/elementwise_impl.h"
#include "kernels/x86/elementwise.h"
#include "kernels/x86/elementwise_bytes.h"

namespace lowbit {

const ElementwiseKernels& ElementwiseSse41() {
  static constexpr ElementwiseKernels kernels = MakeKernels<Bytes128>("sse41");
  return kernels;
}

}  // namespace lowbit
