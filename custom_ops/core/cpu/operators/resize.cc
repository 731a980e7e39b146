// LowBitResize.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

// One pixel per offset, one after the other. Copies of a size that the compiler knows are a load and a store.
template <int kChannels>
void CopySmallPixels(const uint8_t* x, const std::vector<int64_t>& offsets, uint8_t* out) {
  for (const int64_t offset : offsets) {
    std::memcpy(out, x + offset, kChannels);
    out += kChannels;
  }
}

void CopyPixels(const uint8_t* x, const std::vector<int64_t>& offsets, int64_t channels, uint8_t* out) {
  switch (channels) {
    case 1:
      return CopySmallPixels<1>(x, offsets, out);
    case 2:
      return CopySmallPixels<2>(x, offsets, out);
    case 3:
      return CopySmallPixels<3>(x, offsets, out);
    case 4:
      return CopySmallPixels<4>(x, offsets, out);
    case 8:
      return CopySmallPixels<8>(x, offsets, out);
    case 16:
      return CopySmallPixels<16>(x, offsets, out);
    case 32:
      return CopySmallPixels<32>(x, offsets, out);
    default:
      for (const int64_t offset : offsets) {
        std::memcpy(out, x + offset, static_cast<size_t>(channels));
        out += channels;
      }
  }
}

// Nearest neighbour: codes are copied.
class NearestOperator final : public Operator {
 public:
  explicit NearestOperator(ResizeNode node) : node_(std::move(node)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t>& in = inputs[0]->shape;
    const std::vector<int64_t> shape = OutputShape(inputs);
    const int64_t channels = shape.back();
    if (BoundedCount(shape) == 0) return;

    // Byte offset of the source per output index, one list per spatial dim.
    std::vector<std::vector<int64_t>> offsets(node_.Spatial());
    int64_t stride = channels;
    for (size_t i = node_.Spatial(); i-- > 0;) {
      offsets[i] = node_.SourceIndices(i, in[i + 1], shape[i + 1]);
      for (int64_t& offset : offsets[i]) offset *= stride;
      stride *= in[i + 1];
    }

    // A row is one run of output pixels along the last spatial dim.
    const std::vector<int64_t>& columns = offsets.back();
    const int64_t width = static_cast<int64_t>(columns.size());
    const int64_t rows = BoundedCount(std::span(shape).first(node_.Spatial()));
    ParallelRanges(pool, rows, 2 * width * channels, [&](int64_t begin, int64_t end) {
      const uint8_t* before = nullptr;  // the source of the row before, if it is of this range
      for (int64_t row = begin; row < end; ++row) {
        int64_t rest = row, offset = 0;
        for (size_t i = node_.Spatial() - 1; i-- > 0;) {
          const int64_t size = static_cast<int64_t>(offsets[i].size());
          offset += offsets[i][static_cast<size_t>(rest % size)];
          rest /= size;
        }
        const uint8_t* x = FedBytes(inputs, 0) + rest * stride + offset;
        uint8_t* out = static_cast<uint8_t*>(y) + row * width * channels;
        if (x == before) {  // an enlarged image has every row several times
          std::memcpy(out, out - width * channels, static_cast<size_t>(width * channels));
        } else {
          CopyPixels(x, columns, channels, out);
        }
        before = x;
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("resize", ElementwiseReference()); }

 private:
  ResizeNode node_;
};

// A sum over taps along every dim. The dims but the last are blended row by row, as far as a block of output
// columns reads them; then the block's pixels, and their rounding.
class BlendOperator final : public Operator {
 public:
  BlendOperator(ResizeNode node, const OperatorOptions& options)
      : node_(std::move(node)), options_(options) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t>& in = inputs[0]->shape;
    const std::vector<int64_t> shape = OutputShape(inputs);
    if (BoundedCount(shape) == 0) return;
    const Job job(TapsOf(in, shape), in, shape, FedBytes(inputs, 0));
    const ElementwiseKernels& kernels = Kernels(job.taps);
    const size_t spatial = node_.Spatial();
    const int64_t blocks = static_cast<int64_t>(job.blocks.size());
    const int64_t rows = BoundedCount(std::span(shape).first(spatial));
    ParallelRanges(pool, rows * blocks, kWork * job.Width(), [&](int64_t begin, int64_t end) {
      Scratch scratch(job);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / blocks;
        std::array<int64_t, 2> place = {};  // of the row, along the spatial dims but the last
        int64_t rest = row;
        for (size_t i = spatial - 1; i-- > 0;) {
          place[i] = rest % shape[i + 1];
          rest /= shape[i + 1];
        }
        const Columns& block = job.blocks[static_cast<size_t>(unit % blocks)];
        Block(job, kernels, rest * job.strides[0] * in[1], place, block, scratch,
              static_cast<uint8_t*>(y) + (row * shape[spatial] + block.first) * job.channels);
      }
    });
  }
  OperatorPlan Plan(FedTensors inputs) const override {
    return ElementwisePlan("resize", Kernels(TapsOf(inputs[0]->shape, OutputShape(inputs))));
  }

 private:
  static constexpr int64_t kWork = 8;           // of one output code, in bytes moved
  static constexpr double kRounding = 1.00001;  // beyond what roundings of one dim can add

  // Output columns that are computed together, and the input columns that they read.
  struct Columns {
    int64_t first, count, low, inputs;
  };
  struct Job {
    // Few enough columns that what lies between stays in the first-level cache.
    static constexpr int64_t kBlockFloats = 4096;

    Job(std::vector<ResizeNode::Taps> all, const std::vector<int64_t>& in, const std::vector<int64_t>& out,
        const uint8_t* codes)
        : x(codes), channels(out.back()), taps(std::move(all)), strides(taps.size(), channels) {
      const size_t last = taps.size() - 1;
      for (size_t i = last; i-- > 0;) strides[i] = strides[i + 1] * in[i + 2];
      const int64_t width = out[last + 1], shrink = std::max<int64_t>(1, in[last + 1] / width);
      const int64_t columns =
          std::clamp<int64_t>(kBlockFloats / std::max<int64_t>(1, channels * shrink), 1, width);
      const auto at = [&](int64_t column) { return taps[last].indices.begin() + column * taps[last].count; };
      for (int64_t first = 0; first < width; first += columns) {
        const int64_t count = std::min(columns, width - first);
        const auto [low, high] = std::minmax_element(at(first), at(first + count));
        blocks.push_back({first, count, *low, *high - *low + 1});
        most_inputs = std::max(most_inputs, blocks.back().inputs);
        std::transform(at(first), at(first + count), std::back_inserter(places),
                       [&, from = *low](int64_t index) { return (index - from) * channels; });
      }
    }
    int64_t Width() const { return blocks.front().count * channels; }

    const uint8_t* x;
    int64_t channels;
    std::vector<ResizeNode::Taps> taps;
    std::vector<int64_t> strides;  // of the spatial dims of x, in codes
    std::vector<Columns> blocks;
    std::vector<int64_t> places;  // of the last dim's taps, in the floats that their block reads
    int64_t most_inputs = 0;
  };
  // Rows of floats: the sums of a block's pixels, what they are made of, and with three dims what that is
  // made of.
  class Scratch {
   public:
    explicit Scratch(const Job& job)
        : row_(std::max(job.most_inputs * job.channels, job.Width()) + kBlendPadding),
          floats_(std::make_unique_for_overwrite<float[]>(
              static_cast<size_t>(row_ * (job.taps.size() > 2 ? 6 : 2)))) {}
    float* Sums() { return floats_.get(); }
    float* Row(int64_t i) { return floats_.get() + (i + 1) * row_; }

   private:
    int64_t row_;
    std::unique_ptr<float[]> floats_;
  };

  std::vector<ResizeNode::Taps> TapsOf(const std::vector<int64_t>& in,
                                       const std::vector<int64_t>& out) const {
    std::vector<ResizeNode::Taps> all;
    all.reserve(node_.Spatial());
    for (size_t i = 0; i < node_.Spatial(); ++i) {
      all.push_back(WithoutIdleTaps(node_.TapsOf(i, in[i + 1], out[i + 1])));
    }
    return all;
  }

  // A dim that keeps its size: a sum of which one number has the weight 1, all others 0, is that number.
  static ResizeNode::Taps WithoutIdleTaps(ResizeNode::Taps taps) {
    const size_t count = static_cast<size_t>(taps.count), outputs = taps.indices.size() / count;
    const size_t kept = taps.count == 4 ? 1 : 0;  // where the tap lies that floor(p) names
    for (size_t i = 0; i < taps.weights.size(); ++i) {
      if (taps.weights[i] != (i % count == kept ? 1.0f : 0.0f)) return taps;
    }
    ResizeNode::Taps one;
    for (size_t o = 0; o < outputs; ++o) one.indices.push_back(taps.indices[o * count + kept]);
    one.weights.assign(outputs, 1.0f);
    return one;
  }

  // The fast kernels convert before they clip: no sum may leave the range in which that is exact.
  const ElementwiseKernels& Kernels(const std::vector<ResizeNode::Taps>& all) const {
    double most = 256.0 * static_cast<double>(node_.multiplier);
    for (const ResizeNode::Taps& taps : all) {
      const size_t count = static_cast<size_t>(taps.count);
      double largest = 0;
      for (size_t o = 0; o < taps.weights.size(); o += count) {
        double sum = 0;
        for (size_t k = 0; k < count; ++k) sum += std::fabs(static_cast<double>(taps.weights[o + k]));
        if (std::isnan(sum)) return ElementwiseReference();
        largest = std::max(largest, sum);
      }
      most *= kRounding * largest;
    }
    return SelectElementwise(options_, FastIsExact(Quantizer{}, most, 1.0));
  }

  void Block(const Job& job, const ElementwiseKernels& kernels, int64_t image,
             const std::array<int64_t, 2>& place, const Columns& block, Scratch& scratch, uint8_t* y) const {
    const ResizeNode::Taps& last = job.taps.back();
    const float* row = Blend(job, kernels, image + block.low * job.channels, place, job.taps.size() - 1,
                             block.inputs * job.channels, scratch, 0);
    const int64_t first = block.first * last.count;
    kernels.blend_pixels(row, job.places.data() + first, last.weights.data() + first, last.count, block.count,
                         job.channels, scratch.Sums());
    kernels.scale_floats(node_.quantizer, scratch.Sums(), node_.multiplier, block.count * job.channels, y);
  }

  // `count` floats of a row, blended along the first `dims` spatial dims; they lie in row `to` of the
  // scratch memory.
  const float* Blend(const Job& job, const ElementwiseKernels& kernels, int64_t origin,
                     const std::array<int64_t, 2>& place, size_t dims, int64_t count, Scratch& scratch,
                     int64_t to) const {
    static constexpr float kOne = 1.0f;
    float* out = scratch.Row(to);
    if (dims == 0) {
      const uint8_t* row = job.x + origin;
      kernels.blend_codes(node_.is_signed, node_.x_zero_point, &row, &kOne, 1, count, out);
      return out;
    }
    const ResizeNode::Taps& taps = job.taps[dims - 1];
    const int64_t from = place[dims - 1] * taps.count;
    const float* weights = taps.weights.data() + from;
    std::array<const uint8_t*, 4> codes = {};
    std::array<const float*, 4> rows = {};
    for (int k = 0; k < taps.count; ++k) {
      const int64_t start = origin + taps.indices[from + k] * job.strides[dims - 1];
      if (dims == 1) {
        codes[k] = job.x + start;
      } else {
        rows[k] = Blend(job, kernels, start, place, dims - 1, count, scratch, to + 1 + k);
      }
    }
    if (dims == 1) {
      kernels.blend_codes(node_.is_signed, node_.x_zero_point, codes.data(), weights, taps.count, count, out);
    } else {
      kernels.blend_rows(rows.data(), weights, taps.count, count, out);
    }
    return out;
  }

  ResizeNode node_;
  OperatorOptions options_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(ResizeNode node, const OperatorOptions& options) {
  if (node.mode != ResizeNode::Mode::kNearest) {
    return std::make_unique<BlendOperator>(std::move(node), options);
  }
  return std::make_unique<NearestOperator>(std::move(node));  // one kernel serves every level
}

}  // namespace lowbit
