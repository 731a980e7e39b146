// Convolution and Gemm nodes on NVIDIA GPUs: constants packed once per device (PackedConv), a plan per shape
// (ConvPlan), a launch that only enqueues kernels. No ONNX Runtime; the execution provider is a thin caller.
//
// Activations are NHWC codes (uint8 or int8, bipolar {0,1} as uint8), one byte each; outputs are codes or
// float32. Every algorithm equals kernels/reference in every element.
//
// Not there yet: weights below 8 bits are unpacked to int8 when they are packed, but for what `bits` and
// `flat_bits` read; there are no nibbles in memory; ConvTranspose and convolutions of few channels a group run the
// plain kernel only, depthwise ones too where their channels are no multiple of 16. Run so far on an H200 and an
// H100 alone: the kernels of sm_80 as they choose with that capability, those of sm_75 as PTX compiled by the
// driver; sm_86, 89, 100 and 120 were only compiled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/bit_planes.h"
#include "core/conv.h"
#include "core/elementwise.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/queue.h"

namespace lowbit::cuda {

// What there is to say about a kernel, or about a family that is configured by tiles.
struct KernelInfo {
  const char* name;   // of its configurations: "halo"
  const char* needs;  // the instruction set: "sm_75" and later, "sm_90a" alone
  const char* note;   // one line for the documentation: what it is good at
};
// One thread per output: the GPU's own reference, which computes every node.
const KernelInfo& PlainKernel();

// How the sum over K is spread over blocks, where split > 1.
enum class Split : uint8_t {
  kCluster,    // one cluster per tile; its blocks add through distributed shared memory (sm_90 and later)
  kWorkspace,  // int32 partial sums in the workspace, added in a fixed order by a second kernel
};

// A printable choice of kernel and tile. Tile sizes are bytes of shared memory along pixels (m) and output
// channels (n); along k every tile is 128 bytes.
struct ConvConfig {
  const KernelInfo* kernel = &PlainKernel();
  int tile_m = 0, tile_n = 0;
  int stages = 0;  // tiles in flight; windows: of weights
  int splits = 1;
  // wgmma: a warpgroup of its own fetches tiles; else all of a block's tiles fit at once.
  bool producers = false;
  bool boxes = false;  // wgmma: one thread fetches tiles, those of pixels by TMA
  // wgmma, boxes: two blocks of neighbouring channels, a cluster, fetch each pixel once for both.
  bool multicast = false;
  Split split = Split::kCluster;
  // Takes so much shared memory that a multiprocessor has one block at a time: where kernels overlap, blocks
  // otherwise share those that the kernel before leaves first, while others idle.
  bool apart = false;
  bool packs = false;  // bits: a kernel before it makes planes of the input
  // Residual pair: all weights of a block's channels stay in shared memory. Team: those of two columns of channels do, whose
  // tiles come in turns, pixel by pixel.
  bool keeps_weights = false;

  std::string Text() const;
  bool operator==(const ConvConfig&) const = default;
};

// The constants of a node in one device's memory: weights in tile order, epilogue tables. Immutable, shared
// by the plans of every shape.
class PackedConv;
// The grid of codes that leave a node as float32, as LowBitDequantize makes them.
struct CodeGrid {
  bool is_signed = false;
  float scale = 1;
  int32_t zero_point = 0;
};
// Numbers, each of the byte of a code, and residuals, added as LowBitAdd adds them or multiplied as LowBitMul does.
struct ResidualSum {
  std::vector<float> values;  // [256]
  CodeGrid residuals, y;
  int32_t lo = 0, hi = 255;  // of y's codes
  bool multiplies = false;
};
// Limits of a float sum.
struct FloatLimits {
  float low = 0, high = 0;
};
// What a node's codes become before they are stored: float32, or the codes that a table has for their bytes, as
// LowBitLookup has it; at most one of them. Or, of no node that adds residuals itself, the sum of what stands for their
// bytes (whose numbers `added` has; then the table is what is stored where the sum is another node's) and residuals.
struct StoredAs {
  std::optional<CodeGrid> dequantized;
  std::vector<uint8_t> table;        // [256] or empty
  std::optional<ResidualSum> added;  // fits (FitsTableSum)
  // To the float results of a node without residuals the numbers of another tensor of their dims are added, which takes
  // the place of residuals.
  std::optional<FloatLimits> float_sum = std::nullopt;
};
// `packed`: what SavePacked gave for the same node; spec.weights may be empty then. Throws Error.
std::shared_ptr<const PackedConv> PackConv(const ConvSpec& spec, const Device& device,
                                           std::span<const uint8_t> packed = {}, const StoredAs& stored = {});
std::vector<uint8_t> SavePacked(const PackedConv& conv);

// Where codes of some channels are stored besides: in pixels of another tensor. Channels are multiples of 16. Or the
// codes that float results become (`rounding`), all channels.
struct ConvPlace {
  int64_t first = 0, count = 0;    // of the node
  int64_t at = 0, channels = 0;    // where the tensor has the first one, how many it has
  const uint8_t* table = nullptr;  // [256] in the device's memory, which has what is stored for codes' bytes
  std::optional<Quantizer> rounding = std::nullopt;
};
struct ConvPlaces {
  std::vector<ConvPlace> list;  // kMostPlaces (conv_params.h)
  bool keeps_output = true;     // else codes are stored there alone
  // Float results that are kept are rounded to float16 and lie as that; what is added to them does.
  bool makes_halves = false, adds_halves = false;
};

// Every configuration that computes this node exactly on this device, the cost model's choice first. There may be
// none for planes.
std::vector<ConvConfig> CandidateConfigs(const PackedConv& conv, const ConvShape& shape,
                                         bool has_places = false, const TensorPlanes& planes = {});
// In how many planes kernels may read the node's input; 0: in none.
int PlanesRead(const PackedConv& conv);
// Of the best of the candidates; nullopt where there are none.
std::optional<double> EstimateMicroseconds(const PackedConv& conv, const ConvShape& shape,
                                           const TensorPlanes& planes);

class ConvPlan;
// Throws Error where `config` is none of the candidates or the shape is none of the node's.
std::shared_ptr<const ConvPlan> PlanConv(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                         const std::optional<ConvConfig>& config = std::nullopt,
                                         const ConvPlaces& places = {}, const TensorPlanes& planes = {});
std::shared_ptr<const ConvPlan> PlanConv(const ConvSpec& spec, const ConvShape& shape, const Device& device);

// The codes before the residual is added, by the plain kernel; those that a table has numbers for, by the best one.
std::shared_ptr<const ConvPlan> PlanWithoutResidual(std::shared_ptr<const PackedConv> conv,
                                                    const ConvShape& shape);

const ConvConfig& PlanConfig(const ConvPlan& plan);
size_t PlanWorkspaceBytes(const ConvPlan& plan);

// Enqueues the node; re-entrant, and legal during graph capture. `x`, `residual` and `y` are device pointers
// aligned to 16 bytes (the `x` of an image kernel to its elements), `workspace` has
// PlanWorkspaceBytes bytes (null when that is 0) aligned to 256 and belongs to this launch until it is done.
// `y` may lie where the residuals do, and is not written where places alone get the codes; `places`: the tensors of
// these.
void LaunchConv(const ConvPlan& plan, const void* x, const void* residual, void* y, void* workspace,
                Queue& queue, std::span<void* const> places = {});

// For benchmarks: plans the `limit` most promising candidates, asks `measure` for the time of each (any
// unit), returns the fastest. Caching is the caller's.
ConvConfig TuneConv(const std::shared_ptr<const PackedConv>& conv, const ConvShape& shape,
                    const std::function<double(const ConvPlan&)>& measure, size_t limit = 64,
                    const TensorPlanes& planes = {});

}  // namespace lowbit::cuda
