// igemm on AMX-INT8: blocks of up to 32 pixels x 32 channels, four tiles of sums, in panels of 64 channels.
//
//                       weights, 16 groups of a panel    [64 values of k] x 16 channels, twice
//                                        |
//   32 pixels   [16 pixels] x 64 bytes   v
//   of x        [16 pixels] x 64 bytes  -> 4 products of 16 x 16 x 64, 16 cycles each, for 4 loads
//
// The weights lie as for vpdpbusd (igemm_tile.h): 16 groups of one vector are a tile. Of x a tile takes the same
// 64 bytes of 16 segments, one per pixel:
//
//   in place   where the pixels' segments lie equally far apart and are whole steps of 64 bytes, or there is but
//              one: every 1x1 layer, and the inner pixels of a row
//   gathered   else copied just before they are multiplied for the first time, for all panels of the block.
//              Segments that are no whole steps are put one behind the other: 7 kernel rows of 21 bytes fill 3
//              steps.
//
// All tiles of a block have the same number of rows, as many as make them equally full; the last one begins
// early enough to be full and its first rows, which the tile before it has computed, are not written twice: a
// residual may lie where y does. Sums go through memory to the epilogue of the other igemm kernels, while the next
// tiles are multiplied (Waiting).
#include "kernels/x86/amx_tiles.h"
#include "kernels/x86/igemm_tile.h"
#if defined(LOWBIT_EMULATE_AMX)
#include "kernels/x86/simd_avx2.h"
#else
#include "kernels/x86/simd_avx512.h"
#endif

namespace lowbit {
namespace {

constexpr size_t kLanes = 16, kStepGroups = 16, kStepBytes = 64;
constexpr int kMaxVectors = 4;

#if defined(LOWBIT_EMULATE_AMX)

constexpr size_t kFinishedRows = 1;  // pixels whose epilogue is done at once
struct Simd : Avx2 {
  static void Copy(uint8_t* to, const uint8_t* from, size_t bytes) { std::memcpy(to, from, bytes); }
};

#else

constexpr size_t kFinishedRows = 4;
struct Simd : Avx512 {
  // Up to 64 bytes.
  static void Copy(uint8_t* to, const uint8_t* from, size_t bytes) {
    const __mmask64 mask = ~uint64_t{0} >> (64 - bytes);
    _mm512_mask_storeu_epi8(to, mask, _mm512_maskz_loadu_epi8(mask, from));
  }
};

#endif

// The tiles of some pixels of x, step after step of k: `step` bytes from one to the next, rows `pitch` apart.
struct Operand {
  const uint8_t* first;
  size_t pitch, step;
};

constexpr size_t Least(size_t a, size_t b) { return a < b ? a : b; }
constexpr size_t Quotient(size_t value, size_t by) { return (value + by - 1) / by; }

// How the k of a block is cut: into runs of consecutive steps, with an operand for each tile. The last step of a
// single segment may end behind it: what is read there is multiplied by zeros.
struct Runs {
  size_t count, steps;
  bool in_place;  // where pixels are equally far apart
};

Runs RunsOf(size_t segments, size_t groups) {
  if (segments == 1 || groups % kStepGroups == 0) return {segments, Quotient(groups, kStepGroups), true};
  return {1, Quotient(segments * groups, kStepGroups), false};
}

size_t CopiedBytes(size_t pixels, const Runs& runs) {
  return Quotient(pixels, kTileRows) * runs.count * runs.steps * kTileBytes;
}

size_t OperandBytes(size_t pixels, size_t segments, size_t groups) {
  const Runs runs = RunsOf(segments, groups);
  return CopiedBytes(pixels, runs) + Quotient(pixels, kTileRows) * runs.count * sizeof(Operand);
}

// Where the tiles of a block lie among its pixels.
struct Tiling {
  size_t count, rows, pixels;
  size_t First(size_t tile) const { return Least(tile * rows, pixels - rows); }
};

Tiling TilingOf(size_t pixels) {
  const size_t count = Quotient(pixels, kTileRows);
  return {count, Quotient(pixels, count), pixels};
}

// Whether the pixels' pointers are equally far apart, and how far.
bool EquallyApart(const uint8_t* const* pointers, size_t count, size_t* pitch) {
  *pitch = count > 1 ? static_cast<size_t>(pointers[1] - pointers[0]) : 0;
  if (static_cast<size_t>(pointers[count - 1] - pointers[0]) != (count - 1) * *pitch) return false;
  bool equal = true;
  for (size_t i = 2; i < count; ++i) equal &= static_cast<size_t>(pointers[i] - pointers[i - 1]) == *pitch;
  return equal;
}

// Finds or makes the operands of a tile, one for each run.
void MakeOperands(const IgemmBlock& b, const Tiling& tiling, const Runs& runs, size_t tile, size_t x_offset,
                  uint8_t* copies, Operand* operands) {
  copies += tile * runs.count * runs.steps * kTileBytes;
  operands += tile * runs.count;
  const uint8_t* const* pointers = b.rows + tiling.First(tile);
  const size_t bytes = b.groups * 4;
  if (!runs.in_place) *operands = {copies, kTileRowBytes, kTileBytes};
  for (size_t s = 0; s < b.segments; ++s, pointers += b.pitch) {
    size_t begin = s * bytes, pitch;  // of the segment in k
    if (runs.in_place) {
      if (EquallyApart(pointers, tiling.rows, &pitch)) {
        operands[s] = {pointers[0] + x_offset, pitch, kStepBytes};
        continue;
      }
      operands[s] = {copies + s * runs.steps * kTileBytes, kTileRowBytes, kTileBytes};
      begin = s * runs.steps * kStepBytes;
    }
    for (size_t done = 0; done < bytes;) {
      const size_t k = begin + done, n = Least(bytes - done, kStepBytes - k % kStepBytes);
      uint8_t* to = copies + k / kStepBytes * kTileBytes + k % kStepBytes;
      const uint8_t* const* from = pointers;
      for (size_t r = 0; r < tiling.rows; ++r, to += kTileRowBytes)
        Simd::Copy(to, from[r] + x_offset + done, n);
      done += n;
    }
  }
}

// The epilogue of some pixels of a panel, from their sums in memory.
using FinishFunction = void (*)(const IgemmBlock&, const IgemmPanel&, const int32_t* sums, size_t pitch,
                                size_t pixel, size_t count);

template <int NV>
void Finish(const IgemmBlock& b, const IgemmPanel& panel, const int32_t* sums, size_t pitch, size_t pixel,
            size_t count) {
  TileArgs t{&b, &panel, nullptr, pixel, nullptr, 0};
  Simd::I bias[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v)
    bias[v] = Simd::Load(b.bias + panel.channel + static_cast<size_t>(v) * Simd::kLanes);
  const auto finish = [&]<int MR>() __attribute__((always_inline)) {
    Simd::I acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v)
        acc[r][v] = Simd::Add(
            Simd::Load(sums + static_cast<size_t>(r) * pitch + static_cast<size_t>(v) * Simd::kLanes),
            bias[v]);
    }
    FinishTile<Simd, MR, NV>(t, acc);
    sums += MR * pitch;
    t.pixel += MR;
    count -= MR;
  };
  while (count >= kFinishedRows) finish.template operator()<kFinishedRows>();
  while (count > 0) finish.template operator()<1>();
}

constexpr int kMaxFinishedVectors = kMaxVectors * static_cast<int>(kLanes) / Simd::kLanes;

// By the number of vectors.
struct FinishTable {
  FinishFunction run[kMaxFinishedVectors];
  constexpr FinishTable() : run() { Fill<1>(); }
  template <int NV>
  constexpr void Fill() {
    run[NV - 1] = &Finish<NV>;
    if constexpr (NV < kMaxFinishedVectors) Fill<NV + 1>();
  }
};

constexpr FinishTable kFinish;

// Sums of two tiles of pixels by a panel that wait for their epilogue. It is done piece by piece between the
// products of the next two tiles: those take the tile unit 16 cycles each, in which the vector units would have
// nothing to do, and the other way round.
class Waiting {
 public:
  // `steps`: products after which all of it should be done.
  void Begin(const IgemmPanel& panel, const int32_t* sums, size_t pitch, size_t steps) {
    panel_ = &panel;
    finish_ = kFinish.run[Quotient(panel.count, static_cast<size_t>(Simd::kLanes)) - 1];
    sums_ = sums;
    pitch_ = pitch;
    count_ = range_ = 0;
    pieces_ = done_ = passed_ = 0;
    steps_ = steps;
  }
  // Rows [row, row + count) of the sums belong to the pixels from `pixel` on.
  void Add(size_t row, size_t pixel, size_t count) {
    ranges_[count_++] = {row, pixel, count};
    pieces_ += Quotient(count, kFinishedRows);
  }
  // After a step of the products.
  void Step(const IgemmBlock& b) {
    for (++passed_; done_ < pieces_ && done_ * steps_ < pieces_ * passed_;) Piece(b);
  }
  void End(const IgemmBlock& b) {
    while (done_ < pieces_) Piece(b);
  }

 private:
  struct Range {
    size_t row, pixel, count;
  };

  void Piece(const IgemmBlock& b) {
    Range& range = ranges_[range_];
    const size_t count = Least(range.count, kFinishedRows);
    finish_(b, *panel_, sums_ + range.row * pitch_, pitch_, range.pixel, count);
    range = {range.row + count, range.pixel + count, range.count - count};
    if (range.count == 0) ++range_;
    ++done_;
  }

  const IgemmPanel* panel_ = nullptr;
  FinishFunction finish_ = nullptr;
  const int32_t* sums_ = nullptr;
  size_t pitch_ = 0;
  Range ranges_[2] = {};
  size_t count_ = 0, range_ = 0;
  size_t pieces_ = 0, done_ = 0, steps_ = 1, passed_ = 0;
};

// Weights of the next panel, which are fetched into L2 while this one is multiplied.
struct Fetch {
  const int8_t* next;
  size_t lines;  // after each step
};

// One or two tiles of pixels by one or two vectors of channels: tiles 0..3 hold sums, 4 and 5 pixels, 6 and 7
// weights, whose groups lie group_bytes apart.
template <bool kSigned, int kTiles, int kVectors>
void Multiply(const IgemmBlock& b, const Runs& runs, const Operand* a0, const Operand* a1,
              const int8_t* weights, size_t group_bytes, int32_t* sums, size_t sums_pitch, Waiting& waiting,
              Fetch& fetch) {
  Tiles::Zero<0>();
  if constexpr (kVectors == 2) Tiles::Zero<1>();
  if constexpr (kTiles == 2) Tiles::Zero<2>();
  if constexpr (kTiles == 2 && kVectors == 2) Tiles::Zero<3>();
  for (size_t run = 0; run < runs.count; ++run) {
    const uint8_t *x0 = a0[run].first, *x1 = a1[run].first;
    for (size_t step = 0; step < runs.steps; ++step) {
      Tiles::Load<4>(x0, a0[run].pitch);
      Tiles::Load<6>(weights, group_bytes);
      Tiles::Dot<kSigned, 0, 4, 6>();
      if constexpr (kVectors == 2) {
        Tiles::Load<7>(weights + kTileRowBytes, group_bytes);
        Tiles::Dot<kSigned, 1, 4, 7>();
      }
      if constexpr (kTiles == 2) {
        Tiles::Load<5>(x1, a1[run].pitch);
        Tiles::Dot<kSigned, 2, 5, 6>();
        if constexpr (kVectors == 2) Tiles::Dot<kSigned, 3, 5, 7>();
        x1 += a1[run].step;
      }
      x0 += a0[run].step;
      weights += kStepGroups * group_bytes;
      for (size_t i = 0; i < fetch.lines; ++i, fetch.next += kTileRowBytes)
        __builtin_prefetch(fetch.next, 0, 2);
      waiting.Step(b);
    }
  }
  const size_t pitch = sums_pitch * sizeof(int32_t);
  Tiles::Store<0>(sums, pitch);
  if constexpr (kVectors == 2) Tiles::Store<1>(sums + kLanes, pitch);
  if constexpr (kTiles == 2) {
    int32_t* second = sums + kTileRows * sums_pitch;
    Tiles::Store<2>(second, pitch);
    if constexpr (kVectors == 2) Tiles::Store<3>(second + kLanes, pitch);
  }
}

template <bool kSigned>
void RunBlock(const IgemmBlock& b) {
  const Tiling tiling = TilingOf(b.pixels);
  const Runs runs = RunsOf(b.segments, b.groups);
  uint8_t* copies = b.operands;
  Operand* operands =
      reinterpret_cast<Operand*>(copies + tiling.count * runs.count * runs.steps * kTileBytes);
  alignas(64) int32_t sums[2][2 * kTileRows * kMaxVectors * kLanes];
  size_t turn = 0;
  Waiting waiting;

  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = t < 6 ? static_cast<uint8_t>(tiling.rows) : uint8_t{kTileRows};
    config.row_bytes[t] = kTileRowBytes;
  }
  const TileScope scope(config);
  for (size_t p = 0; p < b.panel_count; ++p) {
    const IgemmPanel& panel = b.panels[p];
    const bool is_first = p == 0 || panel.x_offset != b.panels[p - 1].x_offset;
    const size_t vectors = static_cast<size_t>(panel.vectors), pitch = vectors * kLanes;
    const size_t lines = runs.count * runs.steps * kStepGroups * vectors,
                 steps = Quotient(tiling.count, 2) * Quotient(vectors, 2) * runs.count * runs.steps;
    Fetch fetch{panel.weights + lines * kTileRowBytes, 0};
    if (&panel + 1 < b.all_panels_end && lines * kTileRowBytes >= kFetchedPanelBytes)
      fetch.lines = Quotient(lines, steps);
    for (size_t tile = 0; tile < tiling.count; tile += 2) {
      const bool two = tile + 1 < tiling.count;
      if (is_first) {
        MakeOperands(b, tiling, runs, tile, panel.x_offset, copies, operands);
        if (two) MakeOperands(b, tiling, runs, tile + 1, panel.x_offset, copies, operands);
      }
      const Operand* a0 = operands + tile * runs.count;
      const Operand* a1 = two ? a0 + runs.count : a0;
      int32_t* const to = sums[turn];
      for (size_t v = 0; v < vectors; v += 2) {
        const bool pair = v + 1 < vectors;
        const auto multiply = two ? (pair ? &Multiply<kSigned, 2, 2> : &Multiply<kSigned, 2, 1>)
                                  : (pair ? &Multiply<kSigned, 1, 2> : &Multiply<kSigned, 1, 1>);
        multiply(b, runs, a0, a1, panel.weights + v * kTileRowBytes, vectors * kTileRowBytes, to + v * kLanes,
                 pitch, waiting, fetch);
      }
      waiting.End(b);
      waiting.Begin(panel, to, pitch, Quotient(vectors, 2) * runs.count * runs.steps);
      for (size_t i = 0; i < (two ? 2 : 1); ++i) {
        const size_t first = (tile + i) * tiling.rows, known = first - tiling.First(tile + i);
        waiting.Add(i * kTileRows + known, first, tiling.rows - known);
      }
      turn = 1 - turn;
    }
  }
  waiting.End(b);
}

void Run(const IgemmBlock& block) {
  if (block.x_signed) {
    RunBlock<true>(block);
  } else {
    RunBlock<false>(block);
  }
}

}  // namespace

const IgemmEngine kIgemmAmx = {
    .lanes = static_cast<int>(kLanes),
    .max_vectors = kMaxVectors,
    .layout = WeightLayout::kBytes,
    .narrow = false,
    .step_groups = kStepGroups,
    .multiplies_signed = true,
    .operand_bytes = &OperandBytes,
    .macs_per_cycle = 440.0,
    .outputs_per_cycle = 2.5,
    .tile_rows = 16,
    .least_rows = 16,
    .run = &Run,
    .sum_weights = nullptr,
    .sum_rows = nullptr,
};

}  // namespace lowbit
