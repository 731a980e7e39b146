// A network's first convolution: up to 4 channels, windows up to 8 wide, on mma.sync. Neither an image with
// padded channels nor the quantized image ever lies in memory: a block reads the patch that its 8 x 16
// outputs need (codes, or floats that it quantizes), 4 bytes a pixel in shared memory. A row of a window is
// then 32 consecutive bytes (its 8 taps; weights of taps past the window and of missing channels are 0): one
// step of k32.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/image.h"
#include "kernels/cuda/device/mma_s8.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128, kTileRows = 8, kTileColumns = 16, kTileM = kTileRows * kTileColumns;

// clip(rint(v / scale) + zero_point, lo, hi). Beyond 1024 steps every code is clipped, so that v may be
// clamped first (NaN to the lower side, as in core/epilogue.h); Markstein's sequence is then the correctly
// rounded quotient where the host found fast_division.
__device__ __forceinline__ unsigned QuantizedByte(const ImageParams& p, int channel, float v) {
  const float scale = p.rounding.scale[channel], inverse = p.rounding.inverse[channel];
  float quotient = 0;
  if (p.rounding.fast_division) {
    v = fminf(fmaxf(v, -1024.0f * scale), 1024.0f * scale);
    const float near = __fmul_rn(v, inverse);
    quotient = __fmaf_rn(__fmaf_rn(-near, scale, v), inverse, near);
  } else {
    quotient = __fdiv_rn(v, scale);
  }
  return static_cast<unsigned>(RoundToCode(quotient, p.zero_point[channel], p.lo, p.hi)) & 255u;
}

// What channels are read as.
template <ImageSource kSource>
using Raw = std::conditional_t<kSource == ImageSource::kCodes, uint8_t, float>;

// kChannels is 3 for three channels, 4 for any other number.
template <ImageSource kSource, int kChannels>
__device__ __forceinline__ void Fetch(const ImageParams& p, int n, int y, int x,
                                      Raw<kSource> (&raw)[kChannels]) {
  const Raw<kSource>* const from = reinterpret_cast<const Raw<kSource>*>(p.x);
  const int channels = kChannels == 3 ? 3 : p.in_channels;
  const int plane = p.in_h * p.in_w, pixel = y * p.in_w + x;
  const int64_t first = static_cast<int64_t>(n) * channels * plane;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const int at = kSource == ImageSource::kPlanes ? c * plane + pixel : pixel * channels + c;
    raw[c] = kChannels == 3 || c < channels ? from[first + at] : Raw<kSource>{};
  }
}

// Four codes in a word; the weights of missing channels are 0.
template <ImageSource kSource, int kChannels>
__device__ __forceinline__ unsigned Pack(const ImageParams& p, const Raw<kSource> (&raw)[kChannels]) {
  unsigned four = 0;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if constexpr (kSource == ImageSource::kCodes) {
      four |= static_cast<unsigned>(raw[c]) << (8 * c);
    } else {
      four |= QuantizedByte(p, c, raw[c]) << (8 * c);
    }
  }
  return four;
}

// The patch whose first pixel is (y0, x0); several pixels of a thread are on their way at once.
template <ImageSource kSource, int kChannels>
__device__ __forceinline__ void LoadPatch(const ImageParams& p, int n, int y0, int x0, unsigned* patch) {
  constexpr int kAtOnce = 4;
  const int thread = static_cast<int>(threadIdx.x), columns = p.patch_columns,
            pixels = p.patch_rows * columns;
  for (int first = thread; first < pixels; first += kAtOnce * kThreads) {
    Raw<kSource> raw[kAtOnce][kChannels];
    bool inside[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = first + u * kThreads, row = Divide(i, p.by_columns);
      const int y = y0 + row, x = x0 + i - row * columns;
      inside[u] = i < pixels && y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
      if (inside[u]) Fetch<kSource, kChannels>(p, n, y, x, raw[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = first + u * kThreads;
      if (i < pixels) patch[i] = inside[u] ? Pack<kSource, kChannels>(p, raw[u]) : p.fill;
    }
  }
}

// A block stays for several tiles, with its weights in shared memory.
template <int kTileN, ImageSource kSource, int kChannels, bool kSigned>
__global__ void __launch_bounds__(kThreads, 4) ConvImage(const __grid_constant__ ImageParams p) {
  constexpr int kBlocksN = kTileN / 8;
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ BlockState<kTileN> state;
  __shared__ ZeroPoints<kTileN> zeros;
  const bool has_zeros = p.epilogue.w_zero != nullptr;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  LetSuccessorsStart();
  state.template FetchConstants<kThreads>(p, at, thread);
  if (has_zeros) zeros.template Fetch<kThreads>(p, at, thread);
  // Weights of a row of taps: eight channels after the other, in the order of fragments.
  const uint32_t weights = SharedAddress(shared);
  for (int i = thread; i < p.kernel_h * kTileN * 2; i += kThreads) {
    const int row = i / (kTileN * 2), rest = i % (kTileN * 2);
    CopyAsync<16>(weights + i * 16,
                  p.weights + (static_cast<int64_t>(row) * p.n_padded + at.n0) * 32 + rest * 16);
  }
  CommitCopies();
  WaitForPredecessors();

  unsigned* const patch = reinterpret_cast<unsigned*>(shared + p.patch_offset);
  const int group = lane / 4, t = lane % 4;
  const uint2* const fragments = reinterpret_cast<const uint2*>(shared) + lane;
  // Of the two taps of a row of a window that this thread has, what is a code of the image's channels and no
  // missing tap.
  const int channel_ones = static_cast<int>(0x01010101u >> (8 * (kMaxImageChannels - p.in_channels)));
  const int ones[2] = {t < p.kernel_w ? channel_ones : 0, t + 4 < p.kernel_w ? channel_ones : 0};
  for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
    const int row_of_tiles = tile / p.tiles_x, n = row_of_tiles / p.tiles_y;
    const int oy0 = (row_of_tiles - n * p.tiles_y) * kTileRows,
              ox0 = (tile - row_of_tiles * p.tiles_x) * kTileColumns;
    LoadPatch<kSource, kChannels>(p, n, oy0 * p.stride_h - p.pad_top, ox0 * p.stride_w - p.pad_left, patch);
    WaitForCopies<0>();
    __syncthreads();

    // A warp sums two rows of 16 outputs.
    int sums[2][kBlocksN][4] = {};
    int codes[2][2] = {};
    for (int ky = 0; ky < p.kernel_h; ++ky) {
      unsigned a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned* const row =
            patch + ((warp * 2 + i) * p.stride_h + ky) * p.patch_columns + group * p.stride_w + t;
        a[i][0] = row[0];
        a[i][1] = row[8 * p.stride_w];
        a[i][2] = row[4];
        a[i][3] = row[8 * p.stride_w + 4];
        if (!has_zeros) continue;
#pragma unroll
        for (int half = 0; half < 4; ++half)
          codes[i][half % 2] =
              DotFour<kSigned>(static_cast<int>(a[i][half]), ones[half / 2], codes[i][half % 2]);
      }
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        const uint2 b = fragments[(ky * kBlocksN + j) * 32];
        Multiply<kSigned>(sums[0][j], a[0], b.x, b.y);
        Multiply<kSigned>(sums[1][j], a[1], b.x, b.y);
      }
    }
    if (has_zeros) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        for (int& sum : codes[i]) {
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
        }
        zeros.template TakeAway<kTileN>(t * 4, codes[i][0], codes[i][1], sums[i][0]);
      }
    }
    __syncthreads();  // sums may overwrite the patch

    const auto pixel_of = [&](int row) {
      const int oy = oy0 + row / kTileColumns, ox = ox0 + row % kTileColumns;
      return oy < p.out_h && ox < p.out_w ? (n * p.out_h + oy) * p.out_w + ox : -1;
    };
    if (p.epilogue.has_residual) {
      FetchResiduals<kTileM, kTileN, kThreads>(p, at, shared + p.patch_offset, thread, pixel_of);
      CommitCopies();
      WaitForCopies<0>();
      __syncthreads();
    }
    FinishTile<kTileM, kTileN, kThreads>(
        p, at, shared + p.patch_offset, state, false,
        [&](const auto& f) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < kBlocksN; j += 2) {
              const auto &left = sums[i][j], &right = sums[i][j + 1];
              f(warp * 32 + i * 16 + group, j * 8 + t * 4, make_int4(left[0], left[1], right[0], right[1]),
                make_int4(left[2], left[3], right[2], right[3]));
            }
          }
        },
        pixel_of);
    __syncthreads();  // the next patch may overwrite what was staged
  }
}

}  // namespace

cudaError_t LaunchImage(const ImageParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (p.source == ImageSource::kPlanes && FitsPlanes(p, options.device))
    return LaunchPlanes(p, config, options);
  return std::visit(
      [&](auto tile_n, auto from, auto channels, auto is_signed) {
        // As many tiles for every block.
        const int most = std::max(1, options.device.multiprocessors * 4 / p.n_tiles);
        const int per_block = (p.tiles + most - 1) / most;
        if constexpr (HasInstance(tile_n == 32 && (channels == 3 || from == ImageSource::kCodes))) {
          return LaunchKernel<ConvImage<tile_n, from, channels, is_signed>>(
              options,
              {Dim((p.tiles + per_block - 1) / per_block, p.n_tiles), kThreads, options.shared_bytes}, p);
        } else {
          return cudaErrorInvalidValue;
        }
      },
      OneOf<32, 64>(config.tile_n),
      OneOf<ImageSource::kCodes, ImageSource::kPlanes, ImageSource::kPixels>(p.source),
      OneOf<4, 3>(p.in_channels == 3 ? 3 : 4), OneOf(options.x_signed));
}

}  // namespace lowbit::cuda
