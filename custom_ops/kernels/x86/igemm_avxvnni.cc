// igemm on vpdpbusd, 256 bits: tiles of up to 6 pixels x 16 channels. The explanation is in igemm_tile.h.
#include "kernels/x86/igemm_tile.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
namespace {

struct AvxVnni : Avx2 {
  static constexpr bool kNarrow = false;
  static constexpr int kMaxVectors = 2;
  // Pixels per tile, by vectors per panel: 16 registers hold 12 accumulators, the weights and one broadcast.
  static constexpr int kTileRows[kMaxVectors] = {12, 6};
  using Weights = I;
  using Bytes = I;
  static constexpr int kWeightBytes = 32;
  static Weights LoadWeights(const int8_t* p) { return Load(p); }
  static Bytes Prepare(I group) { return group; }
  static I Dot(I acc, Bytes x, Weights w) { return _mm256_dpbusd_avx_epi32(acc, x, w); }
};

}  // namespace

const IgemmEngine kIgemmAvxVnni = {
    .lanes = 8,
    .max_vectors = AvxVnni::kMaxVectors,
    .narrow = false,
    .takes_rows = true,
    .takes_rising = true,
    .macs_per_cycle = 59.5,
    .outputs_per_cycle = 4.8,
    .tile_rows = 6,
    .least_rows = 3.5,
    .run = &Run<AvxVnni>,
    .sum_weights = &SumWeights<AvxVnni>,
    .sum_rows = &SumRows<AvxVnni>,
};

}  // namespace lowbit
