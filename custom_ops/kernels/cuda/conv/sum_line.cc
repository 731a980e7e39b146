#include "kernels/cuda/conv/sum_line.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/epilogue.h"

namespace lowbit::cuda {
namespace {

constexpr int kMostSteps = 4;    // a gain moves by so many units in the last place
constexpr size_t kMostLows = 4;  // so many of 256 are tried

struct Codes {
  float inner, residual;  // less the zero points, but inner from hi - 256 on
  int32_t lowest;         // the residual less the lowest one
  int32_t code;           // less y_lo
};

int32_t CodeOf(const Epilogue& e, int32_t q, int32_t r) {
  const float v = DequantizeCode(q, e.inner_scale, e.zero_point) +
                  DequantizeCode(r, e.residual_scale, e.residual_zero_point);
  return QuantizeCode(v, e.y_scale, e.y_zero_point, e.y_lo, e.y_hi) - e.y_lo;
}

// The codes whose sums come within `tolerance` of a tie: the others round to the same codes on every line.
std::vector<Codes> CodesNearTies(const Epilogue& e, double tolerance) {
  std::vector<Codes> near_ties;
  const double y_scale = e.y_scale;
  const double inner_gain = e.inner_scale / y_scale, residual_gain = e.residual_scale / y_scale;
  const int32_t first = e.residual_signed ? -128 : 0;
  for (int32_t q = e.lo; q <= e.hi; ++q) {
    const double inner = (q - e.zero_point) * inner_gain + e.y_zero_point - e.y_lo;
    for (int32_t r = first; r < first + 256; ++r) {
      const double sum = inner + (r - e.residual_zero_point) * residual_gain;
      if (sum < 0 || sum > e.y_hi - e.y_lo || std::fabs(sum - std::floor(sum) - 0.5) > tolerance) continue;
      near_ties.push_back({static_cast<float>(q - e.hi + 256), static_cast<float>(r - e.residual_zero_point),
                           r - first, CodeOf(e, q, r)});
    }
  }
  return near_ties;
}

bool Holds(const SumLine& line, float highest, const std::vector<Codes>& near_ties) {
  const float start = SumLine::kResidual + static_cast<float>(line.low) / 256;
  return std::all_of(near_ties.begin(), near_ties.end(), [&](const Codes& codes) {
    const float residual = start + static_cast<float>(codes.lowest),
                sum = std::fma(codes.inner, line.inner_gain,
                               std::fma(residual, line.residual_gain, line.offset));
    return static_cast<int32_t>(std::clamp(std::rint(sum), 0.0f, highest)) == codes.code;
  });
}

// Lines of these gains, those first whose offset and low byte come nearest to what they stand for, the sum of
// the codes (hi - 256, lowest residual): within `most`. The next float of an offset is 2^-8 gains away or
// fewer; low bytes step by 2^-8 gains, so that of 256 one comes within some 2^-16 gains, unless gains are
// next to powers of 2.
std::vector<SumLine> NearestLines(const Epilogue& e, float inner_gain, float residual_gain, double most) {
  const int32_t lowest = e.residual_signed ? -128 : 0;
  const double sum = e.y_zero_point - e.y_lo + (e.hi - 256 - e.zero_point) * static_cast<double>(inner_gain) +
                     (lowest - e.residual_zero_point) * static_cast<double>(residual_gain);
  std::vector<std::pair<double, SumLine>> lines;
  for (int low = 0; low < 256; ++low) {
    const double offset = sum - (SumLine::kResidual + low / 256.0) * static_cast<double>(residual_gain);
    const SumLine line{inner_gain, residual_gain, static_cast<float>(offset), low};
    const double distance = std::fabs(static_cast<double>(line.offset) - offset);
    if (distance <= most) lines.emplace_back(distance, line);
  }
  std::sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<SumLine> out;
  for (size_t i = 0; i < std::min(lines.size(), kMostLows); ++i) out.push_back(lines[i].second);
  return out;
}

// The largest size of a sum on its way, in codes.
double LargestSum(const Epilogue& e) {
  return 256.0 * (e.inner_scale / e.y_scale) + 256.0 * (e.residual_scale / e.y_scale) + 256.0;
}

Inverse InverseOf(float scale, float near) {
  return {near, static_cast<float>(1.0 / static_cast<double>(scale) - static_cast<double>(near))};
}

float Moved(float v, int steps) {
  for (; steps > 0; --steps) v = std::nextafter(v, HUGE_VALF);
  for (; steps < 0; ++steps) v = std::nextafter(v, 0.0f);
  return v;
}

}  // namespace

std::optional<SumLine> FitSum(const Epilogue& e) {
  if (e.y_hi - e.y_lo > 255 || e.hi - e.lo > 255) return std::nullopt;
  const float inner_gain = e.inner_scale / e.y_scale, residual_gain = e.residual_scale / e.y_scale;
  // Both ways of adding stay within 2^-20 of the largest sum from the exact one: each rounding adds 2^-24 at
  // most, a gain that moves (kMostSteps + 1) * 2^-23, an offset 2^-24.
  const double size = LargestSum(e);
  if (!(size < 0x1p14)) return std::nullopt;
  const std::vector<Codes> near_ties = CodesNearTies(e, size * 0x1p-19);
  // The smallest moves first.
  for (int moves = 0; moves <= 2 * kMostSteps; ++moves) {
    for (int first = -std::min(moves, kMostSteps); first <= std::min(moves, kMostSteps); ++first) {
      const int rest = moves - std::abs(first);
      if (rest > kMostSteps) continue;
      for (const int second : {rest, -rest}) {
        const std::vector<SumLine> lines =
            NearestLines(e, Moved(inner_gain, first), Moved(residual_gain, second), size * 0x1p-24);
        const auto found = std::find_if(lines.begin(), lines.end(), [&](const SumLine& line) {
          return Holds(line, static_cast<float>(e.y_hi - e.y_lo), near_ties);
        });
        if (found != lines.end()) return *found;
      }
    }
  }
  return std::nullopt;
}

std::optional<Inverse> InvertScale(const Epilogue& e) {
  if (e.y_hi - e.y_lo > 255 || e.hi - e.lo > 255) return std::nullopt;
  const double size = LargestSum(e);
  if (!(size < 0x1p14)) return std::nullopt;
  const Inverse inverse = InverseOf(e.y_scale, 1.0f / e.y_scale);
  // Both ways round four times at most.
  const std::vector<Codes> near_ties = CodesNearTies(e, size * 0x1p-21);
  const bool holds = std::all_of(near_ties.begin(), near_ties.end(), [&](const Codes& codes) {
    const float a = codes.inner + static_cast<float>(e.hi - 256 - e.zero_point),
                sum = a * e.inner_scale + codes.residual * e.residual_scale,
                code = std::fma(sum, inverse.near, sum * inverse.rest);
    const int32_t rounded = static_cast<int32_t>(std::rint(code)) + e.y_zero_point - e.y_lo;
    return std::clamp(rounded, 0, e.y_hi - e.y_lo) == codes.code;
  });
  return holds ? std::optional(inverse) : std::nullopt;
}

// Of neighbouring floats v < w, (w - v) * near is 2^-24 of v * near at least, and what the product of the rest
// may fall by 2^-42 of it at most.
std::optional<Inverse> InvertTailScale(const Epilogue& e) {
  if (e.y_hi - e.y_lo > 255) return std::nullopt;
  const auto holds = [&](const Inverse& inverse) {
    for (int32_t code = e.y_lo - e.y_zero_point + 1; code <= e.y_hi - e.y_zero_point; ++code) {
      const auto reached = static_cast<float>(code);
      float first = (reached - 0.5f) * e.y_scale;
      const auto divides = [&](float v) { return std::rint(v / e.y_scale) >= reached; };
      while (divides(first)) first = std::nextafter(first, -HUGE_VALF);
      while (!divides(first)) first = std::nextafter(first, HUGE_VALF);
      const auto multiplies = [&](float v) {
        return std::rint(std::fma(v, inverse.near, v * inverse.rest)) >= reached;
      };
      if (!multiplies(first) || multiplies(std::nextafter(first, -HUGE_VALF))) return false;
    }
    return true;
  };
  for (int moves = 0; moves <= 2 * kMostSteps; ++moves) {
    const int steps = moves % 2 == 0 ? moves / 2 : -(moves + 1) / 2;
    const Inverse inverse = InverseOf(e.y_scale, Moved(1.0f / e.y_scale, steps));
    if (holds(inverse)) return inverse;
  }
  return std::nullopt;
}

}  // namespace lowbit::cuda
