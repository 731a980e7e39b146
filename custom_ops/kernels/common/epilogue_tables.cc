#include "kernels/common/epilogue_tables.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "core/epilogue.h"
#include "kernels/common/residual_line.h"
#include "kernels/common/threshold_line.h"

namespace lowbit {
namespace {

// Whether x / y_scale may be computed through the reciprocal: neither it nor the products with it overflow or
// lose bits to underflow for any x whose quotient does not round to 0.
bool ReciprocalIsSafe(float y_scale) { return y_scale >= 0x1p-60f && y_scale <= 0x1p60f; }

void FillTable(FewSums& sums) {
  constexpr size_t kRow = kFewSteps + 1, kRows = sizeof(sums.table) / kRow;
  if (sums.inner_last >= kRows) return;
  const auto limit = [&](size_t k, size_t i) { return static_cast<int8_t>(sums.limits[k][i]); };
  constexpr int8_t kNever = 127;  // exceeded
  int32_t lowest = kNever, highest = -128;
  for (size_t i = 0; i <= sums.inner_last; ++i) {
    for (size_t k = 0; k < sums.count; ++k) {
      if (limit(k, i) == kNever) continue;
      lowest = std::min<int32_t>(lowest, limit(k, i));
      highest = std::max<int32_t>(highest, limit(k, i));
    }
  }
  if (highest - lowest >= kFewSteps) return;
  sums.has_table = true;
  sums.lowest = static_cast<uint8_t>(lowest + 128);
  for (size_t i = 0; i <= sums.inner_last; ++i) {
    for (size_t step = 0; step < kRow; ++step) {
      uint8_t& y = sums.table[i * kRow + step];
      y = sums.least[i];
      for (size_t k = 0; k < sums.count; ++k) {
        if (limit(k, i) != kNever && lowest + static_cast<int32_t>(step) > limit(k, i)) ++y;
      }
    }
  }
}

}  // namespace

bool HasFewSums(const Epilogue& e) {
  return e.has_residual && e.quantized_output && e.kind == EpilogueKind::kRequantize &&
         e.hi - e.lo < kMaxFewInner && e.y_lo < e.y_hi && e.y_hi - e.y_lo <= kMaxFewCodeLimits;
}

FewSums FewSumsOf(const Epilogue& e) {
  FewSums sums{};
  sums.inner_zero = static_cast<int16_t>(e.zero_point - e.lo);
  sums.inner_last = static_cast<uint8_t>(e.hi - e.lo);
  sums.flip = e.residual_signed ? 0 : 0x80;
  for (int32_t i = 0; i <= e.hi - e.lo; ++i) {
    const auto code = [&](int32_t s) {
      return AddResidualCode(e, e.lo + i, e.residual_signed ? s : s + 128);
    };
    const int32_t least = code(-128);
    sums.least[i] = static_cast<uint8_t>(least);
    sums.count = std::max(sums.count, static_cast<uint8_t>(code(127) - least));
    for (int32_t k = 0; k < kMaxFewCodeLimits; ++k) {
      int32_t limit = -128, end = 128;
      while (end - limit > 1) {
        const int32_t middle = limit + (end - limit) / 2;
        (code(middle) <= least + k ? limit : end) = middle;
      }
      sums.limits[k][i] = static_cast<uint8_t>(limit);
    }
  }
  FillTable(sums);
  return sums;
}

template <class T>
const T* EpilogueTables::Padded(const std::vector<T>& values, size_t channels) {
  if (values.empty()) return nullptr;
  tables_.emplace_back((channels + kEpiloguePadding) * sizeof(T));
  std::memcpy(tables_.back().data(), values.data(), values.size() * sizeof(T));
  return reinterpret_cast<const T*>(tables_.back().data());
}

EpilogueTables::EpilogueTables(const Epilogue& e, size_t channels) {
  EpilogueView& v = view_;
  v.kind = e.kind;
  v.quantized_output = e.quantized_output;
  v.has_residual = e.has_residual;
  v.channels = channels;
  v.scale = Padded(e.kind == EpilogueKind::kRequantize ? e.multiplier : e.acc_scale, channels);
  v.zero_point = e.zero_point;
  v.lo = static_cast<float>(e.lo - e.zero_point);
  v.hi = static_cast<float>(e.hi - e.zero_point);
  v.inner_scale = e.inner_scale;
  v.residual_scale = e.residual_scale;
  v.residual_flip = e.residual_signed ? 0x80 : 0;
  v.residual_zero = e.residual_zero_point + v.residual_flip;
  v.y_scale = e.y_scale;
  v.y_reciprocal = 1.0f / e.y_scale;
  v.reciprocal_is_safe = ReciprocalIsSafe(e.y_scale);
  v.y_zero_point = e.y_zero_point;
  v.y_lo = static_cast<float>(e.y_lo - e.y_zero_point);
  v.y_hi = static_cast<float>(e.y_hi - e.y_zero_point);

  if (e.kind == EpilogueKind::kRequantize) {
    v.pack_flip = e.y_signed ? 0x80 : 0;
    v.pack_zero = static_cast<int16_t>((e.has_residual ? e.y_zero_point : e.zero_point) + v.pack_flip);
    v.pack_lo = static_cast<uint8_t>((e.has_residual ? e.y_lo : e.lo) + v.pack_flip);
    v.pack_hi = static_cast<uint8_t>((e.has_residual ? e.y_hi : e.hi) + v.pack_flip);
    if (HasFewSums(e)) few_sums_ = FewSumsOf(e);
  }

  if (e.kind == EpilogueKind::kThresholds) {
    v.pack_flip = e.y_signed ? 0x80 : 0;
    v.pack_zero = v.pack_flip;
    v.threshold_count = static_cast<size_t>(e.threshold_count);
    v.threshold_pitch = (channels + kEpiloguePadding + 15) / 16 * 16;  // rows begin on cache lines
    std::vector<int32_t> start(channels), flip(channels), thresholds(v.threshold_count * v.threshold_pitch);
    for (size_t c = 0; c < channels; ++c) {
      const bool falls = e.dir[c] < 0;
      flip[c] = falls ? -1 : 0;
      start[c] = falls ? -(e.base[c] + static_cast<int32_t>(v.threshold_count) + 1) : e.base[c];
      for (size_t k = 0; k < v.threshold_count; ++k) {
        const int32_t threshold = e.thresholds[c * v.threshold_count + k];
        thresholds[k * v.threshold_pitch + c] =
            falls ? threshold : std::max(threshold, std::numeric_limits<int32_t>::min() + 1) - 1;
      }
    }
    v.start = Padded(start, channels);
    v.flip = Padded(flip, channels);
    v.thresholds = Padded(thresholds, thresholds.size());
  }
  if (e.kind == EpilogueKind::kTail) {
    tail_ = e.tail;
    v.tail = tail_.data();
    v.tail_count = tail_.size();
    v.tail_bias = Padded(e.tail_bias, channels);
    v.tail_scale = Padded(e.tail_scale, channels);
    v.tail_shift = Padded(e.tail_shift, channels);
    v.clip_min = e.clip_min;
    v.clip_max = e.clip_max;
    v.pack_flip = e.y_signed ? 0x80 : 0;
    v.pack_zero = static_cast<int16_t>(e.y_zero_point + v.pack_flip);
    v.pack_lo = static_cast<uint8_t>(e.y_lo + v.pack_flip);
    v.pack_hi = static_cast<uint8_t>(e.y_hi + v.pack_flip);
  }
}

EpilogueTables::EpilogueTables(const ConvSpec& spec)
    : EpilogueTables(spec.epilogue, static_cast<size_t>(spec.geometry.out_channels)) {
  EpilogueView& v = view_;
  if (v.kind != EpilogueKind::kThresholds) return;
  const std::optional<ThresholdLine> line = FitThresholdLine(v, spec);
  if (!line) return;
  v.line_gain = Padded(line->gain, v.channels);
  v.line_offset = Padded(line->offset, v.channels);
  v.pack_lo = static_cast<uint8_t>(line->lo + v.pack_flip);
  v.pack_hi = static_cast<uint8_t>(line->hi + v.pack_flip);
}

// Whether codes may be made of the numbers whose bits are 2^23's plus the accumulator (requantize_rows.h). Of
// accumulators below 2^23 they are 2^23 more, and the product is rounded as the definition's is. Larger ones come out
// larger than they are, which is no other code where 2^23 already exceeds the last one, as long as the product stays in
// int32. Negative ones give a number below 2^23, hence a product that is not positive: the first code.
bool EpilogueTables::Rises(const std::vector<int64_t>& largest) const {
  const EpilogueView& v = view_;
  if (v.has_residual || v.lo != 0 || largest.size() != v.channels) return false;
  constexpr int64_t kExact = int64_t{1} << 23,
                    kMost = int64_t{1} << 29;  // the latter's bits are still positive
  for (size_t c = 0; c < largest.size(); ++c) {
    const double scale = static_cast<double>(v.scale[c]);
    const bool is_usual = scale >= 0x1p-60 && scale <= 0x1p6;
    if (!is_usual || largest[c] >= kMost) return false;
    if (largest[c] < kExact) continue;
    const auto most =
        std::bit_cast<float>(std::bit_cast<int32_t>(0x1p23f) + static_cast<int32_t>(largest[c]));
    if (scale * 0x1p23 < 512 || static_cast<double>(most) * scale >= 0x1p30) return false;
  }
  return true;
}

void EpilogueTables::LimitAccumulators(const std::vector<int64_t>& largest) {
  EpilogueView& v = view_;
  if (v.kind != EpilogueKind::kRequantize) return;
  // 2^30: half of int32's range, far more slack than the roundings need. False for NaN.
  constexpr double kLimit = 1073741824.0;
  bool sums_fit = true;
  for (size_t c = 0; c < largest.size(); ++c) {
    const double product = static_cast<double>(largest[c]) * std::fabs(static_cast<double>(v.scale[c]));
    sums_fit = sums_fit && product < kLimit;
  }
  if (v.has_residual) {
    v.few_sums = sums_fit && few_sums_ ? &*few_sums_ : nullptr;
    // |q - zero point| and |r - zero point| are below 512.
    v.pack_clips = v.reciprocal_is_safe &&
                   512.0 * (static_cast<double>(v.inner_scale) + static_cast<double>(v.residual_scale)) /
                           static_cast<double>(v.y_scale) <
                       kLimit;
  } else {
    v.pack_clips = sums_fit;
  }
  v.packs_all = v.pack_clips && v.pack_zero == 0 && v.pack_lo == 0 && v.pack_hi == 255 && v.pack_flip == 0;
  if (!v.pack_clips || !Rises(largest)) return;
  std::vector<float> offset(v.channels);
  for (size_t c = 0; c < v.channels; ++c) offset[c] = v.scale[c] * -0x1p23f;
  v.rising_offset = Padded(offset, v.channels);
}

void EpilogueTables::AddByLine(const Epilogue& e) {
  EpilogueView& v = view_;
  if (!v.has_residual || !v.pack_clips || v.few_sums != nullptr) return;
  const std::optional<ResidualLine> line = FitResidualLine(e);
  if (!line) return;
  v.adds_by_line = true;
  v.line_inner = line->inner;
  v.line_residual = line->residual;
  v.line_constant = line->offset;
  v.line_base = line->base;
}

size_t EpilogueTables::Bytes() const {
  size_t bytes = 0;
  for (const AlignedBytes& table : tables_) bytes += table.size();
  return bytes;
}

}  // namespace lowbit
