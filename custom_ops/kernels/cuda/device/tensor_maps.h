// Maps of tensors of bytes, by which the tensor memory accelerator fetches and stores boxes of them (sm_90a).
#pragma once

#include <cuda.h>

#include "kernels/cuda/device/launch.h"

namespace lowbit::cuda {

// Rows of a box of 128, 64 or 32 bytes lie in shared memory with their 16-byte chunks exchanged.
inline CUtensorMapSwizzle SwizzleOf(cuuint32_t row_bytes) {
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B;
}

// A tensor of `sizes`, the innermost dim first, whose dim i + 1 has a step of strides[i] bytes, in boxes of
// `box` elements. What lies past the last element of a dim is read as 0 and not written.
template <size_t kRank>
cudaError_t EncodeBoxes(CUtensorMap* map, const void* data, const cuuint64_t (&sizes)[kRank],
                        const cuuint64_t* strides, const cuuint32_t (&box)[kRank]) {
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(DriverFunction("cuTensorMapEncodeTiled"));
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<void*>(data), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, SwizzleOf(box[0]),
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The same in boxes of `pixels` positions, which walk over the two dims between the innermost and the
// outermost in `steps`, from `lower` on and `upper` past the end, and of `channels` of the innermost.
template <size_t kRank>
cudaError_t EncodeWindows(CUtensorMap* map, const void* data, const cuuint64_t (&sizes)[kRank],
                          const cuuint64_t* strides, const int* lower, const int* upper, cuuint32_t channels,
                          cuuint32_t pixels, const cuuint32_t (&steps)[kRank]) {
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeIm2col)>(DriverFunction("cuTensorMapEncodeIm2col"));
  if (encode == nullptr) return cudaErrorNotSupported;
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<void*>(data), sizes, strides, lower, upper,
             channels, pixels, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, SwizzleOf(channels),
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
