// Launching a tile kernel: which instance of it, grid, cluster.
#pragma once

#include "core/bit_planes.h"
#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/one_of.h"

namespace lowbit::cuda {

struct LaunchOptions {
  Queue& queue;
  const Device& device;
  bool x_signed = false;
  int shared_bytes = 0;        // dynamic shared memory of a block
  int32_t* partial = nullptr;  // of rows that have passes (ConvTraits)
};

// Kernels have fewer instances for floats of inputs with signs: those of any floats, what few networks have
// among it, and two for a layer that reads what no Relu stands behind (a linear bottleneck) and makes 128
// codes or lies on lines.
constexpr Finish FinishOfSigned(Finish finish) {
  using enum Finish;
  switch (finish) {
    case kCappedFromZero:
    case kTail:
    case kFloatsOfValues:
      return finish;
    case kFloatsOnLine:
    case kFloatsInverse:
    case kCappedOnLine:
    case kCappedTailOnLine:
    case kCappedLackingOnLine:
    case kCappedInTail:
    case kWordsTailOnLine:
    case kFloatsAdding:
      return kFloatsAdding;
    default:
      return kFloats;
  }
}

// f<kSigned, kFinish>() for the instance of a kernel that finishes sums so. kMayLeave: there are instances
// whose sums leave the registers. Planes of bits are not made of inputs with signs (select.cc).
template <bool kMayLeave, typename F>
cudaError_t WithFinish(Finish finish, bool is_signed, const F& f) {
  const auto of_any_input = [&]<Finish kFinish>() {
    return is_signed ? f.template operator()<true, kFinish>() : f.template operator()<false, kFinish>();
  };
  if constexpr (kMayLeave) {
    if (finish == Finish::kThroughMemory) return of_any_input.template operator()<Finish::kThroughMemory>();
    if (finish == Finish::kBytesOfCluster) return of_any_input.template operator()<Finish::kBytesOfCluster>();
    if (finish == Finish::kWordsOfCluster) return of_any_input.template operator()<Finish::kWordsOfCluster>();
    if (finish == Finish::kTailOfCluster) return of_any_input.template operator()<Finish::kTailOfCluster>();
  }
  if (finish == Finish::kIntegers) return of_any_input.template operator()<Finish::kIntegers>();
  if (finish == Finish::kIntegersInTail) return of_any_input.template operator()<Finish::kIntegersInTail>();
  if (is_signed) {
    if (finish == Finish::kPlanesTail) return cudaErrorInvalidValue;
    switch (FinishOfSigned(finish)) {
      case Finish::kCappedFromZero:
        return f.template operator()<true, Finish::kCappedFromZero>();
      case Finish::kTail:
        return f.template operator()<true, Finish::kTail>();
      case Finish::kFloatsOfValues:
        return f.template operator()<true, Finish::kFloatsOfValues>();
      case Finish::kFloatsAdding:
        return f.template operator()<true, Finish::kFloatsAdding>();
      default:
        return f.template operator()<true, Finish::kFloats>();
    }
  }
  switch (finish) {
    case Finish::kFloatsFromZero:
      return f.template operator()<false, Finish::kFloatsFromZero>();
    case Finish::kFloatsOnLine:
      return f.template operator()<false, Finish::kFloatsOnLine>();
    case Finish::kFloatsInverse:
      return f.template operator()<false, Finish::kFloatsInverse>();
    case Finish::kCappedFromZero:
      return f.template operator()<false, Finish::kCappedFromZero>();
    case Finish::kCappedOnLine:
      return f.template operator()<false, Finish::kCappedOnLine>();
    case Finish::kCappedTailOnLine:
      return f.template operator()<false, Finish::kCappedTailOnLine>();
    case Finish::kCappedLackingOnLine:
      return f.template operator()<false, Finish::kCappedLackingOnLine>();
    case Finish::kCappedInTail:
      return f.template operator()<false, Finish::kCappedInTail>();
    case Finish::kTail:
      return f.template operator()<false, Finish::kTail>();
    case Finish::kLackingTail:
      return f.template operator()<false, Finish::kLackingTail>();
    case Finish::kBorderTail:
      return f.template operator()<false, Finish::kBorderTail>();
    case Finish::kWordsTailOnLine:
      return f.template operator()<false, Finish::kWordsTailOnLine>();
    case Finish::kPlanesTail:
      return f.template operator()<false, Finish::kPlanesTail>();
    case Finish::kFloats:
      return f.template operator()<false, Finish::kFloats>();
    case Finish::kFloatsAdding:
      return f.template operator()<false, Finish::kFloatsAdding>();
    case Finish::kFloatsOfValues:
      return f.template operator()<false, Finish::kFloatsOfValues>();
    default:
      return cudaErrorInvalidValue;
  }
}

// f<kSigned, kFinish>() for the instance that gathers and finishes sums so: what most layers with strides have, and
// else one for integers and for floats, with and without what is added. All in one instance were up to 2.4 MB of
// instructions, in which ptxas made wgmma wait for itself. kIsWgmma: planes of bits are stored from registers.
template <bool kIsWgmma, typename F>
cudaError_t WithGatheredFinish(const GatherParams& p, bool is_signed, const F& f) {
  const auto of_any_input = [&]<Finish kFinish>() {
    return is_signed ? f.template operator()<true, kFinish>() : f.template operator()<false, kFinish>();
  };
  const EpilogueParams& e = p.epilogue;
  if (e.w_zero != nullptr) return of_any_input.template operator()<Finish::kOfZeros>();
  if (!p.in_registers) return of_any_input.template operator()<Finish::kThroughMemory>();
  if (e.sums == SumForm::kInteger) {
    if (e.on_lines) return of_any_input.template operator()<Finish::kIntegersOfTail>();
    return FinishOf(e) == Finish::kIntegersInTail
               ? of_any_input.template operator()<Finish::kIntegersInTail>()
               : of_any_input.template operator()<Finish::kIntegers>();
  }
  if (is_signed) return cudaErrorInvalidValue;
  switch (FinishOf(e)) {
    case Finish::kFloatsFromZero:
      return f.template operator()<false, Finish::kFloatsFromZero>();
    case Finish::kTail:
      return f.template operator()<false, Finish::kTail>();
    case Finish::kPlanesTail:
      return f.template operator()<false, kIsWgmma ? Finish::kPlanesTail : Finish::kBorderTail>();
    default:
      break;
  }
  if (e.values != nullptr) return f.template operator()<false, Finish::kFloatsOfValues>();
  return e.has_residual ? f.template operator()<false, Finish::kFloatsAdding>()
                        : f.template operator()<false, Finish::kFloats>();
}

// tile_n where weights have zero points: those of more channels exceed kFixedSharedBytes.
inline constexpr int kMostZeroColumns = 128;

// Whether a tile of so many channels may be finished so: planes are stored in half words at least.
template <Finish kFinish, int kTileN>
inline constexpr bool kMayFinish =
    kFinish == Finish::kPlanesTail ? kTileN % (kPlaneChannels / 2) == 0
                                   : kFinish != Finish::kOfZeros || kTileN <= kMostZeroColumns;

// What a sample has (HasInstance) of a family whose tiles are finished in many ways: one for each place that sums go to, of a
// typical tile. All finishes are in the sample of boxes_sm90.cu, by the same function (FinishTile).
template <bool kSigned, Finish kFinish>
constexpr bool IsSampled(bool is_typical) {
  using enum Finish;
  if (kFinish == kIntegers) return is_typical || !kSigned;
  return is_typical && !kSigned &&
         (kFinish == kThroughMemory || kFinish == kTailOfCluster || kFinish == kPlanesTail);
}

template <auto kKernel, typename... Params>
cudaError_t LaunchKernel(const LaunchOptions& options, const LaunchShape& shape, const Params&... params) {
  return LaunchKernel<kKernel>(options.queue, options.device, shape, params...);
}

// `more`: what the kernel takes besides.
template <auto kKernel, typename Params, typename... More>
cudaError_t LaunchTiled(const Params& p, const ConvConfig& config, const LaunchOptions& options, int threads,
                        const More&... more) {
  const bool cluster = config.splits > 1 && config.split == Split::kCluster;
  const int m_tiles = (p.m + config.tile_m - 1) / config.tile_m;
  return LaunchKernel<kKernel>(options,
                               {Dim(m_tiles, p.n_tiles * p.groups, p.splits), threads, options.shared_bytes,
                                Dim(1, p.sharing, cluster ? config.splits : 1)},
                               p, cluster, more...);
}

}  // namespace lowbit::cuda
