#include "core/elementwise.h"

#include <algorithm>
#include <cmath>

#if LOWBIT_X86
#include "kernels/x86/elementwise.h"
#endif

namespace lowbit {
namespace {

constexpr double kMinScale = 0x1p-60, kMaxScale = 0x1p60;
constexpr double kMaxQuotient = 0x1p22;
constexpr int64_t kMinPeriod = 256;  // elements: four 64-byte vectors
constexpr int64_t kPadding = 64;     // lanes that a vector load may read past the period

bool InRange(double scale) { return scale >= kMinScale && scale <= kMaxScale; }

template <typename T>
void RepeatAndPad(std::vector<T>& values, int64_t period) {
  const size_t count = values.size();
  values.resize(static_cast<size_t>(period + kPadding));
  for (size_t i = count; i < values.size(); ++i) values[i] = values[i - count];
}

template <typename T>
bool AllEqual(const std::vector<T>& values) {
  return std::all_of(values.begin(), values.end(), [&](T v) { return v == values.front(); });
}

}  // namespace

bool FastIsExact(const Quantizer& quantizer, double max_abs, double x_scale) {
  if (!InRange(x_scale)) return false;
  if (!quantizer.quantized) return true;
  return InRange(quantizer.scale) && max_abs < kMaxQuotient * static_cast<double>(quantizer.scale);
}

void PrepareAffine(AffineSpec& spec) {
  spec.grid_per_channel = !(AllEqual(spec.x_zero_point) && AllEqual(spec.x_scale) && AllEqual(spec.y_scale) &&
                            AllEqual(spec.y_zero_point));
  spec.y_inverse.resize(spec.y_scale.size());
  std::transform(spec.y_scale.begin(), spec.y_scale.end(), spec.y_inverse.begin(),
                 [](float s) { return 1.0f / s; });

  spec.fast_is_exact = true;
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) {
    double max_abs = 256.0 * static_cast<double>(spec.x_scale[c]);
    if (spec.has_affine) {
      max_abs = max_abs * std::fabs(static_cast<double>(spec.scale[c])) +
                std::fabs(static_cast<double>(spec.shift[c]));
    }
    Quantizer quantizer = spec.quantizer;
    quantizer.scale = spec.y_scale[c];
    if (!FastIsExact(quantizer, max_abs, static_cast<double>(spec.x_scale[c]))) spec.fast_is_exact = false;
  }

  const int64_t repeats = (kMinPeriod + spec.channels - 1) / spec.channels;
  spec.period = spec.channels * repeats;
  RepeatAndPad(spec.x_zero_point, spec.period);
  RepeatAndPad(spec.x_scale, spec.period);
  RepeatAndPad(spec.y_scale, spec.period);
  RepeatAndPad(spec.y_inverse, spec.period);
  RepeatAndPad(spec.y_zero_point, spec.period);
  if (spec.has_affine) {
    RepeatAndPad(spec.scale, spec.period);
    RepeatAndPad(spec.shift, spec.period);
  }
}

const ElementwiseKernels& ElementwiseFor([[maybe_unused]] Isa isa) {
#if LOWBIT_X86
  switch (isa) {
    case Isa::kScalar:
      break;
    case Isa::kSse41:
      return ElementwiseSse41();
    case Isa::kAvx2:
    case Isa::kAvxVnni:
      return ElementwiseAvx2();
    case Isa::kAvx512Vnni:
      return ElementwiseAvx512();
  }
#endif
  return ElementwiseReference();
}

}  // namespace lowbit
