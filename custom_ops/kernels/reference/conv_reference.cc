#include "kernels/reference/conv_reference.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/epilogue.h"

namespace lowbit {
namespace {

class ReferenceConv final : public ConvKernel {
 public:
  explicit ReferenceConv(const ConvSpec& spec) : spec_(spec) {
    const int64_t k = spec.geometry.K();
    weights_.reserve(spec.weights.size());
    for (int64_t i = 0; i < static_cast<int64_t>(spec.weights.size()); ++i)
      weights_.push_back(static_cast<int16_t>(spec.WeightValue(i / k, i)));
    spec_.weights = {};
  }

  void Run(const ConvArgs& args, ThreadPool& pool) const override {
    const ConvShape& s = args.shape;
    pool.ParallelFor(static_cast<size_t>(s.OutPlanes() * s.out_h), [&](size_t row) {
      const int64_t plane = static_cast<int64_t>(row) / s.out_h, oy = static_cast<int64_t>(row) % s.out_h;
      for (int64_t ox = 0; ox < s.out_w; ++ox) {
        for (int64_t c = 0; c < spec_.geometry.out_channels; ++c) Store(args, plane, oy, ox, c);
      }
    });
  }

  size_t WorkspaceBytes(const ConvShape&) const override { return 0; }
  size_t PackedBytes() const override { return weights_.size() * sizeof(int16_t); }

 private:
  // Which input pixel tap t of output pixel o reads, in one spatial dimension; -1: none, the tap contributes 0.
  //   Forward:     i = o * stride + t * dilation - pad.
  //   Transposed:  the i with  i * stride + t * dilation - pad == o.
  int64_t InputPixel(int64_t o, int64_t t, int64_t stride, int64_t dilation, int64_t pad,
                     int64_t size) const {
    int64_t i = o * stride + t * dilation - pad;
    if (spec_.geometry.transposed) {
      const int64_t scaled = o + pad - t * dilation;
      if (scaled < 0 || scaled % stride != 0) return -1;
      i = scaled / stride;
    }
    return i >= 0 && i < size ? i : -1;
  }

  // The sum of v(x) * v(w) over neighbouring channels, v(x) = scale * code - offset. For codes inside their range it fits
  // int32 (proved when the node was parsed), for others it wraps, as it would in any kernel.
  template <typename Code>
  static uint32_t Sum(const Code* x, int32_t scale, int32_t offset, const int16_t* w, int64_t count) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < count; ++i)
      sum += static_cast<uint32_t>((scale * int32_t{x[i]} - offset) * int32_t{w[i]});
    return sum;
  }

  uint32_t Sum(const void* x, int64_t first, int64_t weight, int64_t count) const {
    const int16_t* w = weights_.data() + weight;
    switch (spec_.x.encoding) {
      case Encoding::kUnsigned:
        return Sum(static_cast<const uint8_t*>(x) + first, 1, spec_.x_zero_point, w, count);
      case Encoding::kSigned:
        return Sum(static_cast<const int8_t*>(x) + first, 1, spec_.x_zero_point, w, count);
      case Encoding::kBipolar:
        return Sum(static_cast<const uint8_t*>(x) + first, 2, 1, w, count);
    }
    return 0;
  }

  int32_t Accumulate(const ConvArgs& args, int64_t plane, int64_t oy, int64_t ox, int64_t c) const {
    const ConvGeometry& g = spec_.geometry;
    const ConvShape& s = args.shape;
    const int64_t first_channel = c / g.GroupOut() * g.GroupIn();
    auto acc = static_cast<uint32_t>(spec_.bias[static_cast<size_t>(c)]);
    const int64_t n = plane / s.out_d, oz = plane % s.out_d;
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      const int64_t tx = tap % g.kernel_w, ty = tap / g.kernel_w % g.kernel_h,
                    tz = tap / g.kernel_w / g.kernel_h;
      const int64_t iz = g.IsPlanar() ? oz : oz * g.stride_d + tz * g.dilation_d - g.pad_front;
      const int64_t iy = InputPixel(oy, ty, g.stride_h, g.dilation_h, g.pad_top, s.in_h);
      const int64_t ix = InputPixel(ox, tx, g.stride_w, g.dilation_w, g.pad_left, s.in_w);
      if (iz < 0 || iz >= s.in_d || iy < 0 || ix < 0) continue;
      const int64_t x = (((n * s.in_d + iz) * s.in_h + iy) * s.in_w + ix) * g.in_channels + first_channel;
      acc += Sum(args.x, x, (c * g.Taps() + tap) * g.GroupIn(), g.GroupIn());
    }
    return static_cast<int32_t>(acc);
  }

  int32_t ResidualCode(const void* residual, int64_t index) const {
    if (residual == nullptr) return 0;
    return spec_.epilogue.residual_signed ? int32_t{static_cast<const int8_t*>(residual)[index]}
                                          : int32_t{static_cast<const uint8_t*>(residual)[index]};
  }

  void Store(const ConvArgs& args, int64_t plane, int64_t oy, int64_t ox, int64_t c) const {
    const ConvShape& s = args.shape;
    const Epilogue& e = spec_.epilogue;
    const int64_t index = ((plane * s.out_h + oy) * s.out_w + ox) * spec_.geometry.out_channels + c;
    const int32_t acc = Accumulate(args, plane, oy, ox, c), residual = ResidualCode(args.residual, index);
    if (!e.quantized_output) {
      static_cast<float*>(args.y)[index] = EpilogueFloat(e, acc, c, residual);
    } else {
      // The low byte of a code is its storage in either signedness.
      static_cast<uint8_t*>(args.y)[index] = static_cast<uint8_t>(EpilogueCode(e, acc, c, residual));
    }
  }

  ConvSpec spec_;                 // but for the weights
  std::vector<int16_t> weights_;  // v(w)
};

std::string Accept(const ConvSpec&) { return {}; }

// About ten cycles a product: never chosen where another kernel applies.
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  const ConvGeometry& g = spec.geometry;
  return 10.0 * static_cast<double>(shape.out_d * shape.out_h * shape.out_w) *
         static_cast<double>(g.out_channels * g.K());
}

std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) { return std::make_unique<ReferenceConv>(spec); }

constexpr KernelRow kRows[] = {
    {{"conv_reference", "conv", "reference", Isa::kScalar, 8, 8, "the definition in plain loops, every node"},
     Accept,
     Cost,
     Create,
     true},
    {{"conv_transpose_reference", "conv_transpose", "reference", Isa::kScalar, 8, 8,
      "the definition in plain loops, every node"},
     Accept,
     Cost,
     Create},
};

}  // namespace

std::span<const KernelRow> ReferenceRows() { return kRows; }

}  // namespace lowbit
