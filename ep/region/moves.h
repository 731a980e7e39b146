// Nodes that only move channels of tensors of codes, each code to one that a table has for it, or that round numbers to
// codes: who makes such a tensor may store it at once where they would.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/nodes.h"
#include "core/nodes/standard_nodes.h"

namespace lowbit::ep {

// What comes from each fed tensor, in their order: all of the node's output. Nothing at shapes where there is more to the
// node.
using MoveFunction = std::function<std::vector<ChannelMove>(std::span<const TensorShape> fed)>;

// The node as one table for the bytes of codes: LowBitLookup with one table, LowBitRequantize between two
// grids of all channels. nullopt for others.
std::optional<LookupNode> AsLookup(const NodeSpec& node);

// Null for nodes that do something else than LowBitConcat, JoinOp, SliceOp, SplitOp, LowBitQuantize to one grid and
// those that are tables (AsLookup).
MoveFunction MovesOf(const NodeSpec& node);
MoveFunction MovesOf(const StandardNode& node);

}  // namespace lowbit::ep
