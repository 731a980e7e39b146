# What is installed where. The wheels take the components `ep`, `cuda` and `python`; all that a plain `cmake --install` does
# is the C and C++ package: libraries, header, CMake package, pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

target_include_directories(lowbit INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/custom_ops/include>
                           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

if(NOT LOWBIT_MINIMAL)
  set(wheel_folder onnxruntime_ep_lowbit)
  install(TARGETS lowbit LIBRARY DESTINATION ${wheel_folder} COMPONENT ep EXCLUDE_FROM_ALL
                         RUNTIME DESTINATION ${wheel_folder} COMPONENT ep EXCLUDE_FROM_ALL)
  if(LOWBIT_CUDA)  # liblowbit looks for it in its own folder
    install(TARGETS lowbit_cuda LIBRARY DESTINATION ${wheel_folder} COMPONENT cuda EXCLUDE_FROM_ALL
                                RUNTIME DESTINATION ${wheel_folder} COMPONENT cuda EXCLUDE_FROM_ALL)
    install(TARGETS lowbit_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endif()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/lowbit)
set(package_files "${CMAKE_CURRENT_BINARY_DIR}/package")
install(TARGETS lowbit EXPORT lowbit)
install(FILES custom_ops/include/lowbit.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT lowbit NAMESPACE lowbit:: DESTINATION ${package_folder} FILE lowbit-targets.cmake)
configure_package_config_file(cmake/lowbit-config.cmake.in "${package_files}/lowbit-config.cmake"
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file("${package_files}/lowbit-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${package_files}/lowbit-config.cmake" "${package_files}/lowbit-config-version.cmake"
        DESTINATION ${package_folder})

file(RELATIVE_PATH pkgconfig_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
set(pkgconfig_libraries "-L\${libdir} -llowbit")  # the shared library brings all that it needs
if(LOWBIT_MINIMAL)
  string(APPEND pkgconfig_libraries " -lstdc++ -pthread")
endif()
configure_file(cmake/lowbit.pc.in "${package_files}/lowbit.pc" @ONLY)
install(FILES "${package_files}/lowbit.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
