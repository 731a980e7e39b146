#include "kernels/common/threshold_line.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lowbit {
namespace {

// The search compares every pair of a channel's thresholds, and 6-bit outputs are the largest that the
// converter writes thresholds for.
constexpr size_t kMaxThresholds = 63;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The accumulators of a channel.
struct Sums {
  int64_t least, most;
};

Sums SumsOf(const ConvSpec& spec, size_t channel) {
  int64_t lo = -1, hi = 1;  // bipolar
  if (spec.x.encoding != Encoding::kBipolar) {
    const int64_t codes = int64_t{1} << spec.x.bits;
    lo = (spec.x.encoding == Encoding::kSigned ? -codes / 2 : 0) - spec.x_zero_point;
    hi = lo + codes - 1;
  }
  // A tap outside the image adds 0.
  lo = std::min<int64_t>(lo, 0);
  hi = std::max<int64_t>(hi, 0);
  const ChannelValues& weights = spec.channel_values[channel];
  const int64_t positive = (weights.sum + weights.magnitude) / 2, negative = weights.sum - positive;
  const int64_t bias = spec.bias[channel];
  const auto bounded = [](int64_t sum) {
    return std::clamp<int64_t>(sum, -std::numeric_limits<int32_t>::max(),
                               std::numeric_limits<int32_t>::max());
  };
  return {bounded(bias + positive * lo + negative * hi), bounded(bias + positive * hi + negative * lo)};
}

// One channel: its thresholds in ascending order, and how codes follow from how many of them acc exceeds.
class Steps {
 public:
  Steps(const EpilogueView& e, size_t c, Sums sums)
      : start_(e.start[c]), falls_(e.flip[c] != 0), sums_(sums) {
    for (size_t k = 0; k < e.threshold_count; ++k) at_.push_back(e.thresholds[k * e.threshold_pitch + c]);
    std::sort(at_.begin(), at_.end());
  }

  int32_t LeastCode() const { return std::min(CodeAt(sums_.least), CodeAt(sums_.most)); }
  int32_t LargestCode() const { return std::max(CodeAt(sums_.least), CodeAt(sums_.most)); }

  // False where no line is found that gives the same codes after clipping to [lo, hi].
  bool Fit(int32_t lo, int32_t hi, float& gain, float& offset) const {
    // The line passes the place between k and k + 1 exceeded thresholds at spacing * k + shift, which must
    // lie in (at[k], at[k] + 1].
    std::vector<double> low, high;
    std::vector<double> rank;
    for (size_t k = 0; k < at_.size(); ++k) {
      const int32_t before = Code(static_cast<int32_t>(k)), after = Code(static_cast<int32_t>(k) + 1);
      // Clipping hides what lies outside of it.
      if (std::max(before, after) > hi || std::min(before, after) < lo) continue;
      const bool never = at_[k] >= sums_.most, always = at_[k] < sums_.least;
      rank.push_back(static_cast<double>(k));
      low.push_back(always ? -kInfinity : static_cast<double>(never ? sums_.most : at_[k]));
      high.push_back(never ? kInfinity : static_cast<double>(always ? sums_.least : at_[k] + 1));
    }
    if (rank.empty()) return Try(0.0, static_cast<double>(CodeAt(sums_.most)), lo, hi, gain, offset);
    double least = 0, most = kInfinity;  // spacing
    for (size_t i = 0; i < rank.size(); ++i) {
      for (size_t j = i + 1; j < rank.size(); ++j) {
        least = std::max(least, (low[j] - high[i]) / (rank[j] - rank[i]));
        most = std::min(most, (high[j] - low[i]) / (rank[j] - rank[i]));
      }
    }
    if (!(least < most)) return false;
    const double spacing = most < kInfinity ? (least + most) / 2 : 2 * least + 1;
    double shift_least = -kInfinity, shift_most = kInfinity;
    for (size_t i = 0; i < rank.size(); ++i) {
      shift_least = std::max(shift_least, low[i] - spacing * rank[i]);
      shift_most = std::min(shift_most, high[i] - spacing * rank[i]);
    }
    const double shift = shift_most == kInfinity     ? shift_least + 1
                         : shift_least == -kInfinity ? shift_most - 1
                                                     : (shift_least + shift_most) / 2;
    // exceeded = rint((acc - shift) / spacing + 1/2)
    const double slope = 1 / spacing, count = 0.5 - shift / spacing;
    return falls_ ? Try(-slope, Code(0) - count, lo, hi, gain, offset)
                  : Try(slope, Code(0) + count, lo, hi, gain, offset);
  }

 private:
  int32_t Code(int32_t exceeded) const { return falls_ ? ~(start_ + exceeded) : start_ + exceeded; }
  int32_t CodeAt(int64_t acc) const {
    return Code(static_cast<int32_t>(std::lower_bound(at_.begin(), at_.end(), acc) - at_.begin()));
  }

  bool Try(double slope, double at_zero, int32_t lo, int32_t hi, float& gain, float& offset) const {
    gain = static_cast<float>(slope);
    offset = static_cast<float>(at_zero);
    // The kernels convert before they clip: half of int32's range, false for NaN.
    const auto farthest = static_cast<double>(std::max(std::abs(sums_.least), std::abs(sums_.most)));
    if (!(std::fabs(slope) * farthest + std::fabs(at_zero) < 0x1p30)) return false;
    const auto equal = [&](int64_t acc) {
      if (acc < sums_.least || acc > sums_.most) return true;
      const float line = std::rint(std::fma(static_cast<float>(acc), gain, offset));
      return std::clamp(static_cast<int32_t>(line), lo, hi) == CodeAt(acc);
    };
    return equal(sums_.least) && equal(sums_.most) &&
           std::all_of(at_.begin(), at_.end(), [&](int64_t at) { return equal(at) && equal(at + 1); });
  }

  std::vector<int64_t> at_;
  int32_t start_;
  bool falls_;
  Sums sums_;
};

}  // namespace

std::optional<ThresholdLine> FitThresholdLine(const EpilogueView& e, const ConvSpec& spec) {
  if (e.threshold_count > kMaxThresholds || e.channels == 0) return {};
  std::vector<Steps> channels;
  channels.reserve(e.channels);
  for (size_t c = 0; c < e.channels; ++c) channels.emplace_back(e, c, SumsOf(spec, c));
  ThresholdLine line;
  line.lo = channels[0].LeastCode();
  line.hi = channels[0].LargestCode();
  for (const Steps& steps : channels) {
    line.lo = std::min(line.lo, steps.LeastCode());
    line.hi = std::max(line.hi, steps.LargestCode());
  }
  const int32_t flip = e.pack_flip;  // codes that no byte holds are left to the comparisons
  if (line.lo + flip < 0 || line.hi + flip > 255) return {};
  line.gain.resize(channels.size());
  line.offset.resize(channels.size());
  for (size_t c = 0; c < channels.size(); ++c) {
    if (!channels[c].Fit(line.lo, line.hi, line.gain[c], line.offset[c])) return {};
  }
  return line;
}

}  // namespace lowbit
