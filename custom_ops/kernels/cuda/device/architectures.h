// For which GPUs this build has code.
#pragma once

#include <string_view>

namespace lowbit::cuda {

// The architecture whose code a GPU of compute capability `capability` (10 * major + minor) runs, of those in
// `compiled`: CMAKE_CUDA_ARCHITECTURES as CMake writes it ("75-real;90a-real;120"), entries between
// semicolons or commas. 0: there is none.
//
// What kernels may use follows from their code, not from the GPU: code for sm_80 that runs on sm_90 (the
// driver compiles its PTX) waits for no predecessor and forms no cluster.
int CodeArchitecture(std::string_view compiled, int capability);

}  // namespace lowbit::cuda
