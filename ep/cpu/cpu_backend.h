// Regions on the CPU: the operators of the core, one after the other, in memory that was planned for all of
// them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "ep/region/backend.h"

namespace lowbit::ep {

struct CpuOptions {
  bool reference = false;  // the plain reference kernels
  bool tuned = true;       // kernels that were measured, where there are any
  int threads = 0;         // that run a node; 0: not known
  // Hears what the user should know though nothing failed; without it, stderr does.
  std::function<void(const std::string&)> warn;
  // Tensors of which a thread's share exceeds this are not made as a whole where they need not (ep/cpu/bands.h). L2 is
  // 2 MB on a Xeon with AMX, and there are weights to read beside.
  size_t cached_bytes = size_t{1} << 20;
};

std::shared_ptr<Backend> CreateCpuBackend(CpuOptions options);

}  // namespace lowbit::ep
