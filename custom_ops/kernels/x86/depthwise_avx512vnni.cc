#include "kernels/x86/depthwise_impl.h"
#include "kernels/x86/depthwise_simd.h"

namespace lowbit {
namespace {

struct Dot512 : Depthwise512 {
  static I Dot(I acc, I x, I w) { return _mm512_dpbusd_epi32(acc, x, w); }
};
struct Dot256 : Depthwise256 {
  static I Dot(I acc, I x, I w) { return _mm256_dpbusd_epi32(acc, x, w); }
};
struct Dot128 : Depthwise128 {
  static I Dot(I acc, I x, I w) { return _mm_dpbusd_epi32(acc, x, w); }
};

}  // namespace

const DepthwiseEngine kDepthwiseAvx512 = {
    DepthwiseProducts::kNarrow,
    {{&kKernels<Dot512, false, false>, &kKernels<Dot256, false, false>, &kKernels<Dot128, false, false>},
     {&kKernels<Dot512, false, true>, &kKernels<Dot256, false, true>, &kKernels<Dot128, false, true>}}};

const DepthwiseEngine kDepthwiseAvx512Wide = {
    DepthwiseProducts::kWide,
    {{&kKernels<Depthwise512, true, false>, &kKernels<Depthwise256, true, false>,
      &kKernels<Depthwise128, true, false>},
     {&kKernels<Depthwise512, true, true>, &kKernels<Depthwise256, true, true>,
      &kKernels<Depthwise128, true, true>}}};

}  // namespace lowbit
