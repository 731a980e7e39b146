// What bits_sm90.cu and bit_pair_sm90.cu share: patches of planes, products of words, and what becomes of the counts.
#pragma once

#include "kernels/cuda/conv/bit_codes.cuh"
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/halo_patches.cuh"

namespace lowbit::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What both kinds of patches share: products of words, and what becomes of the counts. kPair: the residuals are the
// codes of another product (kPlanesSteps).
template <int kTileN, int kBits, Finish kFinish, bool kPair = false>
struct BitProducts
    : PatchTiles<kTileN, 0, BitStepBytes(kTileN), 2 * kMaxBitSlots, kFinish, PixelsOfPlaces, kMaxBitWeights> {
  using Patches =
      PatchTiles<kTileN, 0, BitStepBytes(kTileN), 2 * kMaxBitSlots, kFinish, PixelsOfPlaces, kMaxBitWeights>;
  using Patches::at, Patches::column, Patches::fixed, Patches::kSums, Patches::patch, Patches::row,
      Patches::tile, Patches::tiles, Patches::weights;
  static constexpr int kRowsBytes = kTileN * kBitRowBytes, kOnesBytes = kOnesRows * kBitRowBytes,
                       kStepBytes = BitStepBytes(kTileN);
  using Tile = BitTile<kTileN, kBits>;
  using Counts = typename Tile::Counts;
  static constexpr int kWords = Tile::kWords, kHalves = Tile::kHalves;
  static constexpr bool kMakesBits = MakesBits(kFinish), kMayAdd = kMakesBits ||
                                                                   kFinish == Finish::kFloatsAdding ||
                                                                   kFinish == Finish::kWordsTailOnLine;

  const BitsParams& bits;
  const BitsParams& shortcut;  // of a pair
  const Barriers full = this->patch_barriers, empty = {full(kMaxBitSlots)};
  // Of a plane of a patch, and where planes begin, behind all slots of bytes.
  const int word_bytes = bits.places * kBitWordBytes, bit_plane_bytes = bits.patch_words * word_bytes,
            all_planes = bits.k_tiles * kStepBytes + bits.slots * bits.plane_bytes;
  // A thread's parts of residuals that come as planes, of its two rows.
  unsigned added[2][kWords][kMostPlanes] = {};
  int pixels[2] = {};
  unsigned flips[kWords] = {}, shortcut_flips[kWords] = {};  // EpilogueParams::step_flips

  __device__ __forceinline__ void Begin() {
    if constexpr (kFinish != Finish::kPlanesSteps) return;
    FetchFlips(bits, flips);
    if constexpr (kPair) FetchFlips(shortcut, shortcut_flips);
  }

  // What is fetched of the i-th step of a plane, those of the shortcut being the last ones.
  __device__ __forceinline__ void FetchStep(int i, uint32_t target, uint32_t barrier) const {
    const int own = bits.own_steps * bits.w_planes;
    if (kPair && i >= own) {
      FetchStep(shortcut, i - own, target, barrier);
    } else {
      FetchStep(bits, i, target, barrier);
    }
  }

  // The counts of a tile, whose patch has its planes there. A warpgroup without a tile multiplies one again: around
  // products the compiler wants no branch.
  __device__ __forceinline__ void Count(int planes, Counts& counts) {
    AddSteps(bits, 0, PlacesOfTile(planes), counts, [&] {
      if constexpr (kMayAdd) FindPixels();
      if constexpr (kMakesBits) {
        if (patch + 1 >= this->patches) LetSuccessorsStart();
        if (bits.added_planes > 0) FetchAdded();
      } else if (kMayAdd && bits.added_planes > 0) {
        if (patch + 1 >= this->patches) LetSuccessorsStart();
        SyncThreads<kWarpgroup>(this->own.group + 1);  // the last tile's codes are out of the way
        FetchAdded();
      } else {
        this->FetchAddends();
      }
    });
  }
  using Codes = typename Tile::Codes;
  // Of both products, the shortcut's last. after(): once nothing is read of the planes any more.
  template <typename F>
  __device__ __forceinline__ void MakeBoth(int planes, const F& after) {
    Codes own = {}, codes = {};
    FindPixels();
    // Not one behind the other: ptxas would make wgmma wait for itself.
#pragma unroll 1
    for (int product = 0; product < 2; ++product) {
      const bool is_last = product == 1;
      const BitsParams& of = is_last ? shortcut : bits;
      ForEachPlane([&](int i, int word, int plane) { own[i][word][plane] = codes[i][word][plane]; });
      Counts counts;
      AddSteps(of, is_last ? bits.own_steps * bits.w_planes : 0, PlacesOfTile(planes), counts, [&] {
        if (is_last && patch + 1 >= this->patches) LetSuccessorsStart();
      });
      if (is_last) after();
      unsigned falls[kWords];
#pragma unroll
      for (int word = 0; word < kWords; ++word) falls[word] = is_last ? shortcut_flips[word] : flips[word];
      Tile::CodesOfSteps(
          of, counts, [&](int of_tile) { return StepsOfPair(is_last, of_tile); }, falls, codes);
    }
    ForEachPlane([&](int i, int word, int plane) { added[i][word][plane] = codes[i][word][plane]; });
    StoreCombined(own);
  }

  // The sums, to which `sums` are added.
  __device__ __forceinline__ void SumUp(const Counts& counts, int (&sums)[kSums]) const {
    // A thread's rows, eight apart.
    int of_codes[] = {counts[kSums] * bits.w_lowest, counts[kSums + 2] * bits.w_lowest};
    int of_bit = 1 << bits.w_shift;
    // One multiplication and addition, no shift, and an addition, which is of other units.
    KeepInRegister(of_bit);
    KeepInRegister(of_codes[0]);
    KeepInRegister(of_codes[1]);
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] = (counts[j] * of_bit + sums[j]) + of_codes[j / 2 % 2];
  }

  __device__ __forceinline__ void FinishCounts(const Counts& counts) const {
    if constexpr (kFinish == Finish::kPlanesSteps) {
      Codes codes;
      Tile::CodesOfSteps(
          bits, counts,
          [&](int of_tile) {
            const int at_channel = column + of_tile * 16;
            return FourSteps{*reinterpret_cast<const int4*>(fixed.state.bias + at_channel),
                             *reinterpret_cast<const int2*>(fixed.state.scale + at_channel)};
          },
          flips, codes);
      StoreCombined(codes);
      return;
    }
    int sums[kSums];
    BeginWithBias(fixed.state, column, sums);
    SumUp(counts, sums);
    if constexpr (kFinish == Finish::kPlanesAdding) {
      Codes codes;
      CodesOfSums(sums, codes);
      StoreCombined(codes);
    } else {
      this->AddPadding(sums);
      if constexpr (kMayAdd) {
        if (bits.added_planes > 0) StageAdded();
      }
      this->Finish(sums);
    }
  }

 private:
  __device__ __forceinline__ void FetchFlips(const BitsParams& of, unsigned (&to)[kWords]) const {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int channel = at.n0 + word * kPlaneChannels;
      if (channel >= bits.n) continue;
      const unsigned whole = *reinterpret_cast<const unsigned*>(
          of.epilogue.step_flips + channel / kPlaneChannels * kPlaneWordBytes + column);
      to[word] = channel % kPlaneChannels == 0 ? whole : whole >> 16;
    }
  }
  __device__ __forceinline__ void FetchStep(const BitsParams& of, int i, uint32_t target,
                                            uint32_t barrier) const {
    BulkCopy(target, of.weights + (i * of.rows + at.n0) * kBitRowBytes, kRowsBytes, barrier);
    BulkCopy(target + kRowsBytes, of.ones + i * kOnesBytes, kOnesBytes, barrier);
  }
  // Of a pair's product, of which a block keeps the first and the second ones.
  __device__ __forceinline__ FourSteps StepsOfPair(bool is_last, int of_tile) const {
    const int at_column = column + of_tile * 16;
    const void* const kept = is_last ? static_cast<const void*>(fixed.state.start + at_column)
                                     : static_cast<const void*>(fixed.state.bias + at_column);
    FourSteps steps = {*static_cast<const int4*>(kept), {}};
    if (kBits > 1 && at.n0 + at_column < bits.n) {
      const EpilogueParams& e = (is_last ? shortcut : bits).epilogue;
      steps.last = *reinterpret_cast<const int2*>(e.last_steps + at.n0 + at_column);
    }
    return steps;
  }
  template <typename F>
  static __device__ __forceinline__ void ForEachPlane(const F& f) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane) f(i, word, plane);
      }
    }
  }
  // Of planes of a patch that begin there.
  __device__ __forceinline__ uint32_t PlacesOfTile(int planes) const {
    const int first = min(tile, tiles.last - 1) * 64 - this->FirstLine(patch) * bits.pitch;
    return weights.at + planes + first * kBitWordBytes;
  }

  // The products of all steps, whose weights are those from first_weights on, with the planes whose first place is at
  // `source`. meanwhile(): while the last ones are under way.
  //
  // Products of two planes count as often as the planes' bits together: those that do most often come first, and what
  // has been counted is doubled on its way, or few products are added again.
  template <typename F>
  __device__ __forceinline__ void AddSteps(const BitsParams& of, int first_weights, uint32_t source,
                                           Counts& counts, const F& meanwhile) {
    constexpr int kTurns = 3;     // steps that follow each other without a stop
    constexpr int kRepeated = 2;  // of 64 to 256 channels at 56x56, 4 to 9 % of a layer's time on an H100
    const uint32_t a = (source & 0x3FFFF) >> 4;
    int adds = 0;
    const auto multiply = [&](int plane, int of_weights) {
      const int planes = kBits == 1 ? 1 : of.w_planes, next = planes * (kStepBytes >> 4);
      const uint32_t of_plane = a + plane * (bit_plane_bytes >> 4);
      uint64_t b = PlainDescriptor(weights.at + (first_weights + of_weights) * kStepBytes);
      const auto some = [&]<int kSteps>(int step) {
        this->WaitForWeightsTo(first_weights + (step + kSteps - 1) * planes + of_weights);
        WgmmaFence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i, b += next) {
          MultiplyBits<kTileN + kOnesRows>(counts, PlacesDescriptor(of_plane + of.step[step + i]), b,
                                           i > 0 ? 1 : adds);
        }
        adds = 1;
      };
      int step = 0;
#pragma unroll 1
      for (; step + kTurns <= of.own_steps; step += kTurns) some.template operator()<kTurns>(step);
#pragma unroll 1
      for (; step < of.own_steps; ++step) some.template operator()<1>(step);
    };
    if constexpr (kBits == 2) {
#pragma unroll 1
      for (int bit = of.w_planes; bit > 0; --bit) {
#pragma unroll 1
        for (int plane = 1; plane >= 0; --plane) {
          if (bit - plane < of.w_planes) multiply(plane, bit - plane);
        }
        if (of.w_planes == 1 && of.own_steps <= kRepeated) {
          multiply(1, 0);
          continue;
        }
        WgmmaCommit();
        WgmmaWait<0>();
        HoldRegisters(counts);
#pragma unroll
        for (int& count : counts) count *= 2;
        HoldRegisters(counts);
      }
    }
    multiply(0, 0);
    WgmmaCommit();
    meanwhile();
    WgmmaWait<0>();
    HoldRegisters(counts);
  }

  // The outputs of a thread's two rows of the tile, of which places that are none have -1.
  __device__ __forceinline__ void FindPixels() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (bits.is_line) {
        const int place = tile * 64 + row + 8 * i;
        pixels[i] = place < bits.m ? place : -1;
      } else {
        pixels[i] = PixelsOfPlaces{bits, tile * 64}(row + 8 * i);
      }
    }
  }
  // Where a thread has its part of a word of a plane of outputs, of the tile's row or the one eight below.
  template <typename F>
  __device__ __forceinline__ void ForEachPart(const F& f) const {
    const int words = (bits.n + kPlaneChannels - 1) / kPlaneChannels;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pixel = pixels[i];
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const int channel = at.n0 + word * kPlaneChannels;
        if (pixel < 0 || channel >= bits.n) continue;
        f(i, word, channel,
          (static_cast<int64_t>(channel / kPlaneChannels) * bits.m + pixel) * kPlaneWordBytes + column,
          static_cast<int64_t>(words) * bits.m * kPlaneWordBytes);
      }
    }
  }

  // Residuals that come as planes.
  __device__ __forceinline__ void FetchAdded() {
    ForEachPart([&](int i, int word, int channel, int64_t from, int64_t next_plane) {
#pragma unroll
      for (int plane = 0; plane < kMostPlanes; ++plane) {
        if (plane >= bits.added_planes) break;
        const uint8_t* const part = static_cast<const uint8_t*>(bits.residual) + plane * next_plane + from;
        if constexpr (kHalves == 2) {
          added[i][word][plane] = *reinterpret_cast<const unsigned*>(part);
        } else {
          added[i][word][plane] = reinterpret_cast<const uint16_t*>(part)[channel % kPlaneChannels != 0];
        }
      }
    });
  }

  // To bytes, where the thread will put codes in their place.
  __device__ __forceinline__ void StageAdded() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint8_t* const to = this->area + bits.staging_offset + (row + 8 * i) * Patches::kStride + column;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const unsigned codes =
              CodesOfHalves(added[i][word][0] >> 16 * half, added[i][word][1] >> 16 * half);
#pragma unroll
          for (int four = 0; four < 4; ++four) {
            *reinterpret_cast<unsigned*>(to + word * kPlaneChannels + half * (kPlaneChannels / 2) +
                                         four * 16) = codes >> 2 * four & 0x03030303u;
          }
        }
      }
    }
  }

  // First codes of sums on lines, cut into planes.
  __device__ __forceinline__ void CodesOfSums(const int (&sums)[kSums], Codes& codes) const {
    const EpilogueParams& e = bits.epilogue;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      unsigned halves[2][2][kBits] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float4 lines[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int of_tile = (word * kHalves + half) * 4 + j;
          const int* const v = sums + 8 * of_tile;
          const int4 both[] = {make_int4(v[0], v[1], v[4], v[5]), make_int4(v[2], v[3], v[6], v[7])};
          FirstCodes<First::kLines, true, true, LineProduct::kRounded>(
              e, both, fixed.state.Four(column + of_tile * 16), lines[j]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unsigned all = 0;
          const auto shift_in = [&](float code) { all = ShiftInCode(all, __float_as_uint(code)); };
#pragma unroll
          for (int j = 0; j < 4; ++j) shift_in(lines[j][i].x);
#pragma unroll
          for (int j = 0; j < 4; ++j) shift_in(lines[j][i].y);
#pragma unroll
          for (int j = 0; j < 4; ++j) shift_in(lines[j][i].z);
#pragma unroll
          for (int j = 0; j < 4; ++j) shift_in(lines[j][i].w);
          HalvesOfCodes(all, halves[half][i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane)
          codes[i][word][plane] = JoinHalves(halves[0][i][plane], halves[1][i][plane]);
      }
    }
  }
  // First codes and residuals as planes of codes.
  __device__ __forceinline__ void StoreCombined(const Codes& first) const {
    ForEachPart([&](int i, int word, int channel, int64_t to, int64_t next_plane) {
      unsigned of[4] = {};  // bits of codes, then of residuals
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) {
        of[plane] = first[i][word][plane];
        of[2 + plane] = added[i][word][plane];
      }
      unsigned y[kBits];
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) y[plane] = of[plane];
      if (!bits.copies) CombineBits(bits.products, of, y);
      const bool is_second = channel % kPlaneChannels != 0,
                 is_alone = channel + kPlaneChannels / 2 >= bits.n;  // in its word
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) {
        if (plane >= bits.epilogue.plane_count) break;
        uint8_t* const out = static_cast<uint8_t*>(bits.y) + plane * next_plane + to;
        if (kHalves == 2 || (is_alone && !is_second)) {
          *reinterpret_cast<unsigned*>(out) = is_alone ? y[plane] & 0xFFFFu : y[plane];
        } else {
          reinterpret_cast<uint16_t*>(out)[is_second] = static_cast<uint16_t>(y[plane]);
        }
      }
    });
  }
};

// Patches of planes, one for each stage. Rows of the image are copied as they are, into lines whose other columns stay
// 0; those above and below it are rows of zeros. Those with strides are gathered pixel by pixel.
template <int kTileN, int kBits, Finish kFinish, bool kPair = false>
struct PlanePatches : BitProducts<kTileN, kBits, kFinish, kPair> {
  using Products = BitProducts<kTileN, kBits, kFinish, kPair>;
  using Products::bits, Products::bit_plane_bytes, Products::empty, Products::full, Products::own,
      Products::patch, Products::patches;

  RingPlace place = {};

  __device__ __forceinline__ void SetUp() const {
    ClearColumns();
    Products::SetUp(
        [&] {
          for (int i = 0; i < bits.stages; ++i) InitBarrier(empty(i), 4 * this->groups);
        },
        [&](int i, uint32_t target, uint32_t barrier) { this->FetchStep(i, target, barrier); },
        [&] {
          static_assert(kMaxBitSlots <= 4, "a warp for each stage");
          const int ahead = min(bits.stages, patches);
          if (own.warp < ahead && own.lane == 0) {
            InitBarrier(full(own.warp), 1);
            FenceBarrierInit();
          }
          if (own.warp >= ahead && !Gathers()) return;
          WaitForPredecessors();
          __syncwarp();
          if (own.warp < ahead) FetchRows(own.warp, own.warp);
          if (!Gathers()) return;
          for (int i = 0; i < ahead; ++i)  // all warps together, before the block goes on
            Gather(i, i, static_cast<int>(threadIdx.x), this->groups * kWarpgroup);
        });
  }

  __device__ __forceinline__ void Load() const {
    RingPlace to;
#pragma unroll 1
    for (int i = bits.stages; i < patches; ++i, to.Step(bits.stages)) {
      WaitBarrier(empty(to.stage), to.parity);
      if (Gathers()) {
        Gather(i, to.stage, own.lane, 32);
        __syncwarp();
      }
      FetchRows(i, to.stage);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void MakeTile() {
    WaitBarrier(full(place.stage), place.parity);
    const int planes = this->all_planes + place.stage * kBits * bit_plane_bytes;
    const auto release = [&] {
      if (patch + bits.stages >= patches) return;
      __syncwarp();
      if (own.lane == 0) Arrive(empty(place.stage));
    };
    if constexpr (kPair) {
      this->MakeBoth(planes, release);
    } else {
      typename Products::Counts counts;
      this->Count(planes, counts);
      release();
      this->FinishCounts(counts);
    }
  }

  __device__ __forceinline__ void Step() {
    Products::Step();
    place.Step(bits.stages);
  }

 private:
  // The columns of all lines that are none of the image.
  __device__ __forceinline__ void ClearColumns() const {
    const int columns = bits.pitch - bits.columns;
    if (columns == 0) return;
    const int count = bits.stages * kBits * bits.patch_words * bits.patch_rows * columns;
    uint8_t* const places = this->weights.data + this->all_planes;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const int line = i / columns, column = i - line * columns,
                at = column < bits.pad_left ? column : column + bits.columns;
      *reinterpret_cast<uint4*>(places + (line * bits.pitch + at) * kBitWordBytes) = make_uint4(0, 0, 0, 0);
    }
    FenceAsyncProxy();
  }

  // Where words of a patch begin, behind the padding.
  __device__ __forceinline__ uint32_t PlacesOf(const BitsParams& of, int stage) const {
    return this->weights.at + this->all_planes + stage * kBits * bit_plane_bytes +
           of.first_word * this->word_bytes + of.pad_left * kBitWordBytes;
  }

  // From there to a word of all planes, between which a pair's other words lie.
  __device__ __forceinline__ int WordBytes(const BitsParams& of, int word) const {
    const int others = kPair && kBits > 1 && word >= of.words ? bits.patch_words - of.words : 0;
    return (word + others) * this->word_bytes;
  }

  __device__ __forceinline__ bool Gathers() const {
    return bits.phases > 0 || (kPair && this->shortcut.phases > 0);
  }
  // What comes pixel by pixel, by so many threads, of which this is one. It is there for products once they have met.
  __device__ __forceinline__ void Gather(int of_patch, int stage, int thread, int threads) const {
    if (bits.phases > 0) Gather(bits, of_patch, stage, thread, threads);
    if constexpr (kPair) {
      if (this->shortcut.phases > 0) Gather(this->shortcut, of_patch, stage, thread, threads);
    }
    CommitCopies();
    WaitForCopies<0>();
    FenceAsyncProxy();
  }
  // So many threads for a line of a phase of a word.
  __device__ __forceinline__ void Gather(const BitsParams& of, int of_patch, int stage, int thread,
                                         int threads) const {
    constexpr int kOfLine = kGatheredPixels;
    const int line0 = this->FirstLine(of_patch), lines = this->LinesOf(of_patch);
    const uint32_t target = PlacesOf(of, stage);
    // Lines of all words in a row, in steps: without divisions, which took most of the time.
    int line = thread / kOfLine, to_word = 0, word = 0, phase = 0;
#pragma unroll 1
    for (;; line += threads / kOfLine) {
      while (line >= lines) {
        line -= lines;
        ++to_word;
        if (++phase == of.phases) {
          phase = 0;
          ++word;
        }
      }
      if (to_word >= kBits * of.words) break;
      const auto start = PixelsOfPlaces::StartOf(of, line0 + line);
      const int y = start.y * of.stride_h + of.phase_y[phase];
      const bool is_inside = start.y >= 0 && y < of.in_h && start.image < of.images;
      const int64_t row = (static_cast<int64_t>(word) * of.images + start.image) * of.in_h + y;
      const uint8_t* const from = of.x + row * of.in_w * kBitWordBytes;
      const uint32_t to = target + WordBytes(of, to_word) + line * of.pitch * kBitWordBytes;
#pragma unroll 1
      for (int column = thread % kOfLine; column < of.columns; column += kOfLine) {
        const int x = column * of.stride_w + of.phase_x[phase];
        const bool copies = is_inside && x < of.in_w;
        CopyAsyncOrZero<kBitWordBytes>(to + column * kBitWordBytes, copies ? from + x * kBitWordBytes : of.x,
                                       copies);
      }
    }
  }

  // What comes as whole rows, by a warp, whose arrival says that the rest is there.
  __device__ __forceinline__ void FetchRows(int of_patch, int stage) const {
    const int lines = this->LinesOf(of_patch);
    const auto bytes = [&](const BitsParams& of) {
      return of.phases > 0 ? 0 : lines * kBits * of.words * of.in_w * kBitWordBytes;
    };
    if (own.lane == 0) {
      int expected = bytes(bits);
      if constexpr (kPair) expected += bytes(this->shortcut);
      ArriveExpecting(full(stage), expected);
    }
    __syncwarp();
    if (bits.phases == 0) FetchRows(bits, of_patch, lines, stage);
    if constexpr (kPair) {
      if (this->shortcut.phases == 0) FetchRows(this->shortcut, of_patch, lines, stage);
    }
  }
  __device__ __forceinline__ void FetchRows(const BitsParams& of, int of_patch, int lines, int stage) const {
    const int line0 = this->FirstLine(of_patch), words = kBits * of.words, bytes = of.in_w * kBitWordBytes;
    const uint32_t target = PlacesOf(of, stage);
    const uint8_t* const zeros = of.ones + of.own_steps * of.w_planes * Products::kOnesBytes;
#pragma unroll 1
    for (int i = own.lane; i < lines * words; i += 32) {
      const int word = i / lines, line = i - word * lines;
      const auto start = PixelsOfPlaces::StartOf(of, line0 + line);
      const bool is_inside = start.y >= 0 && start.y < of.in_h && start.image < of.images;
      const int first = (start.image * of.in_h + start.y) * of.in_w,
                of_image = is_inside ? min(of.pixels - first, of.in_w) * kBitWordBytes : 0;
      const uint32_t to = target + WordBytes(of, word) + line * of.pitch * kBitWordBytes;
      if (of_image > 0) {
        const int64_t pixel = static_cast<int64_t>(word) * of.pixels + first;
        BulkCopy(to, of.x + pixel * kBitWordBytes, of_image, full(stage));
      }
      if (of_image < bytes) BulkCopy(to + of_image, zeros, bytes - of_image, full(stage));
    }
  }
};
#endif

}  // namespace lowbit::cuda
