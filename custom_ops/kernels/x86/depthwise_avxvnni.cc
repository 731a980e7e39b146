#include "kernels/x86/depthwise_impl.h"
#include "kernels/x86/depthwise_simd.h"

namespace lowbit {
namespace {

struct Dot256 : Depthwise256 {
  static I Dot(I acc, I x, I w) { return _mm256_dpbusd_avx_epi32(acc, x, w); }
};
struct Dot128 : Depthwise128 {
  static I Dot(I acc, I x, I w) { return _mm_dpbusd_avx_epi32(acc, x, w); }
};

}  // namespace

const DepthwiseEngine kDepthwiseAvxVnni = {
    DepthwiseProducts::kNarrow,
    {{&kKernels<Dot256, false, false>, &kKernels<Dot128, false, false>},
     {&kKernels<Dot256, false, true>, &kKernels<Dot128, false, true>}}};

}  // namespace lowbit
