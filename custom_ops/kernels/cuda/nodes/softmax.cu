// LowBitSoftmax: entries of a table by the distance from the largest code of a row, over their sum. Integer
// sums are exact in any order.
#include <algorithm>

#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kTableSize = 256;

struct CodeSoftmaxParams : Tensors<uint8_t, uint8_t> {  // count: codes
  unsigned rows = 0, size = 0;                          // softmax runs over `size` codes
  FastDivisor inner;                                    // which lie this far apart
  uint32_t flip = 0;                                    // four times 128 where codes are signed
  const int32_t* table = nullptr;
  float scale = 1;
  CodeRounder rounder;
};

// What an entry is multiplied by.
__device__ __forceinline__ float MultiplierOf(const CodeSoftmaxParams& p, int64_t sum) {
  return __fdiv_rn(1.0f, __fmul_rn(static_cast<float>(sum), p.scale));
}

// The table in shared memory, for all threads of the block.
__device__ __forceinline__ void FetchTable(const int32_t* from, int32_t* table) {
  for (int i = static_cast<int>(threadIdx.x); i < kTableSize; i += kThreads) table[i] = from[i];
  __syncthreads();
}

// Rows whose codes lie side by side, one by kGroup threads, kCodes of them at a time.
template <int kGroup, int kCodes>
__global__ void __launch_bounds__(kThreads) SoftmaxRows(const __grid_constant__ CodeSoftmaxParams p) {
  __shared__ int32_t table[kTableSize];
  LetSuccessorsStart();
  WaitForPredecessors();
  FetchTable(p.table, table);
  const unsigned row = blockIdx.x * (kThreads / kGroup) + threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const bool inside =
      row < p.rows;  // where not, the group computes the last row: others of its warp wait for it
  const int64_t first = static_cast<int64_t>(inside ? row : p.rows - 1) * p.size;
  const auto codes_at = [&](unsigned i) {
    Codes<kCodes> codes = LoadCodes<kCodes>(p.x + first + i);
    codes.w[0] ^= kCodes == 1 ? p.flip & 255u : p.flip;
    return codes;
  };
  unsigned most = 0;
  for (unsigned i = lane * kCodes; i < p.size; i += kGroup * kCodes) {
    const Codes<kCodes> codes = codes_at(i);
#pragma unroll
    for (int c = 0; c < kCodes; ++c) most = max(most, codes[c]);
  }
  most = CombineGroup<kGroup>(most, [](unsigned a, unsigned b) { return max(a, b); });
  int64_t sum = 0;
  for (unsigned i = lane * kCodes; i < p.size; i += kGroup * kCodes) {
    const Codes<kCodes> codes = codes_at(i);
#pragma unroll
    for (int c = 0; c < kCodes; ++c) sum += table[most - codes[c]];
  }
  sum = CombineGroup<kGroup>(sum, [](int64_t a, int64_t b) { return a + b; });
  if (!inside) return;
  const float multiplier = MultiplierOf(p, sum);
  for (unsigned i = lane * kCodes; i < p.size; i += kGroup * kCodes) {
    const Codes<kCodes> codes = codes_at(i);
    const auto value = [&](int c) {
      return __fmul_rn(static_cast<float>(table[most - codes[c]]), multiplier);
    };
    StoreCodes(p.y + first + i, RoundCodes<kCodes>(p.rounder, value));
  }
}

// Rows whose codes lie apart: a thread has kCodes neighbouring ones.
template <int kCodes>
__global__ void __launch_bounds__(kThreads) SoftmaxColumns(const __grid_constant__ CodeSoftmaxParams p) {
  __shared__ int32_t table[kTableSize];
  const unsigned index = StartThread();
  FetchTable(p.table, table);
  if (index >= p.rows / kCodes) return;
  // A row of vectors is kCodes times as short as one of codes.
  const auto [outer, column] = Divided(index * kCodes, p.inner);
  const int64_t step = p.inner.divisor, first = outer * p.size * step + column;
  const auto codes_at = [&](unsigned i) {
    Codes<kCodes> codes = LoadCodes<kCodes>(p.x + first + i * step);
    codes.w[0] ^= kCodes == 1 ? p.flip & 255u : p.flip;
    return codes;
  };
  unsigned most[kCodes] = {};
  for (unsigned i = 0; i < p.size; ++i) {
    const Codes<kCodes> codes = codes_at(i);
#pragma unroll
    for (int c = 0; c < kCodes; ++c) most[c] = max(most[c], codes[c]);
  }
  int64_t sums[kCodes] = {};
  for (unsigned i = 0; i < p.size; ++i) {
    const Codes<kCodes> codes = codes_at(i);
#pragma unroll
    for (int c = 0; c < kCodes; ++c) sums[c] += table[most[c] - codes[c]];
  }
  float multipliers[kCodes];
#pragma unroll
  for (int c = 0; c < kCodes; ++c) multipliers[c] = MultiplierOf(p, sums[c]);
  for (unsigned i = 0; i < p.size; ++i) {
    const Codes<kCodes> codes = codes_at(i);
    const auto value = [&](int c) {
      return __fmul_rn(static_cast<float>(table[most[c] - codes[c]]), multipliers[c]);
    };
    StoreCodes(p.y + first + i * step, RoundCodes<kCodes>(p.rounder, value));
  }
}

void LaunchSoftmax(const Run& run, const CodeSoftmaxParams& p) {
  // Codes of a row that a few lanes, or a warp, still read in few steps.
  constexpr int kFew = 4;
  constexpr unsigned kFewRow = 64, kWarpRow = 2048;
  const bool apart = p.inner.divisor > 1;
  const unsigned neighbours = apart ? p.inner.divisor : p.size;
  const int codes = neighbours % 4 == 0 && CommonUnit({p.x, p.y}) >= 4 ? 4 : 1;
  std::visit(
      [&](auto count) {
        if (apart) return run.LaunchFor(p.rows / count, SoftmaxColumns<count>, kThreads, p);
        if (p.size > kWarpRow) return run.Launch(SoftmaxRows<kThreads, count>, dim3(p.rows), kThreads, p);
        if (p.size <= kFewRow)
          return run.LaunchFor(int64_t{p.rows} * kFew, SoftmaxRows<kFew, count>, kThreads, p);
        run.LaunchFor(int64_t{p.rows} * kWarp, SoftmaxRows<kWarp, count>, kThreads, p);
      },
      OneOf<4, 1>(codes));
}

}  // namespace

PackedNodePtr Pack(const SoftmaxNode& node, const Device& device) {
  CodeSoftmaxParams shared;
  shared.flip = node.x_signed ? 0x80808080u : 0;
  shared.scale = node.quantizer.scale;
  shared.rounder = MakeRounder(node.quantizer);
  NodeConstants constants;
  constants.Add(node.table, shared.table);
  const auto memory = constants.Upload(device);
  const auto plan = [shared, axis = node.axis](Shapes, const TensorShape& y) {
    const std::span<const int64_t> dims = y.dims;
    const size_t at = AxisOf(axis, dims.size());
    CodeSoftmaxParams geometry = shared;
    geometry.count = static_cast<unsigned>(CountOf(dims));
    geometry.size = static_cast<unsigned>(dims[at]);
    geometry.rows = geometry.count / std::max(1u, geometry.size);
    geometry.inner = MakeDivisor(std::max<int64_t>(1, CountOf(dims.subspan(at + 1))));
    return MakeKernelPlan("softmax_codes", geometry, LaunchSoftmax);
  };
  return MakeNode(plan, memory);
}

}  // namespace lowbit::cuda
