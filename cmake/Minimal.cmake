# What a minimal build holds (LOWBIT_MINIMAL): reads required_operators.config files, as `lowbit export --to mobile` writes them,
# and writes lowbit_selection.h, which core/selection.h includes.
#
# A line of the config names the ops of a domain; behind a matrix product stand the forms in which the model has it:
#
#   ai.lowbit;1;LowBitAdd,LowBitConv{"forms": ["u8 s8 3x3 stride 1x1 depthwise requantize", ..]}
#
# A family of kernels is left out where none of the forms is one that it computes. The reference kernels, which compute all of
# them, always stay, and so does a family that has no line below.

set(LOWBIT_OPS_CONFIG "" CACHE STRING
    "Of a minimal build: required_operators.config of the models (a list); empty: all ops and kernels")

# FAMILY REGEX ...: what the forms look like that a family computes, or (of a single row of the kernel table) is good at.
set(lowbit_kernel_families
    arm/depthwise " depthwise "
    depthwise_bytes_4x16_neon "^[usb][1-5] .* depthwise |^[usb][1-8] [usb][1-5] .* depthwise "
    arm/winograd "3x3 stride 1x1 [^d]"
    winograd_f4_mla_8x16_neon "^[usb][1-6] [usb][1-6] 3x3 stride 1x1 [^d]"
    winograd_f2_sdot_8x8_dotprod "^[usb][1-6] [usb][1-6] 3x3 stride 1x1 [^d]"
    smlal_4x16_neon "^[usb][1-7] |^[usb]8 [usb][1-7] "
    mla_bytes_4x16_neon "^[usb][1-4] [usb][1-4] "
    mla_bytes_4x32_neon "^[usb][1-4] [usb][1-4] "
    mla_words_8x16_neon "^[usb][1-7] [usb][1-7] "
    mla_pairs_12x8_neon "^[usb][1-6] [usb][1-6] "
    arm/bitserial "^[usb]([12] [usb][1-3]|3 [usb][12]) "
    x86/depthwise " depthwise "
    x86/winograd "3x3 stride 1x1 [^d]"
    x86/bitserial "^[usb][1-4] [usb][1-4] "
    x86/lut "^[usb][1-6] [usb][12] ")

# Sets the named variables to the ops and forms of one config; `complete` is false where a matrix product has no forms, as in a
# config that ONNX Runtime's own tools wrote.
function(lowbit_read_ops_config config ops forms complete)
  if(NOT EXISTS "${config}")
    message(FATAL_ERROR "LOWBIT_OPS_CONFIG: there is no file ${config}")
  endif()
  file(READ "${config}" text)
  string(REGEX MATCHALL "(^|\n)ai\\.lowbit[^\n]*" lines "${text}")  # one string: brackets make no elements of a list
  if("${lines}" STREQUAL "")
    message(FATAL_ERROR "LOWBIT_OPS_CONFIG: ${config} names no op of ai.lowbit; "
                        "it should be what `lowbit export --to mobile` wrote")
  endif()
  string(REGEX MATCHALL "(LowBit|AP)[A-Za-z]+" found_ops "${lines}")
  string(REGEX MATCHALL "\"[usb][1-8] [usb][1-8] [a-z0-9 ]+\"" found_forms "${lines}")
  string(REPLACE "\"" "" found_forms "${found_forms}")
  set(all_told TRUE)
  if("${lines}" MATCHES "(Conv|ConvTranspose|Gemm)(,|\n|$)")
    set(all_told FALSE)
  endif()
  set(${ops} "${found_ops}" PARENT_SCOPE)
  set(${forms} "${found_forms}" PARENT_SCOPE)
  set(${complete} ${all_told} PARENT_SCOPE)
endfunction()

# "a", "b", as C++ writes them; an array needs one element at least.
function(lowbit_cxx_strings out)
  list(TRANSFORM ARGN PREPEND "\"")
  list(TRANSFORM ARGN APPEND "\"")
  list(JOIN ARGN ", " joined)
  if("${joined}" STREQUAL "")
    set(joined "\"\"")
  endif()
  set(${out} "${joined}" PARENT_SCOPE)
endfunction()

# Writes lowbit_selection.h into `folder`.
function(lowbit_write_selection folder)
  if(NOT CMAKE_SCRIPT_MODE_FILE)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${LOWBIT_OPS_CONFIG})
  endif()
  set(ops "")
  set(forms "")
  set(all_told TRUE)
  foreach(config IN LISTS LOWBIT_OPS_CONFIG)
    lowbit_read_ops_config("${config}" config_ops config_forms config_told)
    list(APPEND ops ${config_ops})
    list(APPEND forms ${config_forms})
    if(NOT config_told)
      set(all_told FALSE)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES ops)
  set(left_out "")
  if(LOWBIT_OPS_CONFIG AND all_told)
    set(families ${lowbit_kernel_families})
    while(families)
      list(POP_FRONT families family pattern)
      set(computed ${forms})
      list(FILTER computed INCLUDE REGEX "${pattern}")
      if(NOT computed)
        list(APPEND left_out ${family})
      endif()
    endwhile()
  endif()
  if(LOWBIT_OPS_CONFIG)
    set(selects_ops true)
    list(JOIN ops ", " told_ops)
    list(JOIN left_out ", " told_families)
    message(STATUS "Minimal build: ${told_ops}; without the kernels ${told_families}")
  else()
    set(selects_ops false)
    message(STATUS "Minimal build: all ops and kernels (LOWBIT_OPS_CONFIG leaves out what a model does not need)")
  endif()
  lowbit_cxx_strings(op_strings ${ops})
  lowbit_cxx_strings(family_strings ${left_out})
  file(CONFIGURE OUTPUT "${folder}/lowbit_selection.h" CONTENT [[
// Written by cmake/Minimal.cmake.
#pragma once

#include <string_view>

namespace lowbit {

inline constexpr bool kSelectsOps = @selects_ops@;
inline constexpr std::string_view kSelectedOps[] = {@op_strings@};
inline constexpr std::string_view kFamiliesLeftOut[] = {@family_strings@};

}  // namespace lowbit
]] @ONLY)
endfunction()
