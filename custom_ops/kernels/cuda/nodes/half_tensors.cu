// Pools of images of float16 numbers, and what makes such images of float32 ones. A thread has 8 channels of a pixel;
// neighbouring threads have neighbouring pixels where float32 is read or made, whose pixels lie side by side.
#include "kernels/cuda/nodes/half_tensors.h"

#include <cfloat>
#include <memory>

#include "kernels/cuda/device/mma_float.cuh"
#include "kernels/cuda/nodes/pool_window.cuh"

namespace lowbit::cuda {
namespace {

struct HalfPoolParams : Tensors<void, void> {  // count: threads
  unsigned channels = 0, pixels = 0;           // of an image of x
  FastDivisor by_eights, by_out_pixels;        // threads of a pixel, pixels of an image of y
  Windows windows;
};

struct Eight {
  float v[kHalvesOfThread];

  __device__ __forceinline__ static Eight Load(const uint16_t* x) {
    const uint4 words = *reinterpret_cast<const uint4*>(x);
    const float2 a = UnpackHalves(words.x), b = UnpackHalves(words.y), c = UnpackHalves(words.z),
                 d = UnpackHalves(words.w);
    return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
  }
  __device__ __forceinline__ static Eight Load(const float* x, int64_t step) {
    Eight out;
#pragma unroll
    for (int i = 0; i < kHalvesOfThread; ++i) out.v[i] = x[i * step];
    return out;
  }
  __device__ __forceinline__ void Store(uint16_t* y) const {
    *reinterpret_cast<uint4*>(y) = make_uint4(PackHalves(v[0], v[1]), PackHalves(v[2], v[3]),
                                              PackHalves(v[4], v[5]), PackHalves(v[6], v[7]));
  }
  __device__ __forceinline__ void Store(float* y, int64_t step) const {
#pragma unroll
    for (int i = 0; i < kHalvesOfThread; ++i) y[i * step] = v[i];
  }
};

// The largest numbers of windows. Windows of one tap only change how an image lies.
template <bool kFromHalves, bool kToHalves>
__global__ void __launch_bounds__(kThreads) HalfMaxPool(const __grid_constant__ HalfPoolParams p) {
  const unsigned index = StartThread();
  if (index >= p.count) return;
  unsigned pixel = 0, eight = 0;
  if constexpr (kFromHalves && kToHalves) {
    const auto [at, vector] = Divided(index, p.by_eights);
    pixel = at, eight = vector;
  } else {
    const auto [line, at] = Divided(index, p.by_out_pixels);
    const auto [image, vector] = Divided(line, p.by_eights);
    pixel = image * p.by_out_pixels.divisor + at, eight = vector;
  }
  const unsigned channel = eight * kHalvesOfThread;
  const auto [image, row, column] = p.windows.PlaceOf(pixel);
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const WindowDim::Span rows = h.Inside(row), columns = w.Inside(column);
  Eight largest;
#pragma unroll
  for (float& v : largest.v) v = -FLT_MAX;
  const bool is_copied = h.kernel == 1 && w.kernel == 1;
  for (int64_t i = 0; i < rows.count; ++i) {
    for (int64_t j = 0; j < columns.count; ++j) {
      const int64_t at = (rows.first + i * h.dilation) * w.in + columns.first + j * w.dilation;
      Eight found;
      if constexpr (kFromHalves) {
        found = Eight::Load(static_cast<const uint16_t*>(p.x) +
                            (static_cast<int64_t>(image) * p.pixels + at) * p.channels + channel);
      } else {
        found = Eight::Load(
            static_cast<const float*>(p.x) + (static_cast<int64_t>(image) * p.channels + channel) * p.pixels + at,
            p.pixels);
      }
#pragma unroll
      for (int c = 0; c < kHalvesOfThread; ++c) {
        if (is_copied || found.v[c] > largest.v[c]) largest.v[c] = found.v[c];
      }
    }
  }
  if constexpr (kToHalves) {
    largest.Store(static_cast<uint16_t*>(p.y) + static_cast<int64_t>(pixel) * p.channels + channel);
  } else {
    const unsigned out_pixels = p.by_out_pixels.divisor;
    largest.Store(static_cast<float*>(p.y) +
                      (static_cast<int64_t>(image) * p.channels + channel) * out_pixels + pixel - image * out_pixels,
                  out_pixels);
  }
}

struct FewHalvesParams : Tensors<float, void> {  // count: pixels of y, with those behind the last row
  unsigned lines = 0, in_channels = 0;
  int in_h = 0, in_w = 0, top = 0, left = 0;
  FastDivisor by_columns, by_rows;  // of y
};

template <int kChannels>
__global__ void __launch_bounds__(kThreads) ToFewHalves(const __grid_constant__ FewHalvesParams p) {
  const unsigned index = StartThread();
  if (index >= p.count) return;
  const auto [line, column] = Divided(index, p.by_columns);
  const auto [image, row] = Divided(line, p.by_rows);
  const int y = static_cast<int>(row) - p.top, x = static_cast<int>(column) - p.left;
  float v[kChannels] = {};
  if (line < p.lines && y >= 0 && y < p.in_h && x >= 0 && x < p.in_w) {
    const int64_t plane = static_cast<int64_t>(p.in_h) * p.in_w;
    const float* const from = p.x + static_cast<int64_t>(image) * p.in_channels * plane + y * p.in_w + x;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c < p.in_channels) v[c] = from[c * plane];
    }
  }
  uint2* const to = static_cast<uint2*>(p.y) + static_cast<int64_t>(index) * (kChannels / 4);
#pragma unroll
  for (int c = 0; c < kChannels; c += 4) {
    to[c / 4] = make_uint2(PackHalves(v[c], v[c + 1]), PackHalves(v[c + 2], v[c + 3]));
  }
}

// Means of all pixels of an image, to float32: 32 threads side by side, the others of a block
// take turns with the pixels.
__global__ void __launch_bounds__(kThreads) HalfGlobalPool(const __grid_constant__ HalfPoolParams p) {
  constexpr int kParts = kThreads / kWarp;
  __shared__ float parts[kParts][kWarp * 2];
  LetSuccessorsStart();
  WaitForPredecessors();
  const auto [image, block] = Divided(blockIdx.x, p.by_eights);
  const unsigned lane = threadIdx.x % kWarp, part = threadIdx.x / kWarp, channel = (block * kWarp + lane) * 2;
  float2 sum = {0, 0};
  if (channel < p.channels) {
    const auto* x = static_cast<const uint16_t*>(p.x) + static_cast<int64_t>(image) * p.pixels * p.channels + channel;
#pragma unroll 8
    for (unsigned i = part; i < p.pixels; i += kParts) {
      const float2 v = UnpackHalves(*reinterpret_cast<const unsigned*>(x + static_cast<int64_t>(i) * p.channels));
      sum.x = __fadd_rn(sum.x, v.x), sum.y = __fadd_rn(sum.y, v.y);
    }
  }
  parts[part][2 * lane] = sum.x, parts[part][2 * lane + 1] = sum.y;
  __syncthreads();
  const unsigned own = block * kWarp * 2 + threadIdx.x;
  if (threadIdx.x >= kWarp * 2 || own >= p.channels) return;
  float all = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) all = __fadd_rn(all, parts[i][threadIdx.x]);
  static_cast<float*>(p.y)[static_cast<int64_t>(image) * p.channels + own] =
      __fdiv_rn(all, static_cast<float>(p.pixels));
}

HalfPoolParams Geometry(const TensorShape& x) {
  HalfPoolParams p;
  p.channels = static_cast<unsigned>(x.dims[1]);
  p.pixels = static_cast<unsigned>(CountOf(std::span(x.dims).subspan(2)));
  p.by_eights = MakeDivisor(std::max(1u, p.channels / kHalvesOfThread));
  return p;
}

HalfPoolParams Geometry(const Window& window, const TensorShape& x, const TensorShape& y) {
  HalfPoolParams p = Geometry(x);
  p.windows = WindowsOf(window, x.dims.data() + 2, y.dims.data() + 2);
  p.by_out_pixels = MakeDivisor(std::max<int64_t>(1, CountOf(std::span(y.dims).subspan(2))));
  p.count = static_cast<unsigned>(CountOf(y.dims) / kHalvesOfThread);
  return p;
}

void Launch(const Run& run, bool from_halves, bool to_halves, const HalfPoolParams& p) {
  std::visit([&](auto from, auto to) { run.LaunchFor(p.count, HalfMaxPool<from, to>, kThreads, p); },
             OneOf(from_halves), OneOf(to_halves));
}

NodePlanPtr PlanMaxPool(const FloatPoolOp& op, const HalfTensors& halves, const TensorShape& x,
                        const TensorShape& y) {
  const std::string text = std::string("half_pool") + (halves.Has(0) ? "" : " of float32") + (halves.y ? "" : " to float32");
  return MakeKernelPlan(text, Geometry(WindowOf(op, x.dims), x, y), [=](const Run& run, const HalfPoolParams& p) {
    Launch(run, halves.Has(0), halves.y, p);
  });
}

NodePlanPtr PlanGlobalPool(const TensorShape& x, const TensorShape& y) {
  constexpr int kOfBlock = 2 * kWarp;
  HalfPoolParams geometry = Geometry(x);
  geometry.count = static_cast<unsigned>(CountOf(y.dims));
  geometry.by_eights = MakeDivisor(BlocksFor(geometry.channels, kOfBlock));
  const auto blocks = static_cast<unsigned>(x.dims[0] * geometry.by_eights.divisor);
  return MakeKernelPlan("half_global_pool", geometry, [blocks](const Run& run, const HalfPoolParams& p) {
    run.Launch(HalfGlobalPool, dim3(blocks), kThreads, p);
  });
}

class FloatPool final : public PackedNode {
 public:
  FloatPool(FloatPoolOp op, std::shared_ptr<const PackedNode> of_floats, const HalfTensors& halves = {})
      : op_(op), of_floats_(std::move(of_floats)), halves_(halves) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    if (halves_ == HalfTensors{}) return of_floats_->Plan(fed, y);
    return IsMax() ? PlanMaxPool(op_, halves_, fed[0], y) : PlanGlobalPool(fed[0], y);
  }
  bool MayMakeHalves(Shapes fed) const override { return IsMax() && FitsHalves(fed[0]); }
  bool MayReadHalves(Shapes fed, size_t) const override {
    return (IsMax() || op_.kind == FloatPoolOp::Kind::kGlobalAverage) && FitsHalves(fed[0]);
  }
  PackedNodePtr InHalves(const HalfTensors& halves) const override {
    return std::make_unique<FloatPool>(op_, of_floats_, halves);
  }

 private:
  bool IsMax() const { return op_.kind == FloatPoolOp::Kind::kMax; }

  FloatPoolOp op_;
  std::shared_ptr<const PackedNode> of_floats_;
  HalfTensors halves_;
};

}  // namespace

bool FitsHalves(const TensorShape& image) {
  const size_t rank = image.dims.size();
  return image.type == ElementType::kFloat && (rank == 3 || rank == 4) && image.dims[1] > 0 &&
         image.dims[1] % kHalvesOfThread == 0;
}

void LaunchToHalves(const Run& run, const float* x, void* y, const TensorShape& image) {
  Window one;
  one.spatial = static_cast<int>(image.dims.size()) - 2;
  HalfPoolParams p = Geometry(one, image, image);
  if (p.count == 0) return;
  p.x = x, p.y = y;
  Launch(run, false, true, p);
}

void LaunchToFewHalves(const Run& run, const float* x, void* y, const TensorShape& image, const FewHalves& to) {
  FewHalvesParams p;
  p.x = x, p.y = y;
  const int64_t count = to.Bytes() / (to.channels * 2);
  Require(count < int64_t{1} << 31, "an image of ", count, " pixels with its padding is too large");
  p.count = static_cast<unsigned>(count);
  p.lines = static_cast<unsigned>(to.images * to.rows);
  p.in_channels = static_cast<unsigned>(image.dims[1]);
  p.in_h = image.dims.size() == 4 ? static_cast<int>(image.dims[2]) : 1;
  p.in_w = static_cast<int>(image.dims.back());
  p.top = to.top, p.left = to.left;
  p.by_columns = MakeDivisor(to.columns), p.by_rows = MakeDivisor(to.rows);
  std::visit([&](auto channels) { run.LaunchFor(p.count, ToFewHalves<channels>, kThreads, p); },
             OneOf<4, 8>(to.channels));
}

PackedNodePtr PackHalfPool(const FloatPoolOp& op, PackedNodePtr of_floats) {
  return std::make_unique<FloatPool>(op, std::move(of_floats));
}

}  // namespace lowbit::cuda
