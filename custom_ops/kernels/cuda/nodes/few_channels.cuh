// Convolutions of few channels in float32: what they write, not what they read or multiply, takes their time.
//
// A block has a band of an image in shared memory, every channel of it, and the weights of some outputs. A thread makes four
// outputs side by side of one line or two, of eight channels at a time: their windows share what a line of the band has in
// registers, and a weight is read once by a whole warp. The sums are those of one slice (SumSlices), front to back.
#pragma once

#include "kernels/cuda/nodes/float_tiles.cuh"

namespace lowbit::cuda {

struct BandParams : SplitParams {
  const float* weights = nullptr;  // [k][pitch]
  int pitch = 0;
  int fours = 0;                             // outputs side by side of a strip, which goes down a whole image
  int strips = 0, strip_units = 0;           // of an image; of a strip: what a thread makes, line by line
  int units = 0;                             // of a band, whose first and last line may be there in part
  bool has_two_lines = false;                // a unit is four outputs of two lines
  bool is_alone = false;                     // one channel, of square windows, makes floats
  int pixels = 0, pixel_lines = 0;           // that a band reads, of each channel; from line to line
  int outputs = 0;                           // of a block, a multiple of kBandOutputs
  QuantizerGrid grid;                        // of codes
  FastDivisor by_fours, by_across, by_down;  // strips across, bands down
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

// One channel of square windows is a kernel's own: it knows how much there is to multiply, so that many loads are under way.
enum class BandWindow : uint8_t { kAny, kAlone, kAloneTwoLines };

template <int kWidth, int kStride, bool kToCodes, BandWindow kWindow>
__global__ void __launch_bounds__(kBandBlock) ConvBands(const __grid_constant__ BandParams p) {
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  constexpr int kLines = kWindow == BandWindow::kAloneTwoLines ? 2 : 1;
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
  const int unit0 = static_cast<int>(down) * p.units;
  const int line0 = static_cast<int>(Divided(static_cast<unsigned>(unit0), p.by_fours).quotient) * kLines;
  const int column0 = static_cast<int>(across) * p.fours * 4;
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

  const auto [group, four] = Divided(static_cast<unsigned>(unit0 + tid), p.by_fours);
  const int out_h = static_cast<int>(p.windows.h.out), out_w = static_cast<int>(p.windows.w.out);
  const int y = static_cast<int>(group) * kLines, x = column0 + static_cast<int>(four) * 4;
  if (tid >= p.units || unit0 + tid >= p.strip_units || x >= out_w) return;
  const float* const windows =
      band + (y - line0) * static_cast<int>(p.windows.h.stride) * p.pixels + four * 4 * kStride;
  const int channels = kWindow == BandWindow::kAny ? p.channels : 1;
  const int kernel_h = kWindow == BandWindow::kAny ? static_cast<int>(p.windows.h.kernel) : kWidth;
  constexpr int kUnrolled = kWindow == BandWindow::kAny ? 1 : kWidth;
#pragma unroll 1
  for (int output = 0; output < p.outputs && output0 + output < p.rows; output += kBandOutputs) {
    BandSums sums[kLines] = {};
    const float* w_of = weights + output;
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel, w_of += kernel_h * kWidth * p.outputs) {
      const float* line_of = windows + channel * p.pixel_lines * p.pixels;
      constexpr int kFours = kSpan<kWidth, kStride> / 4;
      float4 pixels[kLines]
                   [kFours];  // line `ty` of the windows of line `l` is the one that (ty + l) % kLines has
      const auto load = [&](int line) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          pixels[line % kLines][i] = reinterpret_cast<const float4*>(line_of + line * p.pixels)[i];
        }
      };
      if constexpr (kLines == 2) load(0);
#pragma unroll kUnrolled
      for (int ty = 0; ty < kernel_h; ++ty) {
        load(ty + kLines - 1);
#pragma unroll
        for (int tx = 0; tx < kWidth; ++tx) {
          const float* const of_tap = w_of + (ty * kWidth + tx) * p.outputs;
          float4 w[kBandOutputs / 4];
#pragma unroll
          for (int i = 0; i < kBandOutputs / 4; ++i) w[i] = reinterpret_cast<const float4*>(of_tap)[i];
#pragma unroll
          for (int l = 0; l < kLines; ++l) {
#pragma unroll
            for (int i = 0; i < kBandOutputs; ++i) {
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                const int at = j * kStride + tx;
                sums[l][i][j] =
                    __fmaf_rn(ElementOf(w[i / 4], i % 4),
                              ElementOf(pixels[(ty + l) % kLines][at / 4], at % 4), sums[l][i][j]);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      if (y + l >= out_h) break;
      if constexpr (kToCodes) {
        StoreBandCodes(p, sums[l], bias + output, output0 + output,
                       (int64_t{image} * out_h + y + l) * out_w + x, out_w - x);
      } else {
        const int64_t plane = int64_t{out_h} * out_w;
        StoreBandFloats(p, sums[l], bias + output, output0 + output,
                        (int64_t{image} * p.rows + output0 + output) * plane + int64_t{y + l} * out_w + x,
                        plane, out_w - x);
      }
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

// Sets the bands of so many units and outputs; false where a block has no room for one.
inline bool SetBands(BandParams& p, int units, int outputs, const Device& device) {
  const WindowDim& h = p.windows.h;
  const int lines = p.has_two_lines ? 2 : 1;
  p.units = units;
  p.outputs = outputs;
  p.strip_units = static_cast<int>(BlocksFor(h.out, lines)) * p.fours;
  const int64_t groups = units % p.fours == 0 ? units / p.fours : (units - 2) / p.fours + 2;
  const int64_t pixel_lines = (groups * lines - 1) * h.stride + h.kernel;
  if (pixel_lines > device.shared_bytes) return false;
  p.pixel_lines = static_cast<int>(pixel_lines);
  p.by_down = MakeDivisor(BlocksFor(p.strip_units, units));
  return BandBytes(p) <= static_cast<size_t>(device.shared_bytes);
}

inline int64_t BandsOfImages(const BandParams& p) {
  return p.columns / (p.windows.h.out * p.windows.w.out) * p.by_down.divisor * p.strips;
}

// About how many clocks bands of one channel take. A multiprocessor's blocks multiply and store at the same time, but for the
// products of the first outputs and the stores of the last ones. Fitted to maps of 28x28 to 1024x1024, 3x3 and 5x5 windows, on
// an H100: what is cheapest of 8, 16 and 32 outputs takes at most 1.03 times what the best one takes.
inline double CostOfBands(const BandParams& p, const Device& device) {
  constexpr double kBlock = 600, kBytes = 2200;  // of a block; stored in a clock by all multiprocessors
  constexpr int kSchedulers = 4;
  const double blocks = static_cast<double>(BandsOfImages(p)) * BlocksFor(p.rows, p.outputs);
  const double each = std::ceil(blocks / device.multiprocessors);
  const double warps = each * kBandBlock / (kWarp * kSchedulers);
  const double rate = p.has_two_lines ? 128 * warps / (warps + 1) : 102 * warps / (warps + 0.5);
  const double products = each * kBandBlock * p.outputs * (p.has_two_lines ? 2 : 1) * 4.0 * p.k / rate;
  const double stores = p.count * sizeof(float) / kBytes * std::max(1.0, device.multiprocessors / blocks);
  const double groups = p.outputs / kBandOutputs;
  return each * kBlock + products / groups + std::max(products, stores) * (groups - 1) / groups +
         stores / groups;
}

// Sets how a convolution is cut into bands; false where it cannot be, or has several slices.
inline bool CutIntoBands(BandParams& p, const Device& device, bool to_codes) {
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  if (p.groups > 1 || p.channels > kMostFewChannels || p.slices > 1 || h.dilation > 1 || w.dilation > 1)
    return false;
  int span = 0;
  const bool found =
      WithBandWindow(p.windows, [&](auto width, auto stride) { span = kSpan<width(), stride()>; });
  if (!found || p.count == 0 || !IsNear(p)) return false;
  const auto fours = static_cast<int>(BlocksFor(w.out, 4));
  p.strips = static_cast<int>(BlocksFor(fours, kWarp));
  p.fours = static_cast<int>(BlocksFor(fours, p.strips));
  p.pixels = (p.fours - 1) * 4 * static_cast<int>(w.stride) + span;
  p.by_fours = MakeDivisor(p.fours);
  p.by_across = MakeDivisor(p.strips);
  p.is_alone = !to_codes && p.channels == 1 && h.kernel == w.kernel && h.kernel > 1;
  constexpr int kMostEights = 8, kMostEightsAlone = 4;
  const auto eights = static_cast<int>(BlocksFor(p.rows, kBandOutputs));
  const auto is_possible = [](const BandParams& bands) {
    constexpr int64_t kMostBands = int64_t{1} << 30;
    return BandsOfImages(bands) < kMostBands && BlocksFor(bands.rows, bands.outputs) <= kMostGridRows;
  };
  if (!p.is_alone) {
    // As many lines as there are threads for, and equally many in all bands; as many outputs as leave every multiprocessor
    // four blocks, and their weights room for as many there.
    const auto lines = BlocksFor(h.out, BlocksFor(h.out, kBandBlock / p.fours));
    if (!SetBands(p, static_cast<int>(lines) * p.fours, kBandOutputs, device)) return false;
    const auto parts =
        std::min<int64_t>(BlocksFor(int64_t{4} * device.multiprocessors, BandsOfImages(p)), eights);
    p.outputs = std::min(static_cast<int>(BlocksFor(eights, parts)), kMostEights) * kBandOutputs;
    return BandBytes(p) <= static_cast<size_t>(device.shared_bytes) && is_possible(p);
  }
  // Two lines share what they read; they pay where their bands alone are enough for all multiprocessors.
  p.has_two_lines = h.stride == 1 && w.stride == 1;
  if (p.has_two_lines) {
    p.has_two_lines =
        SetBands(p, kBandBlock, kBandOutputs, device) && BandsOfImages(p) >= device.multiprocessors;
  }
  double least = std::numeric_limits<double>::infinity();
  BandParams best;
  for (int each = 1; each <= std::min(eights, kMostEightsAlone); each *= 2) {
    if (!SetBands(p, kBandBlock, each * kBandOutputs, device) || !is_possible(p)) continue;
    const double cost = CostOfBands(p, device);
    if (cost < least) least = cost, best = p;
  }
  if (std::isinf(least)) return false;
  p = best;
  return true;
}

inline NodePlanPtr PlanBands(const std::string& name, const BandParams& geometry, const Device& device,
                             bool to_codes) {
  const auto launch = [=](const Run& run, BandParams p) {
    // Four floats of a line, or codes of a pixel.
    p.stores_fours = to_codes ? p.rows % 4 == 0 && CommonUnit({p.y}) >= 4
                              : p.windows.w.out % 4 == 0 && CommonUnit({p.y, p.residual}) == 16;
    const dim3 grid(static_cast<unsigned>(BandsOfImages(p)), BlocksFor(p.rows, p.outputs));
    const LaunchShape shape{grid, kBandBlock, static_cast<int>(BandBytes(p))};
    WithBandWindow(p.windows, [&](auto width, auto stride) {
      const auto launch_of = [&](auto codes, auto window) {
        run.Check(LaunchKernel<ConvBands<width(), stride(), codes(), window()>>(run.queue, device, shape, p));
      };
      using Window = BandWindow;
      if (to_codes) return launch_of(std::true_type(), std::integral_constant<Window, Window::kAny>());
      if (!p.is_alone) return launch_of(std::false_type(), std::integral_constant<Window, Window::kAny>());
      if constexpr (width() > 1) {
        if (!p.has_two_lines)
          return launch_of(std::false_type(), std::integral_constant<Window, Window::kAlone>());
      }
      if constexpr (width() > 1 && stride() == 1) {
        launch_of(std::false_type(), std::integral_constant<Window, Window::kAloneTwoLines>());
      }
    });
  };
  return MakeKernelPlan(name + (to_codes ? " to codes" : "") + " bands " + std::to_string(geometry.units) +
                            "x" + (geometry.has_two_lines ? "8" : "4") + " outputs " +
                            std::to_string(geometry.outputs),
                        geometry, launch);
}

}  // namespace lowbit::cuda
