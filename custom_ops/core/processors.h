// The processors of this machine.
#pragma once

#include <cstddef>

namespace lowbit {

// How many processors this process may run on, which is fewer than the machine has where it was told so (taskset,
// containers). Asks the system; at least 1.
size_t UsableProcessors();

}  // namespace lowbit
