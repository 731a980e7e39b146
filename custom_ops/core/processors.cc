#include "core/processors.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <thread>

namespace lowbit {

size_t UsableProcessors() {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  // Refused where the machine has more processors than the set.
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<size_t>(std::max(CPU_COUNT(&set), 1));
#endif
  return std::max(std::thread::hardware_concurrency(), 1u);
}

}  // namespace lowbit
