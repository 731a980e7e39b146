// Numbers that become template arguments.
#pragma once

#include <type_traits>
#include <variant>

#include "core/status.h"

namespace lowbit::cuda {

// `value`, one of kValues, as a type: std::visit([&](auto unit) { .. Kernel<unit> .. }, OneOf<16, 4, 1>(n)).
// Throws Error where it is none of them.
template <auto... kValues, typename T>
std::variant<std::integral_constant<T, kValues>...> OneOf(T value) {
  std::variant<std::integral_constant<T, kValues>...> out;
  const bool found = ((value == kValues && (out = std::integral_constant<T, kValues>{}, true)) || ...);
  Require(found, "there is no instance of this kernel for one of its arguments");
  return out;
}
inline std::variant<std::false_type, std::true_type> OneOf(bool value) { return OneOf<false, true>(value); }

}  // namespace lowbit::cuda
