// Bit-serial tiles in plain C++, 64 bits of K at a time.
#include <bit>

#include "kernels/common/bitserial_bits.h"
#include "kernels/x86/bitserial_tile.h"
#include "kernels/x86/simd_scalar.h"

namespace lowbit {
namespace {

inline uint64_t LoadUnit64(const uint8_t* p) {
  uint64_t unit;
  std::memcpy(&unit, p, sizeof(unit));
  return unit;
}

struct Words64 {
  static constexpr int kMaxVectors = 2;
  static constexpr size_t kUnitBytes = 8;
  static constexpr int kTileRows[kMaxVectors] = {2, 2};

  // Adds the counts of one pass.
  template <BitOp kOp, int MR, int NV>
  static void Count(const uint8_t* const (&x)[MR], const uint32_t* offsets, size_t units, const uint8_t* w,
                    uint32_t (&sum)[MR][NV]) {
    for (size_t k = 0; k < units; ++k) {
      uint64_t weights[NV], masks[NV];
      for (int v = 0; v < NV; ++v, w += kUnitBytes) weights[v] = LoadUnit64(w);
      for (int v = 0; v < NV; ++v) masks[v] = ~uint64_t{0};
      if constexpr (kOp == BitOp::kMasked) {
        for (int v = 0; v < NV; ++v, w += kUnitBytes) masks[v] = LoadUnit64(w);
      }
      for (int r = 0; r < MR; ++r) {
        const uint64_t bits = LoadUnit64(x[r] + offsets[k]);
        for (int v = 0; v < NV; ++v) {
          const uint64_t product = kOp == BitOp::kAnd ? weights[v] & bits : (weights[v] ^ bits) & masks[v];
          sum[r][v] += static_cast<uint32_t>(std::popcount(product));
        }
      }
    }
  }

  template <int MR, int NV>
  static void Tile(const BitserialTile& t) {
    const BitserialBlock& b = *t.block;
    const size_t plane_bytes = (b.op == BitOp::kMasked ? 2 : 1) * b.units * NV * kUnitBytes;
    const uint8_t* x[MR];
    for (int r = 0; r < MR; ++r) x[r] = t.pixels[r] + t.panel->x_offset;
    uint32_t sum[MR][NV] = {};  // unsigned: sums of codes outside their range may wrap
    const auto scale = [&](const BitserialPass& pass) {
      for (auto& pixel : sum) {
        for (uint32_t& s : pixel) s = pass.negate ? 0 - (s << pass.shift) : s << pass.shift;
      }
    };
    for (const BitserialPass* pass = b.passes; pass < b.passes + b.pass_count; ++pass) {
      scale(*pass);
      const uint8_t* w = t.panel->weights + pass->weight_plane * plane_bytes;
      const uint32_t* offsets = b.offsets + pass->digit * b.units;
      if (b.op == BitOp::kAnd) Count<BitOp::kAnd, MR, NV>(x, offsets, b.units, w, sum);
      if (b.op == BitOp::kXor) Count<BitOp::kXor, MR, NV>(x, offsets, b.units, w, sum);
      if (b.op == BitOp::kMasked) Count<BitOp::kMasked, MR, NV>(x, offsets, b.units, w, sum);
    }
    scale(b.passes[b.pass_count]);

    int32_t acc[MR * NV];
    for (int r = 0; r < MR; ++r) {
      const int32_t* bias = BiasOf(b, t.pixel + static_cast<size_t>(r)) + t.panel->channel;
      for (int v = 0; v < NV; ++v)
        acc[r * NV + v] = static_cast<int32_t>(static_cast<uint32_t>(bias[v]) + sum[r][v]);
    }
    FinishMemory<Scalar>(b.output, t.pixel, t.panel->channel, t.panel->count, acc, MR, NV);
  }
};

void Pack(const DigitPacking& p) {
  for (size_t row = 0; row < p.rows; ++row) {
    const uint8_t* x = p.x + row * p.x_pitch;
    for (int plane = 0; plane < p.planes; ++plane) {
      uint8_t* to = p.digits + row * p.pitch + static_cast<size_t>(plane) * p.digit_pitch;
      for (size_t byte = 0; byte < p.digit_bytes; ++byte) {
        uint8_t codes[8] = {};
        const size_t first = byte * 8, count = first >= p.codes      ? 0
                                               : p.codes - first < 8 ? p.codes - first
                                                                     : 8;
        for (size_t i = 0; i < count; ++i) codes[i] = x[first + i] ^ p.flip;
        to[byte] = GatherBit(codes, plane);
      }
    }
  }
}

}  // namespace

const BitserialEngine kBitserialScalar = {.lanes = 1,
                                          .lane_step = 1,
                                          .max_vectors = Words64::kMaxVectors,
                                          .unit_bits = 8 * Words64::kUnitBytes,
                                          .digit_planes = 1,
                                          .codes_per_byte = 8,
                                          .has_masked = true,
                                          .masks_by_selection = false,
                                          .masked_operations = 4.0 / 3.0,
                                          .few_codes_bits = 0,
                                          .few_sums = false,
                                          .transposed_codes = 0,
                                          .block_bytes = kBitserialBlockBytes,
                                          .products_per_cycle = 12.0,
                                          .fetch_cycles = 0.0,
                                          .outputs_per_cycle = 0.1,
                                          .few_codes_per_cycle = 0.0,
                                          .sums_per_cycle = 1.0,
                                          .code_cycles = 0.0,
                                          .digit_cycles = 0.33,
                                          .call_cycles = kBitserialCallCycles,
                                          .tile_rows = 2,
                                          .least_rows = 2,
                                          .digits_are_rows = false,
                                          .pack = &Pack,
                                          .run = &RunBitserial<Words64>};

}  // namespace lowbit
