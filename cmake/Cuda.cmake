# Whether liblowbit_cuda is built, with which compiler, for which GPUs.
#
#   LOWBIT_CUDA=AUTO   for the GPUs of this machine, if it has any and a CUDA compiler; compiling for one architecture takes
#                      a minute or two. Where there is no GPU, nothing of CUDA is built.
#   LOWBIT_CUDA=ON     for every architecture from sm_75 on: what a wheel holds, many minutes
#   LOWBIT_CUDA=OFF
#
# CMAKE_CUDA_ARCHITECTURES or CUDAARCHS choose other architectures, CMAKE_CUDA_COMPILER or CUDACXX another compiler. Without
# a compiler on the PATH, the one that `tools/setup.sh nvcc` fetches from PyPI is used.
#
# Sets LOWBIT_CUDA to ON or OFF in this scope.

set(LOWBIT_CUDA AUTO CACHE STRING "Build liblowbit_cuda: ON, OFF, or AUTO where the machine has an NVIDIA GPU and nvcc")
set_property(CACHE LOWBIT_CUDA PROPERTY STRINGS AUTO ON OFF)

# sm_90a: wgmma exists for this very architecture only. The last one also as PTX, for GPUs to come.
set(lowbit_cuda_architectures 75-real 80-real 86-real 89-real 90a-real 100-real 120)

# The architectures of the GPUs that the driver shows; empty where there is none.
function(lowbit_present_gpus result)
  set(${result} "" PARENT_SCOPE)
  find_program(LOWBIT_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(LOWBIT_NVIDIA_SMI)
  if(NOT LOWBIT_NVIDIA_SMI)
    return()
  endif()
  execute_process(COMMAND "${LOWBIT_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
  list(REMOVE_DUPLICATES capabilities)
  set(architectures "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" number ${capability})
    if(number GREATER_EQUAL 75)
      string(REGEX REPLACE "^90$" "90a" number ${number})
      list(APPEND architectures ${number}-real)
    endif()
  endforeach()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

if(NOT LOWBIT_CUDA)
  return()
endif()
set(asked "${LOWBIT_CUDA}")
set(LOWBIT_CUDA OFF)
if(asked STREQUAL "AUTO")
  lowbit_present_gpus(lowbit_cuda_architectures)
  if(NOT lowbit_cuda_architectures)
    message(STATUS "liblowbit_cuda: not built, this machine shows no NVIDIA GPU from sm_75 on (LOWBIT_CUDA=ON builds it)")
    return()
  endif()
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(LOWBIT_NVCC nvcc PATHS /usr/local/cuda/bin "${PROJECT_SOURCE_DIR}/.cache/cuda/nvidia/cu13/bin")
  mark_as_advanced(LOWBIT_NVCC)
  if(LOWBIT_NVCC)
    set(CMAKE_CUDA_COMPILER "${LOWBIT_NVCC}")
  endif()
endif()
include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER AND CMAKE_VERSION VERSION_LESS 3.26)  # older ones do not know nvcc's C++20
  set(hint "this CMake is ${CMAKE_VERSION}, CUDA needs 3.26 or newer (pip install cmake)")
  if(NOT asked STREQUAL "AUTO")
    message(FATAL_ERROR "LOWBIT_CUDA=${asked}: ${hint}")
  endif()
  message(STATUS "liblowbit_cuda: not built, ${hint}")
  return()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(hint "install the CUDA toolkit, set CUDACXX, or fetch the compiler from PyPI: tools/setup.sh nvcc")
  if(NOT asked STREQUAL "AUTO")
    message(FATAL_ERROR "LOWBIT_CUDA=${asked} and no CUDA compiler was found: ${hint}")
  endif()
  message(STATUS "liblowbit_cuda: not built, this machine has a GPU and no CUDA compiler: ${hint}")
  return()
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${lowbit_cuda_architectures})
elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
  lowbit_present_gpus(CMAKE_CUDA_ARCHITECTURES)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES=native, and nvidia-smi shows no NVIDIA GPU from sm_75 on: name an architecture")
  endif()
elseif(CMAKE_CUDA_ARCHITECTURES MATCHES "^all")  # the words of CMake: every one from sm_75 on
  set(CMAKE_CUDA_ARCHITECTURES ${lowbit_cuda_architectures})
endif()
# The kernels that are chosen on sm_90 need wgmma. PTX of it serves no other architecture either.
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90(-real|-virtual)?$" "90a\\1")
enable_language(CUDA)
set(LOWBIT_CUDA ON)
message(STATUS "liblowbit_cuda: ${CMAKE_CUDA_COMPILER}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
