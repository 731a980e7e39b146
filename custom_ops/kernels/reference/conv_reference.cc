#include "kernels/reference/conv_reference.h"

#include "core/epilogue.h"

namespace lowbit {
namespace {

class ReferenceConv final : public ConvKernel {
 public:
  explicit ReferenceConv(const ConvSpec& spec) : spec_(spec) {}

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
  size_t PackedBytes() const override { return spec_.weights.size(); }

 private:
  // v(x) of one code.
  int64_t ActivationValue(const void* x, int64_t index) const {
    switch (spec_.x.encoding) {
      case Encoding::kUnsigned:
        return int64_t{static_cast<const uint8_t*>(x)[index]} - spec_.x_zero_point;
      case Encoding::kSigned:
        return int64_t{static_cast<const int8_t*>(x)[index]} - spec_.x_zero_point;
      case Encoding::kBipolar:
        return 2 * int64_t{static_cast<const uint8_t*>(x)[index]} - 1;
    }
    return 0;
  }

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

  // The sum is taken in int64; for codes inside their range it fits int32 (proved when the node was parsed),
  // for others it wraps, as it would in any kernel.
  int32_t Accumulate(const ConvArgs& args, int64_t plane, int64_t oy, int64_t ox, int64_t c) const {
    const ConvGeometry& g = spec_.geometry;
    const ConvShape& s = args.shape;
    const int64_t first_channel = c / g.GroupOut() * g.GroupIn();
    int64_t acc = spec_.bias[static_cast<size_t>(c)];
    const int64_t n = plane / s.out_d, oz = plane % s.out_d;
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      const int64_t tx = tap % g.kernel_w, ty = tap / g.kernel_w % g.kernel_h,
                    tz = tap / g.kernel_w / g.kernel_h;
      const int64_t iz = g.IsPlanar() ? oz : oz * g.stride_d + tz * g.dilation_d - g.pad_front;
      const int64_t iy = InputPixel(oy, ty, g.stride_h, g.dilation_h, g.pad_top, s.in_h);
      const int64_t ix = InputPixel(ox, tx, g.stride_w, g.dilation_w, g.pad_left, s.in_w);
      if (iz < 0 || iz >= s.in_d || iy < 0 || ix < 0) continue;
      const int64_t x = (((n * s.in_d + iz) * s.in_h + iy) * s.in_w + ix) * g.in_channels + first_channel;
      const int64_t w = (c * g.Taps() + tap) * g.GroupIn();
      for (int64_t i = 0; i < g.GroupIn(); ++i) {
        acc += ActivationValue(args.x, x + i) * spec_.WeightValue(c, w + i);
      }
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

  ConvSpec spec_;
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
