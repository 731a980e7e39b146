#!/usr/bin/env bash
# Sets up what the Makefile needs and this machine lacks. Every command may be repeated; they do only what is missing.
#
#   tools/setup.sh venv DIR    a virtual environment with the build tools (cmake, ninja, ... from PyPI)
#   tools/setup.sh program NAME PACKAGE   makes sure that a program is there
#   tools/setup.sh clang       makes sure that clang++ is there, with its ThreadSanitizer
#   tools/setup.sh headers     prints the ONNX Runtime include folder to build with; fetches it into .cache if needed
#   tools/setup.sh nvcc        prints the CUDA compiler to build liblowbit_cuda with; fetches it from PyPI into .cache if needed
#
# Debian packages are installed only when something is missing and this is root; otherwise the script says what to
# install. PYTHON names the interpreter to use (default: the first of python3, python3.11 ... that is new enough).
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

apt_updated=no
# apt_install PACKAGE REASON
apt_install() {
  if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    die "$2. Install the Debian package '$1' (as root: apt-get install $1) or its like, then run make again."
  fi
  say "$2: installing the Debian package $1"
  exec 9> /tmp/lowbit-setup.lock && flock 9  # apt-get fails where another one runs, such as that of a test beside this one
  if [ "$apt_updated" = no ]; then apt-get -qq -o Acquire::Retries=3 update; apt_updated=yes; fi
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends -o Acquire::Retries=3 install "$1" >&2
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14; do
    if command -v "$candidate" > /dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python >= 3.11 found. Install one, or name it: make PYTHON=/path/to/python3 ..."
}

have_cxx20() {
  local dir status=0
  dir=$(mktemp -d)
  printf '#include <span>\n#include <concepts>\nint main() { return static_cast<int>(std::span<int>().size()); }\n' > "$dir/probe.cc"
  "${CXX:-c++}" -std=c++20 "$dir/probe.cc" -o "$dir/probe" 2> /dev/null || status=1
  rm -rf "$dir"
  return $status
}

setup_venv() {
  local venv=$1 python version
  have_cxx20 || [ -n "${CXX:-}" ] || apt_install g++ "no C++20 compiler found"
  have_cxx20 || die "'${CXX:-c++}' does not compile C++20. Set CXX to g++ >= 12 or clang++ >= 14."
  python=$(find_python)
  version=$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
  "$python" -c 'import ensurepip, venv' 2> /dev/null || apt_install "python$version-venv" "$python has no venv module"
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    apt_install "python$version-dev" "$python has no Python.h"
  if ! "$venv/bin/python" -c 'import pip' 2> /dev/null; then "$python" -m venv --clear "$venv"; fi
  # shellcheck disable=SC2046  # one word per requirement is meant
  "$venv/bin/python" -m pip install --quiet --retries 5 cmake ninja \
    $("$venv/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
}

has_thread_sanitizer() {
  local dir status=0
  dir=$(mktemp -d)
  echo 'int main() {}' > "$dir/probe.cc"
  clang++ -fsanitize=thread "$dir/probe.cc" -o "$dir/probe" 2> /dev/null || status=1
  rm -rf "$dir"
  return $status
}

setup_clang() {
  command -v clang++ > /dev/null || apt_install clang "no clang++ found"
  has_thread_sanitizer || apt_install libclang-rt-dev "clang++ has no ThreadSanitizer"
}

ort_headers() {
  local header api minimum
  minimum=$(sed -n 's/^#define LOWBIT_ORT_API \([0-9]*\).*/\1/p' custom_ops/include/lowbit.h)
  if [ -n "${ORT_INCLUDE_DIR:-}" ]; then
    echo "$ORT_INCLUDE_DIR"
    return
  fi
  for header in /usr/include/onnxruntime /usr/local/include/onnxruntime; do
    api=$(sed -n 's/^#define ORT_API_VERSION \([0-9]*\).*/\1/p' "$header/onnxruntime_c_api.h" 2> /dev/null || true)
    if [ "${api:-0}" -ge "$minimum" ]; then
      echo "$header"
      return
    fi
  done
  tools/ort_headers.sh "$PWD/.cache/ort-headers" "$minimum"
}

# The oldest CUDA that knows every GPU we build for (sm_120).
readonly min_cuda=12.8
# Fetched where none is installed. The library then runs with every driver for CUDA 13 (580 and later).
readonly pypi_cuda=13.0

# new_enough NVCC
new_enough() {
  local version
  version=$("$1" --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  [ -n "$version" ] && [ "$(printf '%s\n' "$min_cuda" "$version" | sort -V | head -n 1)" = "$min_cuda" ]
}

find_nvcc() {
  local candidate dir=$PWD/.cache/cuda python
  for candidate in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$dir/nvidia/cu13/bin/nvcc"; do
    if [ -n "$candidate" ] && new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  python=.venv/bin/python
  [ -x $python ] || python=$(find_python)
  say "no nvcc >= $min_cuda found: fetching CUDA $pypi_cuda from PyPI"
  mkdir -p .cache
  rm -rf "$dir.new" "$dir"
  # Named one by one: the others that they depend on are already among them.
  "$python" -m pip install --quiet --retries 5 --no-deps --target "$dir.new" nvidia-cuda-{nvcc,crt,runtime,cccl}"==$pypi_cuda.*" \
    "nvidia-nvvm==$pypi_cuda.*" >&2 || die "PyPI gave no CUDA compiler. Install the CUDA toolkit, or set CUDACXX to its nvcc."
  # What nvcc and CMake look for, and the packages leave out.
  ln -s lib "$dir.new/nvidia/cu13/lib64"
  ln -s libcudart.so.13 "$dir.new/nvidia/cu13/lib/libcudart.so"
  mv "$dir.new" "$dir"
  echo "$dir/nvidia/cu13/bin/nvcc"
}

case "${1:-}" in
  venv) setup_venv "${2:?venv needs a folder}" ;;
  clang) setup_clang ;;
  headers) ort_headers ;;
  nvcc) find_nvcc ;;
  program) command -v "$2" > /dev/null || apt_install "$3" "no $2 found" ;;
  *) sed -n '2,9p' "$0" >&2; exit 2 ;;
esac
