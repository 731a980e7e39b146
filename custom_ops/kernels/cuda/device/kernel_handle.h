// A kernel as the CUDA runtime names it.
#pragma once

namespace lowbit::cuda {

struct KernelHandle {
  const void* function;
};

template <typename... Params>
KernelHandle HandleOf(void (*kernel)(Params...)) {
  return {reinterpret_cast<const void*>(kernel)};
}

}  // namespace lowbit::cuda
