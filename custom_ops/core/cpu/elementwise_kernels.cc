#include "core/cpu/elementwise_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/status.h"

namespace lowbit {
namespace {

constexpr int64_t kMinPeriod = 256;  // elements: four 64-byte vectors
constexpr int64_t kPadding = ThresholdSpec::kPadding;

template <typename T>
void RepeatAndPad(std::vector<T>& values, int64_t period) {
  const size_t count = values.size();
  values.resize(static_cast<size_t>(period + kPadding));
  for (size_t i = count; i < values.size(); ++i) values[i] = values[i - count];
}

template <typename T>
bool AllEqual(const std::vector<T>& values) {
  return std::all_of(values.begin(), values.end(), [&](T v) { return v == values.front(); });
}

int64_t Period(int64_t channels) {
  Require(channels >= 1, "an element-wise node has ", channels, " channels, expected 1 or more");
  return channels * ((kMinPeriod + channels - 1) / channels);
}

constexpr size_t kCodes = 256;
constexpr int64_t kMaxLineChannels = 8192;  // FitLine holds 256 bytes per channel three times

// [256, channels]: what the kernel makes of every input byte in every channel.
std::vector<uint8_t> AllCodes(const AffineSpec& spec, const ElementwiseKernels& kernels) {
  const auto channels = static_cast<size_t>(spec.channels);
  std::vector<uint8_t> x(kCodes * channels), y(x.size());
  for (size_t code = 0; code < kCodes; ++code)
    std::memset(&x[code * channels], static_cast<int>(code), channels);
  kernels.affine(spec, x.data(), y.data(), 1, static_cast<int64_t>(x.size()), 0);
  return y;
}

}  // namespace

void PrepareAffine(AffineSpec& spec) {
  spec.grid_per_channel = !(AllEqual(spec.x_zero_point) && AllEqual(spec.x_scale) && AllEqual(spec.y_scale) &&
                            AllEqual(spec.y_zero_point));
  spec.y_inverse.resize(spec.y_scale.size());
  std::transform(spec.y_scale.begin(), spec.y_scale.end(), spec.y_inverse.begin(),
                 [](float s) { return 1.0f / s; });
  spec.fast_is_exact = FastIsExact(spec);

  spec.period = Period(spec.channels);
  RepeatAndPad(spec.x_zero_point, spec.period);
  RepeatAndPad(spec.x_scale, spec.period);
  RepeatAndPad(spec.y_scale, spec.period);
  RepeatAndPad(spec.y_inverse, spec.period);
  RepeatAndPad(spec.y_zero_point, spec.period);
  if (spec.has_affine) {
    RepeatAndPad(spec.scale, spec.period);
    RepeatAndPad(spec.shift, spec.period);
  }
}

void PrepareThresholds(ThresholdSpec& spec) {
  const auto channels = static_cast<size_t>(spec.channels), count = static_cast<size_t>(spec.count);
  spec.period = Period(spec.channels);
  RepeatAndPad(spec.base, spec.period);
  RepeatAndPad(spec.dir, spec.period);
  if (spec.count <= ThresholdSpec::kMaxLinear) {
    for (size_t k = 0; k < count; ++k) {
      std::vector<float> row(channels);
      for (size_t c = 0; c < channels; ++c) row[c] = spec.thresholds[c * count + k];
      RepeatAndPad(row, spec.period);
      spec.by_rank.insert(spec.by_rank.end(), row.begin(), row.end());
    }
    return;
  }
  while ((int64_t{1} << spec.steps) <= spec.count) ++spec.steps;
  const size_t size = size_t{1} << spec.steps;
  spec.search.assign(channels * size, std::numeric_limits<float>::quiet_NaN());
  for (size_t c = 0; c < channels; ++c) {
    std::copy_n(spec.thresholds.begin() + static_cast<std::ptrdiff_t>(c * count), count,
                spec.search.begin() + static_cast<std::ptrdiff_t>(c * size));
    spec.place.push_back(static_cast<int32_t>(c * size));
  }
  RepeatAndPad(spec.place, spec.period);
}

void FitLine(AffineSpec& spec, const ElementwiseKernels& kernels) {
  if (!spec.quantizer.quantized || !spec.fast_is_exact || !AllEqual(spec.y_zero_point)) return;
  if (spec.channels > kMaxLineChannels) return;
  const auto count = static_cast<size_t>(spec.channels);
  const std::vector<uint8_t> expected = AllCodes(spec, kernels);

  // The line without any rounding.
  std::vector<double> gain(count), offset(count);
  for (size_t c = 0; c < count; ++c) {
    const double slope = static_cast<double>(spec.x_scale[c]) * (spec.has_affine ? spec.scale[c] : 1.0f);
    const double shift = spec.has_affine ? spec.shift[c] : 0.0f;
    gain[c] = slope / spec.y_scale[c];
    offset[c] = (shift - slope * spec.x_zero_point[c]) / spec.y_scale[c];
  }

  std::vector<float> found_gain(count), found_offset(count);
  std::vector<size_t> open(count);  // channels without a line yet
  std::iota(open.begin(), open.end(), size_t{0});
  // Where the float chain and the line fall on different sides of a rounding boundary, moving the line by a
  // few units in the last place puts it on the right side; more than one boundary is seldom that close.
  for (const int nudge : {0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32}) {
    AffineSpec line;
    line.x_signed = spec.x_signed;
    line.quantizer = spec.quantizer;
    line.y_zero_point = {spec.y_zero_point[0]};
    line.channels = static_cast<int64_t>(open.size());
    line.has_line = true;
    for (const size_t c : open) {
      const double unit = 0x1p-25 * std::max(256.0 * std::fabs(gain[c]), std::fabs(offset[c]));
      line.line_gain.push_back(static_cast<float>(gain[c]));
      line.line_offset.push_back(static_cast<float>(offset[c] + nudge * unit));
    }
    std::vector<float> gains = line.line_gain, offsets = line.line_offset;
    line.period = Period(line.channels);
    RepeatAndPad(line.line_gain, line.period);
    RepeatAndPad(line.line_offset, line.period);
    const std::vector<uint8_t> got = AllCodes(line, kernels);

    std::vector<uint8_t> differs(open.size());
    for (size_t code = 0; code < kCodes; ++code) {
      const uint8_t *row = &got[code * open.size()], *wanted = &expected[code * count];
      if (open.size() == count) {  // the first round, and nearly all of the work
        for (size_t i = 0; i < count; ++i) differs[i] |= static_cast<uint8_t>(row[i] ^ wanted[i]);
      } else {
        for (size_t i = 0; i < open.size(); ++i) differs[i] |= static_cast<uint8_t>(row[i] ^ wanted[open[i]]);
      }
    }
    std::vector<size_t> still_open;
    for (size_t i = 0; i < open.size(); ++i) {
      if (differs[i] != 0) {
        still_open.push_back(open[i]);
        continue;
      }
      found_gain[open[i]] = gains[i];
      found_offset[open[i]] = offsets[i];
    }
    open = std::move(still_open);
    if (open.empty()) break;
  }
  if (!open.empty()) return;
  spec.line_gain = std::move(found_gain);
  spec.line_offset = std::move(found_offset);
  RepeatAndPad(spec.line_gain, spec.period);
  RepeatAndPad(spec.line_offset, spec.period);
  spec.has_line = true;
}

}  // namespace lowbit
