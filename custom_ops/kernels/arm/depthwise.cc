// Depthwise convolution: packing, addressing and the table rows. The arithmetic is in depthwise_neon.cc.
//
// Algebra. A tap contributes (x - zx) * v, v the weight's value, and a tap in the padding nothing. Reading zx
// there makes every tap contribute x * v to a sum that starts at bias - zx * (sum of v): exact in int32
// arithmetic modulo 2^32, and the node's parser has shown that the result itself fits. In the form of bytes
// unsigned codes of 8 bits are read as x - 128 with a zero point of zx - 128. Weight values lie in -255..255
// (code - zero point): as int16 they always fit.
#include "kernels/arm/depthwise.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/packed_weights.h"
#include "core/selection.h"
#include "kernels/arm/depthwise_tile.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"

namespace lowbit {
namespace {

constexpr int64_t kMaxLines = 256;  // on a task's stack
constexpr size_t kVectorBytes = 16;
// A call, a row of a block, a tile, and a line of a tile beside its products; modelled Cortex-A53.
constexpr double kCallCycles = 500, kRowCycles = 30, kTileCycles = 115, kLineCycles = 22;

// Taps of a line (depthwise_tile.h).
int64_t LineWidth(const ConvGeometry& g) {
  const bool known = (g.kernel_w == 3 || g.kernel_w == 5) && g.kernel_h == g.kernel_w && g.dilation_w == 1 &&
                     g.stride_w <= 2;
  return known ? g.kernel_w : 1;
}

int64_t LineCount(const ConvGeometry& g) { return g.Taps() / LineWidth(g); }

// What the form of bytes subtracts from codes.
int32_t XOffset(const ConvSpec& spec) {
  return spec.x.encoding == Encoding::kUnsigned && spec.x.bits == 8 ? 128 : 0;
}

double Cycles(const ConvGeometry& g, const ConvShape& s, const DepthwiseForm& form) {
  const auto blocks = static_cast<double>(DivideUp(static_cast<size_t>(g.in_channels), form.channels));
  const auto tiles =
      static_cast<double>(DivideUp(static_cast<size_t>(s.out_w), static_cast<size_t>(kDepthwisePixels)));
  const auto lines = static_cast<double>(LineCount(g)), products = static_cast<double>(8 * LineWidth(g));
  const double finish = kTileCycles * static_cast<double>(form.channels) / 8;
  return static_cast<double>(s.OutPlanes() * s.out_h) * blocks *
         (kRowCycles + tiles * (finish + lines * (kLineCycles + products)));
}

class DepthwiseKernel final : public ConvKernel {
 public:
  DepthwiseKernel(const ConvSpec& spec, const DepthwiseForm& form);

  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape&) const override { return kMaxLines * sizeof(DepthwiseLine); }
  size_t PackedBytes() const override {
    return weights_->size() + epilogue_.Bytes() + init_.size() * sizeof(int32_t);
  }

 private:
  void RunRow(const ConvArgs& args, int64_t row) const;

  const ConvGeometry geometry_;
  const DepthwiseForm& form_;
  const DepthwiseRun run_;
  EpilogueTables epilogue_;
  const std::vector<uint8_t> pad_pixel_;  // what taps outside the image read
  PackedWeights weights_;
  std::vector<int32_t> init_;
  std::vector<DepthwiseBlock> blocks_;
};

DepthwiseKernel::DepthwiseKernel(const ConvSpec& spec, const DepthwiseForm& form)
    : geometry_(spec.geometry),
      form_(form),
      run_(form.run(LineWidth(spec.geometry), spec.geometry.stride_w, spec.x.encoding == Encoding::kSigned,
                    XOffset(spec) != 0)),
      epilogue_(spec),
      pad_pixel_(static_cast<size_t>(spec.geometry.in_channels), static_cast<uint8_t>(spec.x_zero_point)) {
  const auto taps = static_cast<size_t>(geometry_.Taps());
  const auto channels = static_cast<size_t>(geometry_.in_channels);
  const bool bytes = &form == &kDepthwiseBytes;
  const int32_t zero_point = spec.x_zero_point - (bytes ? XOffset(spec) : 0);
  const size_t count = DivideUp(channels, form.channels);
  AlignedBytes packed(count * taps * kVectorBytes);
  init_.resize(count * form.channels);
  std::vector<int64_t> largest(channels);
  for (size_t b = 0; b < count; ++b) {
    const size_t first = std::min(b * form.channels, channels - form.channels);
    for (size_t lane = 0; lane < form.channels; ++lane) {
      const size_t c = first + lane;
      int64_t sum = 0, magnitude = 0;
      for (size_t tap = 0; tap < taps; ++tap) {
        const int32_t value = spec.WeightValue(static_cast<int64_t>(c), static_cast<int64_t>(c * taps + tap));
        sum += value;
        magnitude += std::abs(value);
        uint8_t* vector = packed.data() + (b * taps + tap) * kVectorBytes;
        if (bytes) {
          vector[lane] = static_cast<uint8_t>(value);
        } else {
          const auto word = static_cast<int16_t>(value);
          std::memcpy(vector + 2 * lane, &word, 2);
        }
      }
      init_[b * form.channels + lane] =
          static_cast<int32_t>(static_cast<uint32_t>(spec.bias[c] - zero_point * sum));
      largest[c] = std::abs(static_cast<int64_t>(spec.bias[c])) + 255 * magnitude;
    }
  }
  epilogue_.LimitAccumulators(largest);
  weights_ = ShareWeights(std::move(packed));
  for (size_t b = 0; b < count; ++b) {
    DepthwiseBlock block;
    block.channel = std::min(b * form.channels, channels - form.channels);
    block.weights = weights_->data() + b * taps * kVectorBytes;
    block.init = init_.data() + b * form.channels;
    blocks_.push_back(block);
  }
}

void DepthwiseKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  const int64_t rows = args.shape.OutPlanes() * args.shape.out_h;
  if (rows == 0 || args.shape.out_w == 0) return;
  const double row_cycles = Cycles(geometry_, args.shape, form_) / static_cast<double>(rows);
  const auto grain = std::max<int64_t>(1, static_cast<int64_t>(kTaskCycles / row_cycles));
  pool.ParallelFor(static_cast<size_t>((rows + grain - 1) / grain), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * grain, end = std::min(begin + grain, rows);
    for (int64_t row = begin; row < end; ++row) RunRow(args, row);
  });
}

void DepthwiseKernel::RunRow(const ConvArgs& args, int64_t row) const {
  const ConvShape& s = args.shape;
  const ConvGeometry& g = geometry_;
  const int64_t plane = row / s.out_h, top = row % s.out_h * g.stride_h - g.pad_top;
  const int64_t front = plane % s.out_d * g.stride_d - g.pad_front;
  const auto* x =
      static_cast<const uint8_t*>(args.x) + plane / s.out_d * s.in_d * s.in_h * s.in_w * g.in_channels;
  std::array<DepthwiseLine, kMaxLines> lines;
  const int64_t width = LineWidth(g), count = LineCount(g), in_a_row = g.kernel_w / width;
  for (int64_t l = 0; l < count; ++l) {
    const int64_t kernel_row = l / in_a_row;
    const int64_t z = front + kernel_row / g.kernel_h * g.dilation_d;
    const int64_t y = top + kernel_row % g.kernel_h * g.dilation_h;
    const bool inside = z >= 0 && z < s.in_d && y >= 0 && y < s.in_h;
    DepthwiseLine& line = lines[static_cast<size_t>(l)];
    line.row = inside ? x + (z * s.in_h + y) * s.in_w * g.in_channels : pad_pixel_.data();
    line.step = inside ? g.in_channels : 0;
    line.left = l % in_a_row * g.dilation_w - g.pad_left;
  }
  DepthwiseRow out;
  out.lines = lines.data();
  out.line_count = static_cast<size_t>(count);
  out.stride = g.stride_w;
  out.in_w = s.in_w;
  out.out_w = s.out_w;
  out.pad = pad_pixel_.data();
  out.output = {&epilogue_.view(), static_cast<size_t>(row * s.out_w), 1,
                static_cast<const uint8_t*>(args.residual), args.y};
  for (const DepthwiseBlock& block : blocks_) run_(block, out);
}

// Whether every sum of a window stays within int16, whatever the codes.
bool SumsFitWords(const ConvSpec& spec) {
  const int32_t offset = XOffset(spec), pad = spec.x_zero_point - offset;
  const int32_t lowest = std::min(spec.x.MinCode() - offset, pad);
  const int32_t highest = std::max(spec.x.MaxCode() - offset, pad);
  if (lowest < -128 || highest > 127) return false;
  const int64_t largest = std::max(-lowest, highest);
  for (const ChannelValues& values : spec.channel_values) {
    if (values.lo < -128 || values.hi > 127 || values.magnitude * largest > INT16_MAX) return false;
  }
  return true;
}

template <const DepthwiseForm& kForm>
std::string Refuse(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  if (!g.IsDepthwise()) return "not depthwise (group == in_channels == out_channels > 1)";
  if (g.in_channels < static_cast<int64_t>(kForm.channels)) {
    return "fewer than " + std::to_string(kForm.channels) + " channels";
  }
  if (g.Taps() > kMaxLines) return "more than 256 taps";
  if (spec.x.encoding == Encoding::kBipolar) return "bipolar activations";
  if (&kForm == &kDepthwiseBytes && !SumsFitWords(spec)) return "sums of a window do not fit int16";
  return {};
}

template <const DepthwiseForm& kForm>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  return kCallCycles + Cycles(spec.geometry, shape, kForm);
}

template <const DepthwiseForm& kForm>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  return std::make_unique<DepthwiseKernel>(spec, kForm);
}

template <const DepthwiseForm& kForm>
KernelRow Row(const KernelInfo& info) {
  return {info, &Refuse<kForm>, &Cost<kForm>, &Create<kForm>, true};
}

}  // namespace

std::span<const KernelRow> ArmDepthwiseRows() {
  static const KernelRow kRows[] = {
#define LOWBIT_ARM_DEPTHWISE(form, name, algorithm, isa, x_bits, w_bits, note) \
  HasKernels(name) ? Row<form>({name, "conv", algorithm, isa, x_bits, w_bits, note}) : KernelRow{},
#include "kernels/arm/rows.inc"
  };
  return kRows;
}

}  // namespace lowbit
