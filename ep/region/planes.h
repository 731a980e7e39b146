// Which tensors of few bits the steps of a region exchange as planes of bits (core/bit_planes.h).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ep/region/backend.h"

namespace lowbit::ep {

// A step, and which tensors it reads and makes.
struct StepTensors {
  const Step* step;
  std::vector<TensorShape> fed;
  std::vector<size_t> reads;
  size_t makes;
};

// In how many planes each tensor lies; 0: a byte a code. One becomes planes where its maker and all of its readers have
// kernels for that which take no longer together, as far as estimates tell; steps that keep planes have their tensors
// from each other. With kWherever it is enough that there are kernels. What a step gains by planes may depend on its
// other tensors being some: tensors are decided one after the other beginning with bytes, and with planes wherever they
// may be, and the faster of the two is taken. `may`: which tensors may become planes.
std::vector<int> ChoosePlanes(const Backend& backend, std::span<const StepTensors> steps,
                              std::vector<bool> may, PlaneUse use = PlaneUse::kWhereFaster);

}  // namespace lowbit::ep
