"""Names that a terminal would obey: they appear, in tables, errors, pages and pipes, and do nothing."""

from __future__ import annotations

import re
from pathlib import Path

import lowbit
import onnx
import pytest
from click.testing import CliRunner
from lowbit.cli import cli
from lowbit.text import printable
from onnx import helper

from tests.hostile.test_bad_models import cli as process
from tests.support import require_native
from tests.tools.conftest import qdq_conv

# A clear screen, a title, a bell, an overwritten line, C1's CSI, text from right to left, a line's end, and
# what rich would take for markup and for an emoji.
EVIL = "\x1b[2J\x1b]0;owned\x07\rgone\x9b31m\u202eesrever\u2066\u2028[red]:boom:\n"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with those characters in the names of all nodes and tensors, inputs and outputs included."""
    graph = model.graph
    for node in graph.node:
        node.name = f"{node.name}{EVIL}"
        for names in (node.input, node.output):
            names[:] = [name and f"{name}{EVIL}" for name in names]
    for named in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        named.name = f"{named.name}{EVIL}"
    graph.name = f"graph{EVIL}"
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A model with a node that converts and one that stays, and its conversion."""
    require_native()
    folder = tmp_path_factory.mktemp("names")
    model = qdq_conv()
    last = model.graph.output[0]
    model.graph.node.append(helper.make_node("Softmax", [last.name], ["probabilities"], "softmax"))
    model.graph.output.append(helper.make_tensor_value_info("probabilities", 1, [1, 4, 8, 8]))
    source, converted = folder / "source.onnx", folder / "converted.onnx"
    source.write_bytes(renamed(model).SerializeToString())
    lowbit.convert(source, converted)
    return source, converted


def test_printable() -> None:
    assert printable("Größe/卷积.1 [x]") == "Größe/卷积.1 [x]"
    assert printable("a\x1b[31m\n\0\u202e\ud800") == r"a\x1b[31m\n\x00\u202e\ud800"
    assert printable("a\nb\t", keep="\n") == "a\nb\\t"


@pytest.mark.parametrize(
    "arguments",
    ["inspect {source} -v", "inspect {converted} -v --device cpu-ep",
     "convert {source} -o {folder}/o.onnx -v", "verify {converted} --against {source} -v",
     "run {converted} --random", "tune {converted}",
     "export {converted} --to qdq -o {folder}/e.onnx -v", "export {converted} --to mobile -o {folder}/m",
     "compile {converted} -o {folder}/c.onnx --device cpu-ep",
     "bench {converted} --against {source} --rounds 1 --profile"],
)  # fmt: skip
def test_commands(models, tmp_path, monkeypatch, arguments: str) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    source, converted = models
    words = arguments.format(source=source, converted=converted, folder=tmp_path).split()
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert not OBEYED.findall(result.output), repr(result.output)
    if words[0] in ("inspect", "convert", "verify", "run", "tune"):
        assert r"\x1b[2J" in result.output, "it is told, not dropped"


def test_errors(models, tmp_path) -> None:
    model = onnx.load(models[0])
    next(node for node in model.graph.node if node.op_type == "Conv").input[0] = f"nowhere{EVIL}"
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(model.SerializeToString())
    with pytest.raises(lowbit.ModelError) as caught:
        lowbit.convert(broken)
    assert not OBEYED.findall(str(caught.value))
    for words in (["convert", broken, "-o", tmp_path / "o.onnx", "-v"], ["run", broken, "--random", "-v"]):
        done = process(*words)
        assert done.returncode == 2
        assert "nowhere" in done.stderr
        assert not OBEYED.findall(done.stdout + done.stderr), repr(done.stderr)


def test_the_page_and_json(models, tmp_path) -> None:
    for name in ("page.html", "report.json"):
        result = CliRunner().invoke(cli, ["inspect", str(models[0]), "--report", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert not OBEYED.findall(text)
        assert "x1b[2J" in text or r"\u001b[2J" in text
