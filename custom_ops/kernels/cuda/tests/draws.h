// Random draws of the tests. Repeatable: equal seeds give equal draws.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>

namespace lowbit::cuda {

class Draws {
 public:
  explicit Draws(uint32_t seed) : random_(seed) {}

  int64_t Int(int64_t lo, int64_t hi) { return std::uniform_int_distribution<int64_t>(lo, hi)(random_); }
  bool Coin(double p = 0.5) { return std::bernoulli_distribution(p)(random_); }
  float Real(float lo, float hi) { return std::uniform_real_distribution<float>(lo, hi)(random_); }
  template <typename T>
  T Of(std::initializer_list<T> values) {
    return *(values.begin() + Int(0, static_cast<int64_t>(values.size()) - 1));
  }

 protected:
  static constexpr uint32_t kRare = 13;  // of 256: one in twenty

  std::mt19937 random_;
};

}  // namespace lowbit::cuda
