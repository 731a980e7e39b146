// A function of every channel's codes and the 1x1 convolution that alone reads what it makes, as one kernel: the
// normalization in front of a layer whose input others read as well (DenseNet), which no weights can take in. Or, with
// two outputs, the Concat in front of both, too, whose output others read.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/nodes.h"
#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/fused/fused_row.h"
#include "kernels/cuda/nodes/affine_lines.h"

namespace lowbit::cuda {

inline constexpr int kMaxAffineTiles = 8;      // along k, of a block
inline constexpr size_t kMaxJoinedParts = 32;  // of a Concat

// The lines in one device's memory, those of a tile of k behind each other (LineIndex).
struct PackedLines {
  bool x_signed = false, y_signed = false;
  int32_t lo = 0, hi = 255;
  DeviceMemory memory;
};
// For k channels.
std::shared_ptr<const PackedLines> PackLines(const AffineLines& lines, int64_t k, const Device& device);

// A tensor that a Concat joins, and the line of its codes (AffineLines).
struct JoinedLine {
  int64_t channels = 0;
  float gain = 1, offset = 0;
  bool is_signed = false;
};
struct AffineConv {
  std::shared_ptr<const PackedLines> lines;
  std::shared_ptr<const PackedConv> conv;
  ConvShape shape;
  std::vector<JoinedLine> joined;  // two at least, or none
};
// The same behind a Concat of `fed`; nullopt where the kernel does not join these.
std::optional<AffineConv> BehindConcat(const ConcatNode& concat, std::span<const TensorShape> fed,
                                       AffineConv nodes);
// Every configuration that computes both in one kernel exactly on this device, and kSeparateKernels; the cost
// model's choice first.
std::vector<ConvConfig> AffineConvConfigs(const PackedConv& conv, const ConvShape& shape);

class AffineConvPlan;
// Throws Error where `config` is none of the first kind.
std::shared_ptr<const AffineConvPlan> PlanAffineConv(const AffineConv& nodes, const ConvConfig& config);
// As LaunchConv, without a workspace. `joined`: where the output of a Concat goes, null where there is none; `x`: what
// it joins, or the one tensor.
void LaunchAffineConv(const AffineConvPlan& plan, std::span<const void* const> x, void* joined, void* y,
                      Queue& queue);
// Every configuration that computes a Concat, too, the cost model's choice first.
std::vector<ConvConfig> JoiningConfigs(const AffineConv& nodes);
// Whether the cost model takes the first of them for faster than the Concat and what is chosen behind it.
bool JoiningPays(const AffineConv& nodes);

// What the cost model knows is the convolution.
extern const FusedRow<ConvProblem> kAffineConvKernel;
// Those of kAffineConvKernel that fit the device and kSeparateKernels, the cheapest estimate first.
std::vector<ConvConfig> RankAffineConfigs(const ConvProblem& problem, const Device& device);

// Where the gain of one of 128 channels stands among those of a tile of k; 128 numbers further, its offset. A
// thread reads four channels of 16 at a time, eight threads neighbours.
constexpr int LineIndex(int channel) { return (channel % 16 / 4 * 8 + channel / 16) * 4 + channel % 4; }

// One of the tensors that are read: its codes are `b ^ flip` less `bias`, 2^23 included, of their bytes (CodeReader).
struct AffinePart {
  const uint8_t* x = nullptr;
  int first = 0, channels = 0;  // of all parts' channels
  uint32_t flip = 0;
  float bias = 0, gain = 1, offset = 0;
  bool is_copied = false;  // its line makes of every code the same one
};
struct AffineConvParams : TileParams, SumsParams {
  const float* lines = nullptr;
  bool joins = false;                 // several parts, whose lines make the codes that are joined and read on
  int part_count = 1, part_step = 0;  // a power of 2, with which a search of the part begins
  AffinePart parts[kMaxJoinedParts] = {};
  uint8_t* made = nullptr;  // where these are stored
  uint32_t made_flip = 0;
  float made_bias = 0;  // as of parts, of the codes that the channels' lines are of
  // What becomes of the lines' bytes (EpilogueParams::cap_select).
  uint32_t cap_select = 0, cap_mask = 0, cap_flip = 0;
};
// Floats that are finished in another way are integers there.
constexpr bool HasAffineInstance(Finish finish) {
  return finish == Finish::kThroughMemory || finish == Finish::kBytesOfCluster ||
         finish == Finish::kIntegers || finish == Finish::kFloatsFromZero || finish == Finish::kTail ||
         finish == Finish::kLackingTail || finish == Finish::kFloats;
}
// Blocks that have parts of K are a cluster's; what these add up has an instance of its own where it becomes bytes.
inline Finish AffineFinishOf(const AffineConvParams& p) {
  const Finish finish = FinishWithClusters(p.epilogue, p, p.splits > 1);
  const bool is_of_another_cluster = finish == Finish::kWordsOfCluster || finish == Finish::kTailOfCluster;
  return is_of_another_cluster ? Finish::kThroughMemory : finish;
}
// Whether a second warpgroup may help with the rounding (ConvConfig::producers): finishes that few layers have come
// without, and floats of inputs with signs, which have other instances (FinishOfSigned).
constexpr bool MayHelp(Finish finish, bool is_signed) {
  return finish == Finish::kBytesOfCluster || (finish == Finish::kFloatsFromZero && !is_signed);
}
cudaError_t LaunchAffineConv(const AffineConvParams& params, const ConvConfig& config,
                             const LaunchOptions& options);

}  // namespace lowbit::cuda
