// LowBitSoftmax.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

// Rows up to this length keep their table entries until they are scaled. Longer ones scale the 256 entries of
// the table instead, and become a lookup.
constexpr int64_t kKeptEntries = 1024;
// Neighbours of an axis that is not the last one, which are computed together.
constexpr int64_t kColumns = 64;

class SoftmaxOperator final : public Operator {
 public:
  SoftmaxOperator(SoftmaxNode node, const OperatorOptions& options)
      : node_(std::move(node)), kernels_(SelectElementwise(options, FastIsExact(node_.quantizer, 1.0, 1.0))) {
    spec_.quantizer = node_.quantizer;
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    if (BoundedCount(shape) == 0) return;
    const size_t axis = node_.Axis(shape.size());
    const int64_t outer = BoundedCount(std::span(shape).first(axis)), length = shape[axis];
    const int64_t inner = BoundedCount(std::span(shape).subspan(axis + 1));
    const uint8_t* x = FedBytes(inputs, 0);
    uint8_t* out = static_cast<uint8_t*>(y);
    if (inner == 1) {
      ParallelRanges(pool, outer, kWork * length, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) Row(x + row * length, length, out + row * length);
      });
      return;
    }
    const int64_t blocks = (inner + kColumns - 1) / kColumns;
    ParallelRanges(pool, outer * blocks, kWork * length * kColumns, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block % blocks * kColumns, corner = block / blocks * length * inner + first;
        Columns(x + corner, length, inner, std::min(kColumns, inner - first), out + corner);
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("softmax", kernels_); }

 private:
  static constexpr int64_t kWork = 6;  // of one code, in bytes moved

  void Row(const uint8_t* x, int64_t length, uint8_t* y) const {
    // With the top bit flipped, the bytes of int8 codes are in order.
    const uint8_t flip = node_.x_signed ? 0x80 : 0;
    uint8_t most = 0;
    for (int64_t i = 0; i < length; ++i) most = std::max(most, static_cast<uint8_t>(x[i] ^ flip));
    const int32_t* table = node_.table.data();
    const auto entry = [&](int64_t i) { return table[most - (x[i] ^ flip)]; };
    int64_t sum = 0;
    if (length <= kKeptEntries) {
      std::array<int32_t, kKeptEntries> entries;
      for (int64_t i = 0; i < length; ++i) sum += entries[static_cast<size_t>(i)] = entry(i);
      kernels_.scale_sums(spec_, entries.data(), Multiplier(sum), y, length);
      return;
    }
    for (int64_t i = 0; i < length; ++i) sum += entry(i);
    std::array<uint8_t, 256> by_distance, by_code = {};
    kernels_.scale_sums(spec_, table, Multiplier(sum), by_distance.data(), 256);
    for (size_t distance = 0; distance <= most; ++distance) {
      by_code[(most - distance) ^ flip] = by_distance[distance];
    }
    kernels_.lookup(by_code.data(), x, y, length);
  }

  // `count` columns, at most kColumns, of `length` codes that lie `stride` apart.
  void Columns(const uint8_t* x, int64_t length, int64_t stride, int64_t count, uint8_t* y) const {
    const uint8_t flip = node_.x_signed ? 0x80 : 0;
    const int32_t* table = node_.table.data();
    std::array<uint8_t, kColumns> most = {};
    std::array<int64_t, kColumns> sums = {};
    std::array<float, kColumns> multipliers;
    std::array<float, kColumns + kBlendPadding> shares;
    const auto for_codes = [&](const auto& see) {
      for (int64_t i = 0; i < length; ++i) {
        const uint8_t* row = x + i * stride;
        for (size_t c = 0; c < static_cast<size_t>(count); ++c) see(c, static_cast<uint8_t>(row[c] ^ flip));
      }
    };
    for_codes([&](size_t c, uint8_t code) { most[c] = std::max(most[c], code); });
    for_codes([&](size_t c, uint8_t code) { sums[c] += table[most[c] - code]; });
    for (size_t c = 0; c < static_cast<size_t>(count); ++c) multipliers[c] = Multiplier(sums[c]);
    for (int64_t i = 0; i < length; ++i) {
      const uint8_t* row = x + i * stride;
      for (size_t c = 0; c < static_cast<size_t>(count); ++c) {
        const int32_t entry = table[most[c] - (row[c] ^ flip)];
        shares[c] = static_cast<float>(entry) * multipliers[c];
      }
      // Multiplying by one rounds nothing.
      kernels_.scale_floats(node_.quantizer, shares.data(), 1.0f, count, y + i * stride);
    }
  }

  float Multiplier(int64_t sum) const { return 1.0f / (static_cast<float>(sum) * node_.quantizer.scale); }

  SoftmaxNode node_;
  GlobalAverageSpec spec_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(SoftmaxNode node, const OperatorOptions& options) {
  return std::make_unique<SoftmaxOperator>(std::move(node), options);
}

}  // namespace lowbit
