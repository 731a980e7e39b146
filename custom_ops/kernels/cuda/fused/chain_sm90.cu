// Two 1x1 convolutions on wgmma, for Hopper (sm_90a), the second of which reads what the first writes: what
// the first makes of 64 pixels stays in shared memory, from where it is stored and at once multiplied with
// the weights of the second. A block keeps both sets of weights and stays for many tiles.
//
// Tiles belong to teams of a warpgroup or more, which work side by side and wait for each other nowhere: one
// multiplies while another rounds. All activations lie in boxes of 64 pixels and 64 channels, the unit of
// work of a warpgroup:
//   box i of y   products over x | residuals there, codes in their place | store
//   all boxes of y are there
//   box i of z   products over y | when all are done, fetch the next tile's residuals | codes | store
// Where another convolution makes the residuals, they are no tensor: a thread rounds that product to the four
// codes whose sums it has itself, and adds the next product to them,
//   box i of y   products over the other's x, products over x | codes in registers | codes | store
//
// Where a convolution with windows makes what one of these products reads (ChainWindows), its codes are no tensor: they lie in
// boxes that those of z take later on, and a tile is rows of an image beside the patch that its windows read.
//
// For few tiles, or weights that are too many for one block, the blocks of a cluster share tiles: each makes
// some of the boxes of y and of z with the weights of these alone, and sends the former to the blocks that
// make boxes of z.
#include "kernels/cuda/conv/launch.h"
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/fused/chain_params.h"

namespace lowbit::cuda {
namespace {

// How the second's sums are finished where the first's are so.
constexpr Finish SecondOf(Finish first) {
  if (first == Finish::kIntegers) return first;
  if (first == Finish::kCappedOnLine) return Finish::kCappedFromZero;
  if (first == Finish::kCappedTailOnLine || first == Finish::kWordsTailOnLine) return Finish::kTail;
  if (first == Finish::kCappedLackingOnLine || first == Finish::kCappedInTail) return Finish::kLackingTail;
  return first == Finish::kFloats || first == Finish::kFloatsAdding ? Finish::kFloats
                                                                    : Finish::kFloatsFromZero;
}

// Functions of the host are no constants of device code's branches.
template <Finish kFirst>
constexpr bool kMakesFloats = MakesFloats(kFirst);

struct ChainMaps {
  CUtensorMap x, residual, y, z;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Adds the products of all boxes with 64 channels of `weights`, whose next 128 bytes of k lie tile_bytes
// further.
template <bool kSigned>
__device__ __forceinline__ void MultiplyBoxes(int k_boxes, uint32_t boxes, uint32_t weights, int tile_bytes,
                                              int (&sums)[kChainBox / 2]) {
  uint32_t a = MatrixPart(boxes), b = MatrixPart(weights);
  const uint32_t next_tile = tile_bytes / 16 - 4;
  int box = 0;
#pragma unroll 1
  do {  // there is one at least
    HoldRegisters(sums);
    WgmmaFence();
    Wgmma<kChainBox, kSigned>::Multiply(sums, SlabDescriptor<64>(a), SlabDescriptor<kRowBytes>(b));
    Wgmma<kChainBox, kSigned>::Multiply(sums, SlabDescriptor<64>(a + 2), SlabDescriptor<kRowBytes>(b + 2));
    a += kChainBoxBytes / 16;
    b += box % 2 == 0 ? 4 : next_tile;
    WgmmaCommit();
  } while (++box < k_boxes);
  WgmmaWait<0>();
  HoldRegisters(sums);
}

// The same over the steps of windows, whose outputs' places begin at `patch`.
template <bool kSigned>
__device__ __forceinline__ void MultiplyWindows(const ChainWindows& windows, uint32_t patch, uint32_t weights,
                                                int tile_bytes, int (&sums)[kChainBox / 2]) {
  const uint32_t a = MatrixPart(patch), next_tile = tile_bytes / 16 - 4;
  uint32_t b = MatrixPart(weights);
  HoldRegisters(sums);
#pragma unroll 1
  for (int i = 0; i < windows.steps; ++i) {
    const uint32_t from = a + windows.step[i];
    WgmmaFence();
    Wgmma<kChainBox, kSigned>::Multiply(sums, SlabDescriptor<64>(from), SlabDescriptor<kRowBytes>(b));
    Wgmma<kChainBox, kSigned>::Multiply(sums, SlabDescriptor<64>(from + 2), SlabDescriptor<kRowBytes>(b + 2));
    b += i % 2 == 0 ? 4 : next_tile;
  }
  WgmmaCommit();
  WgmmaWait<0>();
  HoldRegisters(sums);
}

// A thread's codes of a box, four to a word: of its row and of the one eight rows below.
struct ThreadCodes {
  static constexpr int kFours = kChainBox / 16, kBelow = 8 * kChainBox / 4;
  unsigned top[kFours] = {}, bottom[kFours] = {};

  // f(word, its place in shared memory); `row` is where the thread's row begins.
  template <typename F>
  __device__ __forceinline__ void ForEach(unsigned* row, int column, int swizzle, const F& f) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      unsigned* const word = row + ((column + i * 16) ^ swizzle) / 4;
      f(top[i], word);
      f(bottom[i], word + kBelow);
    }
  }

  // requantize (WithEpilogue) of all of them.
  template <typename Requantize>
  __device__ __forceinline__ void Finish(const BlockState<kChainBox>& state, const int (&sums)[kChainBox / 2],
                                         int column, const Requantize& requantize) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int* const v = sums + 8 * i;
      const int4 both[] = {make_int4(v[0], v[1], v[4], v[5]), make_int4(v[2], v[3], v[6], v[7])};
      unsigned codes[] = {top[i], bottom[i]};
      requantize(both, state.Four(column + i * 16), codes);
      top[i] = codes[0];
      bottom[i] = codes[1];
    }
  }
};

// Rounds a thread's sums. The codes go where `row` begins, in the place of residuals where there are any. All
// of these are read before the first code is written, so that the words do not wait for each other. kMayAdd:
// there may be residuals.
template <Finish kFinish, bool kMayAdd>
__device__ __forceinline__ void FinishBox(const EpilogueParams& e, const BlockState<kChainBox>& state,
                                          const int (&sums)[kChainBox / 2], int column, int swizzle,
                                          unsigned* row) {
  WithEpilogue<kFinish, kMayAdd>(e, [&](const auto& requantize) {
    ThreadCodes codes;
    if (kMayAdd && e.has_residual)
      codes.ForEach(row, column, swizzle, [](unsigned& code, const unsigned* word) { code = *word; });
    codes.Finish(state, sums, column, requantize);
    codes.ForEach(row, column, swizzle, [](unsigned code, unsigned* word) { *word = code; });
  });
}

// Rounds sums to residuals, which are added as kFinish has it.
template <Finish kFinish>
__device__ __forceinline__ void RoundToResiduals(const EpilogueParams& e, const BlockState<kChainBox>& state,
                                                 const int (&sums)[kChainBox / 2], int column,
                                                 ThreadCodes& residuals) {
  const auto finish = [&](const auto& requantize) { residuals.Finish(state, sums, column, requantize); };
  if constexpr (kFinish == Finish::kCappedTailOnLine) {
    WithEpilogue<Finish::kTail, false>(e, finish);
  } else if constexpr (kFinish == Finish::kCappedLackingOnLine || kFinish == Finish::kCappedInTail) {
    WithEpilogue<Finish::kLackingTail, false>(e, finish);
  } else if constexpr (kFinish == Finish::kFloatsAdding) {
    WithIntegers<false>(e, finish);
  } else if constexpr (kMakesFloats<kFinish>) {
    WithEpilogue<Finish::kWordsMultiplied, false>(e, finish);
  } else {
    WithEpilogue<Finish::kIntegers, false>(e, finish);
  }
}

// Rounds sums and adds residuals.
template <Finish kFinish>
__device__ __forceinline__ void AddToResiduals(const EpilogueParams& e, const BlockState<kChainBox>& state,
                                               const int (&sums)[kChainBox / 2], int column, int swizzle,
                                               unsigned* row, ThreadCodes& residuals) {
  __builtin_assume(e.has_residual);
  WithEpilogue<kFinish>(e, [&](const auto& requantize) {
    residuals.Finish(state, sums, column, requantize);
    residuals.ForEach(row, column, swizzle, [](unsigned code, unsigned* word) { *word = code; });
  });
}

// kWindows: there are windows in front, of what the residuals' product reads where there is one, else the first.
// kMakesResiduals: there is a product that makes the residuals; the map of residuals is then that of what it reads.
// kFinish: of the first, kSecond: of the second, whose sums are floats where the first's are; those of
// residuals as MakesFloats says.
template <bool kXSigned, bool kYSigned, bool kCluster, bool kWindows, bool kMakesResiduals, Finish kFinish,
          Finish kSecond>
struct Chain {
  static_assert(!kWindows || !kCluster);
  using State = BlockState<kChainBox>;
  static constexpr int kTeamBarriers = 2 + kMaxChainBoxes, kTileBytes = kChainBox * kRowBytes;
  struct Static {
    alignas(8) uint64_t barriers[2 + kMaxChainGroups * kTeamBarriers];
  };

  const ChainParams& p;
  const ChainMaps& maps;
  Static& fixed;
  SharedTiles weights;  // of residuals, first, second and windows; then the teams' boxes, then constants

  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int team = group / p.team_groups, member = group - team * p.team_groups;
  const int cluster = kCluster ? static_cast<int>(blockIdx.x) / p.ranks : static_cast<int>(blockIdx.x),
            rank = kCluster ? static_cast<int>(blockIdx.x) - cluster * p.ranks : 0;
  // The boxes that this block makes, its own weights' rows and the bytes of a tile of k.
  const int y_first = rank * p.first.own_boxes, z_first = rank * p.second.own_boxes,
            z_own = kCluster ? max(0, min(p.second.own_boxes, p.second.n_boxes - z_first)) : p.second.n_boxes;
  const int bytes1 = min(p.first.own_boxes * kChainBox, p.first.n_padded - y_first * kChainBox) * kRowBytes,
            bytes2 = min(z_own * kChainBox, p.second.n_padded - z_first * kChainBox) * kRowBytes;
  // The blocks that read boxes of y come first.
  const int readers = kCluster ? (p.second.n_boxes + p.second.own_boxes - 1) / p.second.own_boxes : 1;

  // The residuals' product has no tiles of weights and boxes where there is none.
  const int y_k_tiles = p.residuals.k_tiles + p.first.k_tiles;
  const ChainProduct& front = p.windows.product;
  const int bytes_front = kWindows ? min(front.n_boxes * kChainBox, front.n_padded) * kRowBytes : 0;
  const int plain_bytes =
                (y_k_tiles * p.first.own_boxes + p.second.k_tiles * p.second.own_boxes) * kTileBytes,
            weight_bytes = plain_bytes + (kWindows ? front.k_tiles * front.n_boxes * kTileBytes : 0);
  const uint32_t weights0 = weights.at,
                 weights1 = weights0 + p.residuals.k_tiles * p.first.own_boxes * kTileBytes,
                 weights2 = weights0 + y_k_tiles * p.first.own_boxes * kTileBytes,
                 weights_front = weights0 + plain_bytes;
  State* const states = reinterpret_cast<State*>(weights.data + weight_bytes + p.teams * p.team_bytes);
  State* const z_states = states + p.first.own_boxes;
  State* const residual_states = z_states + p.second.own_boxes;
  State* const front_states = residual_states + p.residuals.own_boxes;
  // y, z, what the products read: the residuals' at x0. With windows the patch, boxes that are what they make and z in
  // turns, y, and where that product reads the former what the other one does. (Places behind a patch are read, too, for
  // rows of no outputs.)
  uint8_t* const boxes = weights.data + weight_bytes + team * p.team_bytes;
  uint8_t* const made_boxes = boxes + (kWindows ? front.k_boxes * p.windows.plane_bytes : 0);
  uint8_t* const y_boxes =
      made_boxes + (kWindows ? max(front.n_boxes, p.second.own_boxes) * kChainBoxBytes : 0);
  uint8_t* const z_boxes = kWindows ? made_boxes : y_boxes + p.first.n_boxes * kChainBoxBytes;
  const uint32_t patch = SharedAddress(boxes), y_at = SharedAddress(y_boxes), z_at = SharedAddress(z_boxes),
                 x0_at = kWindows ? z_at : z_at + p.second.own_boxes * kChainBoxBytes,
                 x_at = !kMakesResiduals ? x0_at
                        : kWindows       ? y_at + p.first.n_boxes * kChainBoxBytes
                                         : x0_at + p.residuals.k_boxes * kChainBoxBytes;
  const uint32_t weights_full = SharedAddress(fixed.barriers);
  const uint32_t x_full = weights_full + 16 + team * kTeamBarriers * 8, y_free = x_full + 8;
  const Barriers boxes_full = {y_free + 8};

  // Threads of a warpgroup, of different warps so that they do not wait for each other: what fetches x;
  // fetches residuals and stores codes; sends codes to the other blocks.
  const bool fetches = thread == 0, stores = thread == 32, sends = thread == 64;
  const bool adds = !kMakesResiduals && p.first.epilogue.has_residual;
  const int step = p.clusters * p.teams;
  int tile = cluster + p.clusters * team;
  uint32_t parity = 0;
  OwnCodes<kChainBox> mine{thread};

  __device__ __forceinline__ bool IsOwn(int box) const {
    return !kCluster || (box >= y_first && box < y_first + p.first.own_boxes);
  }
  __device__ __forceinline__ bool IsLast() const { return tile + step >= p.tiles; }
  __device__ __forceinline__ unsigned* Words(uint8_t* box) const {
    return reinterpret_cast<unsigned*>(box + mine.row * kChainBox);
  }

  // Where a tile lies: its first output, and where in which image that is; how many rows of outputs.
  struct Lines {
    int first, count, x, y, image;
  };
  __device__ __forceinline__ Lines LinesOf(int of_tile) const {
    if constexpr (!kWindows) return {of_tile * 64, 1, 0, 0, 0};
    const WindowParams& size = p.windows.image;
    const int band = Divide(of_tile, p.windows.by_parts), image = Divide(band, p.windows.by_bands);
    const int x = (of_tile - band * static_cast<int>(p.windows.by_parts.divisor)) * p.windows.columns,
              y = (band - image * static_cast<int>(p.windows.by_bands.divisor)) * p.windows.rows;
    return {(image * size.out_h + y) * size.out_w + x, min(p.windows.rows, size.out_h - y), x, y, image};
  }
  __device__ __forceinline__ int LineBytes() const { return kWindows ? p.windows.pitch * kChainBox : 0; }
  // A box of codes to memory, from there.
  __device__ __forceinline__ void StoreBox(const CUtensorMap& map, int box, uint32_t from) const {
    const Lines lines = LinesOf(tile);
#pragma unroll 1
    for (int i = 0; i < lines.count; ++i)
      StoreCodes(map, box * kChainBox, lines.first + i * p.windows.image.out_w, from + i * LineBytes());
  }
  __device__ __forceinline__ void FetchResiduals(int box, int of_tile, uint32_t full) const {
    const Lines lines = LinesOf(of_tile);
    ArriveExpecting(full, kWindows ? lines.count * p.windows.columns * kChainBox : kChainBoxBytes);
#pragma unroll 1
    for (int i = 0; i < lines.count; ++i) {
      CodesCopy(y_at + box * kChainBoxBytes + i * LineBytes(), maps.residual, box * kChainBox,
                lines.first + i * p.windows.image.out_w, full);
    }
  }
  // All lines that windows of a tile read, with what is beside and below the image; and what the first product reads
  // where that is something else.
  __device__ __forceinline__ void FetchPatch(int of_tile) const {
    const Lines lines = LinesOf(of_tile);
    const int count = lines.count + p.windows.reach;
    const int others = kMakesResiduals ? p.first.k_boxes * lines.count * p.windows.columns * kChainBox : 0;
    ArriveExpecting(x_full, front.k_boxes * count * LineBytes() + others);
    if constexpr (kMakesResiduals) {
#pragma unroll 1
      for (int i = 0; i < lines.count; ++i) {
        FetchPixels(p.first, maps.x, x_at + i * LineBytes(), lines.first + i * p.windows.image.out_w);
      }
    }
#pragma unroll 1
    for (int box = 0; box < front.k_boxes; ++box) {
      for (int i = 0; i < count; ++i) {
        RowCopy(patch + box * p.windows.plane_bytes + i * LineBytes(),
                kMakesResiduals ? maps.residual : maps.x, box * kChainBox, lines.x - p.windows.image.pad_left,
                lines.y - p.windows.image.pad_top + i, lines.image, x_full);
      }
    }
  }

  __device__ __forceinline__ void FetchPixels(const ChainProduct& product, const CUtensorMap& map,
                                              uint32_t to, int pixel) const {
    const PixelPlace at = FirstPixel(product.pixels, pixel);
#pragma unroll 1
    for (int box = 0; box < product.k_boxes; ++box) {
      PixelCopy(to + box * kChainBoxBytes, map, box * kChainBox, at, 0, 0, x_full);
    }
  }
  __device__ __forceinline__ void FetchX(int of_tile) const {
    if constexpr (kWindows) return FetchPatch(of_tile);
    ArriveExpecting(x_full, (p.residuals.k_boxes + p.first.k_boxes) * kChainBoxBytes);
    if constexpr (kMakesResiduals) {
      FetchPixels(p.residuals, maps.residual, x0_at, of_tile * 64);
      FetchPixels(p.first, maps.x, x_at, of_tile * 64);
    } else {
#pragma unroll 1
      for (int box = 0; box < p.first.k_boxes; ++box) {
        CodesCopy(x_at + box * kChainBoxBytes, maps.x, box * kChainBox, of_tile * 64, x_full);
      }
    }
  }
  // What comes into the boxes of y: residuals from memory, and codes from the other blocks.
  __device__ __forceinline__ void ExpectBoxes(int of_tile) const {
    if constexpr (kCluster || !kMakesResiduals) {
      if (!kCluster && !adds) return;
#pragma unroll 1
      for (int box = member; box < p.first.n_boxes; box += p.team_groups) {
        const uint32_t full = boxes_full(box);
        if (!IsOwn(box)) {
          if (z_own > 0) ArriveExpecting(full, kChainBoxBytes);
        } else if (adds) {
          FetchResiduals(box, of_tile, full);
        }
      }
    }
  }
  __device__ __forceinline__ void ExpectNextBoxes() const {
    if (stores && !IsLast()) ExpectBoxes(tile + step);
    __syncwarp();
  }
  __device__ __forceinline__ void SyncTeam() const {
    SyncThreads(p.team_groups == 1 ? 1 + group : 1 + kMaxChainGroups + team, p.team_groups * kWarpgroup);
  }

  __device__ __forceinline__ void MakeBarriers() const {
    InitBarrier(weights_full, 1);
    InitBarrier(weights_full + 8, 1);
    for (int t = 0; t < p.teams; ++t) {
      const Barriers of_team = {weights_full + 16 + t * kTeamBarriers * 8};
      InitBarrier(of_team(0), 1);
      InitBarrier(of_team(1), max(1, readers - (z_own > 0 ? 1 : 0)));
      for (int box = 0; box < p.first.n_boxes; ++box) InitBarrier(of_team(2 + box), 1);
    }
    FenceBarrierInit();
  }
  // Those of the block's boxes, `bytes` of each tile of k.
  __device__ __forceinline__ void FetchWeights(const ChainProduct& product, int first_box, int bytes,
                                               uint32_t to, uint32_t full) const {
    for (int k = 0; k < product.k_tiles; ++k) {
      BulkCopy(to + k * bytes, product.weights + (k * product.n_padded + first_box * kChainBox) * kRowBytes,
               bytes, full);
    }
  }
  __device__ __forceinline__ void FetchConstants(const ChainProduct& product, int first_box,
                                                 State* to) const {
    const int count = min(product.own_boxes * kChainBox, product.n - first_box * kChainBox);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const int n = first_box * kChainBox + i;
      to[i / kChainBox].Fetch(product.epilogue, n, i % kChainBox);
    }
  }

  __device__ __forceinline__ void SetUp() const {
    if (threadIdx.x == 0) {
      MakeBarriers();
      ArriveExpecting(weights_full, y_k_tiles * bytes1 + (kWindows ? front.k_tiles * bytes_front : 0));
      if (kWindows) FetchWeights(front, 0, bytes_front, weights_front, weights_full);
      if (kMakesResiduals) FetchWeights(p.residuals, y_first, bytes1, weights0, weights_full);
      FetchWeights(p.first, y_first, bytes1, weights1, weights_full);
      if (z_own > 0) {
        ArriveExpecting(weights_full + 8, p.second.k_tiles * bytes2);
        FetchWeights(p.second, z_first, bytes2, weights2, weights_full + 8);
      }
    }
    FetchConstants(p.first, y_first, states);
    FetchConstants(p.second, z_first, z_states);
    if (kMakesResiduals) FetchConstants(p.residuals, y_first, residual_states);
    if (kWindows) FetchConstants(front, 0, front_states);
    CommitCopies();
    __syncwarp();
    if constexpr (kCluster) ClusterArrive();
    WaitForPredecessors();
  }

  __device__ __forceinline__ void Begin() const {
    if (fetches && member == 0 && tile < p.tiles) FetchX(tile);
    if (stores && tile < p.tiles) ExpectBoxes(tile);
    __syncwarp();
    if constexpr (kCluster) ClusterWait();  // those of the other blocks, too
    WaitForCopies<0>();
    __syncthreads();  // all constants are
  }
  __device__ __forceinline__ bool HasTile() const { return tile < p.tiles; }
  __device__ __forceinline__ void Step() {
    tile += step;
    parity ^= 1;
  }
  __device__ __forceinline__ void End() const {
    if (stores) WaitForStores();
  }

  // Makes the codes of a box known to what stores, sends and multiplies them.
  __device__ __forceinline__ void Publish() const {
    FenceAsyncProxy();
    SyncThreads<kWarpgroup>(1 + group);
  }

  // A box of what windows make.
  __device__ __forceinline__ void MakeX(int box) const {
    int sums[kChainBox / 2];
    BeginWithBias(front_states[box], mine.column, sums);
    MultiplyWindows<kXSigned>(p.windows, patch, weights_front + box * kTileBytes, bytes_front, sums);
    // The former tile's z, which this warpgroup made where the codes come, has been read.
    if (stores) WaitForStoresToRead<0>();
    SyncThreads<kWarpgroup>(1 + group);
    FinishBox<kSecond, false>(front.epilogue, front_states[box], sums, mine.column, mine.swizzle,
                              Words(made_boxes + box * kChainBoxBytes));
    Publish();
  }
  __device__ __forceinline__ void MakeXOfTile() const {
#pragma unroll 1
    for (int box = member; box < front.n_boxes; box += p.team_groups) MakeX(box);
    SyncTeam();
    if (!kMakesResiduals && fetches && member == 0 && !IsLast()) FetchX(tile + step);
    __syncwarp();
  }

  // Box i of those that this block makes.
  __device__ __forceinline__ void MakeY(int i) const {
    const int box = y_first + i;
    unsigned* const out = Words(y_boxes + box * kChainBoxBytes);
    int sums[kChainBox / 2];
    ThreadCodes residuals;
    if constexpr (kMakesResiduals) {
      BeginWithBias(residual_states[i], mine.column, sums);
      MultiplyBoxes<kXSigned>(p.residuals.k_boxes, x0_at, weights0 + i * kTileBytes, bytes1, sums);
      RoundToResiduals<kFinish>(p.residuals.epilogue, residual_states[i], sums, mine.column, residuals);
    }
    BeginWithBias(states[i], mine.column, sums);
    MultiplyBoxes<kXSigned>(p.first.k_boxes, x_at, weights1 + i * kTileBytes, bytes1, sums);
    if constexpr (kMakesResiduals) {
      AddToResiduals<kFinish>(p.first.epilogue, states[i], sums, mine.column, mine.swizzle, out, residuals);
    } else {
      if (adds) WaitBarrier(boxes_full(box), parity);
      FinishBox<kFinish, true>(p.first.epilogue, states[i], sums, mine.column, mine.swizzle, out);
    }
    Publish();
    const uint32_t from = y_at + box * kChainBoxBytes;
    if (stores) StoreBox(maps.y, box, from);
    if (kCluster && sends) {
#pragma unroll 1
      for (int to = 0; to < readers; ++to) {
        if (to != rank)
          SendToCluster<kChainBoxBytes>(ClusterAddress(from, to), from, ClusterAddress(boxes_full(box), to));
      }
    }
  }

  __device__ __forceinline__ void MakeZ(int i) const {
    int sums[kChainBox / 2];
    BeginWithBias(z_states[i], mine.column, sums);
    MultiplyBoxes<kYSigned>(p.second.k_boxes, y_at, weights2 + i * kTileBytes, bytes2, sums);
    if (i + p.team_groups >= z_own) ReleaseY();
    FinishBox<kSecond, false>(p.second.epilogue, z_states[i], sums, mine.column, mine.swizzle,
                              Words(z_boxes + i * kChainBoxBytes));
    Publish();
    if (stores) StoreBox(maps.z, z_first + i, z_at + i * kChainBoxBytes);
  }

  // Nobody of the team reads this block's y any more: it may be overwritten.
  __device__ __forceinline__ void ReleaseY() const {
    if (stores) WaitForStoresToRead<0>();
    SyncTeam();
    if constexpr (!kCluster) {
      ExpectNextBoxes();
    } else if (sends && member == 0 && z_own > 0) {
#pragma unroll 1
      for (int to = 0; to < p.ranks; ++to) {
        if (to != rank) ArriveRemotely(ClusterAddress(y_free, to));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void MakeTile() const {
    WaitBarrier(weights_full, 0);
    WaitBarrier(x_full, parity);
    if constexpr (kWindows) MakeXOfTile();
#pragma unroll 1
    for (int i = member; i < p.first.own_boxes; i += p.team_groups) MakeY(i);
    // What was stored before the last of these, the former tile's z, has been read.
    if (stores) WaitForStoresToRead<1>();
    SyncTeam();
    if (IsLast()) {
      LetSuccessorsStart();
    } else if ((!kWindows || kMakesResiduals) && fetches && member == 0) {
      FetchX(tile + step);
    }
    __syncwarp();
    if (z_own > 0) {
      WaitBarrier(weights_full + 8, 0);
      if constexpr (kCluster) {
#pragma unroll 1
        for (int box = 0; box < p.first.n_boxes; ++box) {
          if (!IsOwn(box)) WaitBarrier(boxes_full(box), parity);
        }
      }
    }
    if (member >= z_own) ReleaseY();
#pragma unroll 1
    for (int i = member; i < z_own; i += p.team_groups) MakeZ(i);
    if constexpr (kCluster) {
      if (readers > (z_own > 0 ? 1 : 0)) WaitBarrier(y_free, parity);
      ExpectNextBoxes();
    }
  }
};
#endif

template <bool kXSigned, bool kYSigned, bool kCluster, bool kWindows, bool kMakesResiduals, Finish kFinish,
          Finish kSecond>
__global__ void __launch_bounds__(kMaxChainGroups * 128, 1)
    ConvChain(const __grid_constant__ ChainParams p, const __grid_constant__ ChainMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Chain<kXSigned, kYSigned, kCluster, kWindows, kMakesResiduals, kFinish, kSecond>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, maps, fixed, SharedTiles(unaligned)});
#endif
}

// What windows read, in boxes of a line of a patch and kChainBox channels.
cudaError_t EncodeLines(const ChainWindows& windows, CUtensorMap* map) {
  const auto wide = [](int v) { return static_cast<cuuint64_t>(v); };
  const WindowParams& image = windows.image;
  const cuuint64_t channels = wide(windows.product.k_boxes) * kChainBox;
  const cuuint64_t sizes[] = {channels, wide(image.in_w), wide(image.in_h), wide(windows.images)};
  const cuuint64_t strides[] = {channels, channels * wide(image.in_w),
                                channels * wide(image.in_w) * wide(image.in_h)};
  const cuuint32_t box[] = {kChainBox, static_cast<cuuint32_t>(windows.pitch), 1, 1};
  return EncodeBoxes(map, windows.product.x, sizes, strides, box);
}

template <bool kXSigned, bool kYSigned, bool kCluster, bool kWindows, bool kMakesResiduals, Finish kFinish,
          Finish kSecond>
cudaError_t LaunchWith(const ChainParams& p, const LaunchOptions& options) {
  cudaError_t error = cudaSuccess;
  ChainMaps maps;
  const auto encode = [&](const void* codes, int channels, CUtensorMap* map) {
    if constexpr (!kWindows) return EncodeCodes<kChainBox>(codes, p.m, channels, map);
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(p.m)};
    const cuuint32_t box[] = {kChainBox, static_cast<cuuint32_t>(p.windows.columns)};
    return EncodeBoxes(map, codes, sizes, sizes, box);
  };
  const auto encode_pixels = [&](const ChainProduct& product, CUtensorMap* map) {
    return EncodePixels<kChainBox>(product.x, p.m, product.pixels, kWindows ? p.windows.columns : 64, map);
  };
  if constexpr (kMakesResiduals) {
    error = encode_pixels(p.first, &maps.x);
    if (error == cudaSuccess) {
      error = kWindows ? EncodeLines(p.windows, &maps.residual) : encode_pixels(p.residuals, &maps.residual);
    }
  } else {
    error = kWindows ? EncodeLines(p.windows, &maps.x) : encode(p.first.x, p.first.k, &maps.x);
    if (error == cudaSuccess)
      error = encode(p.first.epilogue.has_residual ? p.residual : p.y, p.first.n, &maps.residual);
  }
  if (error == cudaSuccess) error = encode(p.y, p.first.n, &maps.y);
  if (error == cudaSuccess) error = encode(p.z, p.second.n, &maps.z);
  if (error != cudaSuccess) return error;
  return LaunchKernel<ConvChain<kXSigned, kYSigned, kCluster, kWindows, kMakesResiduals, kFinish, kSecond>>(
      options,
      {Dim(p.clusters * p.ranks), p.teams * p.team_groups * kWarpgroup, p.shared_bytes, Dim(p.ranks)}, p,
      maps);
}

template <bool kXSigned, bool kYSigned, bool kCluster, Finish kFinish, Finish kSecond>
cudaError_t LaunchMaker(const ChainParams& p, const LaunchOptions& options) {
  const auto launch = [&]<bool kMakesResiduals>() {
    if constexpr (!kCluster && kFinish != Finish::kIntegers) {
      if (p.has_windows)
        return LaunchWith<kXSigned, kYSigned, kCluster, true, kMakesResiduals, kFinish, kSecond>(p, options);
    }
    return LaunchWith<kXSigned, kYSigned, kCluster, false, kMakesResiduals, kFinish, kSecond>(p, options);
  };
  if constexpr (kFinish != Finish::kFloatsFromZero && kFinish != Finish::kFloats) {
    if (p.makes_residuals) return launch.template operator()<true>();
  }
  return launch.template operator()<false>();
}

template <bool kXSigned, bool kYSigned, Finish kFinish, Finish kSecond = SecondOf(kFinish)>
cudaError_t LaunchRanks(const ChainParams& p, const LaunchOptions& options) {
  if constexpr (HasInstance(!kXSigned && !kYSigned)) {
    if (p.ranks == 1) return LaunchMaker<kXSigned, kYSigned, false, kFinish, kSecond>(p, options);
  }
  if constexpr (HasInstance(kXSigned == kYSigned && IsSampled<kYSigned, kFinish>(true))) {
    return LaunchMaker<kXSigned, kYSigned, true, kFinish, kSecond>(p, options);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchChain(const ChainParams& p, const LaunchOptions& options) {
  const auto [first, second] = FinishOf(p);
  const bool has_integers = first == Finish::kIntegers;
  const bool fits = has_integers == (FinishOf(p.second.epilogue) == Finish::kIntegers) &&
                    (!p.residuals.epilogue.on_lines || MayMakeBehindTail(first));
  if (p.teams * p.team_groups > kMaxChainGroups || p.first.n_boxes > kMaxChainBoxes ||
      p.team_groups > p.first.own_boxes || !fits || p.makes_residuals > p.first.epilogue.has_residual) {
    return cudaErrorInvalidValue;
  }
  if (p.has_windows && (p.ranks > 1 || p.windows.steps > kMaxWindowSteps ||
                        !FitsWindows(p.windows.product.epilogue, {first, second}))) {
    return cudaErrorInvalidValue;
  }
  return WithFinish<false>(first, p.x_signed || p.y_signed, [&]<bool kSigned, Finish kFinish>() {
    if constexpr (kFinish == Finish::kCappedFromZero || kFinish == Finish::kTail ||
                  kFinish == Finish::kLackingTail || kFinish == Finish::kBorderTail ||
                  kFinish == Finish::kPlanesTail) {
      return cudaErrorInvalidValue;  // as any floats (FinishOf)
    } else if constexpr (kSigned && kFinish != Finish::kIntegers) {
      return cudaErrorInvalidValue;  // both are integers where one input has a sign (ParamsOf)
    } else if constexpr (kSigned) {
      if (!p.x_signed) return LaunchRanks<false, true, kFinish>(p, options);
      return p.y_signed ? LaunchRanks<true, true, kFinish>(p, options)
                        : LaunchRanks<true, false, kFinish>(p, options);
    } else {
      return LaunchRanks<false, false, kFinish>(p, options);
    }
  });
}

}  // namespace lowbit::cuda
