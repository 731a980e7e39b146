// LowBitNormalization.
#include <algorithm>
#include <cmath>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

// Up to this many elements a row is summed and normalized by one task, while it lies in the caches.
constexpr int64_t kRowElements = 64 * 1024;
// Channels that one call sums at a time: their 64-bit sums lie on the task's stack.
constexpr int64_t kChannelBlock = 256;
// Elements that a task of a larger tensor sums.
constexpr int64_t kTaskElements = 32 * 1024;
// Arrays per channel are repeated up to this length, so that a vector loop seldom meets their end.
constexpr int64_t kMinPeriod = 256;
constexpr int64_t kPadding = 64;  // lanes that a vector load may read past the end

std::vector<float> Repeated(const std::vector<float>& values, int64_t period) {
  std::vector<float> out(static_cast<size_t>(period + kPadding));
  for (size_t i = 0; i < out.size(); ++i) out[i] = values[i % values.size()];
  return out;
}

struct Sums {
  int64_t sum = 0, square = 0;
};

class NormalizationOperator final : public Operator {
 public:
  NormalizationOperator(NormalizationNode node, const OperatorOptions& options)
      : node_(std::move(node)), kernels_(SelectElementwise(options, node_.spec.fast_is_exact)) {
    const auto count = static_cast<int64_t>(node_.gamma.size());
    period_ = count * ((kMinPeriod + count - 1) / count);
    gamma_ = Repeated(node_.gamma, period_);
    beta_ = Repeated(node_.beta, period_);
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const NormalizationShape shape(node_, Fed(inputs, 0, "x"));
    if (shape.outer == 0) return;
    const uint8_t* x = FedBytes(inputs, 0);
    if (node_.groups == 1 && shape.elements <= kRowElements) {
      ParallelRanges(pool, shape.outer, 4 * shape.elements, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          Sums sums;
          const uint8_t* from = x + row * shape.elements;
          kernels_.sum_squares(from, node_.spec.x_signed, shape.elements, &sums.sum, &sums.square);
          const Moments moments = MomentsOf(sums, shape.elements);
          Normalize(from, &moments.mean, &moments.gain, true, At(y, row * shape.elements), shape.elements);
        }
      });
      return;
    }
    RunLarge(shape, x, y, pool);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("normalization", kernels_); }

 private:
  // The float32 numbers of a group: (q - zero point - mean) * gain is the normalized value.
  struct Moments {
    float mean, gain;
  };

  uint8_t* At(void* y, int64_t element) const {
    return static_cast<uint8_t*>(y) + element * static_cast<int64_t>(ElementSize(OutputType()));
  }

  // The moments of codes are exact until the one conversion each to float64.
  Moments MomentsOf(const Sums& codes, int64_t count) const {
    const int64_t zero = node_.spec.x_zero_point;
    const int64_t sum = codes.sum - count * zero;
    const int64_t square = codes.square - 2 * zero * codes.sum + count * zero * zero;
    const auto spread = static_cast<double>(count * square - sum * sum);  // at most 2^46 * 2^16
    const auto scale = static_cast<double>(node_.x_scale);
    const double variance = scale * scale * spread / static_cast<double>(count * count);
    return {static_cast<float>(static_cast<double>(sum) / static_cast<double>(count)),
            static_cast<float>(scale / std::sqrt(variance + static_cast<double>(node_.epsilon)))};
  }

  // `x` begins where a period does. mean and gain: one number each, or one per element.
  void Normalize(const uint8_t* x, const float* mean, const float* gain, bool uniform, uint8_t* y,
                 int64_t count) const {
    const auto size = static_cast<int64_t>(ElementSize(OutputType()));
    for (int64_t done = 0; done < count; done += period_) {
      const int64_t at = uniform ? 0 : done;
      kernels_.normalize(node_.spec, x + done, mean + at, gain + at, uniform, gamma_.data(), beta_.data(),
                         y + done * size, std::min(period_, count - done));
    }
  }

  // Groups of channels, or rows so long that several tasks share them: parts are summed first.
  void RunLarge(const NormalizationShape& shape, const uint8_t* x, void* y, ThreadPool& pool) const {
    const int64_t pixels = shape.elements / shape.channels, groups = node_.groups;
    const int64_t part = std::max<int64_t>(1, kTaskElements / shape.channels);
    const int64_t parts = (pixels + part - 1) / part;
    std::vector<Sums> partial(static_cast<size_t>(shape.outer * parts * groups));
    ParallelRanges(pool, shape.outer * parts, std::min(part, pixels) * shape.channels,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       const int64_t first = i % parts * part;
                       SumPart(shape, x + i / parts * shape.elements + first * shape.channels,
                               std::min(part, pixels - first), &partial[static_cast<size_t>(i * groups)]);
                     }
                   });

    // Per outer index: one number, or one per channel, repeated as gamma is.
    const bool uniform = groups == 1;
    const int64_t repeated =
        std::max(period_, shape.channels * ((kMinPeriod + shape.channels - 1) / shape.channels));
    const int64_t stride = uniform ? 1 : repeated + kPadding;
    std::vector<float> means(static_cast<size_t>(shape.outer * stride)), gains(means.size());
    for (int64_t o = 0; o < shape.outer; ++o) {
      for (int64_t g = 0; g < groups; ++g) {
        Sums total;
        for (int64_t p = 0; p < parts; ++p) {
          const Sums& each = partial[static_cast<size_t>((o * parts + p) * groups + g)];
          total.sum += each.sum;
          total.square += each.square;
        }
        const Moments moments = MomentsOf(total, shape.elements / groups);
        const int64_t width = uniform ? 1 : shape.channels / groups;
        for (int64_t c = g * width; c < (g + 1) * width; ++c) {
          means[static_cast<size_t>(o * stride + c)] = moments.mean;
          gains[static_cast<size_t>(o * stride + c)] = moments.gain;
        }
      }
      for (int64_t i = uniform ? stride : shape.channels; i < stride; ++i) {
        const auto at = static_cast<size_t>(o * stride + i), from = at - static_cast<size_t>(shape.channels);
        means[at] = means[from];
        gains[at] = gains[from];
      }
    }
    const int64_t step = uniform ? period_ : repeated;
    const int64_t steps = (shape.elements + step - 1) / step;
    ParallelRanges(pool, shape.outer * steps, 4 * std::min(step, shape.elements),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       const int64_t o = i / steps, first = i % steps * step, at = o * shape.elements + first;
                       Normalize(x + at, &means[static_cast<size_t>(o * stride)],
                                 &gains[static_cast<size_t>(o * stride)], uniform, At(y, at),
                                 std::min(step, shape.elements - first));
                     }
                   });
  }

  // The sums of every group over some pixels.
  void SumPart(const NormalizationShape& shape, const uint8_t* x, int64_t pixels, Sums* groups) const {
    const bool is_signed = node_.spec.x_signed;
    if (node_.groups == 1) {
      return kernels_.sum_squares(x, is_signed, pixels * shape.channels, &groups->sum, &groups->square);
    }
    const int64_t width = shape.channels / node_.groups;
    int64_t sums[kChannelBlock], squares[kChannelBlock];
    for (int64_t first = 0; first < shape.channels; first += kChannelBlock) {
      const int64_t count = std::min(kChannelBlock, shape.channels - first);
      kernels_.sum_pixel_squares(x + first, is_signed, pixels, shape.channels, count, sums, squares);
      for (int64_t c = 0; c < count; ++c) {
        Sums& group = groups[(first + c) / width];
        group.sum += sums[c];
        group.square += squares[c];
      }
    }
  }

  NormalizationNode node_;
  const ElementwiseKernels& kernels_;
  int64_t period_ = 1;
  std::vector<float> gamma_, beta_;  // [period_ + kPadding]
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(NormalizationNode node, const OperatorOptions& options) {
  return std::make_unique<NormalizationOperator>(std::move(node), options);
}

}  // namespace lowbit
