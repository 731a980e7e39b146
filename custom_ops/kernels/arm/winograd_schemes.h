// The Winograd kernels for ARM, defined in winograd_<name>.cc.
#pragma once

#include "kernels/common/winograd_scheme.h"

namespace lowbit {

extern const WinogradScheme kWinogradMla, kWinogradSmlal, kWinogradSdot;

}  // namespace lowbit
