// Cast at the borders of a network: what it is fed as float16, 8-bit or 32-bit integers becomes float32, and float32 leaves
// as float16. Bytes of memory bind it, so a thread moves four neighbours.
#include "kernels/cuda/device/halves.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

template <typename T>
__device__ __forceinline__ float ToFloat(T v) {
  if constexpr (std::is_same_v<T, uint16_t>) {
    return UnpackHalves(v).x;
  } else {
    return static_cast<float>(v);
  }
}

template <typename T>
__device__ __forceinline__ T FromFloat(float v) {
  if constexpr (std::is_same_v<T, uint16_t>) {
    return static_cast<uint16_t>(PackHalves(v, 0.0f));
  } else {
    return v;
  }
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Neighbours {
  T v[kCount];
};

// The bits of a float16 number are a uint16_t here. kCount: 4 or 1 values a thread.
template <typename From, typename To, int kCount>
__global__ void __launch_bounds__(kThreads) CastElements(const __grid_constant__ Tensors<From, To> p) {
  const unsigned at = StartThread() * kCount;
  if (at >= p.count) return;
  Neighbours<To, kCount> y;
  if (p.count - at >= kCount) {
    const auto x = *reinterpret_cast<const Neighbours<From, kCount>*>(p.x + at);
#pragma unroll
    for (int i = 0; i < kCount; ++i) y.v[i] = FromFloat<To>(ToFloat(x.v[i]));
    *reinterpret_cast<Neighbours<To, kCount>*>(p.y + at) = y;
    return;
  }
  for (unsigned i = at; i < p.count; ++i) p.y[i] = FromFloat<To>(ToFloat(p.x[i]));
}

template <typename From, typename To>
NodePlanPtr PlanCast(unsigned count) {
  Tensors<From, To> geometry;
  geometry.count = count;
  return MakeKernelPlan("cast", geometry, [](const Run& run, const Tensors<From, To>& p) {
    if (CommonUnit({p.x, p.y}) < 16) return run.LaunchFor(p.count, CastElements<From, To, 1>, kThreads, p);
    run.LaunchFor(BlocksFor(p.count, 4), CastElements<From, To, 4>, kThreads, p);
  });
}

}  // namespace

PackedNodePtr Pack(const CastOp& op, const Device&) {
  return MakeNode([to = op.to](Shapes fed, const TensorShape& y) {
    const auto count = static_cast<unsigned>(CountOf(y.dims));
    if (to == ElementType::kFloat16) return PlanCast<float, uint16_t>(count);
    switch (fed[0].type) {
      case ElementType::kUInt8:
        return PlanCast<uint8_t, float>(count);
      case ElementType::kInt8:
        return PlanCast<int8_t, float>(count);
      case ElementType::kInt32:
        return PlanCast<int32_t, float>(count);
      case ElementType::kFloat16:
        return PlanCast<uint16_t, float>(count);
      case ElementType::kFloat:
        break;
    }
    Fail("float32 is cast to float16 alone");
  });
}

}  // namespace lowbit::cuda
