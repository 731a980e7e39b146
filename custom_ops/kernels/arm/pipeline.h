// In what order the cores of this machine work: the same scheme can be the best of one kind and the worst of
// the other. Cost functions ask; results never depend on it.
#pragma once

#include <cstdint>

namespace lowbit {

enum class Pipeline : uint8_t {
  // Cortex-A53, A55, A510: two instructions a cycle in program order, one of them on 128-bit vectors.
  // Products in 16-bit lanes are as fast as widening ones, and loads and replications cost what they
  // displace.
  kInOrder,
  // Cortex-A72, A76, Neoverse and all others: loads are free beside products. On A72 a widening product takes
  // one cycle, MLA on a 128-bit vector two.
  kOutOfOrder,
};

// kOutOfOrder where there are cores of both kinds, because those do most of the work, and where the system
// does not tell.
Pipeline MachinePipeline();

}  // namespace lowbit
