// LowBitImage: two launches, one along each side of the picture. The first makes 8-bit pixels in scratch
// memory, the second the codes, and what lies around the picture. A thread makes a pixel.
#include <algorithm>
#include <array>

#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr unsigned kTableSize = 256;

// Sums along one side. Pixel `o` of it is the sum of count[o] pixels from first[o] on, `step` bytes apart.
struct SideParams {
  const int32_t *first = nullptr, *count = nullptr, *weights = nullptr;
  int most = 0, step = 0;
  // Where the sums of an image, a line and a column begin, in bytes; 0 for the side along which is summed.
  unsigned image = 0, line = 0, column = 0;
  bool along_lines = false;  // from left to right
  FastDivisor by_columns, by_lines;
};

struct FirstParams : Tensors<uint8_t, uint8_t> {  // count: pixels
  SideParams side;
};

struct SecondParams : Tensors<uint8_t, uint8_t> {  // count: pixels of y
  SideParams side;
  unsigned top = 0, left = 0, rows = 0, columns = 0;  // of the picture in y
  const uint8_t* table = nullptr;
  unsigned channels = 0, fill = 0;
  bool is_bgr = false;
};

__device__ __forceinline__ int PixelOf(int sum) { return min(max(sum >> ImageNode::kWeightBits, 0), 255); }

// kMakesGray: of three channels their luminance, one of kChannels.
template <int kChannels, bool kMakesGray>
__device__ __forceinline__ void Sum(const SideParams& side, const uint8_t* x, unsigned image, unsigned line,
                                    unsigned column, int (&pixel)[kChannels]) {
  const unsigned o = side.along_lines ? column : line;
  const int32_t* const weights = side.weights + static_cast<int64_t>(o) * side.most;
  x += static_cast<int64_t>(image) * side.image + static_cast<int64_t>(line) * side.line +
       static_cast<int64_t>(column) * side.column + static_cast<int64_t>(side.first[o]) * side.step;
  const int count = side.count[o];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) pixel[c] = 1 << (ImageNode::kWeightBits - 1);
  for (int k = 0; k < count; ++k, x += side.step) {
    const int weight = weights[k];
    if constexpr (kMakesGray) {
      pixel[0] += weight * ((x[0] * 19595 + x[1] * 38470 + x[2] * 7471 + (1 << 15)) >> 16);
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) pixel[c] += weight * x[c];
    }
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) pixel[c] = PixelOf(pixel[c]);
}

template <int kChannels, bool kMakesGray>
__global__ void __launch_bounds__(kThreads) ImageFirst(const __grid_constant__ FirstParams p) {
  const unsigned at = StartThread();
  if (at >= p.count) return;
  const auto [lines, column] = Divided(at, p.side.by_columns);
  const auto [image, line] = Divided(lines, p.side.by_lines);
  int pixel[kChannels];
  Sum<kChannels, kMakesGray>(p.side, p.x, image, line, column, pixel);
  uint8_t* const y = p.y + static_cast<int64_t>(at) * kChannels;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) y[c] = static_cast<uint8_t>(pixel[c]);
}

template <int kChannels>
__global__ void __launch_bounds__(kThreads) ImageSecond(const __grid_constant__ SecondParams p) {
  const unsigned at = StartThread();
  if (at >= p.count) return;
  const auto [lines, column] = Divided(at, p.side.by_columns);
  const auto [image, line] = Divided(lines, p.side.by_lines);
  int pixel[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) pixel[c] = static_cast<int>(p.fill);
  // Above and to the left of the picture differences wrap around.
  if (line - p.top < p.rows && column - p.left < p.columns) {
    Sum<kChannels, false>(p.side, p.x, image, line - p.top, column - p.left, pixel);
  }
  uint8_t* const y = p.y + static_cast<int64_t>(at) * p.channels;
  if (p.channels == 1) {
    y[0] = p.table[pixel[0]];
    return;
  }
  const int first = pixel[0], last = pixel[kChannels - 1];  // a picture of one channel has it three times
  y[0] = p.table[p.is_bgr ? last : first];
  y[1] = p.table[kTableSize + static_cast<unsigned>(pixel[kChannels / 2])];
  y[2] = p.table[2 * kTableSize + static_cast<unsigned>(p.is_bgr ? first : last)];
}

void Add(const ImageNode::Taps& taps, SideParams& side, NodeConstants& constants) {
  side.most = static_cast<int>(taps.most);
  constants.Add(taps.first, side.first);
  constants.Add(taps.count, side.count);
  constants.Add(taps.weights, side.weights);
}

NodePlanPtr PlanImage(const ImageNode& node, Shapes fed, const TensorShape& y,
                      const std::shared_ptr<const DeviceMemory>& table, const Device& device) {
  const int64_t count = fed[0].dims[0], width = fed[0].dims[2], x_channels = fed[0].dims[3];
  const int64_t channels = std::min(x_channels, node.Channels());
  const ImageNode::Placement place = node.PlacementOf({fed[0].dims[1], width});
  const int64_t top = std::max<int64_t>(place.top, 0), left = std::max<int64_t>(place.left, 0);
  const int64_t rows = std::min(place.output.height, place.top + place.resized.height) - top;
  const int64_t columns = std::min(place.output.width, place.left + place.resized.width) - left;
  const bool rows_first = place.RowsFirst();
  ImageNode::Taps across = node.TapsOf(width, place.resized.width, left - place.left, columns);
  ImageNode::Taps down = node.TapsOf(place.picture.height, place.resized.height, top - place.top, rows);
  // Where columns go first, the rows that are read.
  const int64_t first_line = rows_first ? 0 : down.first.front();
  const int64_t lines = rows_first ? rows : down.first.back() + down.count.back() - first_line;
  for (int32_t& first : down.first) first -= static_cast<int32_t>(first_line);
  const int64_t line = rows_first ? width : columns;  // pixels of what the first launch makes
  const int64_t between = CountOf(std::array{count, lines, line, channels});

  FirstParams first;
  SecondParams second;
  first.count = static_cast<unsigned>(count * lines * line);
  second.count = static_cast<unsigned>(CountOf(y.dims) / node.Channels());
  first.side.by_columns = MakeDivisor(line);
  first.side.by_lines = MakeDivisor(lines);
  second.side.by_columns = MakeDivisor(place.output.width);
  second.side.by_lines = MakeDivisor(place.output.height);
  first.side.image = static_cast<unsigned>(place.picture.height * width * x_channels);
  second.side.image = static_cast<unsigned>(lines * line * channels);
  first.side.along_lines = !rows_first;
  second.side.along_lines = rows_first;
  NodeConstants constants;
  Add(rows_first ? down : across, first.side, constants);
  Add(rows_first ? across : down, second.side, constants);
  const auto set_steps = [](SideParams& side, int64_t pixels, int64_t bytes) {
    const auto pixel = static_cast<unsigned>(bytes), row = static_cast<unsigned>(pixels * bytes);
    side.step = static_cast<int>(side.along_lines ? pixel : row);
    side.line = side.along_lines ? row : 0;
    side.column = side.along_lines ? 0 : pixel;
  };
  set_steps(first.side, width, x_channels);
  set_steps(second.side, line, channels);
  second.top = static_cast<unsigned>(top), second.left = static_cast<unsigned>(left);
  second.rows = static_cast<unsigned>(rows), second.columns = static_cast<unsigned>(columns);
  second.channels = static_cast<unsigned>(node.Channels());
  second.fill = node.fill;
  second.is_bgr = node.order == ImageNode::Order::kBgr;
  second.table = table->At(0);

  const int64_t skipped = first_line * width * x_channels;
  const bool makes_gray = channels < x_channels;
  const std::shared_ptr<const DeviceMemory> memory = constants.Upload(device);
  const auto launch = [=](const Run& run) {
    if (second.count == 0) return;
    FirstParams p = first;
    p.x = static_cast<const uint8_t*>(run.fed[0]) + skipped;
    p.y = static_cast<uint8_t*>(run.workspace);
    const auto kernel = makes_gray      ? ImageFirst<1, true>
                        : channels == 1 ? ImageFirst<1, false>
                                        : ImageFirst<3, false>;
    run.LaunchFor(p.count, kernel, kThreads, p);
    SecondParams q = second;
    q.x = static_cast<const uint8_t*>(run.workspace);
    q.y = static_cast<uint8_t*>(run.y);
    run.LaunchFor(q.count, channels == 1 ? ImageSecond<1> : ImageSecond<3>, kThreads, q);
  };
  const auto bytes = static_cast<size_t>((between + 255) / 256 * 256);
  return Hold(MakePlan(rows_first ? "image rows first" : "image columns first", launch, bytes), memory);
}

}  // namespace

PackedNodePtr Pack(const ImageNode& node, const Device& device) {
  auto table = std::make_shared<DeviceMemory>();
  {
    const DeviceGuard guard(device.ordinal);
    table->Upload(node.table.data(), node.table.size(), device);
  }
  const auto plan = [node, table, device](Shapes fed, const TensorShape& y) {
    return PlanImage(node, fed, y, table, device);
  };
  return MakeNode(plan, table);
}

}  // namespace lowbit::cuda
