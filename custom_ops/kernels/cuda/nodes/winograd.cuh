// What the two forms of Winograd's F(2x2,3x3) share: the squares of winograd.cu, for every GPU, and the patches of
// winograd_sm90.cu. They make the same sums in the same order.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/nodes/float_tiles.cuh"

namespace lowbit::cuda {

inline constexpr int kSquareSide = 4,
                     kSquarePoints = kSquareSide * kSquareSide;  // pixels along a square, and points
inline constexpr int kSquareMade = 2;                            // outputs along a square
inline constexpr int kSliceChannels =
    8;  // channels; a slice has whole steps, the last one with zeros behind them
inline constexpr int kSquareWindow = 3, kSquareTaps = kSquareWindow * kSquareWindow;

struct WinogradParams : SplitParams {
  const float* weights = nullptr;  // [row blocks][stages][channels and points of a stage][rows]
  int squares = 0;                 // or patches
  FastDivisor by_down, by_across;  // those of a column, of a row
  bool stores_pairs = false;       // two outputs side by side begin at 8 bytes, and are both there
};

// Where a square lies, or a patch, of so many outputs a side.
struct SquarePlace {
  int image, y, x;  // of the first output

  __device__ __forceinline__ SquarePlace(const WinogradParams& p, unsigned number, int side) {
    const auto [line, across] = Divided(number, p.by_across);
    const auto [plane, down] = Divided(line, p.by_down);
    image = static_cast<int>(plane);
    y = static_cast<int>(down) * side;
    x = static_cast<int>(across) * side;
  }
};

// Channels of a slice: the first one, and behind the last one.
__device__ __forceinline__ int FirstChannelOf(const WinogradParams& p, int slice) {
  return static_cast<int>(static_cast<unsigned>(slice) * (p.depth / kSliceChannels) / p.slices) *
         kSliceChannels;
}

// A^T m A, at(line, column) of m; rows of two outputs.
template <typename At>
__device__ __forceinline__ Fours TransformSums(const At& at) {
  float down[kSquareMade][kSquareSide];
#pragma unroll
  for (int i = 0; i < kSquareSide; ++i) {
    down[0][i] = __fadd_rn(__fadd_rn(at(0, i), at(1, i)), at(2, i));
    down[1][i] = __fsub_rn(__fsub_rn(at(1, i), at(2, i)), at(3, i));
  }
  Fours out;
#pragma unroll
  for (int i = 0; i < kSquareMade; ++i) {
    out.v[i * kSquareMade] = __fadd_rn(__fadd_rn(down[i][0], down[i][1]), down[i][2]);
    out.v[i * kSquareMade + 1] = __fsub_rn(__fsub_rn(down[i][1], down[i][2]), down[i][3]);
  }
  return out;
}

// Where the outputs of a square lie, from (y0, x0) of an image on, which is inside, and what is added to them.
struct SquareTarget {
  int64_t at = 0;
  bool has_lower = false, has_right = false;  // are inside, too
  float added[kSquareMade * kSquareMade] = {};

  SquareTarget() = default;
  __device__ __forceinline__ SquareTarget(const WinogradParams& p, int row, int image, int y0, int x0) {
    const int out_h = static_cast<int>(p.windows.h.out), out_w = static_cast<int>(p.windows.w.out);
    at = ((int64_t{image} * p.rows + row) * out_h + y0) * out_w + x0;
    has_lower = y0 + 1 < out_h;
    has_right = x0 + 1 < out_w;
    if (!p.limits.adds) return;
#pragma unroll
    for (int i = 0; i < kSquareMade; ++i) {
      const float* const from = p.residual + at + i * out_w;
      if (i > 0 && !has_lower) return;
      if (p.stores_pairs) {
        const float2 pair = *reinterpret_cast<const float2*>(from);
        added[i * kSquareMade] = pair.x, added[i * kSquareMade + 1] = pair.y;
      } else {
        added[i * kSquareMade] = from[0];
        if (has_right) added[i * kSquareMade + 1] = from[1];
      }
    }
  }
};

// *bias is added where there are biases.
__device__ __forceinline__ void StoreOutputs(const WinogradParams& p, float* y, const float* bias,
                                             const SquareTarget& target, const Fours& sums) {
  const int out_w = static_cast<int>(p.windows.w.out);
#pragma unroll
  for (int i = 0; i < kSquareMade; ++i) {
    if (i > 0 && !target.has_lower) return;
    float* const to = y + target.at + i * out_w;
    const auto finish = [&](int j) {
      return FinishSum(p, bias, sums.v[i * kSquareMade + j], target.added[i * kSquareMade + j]);
    };
    if (p.stores_pairs) {
      *reinterpret_cast<float2*>(to) = make_float2(finish(0), finish(1));
    } else {
      to[0] = finish(0);
      if (target.has_right) to[1] = finish(1);
    }
  }
}

// G g G^T of each window, each rounded once: of blocks of `rows`, in stages of so many channels, channel by channel of all
// points or point by point of those channels. Points lie column by column.
inline std::vector<float> TransformSquareWeights(const WinogradParams& p, const std::vector<float>& weights,
                                                 int rows, int channels, bool channel_by_channel) {
  constexpr double kG[kSquareSide][kSquareWindow] = {{1, 0, 0}, {0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {0, 0, 1}};
  std::vector<float> out(size_t{BlocksFor(p.rows, rows)} * static_cast<size_t>(p.depth) * kSquarePoints *
                         static_cast<size_t>(rows));
  const float* window = weights.data();
  for (int row = 0; row < p.rows; ++row) {
    for (int channel = 0; channel < p.channels; ++channel, window += kSquareTaps) {
      const int64_t stage = int64_t{row / rows} * (p.depth / channels) + channel / channels;
      const int in_stage = channel % channels;
      for (int point = 0; point < kSquarePoints; ++point) {
        double sum = 0;
        for (int tap = 0; tap < kSquareTaps; ++tap) {
          sum += kG[point % kSquareSide][tap / kSquareWindow] * kG[point / kSquareSide][tap % kSquareWindow] *
                 double{window[tap]};
        }
        const int line = channel_by_channel ? in_stage * kSquarePoints + point : point * channels + in_stage;
        const int64_t at = (stage * kSquarePoints * channels + line) * rows + row % rows;
        out[static_cast<size_t>(at)] = static_cast<float>(sum);
      }
    }
  }
  return out;
}

inline bool StoresPairs(const WinogradParams& p) {
  const auto are_pairs = [](const float* first) {
    return reinterpret_cast<uintptr_t>(first) % sizeof(float2) == 0;
  };
  return p.windows.w.out % kSquareMade == 0 && are_pairs(p.y) && are_pairs(p.residual);
}

// Into squares, or patches, of so many outputs a side.
inline void CutInto(int side, WinogradParams& p) {
  const int64_t down = BlocksFor(p.windows.h.out, side), across = BlocksFor(p.windows.w.out, side);
  const int64_t pixels = std::max<int64_t>(1, p.by_pixels.divisor);
  p.squares = static_cast<int>(p.columns / pixels * down * across);
  p.by_down = MakeDivisor(std::max<int64_t>(1, down));
  p.by_across = MakeDivisor(std::max<int64_t>(1, across));
}

// winograd_sm90.cu: about how many clocks of a multiprocessor patches take, whatever GPU is there; and those of Hopper.
double CostOfPatches(const WinogradParams& p, int slices);
PackedNodePtr PackPatches(const FloatConvOp& op, const WinogradParams& shared, const Device& device,
                          const WinogradTiling& tiling);
// As many as take the least time, or so many.
int SlicesOfSquares(const WinogradParams& p, int asked);

}  // namespace lowbit::cuda
