#include "kernels/cuda/conv/channel_lines.h"

#include <algorithm>
#include <utility>

#include "core/epilogue.h"

namespace lowbit::cuda {
namespace {

constexpr int kMostTrials = 40;  // gains that are tried for a channel
// Of the floats that may stand for the sum 0: how many are tried, of them with all steps.
constexpr int kMostShifts = 1 << 18, kMostChecks = 64;
constexpr size_t kMostStrays = 16;
constexpr double kMostOffset = 1.0 / 128;  // of a multiplier's line, in sums
constexpr double kMostStrayGain = 0.25;    // so that a stray is less than half a code below its tie

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
      multiplies_(e.kind == EpilogueKind::kRequantize),
      zero_point_(multiplies_ || e.adds_behind_tail ? e.zero_point : e.y_zero_point),
      lo_(multiplies_ || e.adds_behind_tail ? e.lo : e.y_lo),
      hi_(multiplies_ || e.adds_behind_tail ? e.hi : e.y_hi) {
  for (int32_t code = lo_ - zero_point_; code <= hi_ - zero_point_; ++code) {
    const float tie = static_cast<float>(code) - 0.5f,
                least = code % 2 == 0 ? tie : std::nextafter(tie, HUGE_VALF);
    reaches_.push_back(least);
    between_.push_back((static_cast<double>(least) + std::nextafter(least, -HUGE_VALF)) / 2);
  }
}

double LineFitter::Offsets::Middle() const {
  if (std::isinf(least)) return std::isinf(most) ? 0 : most - 1;
  return std::isinf(most) ? least + 1 : (least + most) / 2;
}

float LineFitter::Quotient(int64_t sum, size_t channel) const {
  const auto acc = static_cast<float>(static_cast<int32_t>(sum));
  return multiplies_ ? acc * e_.multiplier[channel] : TailQuotient(e_, acc, channel);
}

// The first sums of steps and the sums before, and at either end what the first and the last one tell. Guesses are
// the sums whose quotients are the ties. A multiplier has a line of offset 0; near to it, only sums next to ties can
// have other codes: within what the offset, and the roundings of numbers below 2^8, may move them.
void LineFitter::FindSteps(size_t channel, const SumRange& sums) {
  const auto step_of = [&](int64_t sum) {
    const float v = Quotient(sum, channel);
    return static_cast<size_t>(std::upper_bound(reaches_.begin() + 1, reaches_.end(), v) - reaches_.begin()) -
           1;
  };
  const auto bound = [](int64_t sum, size_t step) { return Bound{static_cast<double>(sum), step}; };
  const double scale = multiplies_ ? e_.multiplier[channel] : e_.acc_scale[channel],
               bias = multiplies_ || e_.tail.empty() ? 0 : e_.tail_bias[channel],
               divisor = multiplies_           ? 1
                         : e_.adds_behind_tail ? e_.inner_scale
                                               : e_.y_scale;
  from_.clear();
  below_.clear();
  const size_t lowest = step_of(sums.least), highest = step_of(sums.most);
  if (lowest > 0) from_.push_back(bound(sums.least, lowest));
  int64_t sum = sums.least;
  for (size_t step = lowest + 1; step <= highest; ++step) {
    const double tie = (between_[step] * divisor - bias) / scale, guess = std::ceil(tie);
    if (multiplies_ && step > lowest + 1 && step < highest &&
        std::min(guess - tie, tie - guess + 1) > kMostOffset + 0x1p-16 / scale)
      continue;
    sum = FirstSum([&](int64_t at) { return Quotient(at, channel) >= reaches_[step]; }, sum, sums.most,
                   static_cast<int64_t>(std::clamp(guess, -0x1p40, 0x1p40)));
    from_.push_back(bound(sum, step));
    below_.push_back(bound(sum - 1, step));
  }
  if (highest + 1 < reaches_.size()) below_.push_back(bound(sums.most, highest + 1));
}

// A line of the gain has a step at a sum where sum * gain + offset is more than between_, or a tie of both. It may have
// steps a sum late: those that ask for the largest offsets.
LineFitter::Offsets LineFitter::OffsetsOf(double gain, size_t strays) const {
  Offsets offsets;
  double below = 0;
  std::vector<std::pair<double, double>> largest;  // offsets and their sums, the largest last
  for (const Bound& bound : from_) {
    const std::pair<double, double> of_bound{between_[bound.step] - bound.sum * gain, bound.sum};
    if (largest.size() > strays && of_bound < largest.front()) continue;
    largest.insert(std::upper_bound(largest.begin(), largest.end(), of_bound), of_bound);
    if (largest.size() > strays + 1) largest.erase(largest.begin());
  }
  for (const Bound& bound : below_) {
    const double most = between_[bound.step] - bound.sum * gain;
    if (most < offsets.most) {
      offsets.most = most;
      below = bound.sum;
    }
  }
  if (multiplies_) offsets.most = std::min(offsets.most, kMostOffset * gain);
  if (largest.empty()) return offsets;
  offsets.widen = largest.back().second > below;
  offsets.least = largest.front().first;
  for (size_t i = 1; i < largest.size(); ++i) {
    offsets.least = std::max(offsets.least, largest[i].first - gain);
    offsets.strays.push_back(largest[i].second);
  }
  if (multiplies_) offsets.least = std::max(offsets.least, -kMostOffset * gain);
  if (strays > 0 && (gain > kMostStrayGain || largest.size() <= strays)) offsets.least = HUGE_VAL;
  return offsets;
}

template <typename F>
bool LineFitter::Holds(const std::vector<double>& strays, const F& f) const {
  const auto reaches = [&](const Bound& bound) {
    const bool strays_here = std::find(strays.begin(), strays.end(), bound.sum) != strays.end();
    return f(strays_here ? bound.sum + 1 : bound.sum) >= reaches_[bound.step];
  };
  return std::all_of(from_.begin(), from_.end(), reaches) &&
         std::none_of(below_.begin(), below_.end(),
                      [&](const Bound& bound) { return f(bound.sum) >= reaches_[bound.step]; });
}

std::optional<float> LineFitter::OffsetOf(float gain, const Offsets& offsets) const {
  if (!offsets.Exist()) return std::nullopt;
  const auto nearest = static_cast<float>(offsets.Middle());
  for (const float offset :
       {nearest, std::nextafter(nearest, -HUGE_VALF), std::nextafter(nearest, HUGE_VALF)}) {
    if (Holds({}, [&](double sum) { return std::fma(static_cast<float>(sum), gain, offset); })) return offset;
  }
  return std::nullopt;
}

bool LineFitter::FitFloats(const Offsets& offsets, double least, double room, ChannelLine& line) const {
  if (!offsets.Exist()) return false;
  const double gain = line.gain, middle = offsets.Middle(),
               slack = std::min(0.5, (offsets.most - offsets.least) / 2);
  // Steps of one length might come by the same few places between floats again and again.
  int checks = 0;
  double shift = -least;
  for (int step = 1; step <= kMostShifts && checks < kMostChecks; ++step) {
    shift += step;
    if (shift > room - least) shift -= room;
    const double zero = 0x1p23 + shift;
    const auto start = static_cast<float>(middle - zero * gain);
    if (std::fabs(static_cast<double>(start) + zero * gain - middle) > slack) continue;
    ++checks;
    const auto on_line = [&](double sum) {
      return std::fma(static_cast<float>(zero + sum), line.gain, start);
    };
    if (!Holds(offsets.strays, on_line)) continue;
    line.has_floats = true;
    line.shift = static_cast<int32_t>(shift);
    line.start = start;
    for (const double sum : offsets.strays) line.strays.push_back(static_cast<float>(zero + sum));
    return true;
  }
  return false;
}

// The sums of all bounds, and those beside them, are to be floats that count one by one.
void LineFitter::FitFloats(ChannelLine& line) const {
  double least = HUGE_VAL, most = -HUGE_VAL;
  for (const auto* const bounds : {&from_, &below_}) {
    if (bounds->empty()) continue;
    least = std::min(least, bounds->front().sum - 1);
    most = std::max(most, bounds->back().sum + 1);
  }
  if (least > most) least = most = 0;  // one code
  const double room = 0x1p23 - (most - least);
  if (room < kMostShifts) return;
  for (size_t strays = 0; strays <= kMostStrays; ++strays) {
    if (FitFloats(OffsetsOf(line.gain, strays), least, room, line)) return;
  }
}

// What lies between the least and the most offset of a gain grows with the gain up to some gain, then shrinks: steps in
// its direction, each twice as long as the one before until that turns, then half as long. Of gains without a line the
// one is taken whose lines have the fewest strays. A multiplier stays what it is.
ChannelLine LineFitter::Fit(size_t channel, const SumRange& sums) {
  FindSteps(channel, sums);
  ChannelLine line;
  if (multiplies_) {
    line.gain = e_.multiplier[channel];
    FitFloats(line);
    return line;
  }
  auto trial = static_cast<float>(static_cast<double>(e_.acc_scale[channel]) /
                                  static_cast<double>(e_.adds_behind_tail ? e_.inner_scale : e_.y_scale));
  const double unit = static_cast<double>(std::nextafter(trial, HUGE_VALF)) - static_cast<double>(trial);
  double step = 1, tried = static_cast<double>(trial);
  bool turned = false, was_wider = false;
  size_t fewest = kMostStrays + 1;
  line.gain = trial;
  line.offset = std::nanf("");
  for (int i = 0; i < kMostTrials && step >= 1; ++i) {
    const Offsets offsets = OffsetsOf(static_cast<double>(trial));
    if (const auto offset = OffsetOf(trial, offsets)) {
      line.gain = trial;
      line.offset = *offset;
      break;
    }
    for (size_t strays = 1; strays < fewest; ++strays) {
      if (!OffsetsOf(static_cast<double>(trial), strays).Exist()) continue;
      fewest = strays;
      line.gain = trial;
    }
    turned = turned || (i > 0 && offsets.widen != was_wider);
    if (i > 0) step *= turned ? 0.5 : 2;
    was_wider = offsets.widen;
    tried += offsets.widen ? step * unit : -step * unit;
    trial = static_cast<float>(tried);
  }
  FitFloats(line);
  return line;
}

}  // namespace lowbit::cuda
