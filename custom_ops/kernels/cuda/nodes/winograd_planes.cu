// Convolutions of 3x3 windows, one pixel apart, by Winograd's F(4x4,3x3) in float32: 36 products for each channel of a
// square of 4x4 outputs instead of 144.
//
// As in winograd.cu, from polynomials through 0, a, -a, b, -b and infinity. Small points are usual, 1 and 2, yet errors
// are a fifth of theirs at a = 3/4, b = 3/2 (of the sums of 128 channels 2^-21.3 instead of 2^-19 of the magnitudes), whose
// powers float32 has, too. Row by row, with n = 2 a^2 (a^2 - b^2), m = 2 b^2 (b^2 - a^2):
//
//          (ab)^2     0  -a^2-b^2     0   1  0           1/(ab)^2    0     0             1   1    1   1    1  0
//             0   -ab^2    -b^2       a   1  0              1/n     a/n  a^2/n           0   a   -a   b   -b  0
//   B^T =     0    ab^2    -b^2      -a   1  0     G =      1/n    -a/n  a^2/n   A^T =   0  a^2  a^2 b^2  b^2 0
//             0   -a^2b    -a^2       b   1  0              1/m     b/m  b^2/m           0  a^3 -a^3 b^3 -b^3 1
//             0    a^2b    -a^2      -b   1  0              1/m    -b/m  b^2/m
//             0   (ab)^2      0   -a^2-b^2 0 1               0       0     1
//
// The pixels of all squares are transformed to memory, a plane of [channels][squares] for each of the 36 points; those are
// the groups of a 1x1 convolution on the tiles of float_product.cu; a third kernel transforms what that makes.
#include "kernels/cuda/nodes/float_product.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kSide = 6, kPoints = kSide * kSide;  // pixels along a square, and points
constexpr int kMade = 4;                           // outputs along a square
constexpr int kWindow = 3, kTaps = kWindow * kWindow;
constexpr int kBlock = 128;
constexpr float kA = 0.75f, kB = 1.5f;

struct PlanesParams : ProductParams {
  int squares = 0;
  FastDivisor by_pitch;            // squares of a plane of points, with some of zeros for whole vectors
  FastDivisor by_down, by_across;  // squares of a column, of a row
  bool stores_fours = false;       // four outputs side by side begin at 16 bytes, and are all there
};

// The first output of a square.
struct Corner {
  int image, y, x;

  __device__ __forceinline__ Corner(const PlanesParams& p, unsigned square) {
    const auto [line, across] = Divided(square, p.by_across);
    const auto [plane, down] = Divided(line, p.by_down);
    image = static_cast<int>(plane);
    y = static_cast<int>(down) * kMade;
    x = static_cast<int>(across) * kMade;
  }
};

__device__ __forceinline__ void TransformPixels(const float (&d)[kSide], float (&v)[kSide]) {
  constexpr float kA2 = kA * kA, kB2 = kB * kB;
  const float even_a = __fmaf_rn(-kB2, d[2], d[4]), odd_a = __fmaf_rn(-kB2, d[1], d[3]);
  const float even_b = __fmaf_rn(-kA2, d[2], d[4]), odd_b = __fmaf_rn(-kA2, d[1], d[3]);
  v[0] = __fmaf_rn(kA2 * kB2, d[0], __fmaf_rn(-kA2 - kB2, d[2], d[4]));
  v[1] = __fmaf_rn(kA, odd_a, even_a);
  v[2] = __fmaf_rn(-kA, odd_a, even_a);
  v[3] = __fmaf_rn(kB, odd_b, even_b);
  v[4] = __fmaf_rn(-kB, odd_b, even_b);
  v[5] = __fmaf_rn(kA2 * kB2, d[1], __fmaf_rn(-kA2 - kB2, d[3], d[5]));
}

__device__ __forceinline__ void TransformSums(const float (&m)[kSide], float (&y)[kMade]) {
  const float even_a = __fadd_rn(m[1], m[2]), odd_a = __fsub_rn(m[1], m[2]);
  const float even_b = __fadd_rn(m[3], m[4]), odd_b = __fsub_rn(m[3], m[4]);
  y[0] = __fadd_rn(m[0], __fadd_rn(even_a, even_b));
  y[1] = __fmaf_rn(kA, odd_a, __fmul_rn(kB, odd_b));
  y[2] = __fmaf_rn(kA * kA, even_a, __fmul_rn(kB * kB, even_b));
  y[3] = __fmaf_rn(kA * kA * kA, odd_a, __fmaf_rn(kB * kB * kB, odd_b, m[5]));
}

// A thread transforms a channel of a square.
__global__ void __launch_bounds__(kBlock) PixelsToPlanes(const __grid_constant__ PlanesParams p) {
  const unsigned at = StartThread<kBlock>();
  const auto [channel, square] = Divided(at, p.by_pitch);
  if (static_cast<int>(channel) >= p.channels) return;
  float points[kSide][kSide] = {};
  if (static_cast<int>(square) < p.squares) {
    const Corner of(p, square);
    const int in_h = static_cast<int>(p.windows.h.in), in_w = static_cast<int>(p.windows.w.in);
    const int top = of.y - static_cast<int>(p.windows.h.pad_begin);
    const int left = of.x - static_cast<int>(p.windows.w.pad_begin);
    const float* const plane = p.x + (int64_t{of.image} * p.channels + channel) * in_h * in_w;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      float pixels[kSide], column[kSide];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int y = top + j, x = left + i;
        const bool inside = y >= 0 && y < in_h && x >= 0 && x < in_w;
        pixels[j] = inside ? plane[int64_t{y} * in_w + x] : 0.0f;
      }
      TransformPixels(pixels, column);
#pragma unroll
      for (int j = 0; j < kSide; ++j) points[j][i] = column[j];
    }
  }
  const int64_t plane = int64_t{p.channels} * p.by_pitch.divisor;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    float row[kSide];
    TransformPixels(points[i], row);
#pragma unroll
    for (int j = 0; j < kSide; ++j) p.y[(i * kSide + j) * plane + at] = row[j];
  }
}

// A thread makes the outputs of a square.
__global__ void __launch_bounds__(kBlock) PlanesToOutputs(const __grid_constant__ PlanesParams p) {
  const unsigned at = StartThread<kBlock>();
  const auto [row, square] = Divided(at, p.by_pitch);
  if (static_cast<int>(row) >= p.rows || static_cast<int>(square) >= p.squares) return;
  const int64_t plane = int64_t{p.rows} * p.by_pitch.divisor;
  float down[kMade][kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    float sums[kSide], column[kMade];
#pragma unroll
    for (int j = 0; j < kSide; ++j) sums[j] = p.x[(j * kSide + i) * plane + at];
    TransformSums(sums, column);
#pragma unroll
    for (int j = 0; j < kMade; ++j) down[j][i] = column[j];
  }
  const Corner of(p, square);
  const int out_h = static_cast<int>(p.windows.h.out), out_w = static_cast<int>(p.windows.w.out);
  int64_t to = ((int64_t{of.image} * p.rows + row) * out_h + of.y) * out_w + of.x;
#pragma unroll
  for (int i = 0; i < kMade; ++i, to += out_w) {
    if (of.y + i >= out_h) return;
    float sums[kMade];
    TransformSums(down[i], sums);
    const auto finish = [&](int j, float added) {
      return FinishSum(p, static_cast<int>(row), sums[j], added);
    };
    if (p.stores_fours) {
      float added[kMade] = {};
      if (p.limits.adds) LoadFloats(p.residual + to, added);
      *reinterpret_cast<float4*>(p.y + to) =
          make_float4(finish(0, added[0]), finish(1, added[1]), finish(2, added[2]), finish(3, added[3]));
    } else {
#pragma unroll
      for (int j = 0; j < kMade; ++j) {
        if (of.x + j < out_w) p.y[to + j] = finish(j, ResidualAt(p, to + j));
      }
    }
  }
}

// G g G^T of each window, each rounded once: weights of the 1x1 convolution.
std::vector<float> TransformWeights(const FloatConvOp& op) {
  constexpr double kA2 = kA * kA, kB2 = kB * kB, kN = 2 * kA2 * (kA2 - kB2), kM = 2 * kB2 * (kB2 - kA2);
  constexpr double kG[kSide][kWindow] = {{1 / (kA2 * kB2), 0, 0},      {1 / kN, kA / kN, kA2 / kN},
                                         {1 / kN, -kA / kN, kA2 / kN}, {1 / kM, kB / kM, kB2 / kM},
                                         {1 / kM, -kB / kM, kB2 / kM}, {0, 0, 1}};
  std::vector<float> out;
  const size_t windows = op.weights.size() / kTaps;
  out.reserve(windows * kPoints);
  for (int point = 0; point < kPoints; ++point) {
    for (size_t window = 0; window < windows; ++window) {
      double sum = 0;
      for (int tap = 0; tap < kTaps; ++tap) {
        sum += kG[point / kSide][tap / kWindow] * kG[point % kSide][tap % kWindow] *
               double{op.weights[window * kTaps + static_cast<size_t>(tap)]};
      }
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

// The 1x1 convolution, without its weights, and what it reads and makes.
FloatConvOp ProductsOf(const FloatConvOp& op) {
  FloatConvOp products;
  products.group = kPoints;
  products.in_channels = kPoints * op.in_channels;
  products.out_channels = kPoints * op.out_channels;
  products.window.spatial = 2;
  return products;
}
struct PlaneShapes {
  TensorShape points, sums;
};
PlaneShapes ShapesOf(const FloatConvOp& op, const TensorShape& y) {
  const int64_t squares = y.dims[0] * BlocksFor(y.dims[2], kMade) * BlocksFor(y.dims[3], kMade);
  const int64_t pitch = BlocksFor(squares, kMade) * int64_t{kMade};
  const auto shape = [pitch](int64_t channels) {
    return TensorShape{ElementType::kFloat, {1, kPoints * channels, 1, pitch}};
  };
  return {shape(op.in_channels), shape(op.out_channels)};
}

size_t BytesOf(const TensorShape& shape) {
  constexpr size_t kAlignment = 256;
  return (static_cast<size_t>(CountOf(shape.dims)) * sizeof(float) + kAlignment - 1) / kAlignment *
         kAlignment;
}

PlanesParams Described(const FloatConvOp& op, const Limits& limits, const TensorShape& x,
                       const TensorShape& y) {
  PlanesParams p;
  Describe(op, limits, p);
  SetShapes(op, x, y, p);
  const int64_t down = BlocksFor(y.dims[2], kMade), across = BlocksFor(y.dims[3], kMade);
  p.squares = static_cast<int>(y.dims[0] * down * across);
  p.by_pitch = MakeDivisor(std::max<int64_t>(1, ShapesOf(op, y).points.dims[3]));
  p.by_down = MakeDivisor(std::max<int64_t>(1, down));
  p.by_across = MakeDivisor(std::max<int64_t>(1, across));
  return p;
}

}  // namespace

double CostOfPlanes(const FloatConvOp& op, const TensorShape& x, const TensorShape& y) {
  // Of the kernels on either side, an H100, batch 1 and 16.
  constexpr double kPass = 6000, kBytes = ProductRates::kBytes * 132;
  constexpr int64_t kFewest = 8, kMost = int64_t{1} << 31;
  const auto [points, sums] = ShapesOf(op, y);
  const auto count = [](const TensorShape& shape) {
    double out = 1;
    for (const int64_t dim : shape.dims) out *= static_cast<double>(dim);
    return out;
  };
  if (op.out_channels < kFewest || std::max(count(points), count(sums)) >= static_cast<double>(kMost)) {
    return std::numeric_limits<double>::infinity();
  }
  const double weights = double{kPoints} * static_cast<double>(op.in_channels * op.out_channels);
  const double floats = count(x) + count(points) + count(sums) + count(y) + weights;
  return 2 * kPass + floats * sizeof(float) / kBytes + CostOfTiles(ProductsOf(op), points, sums);
}

PackedNodePtr PackWinogradPlanes(const FloatConvOp& op, const Device& device, const Limits& limits,
                                 int slices) {
  FloatConvOp products = ProductsOf(op);
  products.weights = TransformWeights(op);
  const std::shared_ptr<const PackedNode> packed = PackTiled(products, device, {}, {.slices = slices});
  NodeConstants constants;
  const float* bias = nullptr;
  constants.Add(op.bias, bias);
  const auto memory = constants.Upload(device);
  const auto of_shapes = [=, op = WithoutConstants(op)](Shapes fed, const TensorShape& y) {
    const auto [points, sums] = ShapesOf(op, y);
    const NodePlanPtr product = packed->Plan({&points, 1}, sums);
    const size_t points_bytes = BytesOf(points), sums_bytes = BytesOf(sums);
    PlanesParams geometry = Described(op, LimitsOf(fed, limits), fed[0], y);
    geometry.bias = bias;
    const auto launch = [=](const Run& run, const PlanesParams& p) {
      auto* const workspace = static_cast<uint8_t*>(run.workspace);
      auto* const of_points = reinterpret_cast<float*>(workspace);
      auto* const of_sums = reinterpret_cast<float*>(workspace + points_bytes);
      PlanesParams first = p;
      first.y = of_points;
      run.LaunchFor(int64_t{p.channels} * p.by_pitch.divisor, PixelsToPlanes, kBlock, first);
      const void* const read[] = {of_points};
      product->Launch(read, of_sums, workspace + points_bytes + sums_bytes, run.queue);
      PlanesParams last = p;
      last.x = of_sums;
      last.stores_fours = p.windows.w.out % kMade == 0 && CommonUnit({p.y, p.residual}) == 16;
      run.LaunchFor(int64_t{p.rows} * p.by_pitch.divisor, PlanesToOutputs, kBlock, last);
    };
    return MakeKernelPlan("float_conv winograd 4x4, " + product->Text(), geometry, launch,
                          points_bytes + sums_bytes + product->WorkspaceBytes());
  };
  return MakeNode(of_shapes, memory);
}

}  // namespace lowbit::cuda
