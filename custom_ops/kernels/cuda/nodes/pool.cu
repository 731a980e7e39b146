// LowBitMaxPool, LowBitAveragePool, LowBitGlobalAveragePool, channels last.
#include <algorithm>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/nodes/pool_params.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128;

struct PoolParams {
  const uint8_t* x = nullptr;
  void* y = nullptr;
  unsigned vectors = 0, channels = 0;
  FastDivisor by_vectors, by_out_w, by_out_h;  // of a pixel, a row, an image
  WindowDim h, w;
  // AveragePool alone
  bool count_include_pad = false;
  CodeReader reader;
  float x_scale = 1;
  Divider divider;
  CodeRounder rounder;
};

// Which output a thread makes.
struct Output {
  unsigned pixel, image, row, column, channel;
};

template <int kBytes>
__device__ __forceinline__ Output OutputOfThread(const PoolParams& p, unsigned index) {
  Output out;
  out.pixel = Quotient(index, p.by_vectors);
  out.channel = (index - out.pixel * p.by_vectors.divisor) * kBytes;
  const unsigned line = Quotient(out.pixel, p.by_out_w);
  out.column = out.pixel - line * p.by_out_w.divisor;
  out.image = Quotient(line, p.by_out_h);
  out.row = line - out.image * p.by_out_h.divisor;
  return out;
}

// The largest codes so far. A 16-bit maximum orders by its high byte first, so codes 1 and 3 of a word can
// stay in place, whatever is below them, and codes 0 and 2 are shifted there.
template <int kBytes, bool kSigned>
struct Largest {
  static constexpr int kWords = Codes<kBytes>::kWords;
  unsigned even[kWords], odd[kWords];

  __device__ __forceinline__ Largest() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) even[i] = odd[i] = kSigned ? 0x80008000u : 0u;
  }
  __device__ __forceinline__ void Add(const Codes<kBytes>& codes) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kSigned) {
        even[i] = __vmaxs2(even[i], codes.w[i] << 8);
        odd[i] = __vmaxs2(odd[i], codes.w[i]);
      } else {
        even[i] = __vmaxu2(even[i], codes.w[i] << 8);
        odd[i] = __vmaxu2(odd[i], codes.w[i]);
      }
    }
  }
  __device__ __forceinline__ Codes<kBytes> Result() const {
    Codes<kBytes> out;
#pragma unroll
    for (int i = 0; i < kWords; ++i) out.w[i] = __byte_perm(even[i], odd[i], 0x7351);
    return out;
  }
};

// kSide 2 or 3: an undilated window of that many rows and columns, its loads all in flight at once; 0: any.
template <int kBytes, bool kSigned, int kSide>
__global__ void __launch_bounds__(kThreads) MaxPool(const __grid_constant__ PoolParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.vectors) return;
  const Output o = OutputOfThread<kBytes>(p, index);
  Largest<kBytes, kSigned> largest;
  if constexpr (kSide > 0) {
    const int height = static_cast<int>(p.h.in), width = static_cast<int>(p.w.in);
    const int top = static_cast<int>(o.row) * static_cast<int>(p.h.stride) - static_cast<int>(p.h.pad_begin);
    const int left =
        static_cast<int>(o.column) * static_cast<int>(p.w.stride) - static_cast<int>(p.w.pad_begin);
    const int64_t first = (static_cast<int64_t>(o.image) * height + top) * width + left;
    Codes<kBytes> taps[kSide * kSide];
    const Codes<kBytes> lowest = Largest<kBytes, kSigned>().Result();
#pragma unroll
    for (int t = 0; t < kSide * kSide; ++t) {
      const int y = top + t / kSide, x = left + t % kSide;
      const int64_t pixel = first + (t / kSide) * width + t % kSide;
      const bool inside = y >= 0 && y < height && x >= 0 && x < width;
      taps[t] = inside ? LoadCodes<kBytes>(p.x + pixel * p.channels + o.channel) : lowest;
    }
#pragma unroll
    for (int t = 0; t < kSide * kSide; ++t) largest.Add(taps[t]);
  } else {
    const WindowDim::Span rows = p.h.Inside(o.row), columns = p.w.Inside(o.column);
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t line = static_cast<int64_t>(o.image) * p.h.in + rows.first + i * p.h.dilation;
      for (int64_t j = 0; j < columns.count; ++j) {
        const int64_t pixel = line * p.w.in + columns.first + j * p.w.dilation;
        largest.Add(LoadCodes<kBytes>(p.x + pixel * p.channels + o.channel));
      }
    }
  }
  StoreCodes<kBytes>(static_cast<uint8_t*>(p.y) + static_cast<int64_t>(o.pixel) * p.channels + o.channel,
                     largest.Result());
}

// The sums of a thread's channels. Float32, in the definition's order: down each column, then the columns
// from left to right.
template <int kBytes>
struct ColumnSums {
  float sum[kBytes] = {}, column[kBytes] = {};

  __device__ __forceinline__ void Add(const PoolParams& p, unsigned flipped) {
#pragma unroll
    for (int c = 0; c < kBytes; ++c) {
      column[c] = __fadd_rn(column[c], __fmul_rn(CodeValue(flipped, c, p.reader), p.x_scale));
    }
  }
  __device__ __forceinline__ void EndColumn() {
#pragma unroll
    for (int c = 0; c < kBytes; ++c) {
      sum[c] = __fadd_rn(sum[c], column[c]);
      column[c] = 0;
    }
  }
};

template <int kBytes>
__device__ __forceinline__ unsigned LoadTap(const PoolParams& p, const Output& o, int64_t line,
                                            int64_t column) {
  const int64_t pixel = (static_cast<int64_t>(o.image) * p.h.in + line) * p.w.in + column;
  return LoadCodes<kBytes>(p.x + pixel * p.channels + o.channel).w[0] ^ p.reader.flip;
}

template <int kBytes, int kSide>
__device__ __forceinline__ ColumnSums<kBytes> SumTaps(const PoolParams& p, const Output& o,
                                                      const WindowDim::Span& rows,
                                                      const WindowDim::Span& columns) {
  ColumnSums<kBytes> sums;
  if (rows.count == 0) return sums;
  if constexpr (kSide > 0) {
    unsigned taps[kSide][kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        if (i < rows.count && j < columns.count) {
          taps[i][j] = LoadTap<kBytes>(p, o, rows.first + i, columns.first + j);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        if (i < rows.count && j < columns.count) sums.Add(p, taps[i][j]);
      }
      sums.EndColumn();
    }
  } else {
    for (int64_t j = 0; j < columns.count; ++j) {
      for (int64_t i = 0; i < rows.count; ++i) {
        sums.Add(p, LoadTap<kBytes>(p, o, rows.first + i, columns.first + j));
      }
      sums.EndColumn();
    }
  }
  return sums;
}

// kSide as in MaxPool.
template <int kBytes, bool kFast, bool kFloat, int kSide>
__global__ void __launch_bounds__(kThreads) AveragePool(const __grid_constant__ PoolParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.vectors) return;
  const Output o = OutputOfThread<kBytes>(p, index);
  const WindowDim::Span rows = kSide > 0 ? p.h.InsideSmall(static_cast<int>(o.row)) : p.h.Inside(o.row);
  const WindowDim::Span columns =
      kSide > 0 ? p.w.InsideSmall(static_cast<int>(o.column)) : p.w.Inside(o.column);
  const ColumnSums<kBytes> sums = SumTaps<kBytes, kSide>(p, o, rows, columns);
  const int64_t taps = columns.count == 0 ? 0 : rows.count * columns.count;
  const float divisor =
      static_cast<float>(p.count_include_pad ? p.h.Padded(o.row) * p.w.Padded(o.column) : taps);
  const int64_t at = static_cast<int64_t>(o.pixel) * p.channels + o.channel;
  unsigned code[kBytes];
#pragma unroll
  for (int c = 0; c < kBytes; ++c) {
    const float v = __fdiv_rn(sums.sum[c], divisor);
    if constexpr (kFloat) {
      static_cast<float*>(p.y)[at + c] = v;
    } else {
      code[c] = RoundedCode(Divide<kFast>(v, p.divider), p.rounder);
    }
  }
  if constexpr (!kFloat) {
    StoreCodes<kBytes>(static_cast<uint8_t*>(p.y) + at, Codes<kBytes>{{PackCodes(code, p.rounder)}});
  }
}

// A block sums a slab of 16 vectors of channels: 16 threads side by side, 16 of those groups taking turns
// with the pixels. Integer sums are exact in any order. Many pixels and few channels are split over several
// blocks, whose sums a second kernel adds.
constexpr int kSumThreads = 256;
constexpr int kLanes = 16;

struct GlobalParams {
  const uint8_t* x = nullptr;
  void* y = nullptr;
  int32_t* partial = nullptr;  // [splits][images * channels]
  unsigned pixels = 0, channels = 0, images = 0;
  unsigned slabs = 0, splits = 1, pixels_per_split = 0;
  bool is_signed = false, quantized = true;
  int32_t zero_sum = 0;  // pixels * x_zero_point
  float multiplier = 1;
  CodeRounder rounder;
};

__device__ __forceinline__ void FinishGlobal(const GlobalParams& p, int64_t at, int sum) {
  const float v = __fmul_rn(static_cast<float>(sum - p.zero_sum), p.multiplier);
  if (p.quantized) {
    const unsigned code[1] = {RoundedCode(v, p.rounder)};
    static_cast<uint8_t*>(p.y)[at] = static_cast<uint8_t>(PackCodes(code, p.rounder));
  } else {
    static_cast<float*>(p.y)[at] = v;
  }
}

// sums[i] += byte i of the word.
template <bool kSigned>
__device__ __forceinline__ void AddBytes(int word, int (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = DotFour<kSigned>(word, 1 << (8 * i), sums[i]);
}

template <int kBytes, bool kSigned>
__global__ void __launch_bounds__(kSumThreads) GlobalSum(const __grid_constant__ GlobalParams p) {
  __shared__ int sums_of[kLanes][kLanes * kBytes + 1];
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned slab = blockIdx.x % p.slabs, rest = blockIdx.x / p.slabs;
  const unsigned image = rest % p.images, split = rest / p.images;
  const unsigned column = threadIdx.x % kLanes, lane = threadIdx.x / kLanes;
  const unsigned channel = (slab * kLanes + column) * kBytes;
  const unsigned begin = split * p.pixels_per_split, end = min(p.pixels, begin + p.pixels_per_split);
  int sums[4] = {};
  if (channel < p.channels) {
    const uint8_t* x = p.x + static_cast<int64_t>(image) * p.pixels * p.channels + channel;
    // Few pixels are usual: loads past the end are left out, not left to a loop that waits for each.
    constexpr unsigned kAtOnce = 4;
    for (unsigned first = begin + lane; first < end; first += kAtOnce * kLanes) {
      unsigned words[kAtOnce];
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        const unsigned pixel = first + i * kLanes;
        words[i] = pixel < end ? LoadCodes<kBytes>(x + static_cast<int64_t>(pixel) * p.channels).w[0] : 0;
      }
#pragma unroll
      for (const unsigned word : words) AddBytes<kSigned>(static_cast<int>(word), sums);
    }
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i) sums_of[lane][column * kBytes + i] = sums[i];
  __syncthreads();
  const unsigned own = slab * kLanes * kBytes + threadIdx.x;
  if (threadIdx.x >= kLanes * kBytes || own >= p.channels) return;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) sum += sums_of[i][threadIdx.x];
  const int64_t at = static_cast<int64_t>(image) * p.channels + own;
  if (p.splits > 1) {
    p.partial[static_cast<int64_t>(split) * p.images * p.channels + at] = sum;
  } else {
    FinishGlobal(p, at, sum);
  }
}

__global__ void __launch_bounds__(kSumThreads) GlobalFinish(const __grid_constant__ GlobalParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  const int64_t count = static_cast<int64_t>(p.images) * p.channels;
  if (at >= count) return;
  int sum = 0;
  constexpr unsigned kAtOnce = 16;
  for (unsigned first = 0; first < p.splits; first += kAtOnce) {
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      if (first + i < p.splits) sum += p.partial[(first + i) * count + at];
    }
  }
  FinishGlobal(p, at, sum);
}

PoolParams PoolGeometry(const Window& window, const TensorShape& x, const TensorShape& y) {
  PoolParams p;
  const auto dims = WindowDims(window, x.dims.data() + 1, y.dims.data() + 1);
  p.h = dims[0];
  p.w = dims[1];
  p.channels = static_cast<unsigned>(x.dims.back());
  p.vectors = static_cast<unsigned>(CountOf(y.dims));
  p.by_out_w = MakeDivisor(p.w.out);
  p.by_out_h = MakeDivisor(p.h.out);
  return p;
}

// `p` as PoolGeometry made it, in vectors of `unit` channels.
void SetUnit(PoolParams& p, int unit) {
  p.vectors /= static_cast<unsigned>(unit);
  p.by_vectors = MakeDivisor(p.channels / static_cast<unsigned>(unit));
}

// The side of a square window that MaxPool has unrolled, or 0.
int UnrolledSide(const PoolParams& p) {
  constexpr int64_t kSmall = 1 << 14;
  for (const WindowDim* d : {&p.h, &p.w}) {
    if (d->dilation != 1 || d->in > kSmall || d->out > kSmall || d->stride > kSmall) return 0;
  }
  return p.h.kernel == p.w.kernel && (p.h.kernel == 2 || p.h.kernel == 3) ? static_cast<int>(p.h.kernel) : 0;
}

void LaunchMaxPool(PoolParams p, bool is_signed, int side, Queue& queue) {
  cudaError_t error = cudaSuccess;
  const int unit = std::min(CommonUnit({p.x, p.y}), CommonUnit(p.channels));
  SetUnit(p, unit);
  WithBool(is_signed, [&](auto is_signed_) {
    WithInt<16, 4, 1>(unit, [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      constexpr bool kSigned = decltype(is_signed_)::value;
      const dim3 grid = GridFor(p.vectors, kThreads);
      error = side == 3   ? queue.Launch(MaxPool<kBytes, kSigned, 3>, grid, dim3(kThreads), p)
              : side == 2 ? queue.Launch(MaxPool<kBytes, kSigned, 2>, grid, dim3(kThreads), p)
                          : queue.Launch(MaxPool<kBytes, kSigned, 0>, grid, dim3(kThreads), p);
    });
  });
  CheckLaunch(error, "max_pool");
}

template <int kBytes, int kSide>
cudaError_t LaunchAverage(const PoolParams& p, bool quantized, bool fast, Queue& queue) {
  const dim3 grid = GridFor(p.vectors, kThreads);
  return !quantized ? queue.Launch(AveragePool<kBytes, true, true, kSide>, grid, dim3(kThreads), p)
         : fast     ? queue.Launch(AveragePool<kBytes, true, false, kSide>, grid, dim3(kThreads), p)
                    : queue.Launch(AveragePool<kBytes, false, false, kSide>, grid, dim3(kThreads), p);
}

void LaunchAveragePool(PoolParams p, bool quantized, bool fast, int side, Queue& queue) {
  cudaError_t error = cudaSuccess;
  int unit = std::min({4, CommonUnit({p.x}), CommonUnit(p.channels)});
  if (quantized) unit = std::min(unit, CommonUnit({p.y}));
  SetUnit(p, unit);
  WithInt<4, 1>(unit, [&](auto bytes) {
    WithInt<3, 2, 0>(side, [&](auto side_) {
      error = LaunchAverage<decltype(bytes)::value, decltype(side_)::value>(p, quantized, fast, queue);
    });
  });
  CheckLaunch(error, "average_pool");
}

GlobalParams GlobalGeometry(const GlobalAveragePoolNode& node, const TensorShape& x) {
  GlobalParams p;
  const int64_t count = CountOf(x.dims);
  p.images = static_cast<unsigned>(x.dims.front());
  p.channels = static_cast<unsigned>(x.dims.back());
  p.pixels = static_cast<unsigned>(count / std::max<int64_t>(1, int64_t{p.images} * p.channels));
  p.is_signed = node.spec.x_signed;
  p.quantized = node.spec.quantizer.quantized;
  p.rounder = MakeRounder(node.spec.quantizer);
  p.zero_sum = static_cast<int32_t>(p.pixels) * node.x_zero_point;
  const float pixels = static_cast<float>(p.pixels);
  p.multiplier = p.quantized ? node.x_scale / (node.spec.quantizer.scale * pixels) : node.x_scale / pixels;
  return p;
}

// Splits the pixels so that every multiprocessor has work, but leaves a thread at least 32 pixels.
void SplitPixels(GlobalParams& p, int multiprocessors) {
  constexpr unsigned kLeast = 32 * kLanes;
  const int64_t blocks = int64_t{p.images} * ((p.channels + 4 * kLanes - 1) / (4 * kLanes));
  const int64_t wanted = std::max<int64_t>(1, 2 * multiprocessors / std::max<int64_t>(1, blocks));
  p.splits = static_cast<unsigned>(std::min<int64_t>(wanted, std::max(1u, (p.pixels + kLeast - 1) / kLeast)));
  p.pixels_per_split = (p.pixels + p.splits - 1) / p.splits;
}

void LaunchGlobal(GlobalParams p, Queue& queue) {
  const int unit = std::min({4, CommonUnit({p.x}), CommonUnit(p.channels)});
  p.slabs = (p.channels + kLanes * static_cast<unsigned>(unit) - 1) / (kLanes * static_cast<unsigned>(unit));
  const int64_t blocks = int64_t{p.slabs} * p.images * p.splits;
  Require(blocks < int64_t{1} << 31, "a global average of ", p.images, " images is too large");
  cudaError_t error = cudaSuccess;
  WithInt<4, 1>(unit, [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    const dim3 grid(static_cast<unsigned>(blocks));
    error = p.is_signed ? queue.Launch(GlobalSum<kBytes, true>, grid, dim3(kSumThreads), p)
                        : queue.Launch(GlobalSum<kBytes, false>, grid, dim3(kSumThreads), p);
  });
  CheckLaunch(error, "global_average_pool");
  if (p.splits == 1) return;
  const dim3 grid = GridFor(int64_t{p.images} * p.channels, kSumThreads);
  CheckLaunch(queue.Launch(GlobalFinish, grid, dim3(kSumThreads), p), "global_average_pool");
}

}  // namespace

std::unique_ptr<PackedNode> PackMaxPool(const MaxPoolNode& node) {
  return MakeNode([window = node.window, is_signed = node.is_signed](Shapes fed, const TensorShape& y) {
    const PoolParams geometry = PoolGeometry(window, fed[0], y);
    const int side = UnrolledSide(geometry);
    return MakePlan("max_pool" + (side > 0 ? "_side" + std::to_string(side) : std::string()),
                    [geometry, is_signed, side](Fed from, void* to, void*, Queue& queue) {
                      if (geometry.vectors == 0) return;
                      PoolParams p = geometry;
                      p.x = static_cast<const uint8_t*>(from[0]);
                      p.y = to;
                      LaunchMaxPool(p, is_signed, side, queue);
                    });
  });
}

std::unique_ptr<PackedNode> PackAveragePool(const AveragePoolNode& node) {
  return MakeNode([node](Shapes fed, const TensorShape& y) {
    const AverageSpec& spec = node.spec;
    PoolParams geometry = PoolGeometry(node.window, fed[0], y);
    geometry.count_include_pad = node.count_include_pad;
    geometry.reader = MakeReader(spec.x_signed, spec.x_zero_point);
    geometry.x_scale = spec.x_scale;
    geometry.divider = MakeDivider(spec.quantizer.scale);
    geometry.rounder = MakeRounder(spec.quantizer);
    // An average is at most as large as the largest value, but for the roundings of its sum.
    const bool fast = FastDivisionIsExact(spec.quantizer.scale, 512.0 * static_cast<double>(spec.x_scale));
    return MakePlan("average_pool", [geometry, quantized = spec.quantizer.quantized, fast,
                                     side = UnrolledSide(geometry)](Fed from, void* to, void*, Queue& queue) {
      if (geometry.vectors == 0) return;
      PoolParams p = geometry;
      p.x = static_cast<const uint8_t*>(from[0]);
      p.y = to;
      LaunchAveragePool(p, quantized, fast, side, queue);
    });
  });
}

std::unique_ptr<PackedNode> PackGlobalAveragePool(const GlobalAveragePoolNode& node, const Device& device) {
  return MakeNode([node, multiprocessors = device.multiprocessors](Shapes fed, const TensorShape&) {
    GlobalParams geometry = GlobalGeometry(node, fed[0]);
    SplitPixels(geometry, multiprocessors);
    const size_t partial =
        geometry.splits == 1 ? 0 : size_t{geometry.splits} * geometry.images * geometry.channels * 4;
    return MakePlan(
        "global_average_pool" +
            (geometry.splits > 1 ? "_splits" + std::to_string(geometry.splits) : std::string()),
        [geometry](Fed from, void* to, void* workspace, Queue& queue) {
          if (geometry.images == 0 || geometry.channels == 0) return;
          GlobalParams p = geometry;
          p.x = static_cast<const uint8_t*>(from[0]);
          p.y = to;
          p.partial = static_cast<int32_t*>(workspace);
          LaunchGlobal(p, queue);
        },
        (partial + 255) / 256 * 256);
  });
}

}  // namespace lowbit::cuda
