// Rounding sums behind a float tail in one operation. What the contract makes of a sum (core/epilogue.cc) is a
// staircase: codes rise with the sum. Where a line goes through all steps of a channel,
//   lo + clip(rint(sum * gain + offset), 0, hi - lo)
// with one rounding of the line has the same code for every sum that the channel can have. (Where residuals are added
// to the codes, the lines are of codes less the zero point.) That is found out, not
// believed: the first sum of every code by asking the epilogue itself, and that the line is at one side of the
// tie with it and at the other with the sum before. Between them both only rise. A channel without such a line is
// left to the tail itself. (What is only multiplied, kRequantize, is a line: its multiplier, 0.)
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/conv.h"

namespace lowbit::cuda {

// Whether Markstein's division by `scale` is exact: nothing overflows, no subnormal number loses bits.
inline bool IsNormal(float scale) { return scale > 0x1p-60f && scale < 0x1p60f; }

struct ChannelLine {
  float gain = 0, offset = 0;
};

// Sums of a channel, int32 each.
struct SumRange {
  int64_t least = 0, most = 0;
};

// The code that a sum has before any residual is added, by an epilogue that HasLines.
int32_t FirstCode(const Epilogue& e, int64_t sum, size_t channel);
// Whether the lines of an epilogue can be looked for: it multiplies, or has a tail of a float bias or nothing.
// Scales are then normal numbers.
bool HasLines(const Epilogue& e);
// What such a tail makes of a sum, before it is rounded.
float TailQuotient(const Epilogue& e, float sum, size_t channel);

class LineFitter {
 public:
  // Of a tail.
  explicit LineFitter(const Epilogue& e);

  // None where no line has all the channel's codes.
  std::optional<ChannelLine> Fit(size_t channel, const SumRange& sums);

 private:
  // A sum that has a code at least, or less.
  struct Bound {
    float sum;
    size_t step;  // a code less the lowest one
  };
  // Offsets of the lines of a gain.
  struct Offsets {
    double least = -HUGE_VAL, most = HUGE_VAL;
    bool widen = false;  // with a larger gain
  };

  Offsets OffsetsOf(double gain) const;
  std::optional<ChannelLine> WithOffset(float gain, const Offsets& offsets) const;
  bool Holds(const ChannelLine& line) const;
  template <typename Step>
  void FindSteps(const Step& step_of, const SumRange& sums);

  const Epilogue& e_;
  const int32_t lo_, hi_;
  std::vector<float> reaches_;       // by step: the least line that has it
  std::vector<double> between_;      // it and the float below
  std::vector<Bound> from_, below_;  // of a channel
};

}  // namespace lowbit::cuda
