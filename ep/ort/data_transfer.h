#pragma once

#include <memory>
#include <vector>

#include "ep/ort/device.h"

namespace lowbit::ep {

// Copies between the host and each of `devices`, and within each of them; ONNX Runtime releases it.
OrtDataTransferImpl* CreateDeviceTransfer(std::vector<std::shared_ptr<Device>> devices);

}  // namespace lowbit::ep
