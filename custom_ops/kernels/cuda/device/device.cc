#include "kernels/cuda/device/device.h"

#include "core/status.h"
#include "kernels/cuda/device/architectures.h"
#include "kernels/cuda/device/memory.h"

namespace lowbit::cuda {
namespace {

// What cudaDeviceProp says of each architecture: the largest shared memory of a block (CUDA C++ Programming Guide,
// "Technical Specifications per Compute Capability"), and the multiprocessors of its largest GPU for data centers.
struct Architecture {
  int number, shared_kilobytes, multiprocessors;
};
constexpr Architecture kArchitectures[] = {{75, 64, 72},    {80, 163, 108},  {86, 99, 84},
                                           {87, 163, 16},   {89, 99, 142},   {90, 227, 132},
                                           {100, 227, 148}, {103, 227, 148}, {120, 99, 188}};

}  // namespace

Device Device::Query(int ordinal) {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  Device device;
  device.ordinal = ordinal;
  device.hardware = 10 * properties.major + properties.minor;
  device.capability = CodeArchitecture(LOWBIT_CUDA_ARCHITECTURES, device.hardware);
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin) - kFixedSharedBytes;
  device.name = properties.name;
  Require(device.hardware >= 75, device.name, " has compute capability ", properties.major, ".",
          properties.minor, ", lowbit needs 7.5 or later (int8 Tensor Cores)");
  Require(device.capability >= 75, device.name, " has compute capability ", properties.major, ".",
          properties.minor, ", this build of lowbit has code for ", LOWBIT_CUDA_ARCHITECTURES,
          "; build it with this architecture in CMAKE_CUDA_ARCHITECTURES");
  return device;
}

Device Device::Absent(int architecture, int multiprocessors) {
  for (const Architecture& known : kArchitectures) {
    if (known.number != architecture) continue;
    Device device;
    device.ordinal = -1;
    device.hardware = architecture;
    device.capability = CodeArchitecture(LOWBIT_CUDA_ARCHITECTURES, architecture);
    Require(device.capability == architecture, "this build of lowbit has code for ",
            LOWBIT_CUDA_ARCHITECTURES, ", none for sm_", architecture);
    device.multiprocessors = multiprocessors > 0 ? multiprocessors : known.multiprocessors;
    device.shared_bytes = known.shared_kilobytes * 1024 - kFixedSharedBytes;
    device.name = "sm_" + std::to_string(architecture);
    return device;
  }
  Fail("sm_", architecture, " is no architecture that lowbit knows");
}

std::vector<int> Device::Architectures() {
  std::vector<int> numbers;
  for (const Architecture& known : kArchitectures) {
    if (CodeArchitecture(LOWBIT_CUDA_ARCHITECTURES, known.number) == known.number)
      numbers.push_back(known.number);
  }
  return numbers;
}

}  // namespace lowbit::cuda
