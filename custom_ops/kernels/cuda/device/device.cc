#include "kernels/cuda/device/device.h"

#include "core/status.h"
#include "kernels/cuda/device/architectures.h"
#include "kernels/cuda/device/memory.h"

namespace lowbit::cuda {

Device Device::Query(int ordinal) {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  Device device;
  device.ordinal = ordinal;
  device.hardware = 10 * properties.major + properties.minor;
  device.capability = CodeArchitecture(LOWBIT_CUDA_ARCHITECTURES, device.hardware);
  device.multiprocessors = properties.multiProcessorCount;
  // 4 KB stay for a kernel's static shared memory.
  device.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin) - 4096;
  device.name = properties.name;
  Require(device.hardware >= 75, device.name, " has compute capability ", properties.major, ".",
          properties.minor, ", lowbit needs 7.5 or later (int8 Tensor Cores)");
  Require(device.capability >= 75, device.name, " has compute capability ", properties.major, ".",
          properties.minor, ", this build of lowbit has code for ", LOWBIT_CUDA_ARCHITECTURES,
          "; build it with this architecture in CMAKE_CUDA_ARCHITECTURES");
  return device;
}

}  // namespace lowbit::cuda
