"""Files of every release (tests/releases/write.py) run in this one and give the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support import all_nodes, require_native

require_native()
import lowbit  # noqa: E402
from lowbit import ops  # noqa: E402
from lowbit.errors import ModelError  # noqa: E402

from tests.releases.write import COMPILED, OUTPUT, run  # noqa: E402

FOLDERS = sorted(path for path in Path(__file__).parent.iterdir() if (path / f"{COMPILED}.onnx").exists())
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.onnx")) if path.stem != COMPILED]


def recorded(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What the file was fed and gave, by name."""
    with np.load(path.with_suffix(".npz")) as arrays:
        fed = {name: arrays[name] for name in arrays if not name.startswith(OUTPUT)}
        return fed, {name.removeprefix(OUTPUT): arrays[name] for name in arrays if name not in fed}


def require_equal(path: Path, device: str) -> None:
    fed, expected = recorded(path)
    given = run(path, fed, device)
    assert given.keys() == expected.keys()
    for name, y in expected.items():
        np.testing.assert_array_equal(given[name], y, err_msg=name, strict=True)


@pytest.mark.parametrize("device", ["cpu-ops", "cpu-ep"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_gives_the_same_bits(path: Path, device: str) -> None:
    require_equal(path, device)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_compiled_model_runs_in_its_release_and_is_refused_in_others(folder: Path) -> None:
    path = folder / f"{COMPILED}.onnx"
    assert [node for node in onnx.load(path).graph.node if node.op_type == "EPContext"]
    if folder.name == lowbit.__version__:
        require_equal(path, "cpu-ep")
    else:
        with pytest.raises(ModelError, match=rf"{folder.name}.*{lowbit.__version__}.*compile it again"):
            run(path, recorded(path)[0], "cpu-ep")


def test_the_first_release_has_every_kind_of_node() -> None:
    nodes = [node for path in FILES if path.parent == FOLDERS[0] for node in all_nodes(onnx.load(path).graph)]
    found = {node.op_type for node in nodes if node.domain == ops.DOMAIN}
    assert len(found) == 23
    assert found <= set(ops.DEFINITIONS)
