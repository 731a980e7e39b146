"""Graphs that almost have the form that a rule expects: each stays equal, whatever the rule makes of it.

Every graph of tests/dialects is written by hand to match; here one attribute, one operand or one reader of it
changes, so that most of these match in all but one place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.converter.graphs import conv, image, output
from tests.dialects.graphs import CASES
from tests.dialects.graphs.builder import Built, Graph
from tests.hostile.differential import verdict
from tests.support import require_native

EDITS: list[tuple[str, dict[str, Any]]] = [
    ("Conv", {"auto_pad": "SAME_LOWER", "pads": None, "strides": [2, 2]}),
    ("Conv", {"auto_pad": "SAME_UPPER", "pads": None}),
    ("Conv", {"auto_pad": "VALID", "pads": None}),
    ("Conv", {"dilations": [2, 2]}),
    ("Conv", {"strides": [3, 1]}),
    ("ConvTranspose", {"auto_pad": "SAME_UPPER", "pads": None, "output_padding": None}),
    ("ConvTranspose", {"output_shape": [9, 9], "pads": None, "output_padding": None}),
    ("ConvTranspose", {"strides": [3, 3]}),
    ("MaxPool", {"auto_pad": "SAME_UPPER", "pads": None}),
    ("MaxPool", {"ceil_mode": 1, "strides": [2, 2]}),
    ("MaxPool", {"dilations": [2, 2]}),
    ("MaxPool", {"ceil_mode": 1, "auto_pad": "SAME_UPPER", "pads": None, "strides": [2, 2]}),
    ("MaxPool", {"ceil_mode": 1, "auto_pad": "VALID", "pads": None, "strides": [2, 2]}),
    ("AveragePool", {"auto_pad": "SAME_LOWER", "pads": None}),
    ("AveragePool", {"ceil_mode": 1, "strides": [2, 2]}),
    ("AveragePool", {"count_include_pad": 1, "pads": [1, 1, 0, 1]}),
    ("Resize", {"mode": "cubic"}),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("Resize", {"exclude_outside": 1}),
    ("Resize", {"coordinate_transformation_mode": "tf_crop_and_resize"}),
    ("SpaceToDepth", {"blocksize": 1}),
    ("Softmax", {"axis": 0}),
    ("Softmax", {"axis": 1}),
    ("Concat", {"axis": 0}),
    ("Concat", {"axis": -1}),
    ("Split", {"axis": 0}),
    ("Split", {"axis": -1}),
    ("Gather", {"axis": 0}),
    ("ReduceMean", {"keepdims": 0}),
    ("ReduceMean", {"axes": [1]}),
    ("ReduceMax", {"keepdims": 0}),
    ("Gemm", {"alpha": 0.5}),
    ("Gemm", {"beta": 0.5}),
    ("Gemm", {"beta": 0.0}),
    ("Flatten", {"axis": 0}),
    ("Flatten", {"axis": 2}),
    ("Pad", {"mode": "reflect"}),
    ("Pad", {"mode": "edge"}),
    ("DepthToSpace", {"mode": "CRD"}),
    ("LeakyRelu", {"alpha": -0.25}),
    ("HardSigmoid", {"alpha": -0.2}),
    ("QuantizeLinear", {"axis": 0}),
    ("DequantizeLinear", {"axis": 0}),
]
"""Of a node of this type, these attributes become what is given; None: are left out."""
OTHER = {
    "Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "Relu": "Abs", "Clip": "Neg", "Sigmoid": "Tanh",
    "MaxPool": "AveragePool", "GlobalAveragePool": "GlobalMaxPool", "ReduceMax": "ReduceMin", "Max": "Min",
    "Min": "Max", "HardSwish": "HardSigmoid", "Sqrt": "Exp", "Softmax": "LogSoftmax", "Identity": "Neg",
    "Floor": "Ceil", "Round": "Floor", "ArgMax": "ArgMin", "ReduceMean": "ReduceSum",
}  # fmt: skip


def edited(model: onnx.ModelProto, op_type: str, attributes: Mapping[str, Any]) -> bool:
    """Whether the model has a node of the type, whose attributes are then others."""
    node = next((node for node in model.graph.node if node.op_type == op_type), None)
    if node is None:
        return False
    kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    given = {name: value for name, value in attributes.items() if value is not None}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())
    return True


def read_inside(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """A float tensor between two nodes becomes an output too."""
    inner = {v.name: v for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    floats = [v for v in inner.values() if v.type.tensor_type.elem_type == TensorProto.FLOAT]
    if floats:
        model.graph.output.append(floats[int(rng.integers(len(floats)))])


def computed(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """A constant becomes the result of a node."""
    tensors = model.graph.initializer
    if not tensors:
        return
    tensor = tensors[int(rng.integers(len(tensors)))]
    name, tensor.name = tensor.name, f"{tensor.name}.stored"
    model.graph.node.insert(0, helper.make_node("Identity", [tensor.name], [name], name="computes_constant"))


def scaled(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Constants of an element by element operation change their sign and gain a dim."""
    named = {tensor.name: tensor for tensor in model.graph.initializer}
    found = [
        named[name]
        for node in model.graph.node
        if node.op_type in ("Add", "Mul", "Sub", "Div", "Clip", "Min", "Max")
        for name in node.input
        if name in named and named[name].data_type == TensorProto.FLOAT
    ]
    if found:
        tensor = found[int(rng.integers(len(found)))]
        values = -numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(values.reshape(1, *values.shape), tensor.name))


def turned(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """The operands of an element by element operation change places."""
    nodes = [node for node in model.graph.node if node.op_type in ("Add", "Mul", "Sub", "Div", "MatMul")]
    if nodes:
        node = nodes[int(rng.integers(len(nodes)))]
        node.input[0], node.input[1] = node.input[1], node.input[0]


def other_operation(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """An operation becomes a related one."""
    nodes = [node for node in model.graph.node if node.op_type in OTHER]
    if nodes:
        node = nodes[int(rng.integers(len(nodes)))]
        node.op_type = OTHER[node.op_type]


def open_dims(model: onnx.ModelProto, least: int) -> None:
    """Of inputs the dims from one on say nothing, and outputs say nothing of their shapes."""
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim[least:]:
            dim.Clear()
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def unknown_dims(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """The last dims of inputs, or all."""
    open_dims(model, int(rng.integers(4)))


TRIED = 15
"""How many graphs meet each of these changes."""
CHANGES: list[Callable[[onnx.ModelProto, np.random.Generator], None]] = [
    read_inside, computed, scaled, turned, other_operation, unknown_dims,
]  # fmt: skip


def agrees(name: str, change: Callable[[onnx.ModelProto], bool | None], seed: int) -> bool:
    """Whether a graph has what is to be changed; asserts that the changed one agrees with stock."""
    built = CASES[name].build(seed)
    model = onnx.ModelProto()
    model.CopyFrom(built.model)
    if change(model) is False or model == built.model:
        return False
    what = verdict(model, [built.feed(0, **built.sizes[0])], "cpu-ops")
    assert not what.startswith("FAILED"), f"{name}: {what}"
    return True


@pytest.mark.parametrize("sizes", ["stated", "open"])
@pytest.mark.parametrize(("op_type", "attributes"), EDITS, ids=str)
def test_other_attributes(op_type: str, attributes: dict[str, Any], sizes: str) -> None:
    require_native()

    def change(model: onnx.ModelProto) -> bool:
        if sizes == "open":
            open_dims(model, 0)
        return edited(model, op_type, attributes)

    assert any(agrees(name, change, 1) for name in CASES), f"no graph has a {op_type}"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_another_form(change: Callable[[onnx.ModelProto, np.random.Generator], None], seeds) -> None:
    require_native()
    for seed in seeds(1):
        rng = np.random.default_rng([seed, CHANGES.index(change)])
        changed = (agrees(str(name), partial(change, rng=rng), seed) for name in rng.permutation([*CASES]))
        assert sum(itertools.islice(filter(None, changed), TRIED)) == TRIED


def scalar(g: Graph, value: float) -> str:
    return g.floats(np.float32(value))


FUNCTIONS: dict[str, Callable[[Graph, str], str]] = {
    "HardSigmoid": lambda g, y: g.node("HardSigmoid", [y], alpha=0.3),
    "Floor": lambda g, y: g.node("Floor", [y]),
    "Ceil": lambda g, y: g.node("Ceil", [y]),
    "Round": lambda g, y: g.node("Round", [y]),
    "Cast": lambda g, y: g.node("Cast", [y], to=TensorProto.FLOAT),
    "Cast and back": lambda g, y: g.node(
        "Cast", [g.node("Cast", [y], to=TensorProto.INT32)], to=TensorProto.FLOAT
    ),
    "LeakyRelu that falls": lambda g, y: g.node("LeakyRelu", [y], alpha=-0.5),
    "PRelu that falls": lambda g, y: g.node("PRelu", [y, g.floats(np.full((5, 1, 1), -0.5))]),
    "Div by 0": lambda g, y: g.node("Div", [y, scalar(g, 0)]),
    "Div of a constant": lambda g, y: g.node("Div", [scalar(g, 1), g.node("Abs", [y])]),
    "two Adds": lambda g, y: g.node("Add", [g.node("Add", [y, scalar(g, 0.1)]), scalar(g, -0.3)]),
    "Sub from a constant": lambda g, y: g.node("Sub", [scalar(g, 0.2), y]),
    "Clip between what is computed": lambda g, y: g.node(
        "Clip", [y, "", g.node("ReduceMax", [y], keepdims=0)]
    ),
    "two SiLUs": lambda g, y: silu(g, silu(g, y)),
    "a large Mul": lambda g, y: g.node("Mul", [g.node("Mul", [y, scalar(g, 3e38)]), scalar(g, 1e-38)]),
    "Sigmoid": lambda g, y: g.node("Sigmoid", [y]),
}


def silu(g: Graph, y: str) -> str:
    return g.node("Mul", [y, g.node("Sigmoid", [y])])


@pytest.mark.parametrize("kind", ["u8", "u4"])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions_between_a_layer_and_its_quantizer(what: str, kind: str) -> None:
    require_native()
    g = Graph(f"{what} {kind}", 1)
    g.opset, g.ir_version = 21, 10
    y = FUNCTIONS[what](g, conv(g, *image(g))[0])
    output(g, g.qdq(y, g.act(0.02 if kind == "u8" else 0.1, kind)), 2, 5, 4, 4)
    built = Built(g.proto(), g.feeds, 1)
    assert verdict(built.model, [built.feed()], "cpu-ops") == "equal"
