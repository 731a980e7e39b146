// Pools of images whose channels lie last, and what makes such images of others. A thread has 8 channels of a
// pixel; neighbouring threads have neighbouring pixels where an image is read or made whose pixels lie side
// by side.
#include <cfloat>
#include <memory>

#include "kernels/cuda/device/mma_float.cuh"
#include "kernels/cuda/nodes/nhwc_tensors.h"
#include "kernels/cuda/nodes/pool_window.cuh"

namespace lowbit::cuda {
namespace {

struct NhwcPoolParams : Tensors<void, void> {  // count: threads
  unsigned channels = 0, pixels = 0;           // of an image of x
  FastDivisor by_eights, by_out_pixels;        // threads of a pixel, pixels of an image of y
  Windows windows;
};

struct Eight {
  float v[kChannelsOfThread];

  // The same as they lie.
  struct Floats {
    float4 low, high;
  };
  template <typename Number>
  using Raw = std::conditional_t<std::is_same_v<Number, uint16_t>, uint4, Floats>;

  __device__ __forceinline__ static Eight From(const uint4& words) {
    const float2 a = UnpackHalves(words.x), b = UnpackHalves(words.y), c = UnpackHalves(words.z),
                 d = UnpackHalves(words.w);
    return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
  }
  __device__ __forceinline__ static Eight From(const Floats& of) {
    return {{of.low.x, of.low.y, of.low.z, of.low.w, of.high.x, of.high.y, of.high.z, of.high.w}};
  }
  template <typename Number>
  __device__ __forceinline__ static Eight Load(const Number* x) {
    return From(*reinterpret_cast<const Raw<Number>*>(x));
  }
  __device__ __forceinline__ static Eight LoadApart(const float* x, int64_t step) {
    Eight out;
#pragma unroll
    for (int i = 0; i < kChannelsOfThread; ++i) out.v[i] = x[i * step];
    return out;
  }
  __device__ __forceinline__ void Store(uint16_t* y) const {
    *reinterpret_cast<uint4*>(y) = make_uint4(PackHalves(v[0], v[1]), PackHalves(v[2], v[3]),
                                              PackHalves(v[4], v[5]), PackHalves(v[6], v[7]));
  }
  __device__ __forceinline__ void Store(float* y) const {
    *reinterpret_cast<float4*>(y) = make_float4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<float4*>(y + 4) = make_float4(v[4], v[5], v[6], v[7]);
  }
  __device__ __forceinline__ void StoreApart(float* y, int64_t step) const {
#pragma unroll
    for (int i = 0; i < kChannelsOfThread; ++i) y[i * step] = v[i];
  }
};

// The largest numbers of windows. Windows of one tap only change how an image lies. kHalves: with the
// channels last numbers are float16; kFromLast, kToLast: they do in x, in y. kSide: at most so many taps
// along either side, all of which are loaded at once; 0: any.
template <bool kHalves, bool kFromLast, bool kToLast, int kSide>
__global__ void __launch_bounds__(kThreads) NhwcMaxPool(const __grid_constant__ NhwcPoolParams p) {
  using Number = std::conditional_t<kHalves, uint16_t, float>;
  const unsigned index = StartThread();
  if (index >= p.count) return;
  unsigned pixel = 0, eight = 0;
  if constexpr (kFromLast && kToLast) {
    const auto [at, vector] = Divided(index, p.by_eights);
    pixel = at, eight = vector;
  } else {
    const auto [line, at] = Divided(index, p.by_out_pixels);
    const auto [image, vector] = Divided(line, p.by_eights);
    pixel = image * p.by_out_pixels.divisor + at, eight = vector;
  }
  const unsigned channel = eight * kChannelsOfThread;
  const auto [image, row, column] = p.windows.PlaceOf(pixel);
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const WindowDim::Span rows = h.Inside(row), columns = w.Inside(column);
  Eight largest;
#pragma unroll
  for (float& v : largest.v) v = -FLT_MAX;
  const bool is_copied = h.kernel == 1 && w.kernel == 1;
  if constexpr (kSide > 0) {
    static_assert(kFromLast && kToLast);
    Number* const y = static_cast<Number*>(p.y) + static_cast<int64_t>(pixel) * p.channels + channel;
    if (rows.count == 0 || columns.count == 0) return largest.Store(y);
    const Number* const x =
        static_cast<const Number*>(p.x) +
        (static_cast<int64_t>(image) * p.pixels + rows.first * w.in + columns.first) * p.channels + channel;
    typename Eight::Raw<Number> found[kSide * kSide];
#pragma unroll
    for (int t = 0; t < kSide * kSide; ++t) {
      // Taps that are not there are others once more.
      const int64_t i = min(static_cast<int64_t>(t / kSide), rows.count - 1) * h.dilation;
      const int64_t j = min(static_cast<int64_t>(t % kSide), columns.count - 1) * w.dilation;
      found[t] = *reinterpret_cast<const typename Eight::Raw<Number>*>(x + (i * w.in + j) * p.channels);
    }
#pragma unroll
    for (const auto& raw : found) {
      const Eight of_tap = Eight::From(raw);
#pragma unroll
      for (int c = 0; c < kChannelsOfThread; ++c) {
        if (of_tap.v[c] > largest.v[c]) largest.v[c] = of_tap.v[c];
      }
    }
    largest.Store(y);
  } else {
    for (int64_t i = 0; i < rows.count; ++i) {
      for (int64_t j = 0; j < columns.count; ++j) {
        const int64_t at = (rows.first + i * h.dilation) * w.in + columns.first + j * w.dilation;
        Eight found;
        if constexpr (kFromLast) {
          found = Eight::Load(static_cast<const Number*>(p.x) +
                              (static_cast<int64_t>(image) * p.pixels + at) * p.channels + channel);
        } else {
          const int64_t plane = static_cast<int64_t>(image) * p.channels + channel;
          found = Eight::LoadApart(static_cast<const float*>(p.x) + plane * p.pixels + at, p.pixels);
        }
#pragma unroll
        for (int c = 0; c < kChannelsOfThread; ++c) {
          if (is_copied || found.v[c] > largest.v[c]) largest.v[c] = found.v[c];
        }
      }
    }
    if constexpr (kToLast) {
      largest.Store(static_cast<Number*>(p.y) + static_cast<int64_t>(pixel) * p.channels + channel);
    } else {
      const unsigned out_pixels = p.by_out_pixels.divisor;
      const int64_t plane = static_cast<int64_t>(image) * p.channels + channel;
      largest.StoreApart(static_cast<float*>(p.y) + plane * out_pixels + pixel - image * out_pixels,
                         out_pixels);
    }
  }
}

struct FewChannelsParams : Tensors<float, void> {  // count: squares of y, with those behind the last row
  unsigned lines = 0, in_channels = 0;
  int in_h = 0, in_w = 0, top = 0, left = 0;
  FastDivisor by_columns, by_rows;  // of y
};

template <bool kHalves, int kFold, int kChannels>
__global__ void __launch_bounds__(kThreads) ToFewChannels(const __grid_constant__ FewChannelsParams p) {
  const unsigned index = StartThread();
  if (index >= p.count) return;
  const auto [line, column] = Divided(index, p.by_columns);
  const auto [image, row] = Divided(line, p.by_rows);
  const int64_t plane = static_cast<int64_t>(p.in_h) * p.in_w;
#pragma unroll
  for (int pixel = 0; pixel < kFold * kFold; ++pixel) {
    const int y = static_cast<int>(row) * kFold + pixel / kFold - p.top;
    const int x = static_cast<int>(column) * kFold + pixel % kFold - p.left;
    float v[kChannels] = {};
    if (line < p.lines && y >= 0 && y < p.in_h && x >= 0 && x < p.in_w) {
      const float* const from = p.x + static_cast<int64_t>(image) * p.in_channels * plane + y * p.in_w + x;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (c < p.in_channels) v[c] = from[c * plane];
      }
    }
#pragma unroll
    for (int c = 0; c < kChannels; c += 4) {
      const int64_t four = (static_cast<int64_t>(index) * kFold * kFold + pixel) * (kChannels / 4) + c / 4;
      if constexpr (kHalves) {
        static_cast<uint2*>(p.y)[four] =
            make_uint2(PackHalves(v[c], v[c + 1]), PackHalves(v[c + 2], v[c + 3]));
      } else {
        static_cast<float4*>(p.y)[four] = make_float4(v[c], v[c + 1], v[c + 2], v[c + 3]);
      }
    }
  }
}

// Means of all pixels of an image, to float32, in the order of sums of images that lie as ONNX has them
// (float_ops.cu): 32 threads take turns with the pixels, then the sums of the second half of them are added
// to those of the first, and so on.
constexpr unsigned kMeansOfBlock = kThreads / kWarp * kChannelsOfThread;  // channels

template <bool kHalves>
__global__ void __launch_bounds__(kThreads) NhwcMeans(const __grid_constant__ NhwcPoolParams p) {
  using Number = std::conditional_t<kHalves, uint16_t, float>;
  __shared__ float parts[kWarp][kMeansOfBlock];
  LetSuccessorsStart();
  WaitForPredecessors();
  const auto [image, block] = Divided(blockIdx.x, p.by_eights);
  constexpr unsigned kAcross = kMeansOfBlock / kChannelsOfThread;
  const unsigned part = threadIdx.x / kAcross, first = threadIdx.x % kAcross * kChannelsOfThread;
  const unsigned channel = block * kMeansOfBlock + first;
  Eight sum = {};
  if (channel < p.channels) {
    const Number* const x =
        static_cast<const Number*>(p.x) + static_cast<int64_t>(image) * p.pixels * p.channels + channel;
#pragma unroll 4
    for (unsigned i = part; i < p.pixels; i += kWarp) {
      const Eight found = Eight::Load(x + static_cast<int64_t>(i) * p.channels);
#pragma unroll
      for (int c = 0; c < kChannelsOfThread; ++c) sum.v[c] = __fadd_rn(sum.v[c], found.v[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kChannelsOfThread; ++c) parts[part][first + c] = sum.v[c];
  __syncthreads();
  const unsigned own = block * kMeansOfBlock + threadIdx.x;
  if (threadIdx.x >= kMeansOfBlock || own >= p.channels) return;
  float sums[kWarp];
#pragma unroll
  for (int i = 0; i < kWarp; ++i) sums[i] = parts[i][threadIdx.x];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) sums[i] = __fadd_rn(sums[i], sums[i + step]);
  }
  static_cast<float*>(p.y)[static_cast<int64_t>(image) * p.channels + own] =
      __fdiv_rn(sums[0], static_cast<float>(p.pixels));
}

NhwcPoolParams Geometry(const TensorShape& x) {
  NhwcPoolParams p;
  p.channels = static_cast<unsigned>(x.dims[1]);
  p.pixels = static_cast<unsigned>(CountOf(std::span(x.dims).subspan(2)));
  p.by_eights = MakeDivisor(std::max(1u, p.channels / kChannelsOfThread));
  return p;
}

NhwcPoolParams Geometry(const Window& window, const TensorShape& x, const TensorShape& y) {
  NhwcPoolParams p = Geometry(x);
  p.windows = WindowsOf(window, x.dims.data() + 2, y.dims.data() + 2);
  p.by_out_pixels = MakeDivisor(std::max<int64_t>(1, CountOf(std::span(y.dims).subspan(2))));
  p.count = static_cast<unsigned>(CountOf(y.dims) / kChannelsOfThread);
  return p;
}

void LaunchMaxPool(const Run& run, bool halves, const ChannelsLast& last, const NhwcPoolParams& p) {
  constexpr int kSmall = 3;
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const bool is_small = last.Has(0) && last.y && std::max(h.kernel, w.kernel) <= kSmall;
  std::visit(
      [&](auto half, auto from, auto to) {
        if constexpr (from && to) {
          if (is_small) return run.LaunchFor(p.count, NhwcMaxPool<half, true, true, kSmall>, kThreads, p);
        }
        run.LaunchFor(p.count, NhwcMaxPool<half, from, to, 0>, kThreads, p);
      },
      OneOf(halves), OneOf(last.Has(0)), OneOf(last.y));
}

NodePlanPtr PlanMaxPool(const FloatPoolOp& op, bool halves, const ChannelsLast& last, const TensorShape& x,
                        const TensorShape& y) {
  const char* const from = last.Has(0) ? "" : " from nchw";
  const char* const to = last.y ? "" : " to nchw";
  return MakeKernelPlan(
      std::string("nhwc_max_pool") + from + to, Geometry(WindowOf(op, x.dims), x, y),
      [=](const Run& run, const NhwcPoolParams& p) { LaunchMaxPool(run, halves, last, p); });
}

NodePlanPtr PlanMeans(bool halves, const TensorShape& x, const TensorShape& y) {
  NhwcPoolParams geometry = Geometry(x);
  geometry.count = static_cast<unsigned>(CountOf(y.dims));
  geometry.by_eights = MakeDivisor(BlocksFor(geometry.channels, kMeansOfBlock));
  const auto blocks = static_cast<unsigned>(x.dims[0] * geometry.by_eights.divisor);
  return MakeKernelPlan("nhwc_global_pool", geometry, [=](const Run& run, const NhwcPoolParams& p) {
    run.Launch(halves ? NhwcMeans<true> : NhwcMeans<false>, dim3(blocks), kThreads, p);
  });
}

class NhwcPool final : public PackedNode {
 public:
  NhwcPool(FloatPoolOp op, bool halves, std::shared_ptr<const PackedNode> plain,
           const ChannelsLast& last = {})
      : op_(op), halves_(halves), plain_(std::move(plain)), last_(last) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    if (last_ == ChannelsLast{}) return plain_->Plan(fed, y);
    return IsMax() ? PlanMaxPool(op_, halves_, last_, fed[0], y) : PlanMeans(halves_, fed[0], y);
  }
  bool MayMakeChannelsLast(Shapes fed) const override { return IsMax() && FitsChannelsLast(fed[0]); }
  bool MayReadChannelsLast(Shapes fed, size_t) const override {
    return (IsMax() || op_.kind == FloatPoolOp::Kind::kGlobalAverage) && FitsChannelsLast(fed[0]);
  }
  PackedNodePtr InChannelsLast(const ChannelsLast& last) const override {
    return std::make_unique<NhwcPool>(op_, halves_, plain_, last);
  }

 private:
  bool IsMax() const { return op_.kind == FloatPoolOp::Kind::kMax; }

  FloatPoolOp op_;
  bool halves_;
  std::shared_ptr<const PackedNode> plain_;
  ChannelsLast last_;
};

}  // namespace

bool FitsChannelsLast(const TensorShape& image) {
  const size_t rank = image.dims.size();
  return image.type == ElementType::kFloat && (rank == 3 || rank == 4) && image.dims[1] > 0 &&
         image.dims[1] % kChannelsOfThread == 0;
}

void LaunchToNhwc(const Run& run, bool halves, const float* x, void* y, const TensorShape& image) {
  Window one;
  one.spatial = static_cast<int>(image.dims.size()) - 2;
  NhwcPoolParams p = Geometry(one, image, image);
  if (p.count == 0) return;
  p.x = x, p.y = y;
  LaunchMaxPool(run, halves, {.y = true}, p);
}

void LaunchToFewChannels(const Run& run, const float* x, void* y, const TensorShape& image,
                         const FewChannelsImage& to) {
  const int64_t count = to.Bytes() / to.SquareBytes();
  Require(count < int64_t{1} << 31, "an image of ", count, " pixels with its padding is too large");
  FewChannelsParams p;
  p.x = x, p.y = y;
  p.count = static_cast<unsigned>(count);
  p.lines = static_cast<unsigned>(to.images * to.rows);
  p.in_channels = static_cast<unsigned>(image.dims[1]);
  p.in_h = image.dims.size() == 4 ? static_cast<int>(image.dims[2]) : 1;
  p.in_w = static_cast<int>(image.dims.back());
  p.top = to.top, p.left = to.left;
  p.by_columns = MakeDivisor(to.columns), p.by_rows = MakeDivisor(to.rows);
  if (to.fold == 2) {
    Require(to.halves && to.channels == 4, "squares of pixels are of 4 channels in float16");
    return run.LaunchFor(p.count, ToFewChannels<true, 2, 4>, kThreads, p);
  }
  std::visit([&](auto halves,
                 auto channels) { run.LaunchFor(p.count, ToFewChannels<halves, 1, channels>, kThreads, p); },
             OneOf(to.halves), OneOf<4, 8>(to.channels));
}

PackedNodePtr PackTurn(FloatPrecision precision) {
  return MakeNode([halves = BytesOfNumber(precision) == 2](Shapes fed, const TensorShape&) {
    return MakePlan("to_nhwc", [=, image = fed[0]](const Run& run) {
      LaunchToNhwc(run, halves, static_cast<const float*>(run.fed[0]), run.y, image);
    });
  });
}

PackedNodePtr PackNhwcPool(const FloatPoolOp& op, FloatPrecision precision, PackedNodePtr plain) {
  return std::make_unique<NhwcPool>(op, BytesOfNumber(precision) == 2, std::move(plain));
}

}  // namespace lowbit::cuda
