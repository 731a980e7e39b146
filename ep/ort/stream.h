#pragma once

#include "ep/ort/device.h"

namespace lowbit::ep {

// A stream of `device`, which must outlive it; ONNX Runtime releases it. `owner`: the session's provider, or
// null.
OrtSyncStreamImpl* CreateDeviceStream(Device& device, const void* owner);

}  // namespace lowbit::ep
