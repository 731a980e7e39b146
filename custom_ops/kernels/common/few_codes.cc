#include "kernels/common/few_codes.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/epilogue.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"

namespace lowbit {
namespace {

size_t LimitCount(const Epilogue& e) {
  return static_cast<size_t>(e.kind == EpilogueKind::kThresholds ? e.threshold_count : e.hi - e.lo);
}

bool IsFew(int32_t lo, int32_t hi) { return lo < hi && hi - lo <= kMaxFewCodeLimits; }

}  // namespace

bool FewCodes::Represents(const Epilogue& e) {
  if (!e.quantized_output || e.has_residual) return false;
  if (e.kind == EpilogueKind::kThresholds)
    return e.threshold_count >= 1 && e.threshold_count <= kMaxFewCodeLimits;
  return e.kind == EpilogueKind::kRequantize && IsFew(e.lo, e.hi);
}

bool FewCodes::RepresentsSums(const Epilogue& e) {
  return e.has_residual ? IsFew(e.lo, e.hi) && HasFewSums(e) : Represents(e);
}

FewCodes::FewCodes(const Epilogue& epilogue, size_t channels, int32_t unit)
    : epilogue_(epilogue),
      channels_(channels),
      count_(LimitCount(epilogue)),
      pitch_(RoundUp(channels + kEpiloguePadding, 8)),
      unit_(unit),
      start_(channels + kEpiloguePadding),
      flip_(channels + kEpiloguePadding) {
  if (epilogue.has_residual) sums_ = FewSumsOf(epilogue);
  epilogue_.has_residual = false;  // the limits are those of the inner codes
  const bool thresholds = epilogue.kind == EpilogueKind::kThresholds;
  for (size_t c = 0; c < channels; ++c) {
    const bool falls = (thresholds ? epilogue.dir[c] < 0 : epilogue.multiplier[c] < 0) != (unit < 0);
    flip_[c] = falls ? 0xff : 0;
    const int32_t least = sums_ ? 0 : Least(c);
    start_[c] = static_cast<uint8_t>(falls ? -(least + static_cast<int32_t>(count_) + 1) : least);
  }
}

int32_t FewCodes::Least(size_t channel) const {
  return epilogue_.kind == EpilogueKind::kThresholds ? epilogue_.base[channel] : epilogue_.lo;
}

int32_t FewCodes::CodeOf(size_t channel, int64_t accumulator) const {
  constexpr int64_t kLeast = std::numeric_limits<int32_t>::min(),
                    kLargest = std::numeric_limits<int32_t>::max();
  return EpilogueCode(epilogue_, static_cast<int32_t>(std::clamp(accumulator, kLeast, kLargest)),
                      static_cast<int64_t>(channel), 0);
}

std::vector<int16_t> FewCodes::Limits(const int32_t* bias) const {
  std::vector<int16_t> limits(LimitsSize());
  for (size_t c = 0; c < channels_; ++c) {
    for (size_t k = 0; k < count_; ++k) {
      // Rising: whether the code is at least lo + k + 1. Falling: whether it is less than lo + n - k. The
      // largest A for which it is not so, -32768 where it is for all.
      const auto step = static_cast<int32_t>(Falls(c) ? count_ - k : k + 1);
      int32_t below = -kLargestSum - 1, above = kLargestSum + 1;
      while (above - below > 1) {
        const int32_t middle = below + (above - below) / 2;
        const bool reached = CodeOf(c, bias[c] + int64_t{unit_} * middle) >= Least(c) + step;
        (reached != Falls(c) ? above : below) = middle;
      }
      limits[k * pitch_ + c] = static_cast<int16_t>(below);
    }
  }
  return limits;
}

void FewCodes::NarrowLimits(const std::vector<int16_t>& limits) {
  constexpr int32_t kAlways = -kLargestSum - 1, kNever = kLargestSum;  // exceeded
  constexpr int32_t kLargestByte = 255;                                // which no byte exceeds
  std::vector<uint8_t> bytes(LimitsSize(), kLargestByte), start = start_;
  std::vector<int16_t> center(pitch_);
  for (size_t c = 0; c < channels_; ++c) {
    // In ascending order.
    size_t first = 0, end = count_;
    while (first < end && limits[first * pitch_ + c] == kAlways) ++first;
    while (end > first && limits[(end - 1) * pitch_ + c] == kNever) --end;
    start[c] = static_cast<uint8_t>(start[c] + first);
    if (first == end) continue;
    center[c] = limits[first * pitch_ + c];
    for (size_t k = first; k < end; ++k) {
      const int32_t above = limits[k * pitch_ + c] - center[c];
      if (above >= kLargestByte) return;
      bytes[k * pitch_ + c] = static_cast<uint8_t>(above);
    }
  }
  byte_limits_ = std::move(bytes);
  byte_start_ = std::move(start);
  center_ = std::move(center);
}

}  // namespace lowbit
