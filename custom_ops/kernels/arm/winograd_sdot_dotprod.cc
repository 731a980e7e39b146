// Winograd F(2x2, 3x3) with 8-bit operands and 32-bit sums: SDOT. ARMv8.2 with the dot product extension.
//
// Transformed inputs, codes of up to 6 bits around zero, stay inside a byte. Weights grow up to 9 times: 4 bits
// always fit, 5 and 6 where the actual ones do.
#include <arm_neon.h>

#include <cstdint>

#include "kernels/arm/gemm_finish.h"
#include "kernels/arm/winograd_schemes.h"
#include "kernels/arm/winograd_transform.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8, kProductBytes = 32;

struct Points : PointsOfTwo<NeonRing> {
  static constexpr bool kWords = false;
};

void Input(const WinogradInput& in) {
  const int8x16_t shift = vdupq_n_s8(static_cast<int8_t>(in.shift));
  for (size_t block = 0; block < in.blocks; ++block) {
    const auto load = [&](int i) LOWBIT_ALWAYS_INLINE {
      return vsubq_s8(vreinterpretq_s8_u8(vld1q_u8(in.pixels[i] + block * 16)), shift);
    };
    TransformInputs<Points, int8x16_t>(load, in.to + block * in.block_pitch, in.point_pitch, kStoreVector);
  }
}

// Four channels of every tile with their weights for 8 output channels.
template <int kLane, int kTiles>
inline LOWBIT_ALWAYS_INLINE void Multiply(const int8x16_t (&x)[kTiles], const uint8_t* w,
                                          int32x4_t (&acc)[kTiles][2]) {
  const int8x16_t w0 = vreinterpretq_s8_u8(vld1q_u8(w + kLane * 32));
  const int8x16_t w1 = vreinterpretq_s8_u8(vld1q_u8(w + kLane * 32 + 16));
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) {
    acc[t][0] = vdotq_laneq_s32(acc[t][0], w0, x[t], kLane);
    acc[t][1] = vdotq_laneq_s32(acc[t][1], w1, x[t], kLane);
  }
}

template <int kTiles>
void ProductOf(const WinogradProduct& p) {
  const uint8_t *x_item = p.x, *w_item = p.w;
  uint8_t* to = p.to;
  for (size_t item = 0; item < p.count; ++item) {
    const uint8_t *x_at = x_item, *w_at = w_item;
    int32x4_t acc[kTiles][2];
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) {
      const auto* sums = reinterpret_cast<const int32_t*>(to + t * 32);
      acc[t][0] = p.adds ? vld1q_s32(sums) : vdupq_n_s32(0);
      acc[t][1] = p.adds ? vld1q_s32(sums + 4) : vdupq_n_s32(0);
    }
    for (size_t block = 0; block < p.blocks; ++block) {
      int8x16_t x[kTiles];
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t) x[t] = vreinterpretq_s8_u8(vld1q_u8(x_at + t * 16));
      Multiply<0>(x, w_at, acc);
      Multiply<1>(x, w_at, acc);
      Multiply<2>(x, w_at, acc);
      Multiply<3>(x, w_at, acc);
      x_at += kTiles * 16;
      w_at += 128;
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) {
      auto* sums = reinterpret_cast<int32_t*>(to + t * 32);
      vst1q_s32(sums, acc[t][0]);
      vst1q_s32(sums + 4, acc[t][1]);
    }
    x_item += p.x_step;
    w_item += p.w_step;
    to += p.to_step;
  }
}

template <bool kDirect>
void OutputTiles(const WinogradOutput& out) {
  constexpr int kT = Points::kTile;
  const bool adds = out.base == nullptr;
  int32x4_t offset[2], base[2];
  for (size_t v = 0; v < 2; ++v) {
    offset[v] = vshlq_n_s32(vld1q_s32(out.offset + 4 * v), 2);
    base[v] = adds ? vdupq_n_s32(0) : vld1q_s32(out.base + 4 * v);
  }
  const Requantizer<2> requantizer(*out.epilogue, out.channel);
  const size_t point_pitch = out.point_pitch / sizeof(int32_t);
  for (size_t tile = 0; tile < out.tiles; ++tile) {
    const auto* products = reinterpret_cast<const int32_t*>(out.products + tile * kProductBytes);
    const auto load = [&](int point, int v) LOWBIT_ALWAYS_INLINE {
      return vld1q_s32(products + static_cast<size_t>(point) * point_pitch + v * 4);
    };
    int32_t* sums = out.sums + tile * kT * kChannels;
    WinogradDirect direct{};
    if (kDirect) direct = out.direct[tile];
    const auto finish = [&](int row, const int32x4_t(&y)[2][kT]) LOWBIT_ALWAYS_INLINE {
      if (kDirect && static_cast<size_t>(row) >= direct.rows) return;
      int32x4_t sum[2 * kT];  // [pixel][vector]
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kT; ++i) {
        sum[i] = vsraq_n_s32(adds ? vld1q_s32(sums + 4 * i) : base[i % 2], y[i % 2][i / 2], 2);
        if (kDirect) {
          sum[i] = requantizer.Code(sum[i], i % 2);
        } else {
          vst1q_s32(sums + 4 * i, sum[i]);
        }
      }
      sums += out.row_pitch;
      if (!kDirect) return;
      const uint8x16_t codes = requantizer.Pack(sum);
      vst1_u8(direct.y, vget_low_u8(codes));
      if (direct.columns > 1) vst1_u8(direct.y + out.epilogue->channels, vget_high_u8(codes));
      direct.y += out.y_row_pitch;
    };
    TransformOutputs<Points, 2>(load, offset, finish);
  }
}

void Output(const WinogradOutput& out) {
  return out.direct != nullptr ? OutputTiles<true>(out) : OutputTiles<false>(out);
}

void Product(const WinogradProduct& p) { return p.tiles == 8 ? ProductOf<8>(p) : ProductOf<4>(p); }

// Two SDOT a cycle (modelled Neoverse N1).
constexpr WinogradCycles kCycles = {
    .group = 4, .tile = 4, .weights = 300, .input = 40, .output = 60, .finish = 30, .sums = 60};

}  // namespace

const WinogradScheme kWinogradSdot = {
    .tile = Points::kTile,
    .channels = kChannels,
    .code_bytes = 1,
    .block = 16,
    .unit = 4,
    .sum_bytes = 4,
    .group = 8,
    .granule = 4,
    .pass_points = 16,
    .scratch_bytes = 256 * 1024,
    .slice_bytes = 256 * 1024,
    .block_tiles = 40,
    .signed_inputs = true,
    .input_offset = 0,
    .bits = 30,
    .chunks_per_widening = 1,
    .g = Points::kG,
    .weights4 = &TransformWeights<Points, 4>,
    .weights8 = &TransformWeights<Points, 8>,
    .input = &Input,
    .product = &Product,
    .output = &Output,
    .finish = &FinishSums,
    .cycles = []() -> const WinogradCycles& { return kCycles; },
};

}  // namespace lowbit
