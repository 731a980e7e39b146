// Convolutions of stride 1 whose weights and codes have few bits, for Hopper (sm_90a), where a product of 256
// bits takes the time of one of 32 bytes. Codes come as bytes, in the patches of halo_sm90.cu; the threads that
// multiply cut them into planes of bits on the way to the registers of A (code_planes.cuh). What lies outside of
// the image is 0 and counts nowhere.
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/code_planes.cuh"
#include "kernels/cuda/conv/halo_patches.cuh"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int kTileN, int kPlanes, int kBits, Finish kFinish>
struct BitPatches : HaloPatches<kTileN, 0, BitStepBytes(kTileN, kPlanes), kFinish, PixelsOfAnyPlaces> {
  using Patches = HaloPatches<kTileN, 0, BitStepBytes(kTileN, kPlanes), kFinish, PixelsOfAnyPlaces>;
  using Patches::at, Patches::column, Patches::fixed, Patches::kSums, Patches::own, Patches::weights;
  static constexpr int kPlaneBytes = kTileN * kBitRowBytes, kOnesBytes = kOnesRows * kBitRowBytes,
                       kStepBytes = BitStepBytes(kTileN, kPlanes), kPowers = kPlanes + kBits - 1;
  // Behind a thread's sums of channels, those of rows of ones.
  using PowerSums = int[kPowers][kSums + kOnesRows / 2];

  const BitsParams& bits;
  int* const units;  // from the patch on, where the codes of each unit of K begin

  __device__ __forceinline__ void SetUp() const {
    const int of_slab = bits.slab / kBitUnit;
    for (int i = static_cast<int>(threadIdx.x); i < bits.k_tiles * kUnitsOfStep;
         i += static_cast<int>(blockDim.x)) {
      const int step = i / of_slab;
      units[i] = step < bits.steps ? bits.step[step] * 16 + i % of_slab * kBitUnit : 0;
    }
    Patches::SetUp([&](int k, uint32_t target, uint32_t barrier) {
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        BulkCopy(target + plane * kPlaneBytes + (plane > 0 ? kOnesBytes : 0),
                 bits.weights + ((k * kPlanes + plane) * bits.rows + at.n0) * kBitRowBytes, kPlaneBytes,
                 barrier);
      }
      BulkCopy(target + kPlaneBytes, bits.ones + k * kOnesBytes, kOnesBytes, barrier);
    });
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) {
    const auto rows = this->WaitForRows();
    PowerSums counts = {};
    AddSteps(bits.k_tiles * kStepBytes + this->FirstPlace(rows) + this->row * bits.slab, counts);
    this->FetchAddends();
    // A thread's rows, eight apart.
    const int of_codes[] = {SumOfPowers<kBits>(counts, kSums), SumOfPowers<kBits>(counts, kSums + 2)};
    BeginWithBias(fixed.state, column, sums);
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      sums[j] += (SumOfPowers<kPowers>(counts, j) << bits.w_shift) + of_codes[j / 2 % 2] * bits.w_lowest;
    }
    this->LeavePatch(rows, sums);
  }

 private:
  static __device__ __forceinline__ void Hold(PowerSums& counts) {
#pragma unroll
    for (auto& of_power : counts) HoldRegisters(of_power);
  }

  // A thread's codes of a step: of its two rows, each for the two units that it has of them.
  struct Codes {
    uint4 of[4][2];
  };

  // `first`: where the codes of the thread's first row begin.
  __device__ __forceinline__ void LoadCodes(int first, int step, Codes& codes) const {
    const int swizzle = bits.slab == 128 ? 0x70 : 0x30;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit = first + units[step * kUnitsOfStep + half * 4 + own.lane % 4];
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int place = unit + below * 8 * bits.slab, exchanged = place >> 3 & swizzle;
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          codes.of[half * 2 + below][chunk] =
              *reinterpret_cast<const uint4*>(weights.data + ((place + chunk * 16) ^ exchanged));
        }
      }
    }
  }

  // Adds the products of all steps. The next step's codes come while those of one are multiplied; registers of A
  // are written when nothing is.
  __device__ __forceinline__ void AddSteps(int first, PowerSums& counts) {
    Codes codes;
    LoadCodes(first, 0, codes);
    uint64_t b = PlainDescriptor(weights.at);
#pragma unroll 1
    for (int step = 0; step < bits.k_tiles; ++step, b += kStepBytes >> 4) {
      unsigned a[kBits][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned planes[kBits];
        SliceCodes(codes.of[i][0], codes.of[i][1], planes);
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane) a[plane][i] = planes[plane];
      }
      this->WaitForWeights(step);
      Hold(counts);
      WgmmaFence();
#pragma unroll
      for (int i = 0; i < kBits; ++i) {
        MultiplyBits<kTileN + kOnesRows>(counts[i], a[i], b);
#pragma unroll
        for (int plane = 1; plane < kPlanes; ++plane) {
          MultiplyBits<kTileN>(counts[i + plane], a[i], b + ((plane * kPlaneBytes + kOnesBytes) >> 4));
        }
      }
      WgmmaCommit();
      if (step + 1 < bits.k_tiles) LoadCodes(first, step + 1, codes);
      WgmmaWait<0>();
      Hold(counts);
    }
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
  __shared__ int units[kMaxHaloWeights * kUnitsOfStep];
  RunPipeline(Pipeline{{p, map, fixed, SharedTiles(unaligned)}, p, units});
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
  if (p.stages < 1 || p.stages > kMaxSlots || p.patch_rows > kMaxHaloRows || p.k_tiles > kMaxHaloWeights ||
      p.epilogue.sums == SumForm::kInteger ||
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
