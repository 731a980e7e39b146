// Convolutions of stride 1 on wgmma (sm_90a): blocks keep their weights and patches of the input. And the
// line of places that halo and windows lay an image out in.
#pragma once

#include <compare>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kHaloRow;

inline constexpr int kMaxHaloRows = 32, kMaxHaloWeights = 40, kMaxPitch = 256;
// Tiles of a patch, one for each warpgroup: as many as registers allow.
constexpr int MaxHaloTiles(int tile_n) { return tile_n > 64 ? 4 : 6; }

// The line of places: every row of an image takes `pitch` places, every image `image_rows` rows, padding
// included. A place is that of an output and of its window's first pixel.
struct HaloParams : TileParams, WindowParams {
  int pitch = 0, image_rows = 0, images = 0;
  int reach = 0;            // places from the first tap of a window to its last
  int slab = 0, slabs = 0;  // channels that lie together: 64 or 128
  int tiles = 0;            // of 64 places
  int patch_rows = 0;       // what a block fetches at once, at most
  int plane_bytes = 0;      // of a slab of a patch
  TileShares shares;
  FastDivisor by_pitch, by_rows;
  // From a window's first tap to each (tap, slab), in 16 bytes of shared memory; windows: (slab, tap).
  int steps = 0, step[2 * kMaxHaloWeights] = {};
};

// Along one dim of an image of which windows take every `stride`th pixel first: pixels of one phase, those that are a
// stride apart, are an image of their own, which a tap has all its pixels of.
struct PhaseLine {
  int64_t size = 0;    // of a phase, at most
  int64_t before = 0;  // pixels of it in front of the image
  int64_t reach = 0;   // from the first tap to the last
};

// The line as cost models need it.
struct HaloLine {
  int64_t tiles = 0;
  int pitch = 0, image_rows = 0, reach = 0, slab = 0, slabs = 0;
  PhaseLine h, w;

  // Rows of a patch for tile_m outputs, which begin at a multiple of 64, and the bytes of one of its slabs.
  int Rows(int tile_m) const { return (pitch - std::gcd(pitch, 64) + tile_m - 1 + reach) / pitch + 1; }
  int PlaneBytes(int tile_m) const { return (Rows(tile_m) * pitch * slab + 1023) / 1024 * 1024; }
};

struct ConvProblem;
// Why a problem has no such line, or empty.
std::string RefuseLine(const ConvProblem& problem, const Device& device);
// That of a problem that RefuseLine does not refuse.
HaloLine LineOf(const ConvProblem& problem);
// A family of kernels that keep patches, whose shared memory its row tells.
struct PatchFamily {
  const ConvRow* row;
  std::span<const int> widths;                                // channels of its tiles
  int (*most_tiles)(const ConvProblem& problem, int tile_n);  // of a patch
  // Of the threads of a block, how many blocks a multiprocessor has registers for.
  int (*by_registers)(const ConvProblem& problem, const ConvConfig& config);

  void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) const;
  // Of a grid along m: as many as run at once, each with as many tiles or one less; with one slot, one for every
  // patch.
  int Blocks(const ConvProblem& problem, const ConvConfig& config, const Device& device) const;

 private:
  int BlocksAtOnce(const ConvProblem& problem, const ConvConfig& config, const Device& device) const;
};
// The phase of a tap's pixels, along the height and the width.
struct TapPhase {
  int64_t h = 0, w = 0;
  auto operator<=>(const TapPhase&) const = default;
};
TapPhase PhaseOfTap(const ConvGeometry& g, int64_t tap);
// From a window's first place to that of a tap, among the places of its phase.
int64_t PlaceOfTap(const ConvGeometry& g, const HaloLine& line, int64_t tap);
// What does not depend on how tiles are spread over blocks. slabs_first: `step` has the taps of a slab in a
// row.
HaloParams HaloParamsOf(const ConvProblem& problem, const ConvConfig& config, bool slabs_first);

cudaError_t LaunchHalo(const HaloParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
