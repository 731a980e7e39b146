// Convolutions whose codes have 1 or 2 bits and whose weights have no more, for Hopper (sm_90a), where a product of 256
// bits takes the time of one of 32 bytes. With the codes q = q_0 + 2 q_1 and the weights
// w = lowest + 2^shift * (b_0 + 2 b_1),
//   sum of q w = 2^shift * (sum of 2^(i + j) * popcount(q_i AND b_j)) + lowest * (sum of q),
// and ones in the place of weights count the bits of q for the last term. All planes are counted into one sum, those of
// the largest i + j first, which is doubled on its way: as many registers as one bit takes.
//
// 128 channels of a place are a word of 16 bytes of each plane, the words of neighbouring places lie side by side, so
// that eight of them are what wgmma wants together, and any place may be the first. What lies outside of the image is
// 0 and counts nowhere.
//
// Codes may come as planes (core/bit_planes.h), which lie in memory as wgmma wants them; where windows have a stride,
// pixels that far apart are put together, in images of their own, of which each tap has a pixel of one. Or as bytes, in
// the patches of halo_sm90.cu, which a block's threads cut into planes once, whatever the window has taps. Residuals
// may come as planes, too, or are the codes of a second product of the block. Where codes leave as planes a thread has
// whole parts of their words: those of codes before the residual (of two codes the signs of sums less the channel's
// step, of four what a line's lowest bits are) and of residuals make them by logic, for 32 channels at once.
#include "kernels/cuda/conv/bit_patches.cuh"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Patches of bytes.
template <int kTileN, int kBits, Finish kFinish>
struct BitPatches : BitProducts<kTileN, kBits, kFinish> {
  using Products = BitProducts<kTileN, kBits, kFinish>;
  using Products::behind_weights, Products::bits, Products::bit_plane_bytes, Products::empty, Products::full,
      Products::groups, Products::own, Products::patch, Products::patches, Products::weights,
      Products::word_bytes;
  static constexpr int kCutBarrier = 8;  // behind those of warpgroups

  // Slabs of all patches pass through the slots.
  const int slabs = patches * bits.slabs;
  RingPlace slot = {};  // of the next slab to cut

  __device__ __forceinline__ void SetUp() const {
    Products::SetUp(
        [&] {
          for (int i = 0; i < bits.slots; ++i) InitBarrier(empty(i), 4 * groups);
        },
        [&](int i, uint32_t target, uint32_t barrier) { this->FetchStep(i, target, barrier); },
        [&] {
          static_assert(kMaxBitSlots <= 4, "a warp for each slot");
          if (own.warp >= min(bits.slots, slabs)) return;
          if (own.lane == 0) {
            InitBarrier(full(own.warp), bits.patch_rows);
            FenceBarrierInit();
            if (own.warp == 0) PrefetchMap(this->map);
          }
          __syncwarp();
          WaitForPredecessors();
          FetchSlab(own.warp / bits.slabs, own.warp % bits.slabs, own.warp);
        });
  }

  __device__ __forceinline__ void Load() const {
    RingPlace to;
    int of_patch = bits.slots / bits.slabs, slab = bits.slots % bits.slabs;
#pragma unroll 1
    for (int i = bits.slots; i < slabs; ++i, to.Step(bits.slots)) {
      WaitBarrier(empty(to.stage), to.parity);
      __syncwarp();  // lanes without a row have seen this phase, too, before the next one can end
      FetchSlab(of_patch, slab, to.stage);
      if (++slab == bits.slabs) {
        slab = 0;
        ++of_patch;
      }
    }
  }

  // A warpgroup has its part in cutting every patch, also one that has no tile for it.
  __device__ __forceinline__ bool HasTile() const { return patch < patches; }

  __device__ __forceinline__ void MakeTile() {
    const int planes = this->all_planes + patch % bits.stages * kBits * bit_plane_bytes;
    CutPatch(planes);
    typename Products::Counts counts;
    this->Count(planes, counts);
    if (this->tile < this->tiles.last) this->FinishCounts(counts);
  }

 private:
  // By a warp.
  __device__ __forceinline__ void FetchSlab(int of_patch, int slab, int to_slot) const {
    const int line0 = this->FirstLine(of_patch), lines = this->LinesOf(of_patch),
              bytes = bits.pitch * bits.slab;
    static_assert(kMaxHaloRows <= 32, "a lane for each row");
    if (own.lane >= bits.patch_rows) return;
    ArriveExpecting(full(to_slot), own.lane < lines ? bytes : 0);
    if (own.lane >= lines) return;
    this->FetchLine(line0 + own.lane, slab, behind_weights + to_slot * bits.plane_bytes + own.lane * bytes,
                    full(to_slot));
  }

  // Cuts the patch, into `planes`. Planes are in use until all have passed the next patch's barrier, and that patch
  // goes to other ones.
  __device__ __forceinline__ void CutPatch(int planes) {
    const int places = this->LinesOf(patch) * bits.pitch;
#pragma unroll 1
    for (int slab = 0; slab < bits.slabs; ++slab, slot.Step(bits.slots)) {
      WaitBarrier(full(slot.stage), slot.parity);
      if (bits.slab == kBitWord) {
        CutSlab<kBitWord>(slab, planes, places);
      } else {
        CutSlab<kBitWord / 2>(slab, planes, places);
      }
      if (patch * bits.slabs + slab + bits.slots < slabs) {
        __syncwarp();
        if (own.lane == 0) Arrive(empty(slot.stage));
      }
    }
    FenceAsyncProxy();
    SyncThreads(kCutBarrier, groups * kWarpgroup);
  }

  // Four threads read what there is of a place, each its bytes of every chunk.
  template <int kSlabBytes>
  __device__ __forceinline__ void CutSlab(int slab, int planes, int places) const {
    constexpr int kSwizzle = kSlabBytes == 128 ? 0x70 : 0x30;
    const int own_bytes = own.lane % 4 * 4, word = slab * kSlabBytes / kBitWord,
              from = bits.k_tiles * Products::kStepBytes + slot.stage * bits.plane_bytes,
              to = planes + word * word_bytes + own_bytes, step = groups * kWarpgroup / 4;
    // Of slabs that are half a word.
    const bool is_second = slab % 2 != 0, is_alone = !is_second && slab + 1 == bits.slabs;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) / 4; i < places; i += step) {
      const int place = from + i * kSlabBytes, exchanged = place >> 3 & kSwizzle;
      unsigned halves[2][kBits] = {};
#pragma unroll
      for (int half = 0; half < kSlabBytes / 64; ++half) {
        unsigned codes[4];
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
          const int chunk_at = (place + (half * 4 + chunk) * 16) ^ exchanged;
          codes[chunk] = *reinterpret_cast<const unsigned*>(weights.data + chunk_at + own_bytes);
        }
        HalvesOfPlanes(codes, halves[half]);
      }
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) {
        uint8_t* const out = weights.data + to + plane * bit_plane_bytes + i * kBitWordBytes;
        if (kSlabBytes == kBitWord || is_alone) {
          *reinterpret_cast<unsigned*>(out) = JoinHalves(halves[0][plane], halves[1][plane]);
        } else {
          reinterpret_cast<uint16_t*>(out)[is_second] = static_cast<uint16_t>(halves[0][plane]);
        }
      }
    }
  }
};
#endif

template <bool kOfPlanes, int kTileN, int kBits, Finish kFinish>
__global__ void __launch_bounds__(MaxBitTiles(kTileN, MakesBits(kFinish)) * 128 + 32, 1)
    ConvBits(const __grid_constant__ BitsParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline =
      std::conditional_t<kOfPlanes, PlanePatches<kTileN, kBits, kFinish>, BitPatches<kTileN, kBits, kFinish>>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{{{p, map, fixed, SharedTiles(unaligned)}, p, p}});
#endif
}

// A thread makes its part of a word of each plane, as one that has finished sums does (HalvesOfPlanes).
constexpr int kPackThreads = 256;

template <int kBits>
__global__ void __launch_bounds__(kPackThreads) PackPlanes(const __grid_constant__ PackPlanesParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int words = (p.channels + kBitWord - 1) / kBitWord, own = static_cast<int>(threadIdx.x) % 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kPackThreads / 4) + threadIdx.x / 4;
  const int64_t pixel = index / words;
  const int word = static_cast<int>(index - pixel * words);
  if (pixel >= p.pixels) return;
  const uint8_t* const from = p.x + pixel * p.channels + word * kBitWord + own * 4;
  unsigned halves[2][kBits] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (word * kBitWord + half * 64 >= p.channels) break;
    unsigned codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = *reinterpret_cast<const unsigned*>(from + half * 64 + i * 16);
    HalvesOfPlanes(codes, halves[half]);
  }
#pragma unroll
  for (int plane = 0; plane < kBits; ++plane) {
    uint8_t* const to =
        p.planes + ((static_cast<int64_t>(plane) * words + word) * p.pixels + pixel) * kBitWordBytes;
    reinterpret_cast<unsigned*>(to)[own] = JoinHalves(halves[0][plane], halves[1][plane]);
  }
}

// Codes of few bits become few codes, on lines. Whatever else there is the general instances do.
template <bool kOfPlanes>
Finish InstanceOf(const BitsParams& p) {
  const EpilogueParams& e = p.epilogue;
  const Finish finish = FinishOf(e);
  if (kOfPlanes && p.has_steps) return Finish::kPlanesSteps;
  if (kOfPlanes && p.combines) return Finish::kPlanesAdding;
  if (finish == Finish::kTail) return Finish::kBorderTail;  // whatever the borders
  const bool is_own = finish == Finish::kBorderTail || finish == Finish::kWordsTailOnLine ||
                      finish == Finish::kPlanesTail || (!kOfPlanes && finish == Finish::kFloatsOfValues);
  if (is_own) return finish;
  return e.has_residual ? Finish::kFloatsAdding : Finish::kFloats;
}

template <bool kOfPlanes, int kTileN, int kBits>
cudaError_t LaunchInstance(const BitsParams& p, const ConvConfig& config, const LaunchOptions& options) {
  using enum Finish;
  CUtensorMap map = {};
  if constexpr (!kOfPlanes) {
    if (const cudaError_t error = EncodeRows(p, &map); error != cudaSuccess) return error;
  }
  const auto launch = [&](auto finish) {
    if constexpr (HasInstance(finish == kPlanesTail || (kTileN == 64 && kBits == 1))) {
      return LaunchKernel<ConvBits<kOfPlanes, kTileN, kBits, finish>>(
          options,
          {Dim(p.shares.blocks, p.n_tiles), config.tile_m / 64 * kWarpgroup + 32, options.shared_bytes}, p,
          map);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  const Finish finish = InstanceOf<kOfPlanes>(p);
  if constexpr (kOfPlanes) {
    return std::visit(launch, OneOf<kBorderTail, kWordsTailOnLine, kPlanesTail, kPlanesAdding, kPlanesSteps,
                                    kFloats, kFloatsAdding>(finish));
  } else {
    return std::visit(
        launch,
        OneOf<kBorderTail, kWordsTailOnLine, kPlanesTail, kFloats, kFloatsAdding, kFloatsOfValues>(finish));
  }
}

}  // namespace

cudaError_t LaunchPackPlanes(const PackPlanesParams& p, const LaunchOptions& options) {
  const int64_t words = int64_t{p.pixels} * ((p.channels + kBitWord - 1) / kBitWord);
  const auto blocks = static_cast<int>((words * 4 + kPackThreads - 1) / kPackThreads);
  return std::visit(
      [&](auto x_bits) {
        return LaunchKernel<PackPlanes<x_bits>>(options, {Dim(blocks), kPackThreads, 0}, p);
      },
      OneOf<1, 2>(p.x_bits));
}

cudaError_t LaunchBits(const BitsParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxBitSlots || p.slots < 0 || p.slots > kMaxBitSlots ||
      p.patch_rows > kMaxHaloRows || p.k_tiles > kMaxBitWeights || p.epilogue.sums == SumForm::kInteger ||
      config.tile_m / 64 > MaxBitTiles(config.tile_n, p.combines) || (p.w_planes > 1 && p.x_bits == 1)) {
    return cudaErrorInvalidValue;
  }
  return std::visit(
      [&](auto of_planes, auto tile_n, auto x_bits) {
        return LaunchInstance<of_planes, tile_n, x_bits>(p, config, options);
      },
      OneOf(p.slots == 0), OneOf<64, 128>(config.tile_n), OneOf<1, 2>(p.x_bits));
}

}  // namespace lowbit::cuda
