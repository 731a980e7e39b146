// NVIDIA GPUs as the region compiler sees them: a thin layer over kernels/cuda.
#pragma once

#include <memory>

#include "core/provider_options.h"
#include "ep/cuda/runtime.h"
#include "ep/region/backend.h"

namespace lowbit::ep {

std::shared_ptr<Backend> CreateCudaBackend(std::shared_ptr<CudaDevice> device, const EpOptions& options);

}  // namespace lowbit::ep
