// Every family of convolution kernels: a new one is its own files and a row here.
#include "core/status.h"
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/cell_weights.h"
#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/depthwise.h"
#include "kernels/cuda/conv/flat_bits.h"
#include "kernels/cuda/conv/halo.h"
#include "kernels/cuda/conv/image.h"
#include "kernels/cuda/conv/plain.h"
#include "kernels/cuda/conv/team.h"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/conv/vector.h"
#include "kernels/cuda/conv/windows.h"

namespace lowbit::cuda {

std::span<const ConvRow* const> ConvTable() {
  // Where configurations have equal estimates, the first one is taken.
  static constexpr const ConvRow* kRows[] = {&kDepthwiseRow, &kImageRow, &kVectorRow, &kFlatBitsRow,
                                             &kTeamRow,      &kBitsRow,  &kHaloRow,   &kWindowsRow,
                                             &kWgmmaRow,     &kMmaRow,   &kPlainRow};
  return kRows;
}

const KernelInfo& PlainKernel() { return kPlainRow; }

const ConvRow& RowOf(const ConvConfig& config) {
  for (const ConvRow* const row : ConvTable()) {
    if (config.kernel == row) return *row;
  }
  Fail("configuration ", config.Text(), " is of no convolution");
}

std::span<const WeightLayout* const> WeightLayouts() {
  static constexpr const WeightLayout* kLayouts[] = {&kImageWeights, &kCellWeights, &kDepthwiseWeights,
                                                     &kBitWeights, &kFlatBitWeights};
  return kLayouts;
}

}  // namespace lowbit::cuda
