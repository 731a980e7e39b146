// PTX that CUDA C++ has no word for, one thin wrapper each.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/kernel_handle.h"

// The shared memory that a launch asks for besides a kernel's own variables. A macro, since ptxas takes other
// registers for a pointer that a function returns.
#define LOWBIT_DYNAMIC_SHARED(name, alignment) \
  extern __shared__ __align__(alignment)       \
  uint8_t name[]

namespace lowbit::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 or 4 bytes, each word `word`.
template <int kBytes>
__device__ __forceinline__ void StoreShared(uint32_t shared, uint32_t word) {
  if constexpr (kBytes == 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(word) : "memory");
  } else {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
  }
}

// 16 or 4 bytes from global to shared memory, asynchronously where the GPU can (sm_80). 16 bytes go past the
// L1 cache unless kCached.
template <int kBytes, bool kCached = false>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16 && !kCached) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes)
                 : "memory");
  }
#else
  if constexpr (kBytes == 16) {
    const int4 v = *static_cast<const int4*>(global);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
  } else {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(shared), "r"(*static_cast<const int*>(global)) : "memory");
  }
#endif
}

// The same, or zeros where there is nothing to copy; through the L1 cache.
template <int kBytes>
__device__ __forceinline__ void CopyAsyncOrZero(uint32_t shared, const void* global, bool copy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes),
               "r"(copy ? kBytes : 0)
               : "memory");
#else
  if (copy) {
    CopyAsync<kBytes>(shared, global);
  } else {
    StoreShared<kBytes>(shared, 0);
  }
#endif
}

// The same, if any, without a branch. The compiler may move accesses of shared memory across it: to be used where those of this
// memory lie on the other side of a barrier.
template <int kBytes, bool kCached>
__device__ __forceinline__ void CopyAsyncAmong(uint32_t shared, const void* global, bool copy, bool any) {
#if __CUDA_ARCH__ >= 800
  const int bytes = copy ? kBytes : 0, asked = any ? 1 : 0;
  if constexpr (kCached) {
    asm volatile(
        "{\n.reg .pred any;\nsetp.ne.s32 any, %4, 0;\n@any cp.async.ca.shared.global [%0], [%1], %2, "
        "%3;\n}\n" ::"r"(shared),
        "l"(global), "n"(kBytes), "r"(bytes), "r"(asked));
  } else {
    asm volatile(
        "{\n.reg .pred any;\nsetp.ne.s32 any, %4, 0;\n@any cp.async.cg.shared.global [%0], [%1], %2, "
        "%3;\n}\n" ::"r"(shared),
        "l"(global), "n"(kBytes), "r"(bytes), "r"(asked));
  }
#else
  if (any) CopyAsyncOrZero<kBytes>(shared, global, copy);
#endif
}

// A barrier of kThreads threads, of the first ones or of those that name another than 1.
template <int kThreads>
__device__ __forceinline__ void SyncThreads(int barrier = 1) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The same of as many threads as are known at run time.
__device__ __forceinline__ void SyncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Keeps the compiler from computing the value again at every use.
template <typename T>
__device__ __forceinline__ void KeepInRegister(T& value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    static_assert(sizeof(T) == 4);
    asm volatile("" : "+r"(value));
  }
}

__device__ __forceinline__ void CommitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most kPending of this thread's groups of copies are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// sum + the dot product of four bytes each; those of w are signed.
template <bool kSigned>
__device__ __forceinline__ int DotFour(int x, int w, int sum) {
  int out;
  if constexpr (kSigned) {
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(w), "r"(sum));
  } else {
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(w), "r"(sum));
  }
  return out;
}

// The thread's index, read again at every call: where registers are short, what follows from it is cheap.
__device__ __forceinline__ int ReadThreadIndex() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Four bytes of b:a, by the digits of the selector; with 8 added to one, eight times that byte's highest bit.
__device__ __forceinline__ unsigned PermuteBytes(unsigned a, unsigned b, unsigned selector) {
  unsigned out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

#if __CUDA_ARCH__ >= 900
// The four clipped to 0..255, or to -128..127, one to a byte.
__device__ __forceinline__ unsigned PackUnsigned(int q0, int q1, int q2, int q3) {
  unsigned bytes = 0;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(q3), "r"(q2));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(q1), "r"(q0));
  return bytes;
}
__device__ __forceinline__ unsigned PackSigned(int q0, int q1, int q2, int q3) {
  unsigned bytes = 0;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(q3), "r"(q2));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(q1), "r"(q0));
  return bytes;
}
#endif

// v * gain + offset, rounded once and clipped to 0..1; of NaN 0.
__device__ __forceinline__ float SaturatedLine(float v, float gain, float offset) {
  float out;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(v), "f"(gain), "f"(offset));
  return out;
}

// All bits of byte i are the sign of a half of a number: of the lower and the upper half of a, then of b.
__device__ __forceinline__ unsigned SignsOfHalves(unsigned a, unsigned b) {
  unsigned out;
  asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// (a ^ b) | (a & b & kMask), one instruction.
template <unsigned kMask>
__device__ __forceinline__ unsigned XorOrMasked(unsigned a, unsigned b) {
  unsigned out;
  asm("lop3.b32 %0, %1, %2, %3, 0xBC;" : "=r"(out) : "r"(a), "r"(b), "n"(kMask));
  return out;
}

// Programmatic dependent launch: until the kernels before this one are done and their writes are visible.
__device__ __forceinline__ void WaitForPredecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Late in a kernel, when its products are done: the next kernel's blocks go where there is room. While this
// kernel leaves multiprocessors idle they would crowd there, twice and more of them to one, and the rest stay
// idle after this kernel's end (ResNet-50's convolutions in a row, batch 1: 180 us with this at each kernel's
// begin, 152 here).
__device__ __forceinline__ void LetSuccessorsStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The barrier of all blocks of a cluster, in two halves, as a rendezvous only: neither half orders memory
// accesses but the initialization of mbarriers before FenceBarrierInit. (With .release it would wait for all
// stores to global memory.)
__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The shared memory of block `rank` of the cluster, at the address that `shared` has here.
__device__ __forceinline__ uint32_t ClusterAddress(uint32_t shared, uint32_t rank) {
  uint32_t remote = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
#endif
  return remote;
}

// 16 bytes into a block of the cluster; they count at a barrier there.
__device__ __forceinline__ void StoreToCluster(uint32_t remote, const int4& v, uint32_t remote_barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          remote),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_barrier)
      : "memory");
#endif
}

// A word into a block of the cluster; its bytes count at a barrier there.
__device__ __forceinline__ void SendWordToCluster(uint32_t remote, uint32_t word, uint32_t remote_barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
               "r"(word), "r"(remote_barrier)
               : "memory");
#endif
}
// The word of global memory there, or another without looking.
__device__ __forceinline__ unsigned LoadWordOr(const void* global, bool load, unsigned other) {
  unsigned word;
  asm volatile(
      "{\n\t.reg .pred load;\n\t"
      "setp.ne.b32 load, %2, 0;\n\t"
      "mov.b32 %0, %3;\n\t"
      "@load ld.global.b32 %0, [%1];\n\t}"
      : "=&r"(word)
      : "l"(global), "r"(static_cast<int>(load)), "r"(other));
  return word;
}

// Brings a line of 128 bytes of global memory near.
__device__ __forceinline__ void PrefetchLine(const void* line) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(line));
}

// Brings a map of the tensor memory accelerator (CUtensorMap), a parameter of the kernel, near before it is
// used.
template <typename Map>
__device__ __forceinline__ void PrefetchMap(const Map& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
// Between this thread's ordinary accesses to shared memory and those of the asynchronous proxy (wgmma, the
// tensor memory accelerator).
__device__ __forceinline__ void FenceAsyncProxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Makes initialized barriers visible to the cluster and to the asynchronous proxy.
__device__ __forceinline__ void FenceBarrierInit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  FenceAsyncProxy();
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// One arrival, and `bytes` bytes that the barrier waits for besides.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "WAIT:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra WAIT;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
// This thread's arrival once its copies (CopyAsync) up to here are done.
__device__ __forceinline__ void ArriveAfterCopies(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Asynchronous copies of whole runs and boxes; the bytes count at a barrier.
__device__ __forceinline__ void BulkCopy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
// At a barrier of another block of the cluster.
__device__ __forceinline__ void ArriveRemotely(uint32_t remote_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}
// kBytes of shared memory to another block of the cluster; they count at a barrier there.
template <int kBytes>
__device__ __forceinline__ void SendToCluster(uint32_t remote, uint32_t shared, uint32_t remote_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          remote),
      "r"(shared), "n"(kBytes), "r"(remote_barrier)
      : "memory");
}

// Copies by tensor maps (CUtensorMap): what lies outside the tensor is read as 0 and not written.
// A box along the pixels of consecutive windows, from the one whose first pixel is (w, h, n) on: those that
// lie dx columns and dy rows into the windows, the channels of a row of the box from c on.
template <typename Map>
__device__ __forceinline__ void WindowCopy(uint32_t shared, const Map& map, int c, int w, int h, int n,
                                           int dx, int dy, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, "
      "%5, %6}], [%2], {%7, %8};" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(static_cast<uint16_t>(dx)),
      "h"(static_cast<uint16_t>(dy))
      : "memory");
}
// The same to the blocks of the cluster whose ranks are bits of `blocks`, at the same address in each, which counts the bytes
// at its own barrier.
template <typename Map>
__device__ __forceinline__ void WindowCopyToBlocks(uint32_t shared, const Map& map, int c, int w, int h,
                                                   int n, int dx, int dy, uint32_t barrier, uint32_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(static_cast<uint16_t>(dx)),
      "h"(static_cast<uint16_t>(dy)), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}
// A row of pixels from (w, h, n) on, a slab of channels from c on.
template <typename Map>
__device__ __forceinline__ void RowCopy(uint32_t shared, const Map& map, int c, int w, int h, int n,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n)
      : "memory");
}
// 64 pixels from m on, the channels of a tile from c on.
template <typename Map>
__device__ __forceinline__ void CodesCopy(uint32_t shared, const Map& map, int c, int m, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c), "r"(m)
      : "memory");
}
template <typename Map>
__device__ __forceinline__ void StoreCodes(const Map& map, int c, int m, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared), "r"(c), "r"(m)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most kPending of this thread's stores have still to read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitForStoresToRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until this thread's stores are done.
__device__ __forceinline__ void WaitForStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

}  // namespace lowbit::cuda
