#include "kernels/cuda/conv/vector.h"

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {
namespace {

std::string Refuse(const ConvProblem& problem, const Device&) {
  const ConvGeometry& g = problem.geometry;
  if (problem.m > kMaxVectorRows) return "more than 16 rows";
  if (g.Taps() != 1 || problem.groups != 1 || problem.IsPadded() ||
      problem.shape.in_h != problem.shape.out_h || problem.shape.in_w != problem.shape.out_w)
    return "not a product of rows as they lie";
  return problem.tiled && problem.vector16 && !problem.repacks
             ? ""
             : "channels in no runs of 16, or codes that need a pass before";
}

void AddCandidates(const ConvProblem&, const Device&, std::vector<ConvConfig>& out) {
  out.push_back({&kVectorRow});
}

int SharedBytesOf(const ConvProblem&, const ConvConfig&) { return 0; }

// Round trips for x and, past the first 2 KB of a row, for the weights, of all blocks that share a
// multiprocessor at once; the weights' bytes; products. Without kAsTiles within an eighth of what an H200
// takes for 64..4096 channels of 512..9216 bytes and 1..16 rows. Most of the tile kernels' estimates
// there are lower than their times; with it the faster of the two is chosen for every one of them.
double Microseconds(const ConvProblem& problem, const ConvConfig&, const Device& device) {
  constexpr int kChannels = 8;  // of a block
  constexpr double kAsTiles = 0.75;
  const int64_t at_once = (problem.m > 8 ? 3 : 4) * int64_t{device.multiprocessors};
  const double waves = static_cast<double>(CeilDiv(CeilDiv(problem.n, kChannels), at_once));
  const double rounds = static_cast<double>(CeilDiv(problem.k, 2048)), rows = static_cast<double>(problem.m);
  const double bytes = static_cast<double>(problem.n * problem.k) / device.multiprocessors;
  const double clocks = waves * (1400 + 1400 * rounds) + bytes / 36 + rows * (25 + 22 * rounds);
  return kAsTiles * clocks / kClocksPerMicrosecond;
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  return LauncherOf(VectorParams{{}, static_cast<int>(PaddedColumns(problem.n))}, config, LaunchVector);
}

}  // namespace

const ConvRow kVectorRow = {
    {"vector", "sm_75", "products of up to 16 rows: mma.sync, a block eight channels"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .traits = {.finishes_ones = true}}};

}  // namespace lowbit::cuda
