// Rounding sums in one operation. What the contract makes of a sum (core/epilogue.cc) is a staircase: codes rise with
// the sum. Where a line goes through all steps of a channel,
//   clip(rint(sum * gain + offset) + zero_point, lo, hi)
// with one rounding of the line has the same code for every sum that the channel can have. That is found out, not
// believed: the first sum of every code by asking the epilogue itself, and that the line is at one side of the
// tie with it and at the other with the sum before. Between them both only rise. (What is only multiplied,
// kRequantize, is a line of its multiplier and 0.)
//
// Sums that are floats f of some 2^23 (SumForm::kFloat) have a line f * gain + start. As start is that large, it lies
// next to what it should be within gain / 4 or so; but which f stands for the sum 0 is free, and with it where start
// lies between two floats. A channel without a line mostly has one on which a single sum, its stray, has the code of
// the sum before: a little below a tie, half a code more puts it right.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/conv.h"

namespace lowbit::cuda {

// Whether Markstein's division by `scale` is exact: nothing overflows, no subnormal number loses bits.
inline bool IsNormal(float scale) { return scale > 0x1p-60f && scale < 0x1p60f; }

// Sums of a channel, int32 each.
struct SumRange {
  int64_t least = 0, most = 0;
};

// The codes of a channel, less the zero point.
struct ChannelLine {
  float gain = 0;
  // Of integers; no number where they have no line.
  float offset = 0;
  // Of the floats 2^23 + shift + sum, if they have one; those that stray.
  bool has_floats = false;
  int32_t shift = 0;
  float start = 0;
  std::vector<float> strays;
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
  explicit LineFitter(const Epilogue& e);

  ChannelLine Fit(size_t channel, const SumRange& sums);

 private:
  // A sum that has a code at least, or less.
  struct Bound {
    double sum;
    size_t step;  // a code less the lowest one
  };
  // Offsets of the lines of a gain, and the sums that stray from them.
  struct Offsets {
    double least = -HUGE_VAL, most = HUGE_VAL;
    bool widen = false;  // with a larger gain
    std::vector<double> strays;

    bool Exist() const { return least <= most; }
    double Middle() const;
  };

  float Quotient(int64_t sum, size_t channel) const;
  void FindSteps(size_t channel, const SumRange& sums);
  Offsets OffsetsOf(double gain, size_t strays = 0) const;
  std::optional<float> OffsetOf(float gain, const Offsets& offsets) const;
  // Completes a line that has its gain.
  void FitFloats(ChannelLine& line) const;
  bool FitFloats(const Offsets& offsets, double least, double room, ChannelLine& line) const;
  // Whether f(sum) is at the right side of the tie for all bounds; of a stray the next sum is.
  template <typename F>
  bool Holds(const std::vector<double>& strays, const F& f) const;

  const Epilogue& e_;
  const bool multiplies_;
  const int32_t zero_point_, lo_, hi_;
  std::vector<float> reaches_;       // by step: the least line that has it
  std::vector<double> between_;      // it and the float below
  std::vector<Bound> from_, below_;  // of a channel
};

}  // namespace lowbit::cuda
