// LowBitThreshold: float32 to codes by counting thresholds, optionally moving channels last.
#include <algorithm>
#include <cmath>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

void CheckRow(const NodeReader& node, const ThresholdSpec& spec, size_t c, OperandType y) {
  const int64_t last = spec.base[c] + spec.count;
  Require(spec.base[c] >= y.MinCode() && last <= y.MaxCode(), node.op(), ": the codes ", spec.base[c], "..",
          last, " of channel ", c, " leave the range ", y.MinCode(), "..", y.MaxCode(),
          " of y_bits, expected codes inside it");
  const float* row = spec.thresholds.data() + c * static_cast<size_t>(spec.count);
  for (int64_t k = 0; k < spec.count; ++k) {
    Require(!std::isnan(row[k]), node.op(), ": the thresholds of channel ", c,
            " hold NaN, expected numbers (infinities are allowed)");
    Require(k == 0 || row[k - 1] <= row[k], node.op(), ": the thresholds of channel ", c,
            " are not sorted, expected dir * T to ascend: ", row[k - 1], ", ", row[k], " with dir ",
            spec.dir[c]);
  }
}

}  // namespace

ThresholdNode DecodeThreshold(const NodeReader& node) {
  const OperandType y = node.Operand("y_bits", "y_encoding");
  const std::vector<int64_t>& shape = node.Constant("thresholds", ElementType::kFloat).shape;
  Require(shape.size() == 2 && shape[0] >= 1 && shape[0] <= kMaxAttribute && shape[1] >= 1 && shape[1] <= 255,
          node.op(), ": input 'thresholds' has shape ", ShapeText(shape), ", expected [channels, 1..255]");
  ThresholdSpec spec;
  spec.count = shape[1];
  spec.y_signed = y.encoding == Encoding::kSigned;
  spec.channels = std::max({shape[0], ConstantLength(node, "base", ElementType::kInt32),
                            ConstantLength(node, "dir", ElementType::kInt32)});
  Require(shape[0] == 1 || shape[0] == spec.channels, node.op(), ": input 'thresholds' has ", shape[0],
          " rows, expected 1 or ", spec.channels, " as base and dir have");
  // One row for all is repeated: a file must not make 255 numbers of every one that it holds, without end.
  constexpr int64_t kMaxTable = int64_t{1} << 24;
  Require(shape[0] == spec.channels || spec.channels * spec.count <= kMaxTable, node.op(), ": ",
          spec.channels, " channels share ", spec.count, " thresholds, expected at most ", kMaxTable,
          " in all; write one row per channel");
  spec.base = node.BroadcastInt32sOf("base", spec.channels);
  for (const int32_t dir : node.BroadcastInt32sOf("dir", spec.channels)) {
    Require(dir == 1 || dir == -1, node.op(), ": input 'dir' holds ", dir, ", expected +1 or -1");
    spec.dir.push_back(static_cast<float>(dir));
  }
  const std::vector<float> rows = node.MatrixOfFloats("thresholds", shape[0] * shape[1]);
  spec.thresholds.resize(static_cast<size_t>(spec.channels * spec.count));
  for (size_t i = 0; i < spec.thresholds.size(); ++i) {
    const size_t c = i / static_cast<size_t>(spec.count);
    spec.thresholds[i] = spec.dir[c] * rows[i % rows.size()];
  }
  // A search addresses its table by int32.
  Require(spec.channels <= (int64_t{1} << 22), node.op(), ": ", spec.channels,
          " channels, expected at most 4194304");
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) CheckRow(node, spec, c, y);
  return {std::move(spec), node.Flag("to_channels_last")};
}

std::vector<int64_t> OutputDims(const ThresholdNode& node, const FedShape& x) {
  CheckFed(x, ElementType::kFloat, "x");
  return ShapeOfCodes(x.dims, node.to_channels_last, node.spec.channels);
}

}  // namespace lowbit
