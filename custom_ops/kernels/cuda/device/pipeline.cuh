// How the kernels of Hopper (sm_90a) overlap fetching, multiplying and finishing, written once. A family of
// them says what it loads, what it multiplies and how it finishes, as members of a class that RunPipeline
// takes.
//
//   producers   fetch -> stage 0 | fetch -> stage 1 | fetch -> stage 2 | wait empty 0, fetch -> stage 0 | ...
//                        full 0 |          full 1 |          full 2 |
//   consumers   wait full 0, products | wait full 1, products, empty 0 | ... | finish the tile | next tile
//   ...
//
// Stages are places in shared memory that take turns (Ring). Each has a barrier that counts what arrives in
// it, `full`, and one that counts the warps that are done with it, `empty`. A phase of a barrier has a
// parity, the number of the turn modulo 2: whoever waits has to see every phase, or it takes one for the one
// two later.
//
// What is a kernel's own, weights and constants, is fetched before the kernels in front of it are done; all
// else behind WaitForPredecessors. Once no more fetching is left to do the next kernel's blocks may come
// (LetSuccessorsStart).
#pragma once

#include <cstdint>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"

namespace lowbit::cuda {

inline constexpr int kWarpgroup = 128;  // threads

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The dynamic shared memory of a block from the first multiple of 1024 bytes on, where swizzled tiles may
// start. (What a launch asks for has room for that.)
struct SharedTiles {
  uint32_t at;
  uint8_t* data;

  __device__ __forceinline__ explicit SharedTiles(uint8_t* unaligned)
      : at((SharedAddress(unaligned) + 1023) & ~1023u), data(unaligned + (at - SharedAddress(unaligned))) {}
};

// mbarriers that lie in a row.
struct Barriers {
  uint32_t at;

  __device__ __forceinline__ uint32_t operator()(int i) const { return at + i * 8; }
};

// A place in a ring: which stage, and the parity of the turn in which it is full there.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Step(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // By as many stages at once, which are no more than the ring has.
  __device__ __forceinline__ void Step(int stages, int by) {
    stage += by;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// What wgmma reads of a tile of k, 128 bytes: matrix descriptors. Not is_whole: the second half of `a` is 0.
struct Operands {
  uint64_t a, b;
  bool is_whole = true;
};

// sums += a * b^T.
template <typename Product, typename Sum, int kSums>
__device__ __forceinline__ void MultiplyTile(const Operands& of, Sum (&sums)[kSums]) {
  Product::Multiply(sums, of.a, of.b);
  Product::Multiply(sums, of.a + 2, of.b + 2);
  if (of.is_whole) {
    Product::Multiply(sums, of.a + 4, of.b + 4);
    Product::Multiply(sums, of.a + 6, of.b + 6);
  }
}

// kMostStages barriers of full stages, then those of empty ones.
template <int kMostStages>
struct Ring {
  static constexpr int kBarriers = 2 * kMostStages;
  uint32_t barriers;
  int stages;

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + (kMostStages + stage) * 8; }

  // Of a stage: how many arrivals fill it, how many free it.
  __device__ __forceinline__ void MakeBarriers(int stage, int fillers, int readers) const {
    InitBarrier(full(stage), fillers);
    InitBarrier(empty(stage), readers);
  }

  // The producers' loop: fetch(i, stage) for i < count, into the stages in turn, once what was there is read.
  template <typename Fetch>
  __device__ __forceinline__ void Fill(int count, const Fetch& fetch) const {
    RingPlace place;
#pragma unroll 1
    for (int i = 0; i < count; ++i, place.Step(stages)) {
      if (i >= stages) WaitBarrier(empty(place.stage), place.parity ^ 1);
      fetch(i, place.stage);
    }
  }

  // The consumers' loop: adds the products of operands(i, stage) for i < count, of the stages in turn once
  // they are full. While they are under way those before are waited for, whose stage then release(i - 1,
  // stage) takes. Returns the last stage, whose products WgmmaWait<0> waits for. kStored: threads fill stages
  // by themselves, through another proxy than that by which wgmma reads.
  template <typename Product, bool kStored = false, typename Sum, int kSums, typename OperandsOf,
            typename Release>
  __device__ __forceinline__ int Drain(RingPlace& place, int count, Sum (&sums)[kSums],
                                       const OperandsOf& operands, const Release& release) const {
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i, place.Step(stages)) {
      const Operands of = operands(i, place.stage);
      WaitBarrier(full(place.stage), place.parity);
      if constexpr (kStored) FenceAsyncProxy();
      HoldRegisters(sums);
      WgmmaFence();
      MultiplyTile<Product>(of, sums);
      WgmmaCommit();
      WgmmaWait<1>();
      if (i > 0) release(i - 1, previous);
      previous = place.stage;
    }
    return previous;
  }
};

// Which thread this is, counted from 0: of its warp, of its warpgroup. The warp is from one lane, equal in
// all of a warp, so that addresses are computed once for all.
struct ThreadPlace {
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
};

// sums += a * b^T over all of k, whose bytes past `k` are 0, the next tile of `a` kBytesA further, that of
// `b` kBytesB.
template <typename Product, int kBytesA, int kBytesB, int kSums>
__device__ __forceinline__ void MultiplyTiles(uint32_t a, uint32_t b, int k_tiles, int k,
                                              int (&sums)[kSums]) {
  uint32_t a_part = MatrixPart(a), b_part = MatrixPart(b);
#pragma unroll 1
  for (int i = 0; i < k_tiles; ++i, a_part += kBytesA / 16, b_part += kBytesB / 16) {
    HoldRegisters(sums);
    WgmmaFence();
    MultiplyTile<Product>({SlabDescriptor<128>(a_part), SlabDescriptor<128>(b_part), i * 128 + 64 < k}, sums);
    WgmmaCommit();
  }
  WgmmaWait<0>();
  HoldRegisters(sums);
}

// A block of a kernel. Family: a class that has
//   SetUp           makes barriers, begins to fetch what is the kernel's own;
//   Begin           what a consumer does before its first tile;
//   Multiply        begins kSums sums of a tile and adds the products;
//   Finish          makes outputs of them; or
//   MakeTile        does all of a tile that has sums of several kinds;
// where a block stays for many tiles
//   HasTile, Step   whether there is one, the way to the next;
//   End             what a consumer does behind its last one;
// and where there are producers
//   Loads           whether this thread is one;
//   Load            all that it does once the barriers are there.
template <typename Family>
__device__ __forceinline__ void RunPipeline(Family family) {
  static_assert(sizeof(family.fixed) <= kFixedSharedBytes);
  family.SetUp();
  __syncthreads();
  if constexpr (requires { family.Load(); }) {
    if (family.Loads()) return family.Load();
  }
  family.Begin();
  const auto do_tile = [&] {
    if constexpr (requires { family.MakeTile(); }) {
      family.MakeTile();
    } else {
      int sums[Family::kSums];
      family.Multiply(sums);
      family.Finish(sums);
    }
  };
  if constexpr (requires { family.Step(); }) {
#pragma unroll 1
    for (; family.HasTile(); family.Step()) do_tile();
    family.End();
  } else {
    do_tile();
  }
}
#endif

}  // namespace lowbit::cuda
