"""What every test may use: how much to try, and where the larger models are.

`LOWBIT_FULL=1` (set by `make test FULL=1`) asks for more: hypothesis draws other examples every time, and
tests that loop over seeds take all `seeds(n)` of them.
"""

from __future__ import annotations

import collections
import gc
import importlib.util
import os
from pathlib import Path

# Set before anything loads numpy, and taken over by every process that tests start: the workers of
# pytest-xdist fill all cores already, and the threads of each one's BLAS would wait for one another in busy
# loops, which took a third of the time. No matrix product of the tests is large enough to gain from two.
for _library in ("OPENBLAS", "MKL", "OMP"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# LOWBIT_SITE names a folder with another build of lowbit (a sanitizer's, say) to test instead of the
# installed one, here and in the processes that tests start.
if os.environ.get("LOWBIT_SITE"):
    from tests.other_build import sitecustomize  # noqa: F401

    others = [str(Path(__file__).parent / "other_build"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, others))

# In tests nothing that fails is taken back: converting what holds would hide defects. Tests of that unset it.
os.environ["LOWBIT_STRICT_CHECKS"] = "1"

FULL = os.environ.get("LOWBIT_FULL", "") not in ("", "0")
# Set where the library is a sanitizer's: it looks at every access, so what it finds it finds in few examples,
# and everything takes ten times as long.
SANITIZED = os.environ.get("LOWBIT_SANITIZED", "") not in ("", "0")
# Set where nodes run on another machine (tests/remote), as a rule an emulated one: that takes longer, too.
REMOTE = "LOWBIT_REMOTE" in os.environ

# No deadline: tests never judge time. Derandomized, so that a failure in CI is the same failure at home; the
# full run looks at other examples and prints how to repeat what it finds.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("full", deadline=None, max_examples=20, print_blob=True)
hypothesis.settings.register_profile("emulated", deadline=None, derandomize=True, max_examples=15)
hypothesis.settings.register_profile("sanitized", deadline=None, derandomize=True, max_examples=10)
_PROFILE = "sanitized" if SANITIZED else "emulated" if REMOTE else "full" if FULL else "default"
hypothesis.settings.load_profile(_PROFILE)


# Under a sanitizer one of so many tests runs, and at least one, of what a test of tests/numerics has for each
# kernel (operands, widths, geometries).
SANITIZED_SHARE = 12
KERNEL = ("row", "isa")  # the parameters that say which one it is


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under a sanitizer, a share of the grids of tests/numerics: the same one in every run."""
    if not SANITIZED:
        return
    grids = collections.defaultdict[tuple[str, ...], list[pytest.Item]](list)
    for item in items:
        if "numerics" in item.path.parts and hasattr(item, "callspec"):
            kernel = (str(item.callspec.params.get(name)) for name in KERNEL)
            grids[item.nodeid.partition("[")[0], *kernel].append(item)
    left_out = [item for grid in grids.values() for i, item in enumerate(grid) if i % SANITIZED_SHARE]
    config.hook.pytest_deselected(items=left_out)
    named = {item.nodeid for item in left_out}
    items[:] = [item for item in items if item.nodeid not in named]


def pytest_report_header() -> str:
    """Which lowbit and which onnxruntime are tested."""
    import onnxruntime

    native = importlib.util.find_spec("lowbit._native")
    return f"lowbit: {native.origin if native else 'not built'}; onnxruntime {onnxruntime.__version__}"


def pytest_collection_finish() -> None:
    """The collector need not look at modules and collected tests again: a tenth of the time of most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_measured_kernels(tmp_path_factory):
    """What `lowbit tune` once measured on this machine must not decide which kernels the tests run."""
    os.environ["LOWBIT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


def _shared_models_dir() -> Path | None:
    named = os.environ.get("LOWBIT_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    models = folder if (folder / "qdq").is_dir() else folder / "models"
    return models if models.is_dir() else None


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Folder of the larger evaluation models, not part of the repository; skips where it is absent."""
    folder = _shared_models_dir()
    if folder is None:
        pytest.skip("evaluation models not found: set LOWBIT_SHARED to their folder")
    return folder


@pytest.fixture(scope="session")
def seeds():
    """`seeds(n)` -> range of n seeds in the full run, of half as many in others."""
    return lambda count: range(count if FULL else (count + 1) // 2)
