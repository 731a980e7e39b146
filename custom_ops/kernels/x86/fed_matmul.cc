// LowBitMatMul on the register tiles of the igemm kernels: b is packed as their weights when the node runs,
// the rows of a are its pixels.
//
// Both zero points are only numbers here, so their corrections are sums over what is fed. With u the code of
// a made unsigned (za likewise) and w = b - zb - s as it is packed,
//
//   sum (u - za)(b - zb) = sum u w  +  s * sum u        -  za * sum (w + s)
//                          ^ tile      ^ by row (pixel)    ^ by column (channel)
//
// Bytes hold w for s = 128 - zb (or -zb, where b is signed): w is b with its top bit flipped.
#include "kernels/x86/fed_matmul.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"
#include "kernels/x86/igemm_block.h"

namespace lowbit {
namespace {

// Columns of b that a task packs at most: their scales are in one table.
constexpr size_t kMaxColumns = 1024;
// What a task packs at most (more where one vector of columns with its k is larger, above k = 16384). With
// the other parts of its scratch memory it stays below kMaxWorkspaceBytes.
constexpr size_t kPackedBytes = 256 * 1024;
constexpr size_t kBlockRows = 64;
// What an engine copies of a block's rows, and what it unpacks of a panel.
constexpr size_t kOperandBytes = 128 * 1024, kUnpackedBytes = 128 * 1024;
// Rows that are copied, because k does not run along them or because they end with the tensor.
constexpr size_t kCopiedBytes = 128 * 1024;
// Every task packs its part of b: below this many rows the packing would weigh too much.
constexpr size_t kMinTaskRows = 64;
constexpr size_t kWantedTasks = 16;

// Sixteen values of k in four columns (bytes, one column after the other) or four values of k in sixteen
// columns: both become 32-bit groups.
struct Quad {
  __m128i v[4];
};

Quad LoadQuad(const uint8_t* from, int64_t stride) {
  Quad q;
  for (int64_t i = 0; i < 4; ++i)
    q.v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
  return q;
}

// v[g] holds group g of four columns.
Quad GroupsOfColumns(const Quad& q) {
  const __m128i a = _mm_unpacklo_epi32(q.v[0], q.v[1]), b = _mm_unpackhi_epi32(q.v[0], q.v[1]),
                c = _mm_unpacklo_epi32(q.v[2], q.v[3]), d = _mm_unpackhi_epi32(q.v[2], q.v[3]);
  return {{_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(b, d),
           _mm_unpackhi_epi64(b, d)}};
}

// v[i] holds the group of columns 4i..4i+3.
Quad GroupOfRows(const Quad& q) {
  const __m128i a = _mm_unpacklo_epi8(q.v[0], q.v[1]), b = _mm_unpackhi_epi8(q.v[0], q.v[1]),
                c = _mm_unpacklo_epi8(q.v[2], q.v[3]), d = _mm_unpackhi_epi8(q.v[2], q.v[3]);
  return {{_mm_unpacklo_epi16(a, c), _mm_unpackhi_epi16(a, c), _mm_unpacklo_epi16(b, d),
           _mm_unpackhi_epi16(b, d)}};
}

void StoreFlipped(uint8_t* to, __m128i bytes, __m128i flip) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_xor_si128(bytes, flip));
}

class FedMatmul final : public FedMatmulKernel {
 public:
  FedMatmul(const FedMatmulSpec& spec, const IgemmEngine& engine, const char* isa)
      : spec_(spec),
        engine_(engine),
        isa_(isa),
        epilogue_(EpilogueOf(spec, kMaxColumns), kMaxColumns),
        a_shift_(spec.a_signed ? 128 : 0),
        a_zero_(spec.a_zero_point + a_shift_),
        b_flip_(spec.b_signed ? 0 : 0x80),
        row_factor_(b_flip_ - spec.b_zero_point) {
    epilogue_.LimitAccumulators({std::numeric_limits<int32_t>::max()});  // all channels have one scale
  }

  std::string Name() const override { return std::string("matmul_igemm_") + isa_; }

  void Run(const FedMatmulShape& s, const uint8_t* a, const uint8_t* b, void* y,
           ThreadPool& pool) const override;

 private:
  // How the columns of a product are cut into runs, and a run into panels.
  struct Split {
    size_t groups = 0, runs = 0, run_columns = 0, row_parts = 0, part_rows = 0;
  };
  size_t Lanes() const { return static_cast<size_t>(engine_.lanes); }
  // What the engine copies of so many rows.
  size_t OperandBytes(size_t rows, size_t groups) const {
    return engine_.OperandBytes(rows, 1, groups, false);
  }
  size_t BlockRows(size_t groups) const {
    const size_t row = OperandBytes(1, groups);
    return row == 0 ? kBlockRows : std::clamp<size_t>(kOperandBytes / row, 1, kBlockRows);
  }

  Split Plan(const FedMatmulShape& s) const;
  void PackColumns(const FedMatmulShape& s, const uint8_t* b, size_t columns, size_t width,
                   uint8_t* to) const;
  size_t PointAtRows(const FedMatmulShape& s, const uint8_t* a, const uint8_t* end, size_t count,
                     size_t row_bytes, uint8_t* copies, const uint8_t** rows) const;

  const FedMatmulSpec spec_;
  const IgemmEngine& engine_;
  const char* const isa_;
  EpilogueTables epilogue_;
  const int32_t a_shift_, a_zero_;  // what makes codes of a unsigned; their zero point then
  const int32_t b_flip_;
  const int32_t row_factor_;  // s above
};

// A row of a as the tile reads it: whole groups.
constexpr size_t RowBytes(size_t k) { return RoundUp(k, 4); }

FedMatmul::Split FedMatmul::Plan(const FedMatmulShape& s) const {
  Split split;
  const size_t m = static_cast<size_t>(s.m), n = static_cast<size_t>(s.n);
  split.groups = DivideUp(static_cast<size_t>(s.k), 4);
  const size_t vector_bytes = std::max<size_t>(split.groups, 1) * Lanes() * 4;
  const size_t vectors = std::clamp(kPackedBytes / vector_bytes, size_t{1}, kMaxColumns / Lanes());
  split.runs = DivideUp(n, vectors * Lanes());
  split.run_columns = RoundUp(DivideUp(n, split.runs), Lanes());
  split.runs = DivideUp(n, split.run_columns);
  const size_t tasks = s.batches.size() * split.runs;
  const double cycles = static_cast<double>(s.m) * static_cast<double>(split.run_columns) *
                        static_cast<double>(s.k) / engine_.macs_per_cycle;
  const size_t wanted = std::min({DivideUp(kWantedTasks, tasks), std::max<size_t>(m / kMinTaskRows, 1),
                                  std::max(static_cast<size_t>(cycles / kTaskCycles), size_t{1})});
  split.part_rows = DivideUp(m, wanted);
  split.row_parts = DivideUp(m, split.part_rows);
  return split;
}

// [groups][width][4]: columns beyond `columns`, and what completes the last group, are zero.
void FedMatmul::PackColumns(const FedMatmulShape& s, const uint8_t* b, size_t columns, size_t width,
                            uint8_t* to) const {
  const size_t k = static_cast<size_t>(s.k), groups = DivideUp(k, 4);
  const __m128i flip = _mm_set1_epi8(static_cast<char>(b_flip_));
  size_t fast_k = 0, fast_columns = 0;  // what the vector loops do
  if (s.b_k == 1) {
    fast_k = k / 16 * 16, fast_columns = columns / 4 * 4;
    for (size_t c = 0; c < fast_columns; c += 4) {
      const uint8_t* from = b + static_cast<int64_t>(c) * s.b_column;
      for (size_t i = 0; i < fast_k; i += 16) {
        const Quad q = GroupsOfColumns(LoadQuad(from + i, s.b_column));
        for (size_t g = 0; g < 4; ++g) StoreFlipped(to + ((i / 4 + g) * width + c) * 4, q.v[g], flip);
      }
    }
  } else if (s.b_column == 1) {
    fast_k = k / 4 * 4, fast_columns = columns / 16 * 16;
    for (size_t i = 0; i < fast_k; i += 4) {
      const uint8_t* from = b + static_cast<int64_t>(i) * s.b_k;
      for (size_t c = 0; c < fast_columns; c += 16) {
        const Quad q = GroupOfRows(LoadQuad(from + c, s.b_k));
        for (size_t j = 0; j < 4; ++j) StoreFlipped(to + (i / 4 * width + c + 4 * j) * 4, q.v[j], flip);
      }
    }
  }
  for (size_t g = 0; g < groups; ++g) {
    const size_t first = g * 4 < fast_k ? fast_columns : 0;
    const size_t bytes = std::min<size_t>(4, k - g * 4);
    for (size_t c = first; c < columns; ++c) {
      const uint8_t* from = b + static_cast<int64_t>(g * 4) * s.b_k + static_cast<int64_t>(c) * s.b_column;
      uint8_t* group = to + (g * width + c) * 4;
      for (size_t i = 0; i < 4; ++i) {
        group[i] = i < bytes ? static_cast<uint8_t>(from[static_cast<int64_t>(i) * s.b_k] ^ b_flip_) : 0;
      }
    }
    std::memset(to + (g * width + columns) * 4, 0, (width - columns) * 4);
  }
}

// Points at `count` rows of which whole groups may be read, and returns how many of them fit into `copies`.
size_t FedMatmul::PointAtRows(const FedMatmulShape& s, const uint8_t* a, const uint8_t* end, size_t count,
                              size_t row_bytes, uint8_t* copies, const uint8_t** rows) const {
  const size_t k = static_cast<size_t>(s.k);
  size_t copied = 0;
  for (size_t r = 0; r < count; ++r) {
    const uint8_t* from = a + static_cast<int64_t>(r) * s.a_row;
    if (s.a_k == 1 && static_cast<size_t>(end - from) >= row_bytes) {
      rows[r] = from;
      continue;
    }
    if (r > 0 && (copied + 1) * row_bytes > kCopiedBytes) return r;
    uint8_t* to = copies + copied++ * row_bytes;
    for (size_t i = 0; i < k; ++i) to[i] = from[static_cast<int64_t>(i) * s.a_k];
    std::memset(to + k, 0, row_bytes - k);
    rows[r] = to;
  }
  return count;
}

void FedMatmul::Run(const FedMatmulShape& s, const uint8_t* a, const uint8_t* b, void* y,
                    ThreadPool& pool) const {
  const Split split = Plan(s);
  const size_t m = static_cast<size_t>(s.m), n = static_cast<size_t>(s.n), k = static_cast<size_t>(s.k);
  const size_t row_bytes = RowBytes(k), groups = split.groups, lanes = Lanes();
  const size_t element = spec_.quantizer.quantized ? 1 : 4;
  const size_t block_rows = BlockRows(groups);

  ScratchLayout layout;
  const size_t packed_at = layout.Take(groups * split.run_columns * 4);
  const size_t bias_at = layout.Take((split.run_columns + kEpiloguePadding) * sizeof(int32_t));
  const size_t rows_at = layout.Take(kBlockRows * sizeof(void*));
  const size_t row_bias_at = layout.Take(kBlockRows * sizeof(int32_t));
  const size_t copies_at = layout.Take(std::max(kCopiedBytes, row_bytes));
  const size_t operands_at = layout.Take(OperandBytes(block_rows, groups));
  const size_t unpacked_bytes = engine_.UnpackedBytes(split.part_rows, groups, kUnpackedBytes);
  const size_t unpacked_at = layout.Take(unpacked_bytes);

  EpilogueView view = epilogue_.view();
  view.channels = n;

  const size_t tasks = s.batches.size() * split.runs * split.row_parts;
  pool.ParallelFor(tasks, [&](size_t task) {
    const size_t part = task % split.row_parts, run = task / split.row_parts % split.runs;
    const size_t batch = task / split.row_parts / split.runs;
    const size_t column = run * split.run_columns, columns = std::min(split.run_columns, n - column);
    const size_t first = part * split.part_rows, last = std::min(first + split.part_rows, m);
    const uint8_t* from_a = a + s.batches[batch].first;
    const uint8_t* from_b = b + s.batches[batch].second + static_cast<int64_t>(column) * s.b_column;

    uint8_t* scratch = ThreadScratch(layout.bytes());
    uint8_t* packed = scratch + packed_at;
    auto* bias = reinterpret_cast<int32_t*>(scratch + bias_at);
    const auto** rows = reinterpret_cast<const uint8_t**>(scratch + rows_at);
    auto* row_bias = reinterpret_cast<int32_t*>(scratch + row_bias_at);
    std::memset(bias, 0, (split.run_columns + kEpiloguePadding) * sizeof(int32_t));

    // Panels: runs of nearly equal width, each packed on its own.
    IgemmPanel panels[kMaxColumns / 4];
    const size_t vectors = DivideUp(columns, lanes);
    const size_t count = DivideUp(vectors, static_cast<size_t>(engine_.max_vectors));
    for (size_t p = 0, vector = 0; p < count; ++p) {
      IgemmPanel& panel = panels[p];
      panel = {};
      panel.vectors = static_cast<int>(vectors / count + (p < vectors % count ? 1 : 0));
      panel.channel = vector * lanes;
      const size_t width = static_cast<size_t>(panel.vectors) * lanes;
      panel.count = std::min(width, columns - panel.channel);
      uint8_t* to = packed + groups * panel.channel * 4;
      panel.weights = reinterpret_cast<const int8_t*>(to);
      PackColumns(s, from_b + static_cast<int64_t>(panel.channel) * s.b_column, panel.count, width, to);
      if (a_zero_ != 0) {
        int32_t* sums = bias + panel.channel;
        engine_.sum_weights(panel.weights, groups, static_cast<size_t>(panel.vectors), sums);
        const int64_t shifted = static_cast<int64_t>(k) * row_factor_;
        for (size_t c = 0; c < width; ++c) {  // wraps like the accumulators do
          sums[c] = static_cast<int32_t>(static_cast<uint32_t>(-a_zero_ * (sums[c] + shifted)));
        }
      }
      vector += static_cast<size_t>(panel.vectors);
    }

    IgemmBlock block{};
    block.rows = rows;
    block.pitch = kBlockRows;
    block.segments = 1;
    block.groups = groups;
    block.panels = panels;
    block.panel_count = count;
    block.all_panels_end = panels + count;
    block.bias = bias;
    block.pixel_bias = row_factor_ == 0 ? nullptr : row_bias;
    block.x_shift = static_cast<int32_t>(static_cast<uint32_t>(a_shift_) * 0x01010101u);
    block.operands = scratch + operands_at;
    block.unpacked = unpacked_bytes == 0 ? nullptr : scratch + unpacked_at;
    block.output = {&view, 0, 1, nullptr, static_cast<uint8_t*>(y) + (batch * m * n + column) * element};
    for (size_t row = first; row < last; row += block.pixels) {
      block.pixels = PointAtRows(s, from_a + static_cast<int64_t>(row) * s.a_row, a + s.a_bytes,
                                 std::min(block_rows, last - row), row_bytes, scratch + copies_at, rows);
      size_t operands_of = 0;
      block.operands_of = &operands_of;
      if (row_factor_ != 0) {
        engine_.sum_rows(rows, block.pixels, k, static_cast<uint8_t>(a_shift_), row_bias);
        for (size_t r = 0; r < block.pixels; ++r) {
          row_bias[r] =
              static_cast<int32_t>(static_cast<uint32_t>(row_bias[r]) * static_cast<uint32_t>(row_factor_));
        }
      }
      block.output.first_pixel = row;
      engine_.run(block);
    }
  });
}

}  // namespace

std::unique_ptr<FedMatmulKernel> FedMatmulX86(const FedMatmulSpec& spec, Isa isa) {
  if (Runs(isa, Isa::kAvx512Vnni)) return std::make_unique<FedMatmul>(spec, kIgemmAvx512Vnni, "avx512vnni");
  if (Runs(isa, Isa::kAvxVnni)) return std::make_unique<FedMatmul>(spec, kIgemmAvxVnni, "avxvnni");
  if (Runs(isa, Isa::kAvx2)) return std::make_unique<FedMatmul>(spec, kIgemmAvx2Wide, "avx2");
  return std::make_unique<FedMatmul>(spec, kIgemmSse41Wide, "sse41");
}

}  // namespace lowbit
