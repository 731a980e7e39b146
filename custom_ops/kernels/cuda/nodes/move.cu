// Elements that only move: copies, LowBitResize, LowBitDepthToSpace, Transpose, Slice, Split, Pad, Resize.
//
// All of them are one gather: y in order, x at an offset that each dim adds to. Dims that lie side by side in
// both are merged first, so that a thread can move 16 bytes where the innermost dim allows it. A
// transposition that exchanges the innermost dims goes through tiles in shared memory instead.
#include <algorithm>
#include <optional>

#include "kernels/cuda/conv/places.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kMaxDims = 8;
constexpr int kTile = 32;
constexpr int kTileRows = kThreads / kTile;

struct CopyParams {
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  int64_t count = 0;  // bytes
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads) Copy(const __grid_constant__ CopyParams p) {
  const int64_t at = static_cast<int64_t>(StartThread()) * kBytes;
  if (at >= p.count) return;
  const int valid = static_cast<int>(min(static_cast<int64_t>(kBytes), p.count - at));
  StoreCodes(p.y + at, LoadCodes<kBytes>(p.x + at, valid), valid);
}

// How index o of one dim of y moves through x: by o steps of `stride` elements, or to table[o]. Steps may be
// negative; unsigned sums wrap to the same offsets.
struct GatherDim {
  FastDivisor size;
  unsigned stride = 0;
  const int32_t* table = nullptr;             // elements from the dim's beginning
  unsigned inside_begin = 0, inside_end = 0;  // other indices are padding
};

struct GatherParams : Tensors<uint8_t, uint8_t> {  // count: vectors of y
  int element = 1;                                 // bytes
  int dims = 0;
  bool pads = false;
  unsigned base = 0;        // elements
  uint32_t fill = 0;        // four bytes of padding
  GatherDim dim[kMaxDims];  // innermost first, which counts vectors
  // Of codes; y is null where places alone get them.
  PlaceParams places[kMostPlaces];
  int place_count = 0;
  FastDivisor by_pixel;  // vectors of a pixel, where there are places
};

template <int kBytes, int kDims>
__global__ void __launch_bounds__(kThreads) Gather(const __grid_constant__ GatherParams p) {
  const unsigned vector = StartThread();
  if (vector >= p.count) return;
  unsigned rest = vector, offset = p.base;
  bool inside = true;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    if (i >= p.dims) break;
    const GatherDim& d = p.dim[i];
    const auto [next, index] = Divided(rest, d.size);
    rest = next;
    offset += d.table != nullptr ? static_cast<unsigned>(d.table[index]) : index * d.stride;
    if (p.pads) inside = inside && index >= d.inside_begin && index < d.inside_end;
  }
  Codes<kBytes> codes = Splat<kBytes>(p.fill);
  if (inside) codes = LoadCodes<kBytes>(p.x + static_cast<int64_t>(offset) * p.element);
  if constexpr (kBytes > 1) {  // channels of places come in runs
    if (p.place_count > 0) {
      const auto [pixel, column] = Divided(vector, p.by_pixel);
      StoreInPlaces(p, pixel, static_cast<int>(column * kBytes), codes);
    }
  }
  if (p.y != nullptr) StoreCodes(p.y + static_cast<int64_t>(vector) * kBytes, codes);
}

// y[.., j, .., i] = x[.., i, .., j]: `i` is innermost in y, `j` in x.
struct TileParams : Tensors<void, void> {  // count: tiles
  unsigned rows = 0, columns = 0;          // sizes of j and of i
  int64_t x_stride = 0, y_stride = 0;      // elements from i to i + 1 in x, from j to j + 1 in y
  FastDivisor by_rows, by_columns;         // tiles along j and along i
  int outer_dims = 0;
  FastDivisor size[kMaxDims];
  int64_t x_step[kMaxDims] = {}, y_step[kMaxDims] = {};
};

template <typename T>
__global__ void __launch_bounds__(kThreads) TransposeTiles(const __grid_constant__ TileParams p) {
  __shared__ T tile[kTile][kTile + 4 / sizeof(T)];
  LetSuccessorsStart();
  WaitForPredecessors();
  const auto [lines, column_tile] = Divided(blockIdx.x, p.by_columns);
  const auto [outer, row_tile] = Divided(lines, p.by_rows);
  const unsigned i0 = column_tile * kTile, j0 = row_tile * kTile;
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y);
  unsigned rest = outer;
  for (int d = 0; d < p.outer_dims; ++d) {
    const auto [next, index] = Divided(rest, p.size[d]);
    x += index * p.x_step[d];
    y += index * p.y_step[d];
    rest = next;
  }
  const unsigned lane = threadIdx.x % kTile, row = threadIdx.x / kTile;
#pragma unroll
  for (unsigned k = row; k < kTile; k += kTileRows) {
    if (i0 + k < p.columns && j0 + lane < p.rows) tile[k][lane] = x[(i0 + k) * p.x_stride + j0 + lane];
  }
  __syncthreads();
#pragma unroll
  for (unsigned k = row; k < kTile; k += kTileRows) {
    if (j0 + k < p.rows && i0 + lane < p.columns) y[(j0 + k) * p.y_stride + i0 + lane] = tile[lane][k];
  }
}

// One dim of y while a plan is made, outermost first.
struct MovedDim {
  int64_t size = 1, stride = 0;  // elements
  int64_t inside_begin = 0, inside_end = 0;
  std::vector<int32_t> table;  // elements; empty: by stride

  bool Whole() const { return inside_begin == 0 && inside_end == size; }
};

MovedDim Moved(int64_t size, int64_t stride) { return {size, stride, 0, size, {}}; }

// Merges neighbours through which x moves as through one dim. Only the outer one may be padded.
std::vector<MovedDim> Merge(const std::vector<MovedDim>& dims) {
  std::vector<MovedDim> out;
  for (const MovedDim& d : dims) {
    if (d.size == 1 && d.Whole() && d.table.empty()) continue;
    if (!out.empty() && out.back().table.empty() && d.table.empty() && d.Whole() &&
        out.back().stride == d.stride * d.size) {
      MovedDim& outer = out.back();
      outer = {outer.size * d.size, d.stride, outer.inside_begin * d.size, outer.inside_end * d.size, {}};
    } else {
      out.push_back(d);
    }
  }
  if (out.empty()) out.push_back(Moved(1, 1));
  return out;
}

struct Move {
  std::string name;
  std::vector<MovedDim> dims;    // of y
  std::vector<int64_t> strides;  // of x
  int64_t base = 0;              // elements
  int64_t count = 0;
  int64_t channels = 1;  // y's last dim
  int element = 1;
  uint32_t fill = 0;
};

Move MoveTo(const char* name, const TensorShape& x, const TensorShape& y) {
  Move move;
  move.name = name;
  move.count = CountOf(y.dims);
  if (!y.dims.empty()) move.channels = y.dims.back();
  move.element = static_cast<int>(ElementSize(y.type));
  move.strides.assign(x.dims.size(), 1);
  for (size_t i = x.dims.size(); i-- > 1;) move.strides[i - 1] = move.strides[i] * x.dims[i];
  return move;
}

// Whether y can be gathered in vectors of `unit` bytes.
bool Divides(const Move& move, int unit) {
  const MovedDim& inner = move.dims.back();
  if (unit == move.element) return true;
  if (unit < move.element || inner.stride != 1 || !inner.table.empty()) return false;
  const auto whole = [&](int64_t elements) { return elements * move.element % unit == 0; };
  return whole(inner.size) && whole(inner.inside_begin) && whole(inner.inside_end) && whole(move.base) &&
         std::all_of(move.dims.begin(), move.dims.end() - 1, [&](const MovedDim& d) {
           return whole(d.stride) && std::all_of(d.table.begin(), d.table.end(), whole);
         });
}

// The dim of y that is innermost in x, where both it and y's innermost one fill tiles.
std::optional<size_t> TiledRow(const Move& move) {
  constexpr int64_t kLeast = 8;
  const std::vector<MovedDim>& dims = move.dims;
  if (dims.back().stride == 1 || dims.back().size < kLeast) return std::nullopt;
  for (size_t i = 0; i + 1 < dims.size(); ++i) {
    if (dims[i].stride == 1 && dims[i].size >= kLeast) return i;
  }
  return std::nullopt;
}

NodePlanPtr PlanTiles(const Move& move, size_t row) {
  TileParams p;
  int64_t y_stride = 1, tiles = 1;
  for (size_t i = move.dims.size(); i-- > 0;) {
    const MovedDim& d = move.dims[i];
    if (i + 1 == move.dims.size()) {
      p.columns = static_cast<unsigned>(d.size);
      p.x_stride = d.stride;
      p.by_columns = MakeDivisor(BlocksFor(d.size, kTile));
      tiles *= p.by_columns.divisor;
    } else if (i == row) {
      p.rows = static_cast<unsigned>(d.size);
      p.y_stride = y_stride;
      p.by_rows = MakeDivisor(BlocksFor(d.size, kTile));
      tiles *= p.by_rows.divisor;
    } else {
      p.size[p.outer_dims] = MakeDivisor(d.size);
      p.x_step[p.outer_dims] = d.stride;
      p.y_step[p.outer_dims++] = y_stride;
      tiles *= d.size;
    }
    y_stride *= d.size;
  }
  p.count = static_cast<unsigned>(tiles);
  const auto kernel = move.element == 1 ? TransposeTiles<uint8_t> : TransposeTiles<uint32_t>;
  return MakeKernelPlan(move.name + "_tiles", p, [kernel](const Run& run, const TileParams& tile) {
    run.Launch(kernel, dim3(tile.count), kThreads, tile);
  });
}

NodePlanPtr PlanGather(const Move& move, const Device& device, const StoredChannels& stored) {
  GatherParams geometry;  // in elements
  geometry.count = static_cast<unsigned>(move.count);
  geometry.element = move.element;
  geometry.base = static_cast<unsigned>(move.base);
  geometry.fill = move.fill;
  NodeConstants constants;
  for (size_t i = move.dims.size(); i-- > 0;) {
    const MovedDim& from = move.dims[i];
    GatherDim& to = geometry.dim[geometry.dims++];
    to.size = MakeDivisor(from.size);
    to.stride = static_cast<unsigned>(from.stride);
    to.inside_begin = static_cast<unsigned>(from.inside_begin);
    to.inside_end = static_cast<unsigned>(from.inside_end);
    geometry.pads = geometry.pads || !from.Whole();
    constants.Add(from.table, to.table);
  }
  const auto memory = constants.Upload(device);
  int most = 16;
  while (!Divides(move, most)) most /= 4;
  const auto launch = [most, stored, channels = move.channels](const Run& run, GatherParams p) {
    const int unit = std::min(most, CommonUnit({p.x, p.y}));
    // Vectors along the innermost dim.
    const auto elements = static_cast<unsigned>(unit / p.element);
    p.count /= elements;
    GatherDim& inner = p.dim[0];
    inner.size = MakeDivisor(inner.size.divisor / elements);
    inner.stride *= elements;
    inner.inside_begin /= elements;
    inner.inside_end /= elements;
    if (stored.Count() > 0) p.by_pixel = MakeDivisor(channels / unit);
    SetPlaces(stored, run, unit, p);
    std::visit(
        [&](auto bytes) {
          constexpr int kFewDims = 5;
          run.LaunchFor(p.count, p.dims <= kFewDims ? Gather<bytes, kFewDims> : Gather<bytes, kMaxDims>,
                        kThreads, p);
        },
        OneOf<16, 4, 1>(unit));
  };
  return Hold(MakeKernelPlan(move.name + "_gather", geometry, launch), memory);
}

NodePlanPtr PlanMove(Move move, const Device& device, const StoredChannels& stored = {}) {
  move.dims = Merge(move.dims);
  Require(move.dims.size() <= kMaxDims, "a move through ", move.dims.size(),
          " dims that cannot be merged, expected at most ", kMaxDims);
  if (move.count == 0) return MakePlan(move.name + "_gather", [](const Run&) {});
  const bool plain = std::all_of(move.dims.begin(), move.dims.end(),
                                 [](const MovedDim& d) { return d.table.empty() && d.Whole(); });
  const bool may_tile = plain && move.base == 0 && stored.Count() == 0;
  const std::optional<size_t> row = may_tile ? TiledRow(move) : std::nullopt;
  return row ? PlanTiles(move, *row) : PlanGather(move, device, stored);
}

// Appends the dim of y whose index o reads index source[o] of a dim of x. Where that is o / d, the dim of y
// becomes that of x and one of d indices that stand still.
void AppendResized(Move& move, const std::vector<int64_t>& source, int64_t x_size, int64_t stride) {
  const auto y_size = static_cast<int64_t>(source.size()), times = std::max<int64_t>(1, y_size / x_size);
  bool repeats = x_size * times == y_size;
  for (int64_t o = 0; repeats && o < y_size; ++o) repeats = source[static_cast<size_t>(o)] == o / times;
  if (repeats) {
    move.dims.push_back(Moved(x_size, stride));
    move.dims.push_back(Moved(times, 0));
    return;
  }
  MovedDim& dim = move.dims.emplace_back(Moved(y_size, 0));
  for (const int64_t s : source) dim.table.push_back(static_cast<int32_t>(s * stride));
}

Move MoveOf(const ResizeNode& node, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("resize", x, y);
  for (size_t i = 0; move.count > 0 && i < x.dims.size(); ++i) {
    if (i > 0 && i + 1 < x.dims.size() && x.dims[i] != 1) {
      AppendResized(move, node.SourceIndices(i - 1, x.dims[i], y.dims[i]), x.dims[i], move.strides[i]);
    } else {
      move.dims.push_back(Moved(y.dims[i], x.dims[i] == 1 ? 0 : move.strides[i]));
    }
  }
  return move;
}

// [N, H, W, block, block, C] (or C before the blocks) to [N, H, block, W, block, C].
Move MoveOf(const DepthToSpaceNode& node, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("depth_to_space", x, y);
  const int64_t block = node.block, channels = y.dims[3];
  const int64_t row = node.channels_first ? block : block * channels;
  const int64_t column = node.channels_first ? 1 : channels;
  const int64_t channel = node.channels_first ? block * block : 1;
  move.dims = {Moved(x.dims[0] * x.dims[1], x.dims[2] * x.dims[3]), Moved(block, row),
               Moved(x.dims[2], x.dims[3]), Moved(block, column), Moved(channels, channel)};
  return move;
}

Move MoveOf(const TransposeOp& op, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("transpose", x, y);
  for (const size_t from : PermOf(op, x.dims.size())) {
    move.dims.push_back(Moved(x.dims[from], move.strides[from]));
  }
  return move;
}

Move MoveRanges(const char* name, const std::vector<SliceRange>& ranges, const TensorShape& x,
                const TensorShape& y) {
  Move move = MoveTo(name, x, y);
  for (size_t i = 0; i < x.dims.size(); ++i) {
    move.dims.push_back(Moved(ranges[i].count, move.strides[i] * ranges[i].step));
    move.base += ranges[i].begin * move.strides[i];
  }
  return move;
}

Move MoveOf(const SliceOp& op, const TensorShape& x, const TensorShape& y) {
  return MoveRanges("slice", RangesOf(op, x.dims), x, y);
}

Move MoveOf(const SplitOp& op, const TensorShape& x, const TensorShape& y) {
  return MoveRanges("split", RangesOf(op, x.dims), x, y);
}

Move MoveOf(const PadOp& op, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("pad", x, y);
  for (size_t i = 0; i < 4; ++i) move.fill |= uint32_t{op.value[i % op.value.size()]} << (8 * i);
  const std::vector<PadWidth> widths = WidthsOf(op, x.dims.size());
  for (size_t i = 0; i < x.dims.size(); ++i) {
    MovedDim dim = Moved(y.dims[i], move.strides[i]);
    dim.inside_begin = widths[i].begin;
    dim.inside_end = widths[i].begin + x.dims[i];
    move.base -= widths[i].begin * move.strides[i];
    move.dims.push_back(std::move(dim));
  }
  return move;
}

Move MoveOf(const NearestOp& op, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("resize", x, y);
  const std::vector<std::optional<size_t>> entries = EntriesOf(op, x.dims.size());
  for (size_t i = 0; i < x.dims.size(); ++i) {
    if (entries[i] && x.dims[i] != 1) {
      AppendResized(move, op.along.SourceIndices(*entries[i], x.dims[i], y.dims[i]), x.dims[i],
                    move.strides[i]);
    } else {
      move.dims.push_back(Moved(y.dims[i], x.dims[i] == 1 ? 0 : move.strides[i]));
    }
  }
  return move;
}

template <typename Node>
PackedNodePtr MakeMove(const Node& node, const Device& device) {
  return MakeNode(
      [node, device](Shapes fed, const TensorShape& y) { return PlanMove(MoveOf(node, fed[0], y), device); });
}

}  // namespace

PackedNodePtr PackCopy(const Device&) {
  return MakeNode([](Shapes, const TensorShape& y) {
    CopyParams geometry;
    geometry.count = CountOf(y.dims) * static_cast<int64_t>(ElementSize(y.type));
    return MakeKernelPlan("copy", geometry, [](const Run& run, const CopyParams& p) {
      std::visit([&](auto unit) { run.LaunchFor((p.count + unit - 1) / unit, Copy<unit>, kThreads, p); },
                 OneOf<16, 4, 1>(CommonUnit({p.x, p.y})));
    });
  });
}

PackedNodePtr Pack(const ReshapeOp&, const Device& device) { return PackCopy(device); }
PackedNodePtr Pack(const ResizeNode& node, const Device& device) {
  const auto plan = [node, device](Shapes fed, const TensorShape& y, const StoredChannels& stored) {
    return PlanMove(MoveOf(node, fed[0], y), device, stored);
  };
  return MakeStoringNode(plan, device);
}
PackedNodePtr Pack(const DepthToSpaceNode& node, const Device& device) { return MakeMove(node, device); }
PackedNodePtr Pack(const TransposeOp& op, const Device& device) { return MakeMove(op, device); }
PackedNodePtr Pack(const SliceOp& op, const Device& device) { return MakeMove(op, device); }
PackedNodePtr Pack(const SplitOp& op, const Device& device) { return MakeMove(op, device); }
PackedNodePtr Pack(const PadOp& op, const Device& device) { return MakeMove(op, device); }
PackedNodePtr Pack(const NearestOp& op, const Device& device) { return MakeMove(op, device); }

}  // namespace lowbit::cuda
