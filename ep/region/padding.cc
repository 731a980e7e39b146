#include "ep/region/padding.h"

#include <cstddef>
#include <utility>
#include <variant>
#include <vector>

namespace lowbit::ep {
namespace {

template <typename T>
void Repeat(std::vector<T>& values, size_t block, int64_t times) {
  if (values.empty()) return;
  const std::vector<T> first(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(block));
  for (int64_t i = 0; i < times; ++i) values.insert(values.end(), first.begin(), first.end());
}

// The code of a weight of 0.
uint8_t ZeroWeight(const ConvSpec& conv, size_t out_channel) {
  return static_cast<uint8_t>(conv.w_zero_point[out_channel]);
}

void PadInputs(ConvSpec& conv, int64_t padding) {
  const auto channels = static_cast<size_t>(conv.geometry.in_channels), more = static_cast<size_t>(padding);
  conv.geometry.in_channels += padding;
  if (conv.weights.empty()) return;
  const size_t pixels = conv.weights.size() / channels, taps = static_cast<size_t>(conv.geometry.Taps());
  std::vector<uint8_t> padded;
  padded.reserve(pixels * (channels + more));
  for (size_t i = 0; i < pixels; ++i) {
    const auto from = conv.weights.begin() + static_cast<std::ptrdiff_t>(i * channels);
    padded.insert(padded.end(), from, from + static_cast<std::ptrdiff_t>(channels));
    padded.insert(padded.end(), more, ZeroWeight(conv, i / taps));
  }
  conv.weights = std::move(padded);
}

// Filters of zeros; what becomes of their sums is that of the first.
void PadOutputs(ConvSpec& conv, int64_t padding) {
  ConvGeometry& g = conv.geometry;
  const auto more = static_cast<size_t>(padding);
  if (!conv.weights.empty())
    conv.weights.insert(conv.weights.end(), static_cast<size_t>(padding * g.K()), uint8_t{0});
  g.out_channels += padding;
  conv.w_zero_point.insert(conv.w_zero_point.end(), more, 0);
  conv.bias.insert(conv.bias.end(), more, 0);
  Epilogue& e = conv.epilogue;
  for (std::vector<float>* const each :
       {&e.multiplier, &e.acc_scale, &e.tail_bias, &e.tail_scale, &e.tail_shift})
    Repeat(*each, 1, padding);
  Repeat(e.base, 1, padding);
  Repeat(e.dir, 1, padding);
  Repeat(e.thresholds, static_cast<size_t>(e.threshold_count), padding);
}

}  // namespace

void PadChannels(NodeSpec& spec, int64_t x_padding, int64_t y_padding) {
  if (auto* const lookup = std::get_if<LookupNode>(&spec); lookup != nullptr && lookup->channels > 1) {
    lookup->channels += y_padding;
    Repeat(lookup->table, 256, y_padding);
  }
  auto* const matmul = std::get_if<MatmulNode>(&spec);
  if (matmul == nullptr || x_padding + y_padding == 0) return;
  ConvSpec& conv = matmul->conv;
  if (conv.geometry.IsDepthwise()) {
    PadOutputs(conv, y_padding);
    conv.geometry.in_channels += x_padding;
    conv.geometry.group += x_padding;
  } else {
    PadInputs(conv, x_padding);
    PadOutputs(conv, y_padding);
  }
  if (!conv.weights.empty()) ReadWeightValues(conv);
}

}  // namespace lowbit::ep
