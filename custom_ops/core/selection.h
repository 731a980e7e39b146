// What this build holds. A full build holds everything. A minimal one (LOWBIT_MINIMAL), for apps that ship a
// converted .ort model, has no tuning, no shape inference and no documentation of the ops, and of the ops and
// kernels those that required_operators.config names: cmake/Minimal.cmake writes them into
// lowbit_selection.h.
//
// What is left out by these constants is not referenced, so the linker leaves it out too.
#pragma once

#include <string_view>

#if LOWBIT_MINIMAL
#include "lowbit_selection.h"
#endif

namespace lowbit {

#if LOWBIT_MINIMAL

inline constexpr bool kMinimal = true;

// An op of the domain, such as "LowBitConv".
consteval bool HasOp(std::string_view name) {
  if (!kSelectsOps) return true;
  for (const std::string_view op : kSelectedOps) {
    if (op == name) return true;
  }
  return false;
}

// A family of kernels, by the name of its folder and file ("arm/winograd"), or a row of the kernel table by
// its own.
consteval bool HasKernels(std::string_view family) {
  for (const std::string_view left_out : kFamiliesLeftOut) {
    if (left_out == family) return false;
  }
  return true;
}

#else

inline constexpr bool kMinimal = false;
consteval bool HasOp(std::string_view) { return true; }
consteval bool HasKernels(std::string_view) { return true; }

#endif

// Text that only documentation reads.
consteval const char* Doc(const char* text) { return kMinimal ? "" : text; }

}  // namespace lowbit
