#include "kernels/cuda/emulator/products.h"

#include <array>
#include <bit>
#include <cstring>

#include "core/float_precision.h"
#include "kernels/cuda/emulator/shared_memory.h"

namespace lowbit::cuda::emulator {
namespace {

// A 32-byte row of a matrix in shared memory, by its descriptor.
void LoadRow(uint64_t descriptor, int row, uint8_t (&out)[kWarp]) {
  constexpr uint64_t kField = 0x3FFF;
  const auto field = [&](int bit) { return static_cast<int>(descriptor >> bit & kField) * kChunk; };
  const int leading = field(16), stride = field(32), layout = static_cast<int>(descriptor >> 62);
  const int place = field(0) - static_cast<int>(kWindowAddress % (1u << kDescriptorBits));
  const Block& block = *current->block;
  uint8_t* const first = block.window + place;
  constexpr int kSpans[] = {0, 128, 64, 32};
  const int span = kSpans[layout];
  for (int chunk = 0; chunk < kWarp / kChunk; ++chunk) {
    uint8_t* const plain = first + row / 8 * stride +
                           (span == 0 ? row % 8 * kChunk + chunk * leading : row % 8 * span + chunk * kChunk);
    const uint8_t* const from = Swizzled(plain, span);
    if (from < block.shared || from + kChunk > block.shared + block.shared_bytes)
      Fail("the matrix of a wgmma lies outside of dynamic shared memory");
    std::memcpy(out + chunk * kChunk, from, kChunk);
  }
}

template <typename A>
int SumOfProducts(const uint8_t (&a)[kWarp], const uint8_t (&b)[kWarp]) {
  int sum = 0;
  for (int k = 0; k < kWarp; ++k) sum += static_cast<int>(static_cast<A>(a[k])) * static_cast<int8_t>(b[k]);
  return sum;
}

int SumOfBits(const uint8_t (&a)[kWarp], const uint8_t (&b)[kWarp]) {
  int sum = 0;
  for (int k = 0; k < kWarp; ++k) sum += std::popcount(static_cast<unsigned>(a[k] & b[k]));
  return sum;
}

// Sums wrap, as the GPU's do.
void AddProducts(Elements of, const uint8_t (&a)[kWarp], const uint8_t (&b)[kWarp], int& sum) {
  const int products = of == Elements::kBits          ? SumOfBits(a, b)
                       : of == Elements::kSignedCodes ? SumOfProducts<int8_t>(a, b)
                                                      : SumOfProducts<uint8_t>(a, b);
  sum = static_cast<int>(static_cast<unsigned>(sum) + static_cast<unsigned>(products));
}

double ProductOfWords(bool halves, const uint8_t* a, const uint8_t* b) {
  if (!halves) {
    float x = 0, y = 0;
    std::memcpy(&x, a, sizeof x);
    std::memcpy(&y, b, sizeof y);
    return double{x} * y;
  }
  double sum = 0;
  for (int e = 0; e < 2; ++e) {
    uint16_t x = 0, y = 0;
    std::memcpy(&x, a + 2 * e, sizeof x);
    std::memcpy(&y, b + 2 * e, sizeof y);
    sum += double{FromHalf(x)} * FromHalf(y);
  }
  return sum;
}

void AddFloatProducts(bool halves, const uint8_t (&a)[kWarp], const uint8_t (&b)[kWarp], float& sum) {
  double exact = sum;
  for (int at = 0; at < kWarp; at += 4) exact += ProductOfWords(halves, a + at, b + at);
  sum = static_cast<float>(exact);
}

void MultiplyNow(const Product& p) {
  const int thread = current->number % 128, row = thread / kWarp * 16 + thread % kWarp / 4;
  uint8_t a[2][kWarp];
  for (int half = 0; half < 2; ++half) {
    if (p.has_rows) {
      std::memcpy(a[half], p.rows[half], kWarp);
    } else {
      LoadRow(p.a, row + 8 * half, a[half]);
    }
  }
  for (int column = 0; column < p.n / 4; ++column) {
    uint8_t b[kWarp];
    LoadRow(p.b, column / 2 * 8 + thread % 4 * 2 + column % 2, b);
    for (int half = 0; half < 2; ++half) {
      const auto add = [&](auto* sums, const auto& products) {
        auto& sum = sums[column / 2 * 4 + half * 2 + column % 2];
        if (!p.adds) sum = 0;
        products(sum);
      };
      if (p.of == Elements::kHalves || p.of == Elements::kTf32) {
        add(static_cast<float*>(p.sums),
            [&](float& sum) { AddFloatProducts(p.of == Elements::kHalves, a[half], b, sum); });
      } else {
        add(static_cast<int*>(p.sums), [&](int& sum) { AddProducts(p.of, a[half], b, sum); });
      }
    }
  }
}

// The i-th of a thread's two columns of b[8 x 32], of which each thread of the warp has shown two words.
template <typename Shown>
void GatherColumn(const Shown& shown, int i, uint8_t (&column)[kWarp]) {
  const int first = (current->number % 4 * 2 + i) * 4;
  for (int lane = 0; lane < 4; ++lane) {
    const std::array<unsigned, 2> words = shown[first + lane];
    std::memcpy(&column[lane * 4], &words[0], 4);
    std::memcpy(&column[16 + lane * 4], &words[1], 4);
  }
}

// add(row, column, sum) for each of a thread's sums.
template <typename Sum, typename Add>
void ForEachSum(Sum (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const Add& add) {
  uint8_t rows[2][kWarp], column[kWarp];
  GatherRows(a, rows);
  const auto shown = Exchange(std::array{b0, b1});
  for (int i = 0; i < 2; ++i) {
    GatherColumn(shown, i, column);
    for (int half = 0; half < 2; ++half) add(rows[half], column, c[half * 2 + i]);
  }
}

}  // namespace

void Multiply(const Product& product) {
  Issue(current->products, [product] { MultiplyNow(product); });
}

void GatherRows(const unsigned (&a)[4], uint8_t (&rows)[2][kWarp]) {
  const auto shown = Exchange(std::array{a[0], a[1], a[2], a[3]});
  const int first = current->number % kWarp / 4 * 4;
  for (int lane = 0; lane < 4; ++lane) {
    const std::array<unsigned, 4> of = shown[first + lane];
    for (size_t i = 0; i < of.size(); ++i) std::memcpy(&rows[i % 2][i / 2 * 16 + lane * 4], &of[i], 4);
  }
}

void MultiplyFragments(bool is_signed, int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ForEachSum(c, a, b0, b1, [&](const uint8_t (&row)[kWarp], const uint8_t (&column)[kWarp], int& sum) {
    AddProducts(CodesOf(is_signed), row, column, sum);
  });
}

void MultiplyFloatFragments(bool halves, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ForEachSum(c, a, b0, b1, [&](const uint8_t (&row)[kWarp], const uint8_t (&column)[kWarp], float& sum) {
    AddFloatProducts(halves, row, column, sum);
  });
}

}  // namespace lowbit::cuda::emulator
