// Convolutions whose weights have one bit and whose codes have 1 or 2, for Hopper (sm_90a), where a product of 256 bits takes the time of one of 32 bytes. With the codes q = q_0 + 2 q_1 and the weights
// w = lowest + 2^shift * b,
//   sum of q w = 2^shift * (popcount(q_0 AND b) + 2 * popcount(q_1 AND b)) + lowest * (sum of q),
// and ones in the place of weights count the bits of q for the last term.
//
// 128 channels of a place are a word of 16 bytes of each plane, the words of neighbouring places lie side by side, so
// that eight of them are what wgmma wants together, and any place may be the first. What lies outside of the image is
// 0 and counts nowhere.
//
// Codes may come as planes (core/bit_planes.h), which lie in memory as wgmma wants them; where windows have a stride, pixels
// that far apart are put together, in images of their own, of which each tap has a pixel of one. Or as bytes, in the patches of
// halo_sm90.cu, which a block's threads cut into planes once, whatever the window has taps. Residuals may come as planes,
// too. Where codes leave as planes a thread has whole parts of their words: those of codes before the residual (of two
// codes the signs of sums less the channel's step) and of residuals make them by logic, for 32 channels at once.
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/halo_patches.cuh"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The sum of 2^i * counts[i][at].
template <int kBits, int kSums>
__device__ __forceinline__ int SumOfBits(const int (&counts)[kBits][kSums], int at) {
  return kBits == 1 ? counts[0][at] : counts[0][at] + 2 * counts[kBits - 1][at];
}

// What both kinds of patches share: products of words, and what becomes of the counts.
template <int kTileN, int kBits, Finish kFinish>
struct BitProducts : PatchTiles<kTileN, 0, BitStepBytes(kTileN), 2 * kMaxBitSlots, kFinish> {
  using Patches = PatchTiles<kTileN, 0, BitStepBytes(kTileN), 2 * kMaxBitSlots, kFinish>;
  using Patches::at, Patches::column, Patches::fixed, Patches::kSums, Patches::patch, Patches::row,
      Patches::tile, Patches::tiles, Patches::weights;
  static constexpr int kRowsBytes = kTileN * kBitRowBytes, kOnesBytes = kOnesRows * kBitRowBytes,
                       kStepBytes = BitStepBytes(kTileN);
  // Of each plane of codes; behind a thread's sums of channels those of rows of ones.
  using Counts = int[kBits][kSums + kOnesRows / 2];
  // Of a tile, where it has no whole one half of a word.
  static constexpr int kWords = (kTileN + kPlaneChannels - 1) / kPlaneChannels,
                       kHalves = kTileN % kPlaneChannels == 0 ? 2 : 1;
  static constexpr bool kMayAdd = kFinish == Finish::kPlanesAdding || kFinish == Finish::kPlanesSteps ||
                                  kFinish == Finish::kFloatsAdding || kFinish == Finish::kWordsTailOnLine;

  const BitsParams& bits;
  const Barriers full = this->patch_barriers, empty = {full(kMaxBitSlots)};
  // Of a plane of a patch, and where planes begin, behind all slots of bytes.
  const int word_bytes = bits.places * kBitWordBytes, bit_plane_bytes = bits.words * word_bytes,
            all_planes = bits.k_tiles * kStepBytes + bits.slots * bits.plane_bytes;
  // A thread's parts of residuals that come as planes, of its two rows.
  unsigned added[2][kWords][kMostPlanes] = {};
  unsigned flips[kWords] = {};  // EpilogueParams::step_flips

  __device__ __forceinline__ void Begin() {
    if constexpr (kFinish == Finish::kPlanesSteps) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const int channel = at.n0 + word * kPlaneChannels;
        if (channel >= bits.n) continue;
        const unsigned whole = *reinterpret_cast<const unsigned*>(
            bits.epilogue.step_flips + channel / kPlaneChannels * kPlaneWordBytes + column);
        flips[word] = channel % kPlaneChannels == 0 ? whole : whole >> 16;
      }
    }
  }

  // What is fetched of the i-th step.
  __device__ __forceinline__ void FetchStep(int i, uint32_t target, uint32_t barrier) const {
    BulkCopy(target, bits.weights + (i * bits.rows + at.n0) * kBitRowBytes, kRowsBytes, barrier);
    BulkCopy(target + kRowsBytes, bits.ones + i * kOnesBytes, kOnesBytes, barrier);
  }

  // The counts of a tile, whose patch has its planes there. A warpgroup without a tile multiplies one again: around
  // products the compiler wants no branch.
  __device__ __forceinline__ void Count(int planes, Counts& counts) {
    const int first = min(tile, tiles.last - 1) * 64 - this->FirstLine(patch) * bits.pitch;
    AddSteps(weights.at + planes + first * kBitWordBytes, counts);
  }

  __device__ __forceinline__ void FinishCounts(const Counts& counts) const {
    int sums[kSums];
    // A thread's rows, eight apart.
    const int of_codes[] = {SumOfBits(counts, kSums) * bits.w_lowest,
                            SumOfBits(counts, kSums + 2) * bits.w_lowest};
    int of_bit = 1 << bits.w_shift;
    KeepInRegister(of_bit);  // one multiplication and addition, no shift
    BeginWithBias(fixed.state, column, sums);
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] = SumOfBits(counts, j) * of_bit + (sums[j] + of_codes[j / 2 % 2]);
    this->AddPadding(sums);
    if constexpr (kFinish == Finish::kPlanesAdding) {
      CombinePlanes(sums);
    } else if constexpr (kFinish == Finish::kPlanesSteps) {
      CombineSteps(sums);
    } else {
      if constexpr (kMayAdd) {
        if (bits.added_planes > 0) StageAdded();
      }
      this->Finish(sums);
    }
  }

 private:
  static __device__ __forceinline__ void Hold(Counts& counts) {
#pragma unroll
    for (auto& of_plane : counts) HoldRegisters(of_plane);
  }

  // Adds the products of all steps with the planes whose first place is at `source`.
  __device__ __forceinline__ void AddSteps(uint32_t source, Counts& counts) {
    const uint32_t a = (source & 0x3FFFF) >> 4;
    uint64_t b = PlainDescriptor(weights.at);
    Hold(counts);
#pragma unroll 1
    for (int step = 0; step < bits.k_tiles; ++step, b += kStepBytes >> 4) {
      this->WaitForWeights(step);
      WgmmaFence();
      const uint32_t part = a + bits.step[step];
#pragma unroll
      for (int i = 0; i < kBits; ++i) {
        MultiplyBits<kTileN + kOnesRows>(counts[i], PlacesDescriptor(part + i * (bit_plane_bytes >> 4)), b);
      }
    }
    WgmmaCommit();
    if (kMayAdd && bits.added_planes > 0) {
      FetchAdded();
    } else {
      this->FetchAddends();
    }
    WgmmaWait<0>();
    Hold(counts);
  }

  // Where a thread has its part of a word of a plane of outputs, of the tile's row or the one eight below.
  template <typename F>
  __device__ __forceinline__ void ForEachPart(const F& f) const {
    const PixelsOfPlaces pixels{bits, tile * 64};
    const int words = (bits.n + kPlaneChannels - 1) / kPlaneChannels;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pixel = pixels(row + 8 * i);
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
    if (patch + 1 >= this->patches) LetSuccessorsStart();
    SyncThreads<kWarpgroup>(this->own.group + 1);  // the last tile's codes are out of the way
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

  // First codes of sums, cut into planes, and the residuals' planes to those of codes.
  __device__ __forceinline__ void CombinePlanes(const int (&sums)[kSums]) const {
    constexpr unsigned kMask = ((1u << kBits) - 1) * 0x01010101u;
    const EpilogueParams& e = bits.epilogue;
    unsigned codes[2][kWords][kHalves][4];
    int four = 0;
    ForEachFour<kTileN>(sums, row, column, [&](int, int first, const int4& top, const int4& bottom) {
      const int4 both[] = {top, bottom};
      float4 lines[2];
      FirstCodes<First::kLines, true, true, LineProduct::kRounded>(e, both, fixed.state.Four(first), lines);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4& v = lines[i];
        codes[i][four / 4 / kHalves][four / 4 % kHalves][four % 4] =
            JoinBytes(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                      __float_as_uint(v.w)) &
            kMask;
      }
      ++four;
    });
    StoreCombined([&](int i, int word, unsigned (&planes)[kBits]) {
      unsigned halves[2][kBits] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) HalvesOfPlanes(codes[i][word][half], halves[half]);
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane)
        planes[plane] = JoinHalves(halves[0][plane], halves[1][plane]);
    });
  }

  // The same of sums that are below 0 or not, as one first code or the other: their signs are shifted in one by one, in the
  // order of a word's bits (BitOfChannel).
  __device__ __forceinline__ void CombineSteps(const int (&sums)[kSums]) const {
    static_assert(kBits == 1);
    StoreCombined([&](int i, int word, unsigned (&planes)[kBits]) {
      unsigned halves[2] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int bit = 15; bit >= 0; --bit) {
          const int four = (word * kHalves + half) * 4 + bit % 8 / 2, byte = bit / 8 + bit % 2 * 2;
          halves[half] = ShiftInSign(halves[half], sums[8 * four + byte / 2 * 4 + byte % 2 + 2 * i]);
        }
      }
      planes[0] = JoinHalves(halves[0], halves[1]) ^ flips[word];
    });
  }

  // first_of(i, word, planes): planes of first codes.
  template <typename F>
  __device__ __forceinline__ void StoreCombined(const F& first_of) const {
    ForEachPart([&](int i, int word, int channel, int64_t to, int64_t next_plane) {
      unsigned first[kBits], of[4] = {};  // bits of codes, then of residuals
      first_of(i, word, first);
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) {
        of[plane] = first[plane];
        of[2 + plane] = added[i][word][plane];
      }
      unsigned y[kBits];
      Combine(of, y);
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

  // BitsParams::products.
  __device__ __forceinline__ void Combine(const unsigned (&of)[4], unsigned (&y)[kBits]) const {
    unsigned products[kBitProducts] = {~0u};
#pragma unroll
    for (int plane = 0; plane < kBits; ++plane) y[plane] = bits.products[plane][0];
#pragma unroll
    for (int i = 1; i < kBitProducts; ++i) {
      if (kBits == 1 && (i & 0b1010) != 0) continue;
      const int rest = i & (i - 1), last = i - rest;  // a bit of i
      products[i] = products[rest] & of[last == 1 ? 0 : last == 2 ? 1 : last == 4 ? 2 : 3];
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) y[plane] ^= bits.products[plane][i] & products[i];
    }
  }
};

// Patches of bytes.
template <int kTileN, int kBits, Finish kFinish>
struct BitPatches : BitProducts<kTileN, kBits, kFinish> {
  using Products = BitProducts<kTileN, kBits, kFinish>;
  using Products::behind_weights, Products::bits, Products::bit_plane_bytes, Products::empty, Products::full,
      Products::groups, Products::own, Products::patch, Products::patches, Products::weights,
      Products::word_bytes;
  static constexpr int kCutBarrier = 8;  // behind those of warpgroups

  // Slabs of all patches pass through the slots.
  const int slabs = patches * bits.slabs;
  RingPlace slot = {};  // of the next slab to cut

  __device__ __forceinline__ void SetUp() const {
    Products::SetUp(
        [&] {
          for (int i = 0; i < bits.slots; ++i) InitBarrier(empty(i), 4 * groups);
        },
        [&](int i, uint32_t target, uint32_t barrier) { this->FetchStep(i, target, barrier); },
        [&] {
          static_assert(kMaxBitSlots <= 4, "a warp for each slot");
          if (own.warp >= min(bits.slots, slabs)) return;
          if (own.lane == 0) {
            InitBarrier(full(own.warp), bits.patch_rows);
            FenceBarrierInit();
            if (own.warp == 0) PrefetchMap(this->map);
          }
          __syncwarp();
          WaitForPredecessors();
          FetchSlab(own.warp / bits.slabs, own.warp % bits.slabs, own.warp);
        });
  }

  __device__ __forceinline__ void Load() const {
    RingPlace to;
    int of_patch = bits.slots / bits.slabs, slab = bits.slots % bits.slabs;
#pragma unroll 1
    for (int i = bits.slots; i < slabs; ++i, to.Step(bits.slots)) {
      WaitBarrier(empty(to.stage), to.parity);
      __syncwarp();  // lanes without a row have seen this phase, too, before the next one can end
      FetchSlab(of_patch, slab, to.stage);
      if (++slab == bits.slabs) {
        slab = 0;
        ++of_patch;
      }
    }
  }

  // A warpgroup has its part in cutting every patch, also one that has no tile for it.
  __device__ __forceinline__ bool HasTile() const { return patch < patches; }

  __device__ __forceinline__ void MakeTile() {
    const int planes = this->all_planes + patch % bits.stages * kBits * bit_plane_bytes;
    CutPatch(planes);
    typename Products::Counts counts = {};
    this->Count(planes, counts);
    if (this->tile < this->tiles.last) this->FinishCounts(counts);
  }

 private:
  // By a warp.
  __device__ __forceinline__ void FetchSlab(int of_patch, int slab, int to_slot) const {
    const int line0 = this->FirstLine(of_patch), lines = this->LinesOf(of_patch),
              bytes = bits.pitch * bits.slab;
    static_assert(kMaxHaloRows <= 32, "a lane for each row");
    if (own.lane >= bits.patch_rows) return;
    ArriveExpecting(full(to_slot), own.lane < lines ? bytes : 0);
    if (own.lane >= lines) return;
    this->FetchLine(line0 + own.lane, slab, behind_weights + to_slot * bits.plane_bytes + own.lane * bytes,
                    full(to_slot));
  }

  // Cuts the patch, into `planes`. Planes are in use until all have passed the next patch's barrier, and that patch
  // goes to other ones.
  __device__ __forceinline__ void CutPatch(int planes) {
    const int places = this->LinesOf(patch) * bits.pitch;
#pragma unroll 1
    for (int slab = 0; slab < bits.slabs; ++slab, slot.Step(bits.slots)) {
      WaitBarrier(full(slot.stage), slot.parity);
      if (bits.slab == kBitWord) {
        CutSlab<kBitWord>(slab, planes, places);
      } else {
        CutSlab<kBitWord / 2>(slab, planes, places);
      }
      if (patch * bits.slabs + slab + bits.slots < slabs) {
        __syncwarp();
        if (own.lane == 0) Arrive(empty(slot.stage));
      }
    }
    FenceAsyncProxy();
    SyncThreads(kCutBarrier, groups * kWarpgroup);
  }

  // Four threads read what there is of a place, each its bytes of every chunk.
  template <int kSlabBytes>
  __device__ __forceinline__ void CutSlab(int slab, int planes, int places) const {
    constexpr int kSwizzle = kSlabBytes == 128 ? 0x70 : 0x30;
    const int own_bytes = own.lane % 4 * 4, word = slab * kSlabBytes / kBitWord,
              from = bits.k_tiles * Products::kStepBytes + slot.stage * bits.plane_bytes,
              to = planes + word * word_bytes + own_bytes, step = groups * kWarpgroup / 4;
    // Of slabs that are half a word.
    const bool is_second = slab % 2 != 0, is_alone = !is_second && slab + 1 == bits.slabs;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) / 4; i < places; i += step) {
      const int place = from + i * kSlabBytes, exchanged = place >> 3 & kSwizzle;
      unsigned halves[2][kBits] = {};
#pragma unroll
      for (int half = 0; half < kSlabBytes / 64; ++half) {
        unsigned codes[4];
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
          const int chunk_at = (place + (half * 4 + chunk) * 16) ^ exchanged;
          codes[chunk] = *reinterpret_cast<const unsigned*>(weights.data + chunk_at + own_bytes);
        }
        HalvesOfPlanes(codes, halves[half]);
      }
#pragma unroll
      for (int plane = 0; plane < kBits; ++plane) {
        uint8_t* const out = weights.data + to + plane * bit_plane_bytes + i * kBitWordBytes;
        if (kSlabBytes == kBitWord || is_alone) {
          *reinterpret_cast<unsigned*>(out) = JoinHalves(halves[0][plane], halves[1][plane]);
        } else {
          reinterpret_cast<uint16_t*>(out)[is_second] = static_cast<uint16_t>(halves[0][plane]);
        }
      }
    }
  }
};

// Patches of planes, one for each stage. Rows of the image are copied as they are, into lines whose other columns stay
// 0; those above and below it are rows of zeros. Those with strides are gathered pixel by pixel.
template <int kTileN, int kBits, Finish kFinish>
struct PlanePatches : BitProducts<kTileN, kBits, kFinish> {
  using Products = BitProducts<kTileN, kBits, kFinish>;
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
          if (bits.phases > 0) {  // all warps together, before the block goes on
            WaitForPredecessors();
            for (int i = 0; i < ahead; ++i)
              GatherPatch(i, i, static_cast<int>(threadIdx.x), this->groups * kWarpgroup);
            if (own.warp < ahead && own.lane == 0) Arrive(full(own.warp));
            return;
          }
          if (own.warp >= ahead) return;
          __syncwarp();
          WaitForPredecessors();
          FetchPatch(own.warp, own.warp);
        });
  }

  __device__ __forceinline__ void Load() const {
    RingPlace to;
#pragma unroll 1
    for (int i = bits.stages; i < patches; ++i, to.Step(bits.stages)) {
      WaitBarrier(empty(to.stage), to.parity);
      if (bits.phases > 0) {
        GatherPatch(i, to.stage, own.lane, 32);
        __syncwarp();
        if (own.lane == 0) Arrive(full(to.stage));
      } else {
        FetchPatch(i, to.stage);
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void MakeTile() {
    WaitBarrier(full(place.stage), place.parity);
    typename Products::Counts counts = {};
    this->Count(this->all_planes + place.stage * kBits * bit_plane_bytes, counts);
    if (patch + bits.stages < patches) {
      __syncwarp();
      if (own.lane == 0) Arrive(empty(place.stage));
    }
    this->FinishCounts(counts);
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
    const int count = bits.stages * kBits * bits.words * bits.patch_rows * columns;
    uint8_t* const places = this->weights.data + this->all_planes;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const int line = i / columns, column = i - line * columns,
                at = column < bits.pad_left ? column : column + bits.columns;
      *reinterpret_cast<uint4*>(places + (line * bits.pitch + at) * kBitWordBytes) = make_uint4(0, 0, 0, 0);
    }
    FenceAsyncProxy();
  }

  // By so many threads, of which this is one: eight for a line of a phase of a word. What they put there is there for
  // products once they have met.
  __device__ __forceinline__ void GatherPatch(int of_patch, int stage, int thread, int threads) const {
    constexpr int kOfLine = 8;
    const int line0 = this->FirstLine(of_patch), lines = this->LinesOf(of_patch),
              count = lines * kBits * bits.words;
    const uint32_t target =
        this->weights.at + this->all_planes + stage * kBits * bit_plane_bytes + bits.pad_left * kBitWordBytes;
#pragma unroll 1
    for (int i = thread / kOfLine; i < count; i += threads / kOfLine) {
      const int to_word = i / lines, line = i - to_word * lines;
      const int word = to_word / bits.phases, phase = to_word - word * bits.phases;
      const auto start = PixelsOfPlaces::StartOf(bits, line0 + line);
      const int y = start.y * bits.stride_h + bits.phase_y[phase];
      const bool is_inside = start.y >= 0 && y < bits.in_h && start.image < bits.images;
      const int64_t row = (static_cast<int64_t>(word) * bits.images + start.image) * bits.in_h + y;
      const uint8_t* const from = bits.x + row * bits.in_w * kBitWordBytes;
      const uint32_t to = target + to_word * this->word_bytes + line * bits.pitch * kBitWordBytes;
#pragma unroll 1
      for (int column = thread % kOfLine; column < bits.columns; column += kOfLine) {
        const int x = column * bits.stride_w + bits.phase_x[phase];
        const bool copies = is_inside && x < bits.in_w;
        CopyAsyncOrZero<kBitWordBytes>(to + column * kBitWordBytes,
                                       copies ? from + x * kBitWordBytes : bits.x, copies);
      }
    }
    CommitCopies();
    WaitForCopies<0>();
    FenceAsyncProxy();
  }

  // By a warp.
  __device__ __forceinline__ void FetchPatch(int of_patch, int stage) const {
    const int line0 = this->FirstLine(of_patch), lines = this->LinesOf(of_patch), words = kBits * bits.words,
              bytes = bits.in_w * kBitWordBytes;
    if (own.lane == 0) ArriveExpecting(full(stage), lines * words * bytes);
    __syncwarp();
    const uint32_t target =
        this->weights.at + this->all_planes + stage * kBits * bit_plane_bytes + bits.pad_left * kBitWordBytes;
    const uint8_t* const zeros = bits.ones + bits.k_tiles * Products::kOnesBytes;
#pragma unroll 1
    for (int i = own.lane; i < lines * words; i += 32) {
      const int word = i / lines, line = i - word * lines;
      const auto start = PixelsOfPlaces::StartOf(bits, line0 + line);
      const bool is_inside = start.y >= 0 && start.y < bits.in_h && start.image < bits.images;
      const int first = (start.image * bits.in_h + start.y) * bits.in_w,
                of_image = is_inside ? min(bits.pixels - first, bits.in_w) * kBitWordBytes : 0;
      const uint32_t to = target + word * this->word_bytes + line * bits.pitch * kBitWordBytes;
      if (of_image > 0) {
        const int64_t pixel = static_cast<int64_t>(word) * bits.pixels + first;
        BulkCopy(to, bits.x + pixel * kBitWordBytes, of_image, full(stage));
      }
      if (of_image < bytes) BulkCopy(to + of_image, zeros, bytes - of_image, full(stage));
    }
  }
};
#endif

template <bool kOfPlanes, int kTileN, int kBits, Finish kFinish>
__global__ void __launch_bounds__(MaxBitTiles(kTileN, kBits) * 128 + 32, 1)
    ConvBits(const __grid_constant__ BitsParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline =
      std::conditional_t<kOfPlanes, PlanePatches<kTileN, kBits, kFinish>, BitPatches<kTileN, kBits, kFinish>>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{{{p, map, fixed, SharedTiles(unaligned)}, p}});
#endif
}

// A thread makes its part of a word of each plane, as one that has finished sums does (HalvesOfPlanes).
constexpr int kPackThreads = 256;

template <int kBits>
__global__ void __launch_bounds__(kPackThreads) PackPlanes(const __grid_constant__ PackPlanesParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int words = (p.channels + kBitWord - 1) / kBitWord, own = static_cast<int>(threadIdx.x) % 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kPackThreads / 4) + threadIdx.x / 4;
  const int64_t pixel = index / words;
  const int word = static_cast<int>(index - pixel * words);
  if (pixel >= p.pixels) return;
  const uint8_t* const from = p.x + pixel * p.channels + word * kBitWord + own * 4;
  unsigned halves[2][kBits] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (word * kBitWord + half * 64 >= p.channels) break;
    unsigned codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = *reinterpret_cast<const unsigned*>(from + half * 64 + i * 16);
    HalvesOfPlanes(codes, halves[half]);
  }
#pragma unroll
  for (int plane = 0; plane < kBits; ++plane) {
    uint8_t* const to =
        p.planes + ((static_cast<int64_t>(plane) * words + word) * p.pixels + pixel) * kBitWordBytes;
    reinterpret_cast<unsigned*>(to)[own] = JoinHalves(halves[0][plane], halves[1][plane]);
  }
}

// Codes of few bits become few codes, on lines. Whatever else there is the general instances do.
template <bool kOfPlanes>
Finish InstanceOf(const BitsParams& p) {
  const EpilogueParams& e = p.epilogue;
  const Finish finish = FinishOf(e);
  if (kOfPlanes && p.has_steps) return Finish::kPlanesSteps;
  if (kOfPlanes && p.combines) return Finish::kPlanesAdding;
  if (finish == Finish::kTail) return Finish::kBorderTail;  // whatever the borders
  const bool is_own = finish == Finish::kBorderTail || finish == Finish::kWordsTailOnLine ||
                      finish == Finish::kPlanesTail || (!kOfPlanes && finish == Finish::kFloatsOfValues);
  if (is_own) return finish;
  return e.has_residual ? Finish::kFloatsAdding : Finish::kFloats;
}

template <bool kOfPlanes, int kTileN, int kBits>
cudaError_t LaunchInstance(const BitsParams& p, const ConvConfig& config, const LaunchOptions& options) {
  using enum Finish;
  CUtensorMap map = {};
  if constexpr (!kOfPlanes) {
    if (const cudaError_t error = EncodeRows(p, &map); error != cudaSuccess) return error;
  }
  const auto launch = [&](auto finish) {
    return LaunchKernel<ConvBits<kOfPlanes, kTileN, kBits, finish>>(
        options,
        {Dim(p.shares.blocks, p.n_tiles), config.tile_m / 64 * kWarpgroup + 32, options.shared_bytes}, p,
        map);
  };
  const Finish finish = InstanceOf<kOfPlanes>(p);
  if constexpr (kOfPlanes) {
    if constexpr (kBits == 1) {
      if (finish == kPlanesSteps) return launch(std::integral_constant<Finish, kPlanesSteps>());
    }
    return std::visit(
        launch,
        OneOf<kBorderTail, kWordsTailOnLine, kPlanesTail, kPlanesAdding, kFloats, kFloatsAdding>(finish));
  } else {
    return std::visit(
        launch,
        OneOf<kBorderTail, kWordsTailOnLine, kPlanesTail, kFloats, kFloatsAdding, kFloatsOfValues>(finish));
  }
}

}  // namespace

cudaError_t LaunchPackPlanes(const PackPlanesParams& p, const LaunchOptions& options) {
  const int64_t words = int64_t{p.pixels} * ((p.channels + kBitWord - 1) / kBitWord);
  const auto blocks = static_cast<int>((words * 4 + kPackThreads - 1) / kPackThreads);
  return std::visit(
      [&](auto x_bits) {
        return LaunchKernel<PackPlanes<x_bits>>(options, {Dim(blocks), kPackThreads, 0}, p);
      },
      OneOf<1, 2>(p.x_bits));
}

cudaError_t LaunchBits(const BitsParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxBitSlots || p.slots < 0 || p.slots > kMaxBitSlots ||
      p.patch_rows > kMaxHaloRows || p.k_tiles > kMaxHaloWeights || p.epilogue.sums == SumForm::kInteger ||
      config.tile_m / 64 > MaxBitTiles(config.tile_n, p.x_bits)) {
    return cudaErrorInvalidValue;
  }
  return std::visit(
      [&](auto of_planes, auto tile_n, auto x_bits) {
        return LaunchInstance<of_planes, tile_n, x_bits>(p, config, options);
      },
      OneOf(p.slots == 0), OneOf<64, 128>(config.tile_n), OneOf<1, 2>(p.x_bits));
}

}  // namespace lowbit::cuda
