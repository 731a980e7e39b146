// Which float tensors the steps of a region exchange with the channels last (core/channels_last.h).
#pragma once

#include <span>
#include <vector>

#include "ep/region/planes.h"

namespace lowbit::ep {

// Of each tensor whether it lies so: one does where its maker and all of its readers have kernels for that, and there are
// any. `may`: which tensors may.
std::vector<bool> ChooseChannelsLast(const Backend& backend, std::span<const StepTensors> steps,
                               std::vector<bool> may);

}  // namespace lowbit::ep
