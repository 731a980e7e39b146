// igemm without dot-product instructions, 256 bits.
#include "kernels/x86/igemm_words.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
const IgemmEngine kIgemmAvx2Narrow = {
    .lanes = 8,
    .max_vectors = 2,
    .narrow = true,
    .takes_rising = true,
    .macs_per_cycle = 50.5,
    .outputs_per_cycle = 1.7,
    .tile_rows = 6,
    .least_rows = 1.5,
    .run = &Run<NarrowDot<Avx2>>,
    .sum_weights = nullptr,
    .sum_rows = nullptr,
};
const IgemmEngine kIgemmAvx2Wide = {
    .lanes = 8,
    .max_vectors = 2,
    .narrow = false,
    .takes_rising = true,
    .operand_bytes = &WordBytes,
    .unpacked_bytes = 2 * WideDot<Avx2>::kMaxVectors * WideDot<Avx2>::kWeightBytes,
    .direct_pixels = kDirectPixels,
    .macs_per_cycle = 28,
    .outputs_per_cycle = 2.5,
    .tile_rows = 6,
    .least_rows = 1.5,
    .run = &RunWords<WideDot<Avx2>>,
    .sum_weights = &SumWeights<WideDot<Avx2>>,
    .sum_rows = &SumRows<WideDot<Avx2>>,
};

}  // namespace lowbit
