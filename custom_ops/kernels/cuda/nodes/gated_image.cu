// An image of codes times what a product makes for each of its channels, as a squeeze-and-excitation ends: the product of
// one pixel an image, the table of its codes and LowBitMul in one launch. Every block makes the gates of its channels
// itself. Their product is short, the codes that they multiply are on their way meanwhile, and a launch that only made
// gates would leave most of the GPU waiting for the next one.
//
//   gates    a channel's sum by eight threads, its code, the number that stands for it | in shared memory
//   pixels   codes fetched                                                            | times gates, rounded, stored
#include "core/elementwise.h"
#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/device_epilogue.cuh"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/vector.h"
#include "kernels/cuda/conv/weight_rows.h"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

// Channels of a block. Threads that sum one of them, 16 bytes of K each at once.
constexpr int kGates = 32, kLanes = kThreads / kGates, kLaneBytes = 16, kTileBytes = 128;
// Vectors that a thread fetches before it rounds any, of kBytes codes each; pixels whose vectors a block has at once.
template <int kBytes>
constexpr int kAhead = kBytes == 16 ? 2 : 4;
template <int kBytes>
constexpr int kPixels = kThreads * kBytes / kGates;

struct GatedParams {
  const uint8_t *x = nullptr, *weights = nullptr, *image = nullptr;
  uint8_t* y = nullptr;
  int k = 0, n = 0,
      n_padded = 0;  // of the product; weights lie as those of tile kernels, of channels past k they are 0
  int pixels = 0, chunk = 0;  // of an image, of a block
  CodeReader reader;          // of the image's codes
  float scale = 1;
  Divider divider;
  CodeRounder rounder;
  EpilogueParams epilogue;
};

__device__ __forceinline__ uint4 LoadOrZero(const uint8_t* from, bool inside) {
  return inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
}

// 16 codes of a row of `k`, or the `left` ones that there are. Rows begin where vectors do or not.
__device__ __forceinline__ uint4 LoadCodesOrZero(const uint8_t* from, int left, int k) {
  if (k % kLaneBytes == 0) return *reinterpret_cast<const uint4*>(from);
  Codes<kLaneBytes> codes = {};
#pragma unroll
  for (int i = 0; i < kLaneBytes; ++i) {
    if (i < left) codes.w[i / 4] |= static_cast<unsigned>(from[i]) << (8 * (i % 4));
  }
  return __builtin_bit_cast(uint4, codes);
}

template <int kBytes, bool kSigned, bool kFast>
__global__ void __launch_bounds__(kThreads) GatedImage(const __grid_constant__ GatedParams p) {
  constexpr int kVectors = kGates / kBytes;  // of a pixel
  __shared__ float4 gates[kGates / 4];
  const EpilogueParams& e = p.epilogue;
  const int thread = static_cast<int>(threadIdx.x), channel0 = static_cast<int>(blockIdx.x) * kGates,
            image = static_cast<int>(blockIdx.z);
  const int gate = thread / kLanes, channel = channel0 + gate, lane = thread % kLanes;
  const int row = InterleavedRow(channel);
  const auto load_weights = [&](int k) {
    const uint8_t* const tile =
        p.weights + (static_cast<int64_t>(k / kTileBytes) * p.n_padded + row) * kTileBytes;
    return LoadOrZero(tile + (k / kLaneBytes % 8 ^ row % 8) * kLaneBytes, k < p.k && channel < p.n);
  };
  const bool finishes = lane == 0 && channel < p.n;
  const int bias = finishes ? e.bias[channel] : 0;
  const float scale = finishes ? e.scale[channel] : 0.0f;
  uint4 w = load_weights(lane * kLaneBytes);
  PrefetchTables(e, thread);
  WaitForPredecessors();

  const int own = thread % kVectors * kBytes, column = channel0 + own;
  const int last = min((static_cast<int>(blockIdx.y) + 1) * p.chunk, p.pixels);
  int pixel = static_cast<int>(blockIdx.y) * p.chunk + thread / kVectors;
  const int64_t origin = static_cast<int64_t>(image) * p.pixels * p.n + column;
  Codes<kBytes> codes[kAhead<kBytes>] = {};
  const auto fetch = [&] {
#pragma unroll
    for (int i = 0; i < kAhead<kBytes>; ++i) {
      const int at = pixel + i * kPixels<kBytes>;
      if (at < last && column < p.n)
        codes[i] = LoadCodes<kBytes>(p.image + origin + static_cast<int64_t>(at) * p.n);
    }
  };
  fetch();

  int sum = 0, of_codes = 0;
  const int zero = e.w_zero != nullptr && channel < p.n ? e.w_zero[channel] : 0;
  for (int k = lane * kLaneBytes; k < p.k; k += kLanes * kLaneBytes) {
    const uint4 x = LoadCodesOrZero(p.x + static_cast<int64_t>(image) * p.k + k, p.k - k, p.k);
    sum = DotFour<kSigned>(static_cast<int>(x.x), static_cast<int>(w.x), sum);
    sum = DotFour<kSigned>(static_cast<int>(x.y), static_cast<int>(w.y), sum);
    sum = DotFour<kSigned>(static_cast<int>(x.z), static_cast<int>(w.z), sum);
    sum = DotFour<kSigned>(static_cast<int>(x.w), static_cast<int>(w.w), sum);
    w = load_weights(k + kLanes * kLaneBytes);
    if (e.w_zero == nullptr) continue;
    of_codes = AddCodes<kSigned>(x.y, AddCodes<kSigned>(x.x, of_codes));
    of_codes = AddCodes<kSigned>(x.w, AddCodes<kSigned>(x.z, of_codes));
  }
  sum -= zero * of_codes;  // zero points that stay outside of weights (ZeroPoints)
  sum = CombineGroup<kLanes>(sum, [](int a, int b) { return a + b; });
  if (finishes)
    reinterpret_cast<float*>(gates)[gate] = e.values[FinishCode(e, sum + bias, channel, scale, 0) & 255];
  LetSuccessorsStart();
  __syncthreads();
  if (column >= p.n) return;

  float times[kBytes];
#pragma unroll
  for (int i = 0; i < kBytes; i += 4) {
    const float4 four = gates[(own + i) / 4];
    times[i] = four.x, times[i + 1] = four.y, times[i + 2] = four.z, times[i + 3] = four.w;
  }
  while (pixel < last) {
#pragma unroll
    for (int i = 0; i < kAhead<kBytes>; ++i) {
      const int at = pixel + i * kPixels<kBytes>;
      if (at >= last) break;
      const auto quotient = [&](int j) {
        const float v = __fmul_rn(__fmul_rn(CodeValue(codes[i], j, p.reader), p.scale), times[j]);
        return Divide<kFast>(v, p.divider);
      };
      StoreCodes(p.y + origin + static_cast<int64_t>(at) * p.n, RoundCodes<kBytes>(p.rounder, quotient));
    }
    pixel += kAhead<kBytes> * kPixels<kBytes>;
    fetch();
  }
}

}  // namespace

NodePlanPtr PlanGated(const std::shared_ptr<const PackedConv>& conv, const ConvShape& shape,
                      const BinarySpec& multiply, const TensorShape& image) {
  const ConvConfig config{&kVectorRow};
  const ConvProblem problem = conv->Problem(shape);
  const Device& device = conv->On();
  const std::vector<int64_t>& dims = image.dims;
  const bool is_product = problem.tiled && problem.IsFlat() && problem.groups == 1 && !conv->Bipolar() &&
                          conv->EpilogueOf().values != nullptr && shape.in_h == 1 && shape.in_w == 1 &&
                          problem.n % 4 == 0;
  const bool is_image = dims.size() > 2 && dims.front() == shape.batch && dims.back() == problem.n;
  if (multiply.kind != BinaryKind::kMul || !multiply.quantizer.quantized || !is_product || !is_image ||
      shape.batch > kMaxColumns) {
    return nullptr;
  }
  const int64_t count = CountOf(dims);
  // Of a large image bytes are what counts, and a part of the channels of a block would be none (H100: 9.6 us for 8.3 in two
  // launches, 16 images of 56x56 and 144 channels; 5.9 for 6.7 of 96).
  constexpr int64_t kLarge = int64_t{1} << 22;
  if (count == 0 || (count > kLarge && problem.n % kGates != 0)) return nullptr;
  GatedParams shared;
  const ConvParams product = conv->Params(shape, config, false);
  shared.weights = product.weights;
  shared.epilogue = product.epilogue;
  shared.k = static_cast<int>(conv->Geometry().in_channels);
  shared.n = product.n;
  shared.n_padded = static_cast<int>(PaddedColumns(problem.n));
  shared.pixels = static_cast<int>(count / (shape.batch * problem.n));
  shared.reader = MakeReader(multiply.a_signed, multiply.a_zero_point);
  shared.scale = multiply.a_scale;
  shared.divider = MakeDivider(multiply.quantizer.scale);
  shared.rounder = MakeRounder(multiply.quantizer);
  // A block a multiprocessor is best, as each makes its gates anew (H100: 2.2 us for 1.7 where they were a few more), but not
  // one of many more pixels than it has on their way at once.
  const int unit = problem.n % 16 == 0 ? SpreadUnit(16, count) : 4;
  const int64_t at_once = unit == 16 ? kPixels<16> : kPixels<4>, most = 4 * at_once;
  const int64_t groups = CeilDiv(problem.n, kGates);
  const int64_t chunks =
      std::min(kMaxColumns, std::clamp(device.multiprocessors / (groups * shape.batch),
                                       CeilDiv(shared.pixels, most), CeilDiv(shared.pixels, at_once)));
  shared.chunk = static_cast<int>(CeilDiv(shared.pixels, chunks));
  const dim3 grid(static_cast<unsigned>(groups),
                  static_cast<unsigned>(CeilDiv(shared.pixels, int64_t{shared.chunk})),
                  static_cast<unsigned>(shape.batch));
  const bool fast = FastIsExact(multiply.quantizer, MostOf(multiply), 1.0);
  return MakePlan("gated", [=](const Run& run) {
    GatedParams p = shared;
    p.x = static_cast<const uint8_t*>(run.fed[0]);
    p.image = static_cast<const uint8_t*>(run.fed[1]);
    p.y = static_cast<uint8_t*>(run.y);
    RequireAligned({p.x, p.image, p.y});
    DeviceGuard guard(conv->On().ordinal);
    std::visit([&](auto bytes, auto is_signed,
                   auto is_fast) { run.Launch(GatedImage<bytes, is_signed, is_fast>, grid, kThreads, p); },
               OneOf<16, 4>(unit), OneOf(conv->XSigned()), OneOf(fast));
  });
}

}  // namespace lowbit::cuda
