"""The configurations in which `zoo.py` quantizes its networks.

ONNX Runtime's own quantizer writes most of them. QCDQ and QONNX are its QDQ model with fewer bits: every
quantizer keeps its range and gets coarser, then it is written as those exporters write it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from lowbit.proto.feeds import random_feeds
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

Array = npt.NDArray[Any]
Shapes = Mapping[str, list[int]]

_QONNX = "qonnx.custom_op.general"

_U8S8 = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
_STATIC: dict[str, dict[str, Any]] = {
    "u8s8": {**_U8S8, "per_channel": True},
    "u8u8": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8},
    "s8s8": {
        "activation_type": QuantType.QInt8,
        "weight_type": QuantType.QInt8,
        "per_channel": True,
        "extra_options": {"ActivationSymmetric": True},
    },
    "float_bias": {**_U8S8, "extra_options": {"QuantizeBias": False}},
    "int4": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt4, "per_channel": True},
    "qoperator": {**_U8S8, "per_channel": True, "quant_format": QuantFormat.QOperator},
}

CONFIGURATIONS = {
    "u8s8": "QDQ, uint8 activations, int8 weights per channel",
    "u8u8": "QDQ, uint8 per tensor, of the file as exported, without ONNX Runtime's preprocessing",
    "s8s8": "QDQ, symmetric int8 activations, int8 weights per channel",
    "float_bias": "QDQ, uint8 activations, int8 weights per tensor, biases in float",
    "int4": "QDQ, uint8 activations, int4 weights per channel",
    "qoperator": "QOperator, uint8 activations, int8 weights per channel",
    "qcdq": "QCDQ, 4-bit activations and weights",
    "qonnx": "QONNX, 3-bit activations without zero points, 4-bit weights",
    "qonnx_zero_points": "QONNX, unsigned 4-bit activations with zero points, 4-bit weights",
    "dynamic": "dynamic quantization, int8 weights",
}
"""Name -> what it is. The last one converts nothing: it must stay as it is."""

DEFAULT = [name for name in CONFIGURATIONS if name != "dynamic"]

STOCK_INT8 = "u8s8"
"""The configuration that users of ONNX Runtime compare with, whatever the number of bits."""

_LOW_BITS = {"qcdq": (4, 4), "qonnx": (3, 4), "qonnx_zero_points": (4, 4)}

FEWER_BITS = ("int4", *_LOW_BITS)
"""The configurations with fewer bits than the one that their times are compared with."""


def input_feeds(model: onnx.ModelProto, shapes: Shapes, seed: int) -> dict[str, Array]:
    """Random inputs for a model of the zoo: integers are rows of the table that they look up, or 0 and 1."""
    feeds = random_feeds(model, seed, shapes)
    rng = np.random.default_rng(seed)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, value in feeds.items():
        if np.issubdtype(value.dtype, np.integer):
            rows = [2]
            for node in model.graph.node:
                if node.op_type == "Gather" and node.input[1] == name:
                    rows += [constants[table].dims[0] for table in node.input[:1] if table in constants]
                    # A quantized table stands behind a DequantizeLinear.
                    rows += [
                        constants[source.input[0]].dims[0]
                        for source in model.graph.node
                        if node.input[0] in source.output and source.input and source.input[0] in constants
                    ]
            feeds[name] = rng.integers(0, max(rows), value.shape, value.dtype)
    return feeds


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, model: onnx.ModelProto, shapes: Shapes) -> None:
        self._feeds: Iterator[dict[str, Array]] = iter([input_feeds(model, shapes, seed) for seed in (1, 2)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


def prepare(source: Path, target: Path) -> None:
    """ONNX Runtime's preprocessing, without its symbolic shape inference where that fails."""
    paths = str(source.resolve()), str(target.resolve())
    # Where that inference fails it leaves its intermediate files in the current folder.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for skip in (False, True):
            with contextlib.suppress(Exception):
                quant_pre_process(*paths, skip_symbolic_shape=skip)
                return
        quant_pre_process(*paths, skip_symbolic_shape=True, skip_onnx_shape=True)


def quantize(exported: Path, prepared: Path, configuration: str, target: Path, shapes: Shapes) -> None:
    """Writes the model of a configuration.

    Args:
        exported: The float model.
        prepared: The same after `prepare`.
        configuration: A key of `CONFIGURATIONS`.
        target: Where it goes.
        shapes: Sizes of all inputs.
    """
    if configuration in _LOW_BITS:
        stock = target.with_name(f"{STOCK_INT8}.onnx")
        if not stock.exists():
            quantize(exported, prepared, STOCK_INT8, stock, shapes)
        bits, source = _LOW_BITS[configuration], onnx.load(stock)
        if configuration == "qcdq":
            written = write_qcdq(source, *bits)
        else:
            written = write_qonnx(source, *bits, zero_points=configuration == "qonnx_zero_points")
        onnx.save(written, target)
        return
    source = exported if configuration == "u8u8" else prepared
    if configuration == "dynamic":
        quantize_dynamic(str(source), str(target), weight_type=QuantType.QInt8)
        return
    options = {"quant_format": QuantFormat.QDQ, **_STATIC[configuration]}
    quantize_static(str(source), str(target), _Samples(onnx.load(source), shapes), **options)


class _Quantizers:
    """The Q/DQ pairs and dequantized constants of a QDQ model, with fewer bits.

    Args:
        model: What ONNX Runtime's quantizer wrote; it is not changed.
        a_bits: Activation bits.
        w_bits: Weight bits.
    """

    def __init__(self, model: onnx.ModelProto, a_bits: int, w_bits: int) -> None:
        self.model = model
        self.a_bits, self.w_bits = a_bits, w_bits
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.pairs = {
            node.output[0]: node
            for node in model.graph.node
            if node.op_type == "QuantizeLinear" and node.input[0] not in self.constants
        }

    def activation(self, node: onnx.NodeProto) -> tuple[Array, Array]:
        """Scale and zero point of a quantizer on codes 0 .. 2^bits - 1 over the same range."""
        scale, zero = self.constants[node.input[1]], self.constants[node.input[2]]
        steps = np.float32(255 / (2**self.a_bits - 1))
        return np.asarray(scale * steps, np.float32), np.asarray(np.rint(zero / steps), zero.dtype)

    def symmetric(self, node: onnx.NodeProto, bits: int) -> tuple[Array, int]:
        """Scale of a quantizer without zero point over the same range, and whether its codes are signed."""
        scale, zero = self.constants[node.input[1]], int(self.constants[node.input[2]])
        steps = max(zero, 255 - zero) / (2 ** (bits - 1) - 1) if zero else 255 / (2**bits - 1)
        return np.asarray(scale * np.float32(steps), np.float32), int(zero > 0)

    def weight(self, node: onnx.NodeProto) -> tuple[Array, Array, Array]:
        """Float values, codes and scale (with an axis of 1s) of a dequantized constant of 8 bits."""
        codes, scale, zero = (self.constants[name] for name in node.input[:3])
        if scale.ndim == 1 and scale.size > 1:
            axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 1)
            along = [1] * codes.ndim
            along[axis] = -1
            scale, zero = scale.reshape(along), zero.reshape(along)
        values = (codes.astype(np.float32) - zero.astype(np.float32)) * scale
        high = 2 ** (self.w_bits - 1) - 1
        # The range is cut: its ends are rare, and few codes must serve the middle.
        coarse = np.asarray(scale * np.float32(0.7 * 127 / high), np.float32)
        return values, np.clip(np.rint(values / coarse), -high, high), coarse


def write_qcdq(model: onnx.ModelProto, a_bits: int, w_bits: int) -> onnx.ModelProto:
    """QDQ with fewer bits in 8-bit tensors: a Clip behind each QuantizeLinear, narrow codes for weights."""
    quantizers = _Quantizers(model, a_bits, w_bits)
    out = _Rewriter(model, "qcdq")
    scales: dict[str, Array] = {}
    biases = []
    for node in model.graph.node:
        if node.output[0] in quantizers.pairs:
            scale, zero = quantizers.activation(node)
            raw = f"{node.output[0]}_raw"
            given = [node.input[0], out.constant(scale), out.constant(zero)]
            out.add("QuantizeLinear", given, raw)
            bounds = [out.constant(np.asarray(bound, zero.dtype)) for bound in (0, 2**a_bits - 1)]
            out.add("Clip", [raw, *bounds], node.output[0])
        elif node.op_type == "DequantizeLinear" and node.input[0] in quantizers.pairs:
            scale, zero = quantizers.activation(quantizers.pairs[node.input[0]])
            scales[node.output[0]] = scale
            out.add(
                "DequantizeLinear", [node.input[0], out.constant(scale), out.constant(zero)], node.output[0]
            )
        elif _is_constant(node, quantizers):
            if quantizers.constants[node.input[0]].dtype == np.int32:
                biases.append(node)  # its scale is known once the weights' is
                out.keep(node)
                continue
            _, codes, scale = quantizers.weight(node)
            scales[node.output[0]] = scale
            axis = int(np.argmax(scale.shape)) if scale.size > 1 else 0
            flat = scale.reshape(-1) if scale.size > 1 else scale
            zero = np.zeros(flat.shape, np.int8)
            given = [out.constant(codes.astype(np.int8)), out.constant(flat), out.constant(zero)]
            out.add("DequantizeLinear", given, node.output[0], axis=axis)
        else:
            out.keep(node)
    for node in biases:
        layer = next(n for n in model.graph.node if node.output[0] in n.input)
        scale = (scales[layer.input[0]] * scales[layer.input[1]]).reshape(-1)
        old = quantizers.constants[node.input[1]]
        codes = np.rint(quantizers.constants[node.input[0]] * old / scale).astype(np.int32)
        scale = scale if old.ndim else scale.reshape(())
        given = [out.constant(codes), out.constant(scale), out.constant(np.zeros(scale.shape, np.int32))]
        out.replace(node, helper.make_node("DequantizeLinear", given, list(node.output), axis=0))
    return out.finish()


def write_qonnx(
    model: onnx.ModelProto, a_bits: int, w_bits: int, *, zero_points: bool = False
) -> onnx.ModelProto:
    """Every quantizer as a Quant node, as Brevitas exports it; biases with 32 bits.

    By default what is never negative has unsigned codes, everything else signed ones, and nothing a zero
    point. With ``zero_points`` all activations have unsigned codes over their own range.
    """
    quantizers = _Quantizers(model, a_bits, w_bits)
    out, zero = _Rewriter(model, "qonnx"), np.zeros((), np.float32)
    for node in model.graph.node:
        if node.output[0] in quantizers.pairs:
            continue
        if node.op_type == "DequantizeLinear" and node.input[0] in quantizers.pairs:
            source = quantizers.pairs[node.input[0]]
            if zero_points:
                scale, shift = quantizers.activation(source)
                shift, signed = shift.astype(np.float32), 0
            else:
                (scale, signed), shift = quantizers.symmetric(source, a_bits), zero
            out.quant(source.input[0], scale, shift, a_bits, node.output[0], signed=signed)
        elif _is_constant(node, quantizers):
            codes, scale = quantizers.constants[node.input[0]], quantizers.constants[node.input[1]]
            bits = 32
            if codes.dtype == np.int32:
                values = codes.astype(np.float32) * scale
            else:
                values, _, scale = quantizers.weight(node)
                bits = w_bits
            given = out.constant(values.astype(np.float32))
            out.quant(given, scale, zero, bits, node.output[0], signed=1, narrow=int(bits != 32))
        else:
            out.keep(node)
    return out.finish([helper.make_opsetid(_QONNX, 1)])


def _is_constant(node: onnx.NodeProto, quantizers: _Quantizers) -> bool:
    return node.op_type == "DequantizeLinear" and node.input[0] in quantizers.constants


class _Rewriter:
    """A model whose nodes are written anew, in order."""

    def __init__(self, model: onnx.ModelProto, prefix: str) -> None:
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        self._prefix = prefix
        self._nodes: list[onnx.NodeProto] = []
        self._count = 0

    def constant(self, value: Array) -> str:
        """Adds an initializer."""
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self._model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        """Adds a node."""
        self._nodes.append(helper.make_node(op_type, inputs, [output], f"{output}_{op_type}", **attributes))

    def quant(
        self, x: str, scale: Array, zero: Array, bits: int, output: str, *, signed: int, narrow: int = 0
    ) -> None:
        """Adds a Quant node."""
        given = [x, self.constant(scale), self.constant(zero), self.constant(np.asarray(bits, np.float32))]
        attributes = {"signed": signed, "narrow": narrow, "rounding_mode": "ROUND", "domain": _QONNX}
        self.add("Quant", given, output, **attributes)

    def keep(self, node: onnx.NodeProto) -> None:
        """Keeps a node of the model."""
        self._nodes.append(node)

    def replace(self, old: onnx.NodeProto, new: onnx.NodeProto) -> None:
        """Puts a node in the place of one that was kept."""
        self._nodes[next(i for i, node in enumerate(self._nodes) if node is old)] = new

    def finish(self, opsets: Sequence[onnx.OperatorSetIdProto] = ()) -> onnx.ModelProto:
        """The model, without the initializers and shapes that nothing needs any more."""
        graph = self._model.graph
        del graph.node[:], graph.value_info[:]
        graph.node.extend(self._nodes)
        used = {name for node in self._nodes for name in node.input}
        initializers = [tensor for tensor in graph.initializer if tensor.name in used]
        del graph.initializer[:]
        graph.initializer.extend(initializers)
        self._model.opset_import.extend(opsets)
        return self._model


def counted(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes that a quantizer wrapped: between codes on both sides, or on codes themselves.

    That is every node other than the quantizers which reads a dequantized activation and whose outputs
    nothing but quantizers reads; and every QLinear node.
    """
    quantizers = ("QuantizeLinear", "Quant", "BipolarQuant")
    producer = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in model.graph.output}
    constants = {tensor.name for tensor in model.graph.initializer}

    def dequantized(name: str) -> bool:
        node = producer.get(name)
        if node is None or node.op_type not in ("DequantizeLinear", "Quant"):
            return False
        return node.input[0] not in constants

    names = []
    for node in model.graph.node:
        if node.op_type in (*quantizers, "DequantizeLinear", "Constant"):
            continue
        if node.op_type.startswith("QLinear"):
            names.append(node.name)
            continue
        quantized = all(
            all(reader.op_type in quantizers for reader in readers.get(name, ())) and name not in outputs
            for name in node.output
            if name
        )
        if quantized and any(dequantized(name) for name in node.input):
            names.append(node.name)
    return names
