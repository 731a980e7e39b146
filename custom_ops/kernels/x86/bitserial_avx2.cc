// Bit-serial tiles by vpshufb, 256 bits: 32 output channels per vector. The explanation is in
// bitserial_nibbles.h.
#include "kernels/x86/bitserial_nibbles.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
namespace {

struct Nibbles256 : Avx2 {
  // Pixels per tile, by vectors per panel: 16 registers hold the counts, the nibbles of the weights and two
  // tables.
  static constexpr int kTileRows[2] = {8, 6};

  static I SubBytes(I a, I b) { return _mm256_sub_epi8(a, b); }
  static I SubWords(I a, I b) { return _mm256_sub_epi16(a, b); }
  static I ShiftLeftWords(I v, int by) { return _mm256_sll_epi16(v, _mm_cvtsi32_si128(by)); }
  static I GreaterWords(I a, I b) { return _mm256_cmpgt_epi16(a, b); }
  static I UnpackLowWords(I a, I b) { return _mm256_unpacklo_epi16(a, b); }
  static I UnpackHighWords(I a, I b) { return _mm256_unpackhi_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm256_packs_epi16(a, b); }
  static I PackUnsignedWords(I a, I b) { return _mm256_packus_epi16(a, b); }
  static I PackIntegers(I a, I b) { return _mm256_packus_epi32(a, b); }
  static I LanesSideBySide(I v) {
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static I LoadQuarters(const int16_t* p) { return _mm256_permute4x64_epi64(Load(p), 0xd8); }
  static I ShiftRightWords(I v, int by) { return _mm256_srl_epi16(v, _mm_cvtsi32_si128(by)); }
  static I ShiftLeft(I v, int by) { return _mm256_sll_epi32(v, _mm_cvtsi32_si128(by)); }
};

}  // namespace

const BitserialEngine kBitserialAvx2 = {.lanes = Nibbles<Nibbles256>::kVectorBytes,
                                        .lane_step = Nibbles<Nibbles256>::kParts,
                                        .max_vectors = Nibbles<Nibbles256>::kMaxVectors,
                                        .unit_bits = 8,
                                        .digit_planes = 2,
                                        .codes_per_byte = 4,
                                        .has_masked = false,
                                        .masks_by_selection = false,
                                        .masked_operations = 0.0,
                                        .few_codes_bits = kMaxBitPlanes,
                                        .few_sums = true,
                                        .transposed_codes = 0,
                                        .block_bytes = kBitserialBlockBytes,
                                        .products_per_cycle = 172.0,
                                        .fetch_cycles = 0.0,
                                        .outputs_per_cycle = 3.0,
                                        .few_codes_per_cycle = 4.0,
                                        .sums_per_cycle = 3.9,
                                        .code_cycles = 0.0,
                                        .digit_cycles = 0.041,
                                        .call_cycles = kBitserialCallCycles,
                                        .tile_rows = 6,
                                        .least_rows = 2,
                                        .digits_are_rows = false,
                                        .pack = &Nibbles<Nibbles256>::Pack,
                                        .run = &RunBitserial<Nibbles<Nibbles256>>};

}  // namespace lowbit
