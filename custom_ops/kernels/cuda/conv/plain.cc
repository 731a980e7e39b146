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

ConvLauncher Launcher(const ConvProblem&, const ConvConfig&, const Device&) { return LaunchPlain; }

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
