// Bit-serial tiles by vpshufb, 512 bits: 64 output channels per vector. The explanation is in
// bitserial_nibbles.h.
#include "kernels/x86/bitserial_nibbles.h"
#include "kernels/x86/simd_avx512.h"

namespace lowbit {
namespace {

struct Nibbles512 : Avx512 {
  // Pixels per tile, by vectors per panel: 32 registers hold the counts, the nibbles of the weights and two
  // tables.
  static constexpr int kTileRows[2] = {12, 8};

  static I SetWords(int16_t v) { return _mm512_set1_epi16(v); }
  static I AddWords(I a, I b) { return _mm512_add_epi16(a, b); }
  static I MultiplyAddBytes(I a, I b) { return _mm512_maddubs_epi16(a, b); }
  static I MultiplyAdd16(I a, I b) { return _mm512_madd_epi16(a, b); }
  static I SubBytes(I a, I b) { return _mm512_sub_epi8(a, b); }
  static I SubWords(I a, I b) { return _mm512_sub_epi16(a, b); }
  static I ShiftLeftWords(I v, int by) { return _mm512_sll_epi16(v, _mm_cvtsi32_si128(by)); }
  static I GreaterWords(I a, I b) { return _mm512_movm_epi16(_mm512_cmpgt_epi16_mask(a, b)); }
  static I UnpackLowWords(I a, I b) { return _mm512_unpacklo_epi16(a, b); }
  static I UnpackHighWords(I a, I b) { return _mm512_unpackhi_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm512_packs_epi16(a, b); }
  static I PackUnsignedWords(I a, I b) { return _mm512_packus_epi16(a, b); }
  static I PackIntegers(I a, I b) { return _mm512_packus_epi32(a, b); }
  static I LanesSideBySide(I v) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    v);
  }
  static I LoadQuarters(const int16_t* p) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), Load(p));
  }
  static I ShiftRightWords(I v, int by) { return _mm512_srl_epi16(v, _mm_cvtsi32_si128(by)); }
  static I ShiftLeft(I v, int by) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(by)); }
};

}  // namespace

const BitserialEngine kBitserialAvx512Vnni = {.lanes = Nibbles<Nibbles512>::kVectorBytes,
                                              .lane_step = Nibbles<Nibbles512>::kParts,
                                              .max_vectors = Nibbles<Nibbles512>::kMaxVectors,
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
                                              .products_per_cycle = 426.0,
                                              .fetch_cycles = 0.136,
                                              .outputs_per_cycle = 5.2,
                                              .few_codes_per_cycle = 5.2,
                                              .sums_per_cycle = 7.0,
                                              .code_cycles = 0.0,
                                              .digit_cycles = 0.048,
                                              .call_cycles = kBitserialCallCycles,
                                              .tile_rows = 8,
                                              .least_rows = 2,
                                              .digits_are_rows = false,
                                              .pack = &Nibbles<Nibbles512>::Pack,
                                              .run = &RunBitserial<Nibbles<Nibbles512>>};

}  // namespace lowbit
