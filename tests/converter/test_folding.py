"""What exporters leave between a weight and its reader is computed as ONNX Runtime computes it, or left."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from lowbit.passes.fold import fold_constants
from onnx import TensorProto, helper, numpy_helper

FLOATS = np.random.default_rng(0).normal(size=(2, 3, 1)).astype(np.float32)
BYTES = np.arange(-3, 3, dtype=np.int8).reshape(2, 3, 1)


def folded(array: np.ndarray, op_type: str, *operands: np.ndarray, opset: int = 21, **attributes: Any):
    """A node on constants, whose output stays inside: the model before and after, and whether it is gone."""
    constants = {"w": array, **{f"c{i}": each for i, each in enumerate(operands)}}
    nodes = [helper.make_node(op_type, [*constants], ["v"], "made", **attributes),
             helper.make_node("Shape", ["x"], ["s"]),
             helper.make_node("Identity", ["v"], ["y"], "last")]  # fmt: skip
    kind = attributes.get("to") or (
        TensorProto.UINT8 if op_type == "QuantizeLinear" else helper.np_dtype_to_tensor_dtype(array.dtype)
    )
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info(n, t, None) for n, t in (("y", kind), ("s", TensorProto.INT64))],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    read = ir.serde.deserialize_model(model)
    fold_constants(read.graph)
    return model, ir.serde.serialize_model(read), all(node.name != "made" for node in read.graph)


def output(model) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": np.zeros(1, np.float32)})[0]


@pytest.mark.parametrize(
    ("array", "op_type", "operands", "attributes"),
    [
        (FLOATS, "Reshape", [np.int64([0, -1])], {}),
        (FLOATS, "Reshape", [np.int64([-1])], {"allowzero": 1}),
        (FLOATS, "Flatten", [], {"axis": 2}),
        (FLOATS, "Flatten", [], {"axis": 0}),
        (FLOATS, "Squeeze", [], {}),
        (FLOATS, "Squeeze", [np.int64([-1])], {}),
        (FLOATS, "Squeeze", [], {"opset": 11, "axes": [2]}),
        (FLOATS, "Unsqueeze", [np.int64([0, -1])], {}),
        (FLOATS, "Transpose", [], {}),
        (FLOATS, "Transpose", [], {"perm": [2, 0, 1]}),
        (BYTES, "Cast", [], {"to": TensorProto.FLOAT}),
        (BYTES, "Clip", [np.int8(-2), np.int8(1)], {}),
        (FLOATS, "QuantizeLinear", [np.float32(0.1), np.uint8(7)], {}),
        (FLOATS, "QuantizeLinear", [np.float32([0.1, 0.2, 0.05]), np.uint8([7, 0, 255])], {"axis": 1}),
    ],
)
def test_constants_are_what_onnx_runtime_computes(array, op_type: str, operands, attributes) -> None:
    before, after, gone = folded(array, op_type, *operands, **attributes)
    assert gone
    meant, found = output(before), output(after)
    assert (found.dtype, found.shape) == (meant.dtype, meant.shape)
    np.testing.assert_array_equal(found, meant)


@pytest.mark.parametrize(
    ("array", "op_type", "operands", "attributes"),
    [
        (FLOATS, "Reshape", [np.int64([5, -1])], {}),
        (FLOATS, "Squeeze", [np.int64([0])], {}),
        (FLOATS, "Transpose", [], {"perm": [0, 1]}),
        (FLOATS, "Cast", [], {"to": TensorProto.INT8}),
        (FLOATS, "Cast", [], {"to": TensorProto.BFLOAT16}),
        (FLOATS, "Clip", [np.float32(-1), np.float32(1)], {}),
        (FLOATS.astype(np.float16), "QuantizeLinear", [np.float16(0.1), np.uint8(7)], {}),
    ],
)
def test_what_does_not_fit_or_would_be_rounded_stays(array, op_type: str, operands, attributes) -> None:
    _, _, gone = folded(array, op_type, *operands, **attributes)
    assert not gone
