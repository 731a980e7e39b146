#include "core/stated_codes.h"

#include <algorithm>
#include <vector>

#include "core/status.h"

namespace lowbit {
namespace {

using Codes = std::optional<MadeCodes>;
using Fed = std::span<const Codes>;

Codes First(Fed fed) { return fed.empty() ? Codes() : fed[0]; }

Codes Stated(const Quantizer& q) { return q.quantized ? Codes(MadeCodes{q.lo, q.hi, true}) : std::nullopt; }

// Counting begins at a channel's base and takes at most `count` steps.
Codes Counted(const std::vector<int32_t>& base, int64_t count) {
  const auto [lo, hi] = std::minmax_element(base.begin(), base.end());
  return MadeCodes{*lo, *hi + static_cast<int32_t>(count), true};
}

// Nothing is known of a kind that is not named below, which is always right.
template <typename Node>
Codes Made(const Node&, Fed) {
  return std::nullopt;
}

Codes Made(const MatmulNode& node, Fed) {
  const Epilogue& e = node.conv.epilogue;
  if (!e.quantized_output) return std::nullopt;
  if (e.kind == EpilogueKind::kThresholds) return Counted(e.base, e.threshold_count);
  return MadeCodes{e.y_lo, e.y_hi, true};
}

Codes Made(const AffineNode& node, Fed) { return Stated(node.spec.quantizer); }
Codes Made(const BinaryNode& node, Fed) { return Stated(node.spec.quantizer); }
Codes Made(const FedMatmulNode& node, Fed) { return Stated(node.spec.quantizer); }
Codes Made(const AveragePoolNode& node, Fed) { return Stated(node.spec.quantizer); }
Codes Made(const GlobalAveragePoolNode& node, Fed) { return Stated(node.spec.quantizer); }
Codes Made(const QuantizeNode& node, Fed) { return Stated(node.grids.front()); }
Codes Made(const ThresholdNode& node, Fed) { return Counted(node.spec.base, node.spec.count); }
Codes Made(const SoftmaxNode& node, Fed) { return Stated(node.quantizer); }
Codes Made(const ResizeNode& node, Fed fed) {
  return node.mode == ResizeNode::Mode::kNearest ? First(fed) : Stated(node.quantizer);
}
Codes Made(const DepthToSpaceNode&, Fed fed) { return First(fed); }

Codes OfTable(std::span<const uint8_t> table, bool is_signed) {
  MadeCodes made{255, -128, false};
  for (const uint8_t byte : table) {
    const int32_t code = is_signed ? static_cast<int8_t>(byte) : int32_t{byte};
    made.lo = std::min(made.lo, code), made.hi = std::max(made.hi, code);
  }
  return made;
}
Codes Made(const LookupNode& node, Fed) { return OfTable(node.table, node.y_signed); }
Codes Made(const ImageNode& node, Fed) { return OfTable(node.table, node.y_signed); }

Codes Made(const MaxPoolNode& node, Fed fed) {
  Codes made = First(fed);
  // A dilated window may have no tap inside the image, which gives the lowest code of the storage.
  if (made && node.is_signed && node.window.dilation != SpatialNumbers{1, 1, 1})
    made = MadeCodes{-128, made->hi, false};
  return made;
}

Codes Made(const ConcatNode& node, Fed fed) {
  Codes made;
  for (size_t i = 0; i < node.parts.size(); ++i) {
    Codes part = Stated(node.quantizer);
    if (node.parts[i].copied) part = i < fed.size() ? fed[i] : std::nullopt;
    made = i == 0 ? part : Joined(made, part);
  }
  return made;
}

}  // namespace

std::optional<MadeCodes> Joined(const std::optional<MadeCodes>& a, const std::optional<MadeCodes>& b) {
  if (!a || !b) return std::nullopt;
  return MadeCodes{std::min(a->lo, b->lo), std::max(a->hi, b->hi), a->stated && b->stated};
}

std::optional<MadeCodes> CodesMadeBy(const NodeSpec& node, std::span<const std::optional<MadeCodes>> fed) {
  return std::visit([&](const auto& each) { return Made(each, fed); }, node);
}

bool HoldsStatedBits(const MatmulNode& node, const std::optional<MadeCodes>& codes) {
  const OperandType x = node.conv.x;
  if (x.bits == 8) return true;
  if (!codes) return false;
  const bool holds = codes->lo >= x.MinCode() && codes->hi <= x.MaxCode();
  Require(holds || !codes->stated, node.op, ": the node that makes x states the codes ", codes->lo, "..",
          codes->hi, ", attribute 'x_bits' is ", x.bits, ", codes ", x.MinCode(), "..", x.MaxCode(),
          "; write as many bits for both");
  return holds;
}

bool AreLowBits(std::span<const uint8_t> bytes, LowBits low) {
  uint8_t seen = 0;
  for (const uint8_t byte : bytes) seen |= static_cast<uint8_t>(byte + low.flip);
  return (seen & ~low.mask) == 0;
}

}  // namespace lowbit
