// A network's first convolution: up to 4 channels, windows up to 8 wide, on mma.sync. Neither an image with
// padded channels nor the quantized image ever lies in memory: a block reads the patch that its 8 x 16
// outputs need (codes, or floats that it quantizes), 4 bytes a pixel in shared memory. A row of a window is
// then 32 consecutive bytes (its 8 taps; weights of taps past the window and of missing channels are 0): one
// step of k32.
#include "kernels/cuda/conv_tile.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma_s8.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128, kTileRows = 8, kTileColumns = 16, kTileM = kTileRows * kTileColumns;

__device__ __forceinline__ unsigned QuantizedByte(const ImageParams& image, int channel, float v) {
  return static_cast<unsigned>(
             RoundToCode(__fdiv_rn(v, image.scale[channel]), image.zero_point[channel], image.lo, image.hi)) &
         255u;
}

// The pixel (image, y, x) as four codes; missing channels are 0.
template <ImageSource kSource>
__device__ __forceinline__ unsigned Pixel(const ConvParams& p, const ImageParams& image, int n, int y,
                                          int x) {
  const int channels = image.in_channels;
  const int64_t pixel = (static_cast<int64_t>(n) * p.in_h + y) * p.in_w + x;
  const int64_t plane = static_cast<int64_t>(p.in_h) * p.in_w;
  unsigned four = 0;
#pragma unroll
  for (int c = 0; c < kMaxImageChannels; ++c) {
    if (c >= channels) break;
    unsigned code = 0;
    if constexpr (kSource == ImageSource::kCodes) {
      code = p.x[pixel * channels + c];
    } else if constexpr (kSource == ImageSource::kPlanes) {
      code = QuantizedByte(image, c,
                           reinterpret_cast<const float*>(
                               p.x)[pixel + plane * (static_cast<int64_t>(n) * (channels - 1) + c)]);
    } else {
      code = QuantizedByte(image, c, reinterpret_cast<const float*>(p.x)[pixel * channels + c]);
    }
    four |= code << (8 * c);
  }
  return four;
}

template <int kTileN, ImageSource kSource, bool kSigned>
__global__ void __launch_bounds__(kThreads)
    ConvImage(const __grid_constant__ ConvParams p, const __grid_constant__ ImageParams image) {
  constexpr int kBlocksN = kTileN / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ BlockState<kTileN> state;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int tile = static_cast<int>(blockIdx.x), tile_x = tile % image.tiles_x,
            tile_y = tile / image.tiles_x % image.tiles_y, n = tile / (image.tiles_x * image.tiles_y);
  const int oy0 = tile_y * kTileRows, ox0 = tile_x * kTileColumns;
  TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  LetSuccessorsStart();
  state.template FetchConstants<kThreads>(p, at, thread);
  // Weights of a row of taps: eight channels after the other, in the order of fragments.
  const uint32_t weights = SharedAddress(shared);
  for (int i = thread; i < p.kernel_h * kTileN * 2; i += kThreads) {
    const int row = i / (kTileN * 2), rest = i % (kTileN * 2);
    CopyAsync<16>(weights + i * 16,
                  p.weights + (static_cast<int64_t>(row) * p.n_padded + at.n0) * 32 + rest * 16);
  }
  CommitCopies();
  WaitForPredecessors();

  unsigned* const patch = reinterpret_cast<unsigned*>(shared + image.patch_offset);
  const int y0 = oy0 * p.stride_h - p.pad_top, x0 = ox0 * p.stride_w - p.pad_left;
  for (int r = warp; r < image.patch_rows; r += kThreads / 32) {
    const int y = y0 + r;
    for (int c = lane; c < image.patch_columns; c += 32) {
      const int x = x0 + c;
      const bool inside = y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
      patch[r * image.patch_columns + c] = inside ? Pixel<kSource>(p, image, n, y, x) : p.fill;
    }
  }
  WaitForCopies<0>();
  __syncthreads();

  // A warp sums two rows of 16 outputs.
  int sums[2][kBlocksN][4] = {};
  const int group = lane / 4, t = lane % 4;
  const uint2* const fragments = reinterpret_cast<const uint2*>(shared) + lane;
  for (int ky = 0; ky < p.kernel_h; ++ky) {
    unsigned a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned* const row =
          patch + ((warp * 2 + i) * p.stride_h + ky) * image.patch_columns + group * p.stride_w + t;
      a[i][0] = row[0];
      a[i][1] = row[8 * p.stride_w];
      a[i][2] = row[4];
      a[i][3] = row[8 * p.stride_w + 4];
    }
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      const uint2 b = fragments[(ky * kBlocksN + j) * 32];
      Multiply<kSigned>(sums[0][j], a[0], b.x, b.y);
      Multiply<kSigned>(sums[1][j], a[1], b.x, b.y);
    }
  }
  __syncthreads();  // sums may overwrite the patch

  const auto pixel_of = [&](int row) {
    const int oy = oy0 + row / kTileColumns, ox = ox0 + row % kTileColumns;
    return oy < p.out_h && ox < p.out_w ? (n * p.out_h + oy) * p.out_w + ox : -1;
  };
  FinishTile<kTileM, kTileN, kThreads>(
      p, at, shared, state, false,
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
}

template <int kTileN, ImageSource kSource, bool kSigned>
cudaError_t LaunchWith(const ConvParams& p, const ImageParams& image, const LaunchOptions& options) {
  constexpr auto kKernel = ConvImage<kTileN, kSource, kSigned>;
  const cudaError_t error = PrepareKernel<kKernel>(options.device);
  if (error != cudaSuccess) return error;
  const int batch = p.m / (p.out_h * p.out_w);
  const dim3 grid(static_cast<unsigned>(image.tiles_x * image.tiles_y * batch),
                  static_cast<unsigned>(p.n_tiles));
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), nullptr, 0}, kKernel, grid,
                                  dim3(kThreads), p, image);
}

template <int kTileN, ImageSource kSource>
cudaError_t LaunchTile(const ConvParams& p, const ImageParams& image, const LaunchOptions& options) {
  return options.x_signed ? LaunchWith<kTileN, kSource, true>(p, image, options)
                          : LaunchWith<kTileN, kSource, false>(p, image, options);
}

template <ImageSource kSource>
cudaError_t LaunchSource(const ConvParams& p, const ImageParams& image, int tile_n,
                         const LaunchOptions& options) {
  return tile_n == 32 ? LaunchTile<32, kSource>(p, image, options)
                      : LaunchTile<64, kSource>(p, image, options);
}

}  // namespace

cudaError_t LaunchImage(const ConvParams& p, const ImageParams& image, ImageSource source,
                        const ConvConfig& config, const LaunchOptions& options) {
  switch (source) {
    case ImageSource::kCodes:
      return LaunchSource<ImageSource::kCodes>(p, image, config.tile_n, options);
    case ImageSource::kPlanes:
      return LaunchSource<ImageSource::kPlanes>(p, image, config.tile_n, options);
    case ImageSource::kPixels:
      return LaunchSource<ImageSource::kPixels>(p, image, config.tile_n, options);
  }
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
