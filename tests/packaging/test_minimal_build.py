"""What a minimal build takes from required_operators.config (cmake/Minimal.cmake)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import lowbit
import pytest

from tests.support import require_native

require_native()

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "models" / "digits"
SCRIPT = """\
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
include(Minimal)
set(LOWBIT_OPS_CONFIG "{configs}")
lowbit_write_selection("{folder}")
"""


def cmake() -> str:
    beside = Path(sys.executable).parent / "cmake"
    found = str(beside) if beside.exists() else shutil.which("cmake")
    if found is None:
        pytest.skip("cmake is not installed")
    return found


def select(folder: Path, *configs: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "select.cmake"
    script.write_text(SCRIPT.format(root=ROOT, configs=";".join(map(str, configs)), folder=folder))
    return subprocess.run([cmake(), "-P", str(script)], text=True, capture_output=True)


def selection(folder: Path, *configs: Path) -> tuple[bool, set[str], set[str]]:
    """Whether ops are selected, which, and the families of kernels that are left out."""
    done = select(folder, *configs)
    assert done.returncode == 0, done.stderr
    header = (folder / "lowbit_selection.h").read_text()

    def strings(name: str) -> set[str]:
        found = re.search(rf"{name}\[\] = {{(.*)}};", header)
        assert found is not None
        return set(re.findall(r'"([^"]+)"', found[1]))

    return "kSelectsOps = true" in header, strings("kSelectedOps"), strings("kFamiliesLeftOut")


def exported(bits: str, folder: Path) -> tuple[Path, set[str]]:
    """The config of a shipped network, and the ops in it."""
    model = lowbit.convert(DIGITS / f"digits_{bits}.onnx").model
    export = lowbit.export_mobile(model, folder / bits)
    return folder / bits / "required_operators.config", set(export.operators)


def test_a_model_selects_its_ops_and_families(tmp_path):
    config, operators = exported("w4a4", tmp_path)
    selects, ops, left_out = selection(tmp_path, config)
    assert selects
    assert ops == operators
    assert "x86/lut" in left_out  # its weights have up to 2 bits
    assert not {"x86/depthwise", "x86/bitserial"} & left_out


def test_wide_models_leave_narrow_kernels_out(tmp_path):
    config, _ = exported("w8a8", tmp_path)
    _, _, left_out = selection(tmp_path, config)
    assert {"x86/bitserial", "x86/lut"} <= left_out


def test_two_models_share_a_build(tmp_path):
    first, first_ops = exported("w8a8", tmp_path)
    second, second_ops = exported("w1a2", tmp_path)
    _, ops, left_out = selection(tmp_path, first, second)
    assert ops == first_ops | second_ops
    assert "x86/bitserial" not in left_out


def test_without_a_config_everything_is_there(tmp_path):
    assert selection(tmp_path) == (False, set(), set())


def test_a_product_without_forms_keeps_all_kernels(tmp_path):
    """As ONNX Runtime's own tools write it."""
    config = tmp_path / "required_operators.config"
    config.write_text("ai.lowbit;1;LowBitConv,LowBitQuantize\nai.onnx;13;Softmax\n")
    assert selection(tmp_path, config) == (True, {"LowBitConv", "LowBitQuantize"}, set())


def test_other_configs_are_refused(tmp_path):
    config = tmp_path / "required_operators.config"
    config.write_text("ai.onnx;13;Softmax\n")
    done = select(tmp_path, config)
    assert done.returncode != 0
    assert "names no op of ai.lowbit" in done.stderr
    assert "there is no file" in select(tmp_path, tmp_path / "none.config").stderr
