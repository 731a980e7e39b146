// The Winograd kernels for x86, defined in winograd_<isa>.cc.
#pragma once

#include "kernels/common/winograd_scheme.h"

namespace lowbit {

extern const WinogradScheme kWinogradFourAvx2, kWinogradTwoAvx2, kWinogradFourAvx512, kWinogradTwoAvx512,
    kWinogradBytesAvx512, kWinogradFourAvxVnni, kWinogradBytesAvxVnni;

}  // namespace lowbit
