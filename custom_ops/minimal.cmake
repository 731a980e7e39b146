# lowbit   of a minimal build: the static library liblowbit.a with RegisterCustomOps, which the app calls itself. It has no
#          execution provider and no Python module; the linker takes of it what the app's models need (core/selection.h).

lowbit_write_selection("${CMAKE_CURRENT_BINARY_DIR}/minimal")

file(GLOB ort_sources CONFIGURE_DEPENDS ort/*.cc)
list(REMOVE_ITEM ort_sources "${CMAKE_CURRENT_SOURCE_DIR}/ort/append_provider.cc"
                             "${CMAKE_CURRENT_SOURCE_DIR}/ort/environment.cc"
                             "${CMAKE_CURRENT_SOURCE_DIR}/ort/known_domain.cc"
                             "${CMAKE_CURRENT_SOURCE_DIR}/ort/shape_inference.cc")
list(REMOVE_ITEM node_sources "${CMAKE_CURRENT_SOURCE_DIR}/core/infer.cc")

add_library(lowbit STATIC ${node_sources} ${core_sources} ${kernel_sources} ${ort_sources})
target_link_libraries(lowbit PRIVATE $<BUILD_INTERFACE:lowbit_options> $<BUILD_INTERFACE:lowbit_ort_headers> Threads::Threads)
target_compile_definitions(lowbit PRIVATE LOWBIT_MINIMAL=1)
target_include_directories(lowbit PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/minimal")
# Exceptions stay inside: RegisterCustomOps and everything that it registers are noexcept. Nothing asks for types at run time.
target_compile_options(lowbit PRIVATE -ffunction-sections -fdata-sections $<$<COMPILE_LANGUAGE:CXX>:-fno-rtti>)
# Kernels are small and hot; all the rest runs once a node.
set(hot_sources ${kernel_sources})
list(FILTER hot_sources INCLUDE REGEX "kernels/(arm|x86|common)/")
set_property(SOURCE ${hot_sources} APPEND PROPERTY COMPILE_OPTIONS $<$<CONFIG:MinSizeRel>:-O2>)
set_property(SOURCE ${hot_sources} PROPERTY SKIP_PRECOMPILE_HEADERS ON)  # which hold for one set of options
target_precompile_headers(lowbit PRIVATE ${common_headers})
