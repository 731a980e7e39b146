// igemm on vpdpbusd, 512 bits: tiles of up to 6 pixels x 64 channels. The explanation is in igemm_tile.h.
#include "kernels/x86/igemm_tile.h"
#include "kernels/x86/simd_avx512.h"

namespace lowbit {
namespace {

struct Avx512Vnni : Avx512 {
  static constexpr bool kNarrow = false;
  static constexpr int kMaxVectors = 4;
  // Pixels per tile, by vectors per panel. 32 registers hold the accumulators, NV weight vectors and one
  // broadcast.
  static constexpr int kTileRows[kMaxVectors] = {12, 12, 8, 6};
  using Weights = I;
  using Bytes = I;
  static constexpr int kWeightBytes = 64;
  static Weights LoadWeights(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Bytes Prepare(I group) { return group; }
  static I Dot(I acc, Bytes x, Weights w) { return _mm512_dpbusd_epi32(acc, x, w); }
};

}  // namespace

const IgemmEngine kIgemmAvx512Vnni = {
    .lanes = 16,
    .max_vectors = Avx512Vnni::kMaxVectors,
    .narrow = false,
    .takes_rows = true,
    .takes_rising = true,
    .macs_per_cycle = 121.0,
    .outputs_per_cycle = 6.4,
    .tile_rows = 6,
    .least_rows = 3.5,
    .run = &Run<Avx512Vnni>,
    .sum_weights = &SumWeights<Avx512Vnni>,
    .sum_rows = &SumRows<Avx512Vnni>,
};

}  // namespace lowbit
