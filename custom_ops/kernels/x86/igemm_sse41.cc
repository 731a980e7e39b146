// igemm without dot-product instructions, 128 bits.
#include "kernels/x86/igemm_words.h"
#include "kernels/x86/simd_sse41.h"

namespace lowbit {
const IgemmEngine kIgemmSse41Narrow = {
    .lanes = 4,
    .max_vectors = 2,
    .narrow = true,
    .macs_per_cycle = 21.0,
    .outputs_per_cycle = 0.9,
    .tile_rows = 6,
    .least_rows = 1.0,
    .run = &Run<NarrowDot<Sse41>>,
    .sum_weights = nullptr,
    .sum_rows = nullptr,
};
const IgemmEngine kIgemmSse41Wide = {
    .lanes = 4,
    .max_vectors = 2,
    .narrow = false,
    .operand_bytes = &WordBytes,
    .unpacked_bytes = 2 * WideDot<Sse41>::kMaxVectors * WideDot<Sse41>::kWeightBytes,
    .direct_pixels = kDirectPixels,
    .macs_per_cycle = 12,
    .outputs_per_cycle = 1.2,
    .tile_rows = 6,
    .least_rows = 1.0,
    .run = &RunWords<WideDot<Sse41>>,
    .sum_weights = &SumWeights<WideDot<Sse41>>,
    .sum_rows = &SumRows<WideDot<Sse41>>,
};

}  // namespace lowbit
