// Two 1x1 convolutions of stride 1 as one kernel with two outputs: the second one reads what the first one
// writes, y, and what it makes of that is z. In a residual network they are the last convolution of a block,
// whose sums with the residuals the next block adds again, and the first one of the next block. Saves a
// launch, and reading y again. Where a third one makes these residuals and nobody else reads them (as in
// ResidualPair), it is a part of the kernel, too; that one and the first may then have strides. A convolution with
// windows is, too, which makes what that one reads and nobody else does, or where there is none, what the first reads:
// then a bottleneck is one launch from its windows to the next one's first convolution.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/nodes.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/fused/fused_row.h"

namespace lowbit::cuda {

class PackedNode;

struct ConvChain {
  std::shared_ptr<const PackedConv> first, second;
  ConvShape shape;                              // of the first
  std::shared_ptr<const PackedConv> residuals;  // what makes those of the first, or nullptr
  ConvShape residuals_shape = {};
  // What makes the input of what makes residuals, else of the first, or nullptr.
  std::shared_ptr<const PackedConv> windows = nullptr;
  ConvShape windows_shape = {};
};
extern const FusedRow<ConvChain> kChainKernel;
// The chain that two nodes are, the second of which is fed the output of the first; nullopt where they are
// other nodes than convolutions, the first maybe two of them (PackResidualPair), or do not fit each other.
std::optional<ConvChain> FindChain(const PackedNode& first, std::span<const TensorShape> first_fed,
                                   const PackedNode& second, std::span<const TensorShape> second_fed);
// The same behind a node whose output the first is fed before all else.
std::optional<ConvChain> FindChain(const PackedNode& windows, std::span<const TensorShape> windows_fed,
                                   const PackedNode& first, std::span<const TensorShape> first_fed,
                                   const PackedNode& second, std::span<const TensorShape> second_fed);

// A printable choice of how the work on tiles of 64 pixels is spread.
struct ChainConfig {
  int ranks = 1;   // blocks of a cluster: each makes a part of the channels of the same tiles
  int teams = 1;   // tiles that a block has in work at once
  int groups = 1;  // warpgroups for each of them

  std::string Text() const;
  bool operator==(const ChainConfig&) const = default;
};

// Every configuration worth a trial that computes the chain exactly on its device, the cost model's choice
// first; none where the kernel does not apply.
std::vector<ChainConfig> CandidateChains(const ConvChain& chain);
// Whether the cost model takes the first of them for faster than two kernels.
bool ChainPays(const ConvChain& chain);

class ChainPlan;
// `config`: one of the candidates.
std::shared_ptr<const ChainPlan> PlanChain(const ConvChain& chain, const ChainConfig& config);
const ChainConfig& PlanConfig(const ChainPlan& plan);
// As LaunchConv. `added`: the residuals, or what is read by the convolution that makes them. What is made by windows is
// none of the two: what these read is in its place.
void LaunchChain(const ChainPlan& plan, const void* x, const void* added, void* y, void* z, Queue& queue);

}  // namespace lowbit::cuda
