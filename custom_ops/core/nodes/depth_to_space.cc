// LowBitDepthToSpace: blocks of channels become blocks of pixels; codes only move.
#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {

DepthToSpaceNode DecodeDepthToSpace(const NodeReader& node) {
  const std::string& mode = node.String("mode");
  Require(mode == "DCR" || mode == "CRD", node.op(), ": attribute 'mode' is '", mode,
          "', expected DCR or CRD");
  return {.block = node.Int("blocksize", 1, kMaxAttribute),
          .channels_first = mode == "CRD",
          .is_signed = node.EncodingOf("x_encoding") == Encoding::kSigned};
}

std::vector<int64_t> OutputDims(const DepthToSpaceNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.is_signed), "x");
  std::vector<int64_t> y = ToVector(x.dims);
  const int64_t pixels = node.block * node.block;
  Require(y.size() == 4, "x has shape ", ShapeText(y), ", expected rank 4");
  Require(y[3] % pixels == 0, "x has ", y[3], " channels, expected a multiple of ", pixels);
  y[1] = CheckedProduct(y[1], node.block, "the output's height");
  y[2] = CheckedProduct(y[2], node.block, "the output's width");
  y[3] /= pixels;
  BoundedCount(y);
  return y;
}

}  // namespace lowbit
