#pragma once

#include "ep/ort/device.h"

namespace lowbit::ep {

// The allocator of `device`'s memory. Release with ReleaseAllocator. `device` must outlive it.
OrtAllocator* CreateDeviceAllocator(Device& device, Logger logger);
void ReleaseDeviceAllocator(OrtAllocator* allocator) noexcept;

}  // namespace lowbit::ep
