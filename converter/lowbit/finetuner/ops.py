"""ONNX's operators on torch tensors: those that `lowbit quantize` accepts, and what computes their shapes.

Every function takes a node's inputs (None for one that is left out) and its attributes, at the opsets of the
normal form and later. Integers stay on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.nn import functional

from lowbit.errors import LowBitError
from lowbit.graph.evaluate import run_unoptimized
from lowbit.graph.reasons import Refusal

Inputs = Sequence[Any]
Attributes = Mapping[str, Any]
Op = Callable[[Inputs, Attributes], Any]


def _ints(value: Any) -> list[int]:
    return [int(v) for v in value.reshape(-1).tolist()]


def _axis(axis: int, x: Tensor) -> int:
    return axis % x.ndim if x.ndim else 0


# Windows ------------------------------------------------------------------------------------------------


def _pads(size: Sequence[int], kernel: Sequence[int], attributes: Attributes) -> tuple[list[int], list[int]]:
    """What is added in front of and behind each spatial axis."""
    rank = len(kernel)
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    if mode in ("NOTSET", "VALID"):
        pads = list(attributes.get("pads", [0] * 2 * rank)) if mode == "NOTSET" else [0] * 2 * rank
        return pads[:rank], pads[rank:]
    front, behind = [], []
    for n, k, s, d in zip(
        size, kernel, _strides(attributes, rank), _dilations(attributes, rank), strict=True
    ):
        total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        less, more = total // 2, total - total // 2
        front.append(less if mode == "SAME_UPPER" else more)
        behind.append(more if mode == "SAME_UPPER" else less)
    return front, behind


def _strides(attributes: Attributes, rank: int) -> list[int]:
    return list(attributes.get("strides", [1] * rank))


def _dilations(attributes: Attributes, rank: int) -> list[int]:
    return list(attributes.get("dilations", [1] * rank))


def _padded(x: Tensor, front: Sequence[int], behind: Sequence[int], value: float = 0.0) -> Tensor:
    if not any((*front, *behind)):
        return x
    both = [n for pair in zip(reversed(front), reversed(behind), strict=True) for n in pair]
    return functional.pad(x, both, value=value)


def _conv(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, w, *bias = inputs
    rank = w.ndim - 2
    front, behind = _pads(x.shape[2:], w.shape[2:], attributes)
    inside = front if front == behind else [0] * rank
    if front != behind:
        x = _padded(x, front, behind)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    return function(
        x, w, bias[0] if bias else None, _strides(attributes, rank), inside, _dilations(attributes, rank),
        attributes.get("group", 1),
    )  # fmt: skip


def _conv_transpose(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, w, *bias = inputs
    rank = w.ndim - 2
    strides, dilations = _strides(attributes, rank), _dilations(attributes, rank)
    extra = list(attributes.get("output_padding", [0] * rank))
    kernel, size = w.shape[2:], x.shape[2:]
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[
        rank - 1
    ]
    y = function(x, w, bias[0] if bias else None, strides, 0, extra, attributes.get("group", 1), dilations)
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    if "output_shape" in attributes or mode.startswith("SAME"):
        wanted = list(attributes.get("output_shape", [n * s for n, s in zip(size, strides, strict=True)]))[
            -rank:
        ]
        total = [have - want for have, want in zip(y.shape[2:], wanted, strict=True)]
        less = [t // 2 for t in total]
        more = [t - h for t, h in zip(total, less, strict=True)]
        front, behind = (less, more) if mode == "SAME_UPPER" else (more, less)
    else:
        front, behind = _pads(size, kernel, attributes)
    return _padded(y, [-n for n in front], [-n for n in behind])


def _max_pool(inputs: Inputs, attributes: Attributes) -> Tensor:
    (x,) = inputs
    kernel = list(attributes["kernel_shape"])
    rank = len(kernel)
    front, behind = _pads(x.shape[2:], kernel, attributes)
    x = _padded(x, front, behind, -math.inf)
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
    return function(
        x, kernel, _strides(attributes, rank), 0, _dilations(attributes, rank),
        ceil_mode=bool(attributes.get("ceil_mode", 0)),
    )  # fmt: skip


def _average_pool(inputs: Inputs, attributes: Attributes) -> Tensor:
    (x,) = inputs
    kernel = list(attributes["kernel_shape"])
    rank = len(kernel)
    if any(d != 1 for d in _dilations(attributes, rank)):
        raise LowBitError("AveragePool with dilations has no form here")
    front, behind = _pads(x.shape[2:], kernel, attributes)
    function = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
    pool = functools.partial(
        function, kernel_size=kernel, stride=_strides(attributes, rank),
        ceil_mode=bool(attributes.get("ceil_mode", 0)), count_include_pad=False,
    )  # fmt: skip
    if not any((*front, *behind)):
        return pool(x)
    inside = 1.0 if attributes.get("count_include_pad", 0) else 0.0
    counted = _padded(torch.ones_like(x[:1, :1]), front, behind, inside)
    return pool(_padded(x, front, behind)) / pool(counted)


# Matrix products ----------------------------------------------------------------------------------------


def _gemm(inputs: Inputs, attributes: Attributes) -> Tensor:
    a, b, *c = inputs
    a = a.T if attributes.get("transA", 0) else a
    b = b.T if attributes.get("transB", 0) else b
    y = attributes.get("alpha", 1.0) * (a @ b)
    return y + attributes.get("beta", 1.0) * c[0] if c and c[0] is not None else y


def _batch_norm(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, scale, bias, mean, variance = inputs
    return functional.batch_norm(x, mean, variance, scale, bias, eps=attributes.get("epsilon", 1e-5))


# Moves --------------------------------------------------------------------------------------------------


def _reshape(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, shape = inputs[0], _ints(inputs[1])
    if not attributes.get("allowzero", 0):
        shape = [x.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return x.reshape(shape)


def _flatten(inputs: Inputs, attributes: Attributes) -> Tensor:
    (x,) = inputs
    axis = attributes.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _squeeze(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, axes = inputs[0], _axes(inputs, attributes)
    gone = {_axis(a, x) for a in axes} if axes is not None else {i for i, n in enumerate(x.shape) if n == 1}
    return x.reshape([n for i, n in enumerate(x.shape) if i not in gone])


def _axes(inputs: Inputs, attributes: Attributes) -> list[int] | None:
    """Axes, an input in later opsets and an attribute in earlier ones."""
    if len(inputs) > 1 and inputs[1] is not None:
        return _ints(inputs[1])
    return list(attributes["axes"]) if "axes" in attributes else None


def _unsqueeze(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, axes = inputs[0], _axes(inputs, attributes) or []
    rank = x.ndim + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def _slice(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, starts, ends = inputs[0], _ints(inputs[1]), _ints(inputs[2])
    axes = _ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else range(len(starts))
    steps = _ints(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        places = range(*slice(start, None if step < 0 and end < -size else end, step).indices(size))
        if step == 1:
            x = x.narrow(_axis(axis, x), places.start if len(places) else 0, len(places))
        else:
            x = x.index_select(_axis(axis, x), torch.tensor(list(places), device=x.device))
    return x


def _split(inputs: Inputs, attributes: Attributes) -> list[Tensor]:
    x, axis = inputs[0], _axis(attributes.get("axis", 0), inputs[0])
    sizes = (
        _ints(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else list(attributes.get("split", []))
    )
    if not sizes:
        parts = attributes.get("num_outputs", attributes["outputs"])
        each = -(-x.shape[axis] // parts)
        sizes = [min(each, x.shape[axis] - i * each) for i in range(parts)]
    return list(torch.split(x, sizes, axis))


def _pad(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, pads = inputs[0], _ints(inputs[1])
    value = float(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else 0.0
    axes = _ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else range(x.ndim)
    mode = attributes.get("mode", b"constant").decode()
    for i, axis in enumerate(axes):
        front, behind = pads[i], pads[i + len(pads) // 2]
        if not front and not behind:
            continue
        size, at = x.shape[axis], _axis(axis, x)
        if mode == "constant":
            both = [0] * (2 * (x.ndim - at - 1)) + [front, behind]
            x = functional.pad(x, both, value=value)
            continue
        places = _PLACES(np.arange(size), (front, behind), mode)
        x = x.index_select(at, torch.from_numpy(places).to(x.device))
    return x


_PLACES: Any = np.pad  # whose types want the mode to be a literal


def _depth_to_space(inputs: Inputs, attributes: Attributes) -> Tensor:
    (x,) = inputs
    n, c, h, w = x.shape
    b = attributes["blocksize"]
    if attributes.get("mode", b"DCR") == b"CRD":
        return (
            x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // b**2, h * b, w * b)
        )
    return x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)


def _space_to_depth(inputs: Inputs, attributes: Attributes) -> Tensor:
    (x,) = inputs
    n, c, h, w = x.shape
    b = attributes["blocksize"]
    parts = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * b**2, h // b, w // b)


def _gather(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, places = inputs
    axis = _axis(attributes.get("axis", 0), x)
    flat = places.reshape(-1).to(x.device) % max(1, x.shape[axis])
    return x.index_select(axis, flat).reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _expand(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, shape = inputs[0], _ints(inputs[1])
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(shape)))


def _resize(inputs: Inputs, attributes: Attributes) -> Tensor:
    """Resizing is linear, one axis after the other: a matrix for each, which ONNX Runtime tells."""
    x = inputs[0]
    scales = inputs[2].tolist() if len(inputs) > 2 and inputs[2] is not None and inputs[2].numel() else None
    sizes = _ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else None
    axes = list(attributes.get("axes", range(x.ndim)))
    key = tuple(sorted((name, value if not isinstance(value, list) else tuple(value))
                       for name, value in attributes.items() if name not in ("axes", "outputs")))  # fmt: skip
    if attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        raise LowBitError("Resize with tf_crop_and_resize has no form here")
    for i, axis in enumerate(axes):
        at, size = _axis(axis, x), x.shape[axis]
        scale = scales[i] if scales is not None else None
        target = sizes[i] if sizes is not None else None
        if scale == 1 or target == size:
            continue
        matrix = torch.from_numpy(_resize_matrix(size, scale, target, key)).to(x.device)
        x = torch.tensordot(x, matrix, dims=([at], [1])).movedim(-1, at)
    return x


@functools.lru_cache(maxsize=64)
def _resize_matrix(size: int, scale: float | None, target: int | None, key: tuple[Any, ...]) -> Any:
    """What each output element takes of each input element along one axis: float32 [outputs, size]."""
    eye = np.eye(size, dtype=np.float32)[None, :, :, None]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, eye.shape)
    if scale is not None:
        inputs = ["x", "", "scales"]
        tensor = helper.make_tensor("scales", TensorProto.FLOAT, [4], [1, 1, scale, 1])
    else:
        inputs = ["x", "", "", "sizes"]
        assert target is not None
        tensor = helper.make_tensor("sizes", TensorProto.INT64, [4], [1, size, target, 1])
    node = helper.make_node("Resize", inputs, ["y"], **dict(key))
    graph = helper.make_graph([node], "resize", [given], [helper.make_empty_tensor_value_info("y")], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    result = run_unoptimized(model, {"x": eye})
    if isinstance(result, Refusal):
        raise LowBitError(f"Resize: {result.reason}")
    return np.ascontiguousarray(result[0][0, :, :, 0].T)


def _reduce(function: Callable[..., Tensor]) -> Op:
    def call(inputs: Inputs, attributes: Attributes) -> Tensor:
        x, axes = inputs[0], _axes(inputs, attributes)
        dims = [_axis(a, x) for a in axes] if axes else list(range(x.ndim))
        return function(x, dim=dims, keepdim=bool(attributes.get("keepdims", 1)))

    return call


# Functions ----------------------------------------------------------------------------------------------


def _clip(inputs: Inputs, attributes: Attributes) -> Tensor:
    x = inputs[0]
    low = inputs[1] if len(inputs) > 1 else attributes.get("min")
    high = inputs[2] if len(inputs) > 2 else attributes.get("max")
    x = x if low is None else x.clamp(min=float(low))
    return x if high is None else x.clamp(max=float(high))


def _softmax(inputs: Inputs, attributes: Attributes) -> Tensor:
    return torch.softmax(inputs[0], attributes.get("axis", -1))


def _gelu(inputs: Inputs, attributes: Attributes) -> Tensor:
    return functional.gelu(inputs[0], approximate=attributes.get("approximate", b"none").decode())


def _hard_sigmoid(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Op:
    return lambda inputs, _: functools.reduce(function, inputs)


def _unary(function: Callable[..., Tensor]) -> Op:
    return lambda inputs, _: function(inputs[0])


def _div(inputs: Inputs, attributes: Attributes) -> Tensor:
    a, b = inputs
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _cast(inputs: Inputs, attributes: Attributes) -> Tensor:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))
    return inputs[0].to(torch.from_numpy(np.zeros(1, dtype)).dtype)


def _shape(inputs: Inputs, attributes: Attributes) -> Tensor:
    return torch.tensor(list(inputs[0].shape)[attributes.get("start", 0) : attributes.get("end")])


def _constant_of_shape(inputs: Inputs, attributes: Attributes) -> Tensor:
    value = attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    return torch.from_numpy(np.full(_ints(inputs[0]), fill.reshape(-1)[0]))


OPS: dict[str, Op] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm,
    "MatMul": lambda inputs, _: inputs[0] @ inputs[1], "BatchNormalization": _batch_norm,
    "MaxPool": _max_pool, "AveragePool": _average_pool,
    "GlobalAveragePool": lambda i, _: i[0].mean(dim=list(range(2, i[0].ndim)), keepdim=True),
    "GlobalMaxPool": lambda i, _: i[0].amax(dim=list(range(2, i[0].ndim)), keepdim=True),
    "ReduceMean": _reduce(torch.mean), "ReduceSum": _reduce(torch.sum), "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin),
    "Transpose": lambda i, a: i[0].permute(list(a.get("perm", range(i[0].ndim)[::-1]))),
    "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Slice": _slice, "Split": _split, "Pad": _pad, "Resize": _resize, "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth, "Gather": _gather, "Expand": _expand,
    "Tile": lambda i, _: i[0].repeat(_ints(i[1])),
    "Concat": lambda i, a: torch.cat(list(i), _axis(a["axis"], i[0])),
    "Add": _fold(torch.add), "Sub": _fold(torch.sub), "Mul": _fold(torch.mul), "Div": _div,
    "Pow": _fold(torch.pow), "Max": _fold(torch.maximum), "Min": _fold(torch.minimum),
    "PRelu": _fold(lambda x, slope: torch.where(x < 0, x * slope, x)),
    "Relu": _unary(torch.relu), "Clip": _clip, "Sigmoid": _unary(torch.sigmoid), "Tanh": _unary(torch.tanh),
    "HardSigmoid": lambda i, a: _hard_sigmoid(i[0], a.get("alpha", 0.2), a.get("beta", 0.5)),
    "HardSwish": lambda i, _: i[0] * _hard_sigmoid(i[0], 1 / 6),
    "Swish": lambda i, a: i[0] * torch.sigmoid(a.get("alpha", 1.0) * i[0]),
    "LeakyRelu": lambda i, a: functional.leaky_relu(i[0], a.get("alpha", 0.01)),
    "Elu": lambda i, a: functional.elu(i[0], a.get("alpha", 1.0)),
    "Celu": lambda i, a: functional.celu(i[0], a.get("alpha", 1.0)),
    "Selu": lambda i, a: a.get("gamma", 1.0507009873554805)
    * functional.elu(i[0], a.get("alpha", 1.6732632423543772)),
    "ThresholdedRelu": lambda i, a: functional.threshold(i[0], a.get("alpha", 1.0), 0.0),
    "Softplus": _unary(functional.softplus), "Softsign": _unary(functional.softsign),
    "Mish": _unary(functional.mish), "Gelu": _gelu, "Erf": _unary(torch.erf), "Exp": _unary(torch.exp),
    "Log": _unary(torch.log), "Sqrt": _unary(torch.sqrt), "Reciprocal": _unary(torch.reciprocal),
    "Abs": _unary(torch.abs), "Neg": _unary(torch.neg), "Sign": _unary(torch.sign),
    "Ceil": _unary(torch.ceil), "Floor": _unary(torch.floor), "Round": _unary(torch.round),
    "Sin": _unary(torch.sin), "Cos": _unary(torch.cos), "Tan": _unary(torch.tan),
    "Sinh": _unary(torch.sinh), "Cosh": _unary(torch.cosh), "Asin": _unary(torch.asin),
    "Acos": _unary(torch.acos), "Atan": _unary(torch.atan), "Asinh": _unary(torch.asinh),
    "Acosh": _unary(torch.acosh), "Atanh": _unary(torch.atanh),
    "Softmax": _softmax, "Identity": lambda i, _: i[0], "Dropout": lambda i, _: i[0], "Cast": _cast,
    "Shape": _shape, "ConstantOfShape": _constant_of_shape,
}  # fmt: skip
"""Operator -> what computes it."""
