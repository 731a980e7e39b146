// Convolutions of stride 1 whose weights and codes have few bits, for Hopper (sm_90a), where a product of 256
// bits takes the time of one of 32 bytes. With the codes q = sum of 2^i q_i and the weights
// w = lowest + 2^shift * (sum of 2^j w_j),
//   sum of q w = 2^shift * (sum over i, j of 2^(i + j) * popcount(q_i AND w_j)) + lowest * (sum of q).
// Products of one power of two share sums, and ones in the place of weights count the bits of q_i for the last
// term.
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
  if constexpr (kBits == 1) {
    const unsigned even = low.x + low.y * 4 + low.z * 16 + low.w * 64,
                   odd = high.x + high.y * 4 + high.z * 16 + high.w * 64;
    planes[0] = even + 2 * odd;
  } else if constexpr (kBits == 2) {
    const unsigned even = low.x + low.y * 4 + low.z * 16 + low.w * 64,
                   odd = high.x + high.y * 4 + high.z * 16 + high.w * 64;
    planes[0] = Select(0x55555555u, even, odd << 1);
    planes[1] = Select(0x55555555u, even >> 1, odd);
  } else {
    static_assert(kBits == 4);
    const unsigned a = low.x + low.z * 16, b = high.x + high.z * 16, c = low.y + low.w * 16,
                   d = high.y + high.w * 16;
    const unsigned first[] = {Select(0x55555555u, a, b << 1), Select(0x55555555u, a >> 1, b)},
                   second[] = {Select(0x55555555u, c, d << 1), Select(0x55555555u, c >> 1, d)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      planes[i] = Select(0x33333333u, first[i], second[i] << 2);
      planes[i + 2] = Select(0x33333333u, first[i] >> 2, second[i]);
    }
  }
}

// The sum of 2^i * counts[i][at] for i < kCount.
template <int kCount, int kPowers, int kSums>
__device__ __forceinline__ int SumOfPowers(const int (&counts)[kPowers][kSums], int at) {
  int sum = counts[kCount - 1][at];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) sum = 2 * sum + counts[i][at];
  return sum;
}

template <int kTileN, int kPlanes, int kBits, Finish kFinish>
struct BitPatches : PatchTiles<kTileN, 0, BitStepBytes(kTileN, kPlanes), 2 * kMaxBitSlots, kFinish> {
  using Patches = PatchTiles<kTileN, 0, BitStepBytes(kTileN, kPlanes), 2 * kMaxBitSlots, kFinish>;
  using Patches::at, Patches::behind_weights, Patches::column, Patches::fixed, Patches::groups,
      Patches::kSums, Patches::own, Patches::patch, Patches::patches, Patches::tile, Patches::tiles,
      Patches::weights;
  static constexpr int kPlaneBytes = kTileN * kBitRowBytes, kOnesBytes = kOnesRows * kBitRowBytes,
                       kStepBytes = BitStepBytes(kTileN, kPlanes), kPowers = kPlanes + kBits - 1,
                       kCutBarrier = 8;  // behind those of warpgroups
  // Behind a thread's sums of channels, those of rows of ones.
  using PowerSums = int[kPowers][kSums + kOnesRows / 2];

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
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            BulkCopy(target + plane * kPlaneBytes + (plane > 0 ? kOnesBytes : 0),
                     bits.weights + ((k * kPlanes + plane) * bits.rows + at.n0) * kBitRowBytes, kPlaneBytes,
                     barrier);
          }
          BulkCopy(target + kPlaneBytes, bits.ones + k * kOnesBytes, kOnesBytes, barrier);
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
    PowerSums counts = {};
    // A warpgroup without a tile multiplies one again: around products the compiler wants no branch.
    const int first = min(tile, tiles.last - 1) * 64 - this->FirstLine(patch) * bits.pitch;
    AddSteps(weights.at + planes + first * kBitWordBytes, counts);
    if (tile >= tiles.last) return;
    int sums[kSums];
    // A thread's rows, eight apart.
    const int of_codes[] = {SumOfPowers<kBits>(counts, kSums), SumOfPowers<kBits>(counts, kSums + 2)};
    BeginWithBias(fixed.state, column, sums);
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      sums[j] += (SumOfPowers<kPowers>(counts, j) << bits.w_shift) + of_codes[j / 2 % 2] * bits.w_lowest;
    }
    this->AddPadding(sums);
    this->Finish(sums);
  }

 private:
  static __device__ __forceinline__ void Hold(PowerSums& counts) {
#pragma unroll
    for (auto& of_power : counts) HoldRegisters(of_power);
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
  __device__ __forceinline__ void AddSteps(uint32_t source, PowerSums& counts) {
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
        const uint64_t of_plane = PlacesDescriptor(part + i * (bit_plane_bytes >> 4));
        MultiplyBits<kTileN + kOnesRows>(counts[i], of_plane, b);
#pragma unroll
        for (int plane = 1; plane < kPlanes; ++plane) {
          MultiplyBits<kTileN>(counts[i + plane], of_plane, b + ((plane * kPlaneBytes + kOnesBytes) >> 4));
        }
      }
    }
    WgmmaCommit();
    this->FetchAddends();
    WgmmaWait<0>();
    Hold(counts);
  }
};
#endif

template <int kTileN, int kPlanes, int kBits, Finish kFinish>
__global__ void __launch_bounds__(MaxBitTiles(kTileN, kPlanes, kBits) * 128 + 32, 1)
    ConvBits(const __grid_constant__ BitsParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = BitPatches<kTileN, kPlanes, kBits, kFinish>;
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

template <int kTileN, int kPlanes, int kBits>
cudaError_t LaunchInstance(const BitsParams& p, const ConvConfig& config, const CUtensorMap& map,
                           const LaunchOptions& options) {
  using enum Finish;
  return std::visit(
      [&](auto finish) {
        return LaunchKernel<ConvBits<kTileN, kPlanes, kBits, finish>>(
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
      config.tile_m / 64 > MaxBitTiles(config.tile_n, p.planes, p.x_bits)) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap map;
  if (const cudaError_t error = EncodeRows(p, &map); error != cudaSuccess) return error;
  const auto launch = [&]<int kTileN, int kPlanes, int kBits>() {
    return LaunchInstance<kTileN, kPlanes, kBits>(p, config, map, options);
  };
  const bool is_wide = config.tile_n == 128;
  if (p.planes == 1 && p.x_bits == 1)
    return is_wide ? launch.template operator()<128, 1, 1>() : launch.template operator()<64, 1, 1>();
  if (p.planes == 1 && p.x_bits == 2)
    return is_wide ? launch.template operator()<128, 1, 2>() : launch.template operator()<64, 1, 2>();
  if (is_wide) return cudaErrorInvalidValue;
  return p.planes == 2 ? launch.template operator()<64, 2, 2>() : launch.template operator()<64, 1, 4>();
}

}  // namespace lowbit::cuda
