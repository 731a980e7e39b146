# lowbit_kernel_hash(FOLDER RESULT FILES)   sixteen hexadecimal digits that change with any source or header of kernels in
#                                           FOLDER or below it: measurements and packed weights are those of these very
#                                           kernels. FILES: all that was read.
#
# What only tests, benchmarks and the emulated GPU compile does not count.
function(lowbit_kernel_hash folder result files)
  set(again CONFIGURE_DEPENDS)
  if(CMAKE_SCRIPT_MODE_FILE)  # nothing is configured
    set(again "")
  endif()
  file(GLOB_RECURSE found ${again} RELATIVE "${folder}" "${folder}/*.h" "${folder}/*.cc" "${folder}/*.cuh" "${folder}/*.cu")
  list(FILTER found EXCLUDE REGEX "^(bench|emulator|tests)/")
  list(SORT found)
  if(NOT found)
    message(FATAL_ERROR "${folder} has no sources of kernels to hash")
  endif()
  set(hashes "")
  foreach(file IN LISTS found)
    file(SHA256 "${folder}/${file}" hash)
    string(APPEND hashes "${file} ${hash}\n")
  endforeach()
  string(SHA256 hash "${hashes}")
  string(SUBSTRING ${hash} 0 16 hash)
  set(${result} ${hash} PARENT_SCOPE)
  list(TRANSFORM found PREPEND "${folder}/")
  set(${files} ${found} PARENT_SCOPE)
endfunction()
