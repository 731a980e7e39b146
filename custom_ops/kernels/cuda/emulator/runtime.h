// What the emulated GPU's queue asks of its CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/emulator/machine.h"

namespace lowbit::cuda::emulator {

// Whether a GPU would take it.
bool IsValid(const Launch& launch);
// Runs the launch, or adds it to the graph that is being captured: its node, or null.
cudaGraphNode_t Enqueue(Launch launch);
void SetNode(cudaGraphExec_t executable, cudaGraphNode_t node, Launch launch);

}  // namespace lowbit::cuda::emulator
