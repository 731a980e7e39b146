// LowBitMatMul: the product of two fed tensors of codes, on Tensor Cores.
//
// A block makes 64 x 64 sums. Codes become int8, unsigned ones and their zero points less 128; then
//   sum (a - za) * (b - zb) = sum a * b - zb * sum a - za * sum b + k * za * zb.
// Each term may wrap: the result fits int32. Both operands are rows of k codes here, those of b its columns.
// They lie in memory in whatever order permutations left them in, so a thread fetches 4 x 4 codes, words along
// k or words along the rows, which it turns, or single bytes.
#include <array>

#include "core/fed_matmul.h"
#include "core/nodes/node_kinds.h"
#include "kernels/cuda/device/mma_s8.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kSide = 64;   // rows of either operand to a tile
constexpr int kDepth = 32;  // codes along k that a tile holds, as many as one instruction multiplies
// Words of a row in shared memory: the 8 rows of a fragment then begin in different banks.
constexpr int kPitch = kDepth / 4 + 4;
constexpr int kBlocks = kDepth / 4;  // of 4 x 4 codes along k
constexpr int kWarpRows = 16, kWarpColumns = 32;
static_assert(2 * kSide / 4 * kBlocks == kThreads, "a thread fetches one block of 4 x 4 codes");
static_assert(kThreads / kWarp * kWarpRows * kWarpColumns == kSide * kSide);

enum class Words : uint8_t { kNone, kAlongDepth, kAlongRows };

struct Factor {
  const uint8_t* codes = nullptr;
  int64_t row = 0, depth = 0;  // bytes to the next row, and along k
  int rows = 0;
  Words words = Words::kNone;
  uint32_t flip = 0;  // four times 128 where codes are unsigned
  int zero = 0;       // zero point of the int8 codes
};

struct ProductParams {
  Factor a, b;
  void* y = nullptr;
  int k = 0;
  unsigned tiles = 0;               // of all batches
  FastDivisor by_rows, by_columns;  // tiles along a and b
  const int64_t* begins = nullptr;  // bytes to each batch's matrices: of a, of b
  bool quantized = true;
  float multiplier = 1;
  CodeRounder rounder;
};

// Four words of four codes each become those whose i-th bytes are the i-th codes of all.
__device__ __forceinline__ void Turn(const unsigned (&v)[4], unsigned (&w)[4]) {
  const unsigned low01 = __byte_perm(v[0], v[1], 0x5140), low23 = __byte_perm(v[2], v[3], 0x5140);
  const unsigned high01 = __byte_perm(v[0], v[1], 0x7362), high23 = __byte_perm(v[2], v[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410), w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410), w[3] = __byte_perm(high01, high23, 0x7632);
}

// w[i]: codes k to k + 3 of row + i as int8; 0 where there are none.
__device__ __forceinline__ void Fetch(const Factor& f, const uint8_t* codes, int row, int k, int depth,
                                      unsigned (&w)[4]) {
  if (f.words == Words::kAlongDepth) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = row + i < f.rows && k < depth;
      w[i] = inside ? LoadCodes<4>(codes + (row + i) * f.row + k).w[0] ^ f.flip : 0;
    }
  } else if (f.words == Words::kAlongRows) {
    unsigned v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool inside = row < f.rows && k + j < depth;
      v[j] = inside ? LoadCodes<4>(codes + (k + j) * f.depth + row).w[0] ^ f.flip : 0;
    }
    Turn(v, w);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (row + i >= f.rows || k + j >= depth) continue;
        w[i] |= (codes[(row + i) * f.row + (k + j) * f.depth] ^ (f.flip & 255u)) << (8 * j);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) FedProduct(const __grid_constant__ ProductParams p) {
  __shared__ unsigned tile[2][kSide][kPitch];
  __shared__ int sums_of[2][kSide];
  LetSuccessorsStart();
  WaitForPredecessors();
  const auto [batch_row, column_tile] = Divided(blockIdx.x, p.by_columns);
  const auto [batch, row_tile] = Divided(batch_row, p.by_rows);
  const int i0 = static_cast<int>(row_tile) * kSide, j0 = static_cast<int>(column_tile) * kSide;

  const int thread = static_cast<int>(threadIdx.x), side = thread / (kThreads / 2);
  const Factor& own = side == 0 ? p.a : p.b;
  const uint8_t* codes = own.codes + p.begins[2 * batch + side];
  const int own_row = thread % (kThreads / 2) / kBlocks * 4, own_word = thread % kBlocks;
  const int first_row = (side == 0 ? i0 : j0) + own_row;
  unsigned next[4];
  int sums[4] = {};
  Fetch(own, codes, first_row, own_word * 4, p.k, next);

  const int warp = thread / kWarp, lane = thread % kWarp, fragment_row = lane / 4, word = lane % 4;
  const int row = warp % (kSide / kWarpRows) * kWarpRows, column = warp / (kSide / kWarpRows) * kWarpColumns;
  int c[kWarpColumns / 8][4] = {};
  for (int k = 0; k < p.k; k += kDepth) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tile[side][own_row + i][own_word] = next[i];
      sums[i] = DotFour<true>(static_cast<int>(next[i]), 0x01010101, sums[i]);
    }
    __syncthreads();
    if (k + kDepth < p.k) Fetch(own, codes, first_row, k + kDepth + own_word * 4, p.k, next);
    const auto* upper = tile[0][row + fragment_row];
    const auto* lower = tile[0][row + fragment_row + 8];
    const unsigned a[4] = {upper[word], lower[word], upper[word + 4], lower[word + 4]};
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; ++n) {
      const auto* b = tile[1][column + 8 * n + fragment_row];
      Multiply<true>(c[n], a, b[word], b[word + 4]);
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int step = kBlocks / 2; step > 0; step /= 2) sums[i] += __shfl_xor_sync(0xFFFFFFFFu, sums[i], step);
    if (own_word == 0) sums_of[side][own_row + i] = sums[i];
  }
  __syncthreads();
  const int64_t matrix = static_cast<int64_t>(batch) * p.a.rows;
  const auto a_zero = static_cast<unsigned>(p.a.zero), b_zero = static_cast<unsigned>(p.b.zero);
  const unsigned both = static_cast<unsigned>(p.k) * a_zero * b_zero;
#pragma unroll
  for (int n = 0; n < kWarpColumns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = row + fragment_row + e / 2 * 8, j = column + 8 * n + 2 * word + e % 2;
      if (i0 + i >= p.a.rows || j0 + j >= p.b.rows) continue;
      const unsigned of_zeros = both - b_zero * static_cast<unsigned>(sums_of[0][i]) -
                                a_zero * static_cast<unsigned>(sums_of[1][j]);
      const int sum = static_cast<int>(static_cast<unsigned>(c[n][e]) + of_zeros);
      const float v = __fmul_rn(static_cast<float>(sum), p.multiplier);
      const int64_t at = (matrix + i0 + i) * p.b.rows + j0 + j;
      if (p.quantized) {
        StoreCodes(static_cast<uint8_t*>(p.y) + at, RoundCodes<1>(p.rounder, [&](int) { return v; }));
      } else {
        static_cast<float*>(p.y)[at] = v;
      }
    }
  }
}

Factor MakeFactor(bool is_signed, int32_t zero_point, int64_t row, int64_t depth, int64_t rows) {
  Factor f;
  f.row = row;
  f.depth = depth;
  f.rows = static_cast<int>(rows);
  f.flip = is_signed ? 0 : 0x80808080u;
  f.zero = zero_point - (is_signed ? 0 : 128);
  return f;
}

// Which words may be fetched where the operand begins at a multiple of 4, as all batches do.
Words WordsOf(const Factor& f, int k) {
  if (f.depth == 1 && f.row % 4 == 0 && k % 4 == 0) return Words::kAlongDepth;
  if (f.row == 1 && f.depth % 4 == 0 && f.rows % 4 == 0) return Words::kAlongRows;
  return Words::kNone;
}

NodePlanPtr PlanProduct(const FedMatmulNode& node, Shapes fed, const Device& device) {
  const FedMatmulSpec& spec = node.spec;
  FedMatmulShape shape;
  ProductOf(node, {fed[0].type, fed[0].dims}, {fed[1].type, fed[1].dims}, &shape);
  if (shape.batches.empty()) return MakePlan("fed_matmul", [](const Run&) {});
  ProductParams p;
  p.a = MakeFactor(spec.a_signed, spec.a_zero_point, shape.a_row, shape.a_k, shape.m);
  p.b = MakeFactor(spec.b_signed, spec.b_zero_point, shape.b_column, shape.b_k, shape.n);
  p.k = static_cast<int>(shape.k);
  p.by_rows = MakeDivisor(BlocksFor(shape.m, kSide));
  p.by_columns = MakeDivisor(BlocksFor(shape.n, kSide));
  const auto batches = static_cast<int64_t>(shape.batches.size());
  const std::array tiles = {batches, int64_t{p.by_rows.divisor}, int64_t{p.by_columns.divisor}};
  p.tiles = static_cast<unsigned>(CountOf(tiles));
  p.quantized = spec.quantizer.quantized;
  p.multiplier = spec.multiplier;
  p.rounder = MakeRounder(spec.quantizer);
  std::vector<int64_t> begins;
  for (const auto& [a, b] : shape.batches) begins.insert(begins.end(), {a, b});
  const auto aligned = [&](size_t side) {
    for (size_t i = side; i < begins.size(); i += 2) {
      if (begins[i] % 4 != 0) return false;
    }
    return true;
  };
  if (aligned(0)) p.a.words = WordsOf(p.a, p.k);
  if (aligned(1)) p.b.words = WordsOf(p.b, p.k);
  NodeConstants constants;
  constants.Add(begins, p.begins);
  const auto memory = constants.Upload(device);
  const auto launch = [p](const Run& run) {
    ProductParams own = p;
    own.y = run.y;
    own.a.codes = static_cast<const uint8_t*>(run.fed[0]);
    own.b.codes = static_cast<const uint8_t*>(run.fed[1]);
    for (Factor* f : {&own.a, &own.b}) {
      if (CommonUnit({f->codes}) < 4) f->words = Words::kNone;
    }
    run.Launch(FedProduct, dim3(own.tiles), kThreads, own);
  };
  return Hold(MakePlan("fed_matmul", launch), memory);
}

}  // namespace

PackedNodePtr Pack(const FedMatmulNode& node, const Device& device) {
  return MakeNode([node, device](Shapes fed, const TensorShape&) { return PlanProduct(node, fed, device); });
}

}  // namespace lowbit::cuda
