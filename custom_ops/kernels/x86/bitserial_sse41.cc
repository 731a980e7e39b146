// Bit-serial tiles by pshufb, 128 bits: 16 output channels per vector. The explanation is in
// bitserial_nibbles.h.
#include "kernels/x86/bitserial_nibbles.h"
#include "kernels/x86/simd_sse41.h"

namespace lowbit {
namespace {

struct Nibbles128 : Sse41 {
  // Pixels per tile, by vectors per panel: 16 registers hold the counts, the nibbles of the weights and two
  // tables.
  static constexpr int kTileRows[2] = {6, 4};

  static I SubBytes(I a, I b) { return _mm_sub_epi8(a, b); }
  static I SubWords(I a, I b) { return _mm_sub_epi16(a, b); }
  static I ShiftLeftWords(I v, int by) { return _mm_sll_epi16(v, _mm_cvtsi32_si128(by)); }
  static I GreaterWords(I a, I b) { return _mm_cmpgt_epi16(a, b); }
  static I UnpackLowWords(I a, I b) { return _mm_unpacklo_epi16(a, b); }
  static I UnpackHighWords(I a, I b) { return _mm_unpackhi_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm_packs_epi16(a, b); }
  static I PackUnsignedWords(I a, I b) { return _mm_packus_epi16(a, b); }
  static I PackIntegers(I a, I b) { return _mm_packus_epi32(a, b); }
  static I LanesSideBySide(I v) { return v; }
  static I LoadQuarters(const int16_t* p) { return Load(p); }
  static I ShiftRightWords(I v, int by) { return _mm_srl_epi16(v, _mm_cvtsi32_si128(by)); }
  static I ShiftLeft(I v, int by) { return _mm_sll_epi32(v, _mm_cvtsi32_si128(by)); }
};

}  // namespace

const BitserialEngine kBitserialSse41 = {.lanes = Nibbles<Nibbles128>::kVectorBytes,
                                         .lane_step = Nibbles<Nibbles128>::kParts,
                                         .max_vectors = Nibbles<Nibbles128>::kMaxVectors,
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
                                         .products_per_cycle = 75.0,
                                         .fetch_cycles = 0.0,
                                         .outputs_per_cycle = 1.5,
                                         .few_codes_per_cycle = 2.0,
                                         .sums_per_cycle = 2.6,
                                         .code_cycles = 0.0,
                                         .digit_cycles = 0.075,
                                         .call_cycles = kBitserialCallCycles,
                                         .tile_rows = 4,
                                         .least_rows = 2,
                                         .digits_are_rows = false,
                                         .pack = &Nibbles<Nibbles128>::Pack,
                                         .run = &RunBitserial<Nibbles<Nibbles128>>};

}  // namespace lowbit
