// Where channels stand among the rows of B, as weights are packed and as kernels read them.
#pragma once

#ifdef __CUDACC__
#define LOWBIT_HOST_AND_DEVICE __host__ __device__ __forceinline__
#else
#define LOWBIT_HOST_AND_DEVICE inline
#endif

namespace lowbit::cuda {

// In a fragment of mma or wgmma a thread has columns 2 t + {0, 1} of each eight. Within 16, channels
// 4 q + {0, 1} are rows 2 q + {0, 1} and channels 4 q + {2, 3} rows 8 + 2 q + {0, 1}: a thread then has four
// neighbouring channels (FinishTile).
LOWBIT_HOST_AND_DEVICE int InterleavedRow(int n) {
  return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2;
}

// In a tile of kTileN channels thread t has columns 8 j + 2 t + {0, 1}; they are the channels
// kTileN / 4 * t + 2 j + {0, 1}: all that a thread has are neighbours.
template <int kTileN>
LOWBIT_HOST_AND_DEVICE int RowOfNeighbours(int channel) {
  constexpr int kOwn = kTileN / 4;
  return channel % kOwn / 2 * 8 + channel / kOwn * 2 + channel % 2;
}

// Which bit of a word of a plane a channel of 128 is (core/bit_planes.h). Channels 4 t + {0 .. 3} of each 16, which
// thread t of four has as bytes of a word, are 32 bits in a row; those of 64 channels half of them
// (HalvesOfPlanes).
LOWBIT_HOST_AND_DEVICE int BitOfChannel(int channel) {
  const int thread = channel % 16 / 4, byte = channel % 4;
  return thread * 32 + channel / 64 * 16 + byte % 2 * 8 + channel % 64 / 16 * 2 + byte / 2;
}

}  // namespace lowbit::cuda

#undef LOWBIT_HOST_AND_DEVICE
