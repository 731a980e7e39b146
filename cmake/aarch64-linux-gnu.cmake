# Toolchain for 64-bit ARM Linux with the cross compiler of Debian and its like (package g++-aarch64-linux-gnu). Test programs run
# under qemu-user (package qemu-user) as the CPU that QEMU_CPU names.
#
#   cmake --preset aarch64-linux          or    cmake -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake ...

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)

set(lowbit_triple aarch64-linux-gnu)
set(CMAKE_C_COMPILER ${lowbit_triple}-gcc)
set(CMAKE_CXX_COMPILER ${lowbit_triple}-g++)

# Libraries come from the cross compiler's own root, programs from this machine.
set(CMAKE_FIND_ROOT_PATH /usr/${lowbit_triple})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

find_program(lowbit_qemu NAMES qemu-aarch64 qemu-aarch64-static)
if(lowbit_qemu)
  set(CMAKE_CROSSCOMPILING_EMULATOR "${lowbit_qemu};-L;/usr/${lowbit_triple}")
endif()
