# Two commands do everything from a fresh clone: `make demo` and `make test`. They set up what they need in .venv,
# .cache and build; `make help` lists the rest.
#
#   PYTHON=python3.12          the interpreter for .venv (only used when .venv is created)
#   CXX=clang++                the compiler
#   ORT_INCLUDE_DIR=DIR        ONNX Runtime headers, instead of the system's or fetched ones
#   FULL=1                     make test: everything that CI checks
#   ARGS="-k conv -x"          make test, demo, bench: passed on

VENV := .venv
PY := $(VENV)/bin/python
TOOLS_READY := $(VENV)/.tools-ready
INSTALLED := $(VENV)/.installed

CXX_SOURCES := $(shell find custom_ops ep -type f \( -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.map' \
  -o -name CMakeLists.txt \))
BUILD_INPUTS := $(CXX_SOURCES) $(wildcard CMakeLists.txt cmake/*) pyproject.toml $(wildcard ep/wheel/*.toml ep/wheel/*/*.py)
# Both packages from one build folder: that of the library as it is, and, with the extra $(1), that of the Python sources, which
# are used in place.
install = ORT_INCLUDE_DIR="$$(tools/setup.sh headers)" $(PY) -m pip install --quiet --retries 5 --no-build-isolation \
  --config-settings=build-dir="$(CURDIR)/build/editable" ./ep/wheel --editable '.[$(1)]'

# The whole check compiles most files in several builds: with a compiler cache, once. tools/run_tests.py has it too.
ifneq ($(FULL),)
ifneq ($(shell tools/setup.sh program ccache ccache > /dev/null && echo found),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CCACHE_DIR := $(CURDIR)/.cache/ccache
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# To the cache, the same compiler by another name is another: scikit-build and CMake would each look for one.
export CXX
endif
# g++ collects its garbage from 128 MB on, again and again in the files of kernels, which need less than 1 GB without: a tenth of
# its time there (33 -> 28 CPU seconds, bitserial_avx512popcnt.cc). Clang would warn about the option.
ifneq ($(shell $(CXX) --version | grep -c "Free Software Foundation"),0)
export CXXFLAGS += --param=ggc-min-heapsize=1000000
endif
# pip would compile all of scipy and sympy (30 s of CPU); Python compiles what is imported. (0 switches --no-compile on: pip
# reads the value as that of --compile.)
export PIP_NO_COMPILE := 0
endif

# Tools of the virtual environment (cmake, ninja, clang-format ...) come first.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers like to set it. The tests run hundreds of processes that import the package, and compiling its
# sources takes each of them longer (3 s) than what it is there for (1 s).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test coverage lint format docs site wheel wheel-aarch64 wheel-cuda bench setup headers clean distclean
.DELETE_ON_ERROR:

help:
	@echo "make demo      convert shipped models, run them in onnxruntime, compare with stock"
	@echo "make test      the tests; FULL=1 adds sanitizers, lint, every ISA level, CUDA, other onnxruntime versions"
	@echo "make coverage  which lines and branches the tests run, into benchmarks/results/coverage.md"
	@echo "make lint      ruff, mypy, clang-format, clang-tidy"
	@echo "make format    rewrite the C++ sources with clang-format, fix what ruff can"
	@echo "make docs      regenerate the generated pages of docs/, the results index, the README's table and picture"
	@echo "make site      the documentation as a site: build/site/html/index.html"
	@echo "make wheel     build the wheels and sdists of both packages into dist/, and the library alone;"
	@echo "               wheel-aarch64: cross-build them for 64-bit ARM; wheel-cuda: liblowbit_cuda, for every GPU"
	@echo "make bench     run the benchmarks into benchmarks/results/"
	@echo "make headers   fetch the ONNX Runtime headers if the system has none new enough; prints their folder"
	@echo "make clean     remove build outputs; distclean also removes .venv and .cache"

demo: $(INSTALLED)
	$(PY) -m lowbit.models.demo $(ARGS)

test: $(INSTALLED)
	$(PY) tools/run_tests.py $(if $(FULL),--full) -- $(ARGS)

coverage: $(INSTALLED)
	$(PY) tools/measure_coverage.py $(ARGS)

lint: $(INSTALLED)
	$(PY) tools/run_tests.py --lint

format: $(INSTALLED)
	$(PY) -m ruff check --fix .
	$(PY) tools/run_tests.py --format

docs: $(INSTALLED)
	$(PY) tools/generate_docs.py

site: $(INSTALLED)
	$(call install,docs)
	$(PY) tools/build_site.py

wheel: $(TOOLS_READY)
	$(PY) tools/build_wheels.py --sdist

wheel-cuda: $(INSTALLED)
	$(PY) -m pip install --quiet --retries 5 build
	ORT_INCLUDE_DIR="$$(tools/setup.sh headers)" CUDACXX="$$(tools/setup.sh nvcc)" \
	  $(PY) -m build --wheel --outdir dist ep/cuda/wheel

wheel-aarch64: $(TOOLS_READY)
	$(PY) tools/build_wheels.py --machine aarch64

bench: $(INSTALLED)
	$(call install,bench)
	$(PY) benchmarks/run.py $(ARGS)

setup: $(INSTALLED)

headers:
	@tools/setup.sh headers

$(TOOLS_READY): tools/setup.sh pyproject.toml
	PYTHON="$(PYTHON)" tools/setup.sh venv $(VENV)
	@touch $@

# C++ is rebuilt (incrementally) when it changed.
$(INSTALLED): $(TOOLS_READY) $(BUILD_INPUTS)
	$(call install,test)
	@touch $@

clean:
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache

distclean: clean
	rm -rf $(VENV) .cache
