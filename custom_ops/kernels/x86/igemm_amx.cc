// igemm on AMX-INT8: blocks of up to 32 pixels x 32 channels, four tiles of sums, in panels of 64 channels.
//
//                       weights, 16 groups of a panel    [64 values of k] x 16 channels, twice
//                                        |
//   32 pixels   [16 pixels] x 64 bytes   v
//   of x        [16 pixels] x 64 bytes  -> 4 products of 16 x 16 x 64, 16 cycles each, for 4 loads
//
// 16 groups of one vector of weights are a tile, which lie one behind the other: a panel is read from its first byte to
// its last one. Of x a tile takes the same 64 bytes of 16 segments, one per pixel:
//
//   in place   where the pixels' segments lie equally far apart and are whole steps of 64 bytes, or there is but
//              one: 1x1 layers, and all whose windows are even (igemm.cc)
//   gathered   else copied just before they are multiplied for the first time, for all panels of the block.
//              Segments that are no whole steps are put one behind the other: 7 kernel rows of 21 bytes fill 3
//              steps.
//
// All tiles of a block have the same number of rows, as many as make them equally full; the last one, of all pixels or
// of each row of them, begins early enough to be full and its first rows, which the tile before it has computed, are
// not written twice: a residual may lie where y does. Sums go through memory to the epilogue (requantize_rows.h, or
// that of the other igemm kernels), while the next tiles are multiplied (Waiting).
#include "kernels/x86/amx_tiles.h"
#include "kernels/x86/igemm_tile.h"
#include "kernels/x86/requantize_rows.h"
#if defined(__AVX512BW__)
#include "kernels/x86/simd_avx512.h"
#else  // only where tiles are emulated
#include "kernels/x86/simd_avx2.h"
#endif

namespace lowbit {
namespace {

constexpr size_t kLanes = 16, kStepGroups = 16, kStepBytes = 64;
constexpr int kMaxVectors = 4;

#if defined(__AVX512BW__)

constexpr size_t kFinishedRows = 8;  // pixels whose epilogue is done at once
struct Simd : Avx512 {
  // Of 1 to 64 bytes.
  struct Copy {
    __mmask64 mask;
    explicit Copy(size_t count) : mask(~uint64_t{0} >> (64 - count)) {}
    void operator()(uint8_t* to, const uint8_t* from) const {
      _mm512_mask_storeu_epi8(to, mask, _mm512_maskz_loadu_epi8(mask, from));
    }
  };
  // As many bytes as `part` says, of `vectors` packed vectors from `first` on.
  template <int vectors, int first>
  static void StoreFirst(uint8_t* to, Packed packed, const Copy& part) {
    if constexpr (vectors == 1) {
      _mm_mask_storeu_epi8(to, static_cast<__mmask16>(part.mask), _mm512_extracti32x4_epi32(packed, first));
    } else if constexpr (vectors == 2) {
      _mm256_mask_storeu_epi8(to, static_cast<__mmask32>(part.mask),
                              _mm512_extracti64x4_epi64(packed, first / 2));
    } else {
      _mm512_mask_storeu_epi8(to, part.mask, packed);
    }
  }
};

#else

constexpr size_t kFinishedRows = 1;
struct Simd : Avx2 {
  struct Copy {
    size_t bytes;
    explicit Copy(size_t count) : bytes(count) {}
    void operator()(uint8_t* to, const uint8_t* from) const { std::memcpy(to, from, bytes); }
  };
  template <int vectors, int first>
  static void StoreFirst(uint8_t* to, Packed packed, const Copy& part) {
    alignas(32) uint8_t all[32];
    Store(all, packed);
    std::memcpy(to, all + first * kLanes, part.bytes);
  }
};

#endif

// The tiles of some pixels of x, step after step of k: `step` bytes from one to the next, rows `pitch` apart.
struct Operand {
  const uint8_t* first;
  size_t pitch, step;
};

// Not std::min and workspace.h's DivideUp: inline functions that are compiled here the linker may use elsewhere.
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

// The copies of a block, in front of its operands: none of even pixels.
size_t CopiedBytes(size_t pixels, const Runs& runs, bool even) {
  return even ? 0 : Quotient(pixels, kTileRows) * runs.count * runs.steps * kTileBytes;
}

size_t OperandBytes(size_t pixels, size_t segments, size_t groups, bool even) {
  const Runs runs = RunsOf(segments, groups);
  return CopiedBytes(pixels, runs, even) + Quotient(pixels, kTileRows) * runs.count * sizeof(Operand);
}

// Where the tiles of a block lie: `tiles` in each line of so many pixels, and lines `pitch` apart.
struct Tiling {
  size_t count, rows, pixels, tiles, pitch;

  // The first pixel that no tile before computes, and that with which the tile begins.
  size_t Own(size_t tile) const { return tile / tiles * pitch + tile % tiles * rows; }
  size_t First(size_t tile) const { return tile / tiles * pitch + Least(tile % tiles * rows, pixels - rows); }
};

// All pixels are a line. Or each row of even ones is, without those that are not stored, where that takes no more tiles: a
// tile takes as long with fewer rows. (VGG-16's layers of 224 and 112 columns take 0.97 to 0.98 of the time.)
Tiling TilingOf(const IgemmBlock& b) {
  const size_t count = Quotient(b.pixels, kTileRows);
  const Tiling all{count, Quotient(b.pixels, count), b.pixels, count, 0};
  if (b.apart == 0) return all;
  const size_t tiles = Quotient(b.columns, kTileRows), lines = Quotient(b.pixels, b.column_pitch);
  if (lines * tiles > count) return all;
  return {lines * tiles, Quotient(b.columns, tiles), b.columns, tiles, b.column_pitch};
}

// Whether the pixels' pointers are equally far apart, and how far.
bool EquallyApart(const uint8_t* const* pointers, size_t count, size_t* pitch) {
  *pitch = count > 1 ? static_cast<size_t>(pointers[1] - pointers[0]) : 0;
  if (static_cast<size_t>(pointers[count - 1] - pointers[0]) != (count - 1) * *pitch) return false;
  bool equal = true;
  for (size_t i = 2; i < count; ++i) equal &= static_cast<size_t>(pointers[i] - pointers[i - 1]) == *pitch;
  return equal;
}

// Finds or makes the operands of the tile of `rows` pixels from `pixel` on, one for each run.
void MakeOperands(const IgemmBlock& b, const Runs& runs, size_t rows, size_t pixel, size_t x_offset,
                  uint8_t* copies, Operand* operands) {
  const uint8_t* const* pointers = b.rows + pixel;
  const size_t bytes = b.groups * 4;
  if (b.apart != 0) {
    for (size_t s = 0; s < b.segments; ++s)
      operands[s] = {b.rows[s * b.pitch] + pixel * b.apart + x_offset, b.apart, kStepBytes};
    return;
  }
  if (!runs.in_place) *operands = {copies, kTileRowBytes, kTileBytes};
  for (size_t s = 0; s < b.segments; ++s, pointers += b.pitch) {
    size_t begin = s * bytes, pitch;  // of the segment in k
    if (runs.in_place) {
      if (EquallyApart(pointers, rows, &pitch)) {
        operands[s] = {pointers[0] + x_offset, pitch, kStepBytes};
        continue;
      }
      operands[s] = {copies + s * runs.steps * kTileBytes, kTileRowBytes, kTileBytes};
      begin = s * runs.steps * kStepBytes;
    }
    for (size_t done = 0; done < bytes;) {
      const size_t k = begin + done, n = Least(bytes - done, kStepBytes - k % kStepBytes);
      const Simd::Copy copy(n);
      uint8_t* to = copies + k / kStepBytes * kTileBytes + k % kStepBytes;
      for (size_t r = 0; r < rows; ++r) copy(to + r * kTileRowBytes, pointers[r] + x_offset + done);
      done += n;
    }
  }
}

// Pixels [pixel, pixel + count) of a panel whose sums lie in memory, `pitch` apart; and copies of their residuals, whole
// vectors, or null.
struct StoredSums {
  int32_t* sums;
  size_t pitch;
  const uint8_t* residuals;
  size_t pixel, count;
};
// Their epilogue.
using FinishFunction = void (*)(const IgemmBlock&, const IgemmPanel&, const StoredSums&);

// What the epilogue expects to be in the sums already (FinishTile): of pixels and of row sums.
void AddPerPixel(const IgemmBlock& b, const IgemmPanel& panel, int32_t* sums, size_t pitch, size_t pixel,
                 size_t count) {
  for (size_t r = 0; r < count; ++r, sums += pitch) {
    const Simd::I bias = Simd::Set(b.pixel_bias ? b.pixel_bias[pixel + r] : 0);
    const Simd::I sum = Simd::Set(b.row_sums ? b.row_sums[panel.group * b.pitch + pixel + r] : 0);
    for (size_t c = 0; c < panel.count; c += Simd::kLanes) {
      Simd::I value = Simd::Add(Simd::Load(sums + c), bias);
      if (b.row_sums)
        value = Simd::Add(value, Simd::Mul(sum, Simd::Load(b.row_sum_weight + panel.channel + c)));
      Simd::Store(sums + c, value);
    }
  }
}

// Accumulators as the epilogue reads them: a bias beside every sum.
struct BiasedSums {
  const int32_t *sums, *bias;
  size_t pitch;  // from a pixel's sums to the next one's

  struct Pixel {
    const int32_t *sums, *bias;
    Simd::I operator[](int v) const {
      const size_t at = static_cast<size_t>(v) * Simd::kLanes;
      return Simd::Add(Simd::Load(sums + at), Simd::Load(bias + at));
    }
  };
  Pixel operator[](int r) const { return {sums + static_cast<size_t>(r) * pitch, bias}; }
};

// Any epilogue.
template <int NV>
void Finish(const IgemmBlock& b, const IgemmPanel& panel, const StoredSums& stored) {
  int32_t* sums = stored.sums;
  const uint8_t* residuals = stored.residuals;
  const size_t pitch = stored.pitch;
  size_t pixel = stored.pixel, count = stored.count;
  if (b.pixel_bias || b.row_sums) AddPerPixel(b, panel, sums, pitch, pixel, count);
  const auto finish = [&]<int MR>() __attribute__((always_inline)) {
    FinishRegisters<Simd, MR, NV>(b.output, pixel, panel.channel, panel.count,
                                  BiasedSums{sums, b.bias + panel.channel, pitch}, residuals);
    sums += MR * pitch;
    if (residuals != nullptr) residuals += MR * NV * Simd::kLanes;
    pixel += MR;
    count -= MR;
  };
  while (count >= kFinishedRows) finish.template operator()<kFinishedRows>();
  while (count > 0) finish.template operator()<1>();
}

template <int NV, RowForm kForm, bool kPacksAll>
void Requantize(const IgemmBlock& b, const IgemmPanel& panel, const StoredSums& stored) {
  const auto [sums, pitch, residuals, pixel, count] = stored;
  if (b.pixel_bias || b.row_sums) AddPerPixel(b, panel, sums, pitch, pixel, count);
  StoredRows rows{sums, pitch, pixel, count, residuals, NV * Simd::kLanes};
  if (kForm >= RowForm::kSums && residuals == nullptr) {
    rows.residual_pitch = b.output.pixel_step * b.output.epilogue->channels;
    rows.residual = b.output.residual + b.output.first_pixel * b.output.epilogue->channels +
                    pixel * rows.residual_pitch + panel.channel;
  }
  RequantizeRows<Simd, NV, kForm, kPacksAll>({&b.output, panel.channel, panel.count, b.bias + panel.channel},
                                             rows);
}

// By the number of vectors.
struct FinishTable {
  FinishFunction of[kMaxVectors * static_cast<int>(kLanes) / Simd::kLanes];

  // Of a function template's instances: `instance` returns that of a number.
  template <class Instance>
  explicit constexpr FinishTable(const Instance& instance) : of() {
    Fill<1>(instance);
  }
  template <int NV, class Instance>
  constexpr void Fill(const Instance& instance) {
    of[NV - 1] = instance.template operator()<NV>();
    if constexpr (NV < static_cast<int>(sizeof(of) / sizeof(of[0]))) Fill<NV + 1>(instance);
  }
};

template <RowForm kForm>
const FinishTable& RequantizeTable(bool packs_all) {
  static constexpr FinishTable kAll([]<int NV>() { return &Requantize<NV, kForm, true>; }),
      kClipped([]<int NV>() { return &Requantize<NV, kForm, false>; });
  return packs_all ? kAll : kClipped;
}

const FinishTable& FinishTableOf(const EpilogueView& e) {
  static constexpr FinishTable kAny([]<int NV>() { return &Finish<NV>; });
  if (!e.pack_clips || e.few_sums != nullptr) return kAny;
  if (e.adds_by_line) return RequantizeTable<RowForm::kLine>(e.packs_all);
  if (e.has_residual) return RequantizeTable<RowForm::kSums>(e.packs_all);
  return e.rising_offset != nullptr ? RequantizeTable<RowForm::kRising>(e.packs_all)
                                    : RequantizeTable<RowForm::kProducts>(e.packs_all);
}

// Sums of two tiles of pixels by a panel that wait for their epilogue. It is done piece by piece between the
// products of the next two tiles: those take the tile unit 16 cycles each, in which the vector units would have
// nothing to do, and the other way round. A piece takes 16 to 36 cycles beside its rows (Sapphire Rapids), so there are
// half as many where rows are short or products few: VGG-16's 64->64 at 224x224 takes 0.95 of the time so, its other
// layers as long.
constexpr size_t kPieceRows = 8;
constexpr int kShortRow = 2;  // vectors
// The first piece does not wait for products that have only begun: after three of many steps it takes VGG-16's
// convolutions of 128 and 256 channels 0.97 to 0.98 of the time (all of them 0.989, where all waited for three; for five 0.998).
constexpr size_t kMostDelay = 3;

class Waiting {
 public:
  // `steps`: products after which all of it should be done.
  void Begin(const FinishTable& table, const IgemmPanel& panel, int32_t* sums, size_t pitch, size_t steps) {
    panel_ = &panel;
    vectors_ = Quotient(panel.count, static_cast<size_t>(Simd::kLanes));
    finish_ = table.of[vectors_ - 1];
    most_ = steps <= 2 || panel.vectors <= kShortRow ? 2 * kPieceRows : kPieceRows;
    sums_ = sums;
    pitch_ = pitch;
    count_ = range_ = 0;
    pieces_ = done_ = passed_ = 0;
    delay_ = Least(steps / 6, kMostDelay);
    steps_ = steps - delay_;
  }
  // Rows [row, row + count) of the sums belong to the pixels of y from `pixel` on.
  void Add(size_t row, size_t pixel, size_t count) {
    ranges_[count_++] = {row, pixel, count};
    pieces_ += most_ == kPieceRows ? Quotient(count, kPieceRows) : Quotient(count, 2 * kPieceRows);
  }
  // The same for pixels of which some are not stored.
  void AddStored(const IgemmBlock& b, size_t row, size_t pixel, size_t count) {
    // 32 bits, and once: what is done between two tiles is time in which none are multiplied.
    const auto pitch = static_cast<uint32_t>(b.column_pitch);
    size_t y = static_cast<uint32_t>(pixel) / pitch, x = static_cast<uint32_t>(pixel) % pitch;
    for (size_t done = 0, n; done < count; done += n, ++y, x = 0) {
      n = Least(count - done, b.column_pitch - x);
      if (x < b.columns) Add(row + done, y * b.columns + x, Least(n, b.columns - x));
    }
  }
  // Of the last vector of channels some may not exist: the epilogue reads whole vectors of a copy.
  void CopyResiduals(const IgemmBlock& b) {
    const EpilogueView& e = *b.output.epilogue;
    copies_residuals_ = e.has_residual && panel_->count % kLanes != 0;
    if (!copies_residuals_) return;
    const Simd::Copy copy(panel_->count);
    const size_t step = b.output.pixel_step * e.channels;
    for (size_t i = 0; i < count_; ++i) {
      const uint8_t* from =
          b.output.residual + b.output.first_pixel * e.channels + ranges_[i].pixel * step + panel_->channel;
      for (size_t r = 0; r < ranges_[i].count; ++r, from += step) copy(Residual(ranges_[i].row + r), from);
    }
  }
  // After a step of the products.
  void Step(const IgemmBlock& b) {
    if (++passed_ <= delay_) return;
    while (done_ < pieces_ && done_ * steps_ < pieces_ * (passed_ - delay_)) Piece(b);
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
    const size_t count = Least(range.count, most_);
    finish_(b, *panel_,
            {sums_ + range.row * pitch_, pitch_, copies_residuals_ ? Residual(range.row) : nullptr,
             range.pixel, count});
    range = {range.row + count, range.pixel + count, range.count - count};
    if (range.count == 0) ++range_;
    ++done_;
  }

  uint8_t* Residual(size_t row) { return residuals_ + row * vectors_ * static_cast<size_t>(Simd::kLanes); }

  const IgemmPanel* panel_ = nullptr;
  FinishFunction finish_ = nullptr;
  size_t vectors_ = 0, most_ = kPieceRows;
  bool copies_residuals_ = false;
  int32_t* sums_ = nullptr;
  size_t pitch_ = 0;
  Range ranges_[2 * kTileRows];  // of two tiles; a column may be as narrow as a pixel
  size_t count_ = 0, range_ = 0;
  size_t pieces_ = 0, done_ = 0, steps_ = 1, delay_ = 0, passed_ = 0;
  alignas(64) uint8_t residuals_[2 * kTileRows * kMaxVectors * kLanes];
};

// Weights of the next panel, which are fetched into L2 while this one is multiplied.
struct Fetch {
  const int8_t* next;
  size_t lines;  // after each step

  void Step() {
    for (size_t i = 0; i < lines; ++i, next += kTileRowBytes) __builtin_prefetch(next, 0, 2);
  }
};

// One or two tiles of pixels by one or two vectors of channels: tiles 0..3 hold sums, 4 and 5 pixels, 6 and 7
// weights, whose steps lie step_bytes apart.
template <bool kSigned, int kTiles, int kVectors>
void MultiplyTiles(const IgemmBlock& b, const Runs& runs, const Operand* a0, const Operand* a1,
                   const int8_t* weights, size_t step_bytes, int32_t* sums, size_t sums_pitch,
                   Waiting& waiting, Fetch& fetch) {
  // A tile whose rows are all the bias would be the better start, were it not slow to load: a layer 1x1 64->256
  // @56 took 232 us with it, 157 without.
  Tiles::Zero<0>();
  if constexpr (kVectors == 2) Tiles::Zero<1>();
  if constexpr (kTiles == 2) Tiles::Zero<2>();
  if constexpr (kTiles == 2 && kVectors == 2) Tiles::Zero<3>();
  for (size_t run = 0; run < runs.count; ++run) {
    const uint8_t *x0 = a0[run].first, *x1 = a1[run].first;
    for (size_t step = 0; step < runs.steps; ++step) {
      Tiles::Load<4>(x0, a0[run].pitch);
      Tiles::Load<6>(weights, kTileRowBytes);
      Tiles::Dot<kSigned, 0, 4, 6>();
      if constexpr (kVectors == 2) {
        Tiles::Load<7>(weights + kTileBytes, kTileRowBytes);
        Tiles::Dot<kSigned, 1, 4, 7>();
      }
      if constexpr (kTiles == 2) {
        Tiles::Load<5>(x1, a1[run].pitch);
        Tiles::Dot<kSigned, 2, 5, 6>();
        if constexpr (kVectors == 2) Tiles::Dot<kSigned, 3, 5, 7>();
        x1 += a1[run].step;
      }
      x0 += a0[run].step;
      weights += step_bytes;
      fetch.Step();
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

// One or two tiles of pixels by one vector of channels; their sums are left in tiles 2 * kSet and 2 * kSet + 1. Of a
// single step the pixels may be in their tiles already.
template <bool kSigned, int kTiles, int kSet>
void MultiplyVector(const IgemmBlock& b, const Runs& runs, const Operand* a0, const Operand* a1,
                    bool loads_pixels, const int8_t* weights, size_t step_bytes, Waiting& waiting,
                    Fetch& fetch) {
  constexpr int kSums = 2 * kSet, kWeights = 6 + kSet;
  Tiles::Zero<kSums>();
  if constexpr (kTiles == 2) Tiles::Zero<kSums + 1>();
  for (size_t run = 0; run < runs.count; ++run) {
    const uint8_t *x0 = a0[run].first, *x1 = a1[run].first;
    for (size_t step = 0; step < runs.steps; ++step) {
      Tiles::Load<kWeights>(weights, kTileRowBytes);
      if (loads_pixels) Tiles::Load<4>(x0, a0[run].pitch);
      Tiles::Dot<kSigned, kSums, 4, kWeights>();
      if constexpr (kTiles == 2) {
        if (loads_pixels) Tiles::Load<5>(x1, a1[run].pitch);
        Tiles::Dot<kSigned, kSums + 1, 5, kWeights>();
        x1 += a1[run].step;
      }
      x0 += a0[run].step;
      weights += step_bytes;
      fetch.Step();
      waiting.Step(b);
    }
  }
}

// Sums of one vector of channels that are still in their tiles.
struct InTiles {
  int32_t* to = nullptr;  // null where there are none
  size_t pitch = 0;
  bool two = false;

  template <int kSet>
  void Store() {
    if (to == nullptr) return;
    Tiles::Store<2 * kSet>(to, pitch * sizeof(int32_t));
    if (two) Tiles::Store<2 * kSet + 1>(to + kTileRows * pitch, pitch * sizeof(int32_t));
    to = nullptr;
  }
};

// Up to so many steps of k vectors of channels are multiplied one by one, and stored while the next ones are: products
// of a tile take 52 cycles until they may be stored, and what reads memory behind a store that waits for them may wait
// as well. On Sapphire Rapids four products of one step take 76 cycles with their stores, not 120; of four steps two
// vectors at once take 74 a step, and load pixels half as often.
constexpr size_t kStepsInTurns = 2;

// A block whose tiles are configured.
template <bool kSigned>
class BlockRun {
 public:
  explicit BlockRun(const IgemmBlock& block)
      : b_(block),
        tiling_(TilingOf(block)),
        runs_(RunsOf(block.segments, block.groups)),
        operands_(
            reinterpret_cast<Operand*>(block.operands + CopiedBytes(block.pixels, runs_, block.apart != 0))),
        steps_(runs_.count * runs_.steps),
        finish_(FinishTableOf(*block.output.epilogue)) {}

  // Each panel comes from memory once, and passes all pixels.
  void Run() {
    for (size_t p = 0; p < b_.panel_count; ++p) {
      const size_t x_offset = b_.panels[p].x_offset;
      const bool are_made = *b_.operands_of == x_offset + 1;
      const size_t lines = FetchedLines(b_.panels[p]);
      for (size_t tile = 0; tile < tiling_.count; tile += 2) {
        if (!are_made) MakeBoth(tile, x_offset);
        Multiply(b_.panels[p], tile, lines);
      }
      *b_.operands_of = x_offset + 1;
    }
    StoreInTiles();
    waiting_[1 - turn_].End(b_);
  }

 private:
  size_t PanelBytes(const IgemmPanel& panel) const {
    return steps_ * kStepGroups * static_cast<size_t>(panel.vectors) * kTileRowBytes;
  }

  bool InTurns() const { return steps_ <= kStepsInTurns; }
  // How often a tile or two pass some of the panel's weights, step by step.
  size_t Products(const IgemmPanel& panel) const {
    const size_t vectors = static_cast<size_t>(panel.vectors);
    return (InTurns() ? vectors : Quotient(vectors, 2)) * steps_;
  }
  // Of the next panel, for each of those steps.
  size_t FetchedLines(const IgemmPanel& panel) const {
    const size_t bytes = PanelBytes(panel);
    if (&panel + 1 >= b_.all_panels_end || bytes < kFetchedPanelBytes) return 0;
    return Quotient(bytes / kTileRowBytes, Products(panel) * Quotient(tiling_.count, 2));
  }

  void MakeBoth(size_t tile, size_t x_offset) {
    for (size_t i = tile; i < Least(tile + 2, tiling_.count); ++i)
      MakeOperands(b_, runs_, tiling_.rows, tiling_.First(i), x_offset, b_.operands + i * steps_ * kTileBytes,
                   operands_ + i * runs_.count);
  }

  // Two tiles, or the last one, by a panel. Meanwhile `lines` of the next one are fetched after each step.
  void Multiply(const IgemmPanel& panel, size_t tile, size_t lines) {
    const bool two = tile + 1 < tiling_.count, in_turns = InTurns();
    const size_t pitch = static_cast<size_t>(panel.vectors) * kLanes, products = Products(panel);
    Fetch fetch{panel.weights + PanelBytes(panel) + tile / 2 * products * lines * kTileRowBytes, lines};
    int32_t* const sums = sums_[turn_];
    Waiting& waiting = waiting_[turn_];
    waiting.Begin(finish_, panel, sums, pitch, in_turns ? products - steps_ : products);
    for (size_t i = 0; i < (two ? 2 : 1); ++i) {
      const size_t first = tiling_.Own(tile + i), known = first - tiling_.First(tile + i);
      if (b_.apart != 0) {
        waiting.AddStored(b_, i * kTileRows + known, first, tiling_.rows - known);
      } else {
        waiting.Add(i * kTileRows + known, first, tiling_.rows - known);
      }
    }
    waiting.CopyResiduals(b_);
    if (in_turns) {
      MultiplyInTurns(panel, tile, two, fetch);
    } else {
      MultiplyPairs(panel, tile, two, fetch);
    }
    waiting_[1 - turn_].End(b_);
    turn_ = 1 - turn_;
  }

  void MultiplyPairs(const IgemmPanel& panel, size_t tile, bool two, Fetch& fetch) {
    const size_t vectors = static_cast<size_t>(panel.vectors), pitch = vectors * kLanes;
    const Operand* a0 = operands_ + tile * runs_.count;
    const Operand* a1 = two ? a0 + runs_.count : a0;
    for (size_t v = 0; v < vectors; v += 2) {
      const bool pair = v + 1 < vectors;
      const auto multiply = two ? (pair ? &MultiplyTiles<kSigned, 2, 2> : &MultiplyTiles<kSigned, 2, 1>)
                                : (pair ? &MultiplyTiles<kSigned, 1, 2> : &MultiplyTiles<kSigned, 1, 1>);
      multiply(b_, runs_, a0, a1, panel.weights + v * kTileBytes, vectors * kTileBytes,
               sums_[turn_] + v * kLanes, pitch, waiting_[1 - turn_], fetch);
    }
  }

  // The last vector of the panel before is stored behind the first one of this panel, whose products therefore nothing
  // is finished beside.
  void MultiplyInTurns(const IgemmPanel& panel, size_t tile, bool two, Fetch& fetch) {
    const size_t vectors = static_cast<size_t>(panel.vectors), pitch = vectors * kLanes;
    const Operand* a0 = operands_ + tile * runs_.count;
    const Operand* a1 = two ? a0 + runs_.count : a0;
    for (size_t v = 0; v < vectors; ++v) {
      const auto multiply = set_ == 0
                                ? (two ? &MultiplyVector<kSigned, 2, 0> : &MultiplyVector<kSigned, 1, 0>)
                                : (two ? &MultiplyVector<kSigned, 2, 1> : &MultiplyVector<kSigned, 1, 1>);
      multiply(b_, runs_, a0, a1, v == 0 || steps_ > 1, panel.weights + v * kTileBytes, vectors * kTileBytes,
               v == 0 ? nothing_ : waiting_[1 - turn_], fetch);
      StoreInTiles();
      set_ = 1 - set_;
      in_tiles_ = {sums_[turn_] + v * kLanes, pitch, two};
    }
  }

  // Those of the vector before the one that was multiplied last.
  void StoreInTiles() {
    if (set_ == 0) {
      in_tiles_.Store<1>();
    } else {
      in_tiles_.Store<0>();
    }
  }

  const IgemmBlock& b_;
  const Tiling tiling_;
  const Runs runs_;
  Operand* const operands_;
  const size_t steps_;
  const FinishTable& finish_;
  Waiting waiting_[2];  // of the products that are computed, [turn_], and of those before
  Waiting nothing_;
  size_t turn_ = 0;
  int set_ = 0;  // of tiles, which the next vector has
  InTiles in_tiles_;
  alignas(64) int32_t sums_[2][2 * kTileRows * kMaxVectors * kLanes];
};

template <bool kSigned>
void RunBlock(const IgemmBlock& b) {
  const size_t rows = TilingOf(b).rows;
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = static_cast<uint8_t>(t < 6 ? rows : kTileRows);
    config.row_bytes[t] = kTileRowBytes;
  }
  const TileScope scope(config);
  BlockRun<kSigned>(b).Run();
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
    .narrow = false,
    .step_groups = kStepGroups,
    // A panel stays in L1 beside two tiles of pixels and their sums. Wider ones write whole cache lines: that is
    // faster while their weights are few.
    .panel_bytes = 32 * 1024,
    .takes_even = true,
    .multiplies_signed = true,
    .adds_by_line = true,
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
