// Depthwise convolution: packing, addressing and the table rows. The arithmetic is in depthwise_impl.h.
//
// Algebra. A tap contributes (x - zx) * v, v the weight's value, and a tap in the padding nothing. Reading zx
// there makes every tap contribute x * v to a sum that starts at bias - zx * (sum of v): exact in int32
// arithmetic modulo 2^32, and the node's parser has shown that the result itself fits. Signed codes are read
// as x + 128 with a zero point of zx + 128. Weight values lie in -255..255 (code - zero point): as int16 they
// always fit, as int8 mostly.
#include "kernels/x86/depthwise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/packed_weights.h"
#include "kernels/common/workspace.h"
#include "kernels/x86/depthwise_block.h"

namespace lowbit {
namespace {

constexpr int64_t kMinChannels = 16;  // of the narrowest block
constexpr int64_t kMaxTaps = 256;     // pointers on a task's stack
constexpr int64_t kQuad = 4;
// To begin with a block of channels in a row: 7x7x960 takes three times as long for each output as 112x112x32 does.
constexpr double kRowCycles = 300;

// Three columns next to each other and at most three rows of one plane: the sliding kernels of a row.
bool SlidesAlongRow(const ConvGeometry& g) {
  return g.IsPlanar() && g.kernel_w == 3 && g.dilation_w == 1 && g.kernel_h <= 3 && g.stride_w <= 2;
}

int32_t XFlip(const ConvSpec& spec) { return spec.x.encoding == Encoding::kSigned ? 128 : 0; }

// The taps of each quad, -1 for none. Sliding kernels take a column per quad, the others the taps in their
// order.
std::vector<int64_t> QuadTaps(const ConvGeometry& g) {
  std::vector<int64_t> taps;
  if (SlidesAlongRow(g)) {
    for (int64_t column = 0; column < 3; ++column) {
      for (int64_t row = 0; row < kQuad; ++row) taps.push_back(row < g.kernel_h ? row * 3 + column : -1);
    }
    return taps;
  }
  for (int64_t tap = 0; tap < g.Taps(); ++tap) taps.push_back(tap);
  while (taps.size() % kQuad != 0) taps.push_back(-1);
  return taps;
}

struct BlockPlan {
  int64_t channel;
  const DepthwiseKernels* kernels;
};

// Covers the channels with few blocks. The last one moves back over its neighbour where it would reach too
// far.
std::vector<BlockPlan> CutChannels(const DepthwiseEngine& engine, bool x_signed, int64_t channels) {
  const auto& kernels = engine.kernels[x_signed ? 1 : 0];
  std::vector<BlockPlan> blocks;
  for (int64_t c = 0; c < channels;) {
    const DepthwiseKernels *covers = nullptr, *inside = nullptr;
    for (const DepthwiseKernels* k : kernels) {  // widest first
      if (k == nullptr || static_cast<int64_t>(k->channels) > channels) continue;
      if (static_cast<int64_t>(k->channels) >= channels - c) covers = k;  // the narrowest that finishes
      if (inside == nullptr && static_cast<int64_t>(k->channels) <= channels - c)
        inside = k;  // the widest that fits
    }
    const DepthwiseKernels* chosen = covers != nullptr ? covers : inside;
    const auto width = static_cast<int64_t>(chosen->channels);
    blocks.push_back({std::min(c, channels - width), chosen});
    c += width;
  }
  return blocks;
}

class DepthwiseKernel final : public ConvKernel {
 public:
  DepthwiseKernel(const ConvSpec& spec, const DepthwiseEngine& engine);

  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape&) const override { return 4 * kMaxTaps * sizeof(void*); }
  size_t PackedBytes() const override {
    return weights_->size() + epilogue_.Bytes() + init_.size() * sizeof(int32_t) +
           scale_.size() * sizeof(float);
  }

 private:
  void Pack(const ConvSpec& spec, DepthwiseProducts products, const std::vector<BlockPlan>& plan);
  // A row of outputs, of the blocks [first, end).
  void RunRow(const ConvArgs& args, int64_t row, size_t first, size_t end) const;
  void RunPixels(const ConvArgs& args, int64_t row, size_t first, size_t end) const;

  const ConvGeometry geometry_;
  EpilogueTables epilogue_;
  std::vector<int64_t> taps_;  // of the quads
  uint8_t pad_ = 0;            // the code of a tap outside the image, as stored in x
  std::vector<uint8_t> pad_pixel_;
  PackedWeights weights_;
  std::vector<int32_t> init_;
  std::vector<float> scale_;
  std::vector<DepthwiseBlock> blocks_;
  std::vector<const DepthwiseKernels*> kernels_;  // of each block
};

// Whether requantization may convert to int32 before it clips: no product leaves int32, with a factor of 2 to
// spare for the roundings. False for NaN.
bool ProductsFitInt32(const ConvSpec& spec, int64_t channel, int64_t magnitude) {
  const auto c = static_cast<size_t>(channel);
  const double largest =
      std::fabs(static_cast<double>(spec.bias[c])) + 255.0 * static_cast<double>(magnitude);
  return largest * std::fabs(static_cast<double>(spec.epilogue.multiplier[c])) < 1073741824.0;
}

DepthwiseKernel::DepthwiseKernel(const ConvSpec& spec, const DepthwiseEngine& engine)
    : geometry_(spec.geometry),
      epilogue_(spec),
      taps_(QuadTaps(spec.geometry)),
      pad_(static_cast<uint8_t>(spec.x_zero_point)),
      pad_pixel_(static_cast<size_t>(spec.geometry.in_channels), pad_) {
  Pack(spec, engine.products,
       CutChannels(engine, spec.x.encoding == Encoding::kSigned, geometry_.in_channels));
}

void DepthwiseKernel::Pack(const ConvSpec& spec, DepthwiseProducts products,
                           const std::vector<BlockPlan>& plan) {
  const bool wide = products == DepthwiseProducts::kWide;
  const size_t quads = taps_.size() / kQuad;
  size_t lanes = 0;
  for (const BlockPlan& block : plan) lanes += block.kernels->channels;
  AlignedBytes packed(lanes * taps_.size() * (wide ? 2 : 1));
  init_.resize(lanes);
  scale_.resize(lanes);

  const Epilogue& e = spec.epilogue;
  std::vector<int64_t> largest(static_cast<size_t>(geometry_.out_channels));
  bool plain = e.kind == EpilogueKind::kRequantize && !e.has_residual;
  size_t first = 0;  // lane of the block
  for (const BlockPlan& p : plan) {
    const size_t width = p.kernels->channels;
    uint8_t* weights = packed.data() + first * taps_.size() * (wide ? 2 : 1);
    for (size_t lane = 0; lane < width; ++lane) {
      // Vector j, 128-bit lane l and dword k of the order in depthwise_block.h.
      const size_t j = lane / 4 % 4, l = lane / 16, k = lane % 4;
      const size_t place = l * 4 + k;  // dword inside its vector
      const int64_t channel = p.channel + static_cast<int64_t>(lane);
      const auto c = static_cast<size_t>(channel);
      int32_t sum = 0, magnitude = 0;
      for (size_t i = 0; i < taps_.size(); ++i) {
        if (taps_[i] < 0) continue;
        const int32_t value = spec.WeightValue(channel, channel * geometry_.Taps() + taps_[i]);
        sum += value;
        magnitude += std::abs(value);
        const size_t quad = i / kQuad, tap = i % kQuad;
        if (wide) {
          const size_t vector = (quad * 4 + j) * 2 + tap % 2;
          const auto word = static_cast<int16_t>(value);
          std::memcpy(weights + vector * width + 4 * place + 2 * (tap / 2), &word, 2);
        } else {
          weights[(quad * 4 + j) * width + 4 * place + tap] = static_cast<uint8_t>(value);
        }
      }
      const size_t slot = first + j * (width / 4) + place;
      init_[slot] = spec.bias[c] - (spec.x_zero_point + XFlip(spec)) * sum;
      largest[c] = std::abs(static_cast<int64_t>(spec.bias[c])) + 255 * static_cast<int64_t>(magnitude);
      if (plain) {
        scale_[slot] = e.multiplier[c];
        plain = ProductsFitInt32(spec, channel, magnitude);
      }
    }
    first += width;
  }
  weights_ = ShareWeights(std::move(packed));
  epilogue_.LimitAccumulators(largest);

  first = 0;
  for (const BlockPlan& p : plan) {
    DepthwiseBlock block;
    block.epilogue = &epilogue_.view();
    block.channel = static_cast<size_t>(p.channel);
    block.weights = weights_->data() + first * taps_.size() * (wide ? 2 : 1);
    block.quads = quads;
    block.init = init_.data() + first;
    block.scale = plain ? scale_.data() + first : nullptr;
    if (plain) {
      block.flip = e.y_signed ? 0x80 : 0;
      block.zero_point = static_cast<int16_t>(e.zero_point + block.flip);
      block.lo = static_cast<uint8_t>(e.lo + block.flip);
      block.hi = static_cast<uint8_t>(e.hi + block.flip);
    }
    blocks_.push_back(block);
    kernels_.push_back(p.kernels);
    first += p.kernels->channels;
  }
}

double Cycles(const ConvGeometry& g, int64_t blocks, bool wide) {
  // Measured on Zen 5 at 512 bits: cycles per block of one output pixel.
  if (SlidesAlongRow(g)) return static_cast<double>(blocks) * (wide ? 30 : 16);
  const int64_t quads = (g.Taps() + kQuad - 1) / kQuad;
  return static_cast<double>(blocks * (quads + 1)) * (wide ? 14 : 10);
}

void DepthwiseKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  const ConvShape& s = args.shape;
  const size_t rows = static_cast<size_t>(s.OutPlanes() * s.out_h), blocks = blocks_.size();
  if (rows == 0) return;
  const double row_cycles =
      static_cast<double>(blocks) * kRowCycles +
      static_cast<double>(s.out_w) * Cycles(geometry_, static_cast<int64_t>(blocks), false);
  // Rows are dealt out first, then channels of a row, unless the last two blocks write some of the same.
  const bool apart = blocks < 2 || blocks_[blocks - 1].channel ==
                                       blocks_[blocks - 2].channel + kernels_[blocks - 2]->channels;
  const double row_tasks = row_cycles / pool.TaskCycles();
  const TaskSplit split = {
      rows, std::clamp(static_cast<size_t>(row_tasks * static_cast<double>(rows)), size_t{1}, rows), blocks,
      std::clamp(static_cast<size_t>(row_tasks), size_t{1},
                 apart ? std::min(blocks, DivideUp(FewTasks(pool), rows)) : 1)};
  const bool slides = SlidesAlongRow(geometry_);
  pool.ParallelFor(split.tasks(), [&](size_t task) {
    const auto [first_row, end_row, first, end] = split[task];
    for (size_t row = first_row; row < end_row; ++row) {
      slides ? RunRow(args, static_cast<int64_t>(row), first, end)
             : RunPixels(args, static_cast<int64_t>(row), first, end);
    }
  });
}

void DepthwiseKernel::RunRow(const ConvArgs& args, int64_t row, size_t first, size_t end) const {
  const ConvShape& s = args.shape;
  const ConvGeometry& g = geometry_;
  const int64_t image = row / s.out_h, top = row % s.out_h * g.stride_h - g.pad_top;
  const auto* x = static_cast<const uint8_t*>(args.x) + image * s.in_h * s.in_w * g.in_channels;
  DepthwiseRow out;
  const uint8_t* rows[3];
  for (int64_t i = 0; i < 3; ++i) {
    const int64_t y = top + i * g.dilation_h;
    const bool inside = i < g.kernel_h && y >= 0 && y < s.in_h;
    rows[i] = inside ? x + y * s.in_w * g.in_channels : pad_pixel_.data();
    out.steps[i] = inside ? static_cast<size_t>(g.in_channels) : 0;
  }
  out.pad = pad_;
  out.in_w = s.in_w;
  out.out_w = s.out_w;
  out.pad_left = g.pad_left;
  out.first_pixel = static_cast<size_t>(row * s.out_w);
  out.residual = static_cast<const uint8_t*>(args.residual);
  out.y = args.y;
  for (size_t b = first; b < end; ++b) {
    for (int i = 0; i < 3; ++i) out.rows[i] = rows[i] + blocks_[b].channel;
    (g.stride_w == 1 ? kernels_[b]->row_stride1 : kernels_[b]->row_stride2)(blocks_[b], out);
  }
}

void DepthwiseKernel::RunPixels(const ConvArgs& args, int64_t row, size_t first, size_t end) const {
  const ConvShape& s = args.shape;
  const ConvGeometry& g = geometry_;
  const int64_t plane = row / s.out_h, top = row % s.out_h * g.stride_h - g.pad_top;
  const int64_t front = plane % s.out_d * g.stride_d - g.pad_front;
  const auto* x =
      static_cast<const uint8_t*>(args.x) + plane / s.out_d * s.in_d * s.in_h * s.in_w * g.in_channels;
  // Where each tap lies relative to the window's corner. Taps that a quad has beyond the window read the
  // corner: their weight is 0.
  std::array<int64_t, kMaxTaps> behind, down, right, offset;
  for (size_t i = 0; i < taps_.size(); ++i) {
    const int64_t tap = std::max<int64_t>(taps_[i], 0);
    behind[i] = tap / g.kernel_w / g.kernel_h * g.dilation_d;
    down[i] = tap / g.kernel_w % g.kernel_h * g.dilation_h;
    right[i] = tap % g.kernel_w * g.dilation_w;
    offset[i] = ((behind[i] * s.in_h + down[i]) * s.in_w + right[i]) * g.in_channels;
  }
  const int64_t depth = (g.kernel_d - 1) * g.dilation_d;
  const int64_t height = (g.kernel_h - 1) * g.dilation_h, width = (g.kernel_w - 1) * g.dilation_w;
  const bool row_inside = front >= 0 && front + depth < s.in_d && top >= 0 && top + height < s.in_h;

  std::array<const uint8_t*, kMaxTaps> pointers;
  for (int64_t ox = 0; ox < s.out_w; ++ox) {
    const int64_t left = ox * g.stride_w - g.pad_left;
    if (row_inside && left >= 0 && left + width < s.in_w) {
      const uint8_t* corner = x + ((front * s.in_h + top) * s.in_w + left) * g.in_channels;
      for (size_t i = 0; i < taps_.size(); ++i) pointers[i] = corner + offset[i];
    } else {
      for (size_t i = 0; i < taps_.size(); ++i) {
        const int64_t iz = front + behind[i], iy = top + down[i], ix = left + right[i];
        const bool inside = iz >= 0 && iz < s.in_d && iy >= 0 && iy < s.in_h && ix >= 0 && ix < s.in_w;
        pointers[i] = inside ? x + ((iz * s.in_h + iy) * s.in_w + ix) * g.in_channels : pad_pixel_.data();
      }
    }
    for (size_t b = first; b < end; ++b) {
      kernels_[b]->pixel(blocks_[b], pointers.data(), static_cast<size_t>(row * s.out_w + ox),
                         static_cast<const uint8_t*>(args.residual), args.y);
    }
  }
}

template <const DepthwiseEngine* kEngine>
std::string Refuse(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  if (!g.IsDepthwise()) return "not depthwise (group == in_channels == out_channels > 1)";
  if (g.in_channels < kMinChannels) return "fewer than 16 channels";
  if (g.Taps() > kMaxTaps) return "more than 256 taps";
  if (spec.x.encoding == Encoding::kBipolar) return "bipolar activations";
  if (kEngine->products == DepthwiseProducts::kWide) return {};
  if (spec.weight_values.lo < -128 || spec.weight_values.hi > 127)
    return "weight minus zero point outside int8";
  return {};
}

template <const DepthwiseEngine* kEngine>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  const ConvGeometry& g = spec.geometry;
  const auto width = static_cast<int64_t>(kEngine->kernels[0][0]->channels);
  const int64_t blocks = (g.in_channels + width - 1) / width;
  return static_cast<double>(shape.out_d * shape.out_h * shape.out_w) *
         Cycles(g, blocks, kEngine->products == DepthwiseProducts::kWide);
}

template <const DepthwiseEngine* kEngine>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  return std::make_unique<DepthwiseKernel>(spec, *kEngine);
}

template <const DepthwiseEngine* kEngine>
constexpr KernelRow Row(const char* name, Isa isa, const char* note) {
  return {
      {name, "conv", "depthwise", isa, 8, 8, note}, Refuse<kEngine>, Cost<kEngine>, Create<kEngine>, true};
}

}  // namespace

std::span<const KernelRow> DepthwiseRows() {
  static const KernelRow rows[] = {
      Row<&kDepthwiseSse41>("depthwise_u8s16_c16_sse41", Isa::kSse41, "any weights: pmaddwd, 16 channels"),
      Row<&kDepthwiseAvx2>("depthwise_u8s16_c32_avx2", Isa::kAvx2, "any weights: vpmaddwd, 32 channels"),
      Row<&kDepthwiseAvxVnni>("depthwise_u8s8_c32_avxvnni", Isa::kAvxVnni,
                              "int8 weights: vpdpbusd, 32 channels"),
      Row<&kDepthwiseAvx512Wide>("depthwise_u8s16_c64_avx512vnni", Isa::kAvx512Vnni,
                                 "any weights: vpmaddwd, 64 channels"),
      Row<&kDepthwiseAvx512>("depthwise_u8s8_c64_avx512vnni", Isa::kAvx512Vnni,
                             "int8 weights: vpdpbusd, 64 channels"),
  };
  return rows;
}

}  // namespace lowbit
