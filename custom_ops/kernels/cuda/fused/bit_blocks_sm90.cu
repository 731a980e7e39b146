// Residual blocks of planes of bits in one kernel, on wgmma for Hopper (sm_90a). A cluster has an image, each block of it a
// band of rows and a slice of the channels:
//
//   x -> 1x1 -> windows -> 3x3 -> made -> 1x1 + x -> x of the next residual block, or y
//
// A warpgroup multiplies 64 places with 64 channels at a time, as `bits` does, and stores the codes into the shared memory
// of all blocks that read them: those of the same band, of rows at a band's border those of the next one, too. A tensor has
// a barrier in each block, at which all warps that store there arrive once they are done. Weights are fetched by a warp of
// its own as soon as those of the residual block before are out of use.
//
// Nobody stores where somebody still reads: whoever stores into x or into what the second convolution makes has seen all
// warps of its band behind the products that read it last. Where there are several bands that is not known of the others,
// which is why windows have two places that take turns then.
#include "kernels/cuda/conv/bit_codes.cuh"
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/device/matrix_descriptors.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/fused/bit_blocks.h"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kUnit = 64;  // channels

// As PlanePatches, of a cluster.
template <int kBits>
struct BlocksOfBits {
  using Tile = BitTile<kUnit, kBits>;
  using Counts = typename Tile::Counts;
  using Codes = typename Tile::Codes;
  static constexpr int kStepBytes = BitStepBytes(kUnit), kRowsBytes = kUnit * kBitRowBytes,
                       kOnesBytes = kOnesRows * kBitRowBytes;
  enum Barrier { kWeights = 0, kUnused = 3, kX = 6, kWindows = 7, kMade = 9, kNextX = 10, kBarriers = 11 };

  const BitBlocksParams& p;
  const SharedTiles shared;
  const Barriers barrier;
  const ThreadPlace own = {};
  const int size = p.bands * p.slices, rank = static_cast<int>(blockIdx.x) % size,
            image = static_cast<int>(blockIdx.x) / size, band = rank / p.slices, slice = rank % p.slices,
            rows = min(p.rows, p.h - band * p.rows), pixels = rows * p.w;
  const bool has_above = band > 0, has_below = band + 1 < p.bands;
  const int row = own.thread / 32 * 16 + own.lane / 4, column = own.lane % 4 * 4;

  __device__ __forceinline__ void SetUp() const {
    constexpr int kWarps = 4 * kBitBlocksGroups;
    if (own.warp == kWarps && own.lane == 0) {
      for (int layer = 0; layer < 3; ++layer) {
        InitBarrier(barrier(kWeights + layer), 1);
        InitBarrier(barrier(kUnused + layer), kWarps);
      }
      const int of_band = kWarps * p.slices;
      InitBarrier(barrier(kX), 1);
      for (int turn = 0; turn < 2; ++turn)
        InitBarrier(barrier(kWindows + turn), of_band * (1 + (has_above ? 1 : 0) + (has_below ? 1 : 0)));
      InitBarrier(barrier(kMade), of_band);
      InitBarrier(barrier(kNextX), of_band);
      FenceBarrierInit();
    }
    // Columns and rows outside of the image stay 0.
    const int bytes = p.windows_bytes * p.windows_turns;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += static_cast<int>(blockDim.x) * 16)
      *reinterpret_cast<int4*>(shared.data + p.windows_at + at) = int4{};
    FenceCluster();
    FenceAsyncProxy();
    __syncthreads();
    ClusterArrive();
    ClusterWait();
  }

  // ---- what the last warp does

  __device__ __forceinline__ void Load() const {
#pragma unroll 1
    for (int layer = 0; layer < 3; ++layer) FetchWeights(0, layer);
    WaitForPredecessors();
    FetchX();
#pragma unroll 1
    for (int block = 1; block < p.blocks; ++block) {
#pragma unroll 1
      for (int layer = 0; layer < 3; ++layer) {
        WaitBarrier(barrier(kUnused + layer), (block - 1) & 1);
        __syncwarp();
        FetchWeights(block, layer);
      }
    }
  }
  __device__ __forceinline__ void FetchWeights(int block, int layer) const {
    const BitBlockLayer& of = p.layers[layer];
    const BitBlockConv& conv = p.block[block].convs[layer];
    const uint32_t full = barrier(kWeights + layer);
    const int steps = of.steps * conv.w_planes,
              constants = (kBits > 1 ? 2 : 1) * kBitUnitSteps + kPlaneWordBytes;
    if (own.lane == 0) ArriveExpecting(full, of.units * (steps * kStepBytes + constants));
    __syncwarp();
#pragma unroll 1
    for (int unit = 0; unit < of.units; ++unit) {
      const uint32_t to = shared.at + of.weights_at + unit * of.unit_bytes, behind = to + steps * kStepBytes;
      const int channel = (slice * of.units + unit) * kUnit;
#pragma unroll 1
      for (int i = own.lane; i < steps; i += 32) {
        BulkCopy(to + i * kStepBytes, conv.weights + (i * of.rows + channel) * kBitRowBytes, kRowsBytes,
                 full);
        BulkCopy(to + i * kStepBytes + kRowsBytes, conv.ones + i * kOnesBytes, kOnesBytes, full);
      }
      if (own.lane != 0) continue;
      BulkCopy(behind, conv.steps + channel, kBitUnitSteps, full);
      if (kBits > 1) BulkCopy(behind + kBitUnitSteps, conv.last_steps + channel, kBitUnitSteps, full);
      BulkCopy(behind + 2 * kBitUnitSteps, conv.flips + channel / kPlaneChannels * kPlaneWordBytes,
               kPlaneWordBytes, full);
    }
  }
  __device__ __forceinline__ void FetchX() const {
    const int words = kBits * p.layers[2].words, bytes = pixels * kBitWordBytes;
    if (own.lane == 0) ArriveExpecting(barrier(kX), words * bytes);
    __syncwarp();
#pragma unroll 1
    for (int word = own.lane; word < words; word += 32) {
      BulkCopy(shared.at + p.x_at + word * p.x_places * kBitWordBytes, p.x + FirstPixel(word) * kBitWordBytes,
               bytes, barrier(kX));
    }
  }
  // Of a word of any plane.
  __device__ __forceinline__ int64_t FirstPixel(int word) const {
    return (static_cast<int64_t>(word) * p.images + image) * p.h * p.w + band * p.rows * p.w;
  }

  // ---- what the others do

  __device__ __forceinline__ void Run() const {
    WaitForPredecessors();
#pragma unroll 1
    for (int block = 0; block < p.blocks; ++block) {
      const bool is_last = block + 1 == p.blocks;
      const uint32_t parity = block & 1;
      const int turn = p.windows_turns == 2 ? block & 1 : 0;
      const uint32_t windows = barrier(kWindows + turn);
      Await(block == 0 ? barrier(kX) : barrier(kNextX), block == 0 ? 0 : (block - 1) & 1);
      WaitBarrier(barrier(kWeights), parity);
      ReducePixels(block, p.windows_at + turn * p.windows_bytes);
      Leave(0, is_last);
      Tell(windows, has_above, has_below);

      Await(windows, p.windows_turns == 2 ? block >> 1 & 1 : parity);
      WaitBarrier(barrier(kWeights + 1), parity);
      MultiplyWindows(block, p.windows_at + turn * p.windows_bytes);
      Leave(1, is_last);
      Tell(barrier(kMade), false, false);

      Await(barrier(kMade), parity);
      WaitBarrier(barrier(kWeights + 2), parity);
      if (is_last) LetSuccessorsStart();
      AddUp(block, is_last);
      if (is_last) break;
      Leave(2, false);
      Tell(barrier(kNextX), false, false);
    }
  }

 private:
  __device__ __forceinline__ void Await(uint32_t of, uint32_t parity) const {
    WaitBarrierOfCluster(of, parity);
    FenceAsyncProxy();
  }
  // Weights are out of use.
  __device__ __forceinline__ void Leave(int layer, bool is_last) const {
    __syncwarp();
    if (!is_last && own.lane == 0) Arrive(barrier(kUnused + layer));
  }
  // This warp's arrival at all blocks into which codes were stored.
  __device__ __forceinline__ void Tell(uint32_t of, bool above, bool below) const {
    FenceAsyncProxy();
    __syncwarp();
    const int to = own.lane / p.slices, of_band = own.lane - to * p.slices;
    const int to_band = to == 0 ? band : to == 1 && above ? band - 1 : to == 2 && below ? band + 1 : -1;
    if (to_band >= 0) ArriveReleasing(ClusterAddress(of, to_band * p.slices + of_band));
  }

  // The counts of 64 places, of which the first plane's first place lies at `a`, with the weights at `b`; as `bits` counts.
  __device__ __forceinline__ void Count(const BitBlockLayer& of, int w_planes, uint32_t a, int plane_bytes,
                                        uint32_t b, Counts& counts) const {
    constexpr int kTurns = 3;  // steps that follow each other without a stop
    const uint32_t first = (a & 0x3FFFF) >> 4;
    const int next = w_planes * (kStepBytes >> 4);
    int adds = 0;
    const auto multiply = [&](int plane, int of_weights) {
      const uint32_t of_plane = first + plane * (plane_bytes >> 4);
      uint64_t weights = PlainDescriptor(b + of_weights * kStepBytes);
      const auto some = [&]<int kSteps>(int step) {
        WgmmaFence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i, weights += next) {
          MultiplyBits<kUnit + kOnesRows>(counts, PlacesDescriptor(of_plane + of.step[step + i]), weights,
                                          i > 0 ? 1 : adds);
        }
        adds = 1;
      };
      int step = 0;
#pragma unroll 1
      for (; step + kTurns <= of.steps; step += kTurns) some.template operator()<kTurns>(step);
#pragma unroll 1
      for (; step < of.steps; ++step) some.template operator()<1>(step);
    };
    if constexpr (kBits == 2) {
#pragma unroll 1
      for (int bit = w_planes; bit > 0; --bit) {
#pragma unroll 1
        for (int plane = 1; plane >= 0; --plane) {
          if (bit - plane < w_planes) multiply(plane, bit - plane);
        }
        WgmmaCommit();
        WgmmaWait<0>();
        HoldRegisters(counts);
#pragma unroll
        for (int& count : counts) count *= 2;
        HoldRegisters(counts);
      }
    }
    multiply(0, 0);
    WgmmaCommit();
    WgmmaWait<0>();
    HoldRegisters(counts);
  }
  // A unit's first codes of these places.
  __device__ __forceinline__ void CodesOf(int block, int layer, int unit, uint32_t a, int plane_bytes,
                                          Codes& codes) const {
    const BitBlockLayer& of = p.layers[layer];
    const int weights = of.weights_at + unit * of.unit_bytes;
    Counts counts;
    const BitBlockConv& conv = p.block[block].convs[layer];
    Count(of, conv.w_planes, a, plane_bytes, shared.at + weights, counts);
    const uint8_t* const constants = shared.data + weights + of.steps * conv.w_planes * kStepBytes;
    const unsigned word = *reinterpret_cast<const unsigned*>(constants + 2 * kBitUnitSteps + column);
    const bool is_second = (slice * of.units + unit) % 2 != 0;
    const unsigned falls[] = {is_second ? word >> 16 : word};
    Tile::CodesOfSteps(
        conv, counts,
        [&](int of_tile) {
          const uint8_t* const at = constants + (column + of_tile * 16) * 4;
          FourSteps steps = {*reinterpret_cast<const int4*>(at), {}};
          if constexpr (kBits > 1) steps.last = *reinterpret_cast<const int2*>(at + kBitUnitSteps);
          return steps;
        },
        falls, codes);
  }

  // Halves of a word's parts, to all blocks of a band.
  __device__ __forceinline__ void StoreHalves(int to_band, int at, int next_plane,
                                              const unsigned (&of)[kBits]) const {
#pragma unroll 1
    for (int to = 0; to < p.slices; ++to) {
      const uint32_t remote = ClusterAddress(shared.at + at, to_band * p.slices + to);
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane)
        StoreHalfToCluster(remote + plane * next_plane, static_cast<uint16_t>(of[plane]));
    }
  }
  // Where a thread has its part of a unit's half of a word, of places that so many are of a word.
  __device__ __forceinline__ int PartOf(int layer, int unit, int places) const {
    const int half = slice * p.layers[layer].units + unit;
    return half / 2 * places * kBitWordBytes + column + half % 2 * 2;
  }

  __device__ __forceinline__ void ReducePixels(int block, int windows_at) const {
    const int units = p.layers[0].units, next_plane = p.layers[0].words * p.windows_places * kBitWordBytes,
              x_plane = p.layers[2].words * p.x_places * kBitWordBytes;
#pragma unroll 1
    for (int i = own.group; i < p.pixel_tiles * units; i += kBitBlocksGroups) {
      const int tile = i / units, unit = i - tile * units;
      Codes codes;
      CodesOf(block, 0, unit, shared.at + p.x_at + tile * 64 * kBitWordBytes, x_plane, codes);
      const int part = windows_at + PartOf(0, unit, p.windows_places);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int pixel = tile * 64 + row + 8 * k;
        if (pixel >= pixels) continue;
        const int y = Divide(pixel, p.by_w), x = pixel - y * p.w + 1;
        StoreHalves(band, part + ((y + 1) * p.pitch + x) * kBitWordBytes, next_plane, codes[k][0]);
        if (y == 0 && has_above)
          StoreHalves(band - 1, part + ((p.rows + 1) * p.pitch + x) * kBitWordBytes, next_plane, codes[k][0]);
        if (y == rows - 1 && has_below)
          StoreHalves(band + 1, part + x * kBitWordBytes, next_plane, codes[k][0]);
      }
    }
  }

  __device__ __forceinline__ void MultiplyWindows(int block, int windows_at) const {
    const int units = p.layers[1].units, next_plane = p.layers[1].words * p.made_places * kBitWordBytes,
              windows_plane = p.layers[0].words * p.windows_places * kBitWordBytes;
#pragma unroll 1
    for (int i = own.group; i < p.place_tiles * units; i += kBitBlocksGroups) {
      const int tile = i / units, unit = i - tile * units;
      Codes codes;
      CodesOf(block, 1, unit, shared.at + windows_at + tile * 64 * kBitWordBytes, windows_plane, codes);
      const int part = p.made_at + PartOf(1, unit, p.made_places);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        StoreHalves(band, part + (tile * 64 + row + 8 * k) * kBitWordBytes, next_plane, codes[k][0]);
    }
  }

  // Two units at a time: whole words.
  __device__ __forceinline__ void AddUp(int block, bool is_last) const {
    const int pairs = p.layers[2].units / 2, words = p.layers[2].words,
              x_plane = words * p.x_places * kBitWordBytes,
              made_plane = p.layers[1].words * p.made_places * kBitWordBytes;
#pragma unroll 1
    for (int i = own.group; i < p.place_tiles * pairs; i += kBitBlocksGroups) {
      const int tile = i / pairs, pair = i - tile * pairs, word = slice * pairs + pair;
      unsigned first[2][kBits] = {};
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        Codes codes;
        CodesOf(block, 2, 2 * pair + half, shared.at + p.made_at + tile * 64 * kBitWordBytes, made_plane,
                codes);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int plane = 0; plane < kBits; ++plane)
            first[k][plane] = __byte_perm(first[k][plane], codes[k][0][plane], half == 0 ? 0x3254 : 0x5410);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int place = tile * 64 + row + 8 * k, y = Divide(place, p.by_pitch), x = place - y * p.pitch;
        if (x >= p.w || y >= rows) continue;
        const int pixel = y * p.w + x, at = p.x_at + (word * p.x_places + pixel) * kBitWordBytes + column;
        unsigned of[4] = {}, sum[kBits];
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane) {
          of[plane] = first[k][plane];
          of[2 + plane] = *reinterpret_cast<const unsigned*>(shared.data + at + plane * x_plane);
        }
        CombineBits(p.block[block].products, of, sum);
        if (is_last) {
#pragma unroll
          for (int plane = 0; plane < kBits; ++plane) {
            *reinterpret_cast<unsigned*>(p.y + (FirstPixel(plane * words + word) + pixel) * kBitWordBytes +
                                         column) = sum[plane];
          }
          continue;
        }
#pragma unroll 1
        for (int to = 0; to < p.slices; ++to) {
          const uint32_t remote = ClusterAddress(shared.at + at, band * p.slices + to);
#pragma unroll
          for (int plane = 0; plane < kBits; ++plane)
            StoreWordToCluster(remote + plane * x_plane, sum[plane]);
        }
      }
    }
  }
};
#endif

template <int kBits>
__global__ void __launch_bounds__(kBitBlocksGroups * 128 + 32, 1)
    ConvBitBlocks(const __grid_constant__ BitBlocksParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ uint64_t barriers[BlocksOfBits<kBits>::kBarriers];
  const BlocksOfBits<kBits> of{p, SharedTiles(unaligned), {SharedAddress(barriers)}};
  of.SetUp();
  if (of.own.group == kBitBlocksGroups) return of.Load();
  of.Run();
#endif
}

}  // namespace

cudaError_t LaunchBitBlocks(const BitBlocksParams& p, const LaunchOptions& options) {
  const bool has_instance = p.blocks >= 1 && p.blocks <= kMostBitBlocks;
  if (!has_instance) return cudaErrorInvalidValue;
  const int size = p.bands * p.slices;
  return std::visit(
      [&](auto bits) {
        return LaunchKernel<ConvBitBlocks<bits>>(
            options, {Dim(p.images * size), kBitBlocksGroups * kWarpgroup + 32, p.shared_bytes, Dim(size)},
            p);
      },
      OneOf<1, 2>(p.bits));
}

}  // namespace lowbit::cuda
