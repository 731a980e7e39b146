// Kernels that finish sums and do nothing else, two for each way, one of them four times four sums more than the other:
// benchmarks/gpu_epilogues.py counts what these take. What the host decides stands in the code, so that no other way
// is in it.
#include "kernels/cuda/conv/device_epilogue.cuh"

namespace lowbit::cuda {

struct Arrays {
  const int4* sums;
  const unsigned* residuals;
  const FourChannels* channels;
  unsigned* codes;
};

// Residuals that nothing adds are not read.
template <int kFours, typename Requantize>
__device__ __forceinline__ void ForFours(const Arrays& p, const Requantize& requantize) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kFours;
  const FourChannels channels = p.channels[threadIdx.x];
  int4 sums[kFours];
  unsigned codes[kFours];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    sums[i] = p.sums[at + i];
    codes[i] = p.residuals[at + i];
  }
  requantize(sums, channels, codes);
#pragma unroll
  for (int i = 0; i < kFours; ++i) p.codes[at + i] = codes[i];
}

#define LOWBIT_KERNEL(name, fours, finish, ...)                                                       \
  extern "C" __global__ void name(const __grid_constant__ EpilogueParams params,                      \
                                  const __grid_constant__ Arrays p) {                                 \
    EpilogueParams e = params;                                                                        \
    e.has_residual = e.on_lines = e.in_tail = e.is_capped = e.lacks_lines = false;                    \
    e.table = nullptr;                                                                                \
    e.values = nullptr;                                                                               \
    __VA_ARGS__;                                                                                      \
    WithEpilogue<Finish::finish>(e, [&](const auto& requantize) { ForFours<fours>(p, requantize); }); \
  }
#define LOWBIT_WAY(name, finish, ...)               \
  LOWBIT_KERNEL(name##_few, 4, finish, __VA_ARGS__) \
  LOWBIT_KERNEL(name##_many, 8, finish, __VA_ARGS__)

LOWBIT_WAY(relu_to_256, kFloatsFromZero, )
LOWBIT_WAY(relu_to_256_residual, kFloatsOnLine, e.has_residual = true)
LOWBIT_WAY(relu_to_128, kCappedFromZero, )
LOWBIT_WAY(relu_to_128_residual, kCappedOnLine, e.has_residual = true)
LOWBIT_WAY(any_to_256, kFloats, e.sums = SumForm::kFloat)
LOWBIT_WAY(any_to_256_table, kFloats, e.sums = SumForm::kFloat; e.table = params.table;
           __builtin_assume(e.table != nullptr))
LOWBIT_WAY(on_lines, kTail, e.on_lines = true)
LOWBIT_WAY(on_lines_residual, kCappedTailOnLine, e.on_lines = e.has_residual = true)
LOWBIT_WAY(bias_residual_once, kCappedInTail, e.in_tail = e.has_residual = true)
LOWBIT_WAY(few_codes_residual, kWordsTailOnLine, e.on_lines = e.has_residual = true)
LOWBIT_WAY(bias_hard_swish, kIntegersInTail, e.in_tail = true; e.function = TailFunction::kHardSwish)
LOWBIT_WAY(bias_silu, kIntegersInTail, e.in_tail = true; e.function = TailFunction::kSilu)
LOWBIT_WAY(integers_to_128, kIntegers, e.rounding = Rounding::kWords)
LOWBIT_WAY(integers_to_128_residual, kIntegers, e.has_residual = true; e.addition = Addition::kOnLine)
LOWBIT_WAY(division, kIntegers, e.has_residual = true; e.addition = Addition::kAny)

}  // namespace lowbit::cuda
