// Implicit-precomp GEMM on mma.sync's population counts, for GPUs from sm_80 on that have them: tiles of codes as
// tiles_mma.cu gathers them, any stride, dilation and padding. A warp multiplies 16 pixels by all of the tile's
// channels: only it cuts their codes into planes of bits, on the way from shared memory to registers
// (code_planes.cuh).
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/code_planes.cuh"
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/device/mma_s8.cuh"

namespace lowbit::cuda {
namespace {

template <int kTileM, int kTileN, int kPlanes, int kBits>
__global__ void __launch_bounds__(kTileM * 2)
    ConvBitsMma(const __grid_constant__ BitTileParams p, bool cluster) {
  constexpr int kThreads = kTileM * 2, kStages = kBitMmaStages, kBlocks = kTileN / 8,
                kPowers = kPlanes + kBits - 1, kHalfBytes = kBitRowBytes / 2,
                kPlaneBytes = kTileN * kHalfBytes;
  constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kPlanes * kPlaneBytes, kBytes = kBytesA + kBytesB;
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ BlockState<kTileN> state;

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const uint32_t tiles = SharedAddress(shared);
  ActivationLoader<kTileM, kThreads, 16> activations(p, thread, at.m0, at.group, at.k_begin);
  if (cluster) state.BeginCluster(kTileM);
  state.template FetchConstants<kThreads>(p, at, thread);

  // Rows of one half of a step, 16 bytes each, lie in eights of both halves (PackBits).
  const auto load_weights = [&](int k_tile, int stage) {
    const int step = k_tile / 2, half = k_tile % 2;
#pragma unroll
    for (int first = 0; first < kPlanes * kTileN; first += kThreads) {
      const int i = first + thread, plane = i / kTileN, row = at.n0 + i % kTileN;
      if (i >= kPlanes * kTileN) break;
      CopyAsync<16>(tiles + stage * kBytes + kBytesA + i * kHalfBytes,
                    p.weights + ((step * kPlanes + plane) * p.rows + row / 8 * 8) * kBitRowBytes +
                        half * 128 + row % 8 * kHalfBytes);
    }
  };

  int counts[kBlocks][kPowers][4] = {}, ones[kBits][4] = {};
  const int row = warp * 16 + lane / 4, quarter = lane % 4;
  WalkTiles<kStages>(
      at, load_weights, [&](int stage) { activations.Load(tiles + stage * kBytes); },
      [&] { FetchResiduals<kTileM, kTileN, kThreads>(p, at, shared, thread, PixelsInOrder{at.m0, p.m}); },
      [&](int k_tile, int stage) {
        const uint8_t* const tile_a = shared + stage * kBytes;
        const uint8_t* const tile_b = tile_a + kBytesA + lane / 4 * kHalfBytes + quarter * 4;
        unsigned a[kBits][2];
#pragma unroll
        for (int below = 0; below < 2; ++below) {
          const int at_row = row + below * 8;
          const auto chunk = [&](int i) {
            return *reinterpret_cast<const uint4*>(tile_a + at_row * kRowBytes +
                                                   (((quarter * 2 + i) ^ (at_row % 8)) << 4));
          };
          unsigned planes[kBits];
          SliceCodes(chunk(0), chunk(1), planes);
#pragma unroll
          for (int i = 0; i < kBits; ++i) a[i][below] = planes[i];
        }
        // Units behind the last channel hold anything.
        const unsigned all = (k_tile * 4 + quarter) * kBitUnit < p.k ? ~0u : 0u;
#pragma unroll
        for (int i = 0; i < kBits; ++i) MultiplyBits(ones[i], a[i], all);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            const unsigned b =
                *reinterpret_cast<const unsigned*>(tile_b + plane * kPlaneBytes + block * 8 * kHalfBytes);
#pragma unroll
            for (int i = 0; i < kBits; ++i) MultiplyBits(counts[block][i + plane], a[i], b);
          }
        }
      });

  const int of_codes[] = {SumOfPowers<kBits>(ones, 0) * p.w_lowest, SumOfPowers<kBits>(ones, 2) * p.w_lowest};
  const auto sum = [&](int block, int i) {
    return (SumOfPowers<kPowers>(counts[block], i) << p.w_shift) + of_codes[i / 2];
  };
  FinishTile<kTileM, kTileN, kThreads>(p, at, shared, state, cluster, [&](const auto& f) {
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      f(row, quarter * 4 + block * 8,
        make_int4(sum(block, 0), sum(block, 1), sum(block + 1, 0), sum(block + 1, 1)),
        make_int4(sum(block, 2), sum(block, 3), sum(block + 1, 2), sum(block + 1, 3)));
    }
  });
}

template <int kPlanes, int kBits>
cudaError_t LaunchPair(const BitTileParams& p, const ConvConfig& config, const LaunchOptions& options) {
  return std::visit(
      [&](auto tile_m) {
        return LaunchTiled<ConvBitsMma<tile_m, kBitMmaColumns, kPlanes, kBits>>(p, config, options,
                                                                                tile_m * 2);
      },
      OneOf<64, 128>(config.tile_m));
}

}  // namespace

cudaError_t LaunchBitsMma(const BitTileParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (config.tile_n != kBitMmaColumns || config.stages > kBitMmaStages) return cudaErrorInvalidValue;
  if (p.planes == 1 && p.x_bits == 1) return LaunchPair<1, 1>(p, config, options);
  if (p.planes == 1 && p.x_bits == 2) return LaunchPair<1, 2>(p, config, options);
  return p.planes == 2 ? LaunchPair<2, 2>(p, config, options) : LaunchPair<1, 4>(p, config, options);
}

}  // namespace lowbit::cuda
