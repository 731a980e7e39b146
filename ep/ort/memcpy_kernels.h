// MemcpyFromHost and MemcpyToHost, the nodes that ONNX Runtime puts between nodes of the device and nodes of
// the CPU. Without them it leaves the device's tensors in host memory.
#pragma once

#include <memory>

#include "ep/ort/device.h"

namespace lowbit::ep {

struct ReleaseRegistry {
  void operator()(OrtKernelRegistry* registry) const { EpApi().ReleaseKernelRegistry(registry); }
};
using KernelRegistry = std::unique_ptr<OrtKernelRegistry, ReleaseRegistry>;

// `device` must outlive the kernels.
KernelRegistry CreateMemcpyRegistry(Device& device);

}  // namespace lowbit::ep
