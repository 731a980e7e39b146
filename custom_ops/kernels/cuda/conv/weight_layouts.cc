#include "kernels/cuda/conv/weight_layouts.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {

Int8Weights ToInt8(const ConvSpec& spec) {
  const int64_t channels = spec.geometry.out_channels, k = spec.geometry.K();
  Int8Weights out;
  out.values.resize(static_cast<size_t>(channels * k));
  out.zero.assign(static_cast<size_t>(channels), 0);
  out.sum.assign(static_cast<size_t>(channels), 0);
  out.above.assign(static_cast<size_t>(channels), 0);
  for (int64_t c = 0; c < channels; ++c) {
    int32_t lowest = 0, highest = 0;
    for (int64_t i = 0; i < k; ++i) {
      lowest = std::min(lowest, spec.WeightValue(c, c * k + i));
      highest = std::max(highest, spec.WeightValue(c, c * k + i));
    }
    int32_t shift = 0;
    if (lowest < -128 || highest > 127) {
      // Codes span at most 256 values: all of them less 128, or as they are, fit.
      shift = (spec.w.encoding == Encoding::kUnsigned ? 128 : 0) - spec.w_zero_point[static_cast<size_t>(c)];
      out.zero[static_cast<size_t>(c)] = -shift;
    }
    for (int64_t i = 0; i < k; ++i) {
      const int32_t value = spec.WeightValue(c, c * k + i) - shift;
      out.values[static_cast<size_t>(c * k + i)] = static_cast<int8_t>(value);
      out.sum[static_cast<size_t>(c)] += value + shift;
      out.above[static_cast<size_t>(c)] += std::max(value + shift, 0);
    }
  }
  return out;
}

WeightBits BitsOf(const Int8Weights& weights) {
  WeightBits bits;
  if (weights.values.empty() ||
      std::any_of(weights.zero.begin(), weights.zero.end(), [](int32_t zero) { return zero != 0; })) {
    return bits;
  }
  const auto [least, most] = std::minmax_element(weights.values.begin(), weights.values.end());
  bits.lowest = static_cast<int32_t>(*least);
  uint32_t apart = 0;
  for (const int8_t w : weights.values) apart |= static_cast<uint32_t>(w - bits.lowest);
  bits.shift = apart == 0 ? 0 : std::countr_zero(apart);
  const int planes =
      std::max(1, static_cast<int>(std::bit_width(static_cast<uint32_t>(*most - *least) >> bits.shift)));
  bits.fit = planes <= kMostWeightPlanes ? planes : 0;
  return bits;
}

void PackRows(const ConvGeometry& g, const Int8Weights& w, int64_t channels, uint8_t* out) {
  for (int64_t row = 0; row < g.out_channels * g.Taps(); ++row) {
    std::memcpy(out + row * channels, w.values.data() + row * g.GroupIn(), static_cast<size_t>(g.GroupIn()));
  }
}

// Channels that are only filled up have the weight 0, as w' has it: what stands for what lies outside of an
// image has codes in them, too, and is added up where zero points stay outside.
void PackTiles(const ConvGeometry& g, const Int8Weights& w, int64_t channels, int64_t n_padded,
               uint8_t* out) {
  const int64_t k_tiles = RoundUp(g.Taps() * channels, kTileK) / kTileK;
  for (int64_t c = 0; c < g.out_channels; ++c) {
    const int64_t group = c / g.GroupOut(), r = InterleavedRow(static_cast<int>(c % g.GroupOut()));
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      for (int64_t i = 0; i < channels; ++i) {
        const int64_t k = tap * channels + i, chunk = k % kTileK / 16;
        const int64_t row = (group * k_tiles + k / kTileK) * n_padded + r;
        const int32_t value = i < g.GroupIn()
                                  ? w.values[static_cast<size_t>((c * g.Taps() + tap) * g.GroupIn() + i)]
                                  : w.zero[static_cast<size_t>(c)];
        out[row * kTileK + ((chunk ^ (r % 8)) * 16) + k % 16] = static_cast<uint8_t>(value);
      }
    }
  }
}

}  // namespace lowbit::cuda
