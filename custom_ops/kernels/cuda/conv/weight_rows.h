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

// Which bit of a word a channel of 32 is where codes are taken apart into planes: four channels are a word of
// bytes, and what byte j of word w has becomes bit 2 (w % 4) + w / 4 of the plane's byte j.
LOWBIT_HOST_AND_DEVICE int BitOfChannel(int channel) {
  const int word = channel / 4;
  return channel % 4 * 8 + word % 4 * 2 + word / 4;
}

}  // namespace lowbit::cuda

#undef LOWBIT_HOST_AND_DEVICE
