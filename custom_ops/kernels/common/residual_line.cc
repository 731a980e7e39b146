#include "kernels/common/residual_line.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "core/epilogue.h"

namespace lowbit {
namespace {

// With u = 2^-24, A = inner_scale / y_scale, B = residual_scale / y_scale and R = 512 (A + B) + 1, which no term of
// either side exceeds, the definition lies within 5 u R of the real number iA + (r - zero)B. X is between 1 and 2,
// and r counts its units in the last place, 2u: the line's second factor is B / 2u. Of factors at most kMostSteps
// units in the last place, 2u of their size, from A and B / 2u, and an offset that is at most B / 64 too large or
// too small where r = 0, the line lies within (4 kMostSteps + 4) u R + B / 64 of it. Together that is less than
// kNear * R, so that codes are equal where the real number is farther from a tie.
constexpr int kMostSteps = 4;
constexpr double kNear = 0x1p-14;
// The factors.
constexpr double kLeastFactor = 0x1p-12, kMostFactor = 8;
// With more pairs than this next to ties (usual scales: 1000), scales are such that ties are exact.
constexpr size_t kMostPairs = 8192;

struct Pair {
  float inner;
  uint32_t residual;
  int32_t code;  // less the zero point of y
};

// 0, 1, -1, 2, -2, ...
int Step(int i) { return (i + 1) / 2 * (i % 2 != 0 ? 1 : -1); }

float Away(float value, int steps) {
  return std::bit_cast<float>(std::bit_cast<int32_t>(value) + steps);  // positive, normal
}

// X without r: a number and its bits.
constexpr uint32_t kBases = 1 << 15, kOne = 0x3f800000;
uint32_t Base(uint32_t i) { return kOne | i << 8; }

// Bases with which the offset, rounded to a float, is nearest to what it should be.
struct Candidate {
  double error;
  uint32_t base;
  float offset;
};
constexpr size_t kCandidates = 16;

std::array<Candidate, kCandidates> NearestOffsets(float factor, double offset) {
  std::array<Candidate, kCandidates> nearest;
  nearest.fill({HUGE_VAL, 0, 0});
  for (uint32_t i = 0; i < kBases; ++i) {
    const double product = static_cast<double>(std::bit_cast<float>(Base(i))) * static_cast<double>(factor);
    const auto rounded = static_cast<float>(offset - product);
    const double error = std::fabs(product + static_cast<double>(rounded) - offset);
    if (error >= nearest.back().error) continue;
    size_t at = kCandidates - 1;
    for (; at > 0 && error < nearest[at - 1].error; --at) nearest[at] = nearest[at - 1];
    nearest[at] = {error, Base(i), rounded};
  }
  return nearest;
}

}  // namespace

std::optional<ResidualLine> FitResidualLine(const Epilogue& e) {
  if (e.kind != EpilogueKind::kRequantize || !e.has_residual || !e.quantized_output) return {};
  if (e.lo > e.hi || e.y_lo > e.y_hi) return {};
  // Products and quotients are normal numbers then. False for NaN.
  const auto is_usual = [](float scale) { return scale >= 0x1p-60f && scale <= 0x1p60f; };
  if (!is_usual(e.inner_scale) || !is_usual(e.residual_scale) || !is_usual(e.y_scale)) return {};
  const double inner = static_cast<double>(e.inner_scale) / static_cast<double>(e.y_scale),
               residual = static_cast<double>(e.residual_scale) / static_cast<double>(e.y_scale);
  if (std::min(inner, residual) < kLeastFactor || std::max(inner, residual) > kMostFactor) return {};

  const double near = kNear * (512 * (inner + residual) + 1);
  const double lo = e.y_lo - e.y_zero_point - 1,
               hi = e.y_hi - e.y_zero_point + 1;  // clipped on both sides beyond
  const int32_t first = e.residual_signed ? -128 : 0;
  std::vector<Pair> pairs;
  for (int32_t q = e.lo; q <= e.hi; ++q) {
    const double begin = (q - e.zero_point) * inner + (first - e.residual_zero_point) * residual;
    for (int32_t r = 0; r < 256; ++r) {
      const double value = begin + r * residual;
      if (value < lo || value > hi) continue;
      const double part =
          value - static_cast<double>(static_cast<int32_t>(value));  // of a tie half, or minus that
      if (std::fabs(std::fabs(part) - 0.5) > near) continue;
      if (pairs.size() == kMostPairs) return {};
      pairs.push_back({static_cast<float>(q - e.zero_point), static_cast<uint32_t>(r),
                       AddResidualCode(e, q, first + r) - e.y_zero_point});
    }
  }

  const auto least = static_cast<float>(e.y_lo - e.y_zero_point),
             most = static_cast<float>(e.y_hi - e.y_zero_point);
  const auto holds = [&](const ResidualLine& line) {
    return std::all_of(pairs.begin(), pairs.end(), [&](const Pair& p) {
      const float x = std::bit_cast<float>(line.base | p.residual);
      const float value = std::fma(p.inner, line.inner, std::fma(x, line.residual, line.offset));
      return static_cast<int32_t>(std::clamp(std::rint(value), least, most)) == p.code;
    });
  };
  const uint32_t flip = e.residual_signed ? 0x80 : 0;
  const double offset = (first - e.residual_zero_point) * residual;
  for (int i = 0; i <= 2 * kMostSteps; ++i) {
    const float factor = Away(static_cast<float>(residual * 0x1p23), Step(i));
    for (const Candidate& candidate : NearestOffsets(factor, offset)) {
      if (candidate.error > residual / 64) break;
      for (int j = 0; j <= 2 * kMostSteps; ++j) {
        ResidualLine line = {Away(static_cast<float>(inner), Step(j)), factor, candidate.offset,
                             candidate.base};
        if (!holds(line)) continue;
        line.base ^= flip;
        return line;
      }
    }
  }
  return {};
}

}  // namespace lowbit
