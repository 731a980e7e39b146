// A network's first convolution and the max pooling behind it (stem_pool.h) on wgmma, for Hopper (sm_90a).
//
// A block makes 28 columns of pooled pixels and walks down a strip of their rows. Every pixel of its input is
// quantized once, as a part of a cell (cell_weights.h), and a thread reads every cell once into the registers
// of A, where four rows of cells take turns: the next row of the convolution needs one new one.
//
// A warp's 16 rows of A are 8 pairs of neighbouring columns of the convolution, of which thread 4 g + t has
// the first one's sums above and the second one's below: columns 2 c and 2 c + 1, where the pooled pixel c is
// also to see column 2 c - 1, which thread 4 (g - 1) + t has. (With the pooling's padding; without, all three
// lie one further.) So the first of 8 pairs only helps the second, and a warp makes 7 pooled pixels. A pair's
// rows of sums are kept as running maxima; the last one of a window is the first one of the next.
//
// Columns outside the convolution's output are replaced by the nearest one inside, which lies in the same
// window; rows outside take no part. Sums have their bias added after the maximum was taken: they are less
// than 2^23, and with it they are inside int32, as of every node.
//
// While products are under way a warp rounds the row of pooled pixels before, or quantizes cells of the next.
#include <limits>
#include <type_traits>

#include "core/status.h"
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/launch.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/pixel_rounding.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/fused/stem_pool.h"
#include "kernels/cuda/fused/stem_pool_params.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128;
// A double row of cells is what a row of pooled pixels needs besides what the one before did. A block's
// columns need 61 cells of a row, each thread has one of it.
constexpr int kRowCells = 64, kDoubleRows = 4;
static_assert(2 * kPoolTileColumns + 2 + kCellTaps - 1 <= kRowCells);

// Double rows of cells whose floats are on their way.
constexpr int kStages = 3;

// From cell to cell: odd, without bank conflicts.
template <int kChannels>
constexpr int kCellWords = kChannels | 1;
// These are of a double row of cells.
template <int kChannels>
constexpr int kFloatBytes = kThreads * 4 * kChannels * 4;
template <int kChannels>
constexpr int kSharedBytes = kChannels * kCellChannelBytes + kStages * kFloatBytes<kChannels> +
                             kDoubleRows * 2 * kRowCells * kCellWords<kChannels> * 4;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kWarpColumns = kPoolTileColumns / 4;
constexpr int kLowest = std::numeric_limits<int>::min();
constexpr unsigned kAllInside = 15;  // the pixels of a cell

// The codes of a cell, each rounded from a value within the clip bounds: as integers in the low bits of
// floats they are added up, a byte apart, with all that is constant. `rows`: two pixels of each channel, then
// those of the row below, kThreads apart. `inside`: a bit for each pixel that the image has.
template <int kChannels>
__device__ __forceinline__ void QuantizeCell(const PooledParams& p, const float2* rows, unsigned inside,
                                             unsigned* to) {
  float2 v[2 * kChannels];
#pragma unroll
  for (int i = 0; i < 2 * kChannels; ++i) v[i] = rows[i * kThreads];
  unsigned words[kChannels];
#pragma unroll
  for (int w = 0; w < kChannels; ++w) words[w] = p.add[w];
#pragma unroll
  for (int byte = 0; byte < 4 * kChannels; ++byte) {
    const int pixel = byte / kChannels, c = byte % kChannels;
    const float2 pair = v[pixel / 2 * kChannels + c];
    words[byte / 4] += RoundedPixel(p.rounding, c, pixel % 2 == 0 ? pair.x : pair.y) << (8 * (byte % 4));
  }
#pragma unroll
  for (int w = 0; w < kChannels; ++w) words[w] ^= p.rounding.flip;
  if (inside != kAllInside) {
#pragma unroll
    for (int w = 0; w < kChannels; ++w) {
      unsigned kept = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int pixel = (4 * w + byte) / kChannels;
        if ((inside >> pixel & 1) != 0) kept |= 255u << (8 * byte);
      }
      words[w] = (words[w] & kept) | (p.fill & ~kept);
    }
  }
#pragma unroll
  for (int w = 0; w < kChannels; ++w) to[w] = words[w];
}

__device__ __forceinline__ void SetAll(int (&sums)[kCellTileN / 2], int value) {
#pragma unroll
  for (int& sum : sums) sum = value;
}

__device__ __forceinline__ void TakeLargest(int (&largest)[kCellTileN / 2],
                                            const int (&sums)[kCellTileN / 2]) {
#pragma unroll
  for (int i = 0; i < kCellTileN / 2; ++i) largest[i] = max(largest[i], sums[i]);
}

// A block. It has its own loop, not that of pipeline.cuh: what comes from memory are a thread's own floats,
// which wait for nobody else; what is shared are cells, of which a row is multiplied while the next is
// quantized by the same threads.
// kPlanes: codes leave as planes of bits.
template <int kChannels, bool kSigned, Finish kFinish, bool kPlanes>
struct Pool {
  static constexpr int kPlace = kCellWords<kChannels>, kRowWords = kRowCells * kPlace;
  static constexpr int kOwn = kCellTileN / 4,
                       kStride = kOwn + 4;  // channels of a thread; without bank conflicts
  static constexpr int kWeightBytes = kChannels * kCellChannelBytes, kFirstDoubleRows = 3;
  using Sums = int[kCellTileN / 2];
  template <int kValue>
  using Constant = std::integral_constant<int, kValue>;
  struct Static {
    alignas(16) int biases[4 * kStride];
    alignas(16) float multipliers[4 * kStride], starts[4 * kStride], factors[kStride];
    alignas(8) uint64_t barriers[2];  // weights are there; the next double row of cells is
  };

  const PooledParams& p;
  uint8_t* const shared;  // weights, floats, cells
  Static& fixed;
  float2* const floats = reinterpret_cast<float2*>(shared + kWeightBytes);
  unsigned* const cells =
      reinterpret_cast<unsigned*>(shared + kWeightBytes + kStages * kFloatBytes<kChannels>);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, group = thread % 32 / 4,
            t = thread % 4;
  const int n0 = static_cast<int>(blockIdx.y) * kCellTileN, channel = n0 + t * kOwn;
  const uint32_t barrier = SharedAddress(fixed.barriers), next = SharedAddress(fixed.barriers + 1);

  const int image = Divide(static_cast<int>(blockIdx.x), p.by_tiles_x),
            tile_column = (static_cast<int>(blockIdx.x) - image * p.tiles_x) * kPoolTileColumns,
            strip = static_cast<int>(blockIdx.z);
  const int rows = p.strip_rows + (strip < p.longer_strips ? 1 : 0),
            first = strip * p.strip_rows + min(strip, p.longer_strips);
  // Where the block begins in the convolution: the last row of the window before, the first of its pairs.
  const int first_row = 2 * first - p.pool_top, first_column = 2 * tile_column - 1 - p.pool_left;

  // The thread's cell of each double row: its floats come past the registers, several of them ahead,
  // and nobody else reads them.
  const int x = 2 * (first_column - p.lead_columns + thread % kRowCells),
            top = 2 * (first_row - p.lead_rows + thread / kRowCells);
  unsigned columns = (IsInside(x, p.in_w) ? 1u : 0u) | (IsInside(x + 1, p.in_w) ? 2u : 0u);
  const int plane = p.in_h * p.in_w;
  const float* const planes = p.x + static_cast<int64_t>(image) * kChannels * plane;
  int from = top * p.in_w + x;
  int loaded = 0, load_stage = 0, stage = 0;

  // Cells of the columns that the thread's sums above and below belong to, and what it has of them as A.
  const unsigned *above = nullptr, *below = nullptr;
  unsigned a[2][kChannels][4];
  const uint64_t matrices = PlainDescriptor(SharedAddress(shared));
  int4 windows[kOwn / 4];  // the largest sums of windows, with the bias
  bool stores = false;
  unsigned at = 0;  // where the next row of codes goes: bytes, or pixels of planes

  __device__ __forceinline__ Pool(const PooledParams& params, uint8_t* dynamic, Static& own)
      : p(params), shared(dynamic), fixed(own) {}

  static __device__ __forceinline__ bool IsInside(int i, int size) {
    return static_cast<unsigned>(i) < static_cast<unsigned>(size);
  }
  __device__ __forceinline__ int Place(int i) const {
    const int of_pair = first_column + 2 * (warp * kWarpColumns + group) + i;
    return (min(max(of_pair, 0), p.out_w - 1) - first_column + t) * kPlace;
  }

  __device__ __forceinline__ void SetUp() const {
    if (thread == 0) {
      InitBarrier(barrier, 1);
      InitBarrier(next, kThreads / 32);
      FenceBarrierInit();
      ArriveExpecting(barrier, kWeightBytes);
      BulkCopy(SharedAddress(shared), p.weights + static_cast<int64_t>(blockIdx.y) * kWeightBytes,
               kWeightBytes, barrier);
    }
    if (thread < kCellTileN && n0 + thread < p.n) {
      const int to = thread / kOwn * kStride + thread % kOwn;
      fixed.biases[to] = p.epilogue.bias[n0 + thread];
      fixed.multipliers[to] = p.epilogue.scale[n0 + thread];
      fixed.starts[to] = p.epilogue.start[n0 + thread];
      if (to % 4 == 0) fixed.factors[to / 4] = p.epilogue.factor[(n0 + thread) / 4];
    }
  }

  // Begins to fetch the floats of the next double row.
  __device__ __forceinline__ void Load() {
    if (loaded < rows + 2) {  // a double row for each and those of the first window
      const uint32_t to = SharedAddress(floats + load_stage * 2 * kChannels * kThreads + ReadThreadIndex());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool has_row = IsInside(top + 4 * loaded + i, p.in_h), has_left = (columns & 1) != 0,
                   has_right = (columns & 2) != 0;
        const float* const row = planes + from + i * p.in_w;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const uint32_t place = to + (i * kChannels + c) * kThreads * static_cast<int>(sizeof(float2));
          if (p.in_twos) {
            CopyAsyncOrZero<8>(place, row + c * plane, has_row && has_left);
          } else {
            CopyAsyncOrZero<4>(place, row + c * plane, has_row && has_left);
            CopyAsyncOrZero<4>(place + 4, row + c * plane + 1, has_row && has_right);
          }
        }
      }
    }
    CommitCopies();
    ++loaded;
    from += 4 * p.in_w;
    load_stage = load_stage + 1 < kStages ? load_stage + 1 : 0;
  }
  __device__ __forceinline__ void Quantize(int double_row) {
    WaitForCopies<kStages - 1>();
    const int own = ReadThreadIndex();
    const int y = top + 4 * double_row;
    const unsigned inside =
        (IsInside(y, p.in_h) ? columns : 0u) | (IsInside(y + 1, p.in_h) ? columns << 2 : 0u);
    QuantizeCell<kChannels>(
        p, floats + stage * 2 * kChannels * kThreads + own, inside,
        cells + (double_row % kDoubleRows * 2 + own / kRowCells) * kRowWords + own % kRowCells * kPlace);
    stage = stage + 1 < kStages ? stage + 1 : 0;
    Load();
  }

  // A row of cells, from shared memory.
  template <int kSlot>
  __device__ __forceinline__ void Fetch(int row) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int word = kSlot % 2 * kChannels + i;
      a[kSlot / 2][word / 2][word % 2 * 2] = above[row * kRowWords + i];
      a[kSlot / 2][word / 2][word % 2 * 2 + 1] = below[row * kRowWords + i];
    }
  }
  // The products of a row of the convolution, under way. kOrder: how far the four rows of cells have turned.
  template <int kOrder>
  __device__ __forceinline__ void Multiply(Sums& sums) {
    const auto step = [&]<int kHalf>(Constant<kHalf>, int i) {
      const int matrix = (kOrder % 2 * 2 + (kHalf + kOrder / 2) % 2) * kChannels + i;
      // The high half never changes.
      const uint64_t b = (matrices & ~uint64_t{0xFFFFFFFF}) |
                         (static_cast<uint32_t>(matrices) + matrix * (kCellMatrixBytes >> 4));
      if (kHalf == 0 && i == 0) {
        MultiplyRows<kSigned, false>(sums, a[kHalf][i], b);
      } else {
        MultiplyRows<kSigned>(sums, a[kHalf][i], b);
      }
    };
    HoldRegisters(sums);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kChannels; ++i) step(Constant<0>{}, i);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) step(Constant<1>{}, i);
    WgmmaCommit();
  }
  static __device__ __forceinline__ void WaitForProducts(Sums& sums) {
    WgmmaWait<0>();
    HoldRegisters(sums);
  }

  __device__ __forceinline__ void TakeWindows(const Sums& largest) {
    const int own = ReadThreadIndex() % 4;
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      const auto of_window = [&](int j) {
        const int right = largest[8 * i + j + 2];
        return __vimax3_s32(largest[8 * i + j], right, __shfl_up_sync(~0u, right, 4));
      };
      windows[i] = Plus(make_int4(of_window(0), of_window(1), of_window(4), of_window(5)),
                        *reinterpret_cast<const int4*>(fixed.biases + own * kStride + 4 * i));
    }
  }
  // Of four threads, the first of which has channels 0 to 15, in fours, to what each has of a word of a plane: the i-th
  // four of the first thread becomes the first one of the i-th, and so on.
  static __device__ __forceinline__ void ExchangeFours(unsigned (&fours)[4]) {
    const int own = ReadThreadIndex() % 4;
    const auto exchange = [&](unsigned& low, unsigned& high, int distance) {
      const bool is_upper = (own & distance) != 0;
      const unsigned received = __shfl_xor_sync(~0u, is_upper ? low : high, distance);
      (is_upper ? low : high) = received;
    };
    exchange(fours[0], fours[1], 1);
    exchange(fours[2], fours[3], 1);
    exchange(fours[0], fours[2], 2);
    exchange(fours[1], fours[3], 2);
  }
  __device__ __forceinline__ void Store() {
    const int own = ReadThreadIndex() % 4;
    static_assert(kOwn == 16);
    unsigned codes[1][4];
    WithEpilogue<kFinish, false>(p.epilogue, [&](const auto& requantize) {
#pragma unroll
      for (int i = 0; i < kOwn / 4; ++i) {
        const int at = own * kStride + 4 * i;
        const int4 window[] = {windows[i]};
        unsigned four[1] = {};
        const FourChannels channels = {*reinterpret_cast<const float4*>(fixed.multipliers + at),
                                       *reinterpret_cast<const float4*>(fixed.starts + at),
                                       fixed.factors[at / 4]};
        requantize(window, channels, four);
        codes[0][i] = four[0];
      }
    });
    if constexpr (kPlanes) {
      ExchangeFours(codes[0]);
      if (stores) StoreWords<1>(p, static_cast<int>(at), n0, own, codes);
      at += static_cast<unsigned>(p.pooled_w);
      return;
    }
    if (stores)
      *reinterpret_cast<uint4*>(p.y + at) = make_uint4(codes[0][0], codes[0][1], codes[0][2], codes[0][3]);
    at += static_cast<unsigned>(p.pooled_w * p.n);
  }

  // A row of pooled pixels: `largest` are the sums of its window's first row, `sums` become those of its
  // last.
  template <int kOrder>
  __device__ __forceinline__ void PoolRow(int row, Sums& largest, Sums& sums) {
    const int double_row = (row + 2) % kDoubleRows, middle = first_row + 2 * row + 1;
    if (row > 0) WaitBarrier(next, (row - 1) % 2);
    Fetch<(kOrder + 3) % kCellTaps>(2 * double_row);
    Multiply<kOrder>(sums);
    if (row > 0) Store();  // the row before
    WaitForProducts(sums);
    if (middle < p.out_h) TakeLargest(largest, sums);
    Fetch<kOrder>(2 * double_row + 1);
    Multiply<(kOrder + 1) % kCellTaps>(sums);
    if (row + 1 < rows) {
      Quantize(row + kFirstDoubleRows);
      __syncwarp();  // its cells are there, and it has fetched those of this double row
      if (thread % 32 == 0) Arrive(next);
    } else {
      LetSuccessorsStart();
    }
    WaitForProducts(sums);
    if (middle + 1 < p.out_h) TakeLargest(largest, sums);  // else it is the strip's last row
    TakeWindows(largest);
  }

  __device__ __forceinline__ void Run() {
    SetUp();
    KeepInRegister(columns);  // one value, not its bits besides
    if (p.is_early) LetSuccessorsStart();
    WaitForPredecessors();
#pragma unroll
    for (int i = 0; i < kStages; ++i) Load();
#pragma unroll
    for (int i = 0; i < kFirstDoubleRows; ++i) Quantize(i);
    __syncthreads();
    above = cells + Place(0);
    below = cells + Place(1);
    const int column = tile_column + warp * kWarpColumns + group - 1;
    stores = group > 0 && column < p.pooled_w && channel < p.n;
    const int pixel = (image * p.pooled_h + first) * p.pooled_w + column;
    at = static_cast<unsigned>(kPlanes ? pixel : pixel * p.n + channel);

    int upper[kCellTileN / 2], lower[kCellTileN / 2];
    Fetch<0>(0);
    Fetch<1>(1);
    Fetch<2>(2);
    Fetch<3>(3);
    WaitBarrier(barrier, 0);
    Multiply<0>(upper);
    WaitForProducts(upper);
    if (first_row < 0) SetAll(upper, kLowest);
#pragma unroll 1
    for (int row = 0; row < rows; row += 2) {
      PoolRow<1>(row, upper, lower);
      if (row + 1 >= rows) break;
      PoolRow<3>(row + 1, lower, upper);
    }
    Store();
  }
};
#endif

template <int kChannels, bool kSigned, Finish kFinish, bool kPlanes>
__global__ void __launch_bounds__(kThreads, kPoolBlocks - kChannels / 4)
    ConvPool(const __grid_constant__ PooledParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ typename Pool<kChannels, kSigned, kFinish, kPlanes>::Static fixed;
  Pool<kChannels, kSigned, kFinish, kPlanes>(p, shared, fixed).Run();
#endif
}

cudaError_t LaunchPool(const PooledParams& p, int channels, const LaunchOptions& options) {
  const EpilogueParams& e = p.epilogue;
  const Finish finish = !e.on_lines     ? Finish::kIntegers
                        : e.lacks_lines ? Finish::kIntegersOfTail
                                        : Finish::kTail;
  const auto launch = [&]<int kChannels, bool kSigned, Finish kFinish, bool kPlanes>() {
    if constexpr (HasInstance(kChannels == 3 && kSigned == (kFinish == Finish::kIntegers))) {
      return LaunchKernel<ConvPool<kChannels, kSigned, kFinish, kPlanes>>(
          options,
          {Dim(p.images * p.tiles_x, (p.n + kCellTileN - 1) / kCellTileN, p.strips), kThreads,
           kSharedBytes<kChannels>},
          p);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  using enum Finish;
  if (e.plane_count > 0) {
    if (finish == kIntegersOfTail) return cudaErrorInvalidValue;
    return std::visit(
        [&](auto channel_count, auto is_signed, auto how) {
          return launch.template operator()<channel_count, is_signed, how, true>();
        },
        OneOf<1, 2, 3, 4>(channels), OneOf(options.x_signed), OneOf<kIntegers, kTail>(finish));
  }
  return std::visit(
      [&](auto channel_count, auto is_signed, auto how) {
        return launch.template operator()<channel_count, is_signed, how, false>();
      },
      OneOf<1, 2, 3, 4>(channels), OneOf(options.x_signed), OneOf<kIntegers, kIntegersOfTail, kTail>(finish));
}

}  // namespace

class PooledPlan {
 public:
  PooledPlan(const PooledConv& pooled, const PoolStrips& strips) : conv_(pooled.conv) {
    const ConvGeometry& g = conv_->Geometry();
    const ConvShape& s = pooled.shape;
    const auto narrow = [](int64_t v) { return static_cast<int>(v); };
    params_.weights = conv_->CellWeights();
    params_.n = narrow(g.out_channels);
    params_.in_h = narrow(s.in_h);
    params_.in_w = narrow(s.in_w);
    params_.out_h = narrow(s.out_h);
    params_.out_w = narrow(s.out_w);
    params_.pooled_h = narrow(pooled.pooled_h);
    params_.pooled_w = narrow(pooled.pooled_w);
    params_.lead_rows = narrow((g.pad_top + 1) / 2);
    params_.lead_columns = narrow((g.pad_left + 1) / 2);
    params_.pool_top = narrow(pooled.window.pad_begin[1]);
    params_.pool_left = narrow(pooled.window.pad_begin[2]);
    params_.tiles_x = (params_.pooled_w + kPoolTileColumns - 1) / kPoolTileColumns;
    params_.images = narrow(s.batch);
    params_.by_tiles_x = MakeDivisor(params_.tiles_x);
    params_.strips = strips.strips;
    params_.strip_rows = strips.rows;
    params_.longer_strips = strips.longer;
    params_.fill = static_cast<uint32_t>(conv_->TileZero() & 255) * 0x01010101u;
    params_.rounding = RoundingOf(pooled.quantizer);
    const int channels = narrow(g.in_channels);
    for (int byte = 0; byte < 4 * channels; ++byte) {
      params_.add[byte / 4] += params_.rounding.add[byte % channels] << (8 * (byte % 4));
    }
    params_.m = params_.images * params_.pooled_h * params_.pooled_w;
    params_.epilogue = conv_->EpilogueOf();
    params_.epilogue.plane_count = pooled.y_planes;
    const int blocks = params_.images * params_.tiles_x * params_.strips;
    params_.is_early = blocks >= 2 * conv_->On().multiprocessors;
  }

  std::string Text() const {
    return std::string(kStemPoolKernel.name) + "_strips" + std::to_string(params_.strips);
  }

  void Launch(const void* x, void* y, Queue& queue) const {
    if (params_.images == 0) return;
    DeviceGuard guard(conv_->On().ordinal);
    RequireAligned({y});
    PooledParams p = params_;
    p.x = static_cast<const float*>(x);
    p.y = static_cast<uint8_t*>(y);
    p.in_twos = p.in_w % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 8 == 0;
    const auto channels = static_cast<int>(conv_->Geometry().in_channels);
    Check(LaunchPool(p, channels, {.queue = queue, .device = conv_->On(), .x_signed = conv_->XSigned()}),
          "launching a pooled convolution");
  }

 private:
  std::shared_ptr<const PackedConv> conv_;
  PooledParams params_;
};

std::shared_ptr<const PooledPlan> PlanPooled(const PooledConv& pooled, const PoolStrips& strips) {
  Require(Pools(pooled), "this convolution and this pooling have no kernel for both");
  return std::make_shared<const PooledPlan>(pooled, strips);
}

std::shared_ptr<const PooledPlan> PlanPooled(const PooledConv& pooled) {
  return PlanPooled(pooled, ChooseStrips(pooled));
}

std::string PlanText(const PooledPlan& plan) { return plan.Text(); }

void LaunchPooled(const PooledPlan& plan, const void* x, void* y, Queue& queue) { plan.Launch(x, y, queue); }

}  // namespace lowbit::cuda
