// igemm without dot-product instructions, 256 bits.
#include "kernels/x86/igemm_words.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
const IgemmEngine kIgemmAvx2Narrow = {8, 2,   WeightLayout::kBytes,  true,    50.5,   1.7,
                                      6, 1.5, &Run<NarrowDot<Avx2>>, nullptr, nullptr};
const IgemmEngine kIgemmAvx2Wide = {8,
                                    2,
                                    WeightLayout::kWords,
                                    false,
                                    23.5,
                                    2.5,
                                    4,
                                    1.5,
                                    &Run<WideDot<Avx2>>,
                                    &SumWeights<WideDot<Avx2>>,
                                    nullptr};

}  // namespace lowbit
