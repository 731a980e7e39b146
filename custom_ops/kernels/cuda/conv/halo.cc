#include "kernels/cuda/conv/halo.h"

#include <algorithm>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {
namespace {

// What is at most a / b.
int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -CeilDiv(-a, b); }

PhaseLine PhasesAlong(int64_t size, int64_t stride, int64_t pad, int64_t kernel, int64_t dilation) {
  const int64_t before = CeilDiv(pad, stride);
  return {CeilDiv(size, stride), before, FloorDiv((kernel - 1) * dilation - pad, stride) + before};
}

}  // namespace

std::string RefuseLine(const ConvProblem& problem, const Device& device) {
  const ConvGeometry& g = problem.geometry;
  const ConvShape& s = problem.shape;
  if (device.capability != 90) return "needs sm_90a";
  if (!problem.tiled || !problem.requantizes || problem.integers_of_tail)
    return "codes are not rounded in registers";
  if (problem.has_w_zero) return "zero points of weights that leave int8";
  const bool has_stride = g.stride_h != 1 || g.stride_w != 1;
  if (has_stride && problem.planes.x == 0) return "a stride";
  if (has_stride && problem.borders) return "a stride, and padding that is not 0";
  if (g.group != 1 || problem.repacks || problem.channels % 64 != 0) return "channels are no multiple of 64";
  if (problem.IsPadded() && problem.zero != 0 && !problem.borders) return "padding that is not 0";
  if (s.OutPixels() * s.in_h * s.in_w == 0) return "no pixels";
  const HaloLine line = LineOf(problem);
  return line.pitch <= kMaxPitch && line.tiles <= (kMaxBytes - 4096) / 64
             ? ""
             : "an image of more than 256 columns, or of more places than 31 bits count";
}

// Rows of bytes begin at multiples of 128 in shared memory. A window that leaves a row on the right ends in the
// padding on the left of the next one.
HaloLine LineOf(const ConvProblem& problem) {
  const ConvGeometry& g = problem.geometry;
  const ConvShape& s = problem.shape;
  const int64_t slab = problem.channels % 128 == 0 ? 128 : 64, step = problem.planes.x > 0 ? 1 : 128 / slab;
  HaloLine line;
  line.h = PhasesAlong(s.in_h, g.stride_h, g.pad_top, g.kernel_h, g.dilation_h);
  line.w = PhasesAlong(s.in_w, g.stride_w, g.pad_left, g.kernel_w, g.dilation_w);
  const auto length = [](const PhaseLine& of, int64_t outputs) {
    return std::max({of.size + of.before, outputs + of.reach - of.before, outputs});
  };
  const int64_t pitch = RoundUp(length(line.w, s.out_w), step), image_rows = length(line.h, s.out_h);
  line.slab = static_cast<int>(slab);
  line.slabs = static_cast<int>(problem.channels / slab);
  if (problem.IsLine()) {  // all pixels in a row, in rows of a tile
    line.tiles = CeilDiv(problem.m, 64);
    line.pitch = 64;
    line.image_rows = static_cast<int>(std::min(line.tiles, kMaxBytes));
    return line;
  }
  line.tiles = (s.batch * image_rows * pitch + 63) / 64;
  line.pitch = static_cast<int>(std::min(pitch, kMaxBytes));
  line.image_rows = static_cast<int>(std::min(image_rows, kMaxBytes));
  line.reach = static_cast<int>(std::min(line.h.reach * pitch + line.w.reach, kMaxBytes));
  return line;
}

HaloParams HaloParamsOf(const ConvProblem& problem, const ConvConfig& config, bool slabs_first) {
  const ConvGeometry& g = problem.geometry;
  const HaloLine line = LineOf(problem);
  HaloParams h = {TilesOf(problem, config), WindowsOf(problem)};
  h.pitch = line.pitch;
  h.image_rows = line.image_rows;
  h.images = static_cast<int>(problem.shape.batch);
  h.reach = line.reach;
  h.slab = line.slab;
  h.slabs = line.slabs;
  h.tiles = static_cast<int>(line.tiles);
  h.patch_rows = line.Rows(config.tile_m);
  h.plane_bytes = line.PlaneBytes(config.tile_m);
  const int taps = static_cast<int>(g.Taps());
  h.steps = taps * h.slabs;
  for (int tap = 0; tap < taps; ++tap) {
    const int64_t place = PlaceOfTap(g, line, tap);
    for (int slab = 0; slab < h.slabs; ++slab) {
      h.step[slabs_first ? slab * taps + tap : tap * h.slabs + slab] =
          static_cast<int>(place * h.slab + slab * h.plane_bytes) / 16;
    }
  }
  h.by_pitch = MakeDivisor(h.pitch);
  h.by_rows = MakeDivisor(h.image_rows);
  return h;
}

TapPhase PhaseOfTap(const ConvGeometry& g, int64_t tap) {
  const auto phase = [](int64_t at, int64_t stride) { return at - FloorDiv(at, stride) * stride; };
  return {phase(tap / g.kernel_w * g.dilation_h - g.pad_top, g.stride_h),
          phase(tap % g.kernel_w * g.dilation_w - g.pad_left, g.stride_w)};
}

int64_t PlaceOfTap(const ConvGeometry& g, const HaloLine& line, int64_t tap) {
  const int64_t y = FloorDiv(tap / g.kernel_w * g.dilation_h - g.pad_top, g.stride_h) + line.h.before,
                x = FloorDiv(tap % g.kernel_w * g.dilation_w - g.pad_left, g.stride_w) + line.w.before;
  return y * line.pitch + x;
}

int PatchFamily::BlocksAtOnce(const ConvProblem& problem, const ConvConfig& config,
                              const Device& device) const {
  const int by_shared = (device.shared_bytes + 5120) / (row->shared_bytes(problem, config) + 3100);
  return std::max(1, std::min(by_registers(problem, config), by_shared));
}

int PatchFamily::Blocks(const ConvProblem& problem, const ConvConfig& config, const Device& device) const {
  const int64_t patches = CeilDiv(LineOf(problem).tiles, config.tile_m / 64);
  if (config.stages == 1) return static_cast<int>(patches);
  const int64_t most = int64_t{BlocksAtOnce(problem, config, device)} * device.multiprocessors /
                       CeilDiv(problem.n, config.tile_n);
  return static_cast<int>(std::clamp<int64_t>(most, 1, patches));
}

// One slot where every block has one patch, else two: the next patch is fetched while one is multiplied.
void PatchFamily::AddCandidates(const ConvProblem& problem, const Device& device,
                                std::vector<ConvConfig>& out) const {
  const HaloLine line = LineOf(problem);
  for (const int tile_n : widths) {
    const int64_t columns = CeilDiv(problem.n, tile_n);
    if (columns > kMaxColumns || (tile_n > widths.front() && problem.n <= tile_n / 2)) continue;
    for (int tiles = 1; tiles <= most_tiles(problem, tile_n); ++tiles) {
      for (const int slots : {1, 2}) {
        const ConvConfig config{row, 64 * tiles, tile_n, slots};
        if (line.Rows(config.tile_m) > kMaxHaloRows ||
            row->shared_bytes(problem, config) > device.shared_bytes) {
          continue;
        }
        const int64_t patches = CeilDiv(line.tiles, tiles);
        if (slots == 1
                ? patches * columns <= int64_t{BlocksAtOnce(problem, config, device)} * device.multiprocessors
                : Blocks(problem, config, device) < patches) {
          out.push_back(config);
        }
      }
    }
  }
}

namespace {

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (problem.geometry.Taps() == 1) return "a window of one tap";
  if (std::string reason = RefuseLine(problem, device); !reason.empty()) return reason;
  return problem.KTiles() > kMaxHaloWeights ? "weights of more than 40 tiles along K" : "";
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const HaloLine line = LineOf(problem);
  const int64_t slot = int64_t{line.slabs} * line.PlaneBytes(config.tile_m);
  return static_cast<int>(1024 + problem.KTiles() * config.tile_n * kTileK + config.stages * slot +
                          config.tile_m * (config.tile_n + 16));
}

int ByRegisters(const ConvProblem&, const ConvConfig& config) {
  const int registers = config.tile_n > 64 ? 96 : config.tile_n > 32 ? 64 : 48;
  return std::min(4, 65536 / (registers * (config.tile_m * 2 + 32)));
}

constexpr int kWidths[] = {32, 64, 128};
constexpr PatchFamily kPatches = {
    &kHaloRow, kWidths, [](const ConvProblem&, int tile_n) { return MaxHaloTiles(tile_n); }, ByRegisters};

void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  kPatches.AddCandidates(problem, device, out);
}

double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const HaloLine line = LineOf(problem);
  const int64_t blocks = kPatches.Blocks(problem, config, device), patch_tiles = config.tile_m / 64,
                each = CeilDiv(line.tiles, blocks), columns = CeilDiv(problem.n, config.tile_n);
  const double at_once = static_cast<double>(CeilDiv(blocks * columns, device.multiprocessors));
  const double k_tiles = static_cast<double>(problem.KTiles()), tile_n = config.tile_n;
  const double slot = static_cast<double>(line.slabs * line.PlaneBytes(config.tile_m));
  // The weights and the first patch; then every patch's round of latencies, or what all tiles together take.
  const double start = 1860 + at_once * (0.227 * k_tiles * tile_n + slot / 88.9);
  const double rounds = static_cast<double>(CeilDiv(each, patch_tiles)) * (1590 + 3.16 * k_tiles * tile_n);
  const double tile =
      165 + 3.79 * tile_n + 1.67 * k_tiles * std::max(tile_n, 48.0) + (problem.residual ? 1.72 * tile_n : 0);
  const double work = at_once * static_cast<double>(each) * tile;
  return (EstimateBusy(blocks * columns, device) + start + std::max(rounds, work)) / kClocksPerMicrosecond;
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  HaloParams halo = HaloParamsOf(problem, config, false);
  halo.staging_offset = SharedBytesOf(problem, config) - 1024 - config.tile_m * (config.tile_n + 16);
  halo.shares = ShareTiles(halo.tiles, kPatches.Blocks(problem, config, device));
  return LauncherOf(halo, config, LaunchHalo);
}

}  // namespace

const ConvRow kHaloRow = {
    {"halo", "sm_90a", "stride 1, few weights: wgmma, blocks keep their weights and patches of the input"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .traits = {.takes_floats = true, .stores_planes = true}}};

}  // namespace lowbit::cuda
