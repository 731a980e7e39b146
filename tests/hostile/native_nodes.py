"""Single-node lowbit models, broken in one way each, and a child process that feeds them to ONNX Runtime.

The child prints a case's name before it tries and the outcome after, so that a crash names its case.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

F32 = np.float32
I32 = np.int32
TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "float32": TensorProto.FLOAT}


@dataclasses.dataclass
class Node:
    """A node before it becomes a model: `inputs` in the schema's order, absent ones left out of the dict."""

    op: str
    order: list[str]
    attributes: dict[str, Any]
    constants: dict[str, np.ndarray | np.generic]
    feeds: dict[str, np.ndarray]
    output: str = "uint8"
    outputs: tuple[str, ...] = ("y",)

    def model(self) -> onnx.ModelProto:
        given = [*self.constants, *self.feeds]
        last = max(i for i, name in enumerate(self.order) if name in given)
        names = [name if name in given else "" for name in self.order[: last + 1]]
        node = helper.make_node(
            self.op, names, self.outputs, name="node", domain="ai.lowbit", **self.attributes
        )
        inputs = [
            helper.make_tensor_value_info(name, TYPES[str(value.dtype)], [None] * value.ndim)
            for name, value in self.feeds.items()
        ]
        output = helper.make_tensor_value_info("y", TYPES[self.output], None)
        constants = [
            numpy_helper.from_array(np.asarray(value), name) for name, value in self.constants.items()
        ]
        graph = helper.make_graph([node], "hostile", inputs, [output], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.lowbit", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


MATMUL = [
    "x",
    "w",
    "x_scale",
    "x_zero_point",
    "w_scale",
    "w_zero_point",
    "bias",
    "y_scale",
    "y_zero_point",
    "thresholds",
    "threshold_base",
    "threshold_dir",
    "tail_bias",
    "tail_scale",
    "tail_shift",
    "residual",
    "residual_scale",
    "residual_zero_point",
    "inner_scale",
    "inner_zero_point",
]
UNARY = ["x", "x_scale", "x_zero_point", "y_scale", "y_zero_point"]
BINARY = ["a", "a_scale", "a_zero_point", "b", "b_scale", "b_zero_point", "y_scale", "y_zero_point"]


def conv(op: str = "LowBitConv", **attributes: Any) -> Node:
    """[1, 5, 5, 4] -> [1, 5, 5, 6], 3x3, 4-bit signed weights."""
    constants = {
        "w": np.arange(6 * 18, dtype=np.uint8),
        "x_scale": F32(0.05),
        "x_zero_point": I32(3),
        "w_scale": np.full(6, 0.1, F32),
        "w_zero_point": I32(0),
        "bias": np.arange(6, dtype=I32),
        "y_scale": F32(0.5),
        "y_zero_point": I32(10),
    }
    given = {
        "w_bits": 4,
        "w_encoding": "signed",
        "kernel_shape": [3, 3],
        "pads": [1, 1, 1, 1],
        "in_channels": 4,
        "out_channels": 6,
    }
    return Node(op, MATMUL, {**given, **attributes}, constants, {"x": np.ones((1, 5, 5, 4), np.uint8)})


def with_residual() -> Node:
    node = conv()
    node.constants |= {
        "residual_scale": F32(0.2),
        "residual_zero_point": I32(0),
        "inner_scale": F32(0.3),
        "inner_zero_point": I32(4),
    }
    node.feeds["residual"] = np.ones((1, 5, 5, 6), np.uint8)
    return node


def with_thresholds() -> Node:
    node = conv(epilogue="thresholds", y_bits=2)
    node.constants |= {
        "thresholds": np.tile(np.array([-5, 0, 7], I32), (6, 1)),
        "threshold_base": np.zeros(6, I32),
        "threshold_dir": np.ones(6, I32),
    }
    return node


def with_tail() -> Node:
    node = conv(epilogue="tail", tail="bias,affine,relu,clip", clip_min=0.0, clip_max=6.0)
    node.constants |= {name: np.ones(6, F32) for name in ("tail_bias", "tail_scale", "tail_shift")}
    return node


def with_float_tail() -> Node:
    """Left out inputs in the middle of the list: without y_scale the output is float32."""
    node = with_tail()
    node.output = "float32"
    del node.constants["bias"], node.constants["y_scale"], node.constants["y_zero_point"]
    return node


def conv_1d() -> Node:
    node = conv(kernel_shape=[3], pads=[1, 1])
    node.constants["w"] = np.arange(6 * 6, dtype=np.uint8)
    node.feeds = {"x": np.ones((1, 5, 4), np.uint8)}
    return node


def conv_3d(**attributes: Any) -> Node:
    """[1, 3, 4, 5, 4] -> [1, 3, 4, 5, 6], 3x3x3."""
    node = conv(kernel_shape=[3, 3, 3], pads=[1] * 6, **attributes)
    node.constants["w"] = np.arange(6 * 54, dtype=np.uint32).astype(np.uint8)
    node.feeds = {"x": np.ones((1, 3, 4, 5, 4), np.uint8)}
    return node


def volume(node: Node) -> Node:
    """A pool, of volumes."""
    node.attributes["kernel_shape"] = [2, 2, 2]
    node.feeds = {name: np.ones((1, 3, 4, 5, 4), x.dtype) for name, x in node.feeds.items()}
    return node


def cropped_transpose() -> Node:
    """Pads that leave nothing of a small image; sizes are open, so the node must wait for the real one."""
    node = conv("LowBitConvTranspose", pads=[20] * 4)
    node.feeds["x"] = np.ones((1, 50, 50, 4), np.uint8)
    return node


def gemm() -> Node:
    """[3, 16] -> [3, 6], 4-bit weights."""
    node = conv("LowBitGemm")
    node.attributes = {"w_bits": 4, "w_encoding": "signed", "in_features": 16, "out_features": 6}
    node.constants["w"] = np.arange(6 * 8, dtype=np.uint8)
    node.feeds = {"x": np.ones((3, 16), np.uint8)}
    return node


def unary(op: str, **attributes: Any) -> Node:
    constants = {"x_scale": F32(0.1), "x_zero_point": I32(3), "y_scale": F32(0.2), "y_zero_point": I32(4)}
    return Node(op, UNARY, attributes, constants, {"x": np.ones((1, 6, 6, 4), np.uint8)})


def affine() -> Node:
    node = unary("LowBitAffine")
    node.order = ["x", "x_scale", "x_zero_point", "scale", "shift", "y_scale", "y_zero_point"]
    node.constants |= {"scale": np.ones(4, F32), "shift": np.zeros(4, F32)}
    return node


def lookup() -> Node:
    feeds = {"x": np.ones((1, 6, 6, 4), np.uint8)}
    return Node("LowBitLookup", ["x", "table"], {}, {"table": np.arange(256, dtype=np.uint8)}, feeds)


def binary(op: str) -> Node:
    constants = {name: F32(0.1) if name.endswith("scale") else I32(3) for name in BINARY if name not in "ab"}
    feeds = {name: np.ones((1, 6, 6, 4), np.uint8) for name in "ab"}
    return Node(op, BINARY, {}, constants, feeds)


def with_table() -> Node:
    node = binary("LowBitAdd")
    node.order = [*BINARY, "b_table"]
    node.constants["b_table"] = np.linspace(-3, 3, 256).astype(F32)
    return node


def mat_mul(**attributes: Any) -> Node:
    """[2, 6, 4] x [5, 4] turned."""
    node = binary("LowBitMatMul")
    node.attributes = {"b_perm": [1, 0], **attributes}
    node.feeds = {"a": np.ones((2, 6, 4), np.uint8), "b": np.ones((5, 4), np.uint8)}
    return node


def normalization(**attributes: Any) -> Node:
    node = unary("LowBitNormalization", **attributes)
    node.order = [*UNARY[:3], "gamma", "beta", *UNARY[3:]]
    node.constants |= {"gamma": np.ones(4, F32), "beta": F32(0)}
    return node


def max_pool(**attributes: Any) -> Node:
    feeds = {"x": np.ones((1, 6, 6, 4), np.uint8)}
    return Node("LowBitMaxPool", ["x"], {"kernel_shape": [2, 2], **attributes}, {}, feeds)


def concat(**attributes: Any) -> Node:
    constants = {
        "x_scales": np.full(2, 0.1, F32),
        "x_zero_points": np.zeros(2, I32),
        "y_scale": F32(0.1),
        "y_zero_point": I32(0),
    }
    feeds = {name: np.ones((1, 6, 6, 4), np.uint8) for name in ("p", "q")}
    order = ["x_scales", "x_zero_points", "y_scale", "y_zero_point", "p", "q"]
    return Node("LowBitConcat", order, {"axis": -1, **attributes}, constants, feeds)


def resize(**attributes: Any) -> Node:
    feeds = {"x": np.ones((1, 6, 6, 4), np.uint8)}
    return Node("LowBitResize", ["x"], attributes or {"scales": [2.0, 2.0]}, {}, feeds)


def blend(**attributes: Any) -> Node:
    """A Resize that computes."""
    return unary("LowBitResize", **{"mode": "linear", "scales": [2.0, 2.0], **attributes})


def softmax(**attributes: Any) -> Node:
    node = unary("LowBitSoftmax", **attributes)
    node.order = ["x", "x_scale", "x_zero_point", "table", "y_scale", "y_zero_point"]
    node.constants["table"] = np.arange(256, dtype=I32)[::-1].copy()
    return node


def depth_to_space(**attributes: Any) -> Node:
    feeds = {"x": np.ones((1, 6, 6, 8), np.uint8)}
    return Node("LowBitDepthToSpace", ["x"], {"blocksize": 2, **attributes}, {}, feeds)


def image(**attributes: Any) -> Node:
    constants = {"table": np.arange(256, dtype=np.uint8)}
    feeds = {"x": np.ones((1, 6, 9, 3), np.uint8)}
    sizes = {} if "letterbox" in attributes else {"resize": [4], "crop": [3, 4]}
    return Node("LowBitImage", ["x", "table"], {**sizes, **attributes}, constants, feeds)


def quantize() -> Node:
    constants = {"y_scale": F32(0.1), "y_zero_point": I32(3)}
    feeds = {"x": np.ones((1, 4, 6, 6), F32)}
    return Node("LowBitQuantize", ["x", "y_scale", "y_zero_point"], {"to_channels_last": 1}, constants, feeds)


def threshold() -> Node:
    order = ["x", "thresholds", "base", "dir"]
    constants = {
        "thresholds": np.array([[-1, 0, 0.5]] * 4, F32),
        "base": np.zeros(4, I32),
        "dir": np.ones(4, I32),
    }
    feeds = {"x": np.ones((1, 4, 6, 6), F32)}
    return Node("LowBitThreshold", order, {"to_channels_last": 1, "y_bits": 2}, constants, feeds)


def dequantize() -> Node:
    node = unary("LowBitDequantize", to_channels_first=1)
    node.order, node.output = UNARY[:3], "float32"
    del node.constants["y_scale"], node.constants["y_zero_point"]
    return node


SOUND: dict[str, Callable[[], Node]] = {
    "conv": conv,
    "ap_conv": lambda: conv("APConv"),
    "conv_transpose": lambda: conv("LowBitConvTranspose"),
    "conv_transpose_cropped": cropped_transpose,
    "conv_1d": conv_1d,
    "conv_3d": conv_3d,
    "conv_residual": with_residual,
    "conv_thresholds": with_thresholds,
    "conv_tail": with_tail,
    "conv_float_tail": with_float_tail,
    "gemm": gemm,
    "affine": affine,
    "lookup": lookup,
    "add": lambda: binary("LowBitAdd"),
    "add_table": with_table,
    "mul": lambda: binary("LowBitMul"),
    "mat_mul": mat_mul,
    "normalization": normalization,
    "max_pool": max_pool,
    "average_pool": lambda: unary("LowBitAveragePool", kernel_shape=[2, 2]),
    "max_pool_3d": lambda: volume(max_pool()),
    "average_pool_3d": lambda: volume(unary("LowBitAveragePool")),
    "global_average_pool": lambda: unary("LowBitGlobalAveragePool"),
    "concat": concat,
    "resize": resize,
    "image": image,
    "letterbox": lambda: image(letterbox=[5, 4], fill=7, interpolation="bicubic"),
    "depth_to_space": depth_to_space,
    "blend": blend,
    "cubic": lambda: blend(mode="cubic", exclude_outside=1),
    "softmax": softmax,
    "requantize": lambda: unary("LowBitRequantize"),
    "quantize": quantize,
    "threshold": threshold,
    "dequantize": dequantize,
}

HUGE = 2**62
BAD_SCALES = [0.0, -1.0, float("nan"), float("inf")]


def _set(node: Node, attribute: str | None = None, value: Any = None, **constants: Any) -> Node:
    if attribute is not None:
        node.attributes[attribute] = value
    for name, constant in constants.items():
        if constant is None:
            del node.constants[name]
        else:
            node.constants[name] = constant
    return node


def _attribute_cases() -> Iterator[tuple[str, Node]]:
    """Numbers that no window, channel count or bit width can have."""
    matmuls = ("conv", "ap_conv", "conv_transpose", "conv_1d", "gemm")
    for base in matmuls:
        for name in ("x_bits", "w_bits", "y_bits"):
            for value in (0, 9, -1, HUGE):
                yield f"{base}: {name} {value}", _set(SOUND[base](), name, value)
        for name in ("x_encoding", "w_encoding", "y_encoding", "epilogue"):
            yield f"{base}: {name} unknown", _set(SOUND[base](), name, "upside-down")
        yield f"{base}: y_min above y_max", _set(_set(SOUND[base](), "y_min", [9]), "y_max", [3])
        yield f"{base}: y_max out of range", _set(SOUND[base](), "y_max", [256])
        yield f"{base}: 8-bit bipolar", _set(SOUND[base](), "x_encoding", "bipolar")
    for base in matmuls[:-1]:
        for name in ("in_channels", "out_channels", "group"):
            for value in (0, -4, 5, HUGE, 2**31):
                yield f"{base}: {name} {value}", _set(SOUND[base](), name, value)
    for name in ("in_features", "out_features"):
        for value in (0, -1, 17, HUGE):
            yield f"gemm: {name} {value}", _set(gemm(), name, value)
    yield "gemm: axis beyond the rank", _set(gemm(), "axis", 5)
    yield "gemm: axis far below", _set(gemm(), "axis", -(2**63))
    for base in ("conv", "conv_transpose", "max_pool", "average_pool"):
        for name in ("kernel_shape", "strides", "pads"):
            count = 4 if name == "pads" else 2
            for value in (-1, -HUGE, HUGE, 2**31):
                yield f"{base}: {name} {value}", _set(SOUND[base](), name, [value] * count)
            yield f"{base}: {name} of length 5", _set(SOUND[base](), name, [1] * 5)
        yield f"{base}: strides 0", _set(SOUND[base](), "strides", [0, 0])
        yield f"{base}: kernel 0", _set(SOUND[base](), "kernel_shape", [0, 3])
    for base in ("conv_3d", "max_pool_3d", "average_pool_3d"):
        for name in ("kernel_shape", "strides", "pads"):
            count = 6 if name == "pads" else 3
            for value in (0, -1, HUGE, 2**31, 2**30, 2**21):
                # No pads are sound, and so is a stride that leaves one pixel.
                if (name, value) == ("pads", 0) or (name == "strides" and value in (2**30, 2**21)):
                    continue
                for d in range(count):
                    numbers = [1] * count
                    numbers[d] = value
                    yield f"{base}: {name} {numbers}", _set(SOUND[base](), name, numbers)
                yield f"{base}: all {name} {value}", _set(SOUND[base](), name, [value] * count)
            yield f"{base}: {name} of length 4", _set(SOUND[base](), name, [1] * 4)
        fed = SOUND[base]()
        fed.feeds = {"x": np.ones((1, 4, 5, 4), np.uint8)}
        yield f"{base}: an image", fed
    for value in (0, -1, HUGE, 10**6, 2**30):
        yield f"conv_3d: dilations {value}", conv_3d(dilations=[value, 1, 1])
        yield f"max_pool_3d: dilations {value}", _set(SOUND["max_pool_3d"](), "dilations", [value] * 3)
    three = conv("LowBitConvTranspose", kernel_shape=[3, 3, 3], pads=[1] * 6)
    yield "conv_transpose: three spatial dims", three
    for base in ("conv", "max_pool"):
        for value in (0, -1, HUGE, 10**6):
            yield f"{base}: dilations {value}", _set(SOUND[base](), "dilations", [value, value])
    for value in (-1, 3, HUGE):
        yield (
            f"conv_transpose: output_padding {value}",
            _set(SOUND["conv_transpose"](), "output_padding", [value] * 2),
        )
    for axis in (4, -5, HUGE, -HUGE):
        yield f"normalization: axis {axis}", normalization(axis=axis)
    for groups in (0, -1, 3, 5, HUGE):
        yield f"normalization: groups {groups}", normalization(groups=groups)
    for epsilon in (0.0, -1.0, float("nan"), float("inf")):
        yield f"normalization: epsilon {epsilon}", normalization(epsilon=epsilon)
    yield "normalization: epsilon too small", _set(normalization(epsilon=1e-40), x_scale=F32(1e30))
    for perm in ([0, 0], [1, 2], [-1, 0], [HUGE, 0], [0], [2, 0, 1], list(range(100))):
        yield f"mat_mul: b_perm {perm[:9]}", mat_mul(b_perm=perm)
    yield "max_pool: window larger than the image", _set(max_pool(), "kernel_shape", [50, 50])
    for value in (4, -5, HUGE):
        yield f"concat: axis {value}", concat(axis=value)
    yield "concat: encodings too few", concat(x_encodings="signed")
    yield "concat: encodings unknown", concat(x_encodings="odd,even")
    for scales in ([0.0, 1.0], [-1.0, 1.0], [float("nan"), 1.0], [1e30, 1.0], [1.0]):
        yield f"resize: scales {scales}", resize(scales=scales)
    for sizes in ([0, 4], [-1, 4], [HUGE, HUGE], [4]):
        yield f"resize: sizes {sizes}", resize(sizes=sizes)
    yield "resize: unknown mode", resize(scales=[2.0, 2.0], nearest_mode="furthest")
    yield "resize: another mode", resize(scales=[2.0, 2.0], mode="area")
    yield "resize: linear without scales", resize(scales=[2.0, 2.0], mode="linear")
    yield "resize: nearest with scales", blend(mode="nearest")
    yield "resize: linear that excludes", blend(exclude_outside=1)
    yield "resize: x_scale absent", _set(blend(), x_scale=None, x_zero_point=None)
    for value in (float("nan"), float("inf"), 17.0):
        yield f"resize: cubic_coeff_a {value}", blend(mode="cubic", cubic_coeff_a=value)
    for value in (4, -5, HUGE):
        yield f"softmax: axis {value}", softmax(axis=value)
    yield "tail: unknown step", _set(with_tail(), "tail", "bias,jump")
    yield "tail: step twice", _set(with_tail(), "tail", "relu,relu")
    yield "tail: residual step alone", _set(with_tail(), "tail", "residual")
    yield "tail: clip NaN", _set(with_tail(), "clip_max", float("nan"))
    yield "attribute of another kind", _set(conv(), "strides", 1)
    yield "y_min of another kind", _set(conv(), "y_min", 3)
    for base in ("conv", "gemm", "concat"):
        yield f"{base}: from a newer lowbit", _set(SOUND[base](), "needs_version", 2)
    yield "needs_version of another kind", _set(conv(), "needs_version", "2")


def _constant_cases() -> Iterator[tuple[str, Node]]:
    """Constants of the wrong length, type or value."""
    for base in ("conv", "conv_transpose", "conv_1d", "gemm"):
        size = SOUND[base]().constants["w"].size
        for wrong in (0, 1, size - 1, size + 1, 2 * size):
            yield f"{base}: {wrong} bytes of weights", _set(SOUND[base](), w=np.zeros(wrong, np.uint8))
        yield f"{base}: no bias scale", _set(SOUND[base](), w_scale=np.zeros(0, F32))
        yield f"{base}: scales too many", _set(SOUND[base](), w_scale=np.ones(7, F32))
        yield f"{base}: zero points too few", _set(SOUND[base](), w_zero_point=np.zeros(5, I32))
        yield f"{base}: bias too short", _set(SOUND[base](), bias=np.zeros(5, I32))
        yield f"{base}: bias leaves int32", _set(SOUND[base](), bias=np.full(6, 2**31 - 1, I32))
        yield f"{base}: x_zero_point 256", _set(SOUND[base](), x_zero_point=I32(256))
        yield f"{base}: w_zero_point 8", _set(SOUND[base](), w_zero_point=I32(8))
        yield f"{base}: y_zero_point -1", _set(SOUND[base](), y_zero_point=I32(-1))
        yield f"{base}: requantize without y_scale", _set(SOUND[base](), y_scale=None)
        for name in ("x_scale", "w_scale", "y_scale"):
            for value in BAD_SCALES:
                yield f"{base}: {name} {value}", _set(SOUND[base](), **{name: F32(value)})
    for base in (
        "affine",
        "add",
        "mul",
        "average_pool",
        "global_average_pool",
        "mat_mul",
        "normalization",
        "requantize",
        "quantize",
        "dequantize",
    ):
        for name in [n for n in SOUND[base]().constants if n.endswith("_scale")]:
            for value in BAD_SCALES:
                yield f"{base}: {name} {value}", _set(SOUND[base](), **{name: F32(value)})
    yield "product of scales overflows", _set(conv(), x_scale=F32(1e30), w_scale=np.full(6, 1e30, F32))
    yield "residual_scale NaN", _set(with_residual(), residual_scale=F32("nan"))
    yield "inner_scale absent", _set(with_residual(), inner_scale=None)
    yield "inner_zero_point 999", _set(with_residual(), inner_zero_point=I32(999))
    yield "residual_scale absent", _set(with_residual(), residual_scale=None)
    yield "thresholds unsorted", _set(with_thresholds(), thresholds=np.tile(np.array([5, 0, 7], I32), (6, 1)))
    yield "thresholds of 5 channels", _set(with_thresholds(), thresholds=np.zeros((5, 3), I32))
    yield "thresholds flat", _set(with_thresholds(), thresholds=np.zeros(18, I32))
    yield "no thresholds", _set(with_thresholds(), thresholds=None)
    yield "too many thresholds", _set(with_thresholds(), thresholds=np.zeros((6, 4), I32))
    yield "threshold_dir 0", _set(with_thresholds(), threshold_dir=np.zeros(6, I32))
    yield "threshold_dir huge", _set(with_thresholds(), threshold_dir=np.full(6, 2**31 - 1, I32))
    yield "threshold_base out of range", _set(with_thresholds(), threshold_base=np.full(6, -(2**31), I32))
    yield "tail_bias too short", _set(with_tail(), tail_bias=np.ones(5, F32))
    yield "tail_scale absent", _set(with_tail(), tail_scale=None)
    yield "tail_shift inf", _set(with_tail(), tail_shift=np.full(6, np.inf, F32))
    yield "softmax: table that begins with 0", _set(softmax(), table=np.zeros(256, I32))
    yield "softmax: table of 255", _set(softmax(), table=np.ones(255, I32))
    yield "softmax: table of bytes", _set(softmax(), table=np.ones(256, np.uint8))
    for value in (-1, 2**24 + 1, -(2**31), 2**31 - 1):
        table = np.where(np.arange(256) == 9, value, 1).astype(I32)
        yield f"softmax: entry {value}", _set(softmax(), table=table)
    yield "table of 255", _set(lookup(), table=np.zeros(255, np.uint8))
    yield "table of 3 channels", _set(lookup(), table=np.zeros((3, 256), np.uint8))
    for gamma in (np.ones(3, F32), np.ones(0, F32), np.ones(144, F32), np.full(4, np.inf, F32), F32(1e38)):
        yield f"normalization: gamma {gamma}", _set(normalization(), gamma=gamma)
    yield "normalization: beta of 2", _set(normalization(), beta=np.ones(2, F32))
    yield "mat_mul: product of scales overflows", _set(mat_mul(), a_scale=F32(1e30), b_scale=F32(1e30))
    yield "affine of 3 channels", _set(affine(), scale=np.ones(3, F32))
    yield "concat scales too few", _set(concat(), x_scales=np.ones(1, F32))
    yield "concat scale NaN", _set(concat(), x_scales=np.full(2, np.nan, F32))
    yield "concat zero points too many", _set(concat(), x_zero_points=np.zeros(9, I32))
    yield "weights of another type", _set(conv(), w=np.zeros(108, np.int8))
    yield "zero point of another type", _set(conv(), x_zero_point=np.uint8(3))
    wide = _set(gemm(), "w_bits", 8)
    wide.attributes["in_features"] = 140_000
    wide.constants["w"] = np.full(6 * 140_000, 127, np.uint8)
    wide.feeds["x"] = np.ones((1, 140_000), np.uint8)
    yield "sum leaves int32", wide


def _feed_cases() -> Iterator[tuple[str, Node]]:
    """Tensors that do not fit the node; the graph declares the wrong rank or type as the feed does."""

    def fed(base: str, **feeds: np.ndarray) -> Node:
        node = SOUND[base]()
        node.feeds |= feeds
        return node

    for base in ("conv", "conv_transpose", "conv_residual", "conv_thresholds", "max_pool", "average_pool"):
        for shape in ((), (4,), (5, 4), (1, 5, 5, 5, 4), (1, 0, 0, 4)):
            yield f"{base}: x of shape {list(shape)}", fed(base, x=np.ones(shape, np.uint8))
    for shape in ((1, 5, 5, 3), (1, 5, 5, 0), (1, 4, 5, 5)):
        yield f"conv: x of shape {list(shape)}", fed("conv", x=np.ones(shape, np.uint8))
    for shape in ((), (3, 15), (16, 3), (3, 0)):
        yield f"gemm: x of shape {list(shape)}", fed("gemm", x=np.ones(shape, np.uint8))
    for shape in ((1, 5, 5, 5), (1, 5, 4, 6), (2, 5, 5, 6), (5, 5, 6), (), (1, 1, 1, 6)):
        yield f"residual of shape {list(shape)}", fed("conv_residual", residual=np.ones(shape, np.uint8))
    yield "residual of another type", fed("conv_residual", residual=np.ones((1, 5, 5, 6), np.int8))
    for base in (
        *("conv", "gemm", "lookup", "max_pool", "requantize", "resize", "global_average_pool"),
        *("blend", "softmax"),
    ):
        x = SOUND[base]().feeds["x"]
        yield f"{base}: x signed", fed(base, x=x.astype(np.int8))
        yield f"{base}: x float", fed(base, x=x.astype(F32))
    for base in ("add", "mul"):
        yield f"{base}: no broadcast", fed(base, b=np.ones((1, 6, 6, 3), np.uint8))
        yield f"{base}: b float", fed(base, b=np.ones((1, 6, 6, 4), F32))
    for shape in ((), (4,), (5, 3), (3, 5, 4), (0, 0)):
        yield f"mat_mul: b of shape {list(shape)}", fed("mat_mul", b=np.ones(shape, np.uint8))
    yield "mat_mul: no broadcast", _set(fed("mat_mul", b=np.ones((3, 4, 5), np.uint8)), "b_perm", [0, 1, 2])
    yield "mat_mul: b signed", fed("mat_mul", b=np.ones((5, 4), np.int8))
    for k in (42_000, 100_000):
        long = fed("mat_mul", a=np.ones((1, k), np.uint8), b=np.ones((1, k), np.uint8))
        yield f"mat_mul: {k} products", long
    yield "concat: other rank", fed("concat", q=np.ones((6, 4), np.uint8))
    yield "concat: other size", fed("concat", q=np.ones((1, 6, 5, 4), np.uint8))
    yield "concat: scalar", fed("concat", q=np.ones((), np.uint8))
    yield "quantize: codes", fed("quantize", x=np.ones((1, 4, 6, 6), np.uint8))
    yield "quantize: a vector", fed("quantize", x=np.ones(4, F32))
    yield "dequantize: a vector", fed("dequantize", x=np.ones(4, np.uint8))
    for base in ("resize", "blend", "global_average_pool"):
        yield f"{base}: a vector", fed(base, x=np.ones(4, np.uint8))
    for base in SOUND:
        node = SOUND[base]()
        if node.output != "float32":
            node.output = "float32"
            yield f"{base}: output declared float", node
    for name in ("w", "x_scale", "bias", "y_zero_point"):
        node = conv()
        value = np.asarray(node.constants.pop(name))
        if str(value.dtype) in TYPES:
            node.feeds[name] = value
            yield f"conv: {name} is not constant", node


def _output_cases() -> Iterator[tuple[str, Node]]:
    """Outputs beside the one that the node makes: nobody would fill them."""
    for base in ("conv", "gemm", "max_pool", "concat", "dequantize"):
        for outputs in (("y", "z"), ("", "y"), ("y", "", "z")):
            node = SOUND[base]()
            node.outputs = outputs
            yield f"{base}: outputs {list(outputs)}", node


def cases() -> Iterator[tuple[str, Node]]:
    """Every broken node; each must be refused."""
    yield from _attribute_cases()
    yield from _constant_cases()
    yield from _feed_cases()
    yield from _output_cases()


def sound_cases() -> Iterator[tuple[str, Node]]:
    """Every op as it should be, without a single image, with attributes of a newer lowbit."""
    for name, make in SOUND.items():
        yield name, make()
        empty = make()
        empty.feeds = {feed: value[:0] for feed, value in empty.feeds.items()}
        yield f"{name}: no images", empty
        yield f"{name}: ignored attributes", with_unknown_attributes(make())


def with_unknown_attributes(node: Node) -> Node:
    """A node that says more than its op knows, and that it does without being understood."""
    more = {"hint": "fast", "hints": [0.5, 1.5], "hint_tensor": numpy_helper.from_array(np.zeros(3, F32))}
    node.attributes |= {**more, "needs_version": 1}
    return node


@functools.cache
def _ep_device(library: str, device: str) -> ort.OrtEpDevice:
    ort.register_execution_provider_library("lowbit", library)
    return next(found for found in ort.get_ep_devices() if found.ep_metadata.get("device") == device)


def outcome(model: bytes, feeds: dict[str, np.ndarray], library: str) -> str:
    """`refused: reason`, or `ran` where ONNX Runtime loaded and ran the model.

    The environment variable LOWBIT_TEST_DEVICE names a device of the execution provider; without it the node
    runs as a custom op.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    device = os.environ.get("LOWBIT_TEST_DEVICE")
    if device:
        options.add_provider_for_devices([_ep_device(library, device)], {})
    else:
        options.register_custom_ops_library(library)
    try:
        session = ort.InferenceSession(model, options, enable_fallback=0)
        session.run(None, feeds)
    except Exception as error:  # every exception of ONNX Runtime has its own class
        return "refused: " + " ".join(str(error).split())[:400]
    return "ran"


def _fuzzed(seed: int, count: int) -> Iterator[tuple[str, bytes, dict[str, np.ndarray]]]:
    """Sound models with random bytes changed in place: any outcome is fine that is not a crash."""
    rng = np.random.default_rng(seed)
    names = list(SOUND)
    for i in range(count):
        name = names[int(rng.integers(len(names)))]
        node = SOUND[name]()
        data = bytearray(node.model().SerializeToString())
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        yield f"fuzz {seed}.{i} of {name}", bytes(data), node.feeds


def main() -> None:
    """`LIBRARY sound | broken START STOP | fuzz SEED COUNT`: a line before and a line after each case."""
    library, what, *numbers = sys.argv[1:]
    # Held: the last session of a library unloads it, and to load it again takes longer than most cases.
    ctypes.CDLL(library)
    runs: Iterator[tuple[str, bytes, dict[str, np.ndarray]]]
    if what == "fuzz":
        runs = _fuzzed(int(numbers[0]), int(numbers[1]))
    else:
        nodes = list(sound_cases() if what == "sound" else cases())
        chosen = nodes[slice(*map(int, numbers))] if numbers else nodes
        runs = ((name, node.model().SerializeToString(), node.feeds) for name, node in chosen)
    for name, model, feeds in runs:
        print("try", name, flush=True)
        print("end", outcome(model, feeds, library), flush=True)


if __name__ == "__main__":
    main()
