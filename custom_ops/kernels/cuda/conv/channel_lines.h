// Rounding sums behind a float tail, or by thresholds, in two operations, which clip the codes, too. What the contract
// makes of a sum (core/epilogue.cc) is a staircase: codes rise with the sum (by thresholds they may fall). Where a line
// goes through all steps of a channel,
//   rint(saturate(f * gain + offset) * factor + base), f = 1.5 * 2^23 + sum + shift
// with one rounding of the line, that saturates to 0 and 1, and one of the product and its addition has the same code
// for every sum that the channel can have. The factor is that of the codes' highest step, or nearly: of 0 and 1 the
// formula has the lowest and the highest code whatever the factor is, within half a code. (What is rounded is the byte
// of a code, 128 more where codes are signed. Where residuals are added to the codes, it is the code less the zero
// point, and 1.5 * 2^23 more: it is not rounded before it is rounded to a code, unless the product is by itself. Sums
// that are ties, as those of scales of few digits often are, are none then, and alternate: no line has them.) f is the
// sum itself as the kernels have it: its bits began as those of 1.5 * 2^23 and the bias, the shift included
// (SumForm::kFloat). Next to f * gain the offset has few digits behind the point; the shift, a whole number, makes up
// for it: products of it fall everywhere between two of them.
//
// Some channels have no line of one rounding, as the roundings of the contract move a step by a sum. Rounded twice a
// line is no straight line either, and with another factor another one: four channels share a factor, which is looked
// for.
//
// Whether a line holds is found out, not believed: the first sum of every code by asking the epilogue itself,
// and that the line is at one side of the tie with it and at the other with the sum before. Between them both
// only rise. Four channels of which one has no line are left to the tail itself.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/conv.h"

namespace lowbit::cuda {

// Whether Markstein's division by `scale` is exact: nothing overflows, no subnormal number loses bits.
inline bool IsNormal(float scale) { return scale > 0x1p-60f && scale < 0x1p60f; }

struct ChannelLine {
  float gain = 0, offset = 0;
  int32_t shift = 0;
};

// Of four neighbouring channels.
struct FourLines {
  float factor = 0;
  std::array<ChannelLine, 4> lines;
};

// Sums of a channel, int32 each.
struct SumRange {
  int64_t least = 0, most = 0;
};

// The code that a sum has before any residual is added, by an epilogue that HasLines.
int32_t FirstCode(const Epilogue& e, int64_t sum, size_t channel);
// These codes.
struct CodeRange {
  int32_t lo = 0, hi = 0, zero_point = 0;
};
CodeRange FirstCodesOf(const Epilogue& e);
// What a line's product is added to: the lowest of these codes as it is rounded.
int32_t LineBaseOf(const Epilogue& e);
// Whether the lines of an epilogue can be looked for: it multiplies, has a tail of a float bias or nothing,
// scales being normal numbers, or has thresholds, all channels from one code on.
bool HasLines(const Epilogue& e);
// What such a tail makes of a sum, before it is rounded.
float TailQuotient(const Epilogue& e, float sum, size_t channel);

class LineFitter {
 public:
  // fuses: the product and its addition are rounded once; what that makes of residuals' codes.
  LineFitter(const Epilogue& e, bool fuses);

  // Of channels from `first` on, four or fewer, that have these sums. None where no lines have all their
  // codes.
  std::optional<FourLines> Fit(size_t first, std::span<const SumRange> sums);

 private:
  // A sum that has a code at least, or less.
  struct Bound {
    int32_t sum;
    size_t step;  // a code less the lowest one
  };
  // A channel's staircase.
  struct Staircase {
    std::vector<Bound> from, below;
    double slope = 0;
  };
  // What a line must be, by step, the lowest code's being 0.
  struct Factor {
    float value = 0;
    std::vector<float> reaches;   // the least line that has it
    std::vector<double> between;  // it and the float below
  };
  // Offsets of the lines of a gain, f being the sum alone.
  struct Offsets {
    double least = -HUGE_VAL, most = HUGE_VAL;
    bool widen = false;  // with a larger gain
  };

  const Factor& FactorOf(size_t index);
  void FindStaircase(size_t channel, const SumRange& sums, Staircase& to) const;
  template <typename Step>
  void FindSteps(const Step& step_of, const SumRange& sums, Staircase& to) const;
  std::optional<ChannelLine> FitOne(const Staircase& stairs, const Factor& factor) const;

  static Offsets OffsetsOf(const Staircase& stairs, const Factor& factor, double gain);
  static std::optional<ChannelLine> WithOffset(const Staircase& stairs, const Factor& factor, float gain,
                                               const Offsets& offsets);
  static bool Holds(const Staircase& stairs, const Factor& factor, const ChannelLine& line);

  // Whether a line has the step or a later one.
  bool Reaches(float line, float factor, int32_t step) const;

  const Epilogue& e_;
  const bool rounds_to_codes_;  // the product is not rounded before
  const CodeRange codes_;
  const int32_t base_, top_;
  std::vector<float> dividends_;  // by step, the least that a tail divides which has it
  std::vector<Factor> factors_;
  std::array<Staircase, 4> stairs_;
};

}  // namespace lowbit::cuda
