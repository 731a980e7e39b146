// Residual blocks of planes of bits in one kernel, on wgmma for Hopper (sm_90a). A cluster has an image, each block of it a
// band of rows and a slice of the channels:
//
//   x -> 1x1 -> windows -> 3x3 -> made -> 1x1 + x -> x of the next residual block, or y
//
// A warpgroup multiplies 64 places with 64 channels at a time, as `bits` does, and sends the codes to all blocks that read
// them: those of the same band, of rows at a band's border those of the next one, too. A tensor has a barrier in each
// block, which counts the bytes that come. Half words can not be sent: they come as the threads have them (parts), and the
// reading block puts them in their places. Weights of the next residual block are fetched as soon as those before are out
// of use.
//
// Nobody sends where somebody still reads: whoever sends x or what the second convolution makes has seen all that its band
// sent before, and that was made of what is overwritten. Where there are several bands that is not known of the others,
// which is why parts of windows have two places that take turns then.
#include "kernels/cuda/conv/bit_codes.cuh"
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/device/matrix_descriptors.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/fused/bit_blocks.h"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kUnit = 64;  // channels

// A block of the cluster.
template <int kBits>
struct BlocksOfBits {
  using Tile = BitTile<kUnit, kBits>;
  using Counts = typename Tile::Counts;
  using Codes = typename Tile::Codes;
  static constexpr int kStepBytes = BitStepBytes(kUnit), kRowsBytes = kUnit * kBitRowBytes;
  static constexpr int kOnesBytes = kOnesRows * kBitRowBytes;
  enum Barrier { kWeights = 0, kX = 3, kWindows = 4, kMade = 6, kNextX = 7, kUnused = 8, kBarriers = 11 };

  const BitBlocksParams& p;
  const SharedTiles shared;
  const Barriers barrier;
  const ThreadPlace own = {};
  const int size = p.bands * p.slices, rank = static_cast<int>(blockIdx.x) % size,
            image = static_cast<int>(blockIdx.x) / size, band = rank / p.slices, slice = rank % p.slices,
            rows = min(p.rows, p.h - band * p.rows), pixels = rows * p.w,
            parts_of_tile = p.layers[0].units * p.slices, parts = parts_of_tile * kBits;
  const bool has_above = band > 0, has_below = band + 1 < p.bands;
  const int row = own.thread / 32 * 16 + own.lane / 4, column = own.lane % 4 * 4;

  __device__ __forceinline__ void SetUp() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kUnused; ++i) InitBarrier(barrier(i), 1);
      for (int i = kUnused; i < kBarriers; ++i) InitBarrier(barrier(i), 4 * p.groups);
      FenceBarrierInit();
    }
    // Columns and rows outside of the image stay 0.
    const int bytes = p.windows_bytes;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += static_cast<int>(blockDim.x) * 16)
      *reinterpret_cast<int4*>(shared.data + p.windows_at + at) = int4{};
    __syncthreads();
    ClusterArrive();
    // All warps fetch some of what the first block needs.
    const int warps = 4 * p.groups + 1, first = own.warp + own.lane * warps, step = 32 * warps;
#pragma unroll 1
    for (int layer = 0; layer < 3; ++layer)
      FetchWeights(0, layer, static_cast<int>(threadIdx.x) == 0, first, step);
    WaitForPredecessors();
    FetchX(first, step);
    ClusterWait();
  }

  // What the last warp does: fetches weights of further blocks when all warps have done with those before.
  __device__ __forceinline__ void Load() const {
#pragma unroll 1
    for (int block = 1; block < p.blocks; ++block) {
#pragma unroll 1
      for (int layer = 0; layer < 3; ++layer) {
        WaitBarrier(barrier(kUnused + layer), (block - 1) & 1);
        __syncwarp();
        FetchWeights(block, layer, own.lane == 0, own.lane, 32);
      }
    }
  }
  // Of the copies those from `first` on, each `step`th; one thread `expects` them all.
  __device__ __forceinline__ void FetchWeights(int block, int layer, bool expects, int first,
                                               int step) const {
    const BitBlockLayer& of = p.layers[layer];
    const BitBlockConv& conv = p.block[block].convs[layer];
    const uint32_t full = barrier(kWeights + layer);
    const int steps = of.steps * conv.w_planes,
              constants = (kBits > 1 ? 2 : 1) * kBitUnitSteps + kPlaneWordBytes;
    if (expects) ArriveExpecting(full, of.units * (steps * kStepBytes + constants));
    // Of a unit: rows and ones of each step, then what codes are told by.
    const int copies = 2 * steps + 3;
#pragma unroll 1
    for (int i = first; i < of.units * copies; i += step) {
      const int unit = i / copies, copy = i - unit * copies, k = copy / 2;
      const uint32_t constants_at = shared.at + of.weights_at + unit * of.unit_bytes,
                     to = constants_at + kBitUnitConstants + k * kStepBytes;
      const int channel = (slice * of.units + unit) * kUnit;
      if (k < steps && copy % 2 == 0) {
        BulkCopy(to, conv.weights + (k * of.rows + channel) * kBitRowBytes, kRowsBytes, full);
      } else if (k < steps) {
        BulkCopy(to + kRowsBytes, conv.ones + k * kOnesBytes, kOnesBytes, full);
      } else if (copy == 2 * steps) {
        BulkCopy(constants_at, conv.steps + channel, kBitUnitSteps, full);
      } else if (copy > 2 * steps + 1) {
        BulkCopy(constants_at + 2 * kBitUnitSteps, conv.flips + channel / kPlaneChannels * kPlaneWordBytes,
                 kPlaneWordBytes, full);
      } else if (kBits > 1) {
        BulkCopy(constants_at + kBitUnitSteps, conv.last_steps + channel, kBitUnitSteps, full);
      }
    }
  }
  __device__ __forceinline__ void FetchX(int first, int step) const {
    const int words = kBits * p.layers[2].words, bytes = pixels * kBitWordBytes;
    if (threadIdx.x == 0) ArriveExpecting(barrier(kX), words * bytes);
#pragma unroll 1
    for (int word = first; word < words; word += step) {
      BulkCopy(shared.at + p.x_at + word * p.x_places * kBitWordBytes, p.x + FirstPixel(word) * kBitWordBytes,
               bytes, barrier(kX));
    }
  }
  // Of a word of any plane.
  __device__ __forceinline__ int64_t FirstPixel(int word) const {
    return (static_cast<int64_t>(word) * p.images + image) * p.h * p.w + band * p.rows * p.w;
  }

  __device__ __forceinline__ void Run() const {
#pragma unroll 1
    for (int block = 0; block < p.blocks; ++block) {
      const bool is_last = block + 1 == p.blocks;
      const uint32_t parity = block & 1;
      const int turn = p.turns == 2 ? block & 1 : 0;
      const uint32_t windows = barrier(kWindows + turn);
      const int window_parts = p.window_parts_at + turn * p.window_parts_bytes;
      WaitBarrier(block == 0 ? barrier(kX) : barrier(kNextX), block == 0 ? 0 : (block - 1) & 1);
      FenceAsyncProxy();
      WaitBarrier(barrier(kWeights), parity);
      ReducePixels(block, window_parts, windows);
      Leave(0);
      Expect(windows,
             kBitPartsBytes * parts *
                 (p.pixel_tiles + (has_above ? p.above_tiles : 0) + (has_below ? p.below_tiles : 0)));

      WaitBarrier(windows, p.turns == 2 ? block >> 1 & 1 : parity);
      PlaceWindows(window_parts);
      Meet();
      WaitBarrier(barrier(kWeights + 1), parity);
      MultiplyWindows(block);
      Leave(1);
      Expect(barrier(kMade), kBitPartsBytes * parts * p.place_tiles);

      WaitBarrier(barrier(kMade), parity);
      PlaceMade();
      Meet();
      WaitBarrier(barrier(kWeights + 2), parity);
      if (is_last) LetSuccessorsStart();
      AddUp(block, is_last);
      if (is_last) break;
      Leave(2);
      Expect(barrier(kNextX), kBits * p.layers[2].words * pixels * kBitWordBytes);
    }
  }

 private:
  // All warps, of which each has stored where others read.
  __device__ __forceinline__ void Meet() const {
    FenceAsyncProxy();
    SyncThreads(1, p.groups * kWarpgroup);
  }
  // This warp has done with a layer's weights.
  __device__ __forceinline__ void Leave(int layer) const {
    __syncwarp();
    if (own.lane == 0) Arrive(barrier(kUnused + layer));
  }
  // What this block's barrier is to count.
  __device__ __forceinline__ void Expect(uint32_t of, int bytes) const {
    if (threadIdx.x == 0) ArriveExpecting(of, bytes);
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
        WgmmaCommit();  // here ptxas needs no product of its own for that
        adds = 1;
      };
      if (of.steps == 1) return some.template operator()<1>(0);
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
        WgmmaWait<0>();
        HoldRegisters(counts);
#pragma unroll
        for (int& count : counts) count *= 2;
        HoldRegisters(counts);
      }
    }
    multiply(0, 0);
    WgmmaWait<0>();
    HoldRegisters(counts);
  }
  // A unit's first codes of these places.
  template <int kLayer>
  __device__ __forceinline__ void CodesOf(int block, int unit, uint32_t a, int plane_bytes,
                                          Codes& codes) const {
    const BitBlockLayer& of = p.layers[kLayer];
    const BitBlockConv& conv = p.block[block].convs[kLayer];
    const int at_unit = of.weights_at + unit * of.unit_bytes;
    Counts counts;
    Count(of, conv.w_planes, a, plane_bytes, shared.at + at_unit + kBitUnitConstants, counts);
    const uint8_t* const constants = shared.data + at_unit;
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

  // A tile of places and a unit of channels; those of a warpgroup are as far apart as there are warpgroups.
  struct Item {
    int tile, unit;
  };
  __device__ __forceinline__ Item FirstItem(int units) const {
    Item item = {0, own.group};
#pragma unroll 1
    for (; item.unit >= units; item.unit -= units) ++item.tile;
    return item;
  }
  __device__ __forceinline__ void Step(Item& item, int units) const {
#pragma unroll 1
    for (item.unit += p.groups; item.unit >= units; item.unit -= units) ++item.tile;
  }

  // A unit's codes as a thread has them, of one of `tiles`, to all blocks of a band.
  __device__ __forceinline__ void SendParts(int to_band, int at, int tiles, int tile, int unit,
                                            const Codes& codes, uint32_t of) const {
    at += ((unit * tiles + tile) * kBits * kWarpgroup + own.thread) * 4;
#pragma unroll 1
    for (int to = 0; to < p.slices; ++to) {
      const int block = to_band * p.slices + to;
      const uint32_t remote = ClusterAddress(shared.at + at, block), counts_at = ClusterAddress(of, block);
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane)
        SendWordToCluster(remote + plane * kBitPartsBytes,
                          __byte_perm(codes[0][0][plane], codes[1][0][plane], 0x5410), counts_at);
    }
  }
  // Those that came of any unit to where f(k, pixel) has the place of a pixel, of the first or the second row, or -1.
  template <typename F>
  __device__ __forceinline__ void PlaceParts(int at, int tiles, int first_tile, int to_at, int places,
                                             const F& place_of) const {
    const int next_plane = p.layers[0].words * places * kBitWordBytes;
#pragma unroll 1
    for (Item item = FirstItem(parts_of_tile); item.tile < tiles; Step(item, parts_of_tile)) {
      const int tile = item.tile, unit = item.unit;
      const uint8_t* const from =
          shared.data + at + ((unit * tiles + tile) * kBits * kWarpgroup + own.thread) * 4;
      uint8_t* const to = shared.data + to_at + unit / 2 * places * kBitWordBytes + column + unit % 2 * 2;
      unsigned part[kBits];
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane)
        part[plane] = *reinterpret_cast<const unsigned*>(from + plane * kBitPartsBytes);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int place = place_of((first_tile + tile) * 64 + row + 8 * k);
        if (place < 0) continue;
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane) {
          *reinterpret_cast<uint16_t*>(to + plane * next_plane + place * kBitWordBytes) =
              static_cast<uint16_t>(part[plane] >> 16 * k);
        }
      }
    }
  }

  __device__ __forceinline__ void ReducePixels(int block, int window_parts, uint32_t windows) const {
    const int units = p.layers[0].units, x_plane = p.layers[2].words * p.x_places * kBitWordBytes,
              last_row = (p.rows - 1) * p.w / 64;
    const int above = window_parts + kBitPartsBytes * parts * p.pixel_tiles,
              below = above + kBitPartsBytes * parts * p.above_tiles;
#pragma unroll 1
    for (Item item = FirstItem(units); item.tile < p.pixel_tiles; Step(item, units)) {
      const int tile = item.tile, unit = item.unit, of_all = slice * units + unit;
      Codes codes;
      CodesOf<0>(block, unit, shared.at + p.x_at + tile * 64 * kBitWordBytes, x_plane, codes);
      SendParts(band, window_parts, p.pixel_tiles, tile, of_all, codes, windows);
      if (has_above && tile < p.below_tiles)
        SendParts(band - 1, below, p.below_tiles, tile, of_all, codes, windows);
      if (has_below && tile >= last_row)
        SendParts(band + 1, above, p.above_tiles, tile - last_row, of_all, codes, windows);
    }
  }
  __device__ __forceinline__ void PlaceWindows(int window_parts) const {
    PlaceParts(window_parts, p.pixel_tiles, 0, p.windows_at, p.windows_places, [&](int pixel) {
      const int y = Divide(pixel, p.by_w);
      return pixel < pixels ? (y + 1) * p.pitch + pixel - y * p.w + 1 : -1;
    });
    const int above = window_parts + kBitPartsBytes * parts * p.pixel_tiles, first = (p.rows - 1) * p.w;
    if (has_above) {
      PlaceParts(above, p.above_tiles, first / 64, p.windows_at, p.windows_places,
                 [&](int pixel) { return pixel >= first && pixel < first + p.w ? pixel - first + 1 : -1; });
    }
    if (has_below) {
      PlaceParts(above + kBitPartsBytes * parts * p.above_tiles, p.below_tiles, 0, p.windows_at,
                 p.windows_places,
                 [&](int pixel) { return pixel < p.w ? (rows + 1) * p.pitch + pixel + 1 : -1; });
    }
  }

  __device__ __forceinline__ void MultiplyWindows(int block) const {
    const int units = p.layers[1].units, windows_plane = p.layers[0].words * p.windows_places * kBitWordBytes;
#pragma unroll 1
    for (Item item = FirstItem(units); item.tile < p.place_tiles; Step(item, units)) {
      const int tile = item.tile, unit = item.unit;
      Codes codes;
      CodesOf<1>(block, unit, shared.at + p.windows_at + tile * 64 * kBitWordBytes, windows_plane, codes);
      SendParts(band, p.made_parts_at, p.place_tiles, tile, slice * units + unit, codes, barrier(kMade));
    }
  }
  __device__ __forceinline__ void PlaceMade() const {
    PlaceParts(p.made_parts_at, p.place_tiles, 0, p.made_at, p.made_places, [](int place) { return place; });
  }

  __device__ __forceinline__ void AddUp(int block, bool is_last) const {
    const int pairs = p.layers[2].units / 2, words = p.layers[2].words,
              x_plane = words * p.x_places * kBitWordBytes,
              made_plane = p.layers[1].words * p.made_places * kBitWordBytes;
    const int64_t y_plane = static_cast<int64_t>(words) * p.images * p.h * p.w * kBitWordBytes;
#pragma unroll 1
    for (Item item = FirstItem(pairs); item.tile < p.place_tiles; Step(item, pairs)) {
      const int tile = item.tile, pair = item.unit, word = slice * pairs + pair;
      uint8_t* const y_at = p.y + FirstPixel(word) * kBitWordBytes + column;
      unsigned first[2][kBits] = {};
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        Codes codes;
        CodesOf<2>(block, 2 * pair + half, shared.at + p.made_at + tile * 64 * kBitWordBytes, made_plane,
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
            *reinterpret_cast<unsigned*>(y_at + plane * y_plane + pixel * kBitWordBytes) = sum[plane];
          }
          continue;
        }
#pragma unroll 1
        for (int to = 0; to < p.slices; ++to) {
          const int block = band * p.slices + to;
          const uint32_t remote = ClusterAddress(shared.at + at, block),
                         counts_at = ClusterAddress(barrier(kNextX), block);
#pragma unroll
          for (int plane = 0; plane < kBits; ++plane)
            SendWordToCluster(remote + plane * x_plane, sum[plane], counts_at);
        }
      }
    }
  }
};
#endif

template <int kBits>
__global__ void __launch_bounds__(kMostBitBlocksGroups* kWarpgroup + 32, 1)
    ConvBitBlocks(const __grid_constant__ BitBlocksParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ uint64_t barriers[BlocksOfBits<kBits>::kBarriers];
  SharedTiles shared(unaligned);
  KeepInRegister(shared.at);
  const BlocksOfBits<kBits> of{p, shared, {SharedAddress(barriers)}};
  of.SetUp();
  if (of.own.group == p.groups) return of.Load();
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
            options, {Dim(p.images * size), p.groups * kWarpgroup + 32, p.shared_bytes, Dim(size)}, p);
      },
      OneOf<1, 2>(p.bits));
}

}  // namespace lowbit::cuda
