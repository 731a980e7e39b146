#include "kernels/cuda/conv/channel_lines.h"

#include <algorithm>
#include <bit>

#include "core/epilogue.h"

namespace lowbit::cuda {
namespace {

constexpr size_t kMostFactors = 256;  // that are tried for four channels
constexpr int kMostGains = 64;        // of a channel and a factor
constexpr int kMostShifts = 4096;     // of a gain
constexpr int kMostHeld = 4;          // offsets that should do, but for roundings
constexpr int kSlopeBits = 12;        // of a channel's largest sum times the slope of a single step

// 1.5 * 2^23, whose bits sums begin with.
constexpr int32_t kStartBits = 0x4B400000;
constexpr double kStart = 12582912;
constexpr int64_t kMostSum = int64_t{1} << 28;  // kStartBits and such sums are bits of normal numbers

// What a sum has of a staircase: its step, and whether that is one at least.
template <typename Of, typename HasReached>
struct Steps {
  const Of& of;
  const HasReached& has_reached;
  int32_t operator()(int64_t sum) const { return of(sum); }
  bool Reaches(int64_t sum, int32_t step) const { return has_reached(sum, step); }
};

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

// What a tail makes of a sum before it divides, and what it divides by.
float TailDividend(const Epilogue& e, float sum, size_t channel) {
  const float scaled = sum * e.acc_scale[channel];
  return e.tail.empty() ? scaled : scaled + e.tail_bias[channel];
}
float TailDivisor(const Epilogue& e) { return e.adds_behind_tail ? e.inner_scale : e.y_scale; }

bool AreBytes(const CodeRange& codes) { return codes.lo >= -128 && codes.hi <= (codes.lo < 0 ? 127 : 255); }

}  // namespace

bool HasLines(const Epilogue& e) {
  if (!e.quantized_output) return false;
  if (e.kind == EpilogueKind::kRequantize) return true;
  if (e.kind == EpilogueKind::kThresholds) {
    return e.threshold_count > 0 && e.threshold_count < 256 &&
           std::all_of(
               e.base.begin(), e.base.end(), [&](int32_t base) { return base == e.base.front(); }) &&
           (e.has_residual || AreBytes(FirstCodesOf(e)));
  }
  const auto is_small = [](float bias) { return std::fabs(bias) < 0x1p60f; };
  return e.kind == EpilogueKind::kTail && e.has_residual == e.adds_behind_tail &&
         (e.tail.empty() || (e.tail.size() == 1 && e.tail.front() == TailStep::kBias)) &&
         std::all_of(e.acc_scale.begin(), e.acc_scale.end(), IsNormal) &&
         std::all_of(e.tail_bias.begin(), e.tail_bias.end(), is_small) &&
         IsNormal(e.adds_behind_tail ? e.inner_scale : e.y_scale);
}

float TailQuotient(const Epilogue& e, float sum, size_t channel) {
  return TailDividend(e, sum, channel) / TailDivisor(e);
}

CodeRange FirstCodesOf(const Epilogue& e) {
  if (e.kind == EpilogueKind::kThresholds) {
    const int32_t lowest = e.base.front();
    return {lowest, lowest + static_cast<int32_t>(e.threshold_count), e.has_residual ? e.zero_point : lowest};
  }
  if (e.kind == EpilogueKind::kTail && !e.adds_behind_tail) return {e.y_lo, e.y_hi, e.y_zero_point};
  return {e.lo, e.hi, e.zero_point};
}

int32_t FirstCode(const Epilogue& e, int64_t sum, size_t channel) {
  if (e.kind == EpilogueKind::kThresholds) return ThresholdCode(e, static_cast<int32_t>(sum), channel);
  const auto acc = static_cast<float>(static_cast<int32_t>(sum));
  const float v =
      e.kind == EpilogueKind::kRequantize ? acc * e.multiplier[channel] : TailQuotient(e, acc, channel);
  const CodeRange codes = FirstCodesOf(e);
  return ClipToCode(std::rint(v) + static_cast<float>(codes.zero_point), codes.lo, codes.hi);
}

int32_t LineBaseOf(const Epilogue& e) {
  const CodeRange codes = FirstCodesOf(e);
  if (e.has_residual) return codes.lo - codes.zero_point;
  return codes.lo < 0 ? codes.lo + 128 : codes.lo;
}

LineFitter::LineFitter(const Epilogue& e, bool fuses)
    : e_(e),
      rounds_to_codes_(e.has_residual && fuses),
      codes_(FirstCodesOf(e)),
      base_(LineBaseOf(e)),
      top_(codes_.hi - codes_.lo) {
  if (e.kind != EpilogueKind::kTail) return;
  dividends_.push_back(-HUGE_VALF);
  for (int32_t step = 1; step <= top_; ++step) {
    const int32_t code = codes_.lo + step - codes_.zero_point;
    const float divisor = TailDivisor(e), tie = static_cast<float>(code) - 0.5f;
    const auto reaches = [&](float dividend) {  // ties go to even codes
      const float quotient = dividend / divisor;
      return code % 2 == 0 ? quotient >= tie : quotient > tie;
    };
    float least = tie * divisor;
    while (reaches(least)) least = std::nextafter(least, -HUGE_VALF);
    while (!reaches(least)) least = std::nextafter(least, HUGE_VALF);
    dividends_.push_back(least);
  }
}

// Ties go to even codes.
bool LineFitter::Reaches(float line, float factor, int32_t step) const {
  const bool is_even = (base_ + step) % 2 == 0;
  const double tie = step - 0.5;
  if (e_.has_residual || base_ == 0) {  // the exact product, or it rounded
    const float rounded = line * factor;
    const double product = rounds_to_codes_ ? static_cast<double>(line) * static_cast<double>(factor)
                                            : static_cast<double>(rounded);
    return is_even ? product >= tie : product > tie;
  }
  const double sum = std::fma(line, factor, static_cast<float>(base_));
  return is_even ? sum >= base_ + tie : sum > base_ + tie;
}

// The first factor is the highest step. The others lie around it, as far from each other as they can for any number of
// them.
const LineFitter::Factor& LineFitter::FactorOf(size_t index) {
  constexpr double kGoldenRatio = 0.6180339887498949, kMost = 0.498;
  while (factors_.size() <= index) {
    const double turns = static_cast<double>(factors_.size()) * kGoldenRatio + 0.5;
    Factor factor;
    factor.value = static_cast<float>(top_ + (2 * (turns - std::floor(turns)) - 1) * kMost);
    factor.reaches.push_back(0);  // which every line has
    factor.between.push_back(0);
    for (int32_t step = 1; step <= top_; ++step) {
      auto least = static_cast<float>((step - 0.5) / static_cast<double>(factor.value));
      while (Reaches(least, factor.value, step)) least = std::nextafter(least, -HUGE_VALF);
      while (!Reaches(least, factor.value, step)) least = std::nextafter(least, HUGE_VALF);
      factor.reaches.push_back(least);
      factor.between.push_back((static_cast<double>(least) + std::nextafter(least, -HUGE_VALF)) / 2);
    }
    factors_.push_back(std::move(factor));
  }
  return factors_[index];
}

// The first sums of steps and the sums before, and at either end what the first and the last one tell.
template <typename Step>
void LineFitter::FindSteps(const Step& step_of, const SumRange& sums, Staircase& to) const {
  const auto bound = [](int64_t sum, int32_t step) {
    return Bound{static_cast<int32_t>(sum), static_cast<size_t>(step)};
  };
  to.from.clear();
  to.below.clear();
  const int32_t lowest = step_of(sums.least), highest = step_of(sums.most);
  if (lowest > 0) to.from.push_back(bound(sums.least, lowest));
  if (highest < top_) to.below.push_back(bound(sums.most, highest + 1));
  if (highest == lowest) return;
  const auto first_of = [&](int32_t step, int64_t from, int64_t guess) {
    return FirstSum([&](int64_t sum) { return step_of.Reaches(sum, step); }, from, sums.most, guess);
  };
  const int64_t first = first_of(lowest + 1, sums.least, 0), last = first_of(highest, first, first);
  int64_t sum = first;
  for (int32_t step = lowest + 1; step <= highest; ++step) {
    const int64_t guess = first + (last - first) * (step - lowest - 1) / std::max(1, highest - lowest - 1);
    sum = first_of(step, sum, guess);
    to.from.push_back(bound(sum, step));
    to.below.push_back(bound(sum - 1, step));
  }
}

// Where codes fall with the sum they rise with its negative.
void LineFitter::FindStaircase(size_t channel, const SumRange& sums, Staircase& to) const {
  const bool has_thresholds = e_.kind == EpilogueKind::kThresholds;
  const int32_t sign = has_thresholds && e_.dir[channel] < 0 ? -1 : 1;
  const auto step_of = [&](int64_t sum) { return FirstCode(e_, sign * sum, channel) - codes_.lo; };
  if (e_.kind == EpilogueKind::kTail) {  // most of the time, hence without a division
    const auto reaches = [&](int64_t sum, int32_t step) {
      return TailDividend(e_, static_cast<float>(static_cast<int32_t>(sum)), channel) >=
             dividends_[static_cast<size_t>(step)];
    };
    FindSteps(Steps{step_of, reaches}, sums, to);
  } else {
    const auto reaches = [&](int64_t sum, int32_t step) { return step_of(sum) >= step; };
    FindSteps(Steps{step_of, reaches}, sign < 0 ? SumRange{-sums.most, -sums.least} : sums, to);
  }
  if (e_.kind == EpilogueKind::kRequantize) {
    to.slope = static_cast<double>(e_.multiplier[channel]);
    return;
  }
  if (!has_thresholds) {
    to.slope = static_cast<double>(e_.acc_scale[channel]) / static_cast<double>(TailDivisor(e_));
    return;
  }
  to.slope = sign;
  if (to.from.size() > 1) {  // from the first threshold to the last one
    const Bound &first = to.from.front(), &last = to.from.back();
    to.slope *= (static_cast<double>(last.step) - static_cast<double>(first.step)) /
                std::max(1.0, static_cast<double>(last.sum) - static_cast<double>(first.sum));
  } else if (to.from.size() == 1 && to.below.size() == 1 && to.from[0].step < to.below[0].step) {
    // All sums have one code, neither the lowest nor the highest: a line that stays within it.
    const auto range = static_cast<uint64_t>(sums.most - sums.least);
    to.slope = std::ldexp(to.slope, -static_cast<int>(std::bit_width(range)) - 2);
  } else {  // any slope will do: one of few digits
    const auto most = static_cast<uint64_t>(std::max(std::abs(sums.least), std::abs(sums.most)));
    to.slope = std::ldexp(to.slope, -std::max(0, static_cast<int>(std::bit_width(most)) - kSlopeBits));
  }
  for (auto* const bounds : {&to.from, &to.below}) {
    for (Bound& bound : *bounds) bound.sum *= sign;
  }
}

// A line of the gain has a step at a sum where sum * gain + offset is more than `between`, or a tie of both.
LineFitter::Offsets LineFitter::OffsetsOf(const Staircase& stairs, const Factor& factor, double gain) {
  Offsets offsets;
  int32_t from = 0, below = 0;
  for (const Bound& bound : stairs.from) {
    const double least = factor.between[bound.step] - bound.sum * gain;
    if (least > offsets.least) {
      offsets.least = least;
      from = bound.sum;
    }
  }
  for (const Bound& bound : stairs.below) {
    const double most = factor.between[bound.step] - bound.sum * gain;
    if (most < offsets.most) {
      offsets.most = most;
      below = bound.sum;
    }
  }
  offsets.widen = from > below;
  return offsets;
}

std::optional<ChannelLine> LineFitter::WithOffset(const Staircase& stairs, const Factor& factor, float gain,
                                                  const Offsets& offsets) {
  if (!(offsets.least <= offsets.most)) return std::nullopt;
  const double middle = std::isinf(offsets.least)  ? offsets.most - 1
                        : std::isinf(offsets.most) ? offsets.least + 1
                                                   : (offsets.least + offsets.most) / 2;
  for (int32_t i = 0, held = 0; i < kMostShifts && held < kMostHeld; ++i) {
    const int32_t shift = i % 2 == 0 ? -i / 2 : (i + 1) / 2;
    const double start = (kStart + shift) * static_cast<double>(gain);  // exact
    const ChannelLine line{gain, static_cast<float>(middle - start), shift};
    const double at_zero = start + static_cast<double>(line.offset);
    if (!(offsets.least <= at_zero && at_zero <= offsets.most)) continue;
    if (Holds(stairs, factor, line)) return line;
    ++held;
  }
  return std::nullopt;
}

bool LineFitter::Holds(const Staircase& stairs, const Factor& factor, const ChannelLine& line) {
  const auto reaches = [&](const Bound& bound) {
    const auto f = std::bit_cast<float>(kStartBits + bound.sum + line.shift);
    return std::fma(f, line.gain, line.offset) >= factor.reaches[bound.step];
  };
  return std::all_of(stairs.from.begin(), stairs.from.end(), reaches) &&
         std::none_of(stairs.below.begin(), stairs.below.end(), reaches);
}

// What lies between the least and the most offset of a gain grows with the gain up to some gain, then
// shrinks: steps in its direction, each twice as long as the one before until that turns, then half as long.
std::optional<ChannelLine> LineFitter::FitOne(const Staircase& stairs, const Factor& factor) const {
  auto trial = static_cast<float>(stairs.slope / static_cast<double>(factor.value));
  const double unit = static_cast<double>(std::nextafter(trial, HUGE_VALF)) - static_cast<double>(trial);
  double step = 1, tried = static_cast<double>(trial);
  bool turned = false, was_wider = false;
  for (int i = 0; i < kMostGains && step >= 1; ++i) {
    // One of another direction may have the first code and the last, and others between them.
    if (!(static_cast<double>(trial) * stairs.slope > 0)) return std::nullopt;
    const Offsets offsets = OffsetsOf(stairs, factor, static_cast<double>(trial));
    if (const auto line = WithOffset(stairs, factor, trial, offsets)) return line;
    turned = turned || (i > 0 && offsets.widen != was_wider);
    if (i > 0) step *= turned ? 0.5 : 2;
    was_wider = offsets.widen;
    tried += offsets.widen ? step * unit : -step * unit;
    trial = static_cast<float>(tried);
  }
  return std::nullopt;
}

std::optional<FourLines> LineFitter::Fit(size_t first, std::span<const SumRange> sums) {
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i].least < -kMostSum || sums[i].most > kMostSum) return std::nullopt;
    FindStaircase(first + i, sums[i], stairs_[i]);
  }
  size_t hardest = 0;  // the one that had no line with the factor before
  for (size_t index = 0; index < kMostFactors; ++index) {
    const Factor& factor = FactorOf(index);
    FourLines four{factor.value, {}};
    size_t found = 0;
    for (; found < sums.size(); ++found) {
      const size_t i = (hardest + found) % sums.size();
      const auto line = FitOne(stairs_[i], factor);
      if (!line) {
        hardest = i;
        break;
      }
      four.lines[i] = *line;
    }
    if (found == sums.size()) return four;
  }
  return std::nullopt;
}

}  // namespace lowbit::cuda
