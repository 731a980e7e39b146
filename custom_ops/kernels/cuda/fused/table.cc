// Every kernel of several nodes: a new one is its own files and a row here.
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/fused/bit_blocks.h"
#include "kernels/cuda/fused/bit_pair.h"
#include "kernels/cuda/fused/chain.h"
#include "kernels/cuda/fused/fused_row.h"
#include "kernels/cuda/fused/residual_pair.h"
#include "kernels/cuda/fused/stem_pool.h"

namespace lowbit::cuda {

std::span<const KernelInfo* const> FusedTable() {
  static constexpr const KernelInfo* kRows[] = {&kChainKernel,     &kResidualPairKernel, &kBitPairKernel,
                                                &kBitBlocksKernel, &kStemPoolKernel,     &kAffineConvKernel};
  return kRows;
}

}  // namespace lowbit::cuda
