#include "ep/region/moves.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <variant>

#include "core/epilogue.h"

namespace lowbit::ep {
namespace {

bool HasPixelsOfCodes(const TensorShape& x) {
  return !x.dims.empty() && (x.type == ElementType::kUInt8 || x.type == ElementType::kInt8);
}

// The inputs of a concatenation of channels, each with its table or none.
std::vector<ChannelMove> JoinedChannels(std::span<const TensorShape> fed, int64_t axis,
                                        const std::vector<std::vector<uint8_t>>& tables) {
  const auto rank = static_cast<int64_t>(fed.empty() ? 0 : fed[0].dims.size());
  if (rank == 0 || (axis < 0 ? axis + rank : axis) != rank - 1) return {};
  int64_t channels = 0;
  for (const TensorShape& x : fed) {
    if (!HasPixelsOfCodes(x)) return {};
    channels += x.dims.back();
  }
  std::vector<ChannelMove> moves;
  int64_t at = 0;
  for (size_t i = 0; i < fed.size(); ++i) {
    const int64_t count = fed[i].dims.back();
    moves.push_back({0, count, at, channels, tables.empty() ? std::vector<uint8_t>() : tables[i]});
    at += count;
  }
  return moves;
}

std::vector<uint8_t> TableOf(const AffineSpec& x, const Quantizer& y) {
  std::vector<uint8_t> table;
  for (int byte = 0; byte < 256; ++byte) {
    const int32_t code = x.x_signed ? static_cast<int8_t>(byte) : byte;
    const float value = DequantizeCode(code, x.x_scale.front(), x.x_zero_point.front());
    table.push_back(static_cast<uint8_t>(QuantizeCode(value, y.scale, y.zero_point, y.lo, y.hi)));
  }
  return table;
}

MoveFunction OfConcat(const ConcatNode& node) {
  std::vector<std::vector<uint8_t>> tables;
  tables.reserve(node.parts.size());
  for (const auto& [copied, spec] : node.parts)
    tables.push_back(copied ? std::vector<uint8_t>() : TableOf(spec, node.quantizer));
  return [axis = node.axis, tables = std::move(tables)](std::span<const TensorShape> fed) {
    return JoinedChannels(fed, axis, tables);
  };
}

// A part of the channels, all else as it is.
template <typename Op>
MoveFunction OfCut(const Op& op) {
  return [op](std::span<const TensorShape> fed) -> std::vector<ChannelMove> {
    if (!HasPixelsOfCodes(fed[0])) return {};
    const std::vector<int64_t>& dims = fed[0].dims;
    const std::vector<SliceRange> ranges = RangesOf(op, dims);
    for (size_t i = 0; i + 1 < dims.size(); ++i) {
      if (ranges[i].begin != 0 || ranges[i].step != 1 || ranges[i].count != dims[i]) return {};
    }
    const SliceRange& channels = ranges.back();
    if (channels.step != 1) return {};
    return {{channels.begin, channels.count, 0, channels.count, {}}};
  };
}

// Numbers that are rounded to one grid as they lie.
MoveFunction OfQuantize(const QuantizeNode& node) {
  if (node.grids.size() != 1 || node.to_channels_last) return nullptr;
  return [grid = node.grids.front()](std::span<const TensorShape> fed) -> std::vector<ChannelMove> {
    if (fed[0].dims.empty()) return {};
    const int64_t channels = fed[0].dims.back();
    return {{0, channels, 0, channels, {}, grid}};
  };
}

}  // namespace

std::optional<LookupNode> AsLookup(const NodeSpec& node) {
  if (const auto* const lookup = std::get_if<LookupNode>(&node))
    return lookup->channels == 1 ? std::optional(*lookup) : std::nullopt;
  const auto* const affine = std::get_if<AffineNode>(&node);
  if (affine == nullptr || affine->spec.channels != 1 || affine->spec.has_affine ||
      !affine->spec.quantizer.quantized) {
    return std::nullopt;
  }
  Quantizer y = affine->spec.quantizer;
  y.scale = affine->spec.y_scale.front();
  y.zero_point = affine->spec.y_zero_point.front();
  return LookupNode{affine->spec.x_signed, y.is_signed, 1, TableOf(affine->spec, y)};
}

MoveFunction MovesOf(const NodeSpec& node) {
  if (const auto* const concat = std::get_if<ConcatNode>(&node)) return OfConcat(*concat);
  if (const auto* const quantize = std::get_if<QuantizeNode>(&node)) return OfQuantize(*quantize);
  const std::optional<LookupNode> lookup = AsLookup(node);
  if (!lookup) return nullptr;
  return [table = lookup->table](std::span<const TensorShape> fed) -> std::vector<ChannelMove> {
    if (!HasPixelsOfCodes(fed[0])) return {};
    const int64_t channels = fed[0].dims.back();
    return {{0, channels, 0, channels, table}};
  };
}

MoveFunction MovesOf(const StandardNode& node) {
  return std::visit(
      [](const auto& op) -> MoveFunction {
        using Op = std::decay_t<decltype(op)>;
        if constexpr (std::is_same_v<Op, SliceOp> || std::is_same_v<Op, SplitOp>) {
          return OfCut(op);
        } else if constexpr (std::is_same_v<Op, JoinOp>) {
          return [axis = op.axis](std::span<const TensorShape> fed) { return JoinedChannels(fed, axis, {}); };
        } else {
          return nullptr;
        }
      },
      node);
}

}  // namespace lowbit::ep
