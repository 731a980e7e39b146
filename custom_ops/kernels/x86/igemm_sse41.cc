// igemm without dot-product instructions, 128 bits.
#include "kernels/x86/igemm_words.h"
#include "kernels/x86/simd_sse41.h"

namespace lowbit {
const IgemmEngine kIgemmSse41Narrow = {4, 2,   WeightLayout::kBytes,   true,    21.0,   0.9,
                                       6, 1.0, &Run<NarrowDot<Sse41>>, nullptr, nullptr};
const IgemmEngine kIgemmSse41Wide = {4,
                                     2,
                                     WeightLayout::kWords,
                                     false,
                                     10.0,
                                     1.2,
                                     4,
                                     1.0,
                                     &Run<WideDot<Sse41>>,
                                     &SumWeights<WideDot<Sse41>>,
                                     nullptr};

}  // namespace lowbit
