#include "kernels/cuda/conv/channel_lines.h"

#include <algorithm>

#include "core/epilogue.h"

namespace lowbit::cuda {
namespace {

constexpr int kMostTrials = 40;  // gains that are tried for a channel

// The least of first to last, which reaches, that does, looked for around `guess`.
template <typename Reaches>
int64_t FirstSum(const Reaches& reaches, int64_t first, int64_t last, int64_t guess) {
  guess = std::clamp(guess, first, last);
  const bool down = reaches(guess);
  (down ? last : first) = guess + (down ? 0 : 1);
  for (int64_t step = 1; first < last; step *= 2) {
    const int64_t sum = down ? std::max(first, last - step) : std::min(last, first + step - 1);
    const bool is_reached = reaches(sum);
    (is_reached ? last : first) = sum + (is_reached ? 0 : 1);
    if (is_reached != down) break;
  }
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    const bool is_reached = reaches(middle);
    (is_reached ? last : first) = middle + (is_reached ? 0 : 1);
  }
  return last;
}

}  // namespace

bool HasLines(const Epilogue& e) {
  if (!e.quantized_output) return false;
  if (e.kind == EpilogueKind::kRequantize) return true;
  const auto is_small = [](float bias) { return std::fabs(bias) < 0x1p60f; };
  return e.kind == EpilogueKind::kTail && e.has_residual == e.adds_behind_tail &&
         (e.tail.empty() || (e.tail.size() == 1 && e.tail.front() == TailStep::kBias)) &&
         std::all_of(e.acc_scale.begin(), e.acc_scale.end(), IsNormal) &&
         std::all_of(e.tail_bias.begin(), e.tail_bias.end(), is_small) &&
         IsNormal(e.adds_behind_tail ? e.inner_scale : e.y_scale);
}

float TailQuotient(const Epilogue& e, float sum, size_t channel) {
  const float scaled = sum * e.acc_scale[channel];
  return (e.tail.empty() ? scaled : scaled + e.tail_bias[channel]) /
         (e.adds_behind_tail ? e.inner_scale : e.y_scale);
}

int32_t FirstCode(const Epilogue& e, int64_t sum, size_t channel) {
  const auto acc = static_cast<float>(static_cast<int32_t>(sum));
  const auto round = [](float v, int32_t zero_point, int32_t lo, int32_t hi) {
    return ClipToCode(std::rint(v) + static_cast<float>(zero_point), lo, hi);
  };
  if (e.kind == EpilogueKind::kRequantize)
    return round(acc * e.multiplier[channel], e.zero_point, e.lo, e.hi);
  const float v = TailQuotient(e, acc, channel);
  return e.adds_behind_tail ? round(v, e.zero_point, e.lo, e.hi) : round(v, e.y_zero_point, e.y_lo, e.y_hi);
}

LineFitter::LineFitter(const Epilogue& e)
    : e_(e),
      lo_(e.adds_behind_tail ? e.lo - e.zero_point : 0),
      hi_(e.adds_behind_tail ? e.hi - e.zero_point : e.y_hi - e.y_lo) {
  for (int32_t code = lo_; code <= hi_; ++code) {
    const float tie = static_cast<float>(code) - 0.5f,
                least = code % 2 == 0 ? tie : std::nextafter(tie, HUGE_VALF);
    reaches_.push_back(least);
    between_.push_back((static_cast<double>(least) + std::nextafter(least, -HUGE_VALF)) / 2);
  }
}

// The first sums of steps and the sums before, and at either end what the first and the last one tell.
template <typename Step>
void LineFitter::FindSteps(const Step& step_of, const SumRange& sums) {
  const auto bound = [](int64_t sum, int32_t step) {
    return Bound{static_cast<float>(static_cast<int32_t>(sum)), static_cast<size_t>(step)};
  };
  from_.clear();
  below_.clear();
  const int32_t lowest = step_of(sums.least), highest = step_of(sums.most);
  if (lowest > 0) from_.push_back(bound(sums.least, lowest));
  if (highest < hi_ - lo_) below_.push_back(bound(sums.most, highest + 1));
  if (highest == lowest) return;
  const auto first_of = [&](int32_t step, int64_t from, int64_t guess) {
    return FirstSum([&](int64_t sum) { return step_of(sum) >= step; }, from, sums.most, guess);
  };
  const int64_t first = first_of(lowest + 1, sums.least, 0), last = first_of(highest, first, first);
  int64_t sum = first;
  for (int32_t step = lowest + 1; step <= highest; ++step) {
    const int64_t guess = first + (last - first) * (step - lowest - 1) / std::max(1, highest - lowest - 1);
    sum = first_of(step, sum, guess);
    from_.push_back(bound(sum, step));
    below_.push_back(bound(sum - 1, step));
  }
}

// A line of the gain has a step at a sum where sum * gain + offset is more than between_, or a tie of both.
LineFitter::Offsets LineFitter::OffsetsOf(double gain) const {
  Offsets offsets;
  double from = 0, below = 0;
  for (const Bound& bound : from_) {
    const double least = between_[bound.step] - static_cast<double>(bound.sum) * gain;
    if (least > offsets.least) {
      offsets.least = least;
      from = static_cast<double>(bound.sum);
    }
  }
  for (const Bound& bound : below_) {
    const double most = between_[bound.step] - static_cast<double>(bound.sum) * gain;
    if (most < offsets.most) {
      offsets.most = most;
      below = static_cast<double>(bound.sum);
    }
  }
  offsets.widen = from > below;
  return offsets;
}

std::optional<ChannelLine> LineFitter::WithOffset(float gain, const Offsets& offsets) const {
  if (!(offsets.least <= offsets.most)) return std::nullopt;
  const double middle = std::isinf(offsets.least)  ? offsets.most - 1
                        : std::isinf(offsets.most) ? offsets.least + 1
                                                   : (offsets.least + offsets.most) / 2;
  const auto nearest = static_cast<float>(middle);
  for (const float offset :
       {nearest, std::nextafter(nearest, -HUGE_VALF), std::nextafter(nearest, HUGE_VALF)}) {
    if (Holds({gain, offset})) return ChannelLine{gain, offset};
  }
  return std::nullopt;
}

bool LineFitter::Holds(const ChannelLine& line) const {
  const auto reaches = [&](const Bound& bound) {
    return std::fma(bound.sum, line.gain, line.offset) >= reaches_[bound.step];
  };
  return std::all_of(from_.begin(), from_.end(), reaches) &&
         std::none_of(below_.begin(), below_.end(), reaches);
}

// What lies between the least and the most offset of a gain grows with the gain up to some gain, then shrinks: steps in
// its direction, each twice as long as the one before until that turns, then half as long.
std::optional<ChannelLine> LineFitter::Fit(size_t channel, const SumRange& sums) {
  const int32_t lowest = e_.adds_behind_tail ? e_.lo : e_.y_lo;
  FindSteps([&](int64_t sum) { return FirstCode(e_, sum, channel) - lowest; }, sums);
  auto trial = static_cast<float>(static_cast<double>(e_.acc_scale[channel]) /
                                  static_cast<double>(e_.adds_behind_tail ? e_.inner_scale : e_.y_scale));
  const double unit = static_cast<double>(std::nextafter(trial, HUGE_VALF)) - static_cast<double>(trial);
  double step = 1, tried = static_cast<double>(trial);
  bool turned = false, was_wider = false;
  for (int i = 0; i < kMostTrials && step >= 1; ++i) {
    const Offsets offsets = OffsetsOf(static_cast<double>(trial));
    if (const auto line = WithOffset(trial, offsets)) return line;
    turned = turned || (i > 0 && offsets.widen != was_wider);
    if (i > 0) step *= turned ? 0.5 : 2;
    was_wider = offsets.widen;
    tried += offsets.widen ? step * unit : -step * unit;
    trial = static_cast<float>(tried);
  }
  return std::nullopt;
}

}  // namespace lowbit::cuda
