// Look-ups with vpermb, 512 bits: tiles of up to 8 pixels x 32 channels.
//
// One vpermb reads four tables of a pixel, sixteen channels of x, with 64 indices: four for each of sixteen
// output channels. The bytes of four look-ups are added; then one vpdpbusd adds the four bytes of each output
// channel to its int32 accumulator, weighted by the planes that they belong to:
//
//     1-bit weights   byte j of a channel looks into table j
//     2-bit weights   look-up 2i: table 0 plane 0, table 0 plane 1, table 1 plane 0, table 1 plane 1;
//                     look-up 2i + 1: the same of tables 2 and 3
#include "kernels/common/inline.h"
#include "kernels/x86/lut_build_avx512.h"
#include "kernels/x86/lut_tile.h"

namespace lowbit {
namespace {

struct Permute {
  using I = __m512i;
  static constexpr int kMaxPixels = 8, kMaxUnits = 2;
  template <int kPlanes>
  static constexpr size_t kIndexBytes = 64;
  template <int kPlanes>
  static constexpr size_t kTableStep = kQuadBytes / kPlanes;

  // The look-ups of one segment, from tables at x with indices at w.
  template <int MR, int NV, int kPlanes, int kPerFlush>
  static inline __attribute__((always_inline)) void Segment(const uint8_t* const (&x)[MR], const uint8_t* w,
                                                            size_t lookups, I slots, I (&acc)[MR][NV]) {
    constexpr size_t kBytes = kIndexBytes<kPlanes>;
    size_t i = 0, at = 0;
    for (; i + 4 <= lookups; i += 4, at += 4 * kQuadBytes / kPlanes, w += 4 * NV * kBytes) {
      I index[4][NV];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) index[j][v] = _mm512_loadu_si512(w + (j * NV + v) * kBytes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        I table[4 / kPlanes];
#pragma GCC unroll 4
        for (int j = 0; j < 4 / kPlanes; ++j) {
          table[j] = _mm512_load_si512(x[r] + at + j * kQuadBytes);
          // A register for all units: compilers would rather read the tables from memory for each, and two
          // loads a cycle are what limits this loop then (1.38 against 1.50 look-ups per cycle).
          __asm__("" : "+v"(table[j]));
        }
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          I sum[4];
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) sum[j] = _mm512_permutexvar_epi8(index[j][v], table[j / kPlanes]);
          if constexpr (kPerFlush == 4) {
            const I all = _mm512_add_epi8(_mm512_add_epi8(sum[0], sum[1]), _mm512_add_epi8(sum[2], sum[3]));
            acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], all, slots);
          } else if constexpr (kPerFlush == 2) {
            acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], _mm512_add_epi8(sum[0], sum[1]), slots);
            acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], _mm512_add_epi8(sum[2], sum[3]), slots);
          } else {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], sum[j], slots);
          }
        }
      }
    }
    for (; i < lookups; ++i, w += NV * kBytes) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const I table = _mm512_load_si512(x[r] + i / kPlanes * kQuadBytes);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const I index = _mm512_loadu_si512(w + v * kBytes);
          acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], _mm512_permutexvar_epi8(index, table), slots);
        }
      }
    }
  }

  template <int MR, int NV, int kPlanes>
  static void Tile(const LutTile& t) {
    I acc[MR][NV];
    StartTile<Avx512, MR, NV>(t, acc);
    const I slots = _mm512_set1_epi32(t.block->slot_weights);
    WithFlush(t.block->per_flush, [&]<int kPerFlush>() LOWBIT_ALWAYS_INLINE {
      const uint8_t* w = t.indices;
      const uint8_t* const* rows = t.rows;
      for (size_t s = 0; s < t.segments; ++s, rows += t.block->pitch) {
        if (!AllPadding<MR>(rows, t.block->zero_row)) {
          const uint8_t* x[MR];
#pragma GCC unroll 16
          for (int r = 0; r < MR; ++r) x[r] = rows[r] + t.table_offset;
          Segment<MR, NV, kPlanes, kPerFlush>(x, w, t.lookups, slots, acc);
        }
        w += t.lookups * NV * kIndexBytes<kPlanes>;
      }
    });
    EndTile<Avx512, MR, NV>(t, acc);
  }
};

}  // namespace

const LutEngine kLutAvx512Popcnt = {
    .layout = LutLayout::kPermute,
    .vector_tables = 4,
    .max_units = Permute::kMaxUnits,
    .max_pixels = Permute::kMaxPixels,
    .lookup_cycles = 0.63,
    .table_cycles = 0.0,
    .wide_cycles = 0.12,
    .unit_cycles = 4.1,
    .build = &TableBuilder<Bytes512>::Run,
    .run = &RunLut<Permute>,
};

}  // namespace lowbit
