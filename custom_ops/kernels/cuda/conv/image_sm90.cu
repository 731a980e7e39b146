// A network's first convolution from float planes on wgmma, for Hopper (sm_90a): the same patches as
// image_mma.cu, where
// - planes are read four pixels at a time, two tiles ahead; the next tile's patch is quantized while this
//   one's products are under way;
// - a quantizer's clip bounds are applied to the float and its zero points are added to all channels of a
//   pixel at once: seven instructions a channel, packing included;
// - pixels go from the patch into registers as rows of A; the channels of B's rows are in such an order that
//   a thread holds as many neighbouring ones as it stores at once, which need no way through shared memory.
#include <algorithm>

#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/image.h"
#include "kernels/cuda/conv/pixel_rounding.cuh"
#include "kernels/cuda/conv/weight_rows.h"
#include "kernels/cuda/device/wgmma.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256, kTileRows = 8, kTileColumns = 16;
template <int kTileN>
constexpr int kBlocks = kTileN == 32 ? 3 : 2;  // of a multiprocessor: what registers allow

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The weights of all rows of taps from PackImage's order to B's; rows of taps past the window are 0.
template <int kTileN, int kRows>
__device__ __forceinline__ void LoadWeights(const ImageParams& p, int n0, uint8_t* to) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kTileN * 2; i += kThreads) {
    const int ky = i / (kTileN * 2), packed = i / 2 % kTileN, half = i % 2;
    // PackImage's row 16 a + 8 b + 2 q + e is channel 16 a + 4 q + 2 b + e.
    const int channel = packed / 16 * 16 + packed % 8 / 2 * 4 + packed / 8 % 2 * 2 + packed % 2;
    const int row = RowOfNeighbours<kTileN>(channel);
    uint4 v = {};
    if (ky < p.kernel_h) {
      v = *reinterpret_cast<const uint4*>(
          p.weights + (static_cast<int64_t>(ky) * p.n_padded + n0 + packed) * 32 + half * 16);
    }
    uint8_t* const out = to + ky * kTileN * 32 + row / 8 * 256 + row % 8 * 16 + half * 8;
    *reinterpret_cast<uint2*>(out) = make_uint2(v.x, v.z);
    *reinterpret_cast<uint2*>(out + 128) = make_uint2(v.y, v.w);
  }
}
#endif

template <int kWords>
__device__ __forceinline__ void StoreCodes(uint8_t* y, const unsigned (&codes)[kWords]) {
  if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(y) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
  } else {
    static_assert(kWords == 2);
    *reinterpret_cast<uint2*>(y) = make_uint2(codes[0], codes[1]);
  }
}

// Where a tile's first output lies.
struct TileOrigin {
  int n, row, column;

  __device__ __forceinline__ TileOrigin(int tile, const ImageParams& p) {
    const int row_of_tiles = Divide(tile, p.by_tiles_x);
    n = Divide(row_of_tiles, p.by_tiles_y);
    row = (row_of_tiles - n * p.tiles_y) * kTileRows;
    column = (tile - row_of_tiles * p.tiles_x) * kTileColumns;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Rounds a warp's sums of 16 outputs of a row, and stores the codes: a thread's, from `channel` on, of a
// pixel and of the one eight further.
template <int kTileN>
__device__ __forceinline__ void FinishTile(const ImageParams& p, const TileOrigin& origin, int warp,
                                           int channel, const float4 (&scales)[kTileN / 16],
                                           const float* starts, const float* factors,
                                           const int (&sums)[kTileN / 2]) {
  unsigned codes[2][kTileN / 16];
  WithIntegers<false>(p.epilogue, [&](const auto& requantize) {
#pragma unroll
    for (int i = 0; i < kTileN / 16; ++i) {
      const int* const s = sums + 8 * i;
      const FourChannels channels = {scales[i], *reinterpret_cast<const float4*>(starts + 4 * i), factors[i]};
      const int4 both[] = {make_int4(s[0], s[1], s[4], s[5]), make_int4(s[2], s[3], s[6], s[7])};
      unsigned fours[2] = {};
      requantize(both, channels, fours);
      codes[0][i] = fours[0];
      codes[1][i] = fours[1];
    }
  });
  const int oy = origin.row + warp, ox = origin.column + static_cast<int>(threadIdx.x) % 32 / 4;
  if (oy >= p.out_h || channel >= p.n) return;
  uint8_t* const y = static_cast<uint8_t*>(p.y) +
                     static_cast<unsigned>(((origin.n * p.out_h + oy) * p.out_w + ox) * p.n + channel);
  if (ox < p.out_w) StoreCodes(y, codes[0]);
  if (ox + 8 < p.out_w) StoreCodes(y + 8 * p.n, codes[1]);
}
#endif

// Four codes of a pixel, each rounded from a value within the clip bounds: as integers in the low bits of
// floats they are added up, a byte apart, with all that is constant. Signed codes are 128 more until the end.
template <int kChannels>
__device__ __forceinline__ unsigned QuantizePixel(const ImageParams& p, const float (&v)[kChannels]) {
  unsigned four = p.codes_add;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    four += RoundedPixel(p.rounding, c, v[c]) << (8 * c);
  }
  return four ^ p.rounding.flip;
}

// kRows: rows of taps that are multiplied, kernel_h or more.
template <int kTileN, int kChannels, int kRows, bool kSigned>
__global__ void __launch_bounds__(kThreads, kBlocks<kTileN>)
    ConvPlanes(const __grid_constant__ ImageParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kOwn = kTileN / 4, kStride = kOwn + 4;  // channels of a thread; without bank conflicts
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ __align__(16) int biases[4 * kStride];
  __shared__ __align__(16) float multipliers[4 * kStride], starts[4 * kStride], factors[kStride];
  const EpilogueParams& e = p.epilogue;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, group = thread % 32 / 4,
            t = thread % 4;
  const int n0 = static_cast<int>(blockIdx.y) * kTileN, channel = n0 + t * kOwn;
  if (thread < kTileN && n0 + thread < p.n) {
    const int at = thread / kOwn * kStride + thread % kOwn;
    biases[at] = e.bias[n0 + thread];
    multipliers[at] = e.scale[n0 + thread];
    starts[at] = e.start[n0 + thread];
    if (at % 4 == 0) factors[at / 4] = e.factor[(n0 + thread) / 4];
  }
  LoadWeights<kTileN, kRows>(p, n0, shared);
  FenceAsyncProxy();  // wgmma reads them
  const uint64_t weights = PlainDescriptor(SharedAddress(shared));

  // A thread's four pixels of every patch.
  const int channels = kChannels == 3 ? 3 : p.in_channels, plane = p.in_h * p.in_w;
  const int unit_row = Divide(thread, p.by_units), unit_column = (thread - unit_row * p.units_x) * 4;
  const bool has_unit = unit_row < p.patch_rows;
  float4 raw[kChannels] = {};
  bool inside = false;
  const auto load = [&](int tile) {
    const TileOrigin origin(tile, p);
    const int y = origin.row * p.stride_h - p.pad_top + unit_row,
              x = origin.column * p.stride_w - p.pad_left - p.shift + unit_column;
    inside = has_unit && y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
    if (!inside) return;
    const float* const from = reinterpret_cast<const float*>(p.x) +
                              static_cast<int64_t>(origin.n) * channels * plane + (y * p.in_w + x);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (kChannels == 3 || c < channels) raw[c] = *reinterpret_cast<const float4*>(from + c * plane);
    }
  };
  const auto quantize = [&](uint8_t* patch) {
    if (!has_unit) return;
    uint4 fours = make_uint4(p.fill, p.fill, p.fill, p.fill);
    if (inside) {
      const auto pixel = [&](auto part) {
        float v[kChannels];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) v[c] = raw[c].*part;
        return QuantizePixel<kChannels>(p, v);
      };
      fours = make_uint4(pixel(&float4::x), pixel(&float4::y), pixel(&float4::z), pixel(&float4::w));
    }
    reinterpret_cast<uint4*>(patch)[thread] = fours;
  };

  const int step = static_cast<int>(gridDim.x);
  int tile = static_cast<int>(blockIdx.x);
  // A grid of blocks with several tiles fills the multiprocessors: the next kernel's blocks take the places
  // of those that end. A smaller one would leave them room to crowd in, it waits for its products.
  // (ResNet-50's stem and max pooling in turns: early 15.2 us and late 16.3 at batch 16, but 5.0 and 3.9 at
  // batch 1.)
  if (step < p.tiles) LetSuccessorsStart();
  WaitForPredecessors();
  load(tile);
  uint8_t *patch = shared + p.patch_offset, *next_patch = patch + p.patch_bytes;
  quantize(patch);
  if (tile + step < p.tiles) load(tile + step);
  __syncthreads();
  // By way of shared memory: rounding would wait for pixels as long as it might have to wait for these.
  float4 scales[kOwn / 4];
#pragma unroll
  for (int i = 0; i < kOwn / 4; ++i) {
    scales[i] = *reinterpret_cast<const float4*>(multipliers + t * kStride + 4 * i);
  }
#pragma unroll 1
  for (; tile < p.tiles; tile += step) {
    // A warp's 16 outputs of a row.
    int sums[kTileN / 2];
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const int4 bias = *reinterpret_cast<const int4*>(biases + t * kStride + i);
      sums[2 * i] = sums[2 * i + 2] = bias.x;
      sums[2 * i + 1] = sums[2 * i + 3] = bias.y;
      sums[2 * i + 4] = sums[2 * i + 6] = bias.z;
      sums[2 * i + 5] = sums[2 * i + 7] = bias.w;
    }
    unsigned a[kRows][4];
    const unsigned* row = reinterpret_cast<const unsigned*>(patch) + warp * p.stride_h * p.units_x * 4 +
                          p.shift + group * p.stride_w + t;
#pragma unroll
    for (int ky = 0; ky < kRows; ++ky, row += p.units_x * 4) {
      a[ky][0] = row[0];
      a[ky][1] = row[8 * p.stride_w];
      a[ky][2] = row[4];
      a[ky][3] = row[8 * p.stride_w + 4];
    }
    HoldRegisters(sums);
    WgmmaFence();
#pragma unroll
    for (int ky = 0; ky < kRows; ++ky) MultiplyRows<kSigned>(sums, a[ky], weights + ky * (kTileN * 32 >> 4));
    WgmmaCommit();
    // Meanwhile the next patch, and the floats of the one after it.
    if (tile + step < p.tiles) {
      quantize(next_patch);
      if (tile + 2 * step < p.tiles) load(tile + 2 * step);
    } else {
      LetSuccessorsStart();
    }
    WgmmaWait<0>();
    HoldRegisters(sums);

    FinishTile<kTileN>(p, TileOrigin(tile, p), warp, channel, scales, starts + t * kStride,
                       factors + t * (kStride / 4), sums);
    uint8_t* const last = patch;
    patch = next_patch;
    next_patch = last;
    __syncthreads();  // the next patch is there; this one's place is free
  }
#endif
}

}  // namespace

bool FitsPlanes(const ImageParams& p, const Device& device) {
  return device.capability == 90 && p.in_registers && !p.epilogue.has_residual && p.rounding.fast_division &&
         p.kernel_h <= kMaxPlaneRows && p.in_w % 4 == 0 && p.patch_rows * p.units_x <= kThreads &&
         reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
}

cudaError_t LaunchPlanes(const ImageParams& params, const ConvConfig& config, const LaunchOptions& options) {
  ImageParams p = params;
  const int rows = p.kernel_h <= 3 ? 3 : kMaxPlaneRows;
  p.patch_offset = rows * config.tile_n * 32;
  p.patch_bytes = (7 * p.stride_h + rows) * p.units_x * 16;
  return std::visit(
      [&](auto tile_n, auto channels, auto tap_rows, auto is_signed) {
        // As many tiles for every block.
        const int most = std::max(1, options.device.multiprocessors * kBlocks<tile_n> / p.n_tiles);
        const int per_block = (p.tiles + most - 1) / most;
        if constexpr (HasInstance(tile_n == 32 && channels == 3)) {
          return LaunchKernel<ConvPlanes<tile_n, channels, tap_rows, is_signed>>(
              options,
              {Dim((p.tiles + per_block - 1) / per_block, p.n_tiles), kThreads,
               p.patch_offset + 2 * p.patch_bytes},
              p);
        } else {
          return cudaErrorInvalidValue;
        }
      },
      OneOf<32, 64>(config.tile_n), OneOf<4, 3>(p.in_channels == 3 ? 3 : 4), OneOf<3, kMaxPlaneRows>(rows),
      OneOf(options.x_signed));
}

}  // namespace lowbit::cuda
