// The emulated GPU's ../../../../../device/ptx.cuh: the same functions, with the same meaning.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/device/kernel_handle.h"
#include "kernels/cuda/emulator/machine.h"
#include "kernels/cuda/emulator/shared_memory.h"

#define LOWBIT_DYNAMIC_SHARED(name, alignment) \
  static_assert((alignment) <= 128);           \
  uint8_t* const name = ::lowbit::cuda::emulator::current->block->shared

namespace lowbit::cuda {

inline uint32_t SharedAddress(const void* pointer) { return emulator::AddressOf(pointer); }

template <int kBytes>
void StoreShared(uint32_t shared, uint32_t word) {
  for (int i = 0; i < kBytes; i += 4) std::memcpy(emulator::PointerTo(shared) + i, &word, 4);
}

template <int kBytes>
void CopyAsyncOrZero(uint32_t shared, const void* global, bool copy) {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4);
  uint8_t* const to = emulator::PointerTo(shared);
  if (reinterpret_cast<uintptr_t>(to) % kBytes != 0 ||
      (copy && reinterpret_cast<uintptr_t>(global) % kBytes != 0))
    emulator::Fail("a misaligned asynchronous copy");
  emulator::Issue(emulator::current->copies, [=] {
    if (copy) {
      std::memcpy(to, global, kBytes);
    } else {
      std::memset(to, 0, kBytes);
    }
  });
}
template <int kBytes, bool kCached = false>
void CopyAsync(uint32_t shared, const void* global) {
  CopyAsyncOrZero<kBytes>(shared, global, true);
}
template <int kBytes, bool kCached>
void CopyAsyncAmong(uint32_t shared, const void* global, bool copy, bool any) {
  if (any) CopyAsyncOrZero<kBytes>(shared, global, copy);
}
inline void CommitCopies() { emulator::current->copies.Commit(); }
template <int kPending>
void WaitForCopies() {
  emulator::current->copies.DoAllBut(kPending);
}

inline void SyncThreads(int barrier, int threads) { emulator::SyncNamed(barrier, threads); }
template <int kThreads>
void SyncThreads(int barrier = 1) {
  emulator::SyncNamed(barrier, kThreads);
}

template <typename T>
void KeepInRegister(T&) {}

template <bool kSigned>
int DotFour(int x, int w, int sum) {
  auto out = static_cast<unsigned>(sum);
  for (int byte = 0; byte < 4; ++byte) {
    const int a = x >> (8 * byte) & 255, b = static_cast<int8_t>(w >> (8 * byte));
    out += static_cast<unsigned>((kSigned ? static_cast<int8_t>(a) : a) * b);
  }
  return static_cast<int>(out);
}

inline int ReadThreadIndex() { return static_cast<int>(emulator::current->index.x); }

inline unsigned PermuteBytes(unsigned a, unsigned b, unsigned selector) {
  unsigned out = __byte_perm(a, b, selector);
  for (int i = 0; i < 32; i += 8) {
    if ((selector >> (i / 2) & 8) != 0) out = (out & ~(255u << i)) | (out >> i & 128 ? 255u << i : 0);
  }
  return out;
}

namespace emulator {
inline unsigned Pack(int lo, int hi, int q0, int q1, int q2, int q3) {
  unsigned out = 0;
  for (const int q : {q3, q2, q1, q0}) out = out << 8 | static_cast<uint8_t>(std::clamp(q, lo, hi));
  return out;
}
}  // namespace emulator
inline unsigned PackUnsigned(int q0, int q1, int q2, int q3) {
  return emulator::Pack(0, 255, q0, q1, q2, q3);
}
inline unsigned PackSigned(int q0, int q1, int q2, int q3) {
  return emulator::Pack(-128, 127, q0, q1, q2, q3);
}

inline float SaturatedLine(float v, float gain, float offset) {
  const float out = std::fma(v, gain, offset);
  return out > 0 ? std::min(out, 1.0f) : 0;  // of NaN 0
}

inline unsigned SignsOfHalves(unsigned a, unsigned b) {
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= ((i < 2 ? a : b) >> (16 * (i % 2) + 15) & 1) * 255u << 8 * i;
  return out;
}

template <unsigned kMask>
unsigned XorOrMasked(unsigned a, unsigned b) {
  return (a ^ b) | (a & b & kMask);
}

// Grids run one after the other.
inline void WaitForPredecessors() {}
inline void LetSuccessorsStart() {}

inline void ClusterArrive() { emulator::ArriveAtCluster(); }
inline void ClusterWait() { emulator::WaitForCluster(); }
inline uint32_t ClusterAddress(uint32_t shared, uint32_t rank) { return emulator::AddressIn(shared, rank); }

inline void StoreToCluster(uint32_t remote, const int4& v, uint32_t remote_barrier) {
  uint8_t* const to = emulator::PointerTo(remote);
  emulator::Transfer([=] { std::memcpy(to, &v, sizeof v); }, emulator::PointerTo(remote_barrier), sizeof v);
}

inline void SendWordToCluster(uint32_t remote, uint32_t word, uint32_t remote_barrier) {
  uint8_t* const to = emulator::PointerTo(remote);
  emulator::Transfer([=] { std::memcpy(to, &word, sizeof word); }, emulator::PointerTo(remote_barrier),
                     sizeof word);
}

inline unsigned LoadWordOr(const void* global, bool load, unsigned other) {
  return load ? *static_cast<const unsigned*>(global) : other;
}
inline void PrefetchLine(const void*) {}
template <typename Map>
void PrefetchMap(const Map&) {}

inline void InitBarrier(uint32_t barrier, int arrivals) {
  emulator::InitMbarrier(emulator::PointerTo(barrier), arrivals);
}
inline void FenceAsyncProxy() {}
inline void FenceBarrierInit() {}
inline void Arrive(uint32_t barrier) { emulator::ArriveAt(emulator::PointerTo(barrier)); }
inline void ArriveRemotely(uint32_t remote_barrier) {
  emulator::ArriveAt(emulator::PointerTo(remote_barrier));
}
inline void ArriveExpecting(uint32_t barrier, int bytes) {
  emulator::ExpectBytes(emulator::PointerTo(barrier), bytes);
  emulator::ArriveAt(emulator::PointerTo(barrier));
}
inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
  emulator::WaitForParity(emulator::PointerTo(barrier), parity);
}
inline void ArriveAfterCopies(uint32_t barrier) {
  uint8_t* const at = emulator::PointerTo(barrier);
  emulator::Cluster& cluster = *emulator::current->block->cluster;
  if (cluster.eager) return emulator::ArriveAt(at);
  cluster.in_flight.emplace_back([copies = emulator::current->copies.All(), at] {
    for (const auto& copy : copies) copy->Do();
    emulator::ArriveAt(at);
  });
}

namespace emulator {
inline void CheckBulk(const void* a, const void* b, int bytes) {
  if ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uintptr_t>(bytes)) %
          16 !=
      0)
    Fail("a bulk copy at no multiple of 16 bytes");
}
inline void Bulk(uint8_t* to, const void* from, int bytes, uint8_t* barrier) {
  CheckBulk(to, from, bytes);
  Transfer([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); }, barrier, bytes);
}
}  // namespace emulator
inline void BulkCopy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  emulator::Bulk(emulator::PointerTo(shared), global, bytes, emulator::PointerTo(barrier));
}
template <int kBytes>
void SendToCluster(uint32_t remote, uint32_t shared, uint32_t remote_barrier) {
  emulator::Bulk(emulator::PointerTo(remote), emulator::PointerTo(shared), kBytes,
                 emulator::PointerTo(remote_barrier));
}

namespace emulator {
template <typename Map>
const TensorMap& Read(const Map& map) {
  static_assert(sizeof(Map) >= sizeof(TensorMap));
  return reinterpret_cast<const TensorMap&>(map);
}
inline int BoxBytes(const TensorMap& map) { return map.box[0] * map.box[1] * map.box[2] * map.box[3]; }
}  // namespace emulator
template <typename Map>
void WindowCopy(uint32_t shared, const Map& map, int c, int w, int h, int n, int dx, int dy,
                uint32_t barrier) {
  uint8_t* const to = emulator::PointerTo(shared);
  emulator::Transfer([=, m = emulator::Read(map)] { emulator::LoadWindows(m, {c, w, h, n}, dx, dy, to); },
                     emulator::PointerTo(barrier), emulator::BoxBytes(emulator::Read(map)));
}
template <typename Map>
void WindowCopyToBlocks(uint32_t shared, const Map& map, int c, int w, int h, int n, int dx, int dy,
                        uint32_t barrier, uint32_t blocks) {
  for (uint32_t rank = 0; blocks >> rank != 0; ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    WindowCopy(ClusterAddress(shared, rank), map, c, w, h, n, dx, dy, ClusterAddress(barrier, rank));
  }
}
template <typename Map>
void RowCopy(uint32_t shared, const Map& map, int c, int w, int h, int n, uint32_t barrier) {
  uint8_t* const to = emulator::PointerTo(shared);
  emulator::Transfer([=, m = emulator::Read(map)] { emulator::LoadBox(m, {c, w, h, n}, to); },
                     emulator::PointerTo(barrier), emulator::BoxBytes(emulator::Read(map)));
}
template <typename Map>
void CodesCopy(uint32_t shared, const Map& map, int c, int m, uint32_t barrier) {
  RowCopy(shared, map, c, m, 0, 0, barrier);
}
template <typename Map>
void StoreCodes(const Map& map, int c, int m, uint32_t shared) {
  uint8_t* const from = emulator::PointerTo(shared);
  emulator::Issue(emulator::current->stores,
                  [=, to = emulator::Read(map)] { emulator::StoreBox(to, {c, m, 0, 0}, from); });
  emulator::current->stores.Commit();
}
template <int kPending>
void WaitForStoresToRead() {
  emulator::current->stores.DoAllBut(kPending);
}
inline void WaitForStores() { emulator::current->stores.DoAllBut(0); }

}  // namespace lowbit::cuda
