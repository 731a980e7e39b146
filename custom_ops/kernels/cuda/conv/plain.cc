#include "kernels/cuda/conv/plain.h"

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {
namespace {

std::string Refuse(const ConvProblem&, const Device&) { return {}; }

void AddCandidates(const ConvProblem&, const Device&, std::vector<ConvConfig>& out) { out.push_back({}); }

int SharedBytesOf(const ConvProblem&, const ConvConfig&) { return 0; }

double Microseconds(const ConvProblem& problem, const ConvConfig&, const Device& device) {
  const double products = static_cast<double>(problem.m * problem.n * problem.groups) * problem.k;
  return 3.0 + products / (device.multiprocessors * 64 * kClocksPerMicrosecond);
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  const bool is_bipolar = problem.x.encoding == Encoding::kBipolar;
  PlainParams p = {{}, WindowsOf(problem), TapsOf(problem), problem.weights_in_tiles};
  p.k_tiles = static_cast<int>(problem.KTiles());
  p.n_padded = static_cast<int>(PaddedColumns(problem.n));
  p.channels = static_cast<int>(problem.geometry.GroupIn());
  p.pixel_bytes = static_cast<int>(problem.geometry.in_channels);
  p.transposed = problem.geometry.transposed;
  p.x_mul = is_bipolar ? 2 : 1;
  p.x_zero = is_bipolar ? 1 : problem.is_bits ? 0 : problem.zero;
  p.is_bits = problem.is_bits;
  return LauncherOf(p, config, LaunchPlain);
}

}  // namespace

const ConvRow kPlainRow = {
    {"plain", "sm_75", "the GPU's own reference, every node: dp4a, one thread per output"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .traits = {.is_reference = true}}};

}  // namespace lowbit::cuda
