// A function of every channel's codes and the 1x1 convolution that alone reads what it makes, as one kernel: the
// normalization in front of a layer whose input others read as well (DenseNet), which no weights can take in.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/fused/fused_row.h"
#include "kernels/cuda/nodes/affine_lines.h"

namespace lowbit::cuda {

inline constexpr int kMaxAffineTiles = 8;  // along k, of a block

// The lines in one device's memory, those of a tile of k behind each other (LineIndex).
struct PackedLines {
  bool x_signed = false, y_signed = false;
  DeviceMemory memory;
};
// For k channels.
std::shared_ptr<const PackedLines> PackLines(const AffineLines& lines, int64_t k, const Device& device);

struct AffineConv {
  std::shared_ptr<const PackedLines> lines;
  std::shared_ptr<const PackedConv> conv;
  ConvShape shape;
};
// Every configuration that computes both in one kernel exactly on this device, and kSeparateKernels; the cost
// model's choice first.
std::vector<ConvConfig> AffineConvConfigs(const PackedConv& conv, const ConvShape& shape);

class AffineConvPlan;
// Throws Error where `config` is none of the first kind.
std::shared_ptr<const AffineConvPlan> PlanAffineConv(const AffineConv& nodes, const ConvConfig& config);
// As LaunchConv, without a workspace.
void LaunchAffineConv(const AffineConvPlan& plan, const void* x, void* y, Queue& queue);

// What the cost model knows is the convolution.
extern const FusedRow<ConvProblem> kAffineConvKernel;
// Those of kAffineConvKernel that fit the device and kSeparateKernels, the cheapest estimate first.
std::vector<ConvConfig> RankAffineConfigs(const ConvProblem& problem, const Device& device);

// Where the gain of one of 128 channels stands among those of a tile of k; 128 numbers further, its offset. A
// thread reads four channels of 16 at a time, eight threads neighbours.
inline constexpr int LineIndex(int channel) {
  return (channel % 16 / 4 * 8 + channel / 16) * 4 + channel % 4;
}

struct AffineConvParams : BoxTileParams {
  const float* lines = nullptr;
  bool lines_signed = false;  // what they are of; the convolution's x is what they make
};
cudaError_t LaunchAffineConv(const AffineConvParams& params, const ConvConfig& config,
                             const LaunchOptions& options);

}  // namespace lowbit::cuda
