#include "ep/cuda/cuda_call.h"

#include "core/status.h"

namespace lowbit::ep {

bool IsLost(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorMpsConnectionFailed:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

std::string ErrorText(cudaError_t error) {
  std::string text = std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
  if (IsLost(error)) {
    text +=
        "; the GPU is lost to this process: no session can use it again, and what is in its memory is gone. "
        "Start "
        "the program again; `nvidia-smi` and the kernel log tell whether the GPU itself is in order";
  }
  return text;
}

void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // else the next check of the host program finds it
  Fail("CUDA: ", what, " failed: ", ErrorText(error));
}

DeviceScope::DeviceScope(int ordinal) {
  CheckCuda(cudaGetDevice(&previous_), "asking for the device");
  CheckCuda(cudaThreadExchangeStreamCaptureMode(&mode_), "relaxing the capture mode");
  if (previous_ == ordinal) return;
  const cudaError_t error = cudaSetDevice(ordinal);
  changed_ = error == cudaSuccess;
  if (changed_) return;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));  // no object, no destructor
  CheckCuda(error, "choosing the device");
}

DeviceScope::~DeviceScope() {
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  if (changed_) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace lowbit::ep
