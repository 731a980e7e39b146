// Plain loops that read like the definition in the schema. Always built, selectable by the user, and what
// every other kernel is compared with.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> ReferenceRows();

}  // namespace lowbit
