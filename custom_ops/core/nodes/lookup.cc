// LowBitLookup: a 256-entry table, for all channels or one per channel.
#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {

LookupNode DecodeLookup(const NodeReader& node) {
  constexpr int64_t kTableSize = 256;
  const ConstTensor& table = node.Constant("table", ElementType::kUInt8);
  const bool per_channel = table.shape.size() == 2;
  Require((per_channel || table.shape.size() == 1) && table.shape.back() == kTableSize && table.shape[0] >= 1,
          node.op(), ": input 'table' has shape ", ShapeText(table.shape), ", expected [256] or [C, 256]");
  const auto* bytes = static_cast<const uint8_t*>(table.data);
  return {.x_signed = node.EncodingOf("x_encoding") == Encoding::kSigned,
          .y_signed = node.EncodingOf("y_encoding") == Encoding::kSigned,
          .channels = per_channel ? table.shape[0] : 1,
          .table = {bytes, bytes + BoundedCount(table.shape)}};
}

std::vector<int64_t> OutputDims(const LookupNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.x_signed), "x");
  RequireChannels(x.dims, node.channels);
  return ToVector(x.dims);
}

}  // namespace lowbit
