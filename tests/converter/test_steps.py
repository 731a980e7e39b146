"""Operations between a product and thresholds: each as ONNX Runtime computes it, or a reason against it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from lowbit.graph.normal_form import NormalForm
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.chain import Link
from lowbit.rewrites.thresholds import read_step
from onnx import TensorProto, helper, numpy_helper

CHANNELS = 3
SHAPE = (2, CHANNELS, 8, 8)
ROWS = np.float32([0.5, 2.0, -1.25]).reshape(CHANNELS, 1, 1)
RISING = np.abs(ROWS)
NORMS = (*np.float32([[1, 2, -3], [0.5, 0, 1], [0, 1, 2]]), RISING.ravel())


def step(op_type: str, *operands: np.ndarray | None, path: int = 0, **attributes: Any):
    """A model of one node on x and on constants (None: another input), and the node read as a step."""
    names = [f"c{i}" for i in range(len(operands))]
    inputs = ["x", *names] if path == 0 else [*names, "x"]
    fed = [name for name, array in zip(names, operands, strict=True) if array is None]
    graph = helper.make_graph(
        [helper.make_node(op_type, inputs, ["y"], **attributes)], "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE if n == "x" else []) for n in ("x", *fed)],
        [helper.make_tensor_value_info("y", attributes.get("to", TensorProto.FLOAT), SHAPE)],
        [numpy_helper.from_array(array, name)
         for name, array in zip(names, operands, strict=True) if array is not None],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8)
    read = ir.serde.deserialize_model(model).graph
    return model, read_step(NormalForm(read), Link(read[0], path), CHANNELS, 4, 1)


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes"),
    [
        *((each, (), {}) for each in ("Relu", "LeakyRelu", "HardSigmoid", "Neg", "Round", "Floor", "Ceil")),
        ("LeakyRelu", (), {"alpha": 0.3}),
        ("HardSigmoid", (), {"alpha": 0.5, "beta": -0.25}),
        ("Cast", (), {"to": TensorProto.FLOAT}),
        ("Clip", (np.float32(-1), np.float32(2.5)), {}),
        ("PRelu", (RISING,), {}),
        *((each, (ROWS,), {}) for each in ("Add", "Sub", "Mul", "Div", "Min", "Max")),
        *((each, (ROWS,), {"path": 1}) for each in ("Add", "Sub", "Mul", "Min", "Max")),
        ("BatchNormalization", NORMS, {}),
    ],
)
def test_steps_are_what_onnx_runtime_computes(op_type: str, operands, attributes: dict[str, Any]) -> None:
    model, read = step(op_type, *operands, **attributes)
    assert not isinstance(read, Refusal), read
    x = np.random.default_rng(0).normal(scale=3, size=SHAPE).astype(np.float32)
    x[:, :, 0] = np.rint(x[:, :, 0]) + np.float32(0.5)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (meant,) = session.run(None, {"x": x})
    rows = np.moveaxis(x, 1, 0).reshape(CHANNELS, -1)
    found = np.moveaxis(read(rows).reshape(CHANNELS, 2, 8, 8), 0, 1)
    if op_type in ("BatchNormalization", "HardSigmoid"):  # where ONNX Runtime may round elsewhere
        np.testing.assert_allclose(found, meant, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, meant)


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes", "why"),
    [
        ("Clip", (None,), {}, "computed at run time"),
        ("Cast", (), {"to": TensorProto.INT32}, "another type than float32"),
        ("LeakyRelu", (), {"alpha": -0.5}, "does not rise"),
        ("PRelu", (ROWS,), {}, "does not rise"),
        ("Mul", (None,), {}, "not constant"),
        ("Mul", (np.ones((8, 1), np.float32),), {}, r"has the shape [8, 1], expected one per channel"),
        ("Add", (np.float32([np.inf]),), {}, "not finite"),
        ("Div", (np.float32([0]),), {}, "divides by 0"),
        ("Div", (ROWS,), {"path": 1}, "a Div follows it"),
        ("Pow", (np.float32([3]),), {}, "a Pow follows it"),
    ],
)
def test_what_is_no_step_says_why(op_type: str, operands, attributes: dict[str, Any], why: str) -> None:
    _, read = step(op_type, *operands, **attributes)
    assert isinstance(read, Refusal)
    assert why in read.reason
