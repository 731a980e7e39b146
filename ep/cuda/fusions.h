// Which nodes, in which order, become one step: the table of patterns. Kernels know no graph; what they
// compute and at which shapes, kernels/cuda/fused says.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/nodes.h"
#include "ep/cuda/tuner.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::ep {

// What a node of a pattern is. kLookup: what is one table (ep/region/moves.h), decoded as such.
enum class Part : uint8_t { kQuantize, kConv, kGemm, kMaxPool, kAdd, kBinary, kLookup, kAffine, kDequantize };

// How it reads what the one before it makes: first, or as its residuals, which it is fed behind its input; or
// not, then a later one reads both.
enum class Reads : uint8_t { kInput, kResidual, kNothing };

struct PatternNode {
  Part part;
  Reads reads = Reads::kInput;  // says nothing of the first
};

// The nodes of a step, decoded, in their order.
using Specs = std::span<const NodeSpec>;

struct Fusion {
  const char* name;  // one word, by which LOWBIT_CUDA_WITHOUT leaves it out
  const char* note;  // one line for the documentation
  std::span<const PatternNode> nodes;
  // Whether the nodes, which are those of the pattern, have a kernel for all of them, at some shape.
  bool (*fits)(Specs specs, const cuda::Device& device);
  // The step. `packed`: as of Backend::CreateStep. Throws Error.
  std::unique_ptr<cuda::PackedNode> (*pack)(Specs specs, const cuda::Device& device, Tuner& tuner,
                                            std::span<const uint8_t> packed);
};

// By which LOWBIT_CUDA_WITHOUT leaves out that tensors get channels (ep/region/channels.h).
inline constexpr const char* kPaddedChannels = "padded_channels";

// The same of steps that store channels in the tensors that Concat and Split would make of them
// (ep/region/moves.h).
inline constexpr const char* kStoredChannels = "stored_channels";

// The same of a float tensor that is added to what a product makes, and the Relu or Clip behind the sum.
inline constexpr const char* kFloatSum = "float_sum";

// The same of tensors of few bits that become planes (ep/region/planes.h).
inline constexpr const char* kPlanes = "planes";

// The same of a Concat in one launch with the normalization and the convolution behind it.
inline constexpr const char* kJoinedConv = "joined_conv";

// The same of windows in one launch with a chain behind them.
inline constexpr const char* kBottleneck = "bottleneck";

// The same of float tensors whose channels lie last (core/channels_last.h).
inline constexpr const char* kChannelsLast = "channels_last";

// A node as patterns see it.
struct FusedNode {
  std::string_view op;
  Reads reads = Reads::kInput;
};
// Throws Error where LOWBIT_CUDA_WITHOUT names what is no kernel, option or fusion (kernels/cuda/left_out.h).
void RequireKnownKernels();
// The fusion of these very nodes; nullptr where there is none or it is left out. fits is not asked.
const Fusion* FindFusion(std::span<const FusedNode> nodes);

// What the last node makes, where the first is fed `fed`, then what else each other one is.
TensorShape OutputOfFused(Specs specs, const Fusion& fusion, std::span<const TensorShape> fed);

}  // namespace lowbit::ep
