# Finds ONNX Runtime's C/C++ headers and defines the interface target lowbit_ort_headers. Only the headers are used: no
# ONNX Runtime library is linked, the running process hands its function table to RegisterCustomOps.
#
# Searched in this order:
#   1. ORT_INCLUDE_DIR, a cache or environment variable: the folder that holds onnxruntime_c_api.h
#   2. the system's include folders, when their API is new enough
#   3. LOWBIT_ORT_ARCHIVE, a path or URL of an ONNX Runtime release archive (cache or environment variable)

# The header of the library is the one place that states the oldest API.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../custom_ops/include/lowbit.h" stated REGEX "^#define LOWBIT_ORT_API ")
string(REGEX MATCH "[0-9]+" LOWBIT_ORT_MINIMUM_API "${stated}")
set(ORT_INCLUDE_DIR "$ENV{ORT_INCLUDE_DIR}" CACHE PATH "Folder that holds onnxruntime_c_api.h")
set(LOWBIT_ORT_ARCHIVE "$ENV{LOWBIT_ORT_ARCHIVE}" CACHE STRING "Path or URL of an ONNX Runtime release archive")

# Sets <out> to the ORT_API_VERSION of the headers in <folder>, or to 0.
function(lowbit_ort_api_version folder out)
  set(version 0)
  if(EXISTS "${folder}/onnxruntime_c_api.h" AND EXISTS "${folder}/onnxruntime_cxx_api.h")
    file(STRINGS "${folder}/onnxruntime_c_api.h" line REGEX "^#define ORT_API_VERSION +[0-9]+")
    if(line MATCHES "ORT_API_VERSION +([0-9]+)")
      set(version ${CMAKE_MATCH_1})
    endif()
  endif()
  set(${out} ${version} PARENT_SCOPE)
endfunction()

set(lowbit_ort_found "")
if(ORT_INCLUDE_DIR)
  lowbit_ort_api_version("${ORT_INCLUDE_DIR}" lowbit_ort_api)
  if(lowbit_ort_api LESS LOWBIT_ORT_MINIMUM_API)
    message(FATAL_ERROR
      "ORT_INCLUDE_DIR is '${ORT_INCLUDE_DIR}', which holds no ONNX Runtime headers of API ${LOWBIT_ORT_MINIMUM_API} or newer "
      "(found API ${lowbit_ort_api}; 0 means that onnxruntime_c_api.h and onnxruntime_cxx_api.h are not there). "
      "Set it to the folder that holds both files of ONNX Runtime 1.${LOWBIT_ORT_MINIMUM_API} or newer, or unset it.")
  endif()
  set(lowbit_ort_found "${ORT_INCLUDE_DIR}")
else()
  find_path(LOWBIT_ORT_SYSTEM_DIR onnxruntime_c_api.h PATH_SUFFIXES onnxruntime onnxruntime/core/session)
  if(LOWBIT_ORT_SYSTEM_DIR)
    lowbit_ort_api_version("${LOWBIT_ORT_SYSTEM_DIR}" lowbit_ort_api)
    if(lowbit_ort_api GREATER_EQUAL LOWBIT_ORT_MINIMUM_API)
      set(lowbit_ort_found "${LOWBIT_ORT_SYSTEM_DIR}")
    else()
      message(STATUS "ONNX Runtime headers in ${LOWBIT_ORT_SYSTEM_DIR} are too old (API ${lowbit_ort_api})")
    endif()
  endif()
endif()

if(NOT lowbit_ort_found AND LOWBIT_ORT_ARCHIVE)
  include(FetchContent)
  # SOURCE_SUBDIR names a folder that does not exist: the archive is unpacked, its own build files are not read.
  FetchContent_Declare(lowbit_onnxruntime URL "${LOWBIT_ORT_ARCHIVE}" SOURCE_SUBDIR headers-only)
  FetchContent_MakeAvailable(lowbit_onnxruntime)
  foreach(folder include include/onnxruntime include/onnxruntime/core/session)
    lowbit_ort_api_version("${lowbit_onnxruntime_SOURCE_DIR}/${folder}" lowbit_ort_api)
    if(lowbit_ort_api GREATER_EQUAL LOWBIT_ORT_MINIMUM_API)
      set(lowbit_ort_found "${lowbit_onnxruntime_SOURCE_DIR}/${folder}")
      break()
    endif()
  endforeach()
endif()

if(NOT lowbit_ort_found)
  message(FATAL_ERROR
    "No ONNX Runtime headers of API ${LOWBIT_ORT_MINIMUM_API} or newer were found. Do one of these:\n"
    "  - set ORT_INCLUDE_DIR (cache or environment variable) to the folder that holds onnxruntime_c_api.h and "
    "onnxruntime_cxx_api.h of ONNX Runtime 1.${LOWBIT_ORT_MINIMUM_API} or newer\n"
    "  - install a new enough libonnxruntime-dev\n"
    "  - set LOWBIT_ORT_ARCHIVE to the path or URL of an ONNX Runtime release archive, 1.${LOWBIT_ORT_MINIMUM_API} or newer\n"
    "On Debian, `make headers` fetches them into the build folder without installing anything.")
endif()

lowbit_ort_api_version("${lowbit_ort_found}" lowbit_ort_api)
message(STATUS "ONNX Runtime headers: ${lowbit_ort_found} (API ${lowbit_ort_api})")
add_library(lowbit_ort_headers INTERFACE)
target_include_directories(lowbit_ort_headers SYSTEM INTERFACE "${lowbit_ort_found}")
