// Convolutions of few channels in float32: what they write, not what they read or multiply, takes their time.
//
// A block has a band of an image in shared memory, every channel of it, and the weights of some outputs. A thread makes four
// outputs side by side, of eight channels at a time: their windows share what a line of the band has in registers, and a
// weight is read once by a whole warp. The sums are those of one slice (SumSlices), front to back.
#pragma once

#include "kernels/cuda/nodes/float_tiles.cuh"

namespace lowbit::cuda {

struct BandParams : SplitParams {
  const float* weights = nullptr;  // [k][pitch]
  int pitch = 0;
  int fours = 0, lines = 0;                  // of a band: outputs side by side, lines of them
  int pixels = 0, pixel_lines = 0;           // that they read, of each channel; from line to line
  int bands_across = 0;                      // of an image
  int outputs = 0;                           // of a block, a multiple of kBandOutputs
  QuantizerGrid grid;                        // of codes
  FastDivisor by_fours, by_across, by_down;  // bands: across, down
};

inline constexpr int kBandBlock = 128, kBandOutputs = 8;

// Pixels of a line that four outputs read, in fours.
template <int kWidth, int kStride>
inline constexpr int kSpan = (3 * kStride + kWidth + 3) / 4 * 4;

using BandSums = float[kBandOutputs][4];

// From channel `row` of the first pixel on, whose bias is the first of `bias` and whose place in y is `at`, with so many
// pixels left in the line.
__device__ __forceinline__ void StoreBandFloats(const BandParams& p, const BandSums& sums, const float* bias,
                                                int row, int64_t at, int64_t plane, int left) {
#pragma unroll
  for (int i = 0; i < kBandOutputs; ++i, ++row, at += plane) {
    if (row >= p.rows) return;
    const auto finish = [&](int j, float added) { return FinishSum(p, bias + i, sums[i][j], added); };
    if (p.stores_fours) {
      float added[4] = {};
      if (p.limits.adds) LoadFloats(p.residual + at, added);
      *reinterpret_cast<float4*>(p.y + at) =
          make_float4(finish(0, added[0]), finish(1, added[1]), finish(2, added[2]), finish(3, added[3]));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < left) p.y[at + j] = finish(j, ResidualAt(p, at + j));
      }
    }
  }
}

// The same as codes with the channels last, from the pixel number `at` on.
__device__ __forceinline__ void StoreBandCodes(const BandParams& p, const BandSums& sums, const float* bias,
                                               int row, int64_t at, int left) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= left) return;
    uint8_t* const to = reinterpret_cast<uint8_t*>(p.y) + (at + j) * p.rows + row;
    const auto code = [&](int i) {
      return QuantizedCode<true>(FinishSum(p, bias + i, sums[i][j], 0), p.grid);
    };
    const Codes<kBandOutputs> codes = MakeCodes<kBandOutputs>(code);
#pragma unroll
    for (int word = 0; word < kBandOutputs / 4; ++word) {
      if (p.stores_fours) {
        if (row + 4 * word < p.rows) reinterpret_cast<unsigned*>(to)[word] = codes.w[word];
      } else {
#pragma unroll
        for (int i = 4 * word; i < 4 * word + 4; ++i) {
          if (row + i < p.rows) to[i] = static_cast<uint8_t>(codes[i]);
        }
      }
    }
  }
}

template <int kWidth, int kStride, bool kToCodes>
__global__ void __launch_bounds__(kBandBlock) ConvBands(const __grid_constant__ BandParams p) {
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  float* const weights = reinterpret_cast<float*>(shared);  // [k][outputs]
  float* const bias = weights + p.k * p.outputs;            // [outputs]
  float* const band = bias + p.outputs;                     // [channels][pixel_lines][pixels]
  const int tid = static_cast<int>(threadIdx.x);
  const int output0 = static_cast<int>(blockIdx.y) * p.outputs;
  // The weights are the kernel's own: they may be fetched before the predecessor is done.
  const int weight_fours = p.outputs / 4;
  for (int at = tid; at < p.k * weight_fours; at += kBandBlock) {
    const int k = at / weight_fours, four = (at - k * weight_fours) * 4;
    CopyAsyncOrZero<16>(SharedAddress(weights + k * p.outputs + four),
                        p.weights + int64_t{k} * p.pitch + output0 + four, output0 + four < p.pitch);
  }
  if (p.bias != nullptr && tid < p.outputs) {
    CopyAsyncOrZero<4>(SharedAddress(bias + tid), p.bias + output0 + tid, output0 + tid < p.rows);
  }
  const auto [strip, across] = Divided(blockIdx.x, p.by_across);
  const auto [image, down] = Divided(strip, p.by_down);
  const int line0 = static_cast<int>(down) * p.lines, column0 = static_cast<int>(across) * p.fours * 4;
  const int in_h = static_cast<int>(p.windows.h.in), in_w = static_cast<int>(p.windows.w.in);
  const int top = line0 * static_cast<int>(p.windows.h.stride) - static_cast<int>(p.windows.h.pad_begin);
  const int left = column0 * kStride - static_cast<int>(p.windows.w.pad_begin);
  const float* plane_of = p.x + int64_t{image} * p.channels * in_h * in_w + left;
  const int lines = p.channels * p.pixel_lines;
  int in_plane = tid / kWarp;
  WaitForPredecessors();
  for (int line = in_plane; line < lines; line += kBandBlock / kWarp, in_plane += kBandBlock / kWarp) {
    for (; in_plane >= p.pixel_lines; in_plane -= p.pixel_lines) plane_of += int64_t{in_h} * in_w;
    const int y = top + in_plane;
    const float* const from = plane_of + int64_t{y} * in_w;
    for (int i = tid % kWarp; i < p.pixels; i += kWarp) {
      CopyAsyncOrZero<4>(SharedAddress(band + line * p.pixels + i), from + i,
                         y >= 0 && y < in_h && left + i >= 0 && left + i < in_w);
    }
  }
  CommitCopies();
  WaitForCopies<0>();
  __syncthreads();
  LetSuccessorsStart();

  const auto [line, four] = Divided(threadIdx.x, p.by_fours);
  const int out_h = static_cast<int>(p.windows.h.out), out_w = static_cast<int>(p.windows.w.out);
  const int y = line0 + static_cast<int>(line), x = column0 + static_cast<int>(four) * 4;
  if (static_cast<int>(line) >= p.lines || y >= out_h || x >= out_w) return;
  const float* const windows =
      band + static_cast<int>(line * p.windows.h.stride) * p.pixels + four * 4 * kStride;
  const int kernel_h = static_cast<int>(p.windows.h.kernel);
#pragma unroll 1
  for (int output = 0; output < p.outputs && output0 + output < p.rows; output += kBandOutputs) {
    float sums[kBandOutputs][4] = {};
    const float* w_of = weights + output;
#pragma unroll 1
    for (int channel = 0; channel < p.channels; ++channel) {
      const float* line_of = windows + channel * p.pixel_lines * p.pixels;
#pragma unroll 1
      for (int ty = 0; ty < kernel_h; ++ty, line_of += p.pixels) {
        float4 pixels[kSpan<kWidth, kStride> / 4];
#pragma unroll
        for (int i = 0; i < kSpan<kWidth, kStride> / 4; ++i) {
          pixels[i] = reinterpret_cast<const float4*>(line_of)[i];
        }
#pragma unroll
        for (int tx = 0; tx < kWidth; ++tx, w_of += p.outputs) {
          float4 w[kBandOutputs / 4];
#pragma unroll
          for (int i = 0; i < kBandOutputs / 4; ++i) w[i] = reinterpret_cast<const float4*>(w_of)[i];
#pragma unroll
          for (int i = 0; i < kBandOutputs; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int at = j * kStride + tx;
              sums[i][j] =
                  __fmaf_rn(ElementOf(w[i / 4], i % 4), ElementOf(pixels[at / 4], at % 4), sums[i][j]);
            }
          }
        }
      }
    }
    if constexpr (kToCodes) {
      StoreBandCodes(p, sums, bias + output, output0 + output, (int64_t{image} * out_h + y) * out_w + x,
                     out_w - x);
    } else {
      const int64_t plane = int64_t{out_h} * out_w;
      StoreBandFloats(p, sums, bias + output, output0 + output,
                      (int64_t{image} * p.rows + output0 + output) * plane + int64_t{y} * out_w + x, plane,
                      out_w - x);
    }
  }
}

inline size_t BandBytes(const BandParams& p) {
  return ((size_t{static_cast<unsigned>(p.k)} + 1) * p.outputs +
          size_t{static_cast<unsigned>(p.channels)} * p.pixel_lines * p.pixels) *
         sizeof(float);
}

// Calls fn with the width and stride of windows that have an instance; else returns false.
template <typename Fn>
bool WithBandWindow(const Windows& windows, const Fn& fn) {
  bool found = false;
  const auto with = [&](auto width, auto stride) {
    if (windows.w.kernel != width || windows.w.stride != stride) return;
    found = true;
    fn(width, stride);
  };
  const auto with_stride = [&](auto stride) {
    with(std::integral_constant<int, 1>(), stride);
    with(std::integral_constant<int, 3>(), stride);
    with(std::integral_constant<int, 5>(), stride);
    with(std::integral_constant<int, 7>(), stride);
  };
  with_stride(std::integral_constant<int, 1>());
  with_stride(std::integral_constant<int, 2>());
  return found;
}

// Sets how a convolution is cut into bands; false where it cannot be, or has several slices.
inline bool CutIntoBands(BandParams& p, const Device& device) {
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  if (p.groups > 1 || p.channels > kMostFewChannels || p.slices > 1 || h.dilation > 1 || w.dilation > 1)
    return false;
  int span = 0;
  const bool found =
      WithBandWindow(p.windows, [&](auto width, auto stride) { span = kSpan<width(), stride()>; });
  if (!found || p.count == 0 || !IsNear(p)) return false;
  const auto fours = static_cast<int>(BlocksFor(w.out, 4));
  p.bands_across = static_cast<int>(BlocksFor(fours, kWarp));
  p.fours = static_cast<int>(BlocksFor(fours, p.bands_across));
  // As many lines as there are threads for, and equally many in all bands.
  const auto down = BlocksFor(h.out, kBandBlock / p.fours);
  p.lines = static_cast<int>(BlocksFor(h.out, down));
  p.pixels = (p.fours - 1) * 4 * static_cast<int>(w.stride) + span;
  const int64_t pixel_lines = (p.lines - 1) * h.stride + h.kernel;
  if (pixel_lines > device.shared_bytes) return false;
  p.pixel_lines = static_cast<int>(pixel_lines);
  p.by_fours = MakeDivisor(p.fours);
  p.by_across = MakeDivisor(p.bands_across);
  p.by_down = MakeDivisor(down);
  // As many outputs as leave every multiprocessor four blocks, and their weights room for as many there.
  constexpr int64_t kMostEights = 8;
  const int64_t bands = p.columns / (h.out * w.out) * down * p.bands_across;
  const int64_t eights = BlocksFor(p.rows, kBandOutputs);
  const int64_t parts = std::min<int64_t>(BlocksFor(int64_t{4} * device.multiprocessors, bands), eights);
  p.outputs = static_cast<int>(std::min<int64_t>(BlocksFor(eights, parts), kMostEights)) * kBandOutputs;
  constexpr int64_t kMostBands = int64_t{1} << 30;
  return bands < kMostBands && BlocksFor(p.rows, p.outputs) <= kMostGridRows &&
         BandBytes(p) <= static_cast<size_t>(device.shared_bytes);
}

inline void LaunchBands(const Run& run, const Device& device, BandParams p, bool to_codes) {
  // Four floats of a line, or codes of a pixel.
  p.stores_fours = to_codes ? p.rows % 4 == 0 && CommonUnit({p.y}) >= 4
                            : p.windows.w.out % 4 == 0 && CommonUnit({p.y, p.residual}) == 16;
  WithBandWindow(p.windows, [&](auto width, auto stride) {
    std::visit(
        [&](auto codes) {
          const int64_t images = p.columns / (p.windows.h.out * p.windows.w.out);
          const dim3 grid(static_cast<unsigned>(images * p.by_down.divisor * p.bands_across),
                          BlocksFor(p.rows, p.outputs));
          const LaunchShape shape{grid, kBandBlock, static_cast<int>(BandBytes(p))};
          run.Check(LaunchKernel<ConvBands<width(), stride(), codes()>>(run.queue, device, shape, p));
        },
        OneOf(to_codes));
  });
}

inline NodePlanPtr PlanBands(const std::string& name, const BandParams& geometry, const Device& device,
                             bool to_codes) {
  const auto launch = [=](const Run& run, const BandParams& p) { LaunchBands(run, device, p, to_codes); };
  return MakeKernelPlan(name + (to_codes ? " to codes" : "") + " bands " + std::to_string(geometry.lines) +
                            "x" + std::to_string(4 * geometry.fours),
                        geometry, launch);
}

}  // namespace lowbit::cuda
