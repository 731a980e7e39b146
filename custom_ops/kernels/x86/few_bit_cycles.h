// What the estimates of the kernels of few bits, made on Zen 5, are on the machine at hand.
#pragma once

#include "core/cpu/isa.h"

namespace lowbit {

// Zen 5 counts bits, and looks bytes up, in two vectors a cycle, Intel's cores in one. Of those the ones with AMX are
// told apart: only there it matters, for there 8 bits are the faster ones nearly always. (ResNet-50 with w2a2 and w1a2
// took 1.15 and 1.13 of the time of w8a8 where kernels were chosen without this factor.)
inline double FewBitCycles(double on_zen5) { return MachineHas(Isa::kAmx) ? 1.5 * on_zen5 : on_zen5; }

}  // namespace lowbit
