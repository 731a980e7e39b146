// Convolutions of stride 1 whose weights have one bit and whose codes have 1 or 2, for Hopper (sm_90a), where a
// product of 256 bits takes the time of one of 32 bytes. With the codes q = q_0 + 2 q_1 and the weights
// w = lowest + 2^shift * b,
//   sum of q w = 2^shift * (popcount(q_0 AND b) + 2 * popcount(q_1 AND b)) + lowest * (sum of q),
// and ones in the place of weights count the bits of q for the last term.
//
// Codes come as bytes, in the patches of halo_sm90.cu. A block's threads cut a patch into planes of bits once,
// whatever the window has taps: 128 channels of a place are a word of 16 bytes of each plane, the words of
// neighbouring places lie side by side, so that eight of them are what wgmma wants together, and any place may be
// the first. What lies outside of the image is 0 and counts nowhere.
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/halo_patches.cuh"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Bits of a and b, those of a where `mask` has them.
__device__ __forceinline__ unsigned Select(unsigned mask, unsigned a, unsigned b) {
  return (a & mask) | (b & ~mask);
}

// The planes of 32 codes below 2^kBits, a byte each in eight words, which are added up before they are taken
// apart, since no bits of theirs meet: bit 8 j + k of a plane is of byte j of word k / 2 + k % 2 * 4
// (BitOfChannel).
template <int kBits>
__device__ __forceinline__ void SliceCodes(const uint4& low, const uint4& high, unsigned (&planes)[kBits]) {
  static_assert(kBits == 1 || kBits == 2);
  const unsigned even = low.x + low.y * 4 + low.z * 16 + low.w * 64,
                 odd = high.x + high.y * 4 + high.z * 16 + high.w * 64;
  if constexpr (kBits == 1) {
    planes[0] = even + 2 * odd;
  } else {
    planes[0] = Select(0x55555555u, even, odd << 1);
    planes[1] = Select(0x55555555u, even >> 1, odd);
  }
}

// The sum of 2^i * counts[i][at].
template <int kBits, int kSums>
__device__ __forceinline__ int SumOfBits(const int (&counts)[kBits][kSums], int at) {
  return kBits == 1 ? counts[0][at] : counts[0][at] + 2 * counts[kBits - 1][at];
}

template <int kTileN, int kBits, Finish kFinish>
struct BitPatches : PatchTiles<kTileN, 0, BitStepBytes(kTileN), 2 * kMaxBitSlots, kFinish> {
  using Patches = PatchTiles<kTileN, 0, BitStepBytes(kTileN), 2 * kMaxBitSlots, kFinish>;
  using Patches::at, Patches::behind_weights, Patches::column, Patches::fixed, Patches::groups,
      Patches::kSums, Patches::own, Patches::patch, Patches::patches, Patches::tile, Patches::tiles,
      Patches::weights;
  static constexpr int kRowsBytes = kTileN * kBitRowBytes, kOnesBytes = kOnesRows * kBitRowBytes,
                       kStepBytes = BitStepBytes(kTileN),
                       kCutBarrier = 8;  // behind those of warpgroups
  // Of each plane of codes; behind a thread's sums of channels those of rows of ones.
  using Counts = int[kBits][kSums + kOnesRows / 2];

  const BitsParams& bits;
  // Slabs of all patches pass through the slots.
  const Barriers full = this->patch_barriers, empty = {full(kMaxBitSlots)};
  const int slabs = patches * bits.slabs;
  // Of a plane of a patch, and where planes begin, behind all slots.
  const int word_bytes = bits.places * kBitWordBytes, bit_plane_bytes = bits.words * word_bytes,
            all_planes = bits.k_tiles * kStepBytes + bits.slots * bits.plane_bytes;
  RingPlace slot = {};  // of the next slab to cut

  __device__ __forceinline__ void SetUp() const {
    Patches::SetUp(
        [&] {
          for (int i = 0; i < bits.slots; ++i) InitBarrier(empty(i), 4 * groups);
        },
        [&](int k, uint32_t target, uint32_t barrier) {
          BulkCopy(target, bits.weights + (k * bits.rows + at.n0) * kBitRowBytes, kRowsBytes, barrier);
          BulkCopy(target + kRowsBytes, bits.ones + k * kOnesBytes, kOnesBytes, barrier);
        },
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
      FetchSlab(of_patch, slab, to.stage);
      __syncwarp();
      if (++slab == bits.slabs) {
        slab = 0;
        ++of_patch;
      }
    }
  }

  // A warpgroup has its part in cutting every patch, also one that has no tile for it.
  __device__ __forceinline__ bool HasTile() const { return patch < patches; }

  __device__ __forceinline__ void MakeTile() {
    const int planes = all_planes + patch % bits.stages * kBits * bit_plane_bytes;
    CutPatch(planes);
    Counts counts = {};
    // A warpgroup without a tile multiplies one again: around products the compiler wants no branch.
    const int first = min(tile, tiles.last - 1) * 64 - this->FirstLine(patch) * bits.pitch;
    AddSteps(weights.at + planes + first * kBitWordBytes, counts);
    if (tile >= tiles.last) return;
    int sums[kSums];
    // A thread's rows, eight apart.
    const int of_codes[] = {SumOfBits(counts, kSums), SumOfBits(counts, kSums + 2)};
    BeginWithBias(fixed.state, column, sums);
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      sums[j] += (SumOfBits(counts, j) << bits.w_shift) + of_codes[j / 2 % 2] * bits.w_lowest;
    }
    this->AddPadding(sums);
    this->Finish(sums);
  }

 private:
  static __device__ __forceinline__ void Hold(Counts& counts) {
#pragma unroll
    for (auto& of_plane : counts) HoldRegisters(of_plane);
  }

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

  // Two or four threads read what there is of a place.
  template <int kSlabBytes>
  __device__ __forceinline__ void CutSlab(int slab, int planes, int places) const {
    constexpr int kUnits = kSlabBytes / kBitUnit, kSwizzle = kSlabBytes == 128 ? 0x70 : 0x30;
    const int unit = own.lane % kUnits, channel = slab * kSlabBytes + unit * kBitUnit,
              from = bits.k_tiles * kStepBytes + slot.stage * bits.plane_bytes + unit * kBitUnit,
              to = planes + channel / kBitWord * word_bytes + channel % kBitWord / kBitUnit * 4,
              step = groups * kWarpgroup / kUnits;
    const bool is_half = kUnits == 2 && slab % 2 == 0 && slab + 1 == bits.slabs;  // of the last word
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) / kUnits; i < places; i += step) {
      const int place = from + i * kSlabBytes, exchanged = place >> 3 & kSwizzle;
      unsigned cuts[kBits];
      SliceCodes(*reinterpret_cast<const uint4*>(weights.data + (place ^ exchanged)),
                 *reinterpret_cast<const uint4*>(weights.data + ((place + 16) ^ exchanged)), cuts);
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) {
        unsigned* const word =
            reinterpret_cast<unsigned*>(weights.data + to + plane * bit_plane_bytes + i * kBitWordBytes);
        *word = cuts[plane];
        if (is_half) word[kUnits] = 0;
      }
    }
  }

  // Adds the products of all steps with the planes whose first place is at `source`.
  __device__ __forceinline__ void AddSteps(uint32_t source, Counts& counts) {
    const uint32_t a = (source & 0x3FFFF) >> 4;
    uint64_t b = PlainDescriptor(weights.at);
    Hold(counts);
#pragma unroll 1
    for (int step = 0; step < bits.k_tiles; ++step, b += kStepBytes >> 4) {
      this->WaitForWeights(step);
      WgmmaFence();
      const uint32_t part = a + bits.step[step];
#pragma unroll
      for (int i = 0; i < kBits; ++i) {
        MultiplyBits<kTileN + kOnesRows>(counts[i], PlacesDescriptor(part + i * (bit_plane_bytes >> 4)), b);
      }
    }
    WgmmaCommit();
    this->FetchAddends();
    WgmmaWait<0>();
    Hold(counts);
  }
};
#endif

template <int kTileN, int kBits, Finish kFinish>
__global__ void __launch_bounds__(MaxBitTiles(kTileN, kBits) * 128 + 32, 1)
    ConvBits(const __grid_constant__ BitsParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = BitPatches<kTileN, kBits, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{{p, map, fixed, SharedTiles(unaligned)}, p});
#endif
}

// Codes of few bits become few codes, on lines. Whatever else there is the general instances do.
Finish InstanceOf(const EpilogueParams& e) {
  const Finish finish = FinishOf(e);
  if (finish == Finish::kWordsTail || finish == Finish::kWordsTailOnLine ||
      finish == Finish::kFloatsOfValues) {
    return finish;
  }
  return e.has_residual ? Finish::kFloatsAdding : Finish::kFloats;
}

template <int kTileN, int kBits>
cudaError_t LaunchInstance(const BitsParams& p, const ConvConfig& config, const CUtensorMap& map,
                           const LaunchOptions& options) {
  using enum Finish;
  return std::visit(
      [&](auto finish) {
        return LaunchKernel<ConvBits<kTileN, kBits, finish>>(
            options,
            {Dim(p.shares.blocks, p.n_tiles), config.tile_m / 64 * kWarpgroup + 32, options.shared_bytes}, p,
            map);
      },
      OneOf<kWordsTail, kWordsTailOnLine, kFloats, kFloatsAdding, kFloatsOfValues>(InstanceOf(p.epilogue)));
}

}  // namespace

cudaError_t LaunchBits(const BitsParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (p.stages < 1 || p.slots < 1 || p.slots > kMaxBitSlots || p.patch_rows > kMaxHaloRows ||
      p.k_tiles > kMaxHaloWeights || p.epilogue.sums == SumForm::kInteger ||
      config.tile_m / 64 > MaxBitTiles(config.tile_n, p.x_bits)) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap map;
  if (const cudaError_t error = EncodeRows(p, &map); error != cudaSuccess) return error;
  return std::visit(
      [&](auto tile_n, auto x_bits) { return LaunchInstance<tile_n, x_bits>(p, config, map, options); },
      OneOf<64, 128>(config.tile_n), OneOf<1, 2>(p.x_bits));
}

}  // namespace lowbit::cuda
