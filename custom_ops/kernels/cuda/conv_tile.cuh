// What the implicit-precomp GEMM kernels share: which bytes of the input make up a tile of the matrix that is
// never formed, and how a block's sums become outputs.
//
//   A  [m, k]  row = output pixel, column = (tap, channel): gathered from the NHWC input
//   B  [n, k]  row = output channel: packed in tile order when the node was loaded
//
// Offsets are precomputed per shape (paper, section 4.2), in a form that fits registers and constant memory:
// the offset of an output pixel's first tap is computed once per block and kept; that of a tap is
// ConvParams::tap, in constant memory; their sum is the address. A tap outside the image is
// ConvParams::fill, the code of real zero, so that padding needs no correction.
//
// In shared memory a tile row is 128 bytes, its 16-byte chunk c lies at chunk position c ^ (row % 8): the
// order that ldmatrix reads without bank conflicts and that wgmma calls 128-byte swizzle.
#pragma once

#include <cstdint>

#include "kernels/cuda/conv_params.h"
#include "kernels/cuda/device_epilogue.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lowbit::cuda {

inline constexpr int kRowBytes = 128;

__device__ __forceinline__ int Divide(int n, const FastDivisor& d) {
  return static_cast<int>((__umulhi(static_cast<uint32_t>(n), d.multiplier) + static_cast<uint32_t>(n)) >>
                          d.shift);
}

// Loads A tiles. Thread t copies chunk t % 8 of the rows t / 8, t / 8 + kThreads / 8, ...
template <int kTileM, int kThreads, int kVectorBytes>
class ActivationLoader {
 public:
  static constexpr int kRowStep = kThreads / 8, kRows = kTileM / kRowStep;
  static_assert(kRows * kRowStep == kTileM && kRowStep % 8 == 0);

  __device__ __forceinline__ ActivationLoader(const ConvParams& p, int m0, int group) : p_(p) {
    const int thread = static_cast<int>(threadIdx.x);
    chunk_ = thread % 8;
    shared_offset_ = (thread / 8) * kRowBytes + ((chunk_ ^ (thread / 8 % 8)) << 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int m = m0 + thread / 8 + i * kRowStep;
      const int image = Divide(m, p.by_image), rest = m - image * static_cast<int>(p.by_image.divisor);
      const int oy = Divide(rest, p.by_row), ox = rest - oy * static_cast<int>(p.by_row.divisor);
      y_[i] = m < p.m ? oy * p.stride_h - p.pad_top : -(1 << 29);  // a row past the end: never in the image
      x_[i] = ox * p.stride_w - p.pad_left;
      offset_[i] = ((image * p.in_h + oy * p.stride_h - p.pad_top) * p.in_w + x_[i]) * p.pixel_bytes +
                   group * p.channels;
    }
  }

  // Tile k_tile into shared memory at `shared`. Columns past k are not written: their weights are 0.
  __device__ __forceinline__ void Load(int k_tile, uint32_t shared) const {
    const int k = k_tile * kRowBytes + chunk_ * 16;
    if constexpr (kVectorBytes == 16) {
      if (k < p_.k) LoadColumn<16>(k, shared);
    } else {
#pragma unroll
      for (int part = 0; part < 16; part += kVectorBytes) {
        if (k + part < p_.k) LoadColumn<kVectorBytes>(k + part, shared + part);
      }
    }
  }

 private:
  template <int kBytes>
  __device__ __forceinline__ void LoadColumn(int k, uint32_t shared) const {
    const int t = Divide(k, p_.by_channels);
    const Tap tap = p_.tap[t];
    const int offset = tap.delta + k - t * p_.channels;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool inside = static_cast<unsigned>(y_[i] + tap.dy) < static_cast<unsigned>(p_.in_h) &&
                          static_cast<unsigned>(x_[i] + tap.dx) < static_cast<unsigned>(p_.in_w);
      const uint32_t target = shared + shared_offset_ + i * kRowStep * kRowBytes;
      if (inside) {
        CopyAsync<kBytes>(target, p_.x + (offset_[i] + offset));
      } else {
        StoreShared<kBytes>(target, p_.fill);
      }
    }
  }

  const ConvParams& p_;
  int chunk_, shared_offset_;
  int y_[kRows], x_[kRows], offset_[kRows];
};

// Where a block's tile lies, and which part of K it sums.
struct TilePosition {
  int m0, n0, group, split, k_begin, k_end;

  template <int kTileM, int kTileN>
  static __device__ __forceinline__ TilePosition Of(const ConvParams& p) {
    TilePosition at;
    at.m0 = static_cast<int>(blockIdx.x) * kTileM;
    at.group = static_cast<int>(blockIdx.y) / p.n_tiles;
    at.n0 = (static_cast<int>(blockIdx.y) - at.group * p.n_tiles) * kTileN;
    at.split = static_cast<int>(blockIdx.z);
    at.k_begin = p.k_tiles * at.split / p.splits;
    at.k_end = p.k_tiles * (at.split + 1) / p.splits;
    return at;
  }

  // The weight tile of k_tile: consecutive rows of 128 bytes.
  __device__ __forceinline__ const uint8_t* Weights(const ConvParams& p, int k_tile) const {
    return p.weights + ((static_cast<int64_t>(group) * p.k_tiles + k_tile) * p.n_padded + n0) * kRowBytes;
  }
};

// Multipliers and biases of the tile's channels, fetched while the first tiles are under way.
template <int kTileN>
struct ChannelConstants {
  float scale[kTileN];
  int bias[kTileN];

  __device__ __forceinline__ void Fetch(const ConvParams& p, const TilePosition& at) {
    const int n = static_cast<int>(threadIdx.x);
    if (n < kTileN && at.n0 + n < p.n && p.epilogue.scale != nullptr) {
      scale[n] = p.epilogue.scale[at.group * p.n + at.n0 + n];
      bias[n] = p.epilogue.bias[at.group * p.n + at.n0 + n];
    }
  }
};

// Whether the requantize epilogue can run on sums in registers and store 16 codes at a time.
__device__ __forceinline__ bool InRegisters(const ConvParams& p) {
  return p.splits == 1 && p.n % 16 == 0 && p.epilogue.w_zero == nullptr && p.epilogue.quantized_output &&
         p.epilogue.kind == static_cast<int>(EpilogueKind::kRequantize);
}

// Finishes a tile. `each(f)` calls f(row, column, sum, next_sum) for every pair of neighbouring columns that
// this thread has summed. `shared` is the block's tile memory, free by now (all threads are past a barrier).
template <int kTileM, int kTileN, int kThreads, typename Each>
__device__ __forceinline__ void FinishTile(const ConvParams& p, const TilePosition& at, uint8_t* shared,
                                           const ChannelConstants<kTileN>& constants, bool cluster,
                                           const Each& each) {
  const EpilogueParams& e = p.epilogue;
  const int thread = static_cast<int>(threadIdx.x);
  const int channel0 = at.group * p.n + at.n0;

  if (InRegisters(p)) {
    // Codes go through shared memory to be stored 16 at a time; the padded stride avoids bank conflicts.
    constexpr int kStride = kTileN + 16, kChunks = kTileN / 16, kUnits = kTileM * kChunks / kThreads;
    static_assert(kUnits * kThreads == kTileM * kChunks);
    int4 residual[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int row = (thread + u * kThreads) / kChunks, column = (thread + u * kThreads) % kChunks * 16;
      if (e.has_residual && at.m0 + row < p.m && at.n0 + column < p.n) {
        residual[u] = *reinterpret_cast<const int4*>(
            static_cast<const uint8_t*>(p.residual) +
            (static_cast<int64_t>(at.m0 + row) * e.out_channels + channel0 + column));
      }
    }
    each([&](int row, int column, int sum, int next) {
      const int q0 = InnerCode(e, sum + constants.bias[column], constants.scale[column]);
      const int q1 = InnerCode(e, next + constants.bias[column + 1], constants.scale[column + 1]);
      *reinterpret_cast<uint16_t*>(shared + row * kStride + column) =
          static_cast<uint16_t>((q0 & 255) | (q1 & 255) << 8);
    });
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int row = (thread + u * kThreads) / kChunks, column = (thread + u * kThreads) % kChunks * 16;
      if (at.m0 + row >= p.m || at.n0 + column >= p.n) continue;
      union Codes {
        int4 vector;
        uint8_t u8[16];
        int8_t s8[16];
      } codes, other;
      codes.vector = *reinterpret_cast<const int4*>(shared + row * kStride + column);
      if (e.has_residual) {
        other.vector = residual[u];
        const bool inner_signed = e.lo < 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int q = inner_signed ? static_cast<int>(codes.s8[i]) : static_cast<int>(codes.u8[i]);
          const int r = e.residual_signed ? static_cast<int>(other.s8[i]) : static_cast<int>(other.u8[i]);
          codes.u8[i] = static_cast<uint8_t>(AddResidual(e, q, r));
        }
      }
      *reinterpret_cast<int4*>(static_cast<uint8_t*>(p.y) +
                               (static_cast<int64_t>(at.m0 + row) * e.out_channels + channel0 + column)) =
          codes.vector;
    }
    return;
  }

  if (p.splits > 1 && !cluster) {
    int32_t* partial = p.partial + (static_cast<int64_t>(at.split) * p.groups + at.group) * p.m * p.n;
    each([&](int row, int column, int sum, int next) {
      if (at.m0 + row >= p.m) return;
      int32_t* out = partial + static_cast<int64_t>(at.m0 + row) * p.n + at.n0 + column;
      if (at.n0 + column < p.n) out[0] = sum;
      if (at.n0 + column + 1 < p.n) out[1] = next;
    });
    return;
  }

  // Sums go through shared memory, four neighbouring channels of a pixel to a thread. In a cluster every
  // block finishes its share of the rows from the sums of all blocks: integers, so their order does not
  // matter.
  constexpr int kStride = kTileN + 8, kUnits = kTileN / 4;
  int* sums = reinterpret_cast<int*>(shared);
  each([&](int row, int column, int sum, int next) {
    *reinterpret_cast<int2*>(sums + row * kStride + column) = make_int2(sum, next);
  });
  const int splits = p.splits;
  if (splits > 1) {
    ClusterSync();
  } else {
    __syncthreads();
  }
  const int rows = kTileM / splits, first_row = rows * at.split;
  for (int u = thread; u < rows * kUnits; u += kThreads) {
    const int row = first_row + u / kUnits, column = u % kUnits * 4;
    const int m = at.m0 + row, count = min(4, p.n - at.n0 - column);
    if (m >= p.m || count <= 0) continue;
    int4 total = *reinterpret_cast<const int4*>(sums + row * kStride + column);
    for (int i = 1; i < splits; ++i) {
      const uint32_t rank = static_cast<uint32_t>((at.split + i) & (splits - 1));
      const int4 v = LoadFromCluster(SharedAddress(sums + row * kStride + column), rank);
      total.x += v.x;
      total.y += v.y;
      total.z += v.z;
      total.w += v.w;
    }
    const int four[4] = {total.x, total.y, total.z, total.w};
    const int x_sum = e.w_zero != nullptr ? p.x_sums[static_cast<int64_t>(at.group) * p.m + m] : 0;
    FinishChannels(e, p.residual, p.y, m, channel0 + column, count, four, x_sum);
  }
  if (splits > 1) ClusterSync();  // nobody leaves while others read its shared memory
}

}  // namespace lowbit::cuda
