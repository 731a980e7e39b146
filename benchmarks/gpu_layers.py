"""The convolutions of ResNet-50 on a GPU through InferenceSession: what fusion, tuning and fewer bits gain.

python benchmarks/gpu_layers.py                                             19 layers, batch 1 and 16
python benchmarks/gpu_layers.py --device cpu-ep --batches 1 --rounds 1 --only @7   does it still run?

A session holds many equal nodes that read one input and whose outputs are bound to one buffer. They are one
region, on a GPU one CUDA graph, whose device time over their number is the time of a layer, as warm in L2 as
it ever is. Variants of a layer take turns:

- int8: codes to codes, ReLU and requantization in registers; with measured choices, and with estimated ones.
- weights at 4 and at 2 bits, activations at 8.
- fp32 out: dequantized in registers; beside codes out and a LowBitDequantize behind.
- ReLU apart: signed codes out and a table look-up behind.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from gpu_networks import facts_of
from layers import LAYERS, Layer, Pair, Problem
from lowbit.sessions.binding import memory_of, queued_seconds
from lowbit.sessions.devices import canonical
from onnx import TensorProto, helper, numpy_helper
from results import RESULTS, Table, write

COPIES = 20
BLOCK_SECONDS = 0.02
DOMAIN = "ai.lowbit"
# The paper on extremely low-bit convolution that these kernels start from, section 5.3: averages over the
# same layers at batch 1 on an RTX 2080 Ti.
PAPER = {"tuning": 2.91, "dequantize": 1.18, "relu": 1.51}

Array = npt.NDArray[Any]
Nodes = Callable[[Problem, str, str], tuple[list[onnx.NodeProto], dict[str, Array]]]


def conv(problem: Problem, x: str, y: str, **changes: Any) -> tuple[onnx.NodeProto, dict[str, Array]]:
    """The LowBitConv of a layer; `changes` are attributes."""
    attributes, constants = problem.lowbit_node()
    attributes |= changes
    if attributes.get("epilogue") == "float":
        constants = {name: value for name, value in constants.items() if not name.startswith("y_")}
    return helper.make_node("LowBitConv", [x, *constants], [y], domain=DOMAIN, **attributes), constants


def codes(problem: Problem, x: str, y: str) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """Codes out, ReLU in the clip bounds of unsigned codes."""
    node, constants = conv(problem, x, y, y_bits=8)
    return [node], constants


def floats(problem: Problem, x: str, y: str) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """float32 out."""
    node, constants = conv(problem, x, y, epilogue="float")
    return [node], constants


def dequantize_apart(problem: Problem, x: str, y: str) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """Codes out, then float32 by a node of its own."""
    node, constants = conv(problem, x, f"{y}.codes", y_bits=8)
    scales = {"y_scale": constants["y_scale"], "y_zero_point": constants["y_zero_point"]}
    behind = helper.make_node("LowBitDequantize", [f"{y}.codes", *scales], [y], domain=DOMAIN)
    return [node, behind], constants


def relu_apart(problem: Problem, x: str, y: str) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """Signed codes out, then ReLU by a node of its own."""
    node, constants = conv(problem, x, f"{y}.codes", y_bits=8, y_encoding="signed")
    values = np.arange(256, dtype=np.uint8).view(np.int8)
    table = np.maximum(values, 0).view(np.uint8)
    behind = helper.make_node(
        "LowBitLookup", [f"{y}.codes", "table"], [y], domain=DOMAIN, x_encoding="signed"
    )
    return [node, behind], {**constants, "table": table}


@dataclass(frozen=True)
class Variant:
    """A way to compute a layer."""

    name: str
    nodes: Nodes
    bits: str = "w8a8"
    tuning: str = "on"
    output: int = TensorProto.UINT8
    in_row: bool = False  # each copy reads what the one before makes


VARIANTS = (
    Variant("int8", codes),
    Variant("estimated", codes, tuning="off"),
    Variant("w4a8", codes, bits="w4a8"),
    Variant("w2a8", codes, bits="w2a8"),
    Variant("fp32", floats, output=TensorProto.FLOAT),
    Variant("dequantize apart", dequantize_apart, output=TensorProto.FLOAT),
    Variant("relu apart", relu_apart),
)


def model_of(layer: Layer, variant: Variant) -> onnx.ModelProto:
    """Many copies of a layer: in a row; or reading one input, all outputs the model's: none is dead."""
    problem = Problem.seeded(layer, Pair.parse(variant.bits))
    nodes, constants = [], {}
    for i in range(COPIES):
        x = f"y{i - 1}" if variant.in_row and i > 0 else "x"
        more, constants = variant.nodes(problem, x, f"y{i}")
        nodes += more
    sizes = ["N", layer.height, layer.width, layer.in_channels]
    outputs = ["N", *layer.output, layer.out_channels]
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, sizes)],
        [
            helper.make_tensor_value_info(f"y{i}", variant.output, outputs)
            for i in range(COPIES - 1 if variant.in_row else 0, COPIES)
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


class Subject:
    """A session of one variant with bound tensors."""

    def __init__(self, layer: Layer, variant: Variant, x: Array, device: str, cache: str) -> None:
        options = ort.SessionOptions()
        # Equal nodes are what is measured here; an optimizer would leave one of them.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        given = {"tuning": variant.tuning, "cache_dir": cache}
        model = model_of(layer, variant)
        self.session = lowbit.session(model, device=device, sess_options=options, provider_options=given)
        where = memory_of(device)
        shape = [len(x), *layer.output, layer.out_channels]
        dtype = helper.tensor_dtype_to_np_dtype(variant.output)
        buffer = ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, *where)
        self.binding = self.session.io_binding()
        self.binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x, *where))
        for output in self.session.get_outputs():
            self.binding.bind_ortvalue_output(output.name, buffer)
        self.session.run_with_iobinding(self.binding)
        self.output = buffer.numpy().copy()
        queued_seconds(self.session, self.binding, 2)
        self.runs = max(2, round(BLOCK_SECONDS / queued_seconds(self.session, self.binding, 3)))

    def microseconds(self) -> float:
        """Device time of one layer."""
        return queued_seconds(self.session, self.binding, self.runs) / COPIES * 1e6


def medians(subjects: dict[str, Subject], rounds: int) -> dict[str, float]:
    """Microseconds by name, the median of rounds in which all take turns."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            times[name].append(subject.microseconds())
    return {name: float(np.median(values)) for name, values in times.items()}


def measure(layer: Layer, batch: int, device: str, rounds: int) -> dict[str, float]:
    """Median microseconds of each variant, in turns; outputs that must agree are compared."""
    problem = Problem.seeded(layer, Pair.parse("w8a8"))
    x = np.random.default_rng(2).integers(0, 256, (batch, *problem.x.shape[1:]), np.uint8)
    with tempfile.TemporaryDirectory() as cache:
        subjects = {each.name: Subject(layer, each, x, device, cache) for each in VARIANTS}
        times = medians(subjects, rounds)
    out = {name: subject.output for name, subject in subjects.items()}
    scale = problem.y_scale
    same = {
        "estimated": out["estimated"],
        "dequantize apart": np.rint(out["dequantize apart"] / scale).astype(np.uint8),
    }
    for name, value in same.items():
        if not np.array_equal(value, out["int8"]):
            raise SystemExit(f"{layer.name}, batch {batch}: {name} differs from int8")
    if not np.array_equal(np.minimum(out["int8"], 127), out["relu apart"]):
        raise SystemExit(f"{layer.name}, batch {batch}: relu apart differs from int8")
    # Half a step lies between a number and its code, and float rounding.
    if np.abs(np.clip(out["fp32"], 0, 255 * scale) - out["dequantize apart"]).max() > 0.5001 * scale:
        raise SystemExit(f"{layer.name}, batch {batch}: fp32 differs from int8")
    return times


RATIOS = {
    "estimated / tuned": ("estimated", "int8"),
    "w4a8 / int8": ("w4a8", "int8"),
    "w2a8 / int8": ("w2a8", "int8"),
    "dequantize apart / fused": ("dequantize apart", "fp32"),
    "relu apart / fused": ("relu apart", "int8"),
}


def table(batch: int, rows: dict[str, dict[str, float]]) -> Table:
    """A row per layer, medians and geometric means below."""
    out = Table(f"batch {batch}", ["layer", *(f"{each.name} us" for each in VARIANTS), *RATIOS])
    ratios = {name: [row[a] / row[b] for row in rows.values()] for name, (a, b) in RATIOS.items()}
    for i, (name, row) in enumerate(rows.items()):
        times = (row[each.name] for each in VARIANTS)
        out.rows.append([name, *times, *(values[i] for values in ratios.values())])
    blank = [""] * len(VARIANTS)
    out.rows.append(["median", *blank, *(float(np.median(values)) for values in ratios.values())])
    means = (float(np.exp(np.mean(np.log(values)))) for values in ratios.values())
    out.rows.append(["geometric mean", *blank, *means])
    return out


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of 20 ms a variant (default: 9)")
    parser.add_argument("--only", default="", help="only layers whose name contains this")
    parser.add_argument("--name", default="cuda_fusion_layers", help="name of the results file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    device = canonical(options.device)
    networks = json.loads(LAYERS.read_text(encoding="utf-8"))["networks"]
    layers = [Layer(*fields) for fields in networks["resnet50_v1"]]
    layers = [layer for layer in layers if options.only in layer.name]
    tables, raw = [], {}
    for batch in map(int, options.batches.split(",")):
        rows = {layer.name: measure(layer, batch, device, options.rounds) for layer in layers}
        tables.append(table(batch, rows))
        raw[batch] = rows
        print(tables[-1].markdown(), flush=True)
    notes = [
        f"Microseconds of a layer: device time of a region of {COPIES} equal ones, queued runs, median of "
        f"{options.rounds} rounds; uint8 activations, channels last, through InferenceSession.",
        "Outputs with and without tuning, and with and without fusion of ReLU, are equal in every element; "
        "float32 outputs of the fused form round to the codes of the others.",
        "dequantize apart / fused: float32 out, the fused form without the rounding to codes between. relu "
        "apart: signed codes, a table look-up behind.",
        "The paper's averages on an RTX 2080 Ti at batch 1: estimated / tuned "
        f"{PAPER['tuning']} (default parameters there), dequantize apart {PAPER['dequantize']}, relu apart "
        f"{PAPER['relu']}. Its separate steps are launches; ours are nodes of one CUDA graph.",
    ]
    write(options.name, "Convolutions on a GPU: tuning, fusion, weight bits", tables, notes, raw,
          folder=options.out, machine=facts_of(device), commit=options.commit)  # fmt: skip


if __name__ == "__main__":
    main()
