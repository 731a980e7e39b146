// What the implicit-precomp GEMM kernels share: which bytes of the input make up a tile of the matrix that is
// never formed, and how a block's sums become outputs.
//
//   A  [m, k]  row = output pixel, column = (tap, channel): gathered from the NHWC input
//   B  [n, k]  row = output channel: packed in tile order when the node was loaded
//
// Offsets are precomputed (paper, section 4.2) in a form that needs no memory: that of an output pixel's
// first tap once per block, that of a column by steps from tile to tile, whose sizes GatherParams has. Their
// sum is the address. A tap outside the image is GatherParams::fill, the code of real zero, so that padding
// needs no correction. Rows past the last pixel repeat it: they are never stored.
//
// In shared memory a tile row is 128 bytes, its 16-byte chunk c lies at chunk position c ^ (row % 8): the
// order that ldmatrix reads without bank conflicts and that wgmma calls 128-byte swizzle.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/device_epilogue.cuh"
#include "kernels/cuda/conv/planes.cuh"
#include "kernels/cuda/conv/weight_rows.h"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {

inline constexpr int kRowBytes = 128;

__device__ __forceinline__ int Divide(int n, const FastDivisor& d) {
  return static_cast<int>((__umulhi(static_cast<uint32_t>(n), d.multiplier) + static_cast<uint32_t>(n)) >>
                          d.shift);
}

// Tiles of a line, from `first` on, `last` excluded.
struct TileRange {
  int first, last;

  __device__ __forceinline__ TileRange(const TileShares& shares, int block)
      : first(block * shares.tiles + min(block, shares.longer)),
        last(first + shares.tiles + (block < shares.longer ? 1 : 0)) {}
};

// Walks along a row of A in steps of a tile: where a column's tap is, and which channel of it.
class ColumnWalk {
 public:
  __device__ __forceinline__ void Start(const GatherParams& p, int k) {
    // Kept in registers: a load from constant memory at every step takes longer than all the rest.
    left_ = p.k - k;
    channels_ = p.channels;
    KeepInRegister(channels_);
    const int tap = Divide(k, p.by_channels);
    channel_ = k - tap * p.channels;
    const int ty = Divide(tap, p.by_kernel_w);
    tx_ = tap - ty * p.kernel_w;
    offset = (ty * p.dilation_h * p.in_w + tx_ * p.dilation_w) * p.pixel_bytes + channel_;
    position = ty * p.dilation_h * 65536 + tx_ * p.dilation_w;
  }
  __device__ __forceinline__ bool Ended() const { return left_ <= 0; }
  __device__ __forceinline__ void Step(const GatherParams& p) {
    left_ -= kRowBytes;
    channel_ += kRowBytes;
    offset += kRowBytes;
    while (channel_ >= channels_) {
      channel_ -= channels_;
      offset += p.tap_step;
      position += p.dilation_w;
      if (++tx_ == p.kernel_w) {
        tx_ = 0;
        offset += p.tap_row_step;
        position += p.tap_row_position;
      }
    }
  }

  int offset, position;  // bytes from the first tap's pixel; 65536 * y + x from it

 private:
  int left_, channels_, channel_, tx_;
};

// What lies outside the image: nothing is, zeros that a copy can write, another code that it cannot.
enum class Padding { kNone, kZero, kFill };

__device__ __forceinline__ Padding PaddingOf(const GatherParams& p) {
  return p.all_inside ? Padding::kNone : p.fill == 0 ? Padding::kZero : Padding::kFill;
}

// f<kPadding>() for what lies outside the image.
template <typename F>
__device__ __forceinline__ void WithPadding(const GatherParams& p, const F& f) {
  switch (PaddingOf(p)) {
    case Padding::kNone:
      return f.template operator()<Padding::kNone>();
    case Padding::kZero:
      return f.template operator()<Padding::kZero>();
    case Padding::kFill:
      return f.template operator()<Padding::kFill>();
  }
}

// Loads A tiles, one after the other. Thread t of kThreads copies chunk t % 8 of the rows t / 8,
// t / 8 + kThreads / 8, ...
template <int kTileM, int kThreads, int kVectorBytes>
class ActivationLoader {
 public:
  static constexpr int kRowStep = kThreads / 8, kRows = kTileM / kRowStep;
  static constexpr int kParts = 16 / kVectorBytes;
  static_assert(kRows * kRowStep == kTileM && kRowStep % 8 == 0);

  __device__ __forceinline__ ActivationLoader(const GatherParams& p, int thread, int m0, int group,
                                              int k_tile)
      : p_(p) {
    const int chunk = thread % 8;
    last_position_ = p.last_position;
    KeepInRegister(last_position_);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      walk_[part].Start(p, k_tile * kRowBytes + chunk * 16 + part * kVectorBytes);
    }
    shared_offset_ = (thread / 8) * kRowBytes + ((chunk ^ (thread / 8 % 8)) << 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int m = min(m0 + thread / 8 + i * kRowStep, p.m - 1);
      const int image = Divide(m, p.by_image), rest = m - image * static_cast<int>(p.by_image.divisor);
      const int oy = Divide(rest, p.by_row), ox = rest - oy * static_cast<int>(p.by_row.divisor);
      const int iy = oy * p.stride_h - p.pad_top, ix = ox * p.stride_w - p.pad_left;
      position_[i] = iy * 65536 + ix;
      offset_[i] = ((image * p.in_h + iy) * p.in_w + ix) * p.pixel_bytes + group * p.channels;
    }
  }

  // The next tile, into shared memory at `shared`.
  __device__ __forceinline__ void Load(uint32_t shared) {
    WithPadding(p_, [&]<Padding kPadding>() { Load<kPadding>(shared); });
  }
  template <Padding kPadding>
  __device__ __forceinline__ void Load(uint32_t shared) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // Past k: whatever lies in shared memory, its weights are 0.
      if (!walk_[part].Ended()) {
        LoadColumn<kPadding>(walk_[part], shared + shared_offset_ + part * kVectorBytes);
      }
      walk_[part].Step(p_);
    }
  }

 private:
  // Whether both halves of position + column.position, as integers y * 65536 + x, lie in the image: the sum
  // and its distance from the last pixel have no negative half. (A negative x borrows from y, but shows
  // itself.)
  __device__ __forceinline__ bool Inside(int i, const ColumnWalk& column) const {
    const int at = position_[i] + column.position;
    return ((at | (last_position_ - at)) & 0x80008000) == 0;
  }

  // The taps of a window read the same pixels again and again: worth the L1 cache.
  template <Padding kPadding>
  __device__ __forceinline__ void LoadColumn(const ColumnWalk& column, uint32_t target) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i, target += kRowStep * kRowBytes) {
      const uint8_t* const source = p_.x + (offset_[i] + column.offset);
      if constexpr (kPadding == Padding::kNone) {
        CopyAsync<kVectorBytes>(target, source);
      } else if constexpr (kPadding == Padding::kZero) {
        CopyAsyncOrZero<kVectorBytes>(target, source, Inside(i, column));
      } else if (Inside(i, column)) {
        CopyAsync<kVectorBytes, true>(target, source);
      } else {
        StoreShared<kVectorBytes>(target, p_.fill);
      }
    }
  }

  const GatherParams& p_;
  ColumnWalk walk_[kParts];
  int shared_offset_, last_position_;
  int position_[kRows], offset_[kRows];
};

// Where a block's tile lies, and which part of K it sums.
struct TilePosition {
  int m0, n0, group, split, k_begin, k_end;

  template <int kTileM, int kTileN, typename Params>
  static __device__ __forceinline__ TilePosition Of(const Params& p) {
    TilePosition at;
    at.m0 = static_cast<int>(blockIdx.x) * kTileM;
    at.group = p.groups == 1 ? 0 : static_cast<int>(blockIdx.y) / p.n_tiles;
    at.n0 = (static_cast<int>(blockIdx.y) - at.group * p.n_tiles) * kTileN;
    if constexpr (std::is_base_of_v<SumsParams, Params>) {
      at.split = static_cast<int>(blockIdx.z);
      at.k_begin = p.k_tiles * at.split >> p.split_shift;
      at.k_end = p.k_tiles * (at.split + 1) >> p.split_shift;
    }
    return at;
  }

  // The weight tile of k_tile: consecutive rows of 128 bytes.
  __device__ __forceinline__ const uint8_t* Weights(const TileParams& p, int k_tile) const {
    return p.weights + ((static_cast<int64_t>(group) * p.k_tiles + k_tile) * p.n_padded + n0) * kRowBytes;
  }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // Those of kTileN channels and all of k, by one thread.
  template <int kTileN>
  __device__ __forceinline__ void FetchWeights(const TileParams& p, uint32_t shared, uint32_t barrier) const {
    ArriveExpecting(barrier, p.k_tiles * kTileN * kRowBytes);
    for (int k = 0; k < p.k_tiles; ++k)
      BulkCopy(shared + k * kTileN * kRowBytes, Weights(p, k), kTileN * kRowBytes, barrier);
  }
#endif
};

// A block's static shared memory.
template <int kTileN>
struct BlockState {
  alignas(16) float scale[kTileN];
  alignas(16) int bias[kTileN];
  alignas(16) float start[kTileN];
  float factor[kTileN / 4];
  uint64_t exchange;  // mbarrier: the sums that the blocks of a cluster send each other

  // The constants of the tile's channels: copies that count with the block's first tile. By kThreads threads, which
  // bring tables near, too.
  template <int kThreads>
  __device__ __forceinline__ void FetchConstants(const TileParams& p, const TilePosition& at, int thread) {
    PrefetchTables(p.epilogue, thread);
    const int channel = at.group * p.n + at.n0;
    for (int n = thread; n < kTileN && at.n0 + n < p.n; n += kThreads) Fetch(p.epilogue, channel + n, n);
  }
  // Those of a channel, into the place of the n-th one.
  __device__ __forceinline__ void Fetch(const EpilogueParams& e, int channel, int n) {
    CopyAsync<4>(SharedAddress(bias + n), e.bias + channel);
    CopyAsync<4>(SharedAddress(scale + n), e.scale + channel);
    if (!ReadsStart(e)) return;
    CopyAsync<4>(SharedAddress(start + n), e.start + channel);
    if (n % 4 == 0) CopyAsync<4>(SharedAddress(factor + n / 4), e.factor + channel / 4);
  }

  // Of four channels from `column` on.
  __device__ __forceinline__ FourChannels Four(int column) const {
    return {*reinterpret_cast<const float4*>(scale + column),
            *reinterpret_cast<const float4*>(start + column), factor[column / 4]};
  }

  // FinishTile waits for the other blocks' part in this.
  __device__ __forceinline__ void BeginCluster(int tile_m) {
    if (threadIdx.x == 0) {
      InitBarrier(SharedAddress(&exchange), 1);
      FenceBarrierInit();
      ArriveExpecting(SharedAddress(&exchange), tile_m * kTileN * 4);
    }
    ClusterArrive();
  }
};

// The sums of a fragment of wgmma, which are those of mma.sync, begin with the biases; `column` is the
// thread's first. With `mask` 0 they begin with 0.
template <int kTileN>
__device__ __forceinline__ void BeginWithBias(const BlockState<kTileN>& state, int column,
                                              int (&sums)[kTileN / 2], int mask = ~0) {
#pragma unroll
  for (int j = 0; j < kTileN / 16; ++j) {
    const int4 bias = *reinterpret_cast<const int4*>(state.bias + column + j * 16);
    int* const v = sums + 8 * j;
    v[0] = v[2] = bias.x & mask;
    v[1] = v[3] = bias.y & mask;
    v[4] = v[6] = bias.z & mask;
    v[5] = v[7] = bias.w & mask;
  }
}

// Zero points of weights that stay outside of them. Of the weights w' that kernels read and a channel's z
//   sum of q (w' - z) = sum of q w' - z * (sum of q),
// where q are all codes that meet weights, those that stand for what lies outside of the image too. A kernel
// adds up the codes of each row of its tile beside the products, from what it multiplies: a pass before it
// would read all of them once more. Of parts of K each takes its own part away.
template <Finish kFinish>
inline constexpr bool kHasZeroPoints = kFinish == Finish::kOfZeros;

template <int kTileN>
struct ZeroPoints {
  alignas(16) int of_channel[kTileN];

  // By kThreads threads, as BlockState::FetchConstants.
  template <int kThreads>
  __device__ __forceinline__ void Fetch(const TileParams& p, const TilePosition& at, int thread) {
    const int32_t* const zeros = p.epilogue.w_zero + at.group * p.n + at.n0;
    for (int n = thread; n < kTileN && at.n0 + n < p.n; n += kThreads)
      CopyAsync<4>(SharedAddress(of_channel + n), zeros + n);
  }
  // Takes them away from the sums of a row, whose codes sum to `top`, and of the row eight below, `bottom`,
  // from a column on. `sums`: of a fragment of kColumns columns, of wgmma or of mma.sync.
  template <int kColumns>
  __device__ __forceinline__ void TakeAway(int column, int top, int bottom, int* sums) const {
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const int4 zero = *reinterpret_cast<const int4*>(of_channel + column + j * 16);
      int* const v = sums + 8 * j;
      v[0] -= zero.x * top, v[1] -= zero.y * top, v[4] -= zero.z * top, v[5] -= zero.w * top;
      v[2] -= zero.x * bottom, v[3] -= zero.y * bottom, v[6] -= zero.z * bottom, v[7] -= zero.w * bottom;
    }
  }
};
struct NoZeroPoints {};

// sum + the four codes.
template <bool kSigned>
__device__ __forceinline__ int AddCodes(unsigned four, int sum) {
  return DotFour<kSigned>(static_cast<int>(four), 0x01010101, sum);
}

// Whether sums that are finished so may be of windows that reach out of the image where 0 is not what lies there.
template <Finish kFinish>
inline constexpr bool kMayHaveBorders =
    kMayMap<kFinish> || kFinish == Finish::kIntegers || kFinish == Finish::kBorderTail ||
    kFinish == Finish::kPlanesTail || kFinish == Finish::kFloatsAdding || kFinish == Finish::kThroughMemory ||
    kFinish == Finish::kOfZeros;

// The class of the window of an output.
__device__ __forceinline__ OutsideTaps TapsOutside(int first, int kernel, int dilation, int size) {
  OutsideTaps out;
  if (first >= 0 && first + (kernel - 1) * dilation < size) return out;
#pragma unroll 1
  for (int tap = 0, at = first; tap < kernel; ++tap, at += dilation) {
    if (at < 0) ++out.before;
    if (at >= size) ++out.behind;
  }
  return out;
}
__device__ __forceinline__ int ClassAt(const BorderParams& b, const WindowParams& w, int oy, int ox) {
  const OutsideTaps along_h = TapsOutside(oy * w.stride_h - w.pad_top, b.kernel_h, b.dilation_h, w.in_h),
                    along_w = TapsOutside(ox * w.stride_w - w.pad_left, b.kernel_w, b.dilation_w, w.in_w);
  return along_h.before * b.step_h.before + along_h.behind * b.step_h.behind +
         along_w.before * b.step_w.before + along_w.behind * b.step_w.behind;
}

// The outputs of a tile's rows, pixels in order.
struct BorderPixels {
  const BoxTileParams& p;
  int m0;
  __device__ __forceinline__ int BorderClass(int row) const {
    const int m = m0 + row;
    if (m >= p.m) return 0;
    const int n = Divide(m, p.by_image), rest = m - n * static_cast<int>(p.by_image.divisor);
    const int oy = Divide(rest, p.by_row), ox = rest - oy * static_cast<int>(p.by_row.divisor);
    return ClassAt(p.border, p, oy, ox);
  }
};

// Adds to sums what borders do: to those of `row`, and of the row eight below, from `channel` on.
// pixels.BorderClass(row) is the class of a row's output. `sums`: of a fragment of kTileN columns, of wgmma
// or of mma.sync.
template <int kTileN, typename Pixels>
__device__ __forceinline__ void AddBorders(const EpilogueParams& e, int channel, int row,
                                           const Pixels& pixels, int* sums) {
  if (e.border == nullptr) return;
  const int top = pixels.BorderClass(row), bottom = pixels.BorderClass(row + 8);
  const int32_t* const table = e.border + channel;
#pragma unroll
  for (int j = 0; j < kTileN / 16; ++j) {
    int* const v = sums + 8 * j;
    if (top != 0) {
      const int4 more = *reinterpret_cast<const int4*>(table + top * e.border_pitch + j * 16);
      v[0] += more.x, v[1] += more.y, v[4] += more.z, v[5] += more.w;
    }
    if (bottom != 0) {
      const int4 more = *reinterpret_cast<const int4*>(table + bottom * e.border_pitch + j * 16);
      v[2] += more.x, v[3] += more.y, v[6] += more.z, v[7] += more.w;
    }
  }
}

// The same for a tile that FinishTile finishes with kBiased, from constants that this thread committed: with
// 0 where the sums of other blocks come to these. By the first kThreads threads. (A branch would define the
// sums twice, and ptxas would make wgmma wait for itself.)
template <int kThreads, Finish kFinish, int kTileN>
__device__ __forceinline__ void BeginSums(const BlockState<kTileN>& state, int column,
                                          int (&sums)[kTileN / 2]) {
  WaitForCopies<0>();
  SyncThreads<kThreads>();
  BeginWithBias(state, column, sums, kLeavesRegisters<kFinish> ? 0 : ~0);
}

// The `each` of FinishTile for such sums.
template <int kTileN, typename F>
__device__ __forceinline__ void ForEachFour(const int (&sums)[kTileN / 2], int row, int column, const F& f) {
#pragma unroll
  for (int j = 0; j < kTileN / 16; ++j) {
    const int* const v = sums + 8 * j;
    f(row, column + j * 16, make_int4(v[0], v[1], v[4], v[5]), make_int4(v[2], v[3], v[6], v[7]));
  }
}

// Finishing is the work of the first kThreads threads of a block, the others are gone.

// The 16-byte chunks of a tile of codes that one of kThreads threads moves. In shared memory a padded stride
// avoids bank conflicts.
template <int kTileM, int kTileN, int kThreads, typename PixelOf>
struct Chunks {
  static constexpr int kStride = kTileN + 16, kInRow = kTileN / 16, kCount = kTileM * kInRow / kThreads;
  static_assert(kCount * kThreads == kTileM * kInRow);

  const TileParams& p;
  const TilePosition& at;
  const PixelOf& pixel_of;
  int thread;

  // f(offset in the staged tile, index of the first element of y, pixel, the first one's column in the tile) of
  // the u-th one.
  template <typename F>
  __device__ __forceinline__ void Visit(int u, const F& f) const {
    const int row = (thread + u * kThreads) / kInRow, column = (thread + u * kThreads) % kInRow * 16;
    const int pixel = pixel_of(row);
    if (pixel < 0 || at.n0 + column >= p.n) return;
    // Outputs are fewer than 2^31.
    f(row * kStride + column,
      static_cast<unsigned>(pixel * p.epilogue.out_channels + at.group * p.n + at.n0 + column), pixel,
      column);
  }
  template <typename F>
  __device__ __forceinline__ void ForEach(const F& f) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) Visit(u, f);
  }
};

// The rows of a tile as consecutive pixels.
struct PixelsInOrder {
  int m0, m;
  __device__ __forceinline__ int operator()(int row) const { return m0 + row < m ? m0 + row : -1; }
};

// The residuals of a tile that FinishInRegisters will add, into where its codes will be staged: copies that
// are on their way while the block multiplies. The caller waits for them.
template <int kTileM, int kTileN, int kThreads, typename Params, typename PixelOf>
__device__ __forceinline__ void FetchResiduals(const Params& p, const TilePosition& at, uint8_t* shared,
                                               int thread, const PixelOf& pixel_of) {
  if (!p.epilogue.has_residual) return;
  if constexpr (std::is_base_of_v<SumsParams, Params>) {
    if (!p.in_registers) return;
  }
  const uint32_t staging = SharedAddress(shared + p.staging_offset);
  const uint8_t* const residual = static_cast<const uint8_t*>(p.residual);
  Chunks<kTileM, kTileN, kThreads, PixelOf>{p, at, pixel_of, thread}.ForEach(
      [&](int offset, unsigned index, int, int) { CopyAsync<16>(staging + offset, residual + index); });
}

// Requantizes sums in registers, those that `each` (see FinishTile) enumerates. `word_at(row, column)` is
// where four codes go in shared memory, in the place of four residuals where there are any; those of the row
// eight below go kBelow words further. kBiased: the sums began with the biases.
template <Finish kFinish, bool kBiased, int kBelow, int kTileN, typename Each, typename WordAt>
__device__ __forceinline__ void RequantizeFragments(const EpilogueParams& e, const BlockState<kTileN>& state,
                                                    const Each& each, const WordAt& word_at) {
  WithEpilogue<kFinish>(e, [&](const auto& requantize) {
    each([&](int row, int column, const int4& top, const int4& bottom) {
      const FourChannels channels = state.Four(column);
      unsigned* const out = word_at(row, column);
      int4 sums[] = {top, bottom};
      unsigned codes[] = {out[0], out[kBelow]};
      if constexpr (!kBiased) {
        const int4 bias = *reinterpret_cast<const int4*>(state.bias + column);
        sums[0] = Plus(top, bias);
        sums[1] = Plus(bottom, bias);
      }
      requantize(sums, channels, codes);
      out[0] = codes[0];
      out[kBelow] = codes[1];
    });
  });
}

// Whether codes of sums that are finished so may be stored as planes, from shared memory. No others carry the
// code for it.
template <Finish kFinish>
inline constexpr bool kMayHavePlanes =
    kFinish == Finish::kAny || kFinish == Finish::kBorderTail || kFinish == Finish::kFloatsAdding;

// Stores what a thread has of a pixel's word of each plane, 4 of 16 bytes, which is its part of the codes of 64
// channels or of 128; or half of that, where a tile has no more channels. `codes`: of half a word, then of the
// other one; of channels from `channel` on. `own`: which thread of four it is.
template <int kHalves, typename Params>
__device__ __forceinline__ void StoreWords(const Params& p, int pixel, int channel, int own,
                                           const unsigned (&codes)[kHalves][4]) {
  constexpr int kHalf = kPlaneChannels / 2;
  const int words = (p.epilogue.out_channels + kPlaneChannels - 1) / kPlaneChannels;
  unsigned halves[2][kMostPlanes] = {};
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (channel + half * kHalf < p.n) HalvesOfPlanes(codes[half], halves[half]);
  }
  const bool is_second = channel % kPlaneChannels != 0, is_whole = kHalves == 2 || channel + kHalf >= p.n;
#pragma unroll
  for (int plane = 0; plane < kMostPlanes; ++plane) {
    if (plane >= p.epilogue.plane_count) break;
    uint8_t* const to =
        static_cast<uint8_t*>(p.y) +
        (static_cast<int64_t>(plane * words + channel / kPlaneChannels) * p.m + pixel) * kPlaneWordBytes +
        own * 4;
    if (is_whole && !is_second) {
      *reinterpret_cast<unsigned*>(to) = JoinHalves(halves[0][plane], halves[1][plane]);
    } else {
      reinterpret_cast<uint16_t*>(to)[is_second] = static_cast<uint16_t>(halves[0][plane]);
    }
  }
}

// Stores a tile of staged codes as planes: words of eight pixels are a line of 128 bytes.
template <int kTileM, int kTileN, int kThreads, typename PixelOf>
__device__ __forceinline__ void StorePlanes(const TileParams& p, const TilePosition& at,
                                            const uint8_t* staging, int thread, const PixelOf& pixel_of) {
  constexpr int kStride = kTileN + 16, kHalf = kPlaneChannels / 2;
  constexpr int kWords = (kTileN + kPlaneChannels - 1) / kPlaneChannels, kHalves = kTileN / kHalf / kWords;
#pragma unroll 1
  for (int u = thread; u < kTileM * kWords * 4; u += kThreads) {
    const int word = u / 4 % kWords, row = u / (4 * kWords), pixel = pixel_of(row),
              channel = at.n0 + word * kPlaneChannels;
    if (pixel < 0 || channel >= p.n) continue;
    unsigned codes[kHalves][4];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[half][i] = *reinterpret_cast<const unsigned*>(staging + row * kStride + word * kPlaneChannels +
                                                            half * kHalf + i * 16 + u % 4 * 4);
      }
    }
    StoreWords(p, pixel, channel, u % 4, codes);
  }
}

// Requantizes sums in registers, which began with the biases, and stores their codes as planes from there: a
// thread has all of the codes that its part of a word is made of.
template <int kTileN, Finish kFinish, typename Each, typename PixelOf>
__device__ __forceinline__ void FinishAsPlanes(const TileParams& p, const TilePosition& at,
                                               const BlockState<kTileN>& state, const Each& each,
                                               const PixelOf& pixel_of) {
  constexpr int kHalves = kTileN % kPlaneChannels == 0 ? 2 : 1,
                kWords = kTileN / kHalves * 2 / kPlaneChannels;
  unsigned codes[2][kWords][kHalves][4];  // of a row and the one eight below
  int first_row = 0, own = 0;
  WithEpilogue<kFinish>(p.epilogue, [&](const auto& requantize) {
    int four = 0;
    each([&](int row, int column, const int4& top, const int4& bottom) {
      const int4 sums[] = {top, bottom};
      unsigned both[2] = {};
      requantize(sums, state.Four(column), both);
#pragma unroll
      for (int i = 0; i < 2; ++i) codes[i][four / 4 / kHalves][four / 4 % kHalves][four % 4] = both[i];
      ++four;
      first_row = row;
      own = column % 16 / 4;
    });
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pixel = pixel_of(first_row + 8 * i);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int channel = at.n0 + word * kPlaneChannels;
      if (pixel >= 0 && channel < p.n) StoreWords(p, pixel, channel, own, codes[i][word]);
    }
  }
}

// Requantizes sums in registers. The codes go through shared memory, in the place of the residuals where
// there are any, to be stored 16 at a time. By kThreads threads that meet at `barrier`, this is `thread`.
template <int kTileM, int kTileN, int kThreads, bool kBiased, Finish kFinish, typename Each, typename PixelOf>
__device__ __forceinline__ void FinishInRegisters(const TileParams& p, const TilePosition& at,
                                                  uint8_t* shared, const BlockState<kTileN>& state,
                                                  int thread, int barrier, const Each& each,
                                                  const PixelOf& pixel_of) {
  if constexpr (kFinish == Finish::kPlanesTail) {
    static_assert(kBiased);
    return FinishAsPlanes<kTileN, kFinish>(p, at, state, each, pixel_of);
  }
  constexpr int kStride = kTileN + 16;
  uint8_t* const staging = shared + p.staging_offset;
  RequantizeFragments<kFinish, kBiased, 8 * kStride / 4>(p.epilogue, state, each, [&](int row, int column) {
    return reinterpret_cast<unsigned*>(staging + row * kStride + column);
  });
  SyncThreads<kThreads>(barrier);
  const Chunks<kTileM, kTileN, kThreads, PixelOf> chunks{p, at, pixel_of, thread};
  if constexpr (kMayHavePlaces<kFinish>) {
    if (p.epilogue.place_count > 0) {
      // In turn: unrolled it would be most of the kernel, whose instructions are fetched by those without places, too.
#pragma unroll 1
      for (int u = 0; u < chunks.kCount; ++u) {
        chunks.Visit(u, [&](int offset, unsigned, int pixel, int column) {
          StoreInPlaces(p.epilogue, pixel, at.group * p.n + at.n0 + column,
                        *reinterpret_cast<const uint4*>(staging + offset));
        });
      }
      if (p.y == nullptr) return;
    }
  }
  if constexpr (kMayHavePlanes<kFinish> && kTileN % (kPlaneChannels / 2) == 0) {
    if (p.epilogue.plane_count > 0)
      return StorePlanes<kTileM, kTileN, kThreads>(p, at, staging, thread, pixel_of);
  }
  chunks.ForEach([&](int offset, unsigned index, int, int) {
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.y) + index) =
        *reinterpret_cast<const uint4*>(staging + offset);
  });
}

// Where the sums of a part of K lie in shared memory, of a tile's `rows` rows: those of 16 neighbouring channels together,
// row after row, so that what a warp sends to another block at a time is a run of bytes.
template <int kTileN>
__device__ __forceinline__ int PlaceOfSums(int rows, int part, int row, int column) {
  return part * rows * kTileN + (column / 16 * rows + row) * 16 + column % 16;
}

// Sends the sums of parts of K to the blocks of the cluster that finish them, each a share of the rows, and waits for those
// of this block's share: what each block has sent lies behind what the one before has. Integers: the order of addition does
// not matter. The area is none of the tiles, which other blocks may still be using.
template <int kTileM, int kTileN, typename Params, typename Each>
__device__ __forceinline__ void ExchangeSums(const Params& p, const TilePosition& at, int* sums,
                                             BlockState<kTileN>& state, const Each& each) {
  const int rows = kTileM / p.splits, shift = 31 - __clz(rows);  // a power of 2
  ClusterWait();                                                 // every block has started
  const uint32_t area = SharedAddress(sums);
  const auto send = [&](int row, int column, const int4& v) {
    const int owner = row >> shift;
    StoreToCluster(
        ClusterAddress(area + PlaceOfSums<kTileN>(rows, at.split, row - owner * rows, column) * 4, owner), v,
        ClusterAddress(SharedAddress(&state.exchange), owner));
  };
  each([&](int row, int column, const int4& top, const int4& bottom) {
    send(row, column, top);
    send(row + 8, column, bottom);
  });
  WaitBarrier(SharedAddress(&state.exchange), 0);
}

// What all blocks of a cluster have summed of four channels, the bias included.
template <int kTileN>
__device__ __forceinline__ int4 AddedUp(const BlockState<kTileN>& state, const int* sums, int splits,
                                        int rows, int row, int column) {
  int4 total = *reinterpret_cast<const int4*>(state.bias + column);
#pragma unroll 4
  for (int i = 0; i < splits; ++i)
    total = Plus(total, *reinterpret_cast<const int4*>(sums + PlaceOfSums<kTileN>(rows, i, row, column)));
  return total;
}

// Four codes of sums, which are made of nothing else (StoresCodesAlone).
template <First kFirst, Rounding kRounding>
__device__ __forceinline__ unsigned FourAlone(const EpilogueParams& e, const int4& sums,
                                              const FourChannels& channels) {
  const int4 all[] = {sums};
  float4 first[1];
  FirstCodes<kFirst, kFirst == First::kTail, kRounding == Rounding::kWords>(e, all, channels, first);
  return RoundFour<kRounding>(e, first[0]);
}

// Finishes a tile of which blocks of a cluster have summed parts of K, each a share of the rows.
template <int kTileM, int kTileN, int kThreads, Finish kFinish, typename Params, typename Each,
          typename PixelOf>
__device__ __forceinline__ void FinishInCluster(const Params& p, const TilePosition& at, uint8_t* shared,
                                                BlockState<kTileN>& state, const Each& each,
                                                const PixelOf& pixel_of) {
  static_assert(kIsOfCluster<kFinish>);
  constexpr First kFirst = kFinish == Finish::kTailOfCluster ? First::kTail : First::kMultiplies;
  constexpr Rounding kRounding = kFinish == Finish::kBytesOfCluster   ? Rounding::kBytes
                                 : kFinish == Finish::kWordsOfCluster ? Rounding::kWords
                                                                      : Rounding::kClipped;
  const EpilogueParams& e = p.epilogue;
  const int rows = kTileM / p.splits, first_row = rows * at.split, channel0 = at.group * p.n + at.n0;
  int* const sums = reinterpret_cast<int*>(shared + p.exchange_offset);
  ExchangeSums<kTileM>(p, at, sums, state, each);
  for (int u = static_cast<int>(threadIdx.x); u < rows * (kTileN / 4); u += kThreads) {
    const int row = u / (kTileN / 4), column = u % (kTileN / 4) * 4, m = pixel_of(first_row + row);
    if (m < 0 || at.n0 + column >= p.n) continue;
    const int64_t index = static_cast<int64_t>(m) * e.out_channels + channel0 + column;
    *reinterpret_cast<unsigned*>(static_cast<uint8_t*>(p.y) + index) = FourAlone<kFirst, kRounding>(
        e, AddedUp(state, sums, p.splits, rows, row, column), state.Four(column));
  }
}

// Finishes a tile. `each(f)` calls f(row, column, top, bottom) for every four neighbouring columns that this
// thread has summed, `top` in `row` and `bottom` eight rows below. In a fragment of mma a thread has two
// neighbouring rows of B in each eight; the weights are packed so that those of two eights are four
// neighbouring channels (InterleavedRow). `shared` is the block's dynamic shared memory, its tiles are free
// by now (all threads are past a barrier). With `cluster`, the blocks of a cluster have summed parts of K.
// `pixel_of(row)` is the output pixel of a row, negative where there is none. kBiased: where
// SumsParams::in_registers, the sums began with the biases.
template <int kTileM, int kTileN, int kThreads, bool kBiased = false, Finish kFinish = Finish::kAny,
          typename Params, typename Each, typename PixelOf>
__device__ __forceinline__ void FinishTile(const Params& p, const TilePosition& at, uint8_t* shared,
                                           BlockState<kTileN>& state, bool cluster, const Each& each,
                                           const PixelOf& pixel_of) {
  if constexpr (kIsOfCluster<kFinish>) {
    return FinishInCluster<kTileM, kTileN, kThreads, kFinish>(p, at, shared, state, each, pixel_of);
  }
  if constexpr (!kLeavesRegisters<kFinish>) {
    if (kFinish != Finish::kAny || p.in_registers) {
      FinishInRegisters<kTileM, kTileN, kThreads, kBiased, kFinish>(
          p, at, shared, state, static_cast<int>(threadIdx.x), 1, each, pixel_of);
      return;
    }
  }
  if (p.splits > 1 && !cluster) {
    int32_t* partial = p.partial + (static_cast<int64_t>(at.split) * p.groups + at.group) * p.m * p.n;
    const auto store = [&](int row, int column, const int4& sums) {
      const int pixel = pixel_of(row), count = pixel >= 0 ? p.n - at.n0 - column : 0;
      int32_t* const out = partial + static_cast<int64_t>(pixel) * p.n + at.n0 + column;
      if (count > 0) out[0] = sums.x;
      if (count > 1) out[1] = sums.y;
      if (count > 2) out[2] = sums.z;
      if (count > 3) out[3] = sums.w;
    };
    each([&](int row, int column, const int4& top, const int4& bottom) {
      store(row, column, top);
      store(row + 8, column, bottom);
    });
    return;
  }

  // Sums go through shared memory. In a cluster every block finishes its share of the rows.
  const int rows = kTileM / p.splits, first_row = rows * at.split;
  int* const sums = reinterpret_cast<int*>(shared + p.exchange_offset);
  if (cluster) {
    ExchangeSums<kTileM>(p, at, sums, state, each);
  } else {
    each([&](int row, int column, const int4& top, const int4& bottom) {
      *reinterpret_cast<int4*>(sums + PlaceOfSums<kTileN>(rows, 0, row, column)) = top;
      *reinterpret_cast<int4*>(sums + PlaceOfSums<kTileN>(rows, 0, row + 8, column)) = bottom;
    });
    SyncThreads<kThreads>();
  }

  const EpilogueParams& e = p.epilogue;
  const int channel0 = at.group * p.n + at.n0;
  if (p.requantizes_fours) {
    const bool of_bytes = e.rounding == Rounding::kBytes && !e.has_residual && e.table == nullptr;
    for (int u = static_cast<int>(threadIdx.x); u < rows * (kTileN / 4); u += kThreads) {
      const int row = u / (kTileN / 4), column = u % (kTileN / 4) * 4, m = pixel_of(first_row + row);
      if (m < 0 || at.n0 + column >= p.n) continue;
      const int64_t index = static_cast<int64_t>(m) * e.out_channels + channel0 + column;
      unsigned residual = 0;
      if (e.has_residual) {
        residual = *reinterpret_cast<const unsigned*>(static_cast<const uint8_t*>(p.residual) + index);
      }
      const FourChannels channels = state.Four(column);
      const int4 sums_of_row[] = {AddedUp(state, sums, p.splits, rows, row, column)};
      unsigned codes[] = {residual};
      if (of_bytes) {  // most of them
        float4 first[1];
        FirstCodes<First::kMultiplies, false, false>(e, sums_of_row, channels, first);
        codes[0] = RoundFour<Rounding::kBytes>(e, first[0]);
      } else {
        WithIntegers(e, [&](const auto& requantize) { requantize(sums_of_row, channels, codes); });
      }
      StoreInPlaces(e, m, channel0 + column, codes[0]);
      if (p.y != nullptr) *reinterpret_cast<unsigned*>(static_cast<uint8_t*>(p.y) + index) = codes[0];
    }
    return;
  }
  const bool makes_four_floats = !e.quantized_output && !e.has_residual && p.n % 4 == 0;
  if (makes_four_floats) {
    // What is added comes from memory, of the thread's next two fours while it finishes one: a warp that waited for each
    // would have a load on its way, and a multiprocessor's warps together too few of them.
    const auto pixel_at = [&](int u) {
      const bool is_output = u < rows * (kTileN / 4) && at.n0 + u % (kTileN / 4) * 4 < p.n;
      return is_output ? pixel_of(first_row + u / (kTileN / 4)) : -1;
    };
    const auto fetch = [&](int u) {
      const int m = e.adds_floats ? pixel_at(u) : -1;
      if (m < 0) return make_uint4(0, 0, 0, 0);
      return FetchAdded(e, p.residual,
                        static_cast<int64_t>(m) * e.out_channels + channel0 + u % (kTileN / 4) * 4);
    };
    const int thread = static_cast<int>(threadIdx.x);
    uint4 next = fetch(thread), behind = fetch(thread + kThreads);
#pragma unroll 1
    for (int u = thread; u < rows * (kTileN / 4); u += kThreads) {
      const uint4 fetched = next;
      next = behind;
      behind = fetch(u + 2 * kThreads);
      const int row = u / (kTileN / 4), column = u % (kTileN / 4) * 4, m = pixel_at(u);
      if (m < 0) continue;
      const int4 total = AddedUp(state, sums, p.splits, rows, row, column);
      const float4 scale = *reinterpret_cast<const float4*>(state.scale + column),
                   added = AddedNumbers(e, fetched);
      FinishFloats<4>(e, {added.x, added.y, added.z, added.w}, p.y, m, channel0 + column,
                      {total.x, total.y, total.z, total.w}, {scale.x, scale.y, scale.z, scale.w});
    }
    return;
  }
  for (int u = static_cast<int>(threadIdx.x); u < rows * kTileN; u += kThreads) {
    const int row = u / kTileN, column = u % kTileN, m = pixel_of(first_row + row);
    if (m < 0 || at.n0 + column >= p.n) continue;
    int total = 0;
    for (int i = 0; i < p.splits; ++i) total += sums[PlaceOfSums<kTileN>(rows, i, row, column)];
    FinishOne(e, p.residual, p.y, m, channel0 + column, total, state.bias[column], state.scale[column]);
  }
}

template <int kTileM, int kTileN, int kThreads, bool kBiased = false, Finish kFinish = Finish::kAny,
          typename Params, typename Each>
__device__ __forceinline__ void FinishTile(const Params& p, const TilePosition& at, uint8_t* shared,
                                           BlockState<kTileN>& state, bool cluster, const Each& each) {
  FinishTile<kTileM, kTileN, kThreads, kBiased, kFinish>(p, at, shared, state, cluster, each,
                                                         PixelsInOrder{at.m0, p.m});
}

}  // namespace lowbit::cuda
