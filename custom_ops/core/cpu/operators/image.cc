// LowBitImage: a picture of any size, resized and cut to shape, to codes.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"
#include "core/plan_cache.h"

namespace lowbit {
namespace {

constexpr int64_t kTableSize = 256;

// From a row of RGB to its luminance in 8 bits, ITU-R 601 with 16 bits behind the point.
void MakeGray(const uint8_t* x, int64_t pixels, uint8_t* y) {
  for (int64_t i = 0; i < pixels; ++i, x += 3) {
    y[i] = static_cast<uint8_t>((x[0] * 19595 + x[1] * 38470 + x[2] * 7471 + (1 << 15)) >> 16);
  }
}

// All of a run that the size of the pictures alone decides.
struct Job {
  Job(const ImageNode& node, int64_t height, int64_t width)
      : placement(node.PlacementOf({height, width})),
        top(std::max<int64_t>(placement.top, 0)),
        left(std::max<int64_t>(placement.left, 0)),
        rows(std::min(placement.output.height, placement.top + placement.resized.height) - top),
        columns(std::min(placement.output.width, placement.left + placement.resized.width) - left),
        across(node.TapsOf(width, placement.resized.width, left - placement.left, columns)),
        down(node.TapsOf(height, placement.resized.height, top - placement.top, rows)),
        first_line(down.first.front()),
        lines(down.first.back() + down.count.back() - first_line) {}

  PixelTaps Across() const {
    return {across.first.data(), across.count.data(), across.weights.data(), across.most};
  }

  ImageNode::Placement placement;
  int64_t top, left, rows, columns;  // where the picture lies in the output
  ImageNode::Taps across, down;
  int64_t first_line, lines;  // the rows of the picture that are read
};

class ImageOperator final : public Operator {
 public:
  ImageOperator(ImageNode node, const OperatorOptions& options)
      : node_(std::move(node)), kernels_(SelectElementwise(options, true)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    if (BoundedCount(shape) == 0) return;
    const std::vector<int64_t>& in = inputs[0]->shape;
    const std::shared_ptr<const Job> planned =
        jobs_.Get(std::pair(in[1], in[2]), [&] { return Job(node_, in[1], in[2]); });
    const Job& job = *planned;
    const int64_t width = in[2], channels = std::min(in[3], node_.Channels());  // that are resized
    const bool makes_gray = channels < in[3], rows_first = job.placement.RowsFirst();
    // Gray or narrow; colors that are resized down first need neither.
    const int64_t line = (rows_first ? width : job.columns) * channels;
    std::unique_ptr<uint8_t[]> made;
    if (makes_gray || !rows_first) {
      made = std::make_unique_for_overwrite<uint8_t[]>(
          static_cast<size_t>(BoundedCount(std::array{job.lines, line})));
    }
    for (int64_t n = 0; n < in[0]; ++n) {
      const uint8_t* const x = FedBytes(inputs, 0) + (n * in[1] + job.first_line) * width * in[3];
      if (made != nullptr) {
        ParallelRanges(pool, job.lines, kWork * width * in[3], [&](int64_t begin, int64_t end) {
          std::vector<uint8_t> gray(makes_gray && !rows_first ? static_cast<size_t>(width) : 0);
          for (int64_t row = begin; row < end; ++row) {
            const uint8_t* from = x + row * width * in[3];
            uint8_t* const to = made.get() + row * line;
            if (makes_gray) {
              uint8_t* const target = rows_first ? to : gray.data();
              MakeGray(from, width, target);
              from = target;
            }
            if (!rows_first) kernels_.resample_row(job.Across(), from, channels, job.columns, to);
          }
        });
      }
      uint8_t* const out = static_cast<uint8_t*>(y) + n * shape[1] * shape[2] * shape[3];
      const int64_t cost =
          kWork * line * std::max<int64_t>(1, job.lines / job.rows) + 2 * shape[2] * shape[3];
      ParallelRanges(pool, shape[1], cost, [&](int64_t begin, int64_t end) {
        MakeRows(job, made != nullptr ? made.get() : x, line, channels, begin, end, out);
      });
    }
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("image", kernels_); }

 private:
  static constexpr int64_t kWork = 4;  // of a weighted byte, in bytes moved

  // Rows `begin` to `end` of the output, of lines of `line` bytes.
  void MakeRows(const Job& job, const uint8_t* x, int64_t line, int64_t channels, int64_t begin, int64_t end,
                uint8_t* y) const {
    const int64_t width = job.placement.output.width;
    const bool rows_first = job.placement.RowsFirst();
    std::vector<uint8_t> blended(static_cast<size_t>(line));
    std::vector<uint8_t> narrow(rows_first ? static_cast<size_t>(job.columns * channels) : 0);
    std::vector<const uint8_t*> rows(static_cast<size_t>(job.down.most));
    uint8_t* out = y + begin * width * node_.Channels();
    for (int64_t row = begin; row < end; ++row, out += width * node_.Channels()) {
      const int64_t o = row - job.top;
      if (o < 0 || o >= job.rows) {
        Fill(out, width);
        continue;
      }
      const size_t at = static_cast<size_t>(o);
      for (int64_t k = 0; k < job.down.count[at]; ++k) {
        rows[static_cast<size_t>(k)] = x + (job.down.first[at] - job.first_line + k) * line;
      }
      kernels_.resample_column(rows.data(), &job.down.weights[at * static_cast<size_t>(job.down.most)],
                               job.down.count[at], line, blended.data());
      if (rows_first) {
        kernels_.resample_row(job.Across(), blended.data(), channels, job.columns, narrow.data());
      }
      Fill(out, job.left);
      ToCodes(rows_first ? narrow.data() : blended.data(), channels, job.columns,
              out + job.left * node_.Channels());
      Fill(out + (job.left + job.columns) * node_.Channels(), width - job.left - job.columns);
    }
  }

  void Fill(uint8_t* y, int64_t pixels) const {
    for (int64_t i = 0; i < pixels; ++i) {
      for (int64_t c = 0; c < node_.Channels(); ++c) *y++ = Code(c, node_.fill);
    }
  }

  void ToCodes(const uint8_t* x, int64_t channels, int64_t pixels, uint8_t* y) const {
    if (node_.Channels() == 1) {
      kernels_.lookup(node_.table.data(), x, y, pixels);
      return;
    }
    // A picture of one channel has it three times.
    const bool is_bgr = node_.order == ImageNode::Order::kBgr;
    const int64_t first = channels == 3 && is_bgr ? 2 : 0, middle = channels == 3 ? 1 : 0;
    const int64_t last = channels == 3 && !is_bgr ? 2 : 0;
    for (int64_t i = 0; i < pixels; ++i, x += channels, y += 3) {
      y[0] = Code(0, x[first]);
      y[1] = Code(1, x[middle]);
      y[2] = Code(2, x[last]);
    }
  }

  uint8_t Code(int64_t channel, uint8_t pixel) const {
    return node_.table[static_cast<size_t>(channel * kTableSize + pixel)];
  }

  ImageNode node_;
  const ElementwiseKernels& kernels_;
  mutable PlanCache<std::pair<int64_t, int64_t>, Job> jobs_;  // by height and width
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(ImageNode node, const OperatorOptions& options) {
  return std::make_unique<ImageOperator>(std::move(node), options);
}

}  // namespace lowbit
