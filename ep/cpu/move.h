// Split, Slice and Transpose of codes on the CPU: ONNX's own nodes between lowbit nodes, at which a region would
// end.
#pragma once

#include <memory>

#include "core/cpu/operator.h"
#include "core/nodes/standard_nodes.h"

namespace lowbit::ep {

// Its input 0 is fed. Throws Error, with the reason, for other ops and for elements of more than a byte.
std::unique_ptr<Operator> CreateMove(StandardNode node, ElementType type);

}  // namespace lowbit::ep
