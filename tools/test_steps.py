"""The steps of a full test run: what each one builds, runs and counts.

LINT and FULL list them in the order in which tools/run_tests.py starts them, AFTER what else one waits for.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from test_commands import (
    BUILD,
    JOBS,
    PIP_INSTALL,
    ROOT,
    Outcome,
    built,
    cached_compiler,
    checked,
    configure,
    ctest,
    environment,
    install_variant,
    oldest_api,
    ort_headers,
    parallel,
    pytest,
    run,
    tool,
)

OLDEST_ONNXRUNTIME = f"1.{oldest_api()}"
NEWEST_ONNXRUNTIME = "1.32"

# Tests that touch every op and kernel but are quick enough to repeat under a sanitizer.
NUMERICS = "tests/numerics"
# Sessions of whole models, quick enough to repeat at every ISA level. No kernel of lowbit has a part in what
# else tests/models tell of the networks: parameters, widths, how accurate they are in stock ONNX Runtime.
WHOLE_MODELS = ("tests/smoke", "tests/models/test_digits.py::test_accuracy_in_lowbit")
# Both instruction back ends of the CUDA kernels, without compiling everything seven times: all for wgmma, and
# of the others what shares the most with the rest.
CUDA_TESTED = "90a-real"
CUDA_OLDER = "80-real"
CUDA_OLDER_FILES = ("conv/tiles_mma.cu", "conv/plain_dp4a.cu", "nodes/affine.cu")
# All of them on a GPU that is emulated here.
CUDA_EMULATED = ("lowbit_emulated_cuda_test", "lowbit_emulated_cuda_node_test", "lowbit_cuda_choices_test")
# The processors that ARM kernels are tested on, and for each the tests of the kernels that need what it is
# the first to have. Without the extensions that lowbit does not use, `max` is quicker to emulate.
ARM_PROCESSORS = {
    "cortex-a53": "neon or refuse_little or every_level",
    "cortex-a76": "dotprod",
    "max,sve=off,sme=off": "i8mm or refuse_little",
}
ARM_SHORT = {"cortex-a53": "neon and (edge or extreme)"}
# Of tests/hostile, what hardly comes to native code: nothing in it is a sanitizer's to see.
IN_PYTHON = (
    "bad_models",
    "bad_outputs",
    "bad_qonnx",
    "differential",
    "external_data",
    "hostile_names",
    "mutated_qonnx",
)
# Of tests/packaging, what looks at the installed package; the other files look at the repository.
INSTALLED = tuple(f"tests/packaging/test_{each}.py" for each in ("c_package", "examples", "library"))
# Without what the Makefile tells g++ alone.
FOR_CLANG = {"CXXFLAGS": ""}
# What `make` builds for the editable install; the C++ tests are built from the same objects.
EDITABLE = BUILD / "editable"

Step = tuple[str, Callable[[], Outcome]]


def cxx_files() -> list[Path]:
    """The C++ and CUDA sources and headers of the repository."""
    folders = [ROOT / "custom_ops", ROOT / "ep", ROOT / "tests", ROOT / "examples"]
    endings = ("*.cc", "*.h", "*.cu", "*.cuh")
    return sorted(path for folder in folders for ending in endings for path in folder.rglob(ending))


def ruff() -> Outcome:
    """Style and common mistakes of the Python files."""
    return checked([sys.executable, "-m", "ruff", "check", "."])


def mypy() -> Outcome:
    """Types of the Python package."""
    return checked([sys.executable, "-m", "mypy"])


def clang_format() -> Outcome:
    """Layout of the C++ files."""
    return checked([tool("clang-format"), "--dry-run", "--Werror", *cxx_files()])


def clang_tidy() -> Outcome:
    """Checks of .clang-tidy over everything but kernels: core, operators, ONNX Runtime wrapper, provider.

    The x86 and ARM kernels are left out: intrinsics make the checks slow and noisy, and the kernels' tests
    compare every element with the reference.
    """
    database, depth = BUILD / "tidy", len(ROOT.parts)
    sources = [
        path
        for path in cxx_files()
        if path.suffix == ".cc"
        and path.parts[depth] in ("custom_ops", "ep")
        and not {"x86", "arm"} & set(path.parts)
    ]
    tidy: list[str | Path] = [sys.executable, tool("run-clang-tidy.py"), "-p", database, "-j", JOBS, "-quiet"]
    tidy += ["-clang-tidy-binary", tool("clang-tidy"), "-warnings-as-errors=*"]
    tidy += [f"^{path}$" for path in sources]
    return checked(configure(database), tidy, ORT_INCLUDE_DIR=ort_headers(), **FOR_CLANG)


QUICK_LINT: list[Step] = [("ruff", ruff), ("mypy", mypy), ("clang-format", clang_format)]
TIDY: Step = ("clang-tidy", clang_tidy)
LINT: list[Step] = [*QUICK_LINT, TIDY]


def docs_current() -> Outcome:
    """The generated pages say what the code says."""
    return checked([sys.executable, "tools/generate_docs.py", "--check"])


def docs_without_drift() -> Outcome:
    """Links, files and commands that pages and comments name exist; the README keeps its budget."""
    return checked([sys.executable, "tools/check_docs.py"])


def site() -> Outcome:
    """The documentation builds as a site, every link and anchor in it leads somewhere, nothing is fetched."""
    return checked([sys.executable, "tools/build_site.py"])


def cxx_tests() -> Outcome:
    """The C++ tests, and the fake device that tests/ep run on, beside what `make` has built."""
    return checked(
        [tool("cmake"), "-S", ROOT, "-B", EDITABLE, "-DLOWBIT_TESTS=ON"],
        built(EDITABLE),
        ctest(EDITABLE),
        ORT_INCLUDE_DIR=ort_headers(),
    )


def fake_device() -> dict[str, str]:
    """Names the fake device of the editable install; other builds may hold a sanitizer's."""
    return {"LOWBIT_FAKE_DEVICE": str(EDITABLE / "ep/liblowbit_fake_device.so")}


def all_tests() -> Outcome:
    """Every Python test, with more seeds."""
    run(["tools/setup.sh", "program", "chromium", "chromium"])  # without it tests of pages skip, and say so
    return pytest("tests", *parallel(), LOWBIT_FULL="1", **fake_device())


def zoo_selection() -> Outcome:
    """Some of the zoo's networks in some configurations: they convert, and no element is wrong."""
    return checked([sys.executable, ROOT / "benchmarks" / "zoo.py", "--quick"])


def each_isa_level() -> Outcome:
    """Sessions of whole models with LOWBIT_ISA capped at each level of this machine but the best.

    The best is no cap. tests/numerics name the level of every kernel they run: one run has seen all levels.
    """
    import lowbit._native

    total = Outcome()
    present = list(lowbit._native.isa_levels())
    for level in ("scalar", "sse41", "avx2", "avxvnni", "avx512vnni", "avx512popcnt", "amx"):
        if level not in present:
            print(f"skipped: LOWBIT_ISA={level}: this machine does not have it")
            continue
        if level == present[-1]:
            continue
        # In one process: starting more takes longer than the tests.
        one = pytest(f"isa-{level}", *WHOLE_MODELS, LOWBIT_ISA=level)
        total.passed += one.passed
        total.failed += one.failed
    return total


def runtime_library(compiler: str, name: str) -> str:
    """Full path of a library of the compiler, such as libstdc++.so.6."""
    return subprocess.run(
        [compiler, f"-print-file-name={name}"], check=True, text=True, capture_output=True
    ).stdout.strip()


def address_sanitizer() -> Outcome:
    """ASan and UBSan: the C++ tests, numerics and hostile models against an instrumented build.

    By clang, which takes two thirds of the time that g++ takes for it, and which must not warn. AMX is
    emulated there, for the tests that name it; sessions take the best level that this machine has.
    """
    if not run(["tools/setup.sh", "clang"]):
        return Outcome(skipped="clang++ or its sanitizers are not installed and could not be")
    settings = ["LOWBIT_SANITIZE=address;undefined", "LOWBIT_TESTS=ON", "LOWBIT_WERROR=ON"]
    amx = {"LOWBIT_ISA": "avx512popcnt"} if platform.machine() == "x86_64" else {}
    if amx:
        settings.append("LOWBIT_EMULATE_AMX=ON")
    site = install_variant("asan", *settings, CXX="clang++", **FOR_CLANG)
    # Races are ThreadSanitizer's to see.
    if site is None or not run(ctest(BUILD / "asan/cmake", "-E", "lowbit_concurrency_test")):
        return Outcome(failed=1)
    names = (f"libclang_rt.asan-{platform.machine()}.so", "libstdc++.so.6")
    libraries = [runtime_library("clang++", name) for name in names]
    return pytest(
        "asan",
        *parallel(),
        NUMERICS,
        "tests/hostile",
        # What Python refuses, writes and prints, how a campaign outlives its workers: hardly native code.
        *(f"--ignore=tests/hostile/test_{each}.py" for each in IN_PYTHON),
        "--deselect=tests/hostile/test_verdicts.py::test_a_campaign_survives_crashes_and_hangs",
        LOWBIT_SITE=str(site),
        LD_PRELOAD=":".join(libraries),
        # python and onnxruntime are not instrumented: their leaks and allocator pairs are not ours to judge.
        ASAN_OPTIONS="detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        LOWBIT_SANITIZED="1",
        **amx,
    )


def thread_sanitizer() -> Outcome:
    """TSan sees no race.

    In it are operators that share packed weights, 8 threads on 2 sets of them, and programs of regions.
    """
    if not run(["tools/setup.sh", "clang"]):
        return Outcome(skipped="clang++ or its ThreadSanitizer is not installed and could not be")
    folder = BUILD / "clang"
    settings = ["-DCMAKE_CXX_COMPILER=clang++", "-DLOWBIT_SANITIZE=thread"]
    return checked(
        configure(folder, *settings, "-DLOWBIT_PYTHON=OFF", "-DLOWBIT_TESTS=ON"),
        built(folder, "lowbit_concurrency_test", "lowbit_region_tests"),
        ctest(folder, "-R", "lowbit_concurrency_test|lowbit_region_tests"),
        ORT_INCLUDE_DIR=ort_headers(),
        TSAN_OPTIONS="halt_on_error=1",
        **FOR_CLANG,
    )


def quick_cuda(nvcc: str) -> list[str]:
    """Settings for device code that no GPU runs: some of the instances of a kernel, few optimizations.

    The kernels on the emulated GPU, which another compiler makes, have every instance.
    """
    known = subprocess.run([nvcc, "--help"], check=True, text=True, capture_output=True).stdout
    unoptimized = " --Ofast-compile=max" if "--Ofast-compile" in known else ""
    # -O0 is of the host's part, which packs and plans: on the emulated GPU it runs from another object.
    return [
        f"-DCMAKE_CUDA_FLAGS=-DLOWBIT_CUDA_SAMPLE{unoptimized}",
        "-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG",
    ]


def cuda_build() -> Outcome:
    """liblowbit_cuda for one generation of GPUs, a part of it for an older one, and what needs no GPU.

    The kernels run on an emulated one (custom_ops/kernels/cuda/emulator).
    """
    found = subprocess.run(
        ["tools/setup.sh", "nvcc"], cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE
    )
    if found.returncode != 0:
        return Outcome(skipped="nvcc is not installed and could not be fetched")
    folder, older = BUILD / "cuda", BUILD / "cuda-older"
    settings = ["-DLOWBIT_CUDA=ON", "-DLOWBIT_PYTHON=OFF", "-DLOWBIT_TESTS=ON"]
    nvcc = found.stdout.strip()
    settings += [f"-DCMAKE_CUDA_COMPILER={nvcc}", *quick_cuda(nvcc)]
    objects = "custom_ops/kernels/cuda/CMakeFiles/lowbit_cuda_kernels.dir"
    library = folder / "ep/cuda/liblowbit_cuda.so"
    # What of tests/gpu is quick, and has every form of steps that store, add and map.
    tested = "detector or bias_and_addition or binary_network or attention or excit or in_float or pictures"
    tested += " or table_in_front or zero_points_of"
    on_emulated = ["tests/gpu/test_models.py", "-k", tested]
    emulated = ["LOWBIT_TUNE=off"]
    emulated += [f"LOWBIT_CUDA_LIBRARY={library.with_name('liblowbit_emulated_cuda.so')}"]
    return checked(
        configure(folder, *settings, f"-DCMAKE_CUDA_ARCHITECTURES={CUDA_TESTED}", "-DLOWBIT_CUDA_UNITY=ON"),
        built(folder, "lowbit_cuda", "lowbit_cuda_host_test", "lowbit_emulated_cuda", *CUDA_EMULATED),
        ctest(folder, "-R", "lowbit_cuda_host_test|lowbit_cuda_choices_test|lowbit_emulated_cuda"),
        # It loads where there is neither a driver nor a toolkit.
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).LowBitCreateCudaEpFactory"],
        [sys.executable, "-m", "pytest", "-q", "-rs", "tests/ep/test_targets.py"],
        ["env", *emulated, sys.executable, "-m", "pytest", "-q", "-rs", *on_emulated],
        configure(older, *settings, f"-DCMAKE_CUDA_ARCHITECTURES={CUDA_OLDER}"),
        built(older, *(f"{objects}/{file}.o" for file in CUDA_OLDER_FILES)),
        ORT_INCLUDE_DIR=ort_headers(),
        LOWBIT_TARGETS_LIBRARY=str(library),
        **cached_compiler(),
    )


def arm_tools(*, install: bool) -> str | None:
    """None when the cross compiler and the emulator are there; else what is missing."""
    programs = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
    for program, package in programs.items():
        if install and not run(["tools/setup.sh", "program", program, package]):
            return f"{program} is not installed and could not be"
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def arm_tests(processors: dict[str, str]) -> Outcome:
    """Kernels compiled for ARM, on emulated processors, against the reference kernel of this machine.

    `processors` names for each the tests to run, as pytest's option -k does.
    """
    folder = BUILD / "aarch64"
    options = [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/aarch64-linux-gnu.cmake'}", "-DLOWBIT_PYTHON=OFF"]
    options += ["-DLOWBIT_TESTS=ON", "-DLOWBIT_WERROR=ON"]
    build = built(folder, "lowbit_node_server", "lowbit_unit_tests", "lowbit_node_tests")
    headers = {"ORT_INCLUDE_DIR": ort_headers()}
    if not (run(configure(folder, *options), **headers) and run(build, **headers)):
        return Outcome(failed=1)
    total = Outcome()
    server = shlex.join(["qemu-aarch64", str(folder / "custom_ops/lowbit_node_server")])
    kernels = ("conv_kernels", "winograd", "depthwise", "elementwise")
    files = (f"{NUMERICS}/test_{each}.py" for each in kernels)
    tests = (*parallel(), *files, "-k")
    for processor, chosen in processors.items():
        emulated = {"QEMU_CPU": processor, "QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu"}
        for one in (
            checked(ctest(folder, "-R", "lowbit_(unit|node)_tests"), **emulated),
            pytest(f"arm-{processor.split(',')[0]}", *tests, chosen, LOWBIT_REMOTE=server, **emulated),
        ):
            total.passed += one.passed
            total.failed += one.failed
    return total


def arm() -> Outcome:
    """Every ARM kernel on a processor of each instruction set."""
    missing = arm_tools(install=True)
    return Outcome(skipped=missing) if missing else arm_tests(ARM_PROCESSORS)


def aarch64_sessions() -> Outcome:
    """Sessions of real networks in the aarch64 onnxruntime, with the wheel for it, under an emulator."""
    missing = arm_tools(install=True)
    if missing:
        return Outcome(skipped=missing)
    # Its packages come while the compiler works; what goes wrong there the tests will say.
    fetching = subprocess.Popen([sys.executable, "tools/aarch64_python.py", "setup"], cwd=ROOT)
    folder = BUILD / "aarch64-wheel" / "dist"
    # With the definitions of arm_tests: the compiler's cache has most of the objects.
    build: list[str | Path] = [sys.executable, "tools/build_wheels.py", "--outdir", folder]
    build += ["--machine", "aarch64", "--compiler", "g++", "--define", "LOWBIT_WERROR=ON"]
    succeeded = run(build, **cached_compiler())
    fetching.wait()
    if not succeeded:
        return Outcome(failed=1)
    return pytest("aarch64", "tests/aarch64", LOWBIT_AARCH64_WHEELS=str(folder))


def mobile_example() -> Outcome:
    """examples/mobile with the static library, compiled for ARM and run under an emulator."""
    missing = arm_tools(install=True)
    if missing:
        return Outcome(skipped=missing)
    return pytest(
        "mobile", "tests/mobile", LOWBIT_AARCH64="1", ORT_INCLUDE_DIR=ort_headers(), **cached_compiler()
    )


def onnxruntime_version(version: str) -> Outcome:
    """The smoke tests against one onnxruntime, laid over the virtual environment's."""
    site = BUILD / f"onnxruntime-{version}"
    install = [*PIP_INSTALL, "--no-deps", "--target", str(site), f"onnxruntime=={version}.*"]
    if not site.exists() and not run(install):
        shutil.rmtree(site, ignore_errors=True)
        return Outcome(skipped=f"no onnxruntime {version}.* to install for this Python and platform")
    return pytest(f"onnxruntime-{version}", *parallel(), "tests/smoke", PYTHONPATH=str(site))


def oldest_onnxruntime() -> Outcome:
    """The smoke tests against the oldest supported onnxruntime."""
    return onnxruntime_version(OLDEST_ONNXRUNTIME)


def newest_onnxruntime() -> Outcome:
    """The smoke tests against the newest onnxruntime known to work."""
    return onnxruntime_version(NEWEST_ONNXRUNTIME)


def served_by_triton() -> Outcome:
    """A model behind a running Triton server, whose package needs an older numpy than lowbit's."""
    python = environment("triton", "nvidia-pytriton")
    if python is None:
        return Outcome(skipped="no nvidia-pytriton to install for this Python and platform")
    return pytest("triton", "tests/serving/test_triton.py", python=python)


def ray_cluster() -> Outcome:
    """Work on a Ray cluster of this machine, some of whose processes are killed."""
    python = environment("ray", "ray[data]")
    if python is None:
        return Outcome(skipped="no ray to install for this Python and platform")
    return pytest("ray", "tests/serving/test_ray_batch.py", "tests/serving/test_clusters.py", python=python)


def wheel_from_sdist() -> Outcome:
    """Sdists, wheels from them with build isolation, and a fresh environment that has only the wheels.

    At the end without onnxruntime, which no package of lowbit depends on.
    """
    folder = BUILD / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    environment, unpacked = folder / "venv", folder / "unpacked"
    unpacked.mkdir(parents=True)
    # They unpack the sdists below the repository, where the compiler's cache knows its files.
    settings = {"ORT_INCLUDE_DIR": ort_headers(), "TMPDIR": str(unpacked), **cached_compiler()}
    for package in ("ep/wheel", "."):
        if not run([sys.executable, "-m", "build", "--outdir", folder, package], **settings):
            return Outcome(failed=1)
    (library,) = folder.glob("onnxruntime_ep_lowbit-*.whl")
    (wheel,) = folder.glob("lowbit-*.whl")
    python = environment / "bin/python"
    return checked(
        [sys.executable, "-m", "venv", environment],
        [python, *PIP_INSTALL[1:], library, f"{wheel}[test]"],
        [python, "-m", "pytest", "-q", "-rs", "tests/smoke", *INSTALLED],
        [python, "-m", "pip", "uninstall", "--quiet", "--yes", "onnxruntime"],
        [python, "tests/packaging/environments.py", "--check", "none"],
    )


# The longest come early, so do those that wait for each other (AFTER). Last comes what is many short
# processes: no step of one is left to end alone.
FULL: list[Step] = [
    *QUICK_LINT,
    ("C++ tests", cxx_tests),
    ("ARM", arm),
    ("CUDA", cuda_build),
    ("tests", all_tests),
    ("sessions on aarch64", aarch64_sessions),
    ("AddressSanitizer and UBSan", address_sanitizer),
    ("mobile example on aarch64", mobile_example),
    ("wheel from sdist", wheel_from_sdist),
    ("Triton", served_by_triton),
    ("Ray", ray_cluster),
    ("ThreadSanitizer", thread_sanitizer),
    ("generated docs are current", docs_current),
    ("docs without drift", docs_without_drift),
    ("documentation as a site", site),
    ("a minute of the zoo", zoo_selection),
    (f"onnxruntime {OLDEST_ONNXRUNTIME}", oldest_onnxruntime),
    (f"onnxruntime {NEWEST_ONNXRUNTIME}", newest_onnxruntime),
    ("every ISA level", each_isa_level),
    TIDY,
]

AFTER: dict[str, tuple[str, ...]] = {
    "tests": ("C++ tests",),  # which build the fake device
    # The compiler's cache has most of the objects then, and one of them fetches what both run.
    "sessions on aarch64": ("ARM",),
    "mobile example on aarch64": ("sessions on aarch64",),
}
