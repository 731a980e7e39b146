// Which float tensors the steps of a region exchange with the channels last (core/channels_last.h).
#pragma once

#include <span>
#include <vector>

#include "ep/region/planes.h"

namespace lowbit::ep {

// Of each tensor whether it lies so: one does where its maker and all of its readers have kernels for that,
// and there are any. `may`: which tensors may.
std::vector<bool> ChooseChannelsLast(const Backend& backend, std::span<const StepTensors> steps,
                                     std::vector<bool> may);

// Of each other tensor whether it is to be turned by a step of its own: several steps would turn it.
std::vector<bool> ChooseTurned(const Backend& backend, std::span<const StepTensors> steps,
                               const std::vector<bool>& channels_last);

}  // namespace lowbit::ep
