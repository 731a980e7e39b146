// Elements that only move: copies, LowBitResize, LowBitDepthToSpace, Transpose, Slice, Pad.
//
// All of them are one gather: y in order, x at an offset that each dim adds to. Dims that lie side by side in
// both are merged first, so that a thread can move 16 bytes where the innermost dim allows it. A
// transposition that exchanges the innermost dims goes through tiles in shared memory instead.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxDims = 8;
constexpr int kTile = 32;
constexpr int kTileRows = kThreads / kTile;

struct CopyParams {
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  int64_t bytes = 0;
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads) Copy(const __grid_constant__ CopyParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kBytes;
  if (at >= p.bytes) return;
  const int valid = static_cast<int>(min(static_cast<int64_t>(kBytes), p.bytes - at));
  StoreCodes<kBytes>(p.y + at, LoadCodes<kBytes>(p.x + at, valid), valid);
}

// How index o of one dim of y moves through x: by o / divisor steps of `stride` units, or to table[o]. Steps
// may be negative; unsigned sums wrap to the same offsets.
struct GatherDim {
  FastDivisor size, divisor;
  unsigned stride = 0;
  const int32_t* table = nullptr;             // units from the dim's beginning
  unsigned inside_begin = 0, inside_end = 0;  // other indices are padding
};

struct GatherParams {
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  unsigned units = 0;
  int dims = 0;
  bool pads = false;
  unsigned base = 0;        // units
  uint32_t fill = 0;        // four bytes of padding
  GatherDim dim[kMaxDims];  // innermost first
};

__device__ __forceinline__ unsigned StepsOf(const GatherDim& d, unsigned index) {
  if (d.table != nullptr) return static_cast<unsigned>(d.table[index]);
  return (d.divisor.divisor == 1 ? index : Quotient(index, d.divisor)) * d.stride;
}

template <int kBytes, int kDims>
__global__ void __launch_bounds__(kThreads) Gather(const __grid_constant__ GatherParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned unit = blockIdx.x * kThreads + threadIdx.x;
  if (unit >= p.units) return;
  unsigned rest = unit, offset = p.base;
  bool inside = true;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    if (i >= p.dims) break;
    const GatherDim& d = p.dim[i];
    const unsigned next = Quotient(rest, d.size), index = rest - next * d.size.divisor;
    rest = next;
    offset += StepsOf(d, index);
    if (p.pads) inside = inside && index >= d.inside_begin && index < d.inside_end;
  }
  Codes<kBytes> codes;
#pragma unroll
  for (unsigned& word : codes.w) word = p.fill;
  if (inside) codes = LoadCodes<kBytes>(p.x + static_cast<int64_t>(offset) * kBytes);
  StoreCodes<kBytes>(p.y + static_cast<int64_t>(unit) * kBytes, codes);
}

// y[.., j, .., i] = x[.., i, .., j]: `i` is innermost in y, `j` in x.
struct TileParams {
  const void* x = nullptr;
  void* y = nullptr;
  unsigned rows = 0, columns = 0;      // sizes of j and of i
  int64_t x_stride = 0, y_stride = 0;  // elements from i to i + 1 in x, from j to j + 1 in y
  FastDivisor by_rows, by_columns;     // tiles along j and along i
  int outer_dims = 0;
  FastDivisor size[kMaxDims];
  int64_t x_step[kMaxDims] = {}, y_step[kMaxDims] = {};
};

template <typename T>
__global__ void __launch_bounds__(kThreads) TransposeTiles(const __grid_constant__ TileParams p) {
  __shared__ T tile[kTile][kTile + 4 / sizeof(T)];
  LetSuccessorsStart();
  WaitForPredecessors();
  unsigned rest = Quotient(blockIdx.x, p.by_columns);
  const unsigned i0 = (blockIdx.x - rest * p.by_columns.divisor) * kTile;
  unsigned next = Quotient(rest, p.by_rows);
  const unsigned j0 = (rest - next * p.by_rows.divisor) * kTile;
  rest = next;
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y);
  for (int d = 0; d < p.outer_dims; ++d) {
    next = Quotient(rest, p.size[d]);
    const int64_t index = rest - next * p.size[d].divisor;
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
  int64_t divisor = 1;
  std::vector<int64_t> table;  // elements; empty: by stride

  bool Plain() const { return divisor == 1 && table.empty(); }
  bool Whole() const { return inside_begin == 0 && inside_end == size; }
};

MovedDim Moved(int64_t size, int64_t stride) { return {size, stride, 0, size, 1, {}}; }

// Merges neighbours through which x moves as through one dim. Only the outer one may be padded.
std::vector<MovedDim> Merge(const std::vector<MovedDim>& dims) {
  std::vector<MovedDim> out;
  for (const MovedDim& d : dims) {
    if (d.size == 1 && d.Whole() && d.table.empty()) continue;
    if (!out.empty() && out.back().Plain() && d.Plain() && d.Whole() &&
        out.back().stride == d.stride * d.size) {
      MovedDim& outer = out.back();
      outer = {outer.size * d.size, d.stride, outer.inside_begin * d.size, outer.inside_end * d.size, 1, {}};
    } else {
      out.push_back(d);
    }
  }
  if (out.empty()) out.push_back(Moved(1, 1));
  return out;
}

// A move as plans keep it: what is not yet counted in units.
struct Move {
  std::string name;
  std::vector<MovedDim> dims;
  int64_t base = 0;  // elements
  int64_t count = 0;
  int element = 1;
  uint32_t fill = 0;
  bool pads = false;
  std::shared_ptr<const DeviceMemory> memory;
  std::vector<std::array<const int32_t*, 3>> tables;  // per dim, for units of 16, 4 and 1 bytes
};

constexpr int kUnitIndex[] = {16, 4, 1};

// Whether y can be gathered in units of `unit` bytes.
bool Divides(const Move& move, int unit) {
  const auto whole = [&](int64_t elements) { return elements * move.element % unit == 0; };
  const MovedDim& inner = move.dims.back();
  if (unit == move.element) return true;
  if (unit < move.element || inner.stride != 1 || !inner.Plain()) return false;
  if (!whole(inner.size) || !whole(inner.inside_begin) || !whole(inner.inside_end) || !whole(move.base)) {
    return false;
  }
  return std::all_of(move.dims.begin(), move.dims.end() - 1, [&](const MovedDim& d) {
    return whole(d.stride) && std::all_of(d.table.begin(), d.table.end(), whole);
  });
}

GatherParams ParamsOf(const Move& move, int unit) {
  GatherParams p;
  const int64_t per_unit = unit / move.element;
  p.units = static_cast<unsigned>(move.count / per_unit);
  p.base = static_cast<unsigned>(move.base / per_unit);
  p.fill = move.fill;
  p.pads = move.pads;
  for (size_t i = move.dims.size(); i-- > 0;) {
    const MovedDim& from = move.dims[i];
    const bool inner = i + 1 == move.dims.size();
    GatherDim& to = p.dim[p.dims++];
    const int64_t shrink =
        inner ? per_unit : 1;  // the innermost dim has fewer indices, the others shorter steps
    to.size = MakeDivisor(from.size / shrink);
    to.divisor = MakeDivisor(from.divisor);
    to.stride = static_cast<unsigned>(inner && per_unit > 1 ? 1 : from.stride / per_unit);
    to.inside_begin = static_cast<unsigned>(from.inside_begin / shrink);
    to.inside_end = static_cast<unsigned>(from.inside_end / shrink);
    if (!from.table.empty()) to.table = move.tables[i][unit == 16 ? 0 : unit == 4 ? 1 : 2];
  }
  return p;
}

NodePlanPtr PlanGather(Move move) {
  Require(move.dims.size() <= kMaxDims, "a move through ", move.dims.size(),
          " dims that cannot be merged, expected at most ", kMaxDims);
  const std::string text = move.name + "_gather";
  return MakePlan(text, [move = std::move(move)](Fed from, void* to, void*, Queue& queue) {
    if (move.count == 0) return;
    int unit = CommonUnit({from[0], to});
    while (!Divides(move, unit)) unit /= 4;
    GatherParams p = ParamsOf(move, unit);
    p.x = static_cast<const uint8_t*>(from[0]);
    p.y = static_cast<uint8_t*>(to);
    cudaError_t error = cudaSuccess;
    WithInt<16, 4, 1>(unit, [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value, kFewDims = 4;
      const dim3 grid = GridFor(p.units, kThreads);
      error = p.dims <= kFewDims ? queue.Launch(Gather<kBytes, kFewDims>, grid, dim3(kThreads), p)
                                 : queue.Launch(Gather<kBytes, kMaxDims>, grid, dim3(kThreads), p);
    });
    CheckLaunch(error, move.name.c_str());
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
  int64_t y_stride = 1, blocks = 1;
  for (size_t i = move.dims.size(); i-- > 0;) {
    const MovedDim& d = move.dims[i];
    if (i + 1 == move.dims.size()) {
      p.columns = static_cast<unsigned>(d.size);
      p.x_stride = d.stride;
      p.by_columns = MakeDivisor((d.size + kTile - 1) / kTile);
      blocks *= p.by_columns.divisor;
    } else if (i == row) {
      p.rows = static_cast<unsigned>(d.size);
      p.y_stride = y_stride;
      p.by_rows = MakeDivisor((d.size + kTile - 1) / kTile);
      blocks *= p.by_rows.divisor;
    } else {
      p.size[p.outer_dims] = MakeDivisor(d.size);
      p.x_step[p.outer_dims] = d.stride;
      p.y_step[p.outer_dims++] = y_stride;
      blocks *= d.size;
    }
    y_stride *= d.size;
  }
  const bool bytes = move.element == 1;
  return MakePlan(move.name + "_tiles", [p, blocks, bytes](Fed from, void* to, void*, Queue& queue) {
    TileParams q = p;
    q.x = from[0];
    q.y = to;
    const dim3 grid(static_cast<unsigned>(blocks));
    CheckLaunch(bytes ? queue.Launch(TransposeTiles<uint8_t>, grid, dim3(kThreads), q)
                      : queue.Launch(TransposeTiles<uint32_t>, grid, dim3(kThreads), q),
                "transpose");
  });
}

NodePlanPtr PlanMove(Move move) {
  move.dims = Merge(move.dims);
  const bool plain = std::all_of(move.dims.begin(), move.dims.end(),
                                 [](const MovedDim& d) { return d.Plain() && d.Whole(); });
  Require(move.dims.size() <= kMaxDims, "a move through ", move.dims.size(),
          " dims that cannot be merged, expected at most ", kMaxDims);
  if (plain && move.base == 0 && move.count > 0) {
    if (const std::optional<size_t> row = TiledRow(move)) return PlanTiles(move, *row);
  }
  return PlanGather(std::move(move));
}

std::vector<int64_t> Strides(const std::vector<int64_t>& dims) {
  std::vector<int64_t> out(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) out[i - 1] = out[i] * dims[i];
  return out;
}

Move MoveTo(const char* name, const TensorShape& y) {
  Move move;
  move.name = name;
  move.count = CountOf(y.dims);
  move.element = static_cast<int>(ElementSize(y.type));
  return move;
}

// The divisor d where source[o] is o / d throughout, 0 where there is none.
int64_t DivisorOf(const std::vector<int64_t>& source) {
  const auto next = std::find_if(source.begin(), source.end(), [](int64_t s) { return s != 0; });
  const int64_t divisor = next - source.begin();
  for (size_t o = 0; o < source.size(); ++o) {
    if (divisor == 0 || source[o] != static_cast<int64_t>(o) / divisor) return 0;
  }
  return divisor;
}

// Uploads the tables of a move's dims, in units of 16, 4 and 1 bytes.
void UploadTables(Move& move, const Device& device) {
  NodeConstants constants;
  std::vector<std::array<size_t, 3>> offsets(move.dims.size());
  for (size_t i = 0; i < move.dims.size(); ++i) {
    for (size_t u = 0; u < 3; ++u) {
      std::vector<int32_t> table;
      for (const int64_t elements : move.dims[i].table) {
        table.push_back(static_cast<int32_t>(elements * move.element / kUnitIndex[u]));
      }
      offsets[i][u] = constants.Add(table);
    }
  }
  if (constants.Bytes().empty()) return;
  move.memory = UploadConstants(constants, device);
  for (const auto& offset : offsets) {
    std::array<const int32_t*, 3> tables;
    for (size_t u = 0; u < 3; ++u) {
      tables[u] = reinterpret_cast<const int32_t*>(move.memory->At(offset[u]));
    }
    move.tables.push_back(tables);
  }
}

NodePlanPtr PlanResize(const ResizeNode& node, const TensorShape& x, const TensorShape& y,
                       const Device& device) {
  Move move = MoveTo("resize", y);
  if (move.count == 0) return PlanGather(std::move(move));
  const std::vector<int64_t> strides = Strides(x.dims);
  for (size_t i = 0; i < x.dims.size(); ++i) {
    MovedDim dim = Moved(y.dims[i], strides[i]);
    if (i > 0 && i + 1 < x.dims.size() && x.dims[i] != 1) {
      const std::vector<int64_t> source = node.SourceIndices(i - 1, x.dims[i], y.dims[i]);
      dim.divisor = DivisorOf(source);
      if (dim.divisor == 0) {
        dim.divisor = 1;
        for (const int64_t s : source) dim.table.push_back(s * strides[i]);
      }
    } else if (x.dims[i] == 1) {
      dim.stride = 0;
    }
    move.dims.push_back(std::move(dim));
  }
  move.dims = Merge(move.dims);
  UploadTables(move, device);
  return PlanGather(std::move(move));
}

// [N, H, W, block, block, C] (or C before the blocks) to [N, H, block, W, block, C].
NodePlanPtr PlanDepthToSpace(const DepthToSpaceNode& node, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("depth_to_space", y);
  const int64_t block = node.block, channels = y.dims[3];
  const int64_t row = node.channels_first ? block : block * channels;
  const int64_t column = node.channels_first ? 1 : channels;
  const int64_t channel = node.channels_first ? block * block : 1;
  move.dims = {Moved(x.dims[0] * x.dims[1], x.dims[2] * x.dims[3]), Moved(block, row),
               Moved(x.dims[2], x.dims[3]), Moved(block, column), Moved(channels, channel)};
  return PlanMove(std::move(move));
}

NodePlanPtr PlanTranspose(const TransposeOp& op, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("transpose", y);
  const std::vector<int64_t> strides = Strides(x.dims);
  for (const size_t from : PermOf(op, x.dims.size())) {
    move.dims.push_back(Moved(x.dims[from], strides[from]));
  }
  return PlanMove(std::move(move));
}

NodePlanPtr PlanSlice(const SliceOp& op, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("slice", y);
  const std::vector<int64_t> strides = Strides(x.dims);
  const std::vector<SliceRange> ranges = RangesOf(op, x.dims);
  for (size_t i = 0; i < x.dims.size(); ++i) {
    move.dims.push_back(Moved(ranges[i].count, strides[i] * ranges[i].step));
    move.base += ranges[i].begin * strides[i];
  }
  return PlanMove(std::move(move));
}

NodePlanPtr PlanPad(const PadOp& op, const TensorShape& x, const TensorShape& y) {
  Move move = MoveTo("pad", y);
  move.pads = true;
  for (size_t i = 0; i < 4; ++i) move.fill |= uint32_t{op.value[i % op.value.size()]} << (8 * i);
  const std::vector<int64_t> strides = Strides(x.dims);
  const std::vector<PadWidth> widths = WidthsOf(op, x.dims.size());
  for (size_t i = 0; i < x.dims.size(); ++i) {
    MovedDim dim = Moved(y.dims[i], strides[i]);
    dim.inside_begin = widths[i].begin;
    dim.inside_end = widths[i].begin + x.dims[i];
    move.base -= widths[i].begin * strides[i];
    move.dims.push_back(std::move(dim));
  }
  return PlanMove(std::move(move));
}

}  // namespace

std::unique_ptr<PackedNode> PackCopy(const Device&) {
  return MakeNode([](Shapes, const TensorShape& y) {
    const int64_t bytes = CountOf(y.dims) * static_cast<int64_t>(ElementSize(y.type));
    return MakePlan("copy", [bytes](Fed from, void* to, void*, Queue& queue) {
      if (bytes == 0) return;
      const CopyParams p{static_cast<const uint8_t*>(from[0]), static_cast<uint8_t*>(to), bytes};
      cudaError_t error = cudaSuccess;
      WithInt<16, 4, 1>(CommonUnit({p.x, p.y}), [&](auto unit) {
        constexpr int kBytes = decltype(unit)::value;
        error =
            queue.Launch(Copy<kBytes>, GridFor((bytes + kBytes - 1) / kBytes, kThreads), dim3(kThreads), p);
      });
      CheckLaunch(error, "copy");
    });
  });
}

std::unique_ptr<PackedNode> PackResize(const ResizeNode& node, const Device& device) {
  return MakeNode(
      [node, device](Shapes fed, const TensorShape& y) { return PlanResize(node, fed[0], y, device); });
}
std::unique_ptr<PackedNode> PackDepthToSpace(const DepthToSpaceNode& node) {
  return MakeNode([node](Shapes fed, const TensorShape& y) { return PlanDepthToSpace(node, fed[0], y); });
}
std::unique_ptr<PackedNode> PackTranspose(const TransposeOp& op) {
  return MakeNode([op](Shapes fed, const TensorShape& y) { return PlanTranspose(op, fed[0], y); });
}
std::unique_ptr<PackedNode> PackSlice(const SliceOp& op) {
  return MakeNode([op](Shapes fed, const TensorShape& y) { return PlanSlice(op, fed[0], y); });
}
std::unique_ptr<PackedNode> PackPad(const PadOp& op) {
  return MakeNode([op](Shapes fed, const TensorShape& y) { return PlanPad(op, fed[0], y); });
}

}  // namespace lowbit::cuda
