// One row per family of convolution kernels: all that the rest of the library knows of one. Ranking, packing,
// plans, tests and the documentation read the table.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/conv/launch.h"
#include "kernels/cuda/conv/weight_layouts.h"

namespace lowbit::cuda {

// A convolution as packed, at one shape. The kernels see `groups` matrix products [m, k] x [k, n] of bytes.
struct ConvProblem {
  static constexpr int32_t kNoCode = std::numeric_limits<int32_t>::min();

  int64_t m = 0, n = 0, k = 0, groups = 1;
  bool tiled = false;             // the tile kernels apply at all (PackedConv says why not)
  bool weights_in_tiles = true;   // as the tile kernels read them, else in rows
  bool requantizes = true;        // the epilogue has a fast path: in registers, where K is not split
  bool is_tail = false;           // the sums end in a tail, mostly on a line for each channel
  bool in_tail = false;           // EpilogueParams::in_tail
  bool is_capped = false;         // EpilogueParams::is_capped, of residuals added on a line
  bool integers_of_tail = false;  // no instance of a kernel for one finish takes them
  bool is_mapped = false;         // codes become what a table has for them (EpilogueParams::table, values)
  bool floats = false;            // sums have the bits of floats where they are rounded in registers
  bool vector16 = true;           // channels come in runs of 16 bytes, else of 4
  bool residual = false;          // fetched while the block multiplies
  bool boxes = false;             // the tensor memory accelerator can fetch the pixels of every tap
  bool streams = false;           // a 1x1 convolution whose outputs' pixels are the input's or a part of them
  // What these products are of.
  ConvGeometry geometry = {};
  ConvShape shape = {};
  OperandType x = {8, Encoding::kUnsigned};
  WeightBits w_bits = {};
  int64_t channels = 0;     // bytes per tap
  bool repacks = false;     // the tile kernels read a copy of the input
  bool has_w_zero = false;  // EpilogueParams::w_zero
  // The code of real zero as the tile kernels see the input. kNoCode: none is, and what lies outside of the
  // image is read as 0 and made good for (borders).
  int32_t zero = 0;
  bool is_bits = false;  // of a zero point of 1/2 (OfBits)
  bool borders = false;  // EpilogueParams::border
  // How many codes there are before any residual, where sums are floats that lie on lines, in all channels, and these
  // begin with 0 or there are steps; else 0.
  int64_t codes_on_lines = 0;
  bool has_places = false;   // EpilogueParams::places
  TensorPlanes planes = {};  // what the input, the codes and the residuals are
  bool keeps_rows = false;   // planes of an image are read row by row, though they need not be

  // Four times what is read outside of the image.
  uint32_t Fill() const { return zero == kNoCode ? 0 : static_cast<uint32_t>(zero & 255) * 0x01010101u; }
  int64_t KTiles() const { return (k + kTileK - 1) / kTileK; }
  // Whether taps may lie outside the image.
  bool IsPadded() const {
    const ConvGeometry& g = geometry;
    return g.pad_top != 0 || g.pad_left != 0 || g.pad_bottom != 0 || g.pad_right != 0;
  }
  // Whether the input's pixels are the output's, one by one.
  bool IsFlat() const {
    return geometry.Taps() == 1 && geometry.stride_h == 1 && geometry.stride_w == 1 && !IsPadded();
  }
  // Whether planes are read as pixels in a row, whatever image they are of.
  bool IsLine() const { return planes.x > 0 && IsFlat() && !keeps_rows; }
};

// Enqueues a kernel, of whose parameters these are the common ones.
using ConvLauncher = std::function<cudaError_t(const ConvParams& params, const LaunchOptions& options)>;

struct ConvTraits {
  bool takes_floats = false;  // sums of any form (SumForm)
  // The input is repacked and parts of K are added around it where a node needs that.
  bool has_passes = false;
  bool may_stand_apart = false;  // ConvConfig::apart
  bool gathers = false;          // pixels, but for ConvConfig::boxes, with any code outside of the image
  bool is_reference = false;     // reads codes, zero points and bias as the node has them
  bool finishes_ones = false;    // outputs one by one, as their epilogue has it
  bool reads_elements = false;   // the input may begin anywhere, not at multiples of 16 bytes alone
  bool reads_planes = false;
  bool adds_planes = false;                // residuals in planes
  bool stores_planes = false;              // of sums that are floats in registers, in tiles of 64 channels
  bool stores_planes_of_integers = false;  // of other sums, too, where four are rounded at once
};

// Functions are pure but for the launcher that they return. `config` is one of the row's own.
struct ConvFamily {
  // Empty: the kernel computes this node exactly on this device, in some configuration. Otherwise the reason
  // why it does not apply.
  std::string (*refuse)(const ConvProblem& problem, const Device& device);
  // Appends the configurations that are worth a trial and fit the device.
  void (*add_candidates)(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out);
  // Dynamic shared memory of a block.
  int (*shared_bytes)(const ConvProblem& problem, const ConvConfig& config);
  // The cost model; 0 for kernels that are never worth less than all others.
  double (*microseconds)(const ConvProblem& problem, const ConvConfig& config, const Device& device);
  ConvLauncher (*launcher)(const ConvProblem& problem, const ConvConfig& config, const Device& device);
  // Its weights, where they do not lie as all tile kernels read them.
  const WeightLayout* weights = nullptr;
  ConvTraits traits = {};
};

struct ConvRow : KernelInfo, ConvFamily {};

// The rows, those first that are tried first; the last one computes every node.
std::span<const ConvRow* const> ConvTable();
// The row of a configuration. Throws Error where it is another kernel's than a convolution's.
const ConvRow& RowOf(const ConvConfig& config);
// What nodes are packed in besides what the tile kernels read.
std::span<const WeightLayout* const> WeightLayouts();

// Parts of a family's parameters (conv_params.h): what neither tensors nor constants tell.

WindowParams WindowsOf(const ConvProblem& problem);
// The classes of windows by how they reach out of the image; nullopt where there are too many for a table.
std::optional<BorderParams> BorderOf(const ConvGeometry& g);
TapParams TapsOf(const ConvProblem& problem);
PixelParams PixelsOf(const ConvProblem& problem);
TileParams TilesOf(const ConvProblem& problem, const ConvConfig& config);
SumsParams SumsOf(const ConvProblem& problem, const ConvConfig& config);
BoxParams BoxesOf(const ConvProblem& problem, const ConvConfig& config);

// launch(params, config, options), where `family` has been given the common ones.
template <typename Params, typename Launch>
ConvLauncher LauncherOf(const Params& family, const ConvConfig& config, const Launch& launch) {
  return [=](const ConvParams& common, const LaunchOptions& options) {
    Params p = family;
    static_cast<ConvParams&>(p) = common;
    if constexpr (std::is_base_of_v<SumsParams, Params>) p.partial = options.partial;
    return launch(p, config, options);
  };
}

// What the cost models of all rows share.

inline constexpr double kClocksPerMicrosecond = 1.7e3;
inline constexpr int64_t kMaxColumns = 65535;  // of a grid, in tiles of channels
// Two kernels in turns take this many times what they take in rows of equals, which is what estimates are of:
// one kernel in their place is compared with that.
inline constexpr double kUnlikeNeighbours = 1.3;

struct Tile {
  int m, n;
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What follows a kernel starts early on multiprocessors that this one leaves alone. In clocks.
inline double EstimateBusy(int64_t blocks, const Device& device) {
  const double share = static_cast<double>(blocks) / device.multiprocessors;
  return 970 * (share < 1 ? share : 1.0);
}

}  // namespace lowbit::cuda
