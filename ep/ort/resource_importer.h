// Memory and semaphores of other APIs (Vulkan) that share a device, as ONNX Runtime's OrtInteropApi imports them.
#pragma once

#include <memory>

#include "ep/ort/device.h"

namespace lowbit::ep {

// For the device behind `ep_device`. Throws std::bad_alloc.
OrtExternalResourceImporterImpl* CreateResourceImporter(std::shared_ptr<Device> device,
                                                        const OrtEpDevice* ep_device);

}  // namespace lowbit::ep
