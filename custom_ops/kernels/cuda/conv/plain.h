// One thread per output, dp4a: the GPU's own reference, which computes every node; and the passes around the
// tile kernels.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kPlainRow;

struct PlainParams : ConvParams, WindowParams, TapParams {
  bool weights_in_tiles = true;  // else in rows
  int k_tiles = 0, n_padded = 0;
  int channels = 0, pixel_bytes = 0;  // of a group and of all, as the node has them
  bool transposed = false;
  int x_mul = 1, x_zero = 0;  // v(x) = x_mul * q - x_zero, 1/2 less where is_bits
  bool is_bits = false;
};
cudaError_t LaunchPlain(const PlainParams& params, const ConvConfig&, const LaunchOptions& options);

// Adds the partial sums of Split::kWorkspace and finishes them.
struct ReduceParams : ConvParams {
  int splits = 1;
  const int32_t* partial = nullptr;  // as SumsParams has it
};
cudaError_t LaunchReduce(const ReduceParams& params, const LaunchOptions& options);

// The input pass of the tile kernels:
// y[pixel][group][channels] = mul * x[pixel][group][group_in] - sub, channels beyond group_in 0.
struct RepackParams {
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  int64_t pixels = 0;
  int groups = 1, group_in = 0, channels = 0;
  int mul = 1, sub = 0;
};
cudaError_t LaunchRepack(const RepackParams& params, const LaunchOptions& options);

}  // namespace lowbit::cuda
