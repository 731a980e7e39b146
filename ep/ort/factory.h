// The factory that ONNX Runtime creates providers, allocators, streams and data transfers with. One class
// serves the CPU and every kind of device: what differs is the DeviceRuntime behind it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ep/ort/device_runtime.h"
#include "ep/ort/ep_api.h"
#include "ep/ort/provider.h"

namespace lowbit::ep {

// Makes the factory of `runtime`'s devices. `base` is the ONNX Runtime that asks, `domain` the ops of
// ai.lowbit, which the factory gives to sessions. Where no device can be used the status says why.
OrtStatus* CreateDeviceFactory(const OrtApiBase* base, const OrtLogger* logger, OrtCustomOpDomain* domain,
                               std::shared_ptr<DeviceRuntime> runtime, OrtEpFactory** out) noexcept;

// A registration whose name ends so offers what models can be compiled for without it: GPUs that are not there. Both
// libraries read the name.
inline constexpr std::string_view kTargetsSuffix = ".targets";

// What has no memory of its own: the CPU, and GPUs that are not there, for which models are compiled alone.
// `description` tells users what it is.
struct HostDevice {
  std::string name;
  CreateBackend create_backend;
  std::string description;
};
// Why a GPU is not offered, in words and as ONNX Runtime classifies it; no words: nothing stands against it.
struct NoGpu {
  std::string text;
  OrtDeviceEpIncompatibilityReason reason = OrtDeviceEpIncompatibility_UNKNOWN;
};
// The factory of such devices. `is_alone`: GPUs were not looked for. `gpus`: the factory of GPUs that stands
// behind it, or null. ONNX Runtime asks the first factory of a provider alone what hardware it fits.
OrtStatus* CreateHostFactory(const OrtLogger* logger, OrtCustomOpDomain* domain,
                             std::vector<HostDevice> hosts, bool is_alone, NoGpu unavailable,
                             OrtEpFactory* gpus, OrtEpFactory** out) noexcept;

void ReleaseFactory(OrtEpFactory* factory) noexcept;

}  // namespace lowbit::ep
