"""Every operator of the training's interpreter against ONNX Runtime, in the forms that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

from tests.support import stock_run

torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install 'lowbit[torch]'")

Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)


def draw(*shape: int, low: float = -2.0, high: float = 2.0) -> Array:
    return RNG.uniform(low, high, shape).astype(np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


X = draw(2, 4, 5, 7)
ONE_BY_ONE = (
    "Abs", "Neg", "Sign", "Ceil", "Floor", "Round", "Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Mish",
    "Erf", "Exp", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Atan", "Asinh", "Identity", "Dropout", "HardSwish",
    "HardSigmoid", "LeakyRelu", "Elu", "Celu", "Selu", "ThresholdedRelu",
)  # fmt: skip
INSIDE_0_AND_1 = ("Log", "Sqrt", "Reciprocal", "Asin", "Acos", "Atanh")
CASES: list[tuple[str, dict[str, Any], list[Array | None]]] = [
    *((op, {}, [X]) for op in ONE_BY_ONE),
    *((op, {"alpha": 0.3}, [X]) for op in ("HardSigmoid", "LeakyRelu", "Elu", "Celu", "Selu")),
    *((op, {}, [draw(3, 5, low=0.1, high=0.9)]) for op in INSIDE_0_AND_1),
    ("Acosh", {}, [draw(3, 5, low=1.1, high=4)]),
    ("Gelu", {}, [X]),
    ("Gelu", {"approximate": "tanh"}, [X]),
    ("Clip", {}, [X, np.float32(-1), np.float32(1)]),
    ("Clip", {}, [X, None, np.float32(1)]),
    ("PRelu", {}, [X, draw(4, 1, 1)]),
    *((op, {}, [X, draw(4, 1, 7)]) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")),
    ("Pow", {}, [draw(3, 4, low=0.5), draw(4)]),
    ("Div", {}, [ints(7, -7, 9), ints(2, 2, -4)]),
    ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, [X, draw(3, 4, 3, 2), draw(3)]),
    ("Conv", {"auto_pad": "SAME_LOWER"}, [X, draw(3, 4, 2, 2)]),
    ("Conv", {"pads": [1, 0, 2, 1], "group": 2, "dilations": [1, 2]}, [X, draw(4, 2, 2, 2)]),
    ("Conv", {"pads": [1, 1]}, [draw(2, 4, 9), draw(3, 4, 3)]),
    ("ConvTranspose", {"strides": [2, 2], "pads": [1, 0, 0, 1]}, [X, draw(4, 3, 3, 3), draw(3)]),
    ("ConvTranspose", {"strides": [2, 2], "output_shape": [10, 14]}, [X, draw(4, 3, 3, 3)]),
    ("ConvTranspose", {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, [X, draw(4, 3, 3, 3)]),
    ("MaxPool", {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}, [X]),
    ("MaxPool", {"kernel_shape": [3, 3], "auto_pad": "SAME_LOWER", "strides": [2, 2]}, [X]),
    ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2]}, [X]),
    ("AveragePool", {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0], "count_include_pad": 1}, [X]),
    ("AveragePool", {"kernel_shape": [2, 2]}, [X]),
    ("GlobalAveragePool", {}, [X]),
    ("GlobalMaxPool", {}, [X]),
    ("Gemm", {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}, [draw(4, 3), draw(5, 4), draw(5)]),
    ("Gemm", {}, [draw(3, 4), draw(4, 5)]),
    ("MatMul", {}, [draw(2, 1, 3, 4), draw(5, 4, 2)]),
    ("BatchNormalization", {}, [X, draw(4), draw(4), draw(4), draw(4, low=0.5)]),
    *((op, {"keepdims": keep}, [X, ints(-1, 1)])
      for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin") for keep in (0, 1)),
    ("ReduceSum", {}, [X]),
    ("Softmax", {"axis": 1}, [X]),
    ("Softmax", {}, [X]),
    ("Transpose", {}, [X]),
    ("Transpose", {"perm": [0, 2, 3, 1]}, [X]),
    ("Reshape", {}, [X, ints(0, -1, 7)]),
    ("Reshape", {"allowzero": 1}, [draw(0, 4), ints(0, 2)]),
    ("Flatten", {"axis": -1}, [X]),
    ("Squeeze", {}, [draw(2, 1, 3, 1)]),
    ("Squeeze", {}, [draw(2, 1, 3, 1), ints(-1)]),
    ("Unsqueeze", {}, [draw(2, 3), ints(-1, 0)]),
    ("Slice", {}, [X, ints(1, -3), ints(9, -1), ints(1, -1)]),
    ("Slice", {}, [X, ints(4), ints(-10), ints(2), ints(-2)]),
    ("Slice", {}, [X, ints(1), ints(2)]),
    ("Slice", {}, [X, ints(3), ints(1), ints(2)]),
    ("Split", {"axis": 1}, [X, ints(1, 3)]),
    ("Split", {"axis": -1, "num_outputs": 2}, [X]),
    ("Pad", {}, [X, ints(0, 1, 2, 0, 0, 0, 1, 3), np.float32(1.5)]),
    ("Pad", {"mode": "reflect"}, [X, ints(1, 2, 2, 1), None, ints(2, -1)]),
    ("Pad", {"mode": "edge"}, [X, ints(0, 0, 1, 2, 0, 0, 0, 1)]),
    ("Resize", {"mode": "linear"}, [X, None, np.float32([1, 1, 2, 1.5])]),
    ("Resize", {"mode": "cubic", "axes": [2, 3]}, [X, None, None, ints(9, 7)]),
    ("Resize", {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"},
     [X, None, np.float32([1, 1, 2, 2])]),
    ("DepthToSpace", {"blocksize": 2}, [X]),
    ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, [X]),
    ("SpaceToDepth", {"blocksize": 2}, [draw(2, 3, 4, 6)]),
    ("Gather", {"axis": -1}, [X, ints(0, -1, 3).reshape(1, 3)]),
    ("Gather", {}, [X, np.array(1, np.int64)]),
    ("Expand", {}, [draw(3, 1), ints(2, 1, 6)]),
    ("Tile", {}, [draw(2, 3), ints(2, 3)]),
    ("Concat", {"axis": -1}, [X, draw(2, 4, 5, 1), X]),
    ("Cast", {"to": onnx.TensorProto.INT64}, [X]),
    ("Shape", {"start": 1}, [X]),
    ("ConstantOfShape", {}, [ints(2, 3)]),
    ("ConstantOfShape", {"value": helper.make_tensor("value", onnx.TensorProto.INT64, [1], [7])}, [ints(2)]),
]  # fmt: skip


def parts(op: str, attributes: dict[str, Any], inputs: list[Array | None]) -> int:
    """The outputs of a node."""
    return attributes.get("num_outputs", len(inputs[1]) if len(inputs) > 1 else 1) if op == "Split" else 1


def exact(op: str, attributes: dict[str, Any], inputs: list[Array | None]) -> list[Array]:
    """What ONNX Runtime computes."""
    names = ["" if value is None else f"x{i}" for i, value in enumerate(inputs)]
    outputs = [f"y{i}" for i in range(parts(op, attributes, inputs))]
    given = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True) if name}
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, **attributes)], "one",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
         for name, value in given.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return stock_run(model, given, optimize=False)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{i}-{op}" for i, (op, *_) in enumerate(CASES)])
def test_an_operator_is_onnx_runtimes(case: int) -> None:
    from lowbit.finetuner.ops import OPS

    op, attributes, inputs = CASES[case]
    node = helper.make_node(op, [], [], **attributes)
    read = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    tensors = [None if value is None else torch.from_numpy(np.array(value)) for value in inputs]
    made = OPS[op](tensors, {**read, "outputs": parts(op, attributes, inputs)})
    results = made if isinstance(made, list) else [made]
    for ours, stock in zip(results, exact(op, attributes, inputs), strict=True):
        assert ours.numpy().dtype == stock.dtype
        np.testing.assert_allclose(ours.numpy(), stock, rtol=2e-5, atol=2e-5)


def test_every_operator_has_a_case() -> None:
    from lowbit.finetuner.ops import OPS

    assert set(OPS) - {op for op, *_ in CASES} == {"Swish"}, "ONNX has it from operator set 24 on"
