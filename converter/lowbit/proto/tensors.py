"""Types, sizes and constants of a model's tensors, and the work that its nodes do on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from lowbit.errors import LowBitError
from lowbit.ops import register_schemas
from lowbit.proto.feeds import constant_values, model_inputs

Array = npt.NDArray[Any]
Shape = list[int | str | None]

TYPICAL_SIZES = {4: 224, 3: 128}
"""What a symbolic dim counts as, by the input's rank: pixels of an image, steps of a sequence."""

_WEIGHTS = {
    "Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3,
    "Gemm": 1, "MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3, "QGemm": 3,
}  # fmt: skip
"""Which input of a standard op holds the weights."""

_CARRIERS = (
    "QuantizeLinear", "DequantizeLinear", "ExtendedQuantizeLinear", "ExtendedDequantizeLinear",
    "Quant", "IntQuant", "BipolarQuant", "Trunc", "Clip", "Cast",
    "Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze",
)  # fmt: skip
"""What may stand between weights in the file and the op that reads them."""

_MOST_CARRIERS = 16  # more of them than models have in a row

_ELEMENTS: dict[int, str] = {
    TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.BFLOAT16: "bf16",
    TensorProto.DOUBLE: "f64", TensorProto.UINT4: "u4", TensorProto.INT4: "s4", TensorProto.UINT8: "u8",
    TensorProto.INT8: "s8", TensorProto.UINT16: "u16", TensorProto.INT16: "s16", TensorProto.INT32: "s32",
    TensorProto.INT64: "s64",
}  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model.

    Attributes:
        types: type and shape of every value that inference reaches.
        constants: initializers and Constant nodes.
        assumed: inputs with symbolic dims, and the sizes that were taken for them.
        stated: what the model itself says of the shapes, and a session knows when it is created; -1 for the
            rest.
    """

    types: Mapping[str, onnx.TypeProto]
    constants: Mapping[str, Array]
    assumed: Mapping[str, list[int]]
    stated: Mapping[str, list[int]]

    def shape(self, value: str) -> Shape | None:
        """Sizes, symbols, and None for what is not known; None for an unknown rank."""
        if value in self.constants:
            return list(self.constants[value].shape)
        return dims(self.types[value]) if value in self.types else None

    def sizes(self, value: str) -> list[int] | None:
        """The shape, if every dim of it is a number."""
        shape = self.shape(value)
        numbers = [dim for dim in shape or () if isinstance(dim, int)]
        return numbers if shape is not None and len(numbers) == len(shape) else None

    def element(self, value: str) -> str | None:
        """``u8``, ``f32`` and so on."""
        if value in self.types:
            return _ELEMENTS.get(self.types[value].tensor_type.elem_type)
        if value in self.constants:
            return _ELEMENTS.get(helper.np_dtype_to_tensor_dtype(self.constants[value].dtype))
        return None


def dims(proto: onnx.TypeProto) -> Shape | None:
    """The dims of a tensor's type; None for an unknown rank."""
    if not proto.tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None)
        for dim in proto.tensor_type.shape.dim
    ]


def shape_text(shape: Shape | None) -> str:
    """``[1, N, 8]``; ``?`` for what is not known."""
    return "?" if shape is None else f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def read_tensors(model: onnx.ModelProto, shapes: Mapping[str, list[int]]) -> Tensors:
    """Infers the types and sizes of all values.

    Args:
        model: any model; it is not changed.
        shapes: sizes of inputs with symbolic dims. Elsewhere a symbolic first dim (the batch) counts as 1,
            one of an image or of a sequence as in :data:`TYPICAL_SIZES`.

    Raises:
        LowBitError: for shapes that the model cannot have.
    """
    register_schemas()
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    inputs = model_inputs(sized)
    _check_shapes(shapes, inputs)
    assumed: dict[str, list[int]] = {}
    for name, value in inputs.items():
        entries = value.type.tensor_type.shape.dim
        for i, dim in enumerate(entries):
            if name in shapes:
                dim.dim_value = shapes[name][i]
            elif not dim.HasField("dim_value") and i == 0:
                dim.dim_value = 1
            elif not dim.HasField("dim_value") and len(entries) in TYPICAL_SIZES:
                dim.dim_value = TYPICAL_SIZES[len(entries)]
                assumed[name] = []
    for name in assumed:
        assumed[name] = [dim.dim_value for dim in inputs[name].type.tensor_type.shape.dim]
    for output in sized.graph.output:  # their symbols would contradict the sizes given above
        output.type.tensor_type.ClearField("shape")
    del sized.graph.value_info[:]
    stated = {
        name: [dim if isinstance(dim, int) else -1 for dim in dims(known) or ()]
        for name, known in _infer(model).items()
    }
    return Tensors(_infer(sized), constant_values(model), assumed, stated)


def _check_shapes(shapes: Mapping[str, list[int]], inputs: Mapping[str, onnx.ValueInfoProto]) -> None:
    for name, sizes in shapes.items():
        if name not in inputs:
            raise LowBitError(f"a shape is given for '{name}', but the inputs are {', '.join(inputs)}")
        known = dims(inputs[name].type)
        stated = [
            dim if isinstance(dim, int) else size for dim, size in zip(known or (), sizes, strict=False)
        ]
        if known is None or len(known) != len(sizes) or stated != sizes:
            raise LowBitError(
                f"input '{name}' has the shape {shape_text(known)}; the given one, {shape_text([*sizes])}, "
                "does not fit"
            )


def _infer(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    from lowbit import _native

    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except _native.LowBitError as error:
        raise LowBitError(f"these sizes do not fit the model: {error}") from error
    return {value.name: value.type for value in (*graph.value_info, *graph.input, *graph.output)}


def weight_input(node: onnx.NodeProto) -> int | None:
    """Which input of a standard convolution or matrix product holds its weights; None for other ops."""
    index = _WEIGHTS.get(node.op_type)
    return index if index is not None and index < len(node.input) else None


def standard_macs(node: onnx.NodeProto, tensors: Tensors) -> int | None:
    """Multiply-adds of a standard convolution or matrix product; None where a size is not known."""
    index = weight_input(node)
    if index is None:
        return None
    x, w = tensors.sizes(node.input[0]), tensors.sizes(node.input[index])
    y = tensors.sizes(node.output[0])
    if w is None:
        return None
    if node.op_type == "ConvTranspose":
        return None if x is None else math.prod(x) * math.prod(w[1:])
    if y is None:
        return None
    if "Conv" in node.op_type:
        return math.prod(y) * math.prod(w[1:])
    if node.op_type in ("Gemm", "QGemm"):
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        return math.prod(y) * w[1 if transposed else 0] if len(w) == 2 else None
    return math.prod(y) * w[-2 if len(w) > 1 else 0] if w else None


def lowbit_macs(node: onnx.NodeProto, attrs: Mapping[str, Any], tensors: Tensors) -> int | None:
    """Multiply-adds of a lowbit convolution or matrix product; None where a size is not known.

    Args:
        node: the node.
        attrs: its attributes, defaults included.
        tensors: the model's tensors.
    """
    y = tensors.sizes(node.output[0])
    if "in_features" in attrs:
        return None if y is None else math.prod(y) * int(attrs["in_features"])
    if node.op_type == "LowBitMatMul":
        a = tensors.sizes(node.input[0])
        return None if a is None or y is None else math.prod(y) * a[(attrs["a_perm"] or [-1])[-1]]
    taps = int(np.prod(attrs["kernel_shape"]))
    if node.op_type == "LowBitConvTranspose":
        x = tensors.sizes(node.input[0])
        return None if x is None else math.prod(x) * taps * int(attrs["out_channels"]) // int(attrs["group"])
    return None if y is None else math.prod(y) * taps * int(attrs["in_channels"]) // int(attrs["group"])


class StoredWeights:
    """How many bytes of a file hold the weights of its convolutions and matrix products."""

    def __init__(self, model: onnx.ModelProto):
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._makers: dict[str, onnx.NodeProto] = {}
        for node in model.graph.node:
            self._makers.update((output, node) for output in node.output)
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                self._tensors[node.output[0]] = node.attribute[0].t

    def bytes_of(self, node: onnx.NodeProto) -> int | None:
        """The bytes behind a node's weights, read through Q, DQ, Clip, Reshape and the like.

        None for other ops, and for weights that are computed or fed.
        """
        index = weight_input(node)
        if index is None:
            return None
        value = node.input[index]
        for _ in range(_MOST_CARRIERS):
            if value in self._tensors:
                tensor = self._tensors[value]
                bits = int(ir.DataType(tensor.data_type).bitwidth)
                return math.ceil(math.prod(int(dim) for dim in tensor.dims) * bits / 8)
            maker = self._makers.get(value)
            if maker is None or maker.op_type not in _CARRIERS:
                return None
            value = maker.input[0]
        return None
