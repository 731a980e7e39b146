// LowBitMatMul as its definition says: codes minus their zero points, sums of their products, the epilogue.
// Always built, and the kernel of machines that have no other; hence the copies of the operands, which make
// the innermost loop one over consecutive words.
#include <algorithm>
#include <vector>

#include "core/cpu/fed_matmul_kernel.h"
#include "core/epilogue.h"

namespace lowbit {
namespace {

// Columns of b that a task holds, and rows of a that it multiplies with them.
constexpr int64_t kColumns = 64, kRows = 256;

void Centre(const uint8_t* from, int64_t stride, int64_t count, bool is_signed, int32_t zero_point,
            int16_t* to) {
  for (int64_t i = 0; i < count; ++i, from += stride) {
    const int32_t code = is_signed ? static_cast<int8_t>(*from) : *from;
    to[i] = static_cast<int16_t>(code - zero_point);
  }
}

int32_t Dot(const int16_t* a, const int16_t* b, int64_t k) {
  int32_t sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += int32_t{a[i]} * b[i];
  return sum;
}

class Reference final : public FedMatmulKernel {
 public:
  explicit Reference(const FedMatmulSpec& spec) : spec_(spec), epilogue_(EpilogueOf(spec, 1)) {}

  std::string Name() const override { return "matmul_reference"; }

  void Run(const FedMatmulShape& s, const uint8_t* a, const uint8_t* b, void* y,
           ThreadPool& pool) const override {
    const int64_t column_tasks = (s.n + kColumns - 1) / kColumns, row_tasks = (s.m + kRows - 1) / kRows;
    const size_t tasks = s.batches.size() * static_cast<size_t>(column_tasks * row_tasks);
    pool.ParallelFor(tasks, [&](size_t task) {
      const int64_t index = static_cast<int64_t>(task);
      const int64_t batch = index / (column_tasks * row_tasks);
      const int64_t column = index % column_tasks * kColumns, row = index / column_tasks % row_tasks * kRows;
      const int64_t columns = std::min(kColumns, s.n - column), end = std::min(row + kRows, s.m);
      const auto [a_offset, b_offset] = s.batches[static_cast<size_t>(batch)];
      std::vector<int16_t> left(static_cast<size_t>(s.k)), right(static_cast<size_t>(s.k * columns));
      for (int64_t c = 0; c < columns; ++c) {
        Centre(b + b_offset + (column + c) * s.b_column, s.b_k, s.k, spec_.b_signed, spec_.b_zero_point,
               right.data() + c * s.k);
      }
      for (int64_t r = row; r < end; ++r) {
        Centre(a + a_offset + r * s.a_row, s.a_k, s.k, spec_.a_signed, spec_.a_zero_point, left.data());
        for (int64_t c = 0; c < columns; ++c) {
          const int32_t acc = Dot(left.data(), right.data() + c * s.k, s.k);
          Store(acc, y, (batch * s.m + r) * s.n + column + c);
        }
      }
    });
  }

 private:
  void Store(int32_t acc, void* y, int64_t index) const {
    if (spec_.quantizer.quantized) {
      static_cast<uint8_t*>(y)[index] = static_cast<uint8_t>(EpilogueCode(epilogue_, acc, 0, 0));
    } else {
      static_cast<float*>(y)[index] = EpilogueFloat(epilogue_, acc, 0, 0);
    }
  }

  const FedMatmulSpec spec_;
  const Epilogue epilogue_;
};

}  // namespace

std::unique_ptr<FedMatmulKernel> FedMatmulReference(const FedMatmulSpec& spec) {
  return std::make_unique<Reference>(spec);
}

}  // namespace lowbit
