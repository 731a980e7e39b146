"""Quantizers of the normal form: what is inlined where no rule takes one is what numpy says of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from lowbit.graph.quantizers import DOMAIN, ROUNDINGS, Law, definition, is_law, quantizer, read_law
from lowbit.graph.reasons import Refusal
from onnx import TensorProto, helper, numpy_helper


@pytest.mark.parametrize("op_type", [*sorted(set(ROUNDINGS.values())), "Bipolar", "Count"])
@pytest.mark.parametrize("opset", [13, 21])
def test_bodies_are_the_laws(op_type: str, opset: int) -> None:
    """On halves, ends, and their neighbours among the float numbers."""
    scale, zero = np.float32(0.5), np.float32(0 if op_type == "Bipolar" else 1)
    halves = np.arange(-40, 41, dtype=np.float32) / 4 * scale
    x = np.concatenate([halves, np.nextafter(halves, np.float32(99)), np.nextafter(halves, np.float32(-99))])
    operands = {"scale": scale, "zero_point": zero}
    law = Law(op_type, scale, zero, -5, 6)
    if op_type == "Count":
        thresholds = np.float32([-2.25, -0.5, -0.5, 0, 1.75])
        operands, law = {**operands, "thresholds": thresholds}, Law(op_type, scale, zero, 0, 5, thresholds)
    elif op_type != "Bipolar":
        operands |= {"low": np.float32(-5), "high": np.float32(6)}
    node = helper.make_node(op_type, ["x", *operands], ["y"], domain=DOMAIN, to=TensorProto.INT8)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT8, x.shape)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in operands.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        graph, opset_imports=opsets, functions=[definition(op_type, opset)], ir_version=8
    )
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (codes,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(codes, law.codes(x))


def written(scale: np.ndarray, zero_point: np.ndarray, shape: tuple[int, ...] | None) -> ir.Node:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    x = ir.val("x", ir.DataType.FLOAT, shape)
    node = quantizer(graph, "QuantizeRound", x, scale, zero_point, low=-8, high=7, name="q")
    assert is_law(node)
    return node


def test_parameters_as_they_are_read() -> None:
    """One of each; or one per channel, of either."""
    one, channels = np.asarray(0.5), np.linspace(0.1, 0.4, 4).reshape(4, 1, 1)
    law = read_law(written(one, np.asarray(3), (1, 4, 5, 5)))
    assert not isinstance(law, Refusal)
    assert law[1].axis is None
    assert (law[2].low, law[2].high) == (-8, 7)
    law = read_law(written(one, np.arange(4).reshape(4, 1, 1), (1, 4, 5, 5)))
    assert not isinstance(law, Refusal)
    assert law[1].axis == 1
    np.testing.assert_array_equal(law[1].scale, np.full(4, 0.5, np.float32))
    several = read_law(written(channels, np.arange(5).reshape(5, 1), (1, 4, 5, 5)))
    assert isinstance(several, Refusal)
    assert "shape [4, 5, 1]; expected one scale" in several.reason
    unknown = read_law(written(channels, np.asarray(0), None))
    assert isinstance(unknown, Refusal)
    assert "unknown rank" in unknown.reason
