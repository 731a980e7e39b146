// PTX that CUDA C++ has no word for, one thin wrapper each.
#pragma once

#include <cstdint>

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

// 16 or 4 bytes from global to shared memory, asynchronously where the GPU can (sm_80).
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
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

// Programmatic dependent launch: until the kernels before this one are done and their writes are visible.
__device__ __forceinline__ void WaitForPredecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void LetSuccessorsStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void ClusterSync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// 16 bytes of the shared memory of block `rank` of the cluster, at the address that `shared` has here.
__device__ __forceinline__ int4 LoadFromCluster(uint32_t shared, uint32_t rank) {
  int4 v = {};
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(remote)
               : "memory");
#endif
  return v;
}

}  // namespace lowbit::cuda
