// Numbers that become template arguments.
#pragma once

#include <type_traits>
#include <variant>

namespace lowbit::cuda {

// `value`, one of kValues, as a type: std::visit([&](auto unit) { .. Kernel<unit> .. }, OneOf<16, 4, 1>(n)).
template <auto... kValues, typename T>
std::variant<std::integral_constant<T, kValues>...> OneOf(T value) {
  std::variant<std::integral_constant<T, kValues>...> out;
  ((value == kValues ? static_cast<void>(out = std::integral_constant<T, kValues>{}) : void()), ...);
  return out;
}
inline std::variant<std::false_type, std::true_type> OneOf(bool value) { return OneOf<false, true>(value); }

}  // namespace lowbit::cuda
