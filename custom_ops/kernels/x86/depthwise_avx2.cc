#include "kernels/x86/depthwise_impl.h"
#include "kernels/x86/depthwise_simd.h"

namespace lowbit {

const DepthwiseEngine kDepthwiseAvx2 = {
    DepthwiseProducts::kWide,
    {{&kKernels<Depthwise256, true, false>, &kKernels<Depthwise128, true, false>},
     {&kKernels<Depthwise256, true, true>, &kKernels<Depthwise128, true, true>}}};

}  // namespace lowbit
