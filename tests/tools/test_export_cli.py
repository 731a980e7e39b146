"""``lowbit export``: what it prints, what it returns, and that errors are one line."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.dialects.test_export import single_node
from tests.numerics import random_nodes
from tests.support import require_native
from tests.tools.test_cli import run, run_json, save

require_native()


@pytest.mark.parametrize("target", ["qonnx", "qdq"])
def test_export_tells_what_every_node_became(converted, tmp_path, target):
    output = tmp_path / "out.onnx"
    summary = run_json("export", converted, "--to", target, "-o", output)
    assert summary["target"] == target
    assert summary["bytes_after"] == output.stat().st_size
    lowbit_nodes = [node for node in onnx.load(converted).graph.node if node.domain == "ai.lowbit"]
    assert [node["name"] for node in summary["nodes"]] == [node.name for node in lowbit_nodes]
    conv = next(node for node in summary["nodes"] if node["op_type"] == "LowBitConv")
    assert conv["form"]["Conv"] == 1
    assert ("Quant" if target == "qonnx" else "QuantizeLinear") in conv["form"]
    onnx.checker.check_model(onnx.load(output))

    text = run("export", converted, "--to", target, "-o", output, "--overwrite", "-v").stdout
    assert "exported" in text
    assert "LowBitConv" in text


def test_export_refuses_in_one_line(converted, source, tmp_path):
    output = tmp_path / "out.onnx"
    assert "lowbit convert" in run("export", source, "--to", "qdq", "-o", output, code=2).stderr
    run("export", converted, "-o", output, code=2)  # --to is required
    run("export", converted, "--to", "onnx", "-o", output, code=2)
    run("export", converted, "--to", "qdq", "--shape", "input=1,1,8,8", "-o", output, code=2)
    assert not output.exists()

    run("export", converted, "--to", "qdq", "-o", output)
    assert "exists already" in run("export", converted, "--to", "qdq", "-o", output, code=2).stderr
    assert (
        "sub_byte"
        in run("export", converted, "--to", "qonnx", "--sub-byte", "-o", output, "--overwrite", code=2).stderr
    )


def test_what_qdq_cannot_say_is_exit_code_3(tmp_path):
    node = random_nodes.make("LowBitThreshold", np.random.default_rng(0))
    model = save(single_node(node)[0], tmp_path / "thresholds.onnx")
    result = run("export", model, "--to", "qdq", "-o", tmp_path / "out.onnx", code=3)
    assert len(result.stderr.strip().splitlines()) == 1
    assert "LowBitThreshold 'n'" in result.stderr
    assert "--to qonnx" in result.stderr
    run("export", model, "--to", "qonnx", "-o", tmp_path / "out.onnx")
