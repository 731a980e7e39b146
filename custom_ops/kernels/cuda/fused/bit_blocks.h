// A run of residual blocks of planes of bits as one launch: each a 1x1, a 3x3 and a 1x1 convolution that adds what the
// block reads, all of stride 1. An image stays in the shared memory of a cluster from the first block to the last, only
// weights come from elsewhere. Weights and codes have 1 or 2 bits.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/nodes.h"
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/fused/fused_row.h"

namespace lowbit::cuda {

class PackedNode;

inline constexpr int kMostBitBlocks = 8;

struct BitBlocks {
  // Those of each block, in order.
  std::vector<std::array<std::shared_ptr<const PackedConv>, 3>> convs;
  ConvShape shape;  // of all of them
};
// Those that nodes are, three each, of which the first is fed what the block before makes, each other one what the one
// before makes, and the last the same as the first besides; nullopt where they are others.
struct FedNode {
  const PackedNode* node = nullptr;
  std::span<const TensorShape> fed;
};
std::optional<BitBlocks> FindBitBlocks(std::span<const FedNode> nodes);
extern const FusedRow<BitBlocks> kBitBlocksKernel;

// A printable choice of what a block of a cluster has of an image: a band of rows, and a slice of the channels of each
// convolution; and of its warpgroups.
struct BitBlocksConfig {
  int bands = 1, slices = 1, groups = 4;

  std::string Text() const;
  bool operator==(const BitBlocksConfig&) const = default;
};

// Every configuration that computes the blocks exactly on their device, the cost model's choice first; none where the
// kernel does not apply.
std::vector<BitBlocksConfig> BitBlocksConfigs(const BitBlocks& blocks);
// As the cost model has it: of the first of them, and of a kernel for each convolution.
double EstimateMicroseconds(const BitBlocks& blocks);
double EstimateApart(const BitBlocks& blocks);

class BitBlocksPlan;
// `config`: one of these.
std::shared_ptr<const BitBlocksPlan> PlanBitBlocks(const BitBlocks& blocks, const BitBlocksConfig& config);
// As LaunchConv, without a workspace; `y` may lie where x does.
void LaunchBitBlocks(const BitBlocksPlan& plan, const void* x, void* y, Queue& queue);

// What the three convolutions of all blocks have in common.
struct BitBlockLayer {
  static constexpr int kMostSteps = 40;
  int rows = 0;   // of B
  int steps = 0;  // of each plane of weights
  int units = 0;  // of 64 channels, of a block of the cluster
  int words = 0;  // of a plane of what it makes
  // Where the weights lie in shared memory, and how many bytes a unit has at most.
  int weights_at = 0, unit_bytes = 0;
  int step[kMostSteps] = {};  // as in BitsParams
};
struct BitBlockConv {
  const uint8_t *weights = nullptr, *ones = nullptr;
  const int32_t *steps = nullptr, *last_steps = nullptr;
  const uint8_t* flips = nullptr;
  int w_planes = 1, w_shift = 0, w_lowest = 0, sum_offset = 0;
};
struct BitBlock {
  BitBlockConv convs[3];
  uint32_t products[kMostPlanes][kBitProducts] = {};  // BitsParams::products
};

// In front of the weights of a unit: steps of 64 channels, last ones, and flips.
inline constexpr int kBitUnitSteps = 64 * 4, kBitUnitConstants = 2 * kBitUnitSteps + 128;

// In shared memory lie weights, x, what the first convolutions make and what the second ones do, each as planes of words of
// places. Pixels of x are places in their order. What windows read has `pitch` places a row, the first of which is 0, one
// row in front of the band's own and one behind; from there on windows and outputs of the second convolution have as
// many. Codes of half words come from other blocks as the threads have them (parts), 512 bytes of each plane of a tile of
// 64 channels, and are put in their places by those who read them.
struct BitBlocksParams {
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  int blocks = 0, images = 0, h = 0, w = 0;
  int bits = 1, groups = 4;
  int bands = 1, slices = 1, rows = 0, pitch = 0;  // rows: of a band, the last of which may have fewer
  int pixel_tiles = 0, place_tiles = 0;            // of 64 pixels, of 64 places
  // Where each tensor begins, and places of its words.
  int x_at = 0, x_places = 0, windows_at = 0, windows_places = 0, windows_bytes = 0, made_at = 0,
      made_places = 0;
  // Of windows those of the band, then of the last row of the band above and of the first row of the one below, so many
  // tiles of each; there may be two of all that take turns.
  int window_parts_at = 0, window_parts_bytes = 0, turns = 1, above_tiles = 0, below_tiles = 0;
  int made_parts_at = 0;
  int shared_bytes = 0;
  FastDivisor by_w, by_pitch;
  BitBlockLayer layers[3];
  BitBlock block[kMostBitBlocks];
};
inline constexpr int kBitPartsBytes = 128 * 4;
static_assert(sizeof(BitBlocksParams) <= 4096);

// Warpgroups of a block: what registers allow.
inline constexpr int kMostBitBlocksGroups = 6;

cudaError_t LaunchBitBlocks(const BitBlocksParams& params, const LaunchOptions& options);

}  // namespace lowbit::cuda
