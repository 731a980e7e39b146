// The emulated GPU's ../../../../../device/kernel_handle.h.
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lowbit::cuda {

struct KernelHandle {
  // Given pointers to arguments, which it copies: what a thread does.
  std::function<std::function<void()>(void** args)> bound_to;
};

template <typename... Params>
KernelHandle HandleOf(void (*kernel)(Params...)) {
  return {[kernel](void** args) {
    const auto bind = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      const std::tuple<std::decay_t<Params>...> copies(
          *static_cast<const std::decay_t<Params>*>(args[kIndex])...);
      return [kernel, copies] { std::apply(kernel, copies); };
    };
    return std::function<void()>(bind(std::index_sequence_for<Params...>()));
  }};
}

}  // namespace lowbit::cuda
