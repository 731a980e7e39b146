#include "kernels/cuda/conv/depthwise.h"

#include <algorithm>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {

bool FitsDepthwise(const ConvGeometry& g, const OperandType& x) {
  return g.IsDepthwise() && !g.transposed && g.group % kDepthwiseRun == 0 && x.encoding != Encoding::kBipolar;
}

namespace {

bool Applies(const ConvGeometry& g, const OperandType& x, const WeightBits&, const Device&) {
  return FitsDepthwise(g, x);
}

int64_t WeightBytes(const ConvGeometry& g, const WeightBits&) {
  return g.kernel_h * RoundUp(g.kernel_w, 4) * g.out_channels;
}

// [kernel_h][taps of a row in fours][channels][4]
void PackDepthwise(const ConvGeometry& g, const Int8Weights& w, const WeightBits&, uint8_t* out) {
  const int64_t fours = RoundUp(g.kernel_w, 4) / 4;
  for (int64_t c = 0; c < g.out_channels; ++c) {
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      const int64_t ky = tap / g.kernel_w, kx = tap % g.kernel_w;
      out[((ky * fours + kx / 4) * g.out_channels + c) * 4 + kx % 4] =
          static_cast<uint8_t>(w.values[static_cast<size_t>(c * g.Taps() + tap)]);
    }
  }
}

std::string Refuse(const ConvProblem& problem, const Device&) {
  if (!problem.geometry.IsDepthwise()) return "not a depthwise convolution";
  return FitsDepthwise(problem.geometry, problem.x)
             ? ""
             : "transposed, bipolar codes, or channels in no runs of 4";
}

void AddCandidates(const ConvProblem&, const Device&, std::vector<ConvConfig>& out) {
  out.push_back({&kDepthwiseRow});
}

int SharedBytesOf(const ConvProblem&, const ConvConfig&) { return 0; }

// It is taken wherever it applies.
double Microseconds(const ConvProblem&, const ConvConfig&, const Device&) { return 0; }

// Whether there is a kernel for the windows.
bool IsRow(const ConvGeometry& g) {
  return g.kernel_h == g.kernel_w && (g.kernel_w == 3 || g.kernel_w == 5) && g.dilation_h == 1 &&
         g.dilation_w == 1 && g.stride_w <= 2;
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  const ConvGeometry& g = problem.geometry;
  const ConvShape& s = problem.shape;
  DepthwiseParams p = {{},       WindowsOf(problem), TapsOf(problem), problem.requantizes,
                       IsRow(g), problem.Fill()};
  const int64_t runs = g.group / kDepthwiseRun,
                pieces = CeilDiv(s.out_w, p.is_row ? PixelsOfThread(p.stride_w) : 1);
  p.threads = static_cast<int>(s.batch * s.out_h * pieces * runs);
  p.by_runs = MakeDivisor(runs);
  p.by_pieces = MakeDivisor(std::max<int64_t>(1, pieces));
  p.by_rows = MakeDivisor(std::max<int64_t>(1, s.out_h));
  return LauncherOf(p, config, LaunchDepthwise);
}

}  // namespace

const WeightLayout kDepthwiseWeights = {Applies, WeightBytes, PackDepthwise};

const ConvRow kDepthwiseRow = {{"depthwise", "sm_75", "depthwise layers: dp4a, 4 channels a thread"},
                               {.refuse = Refuse,
                                .add_candidates = AddCandidates,
                                .shared_bytes = SharedBytesOf,
                                .microseconds = Microseconds,
                                .launcher = Launcher,
                                .weights = &kDepthwiseWeights}};

}  // namespace lowbit::cuda
