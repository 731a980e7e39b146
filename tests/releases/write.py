"""Writes the files of this release, which later ones must run: `python -m tests.releases.write`.

tests/releases/<version>/NAME.onnx, with its inputs and outputs in NAME.npz: one lowbit node of each kind with
its parameters, whole converted networks, and `compiled`, a model with an EPContext node. Until the release is
out its folder may be removed and written again; afterwards no file in it changes.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
from lowbit import ops
from onnx import helper, numpy_helper

from tests.dialects.graphs import CASES, qonnx
from tests.numerics import random_nodes
from tests.support import require_native

FOLDER = Path(__file__).parent
NETWORKS = {
    "network_bipolar": qonnx.CASES["bipolar_padding"],
    "network_attention": CASES["constructs.attention_heads"],
    "network_classifier": CASES["exporters.tf2onnx_classifier"],
}
COMPILED, OUTPUT = "compiled", "output "
LARGEST = 3000
"""Bytes of a model of one node."""


def one_node(op_type: str, node: random_nodes.Node) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, and what it is fed."""
    schema = next(each for each in require_native().schemas() if each["name"] == op_type)
    constant = [each["constant"] for each in schema["inputs"]]
    constant += [constant[-1]] * (len(node.inputs) - len(constant))
    names = [f"i{number}" if value is not None else "" for number, value in enumerate(node.inputs)]
    given = {name: np.asarray(value) for name, value in zip(names, node.inputs, strict=True) if name}
    fed = {name: given[name] for name, fixed in zip(names, constant, strict=False) if name and not fixed}
    y = ops.evaluate(op_type, node.attrs, node.inputs)
    attributes = {key: value for key, value in node.attrs.items() if value not in ([], "")}
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"], op_type, domain=ops.DOMAIN, **attributes)],
        op_type,
        [_info(name, value) for name, value in fed.items()],
        [_info("y", y)],
        [numpy_helper.from_array(value, name) for name, value in given.items() if name not in fed],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ops.DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), fed


def _info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def drawn(op_type: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The first small model of one node that random_nodes draws; an AP node has a bipolar operand."""
    for seed in itertools.count():
        node = random_nodes.make(op_type, np.random.default_rng(seed))
        if op_type.startswith("AP") and "bipolar" not in node.attrs.values():
            continue
        model, fed = one_node(op_type, node)
        if model.ByteSize() <= LARGEST and all(value.size for value in fed.values()):
            return model, fed
    raise AssertionError("itertools.count() does not end")


def run(path: Path, fed: dict[str, np.ndarray], device: str) -> dict[str, np.ndarray]:
    """The outputs of a file by their names, without any of ONNX Runtime's own changes to the graph."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = lowbit.session(path, device=device, sess_options=options)
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, fed), strict=True))


def write(folder: Path, name: str, model: onnx.ModelProto, fed: dict[str, np.ndarray]) -> None:
    """One model with what it is fed and gives."""
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    outputs = run(path, fed, "cpu-ops")
    np.savez_compressed(path.with_suffix(".npz"), **fed, **{OUTPUT + key: y for key, y in outputs.items()})


def main() -> int:
    """Entry point; returns the exit status."""
    folder = FOLDER / str(lowbit.__version__)
    if folder.exists():
        print(f"{folder} is there: files of a release do not change", file=sys.stderr)
        return 1
    folder.mkdir()
    for op_type in ops.DEFINITIONS:
        write(folder, op_type, *drawn(op_type))
    for name, case in NETWORKS.items():
        built = case.build(1)
        write(folder, name, lowbit.convert(built.model).model, built.feed(1, **built.sizes[0]))
    source = folder / "network_classifier.onnx"
    lowbit.compile(source, folder / f"{COMPILED}.onnx", device="cpu-ep")
    (folder / f"{COMPILED}.npz").write_bytes(source.with_suffix(".npz").read_bytes())
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
