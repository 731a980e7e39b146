// igemm without dot-product instructions, 256 bits.
#include "kernels/x86/igemm_words.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
const IgemmEngine kIgemmAvx2Narrow = {8, 2, WeightLayout::kBytes, true, 45.0, &Run<NarrowDot<Avx2>>};
const IgemmEngine kIgemmAvx2Wide = {8, 2, WeightLayout::kWords, false, 25.0, &Run<WideDot<Avx2>>};

}  // namespace lowbit
