// Codes that are stored in other tensors than a node's own.
#pragma once

#include <cstdint>

#include "kernels/cuda/conv/conv_params.h"

namespace lowbit::cuda {

// Stores neighbouring codes of a pixel (16, 4 or 1, as Unit is long) in the places that `params` has.
template <typename Params, typename Unit>
__device__ __forceinline__ void StoreInPlaces(const Params& params, int64_t pixel, int channel,
                                              const Unit& codes) {
#pragma unroll 1
  for (int i = 0; i < params.place_count; ++i) {
    const PlaceParams& place = params.places[i];
    if (channel < place.first || channel >= place.last) continue;
    Unit stored = codes;
    if (place.table != nullptr) {
      uint8_t* const bytes = reinterpret_cast<uint8_t*>(&stored);
#pragma unroll
      for (int b = 0; b < static_cast<int>(sizeof(Unit)); ++b) bytes[b] = place.table[bytes[b]];
    }
    *reinterpret_cast<Unit*>(place.y + pixel * place.pixel_bytes + (channel - place.first)) = stored;
  }
}

}  // namespace lowbit::cuda
