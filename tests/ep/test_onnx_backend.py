"""ONNX's own backend tests (onnx.backend.test) of every op that the provider or the converter touches.

Each as it is, with the provider in the session; those of integer ops converted; and those of float ops
between quantizers, converted, against ONNX's reference evaluator, which has to agree in every bit.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.ops import DOMAIN
from onnx import helper, numpy_helper
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.test_case import TestCase as Case
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

DEVICES = ["cpu", "fake:0"]
PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
FLOAT_OPS = [
    "Abs", "Add", "ArgMax", "ArgMin", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv",
    "ConvTranspose", "DepthToSpace", "Div", "Dropout", "Elu", "Erf", "Exp", "Expand", "Flatten", "Gather",
    "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "HardSigmoid", "HardSwish",
    "Identity", "InstanceNormalization", "LayerNormalization", "LeakyRelu", "LogSoftmax", "MatMul", "Max",
    "MaxPool", "Min", "Mul", "Neg", "Pad", "Relu", "Reshape", "Resize", "Sigmoid", "Slice", "Softmax",
    "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "Transpose", "Unsqueeze",
]  # fmt: skip
INTEGER_OPS = [
    "Cast", "ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv",
    "QLinearMatMul", "QuantizeLinear",
]  # fmt: skip
BECOMES_LOWBIT = {
    "Abs", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "MaxPool", "Neg", "Relu",
    "Sigmoid", "Softmax", "Sqrt", "Tanh",
}  # fmt: skip
"""The float ops that the converter takes in every one of their tests."""

UNLIKE_ONNX = {"test_resize_downsample_scales_cubic_align_corners"}
"""Where ONNX Runtime, which lowbit equals, computes something else than ONNX says."""

RANDOM = "test_training_dropout"
"""How the names of tests begin whose results are drawn."""


@functools.cache
def all_cases() -> dict[str, list[Case]]:
    """The tests of one node, by op."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about numbers that the tests overflow on purpose
        collected = node_cases.collect_testcases(None)
    found: dict[str, list[Case]] = {}
    for case in collected:
        if len(case.model.graph.node) != 1 or "_expanded" in case.name or case.name in UNLIKE_ONNX:
            continue
        if not case.name.startswith(RANDOM):
            found.setdefault(case.model.graph.node[0].op_type, []).append(case)
    return found


def stock_outputs(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray] | None:
    """What ONNX Runtime alone makes of it; None where it refuses."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)
    except Exception:  # its exceptions share no base below Exception
        return None


def feeds_of(case: Case) -> dict[str, Any]:
    return dict(zip((value.name for value in case.model.graph.input), case.data_sets[0][0], strict=False))


def passes(case: Case, outputs: list[np.ndarray] | None) -> bool:
    if outputs is None:
        return False
    try:
        Runner.assert_similar_outputs(case.data_sets[0][1], outputs, rtol=case.rtol, atol=case.atol)
    except (AssertionError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("op", [*FLOAT_OPS, *INTEGER_OPS])
def test_a_node_as_it_is(devices, op: str) -> None:
    for case in all_cases()[op]:
        feeds = feeds_of(case)
        if passes(case, stock_outputs(case.model, feeds)):
            assert passes(case, devices.session(case.model, "cpu").run(None, feeds)), case.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", INTEGER_OPS)
def test_an_integer_op_of_constants(devices, op: str, device: str) -> None:
    """The operands behind the first are constants, so that the converter may take the node."""
    for case in all_cases()[op]:
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        feeds = feeds_of(case)
        if not all(isinstance(value, np.ndarray) for value in feeds.values()):
            continue  # types that numpy does not have
        for value in list(model.graph.input)[1:]:
            model.graph.initializer.append(numpy_helper.from_array(feeds.pop(value.name), value.name))
            model.graph.input.remove(value)
        if passes(case, stock_outputs(model, feeds)):
            session = devices.session(lowbit.convert(model).model, device)
            assert passes(case, session.run(None, feeds)), case.name


class Between:
    """One model of many tests, each node between quantizers of its inputs and outputs."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.version = 21

    def constant(self, value: np.ndarray | np.generic, name: str) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, inputs: list[str], output: str) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], f"make {output}"))
        return output

    def grid(self, name: str, values: np.ndarray, zero_point: np.generic) -> list[str]:
        scale = self.constant(scale_of(values), f"{name}_scale")
        return [scale, self.constant(zero_point, f"{name}_zero")]

    def quantized(self, name: str, values: np.ndarray) -> str:
        """The codes -127 .. 127 of the values, as uint8, and back."""
        grid = [
            self.constant(scale_of(values), f"{name}_scale"),
            self.constant(np.uint8(128), f"{name}_zero"),
        ]
        self.node("QuantizeLinear", [name, *grid], f"{name}_codes")
        return self.node("DequantizeLinear", [f"{name}_codes", *grid], f"{name}_real")

    def weights(self, name: str, values: np.ndarray) -> str:
        codes = np.rint(values / scale_of(values)).astype(np.int8)
        grid = self.grid(name, values, np.int8(0))
        return self.node("DequantizeLinear", [self.constant(codes, f"{name}_codes"), *grid], f"{name}_real")

    def add(self, case: Case, *, feeds_all: bool) -> bool:
        """Adds a test, whose float operands behind the first are fed too or constants.

        Returns:
            False if it has tensors of other types.
        """
        (node,) = case.model.graph.node
        tensors = {**feeds_of(case), **dict(zip(node.output, case.data_sets[0][1], strict=False))}
        results = [tensors[name] for name in node.output if name]
        first = tensors.get(node.input[0])
        if any(getattr(each, "dtype", None) != np.float32 for each in (first, *results)):
            return False
        prefix = f"{case.name}_{'fed' if feeds_all else 'constant'}_"
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = prefix + "tested"
        for at, name in enumerate(node.input):
            if not name:
                continue
            value, inner = tensors[name], prefix + name
            if value.dtype == np.float32 and (at == 0 or feeds_all):
                if inner not in self.feeds:
                    self.inputs.append(helper.make_tensor_value_info(inner, 1, value.shape))
                    self.feeds[inner] = value
                    self.quantized(inner, value)
                copy.input[at] = f"{inner}_real"
            elif value.dtype == np.float32 and at == 1 and node.op_type in PRODUCTS:
                copy.input[at] = self.weights(inner, value)
            else:
                copy.input[at] = self.constant(value, inner)
        copy.output[:] = [prefix + name if name else "" for name in node.output]
        self.nodes.append(copy)
        for name in filter(None, node.output):
            real = self.quantized(prefix + name, tensors[name])
            self.outputs.append(helper.make_tensor_value_info(real, 1, tensors[name].shape))
        self.version = max(self.version, case.model.opset_import[0].version)
        return True

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "between", self.inputs, self.outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.version)], ir_version=10)


def scale_of(values: np.ndarray) -> np.float32:
    return np.float32(max(float(np.abs(values).max(initial=0)), 1e-3) / 127)


def usable(op: str) -> Iterator[tuple[Case, bool, list[np.ndarray]]]:
    """The tests of an op that run between quantizers in ONNX Runtime, and what ONNX's evaluator says."""
    for case in all_cases()[op]:
        for feeds_all in (False, True):
            alone = Between()
            if not alone.add(case, feeds_all=feeds_all):
                continue
            model = alone.model()
            if stock_outputs(model, alone.feeds) is None:
                continue
            try:
                outputs = ReferenceEvaluator(model).run(None, alone.feeds)
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            yield case, feeds_all, outputs


@pytest.mark.parametrize("op", FLOAT_OPS)
def test_a_float_op_between_quantizers(devices, op: str) -> None:
    together, expected = Between(), []
    for case, feeds_all, outputs in usable(op):
        together.add(case, feeds_all=feeds_all)
        expected += outputs
    if not together.nodes:
        pytest.skip("no test of it can stand between quantizers")
    source = together.model()
    converted = lowbit.convert(source).model
    if op in BECOMES_LOWBIT:
        assert {node.domain for node in converted.graph.node} == {DOMAIN}
    for device in DEVICES:
        outputs = devices.session(converted, device).run(None, together.feeds)
        for value, ours, theirs in zip(source.graph.output, outputs, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{value.name} on {device}")
