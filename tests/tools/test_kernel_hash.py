"""cmake/KernelHash.cmake: measurements and packed weights are those of the kernels of this very build."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def kernel_hash(kernels: Path, work: Path) -> str:
    """What CMake says of the folder `kernels`."""
    script = work / "hash.cmake"
    script.write_text(
        f'include("{ROOT / "cmake/KernelHash.cmake"}")\n'
        f'lowbit_kernel_hash("{kernels}" hash files)\n'
        'message(STATUS "hash ${hash}")\n'
    )
    said = subprocess.run(["cmake", "-P", script], check=True, text=True, capture_output=True).stdout
    return said.split()[-1]


def test_sources_of_every_folder_count(tmp_path: Path) -> None:
    """A change of one source or header, however deep, is another hash; what only tests compile is not."""
    kernels = tmp_path / "cuda"
    shutil.copytree(ROOT / "custom_ops/kernels/cuda", kernels)
    before = kernel_hash(kernels, tmp_path)
    assert len(before) == 16
    assert kernel_hash(ROOT / "custom_ops/kernels/cuda", tmp_path) == before
    compiled = {file.parent for file in kernels.rglob("*.cu")} - {kernels / "bench"}
    folders = compiled | {kernels / "device", kernels / "nodes/deeper"}
    for folder, suffix in zip(sorted(folders), itertools.cycle(("h", "cuh", "cc", "cu")), strict=False):
        folder.mkdir(exist_ok=True)
        added = folder / f"added.{suffix}"
        added.write_text("// A comment.\n")
        one = kernel_hash(kernels, tmp_path)
        assert one != before, added
        added.write_text("// Another comment.\n")
        assert kernel_hash(kernels, tmp_path) not in (before, one), added
        added.unlink()
    (kernels / "tests/host_test.cc").write_text("// Nothing.\n")
    assert kernel_hash(kernels, tmp_path) == before
