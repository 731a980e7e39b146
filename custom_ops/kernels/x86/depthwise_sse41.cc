#include "kernels/x86/depthwise_impl.h"
#include "kernels/x86/depthwise_simd.h"

namespace lowbit {

const DepthwiseEngine kDepthwiseSse41 = {
    DepthwiseProducts::kWide,
    {{&kKernels<Depthwise128, true, false>}, {&kKernels<Depthwise128, true, true>}}};

}  // namespace lowbit
