// The functions that a float tail may hold, in float32 operations that every processor has, each rounded once:
// the same numbers from numpy (converter/lowbit/ops/functions.py), vectors and GPUs. docs/numerics.md has them.
//
// exp(t) = 2^n exp(r), n = rint(t log2(e)), r = t - n ln(2) in two parts, of which n times the first is exact;
// exp(r) is the polynomial of Moshier's Cephes library (expf). |t| stays within kMostExponent, where 2^n exp(r)
// and 1 + exp(t) are normal numbers.
#pragma once

namespace lowbit {

inline constexpr float kMostExponent = 86.0f, kLog2e = 1.44269504088896341f, kLn2High = 0.693359375f,
                       kLn2Low = -2.12194440e-4f;
inline constexpr float kExp5 = 1.9875691500e-4f, kExp4 = 1.3981999507e-3f, kExp3 = 8.3334519073e-3f,
                       kExp2 = 4.1665795894e-2f, kExp1 = 1.6666665459e-1f, kExp0 = 5.0000001201e-1f;
// 1.5 * 2^23: what rounds to whole numbers, which then are the low bits.
inline constexpr float kRoundsToWhole = 12582912.0f;
inline constexpr float kSixth = 1.0f / 6.0f;

// 1 / (1 + exp(-v)); NaN of NaN. S: the operations on S::F, as kernels/*/simd_<isa>.h has them. `v` comes last
// in MinF and MaxF, which return the second operand where one is NaN.
template <class S>
inline __attribute__((always_inline)) auto Sigmoid(typename S::F v) {
  const auto set = [](float constant) __attribute__((always_inline)) { return S::SetF(constant); };
  const auto t = S::MinF(set(kMostExponent), S::MaxF(set(-kMostExponent), S::MulF(v, set(-1.0f))));
  const auto power = S::AddF(S::MulF(t, set(kLog2e)), set(kRoundsToWhole));
  const auto n = S::AddF(power, set(-kRoundsToWhole));
  const auto r = S::AddF(S::AddF(t, S::MulF(n, set(-kLn2High))), S::MulF(n, set(-kLn2Low)));
  auto p = S::AddF(S::MulF(set(kExp5), r), set(kExp4));
  p = S::AddF(S::MulF(p, r), set(kExp3));
  p = S::AddF(S::MulF(p, r), set(kExp2));
  p = S::AddF(S::MulF(p, r), set(kExp1));
  p = S::AddF(S::MulF(p, r), set(kExp0));
  p = S::AddF(S::AddF(S::MulF(p, S::MulF(r, r)), r), set(1.0f));
  return S::DivF(set(1.0f), S::AddF(set(1.0f), S::TimesPowerOf2(p, power)));
}

template <class S>
inline __attribute__((always_inline)) auto Silu(typename S::F v) {
  return S::MulF(v, Sigmoid<S>(v));
}

// v * clip(v / 6 + 1 / 2, 0, 1), the division a multiplication by kSixth, as ONNX defines HardSwish.
template <class S>
inline __attribute__((always_inline)) auto HardSwish(typename S::F v) {
  const auto half = S::AddF(S::MulF(v, S::SetF(kSixth)), S::SetF(0.5f));
  return S::MulF(v, S::MinF(S::SetF(1.0f), S::MaxF(S::SetF(0.0f), half)));
}

}  // namespace lowbit
