"""Writes a float32 graph as the QDQ model that ONNX Runtime's quantizer, or a QCDQ exporter, would write.

Widths 8, 4 and 2 have an ONNX type of their own and are written with it: int8/int4/int2 weights,
uint8/uint4/uint2 activations. Every other width has none. There the weights are narrow codes in an int8
tensor, and the activations are uint8 with a Clip between QuantizeLinear and DequantizeLinear that says the
range (QCDQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from .calibration import Statistics
from .graph import IR_VERSION, OPSET

FloatArray = npt.NDArray[np.float32]

_WEIGHT_TYPES = {8: np.dtype(np.int8), 4: np.dtype(ml_dtypes.int4), 2: np.dtype(ml_dtypes.int2)}
_ACTIVATION_TYPES = {8: np.dtype(np.uint8), 4: np.dtype(ml_dtypes.uint4), 2: np.dtype(ml_dtypes.uint2)}

# int2 and uint2 entered ONNX with these versions.
_OPSET_2BIT = 25
_IR_VERSION_2BIT = 13

# Step of the quantizer with codes -(2^(bits-1) - 1) .. 2^(bits-1) - 1 that has the least mean square error on
# a normal distribution of deviation 1, found by a numerical search; 2, 3 and 4 bits are the 3, 7 and 15
# levels of Max, "Quantizing for minimum distortion", 1960, table II.
_NORMAL_STEP = {2: 1.224, 3: 0.6508, 4: 0.3534, 5: 0.1932, 6: 0.1055, 7: 0.0573}

# Where to clip a rectified normal distribution, in units of its root mean square, for the least mean square
# error of 2^bits codes from 0; found the same way.
RECTIFIED_CLIP = {1: 1.72, 2: 2.77, 3: 3.50, 4: 4.06, 5: 4.63, 6: 5.11, 7: 5.52}

# Operators whose output has their input's quantizer, as ONNX Runtime's quantizer writes them.
_PASS_THROUGH = {"MaxPool", "AveragePool", "Flatten"}


@dataclass(frozen=True)
class ActivationQuantizer:
    """An unsigned, per-tensor quantizer: `r = (q - zero_point) * scale`, q in [0, 2^bits - 1]."""

    scale: np.float32
    zero_point: int
    bits: int

    @classmethod
    def of_range(cls, low: float, high: float, bits: int) -> ActivationQuantizer:
        """The quantizer whose codes span [low, high], widened to contain 0.

        The bounds are rounded to 10 significant bits, so that the last bits of a float sum, which differ from
        one kind of machine to the next, do not reach the file.
        """
        low, high = (_round_bits(bound, 10) for bound in (min(low, 0.0), max(high, 0.0)))
        levels = 2**bits - 1
        scale = np.float32((high - low) / levels) if high > low else np.float32(1)
        return cls(scale, round(-low / float(scale)), bits)

    @classmethod
    def of_statistics(cls, statistics: Statistics, bits: int) -> ActivationQuantizer:
        """The range as measured at 8 bits; below, the range clipped to a multiple of the root mean square."""
        bound = RECTIFIED_CLIP[bits] * statistics.rms if bits < 8 else np.inf
        return cls.of_range(max(statistics.low, -bound), min(statistics.high, bound), bits)


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight codes, int8 of the weight's shape, zero point 0, and one scale per output channel (axis 0)."""

    codes: npt.NDArray[np.int8]
    scale: FloatArray
    bits: int

    @classmethod
    def of(cls, weight: FloatArray, bits: int) -> QuantizedWeight:
        """Quantizes per output channel: by the largest magnitude at 8 bits, by least square error below.

        Codes are narrow, as ONNX Runtime's quantizer writes them: without the lowest one their mean is 0 as
        the weights' is. One-bit weights have the codes -1 and +1, the only two that DequantizeLinear with
        zero point 0 turns into opposite values. Below 8 bits the scale is the one that keeps the row's root
        mean square; coarse rounding would otherwise change the variance layer by layer until nothing is left
        of the signal.
        """
        rows = weight.reshape(weight.shape[0], -1)
        high = 2 ** (bits - 1) - 1
        if bits == 8:
            scale = _positive(np.abs(rows).max(axis=1) / np.float32(high))
            codes = np.rint(rows / scale[:, None])
        else:
            if bits == 1:
                codes = np.where(rows >= 0, np.float32(1), np.float32(-1))
            else:
                step = _positive(_rms(rows) * np.float32(_NORMAL_STEP[bits]))
                codes = np.clip(np.rint(rows / step[:, None]), -high, high)
            scale = _positive(_rms(rows) / _positive(_rms(codes)))
        return cls(codes.astype(np.int8).reshape(weight.shape), scale, bits)


def _positive(values: FloatArray) -> FloatArray:
    """Replaces 0, the scale of an all-zero row, by 1."""
    return np.where(values > 0, values, np.float32(1)).astype(np.float32)


def _rms(rows: FloatArray) -> FloatArray:
    """Root mean square of each row; summed in float64, so that the order of the sum does not show."""
    mean_squares = np.mean(np.square(rows, dtype=np.float64), axis=1)
    return np.asarray(np.sqrt(mean_squares), np.float32)


def _round_bits(value: float, bits: int) -> float:
    mantissa, exponent = np.frexp(value)
    return float(np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent))


def quantize_weights(
    model: onnx.ModelProto, bits: int, ends: int | None = None
) -> dict[str, QuantizedWeight]:
    """Quantizes the weights of every Conv and Gemm of a float32 model; initializer name -> weight.

    `ends`: bits of the first layer and the last one; None: as all others.
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    layers = layers_of(model)
    widths = {layer.input[1]: bits for layer in layers}
    for layer in (layers[0], layers[-1]):
        widths[layer.input[1]] = ends or bits
    return {
        name: QuantizedWeight.of(numpy_helper.to_array(initializers[name]), width)
        for name, width in widths.items()
    }


def layers_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The convolutions and fully connected layers of a float32 model, in order."""
    return [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]


def activation_quantizers(
    model: onnx.ModelProto,
    statistics: Mapping[str, Statistics],
    bits: int,
    output_bits: int = 8,
    ends: int | None = None,
) -> dict[str, ActivationQuantizer]:
    """Chooses a quantizer for the input and every node output of a float32 model.

    Pools and Flatten keep their input's quantizer. The model's output has `output_bits`: no layer consumes
    it, and classes that share a code could not be told apart. `ends`: bits of what the first layer and the
    last one read; None: as all others.
    """
    image, read_last = model.graph.input[0].name, layers_of(model)[-1].input[0]
    for node in reversed(model.graph.node):
        if node.output[0] == read_last and node.op_type in _PASS_THROUGH:
            read_last = node.input[0]
    quantizers = {image: ActivationQuantizer.of_statistics(statistics[image], ends or bits)}
    outputs = {output.name for output in model.graph.output}
    for node in model.graph.node:
        name = node.output[0]
        if node.op_type in _PASS_THROUGH:
            quantizers[name] = quantizers[node.input[0]]
        else:
            width = output_bits if name in outputs else (ends or bits) if name == read_last else bits
            quantizers[name] = ActivationQuantizer.of_statistics(statistics[name], width)
    return quantizers


class _QdqWriter:
    """Rewrites a float32 graph node by node; see write_qdq."""

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Mapping[str, QuantizedWeight],
        activations: Mapping[str, ActivationQuantizer],
        keep_activations: bool,
    ) -> None:
        self._model = model
        self._weights = weights
        self._activations = activations
        self._keep_activations = keep_activations
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._floats = {tensor.name: tensor for tensor in model.graph.initializer}
        # Float tensor -> the dequantized tensor that its consumers read.
        self._dequantized: dict[str, str] = {}

    def write(self) -> onnx.ModelProto:
        graph = self._model.graph
        outputs = {output.name for output in graph.output}
        self._quantize(graph.input[0].name, graph.input[0].name)
        done: set[str] = set()
        for index, node in enumerate(graph.node):
            if node.output[0] in done:
                continue
            group = [node]
            activation = self._only_consumer(index)
            if activation is not None:
                group.append(activation)
            name = group[-1].output[0]
            done.add(name)
            if activation is not None and self._absorbs(activation):
                group.pop()
            quantized = name in self._activations
            source = f"{name}_QuantizeLinear_Input" if quantized and name in outputs else name
            for member in group:
                self._emit(member, source if member is group[-1] else member.output[0])
            if quantized:
                self._quantize(source, name, output=name if name in outputs else None)
        bits = [q.bits for q in self._activations.values()] + [w.bits for w in self._weights.values()]
        two_bit = 2 in bits
        rewritten = helper.make_graph(
            self._nodes, graph.name, graph.input, graph.output, list(self._initializers.values())
        )
        return helper.make_model(
            rewritten,
            opset_imports=[helper.make_opsetid("", _OPSET_2BIT if two_bit else OPSET)],
            ir_version=_IR_VERSION_2BIT if two_bit else IR_VERSION,
            producer_name=self._model.producer_name,
        )

    def _only_consumer(self, index: int) -> onnx.NodeProto | None:
        """The Relu or Clip that is the only consumer of a node's output and directly behind it."""
        nodes = self._model.graph.node
        if index + 1 == len(nodes) or nodes[index + 1].op_type not in ("Relu", "Clip"):
            return None
        name = nodes[index].output[0]
        consumers = [node for node in nodes if name in node.input]
        return consumers[0] if len(consumers) == 1 and consumers[0] is nodes[index + 1] else None

    def _absorbs(self, activation: onnx.NodeProto) -> bool:
        """Whether the quantizer behind a Relu or Clip cuts where that does, so that it can be left out.

        ONNX Runtime's quantizer leaves it out behind quantized operators, and not behind a
        BatchNormalization, which it runs in float. QCDQ exporters keep it.
        """
        quantizer = self._activations.get(activation.output[0])
        if quantizer is None or self._keep_activations:
            return False
        if quantizer.bits not in _ACTIVATION_TYPES or quantizer.zero_point != 0:
            return False
        producer = next(node for node in self._model.graph.node if activation.input[0] in node.output)
        if producer.op_type == "BatchNormalization":
            return False
        if activation.op_type == "Relu":
            return True
        upper = float(numpy_helper.to_array(self._floats[activation.input[2]]))
        return bool(float(quantizer.scale) * (2**quantizer.bits - 1) <= upper * (1 + 1e-6))

    def _emit(self, original: onnx.NodeProto, output: str) -> None:
        """Adds a copy of a node that reads dequantized tensors and writes `output`."""
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if node.op_type in ("Conv", "Gemm"):
            self._quantize_parameters(node)
        for position, name in enumerate(node.input):
            if name in self._floats:
                self._initializers[name] = self._floats[name]
            node.input[position] = self._dequantized.get(name, name)
        node.output[0] = output
        self._nodes.append(node)

    def _constant(self, value: npt.NDArray[np.generic], name: str) -> str:
        self._initializers[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def _quantize(self, source: str, name: str, output: str | None = None) -> None:
        """Adds QuantizeLinear (Clip) DequantizeLinear behind tensor `source` for the quantizer of `name`."""
        quantizer = self._activations[name]
        storage = _ACTIVATION_TYPES.get(quantizer.bits, np.dtype(np.uint8))
        scale = self._constant(np.asarray(quantizer.scale), f"{name}_scale")
        zero = self._constant(np.asarray(quantizer.zero_point).astype(storage), f"{name}_zero_point")
        codes = f"{name}_QuantizeLinear_Output"
        self._nodes.append(
            helper.make_node("QuantizeLinear", [source, scale, zero], [codes], name=f"{name}_QuantizeLinear")
        )
        if quantizer.bits not in _ACTIVATION_TYPES:
            bounds = [
                self._constant(np.asarray(bound, np.uint8), f"code_{bound}")
                for bound in (0, 2**quantizer.bits - 1)
            ]
            self._nodes.append(
                helper.make_node("Clip", [codes, *bounds], [f"{name}_Clip_Output"], name=f"{name}_Clip")
            )
            codes = f"{name}_Clip_Output"
        output = output or f"{name}_DequantizeLinear_Output"
        self._nodes.append(
            helper.make_node(
                "DequantizeLinear", [codes, scale, zero], [output], name=f"{name}_DequantizeLinear"
            )
        )
        self._dequantized[name] = output

    def _dequantize_constant(self, codes: npt.NDArray[np.generic], scale: FloatArray, name: str) -> str:
        inputs = [
            self._constant(codes, f"{name}_quantized"),
            self._constant(scale, f"{name}_scale"),
            self._constant(np.zeros(scale.shape, codes.dtype), f"{name}_zero_point"),
        ]
        output = f"{name}_DequantizeLinear_Output"
        self._nodes.append(
            helper.make_node("DequantizeLinear", inputs, [output], name=f"{name}_DequantizeLinear", axis=0)
        )
        return output

    def _quantize_parameters(self, node: onnx.NodeProto) -> None:
        """Replaces the weights by codes of their width, the bias by int32 in units of x_scale * w_scale."""
        weight = self._weights[node.input[1]]
        storage = _WEIGHT_TYPES.get(weight.bits, np.dtype(np.int8))
        if len(node.input) > 2:
            x = self._activations[node.input[0]]
            scale = x.scale * weight.scale
            bias = np.rint(numpy_helper.to_array(self._floats[node.input[2]]) / scale)
            node.input[2] = self._dequantize_constant(bias.astype(np.int32), scale, node.input[2])
        node.input[1] = self._dequantize_constant(weight.codes.astype(storage), weight.scale, node.input[1])


def write_qdq(
    model: onnx.ModelProto,
    weights: Mapping[str, QuantizedWeight],
    activations: Mapping[str, ActivationQuantizer],
    *,
    keep_activations: bool = False,
) -> onnx.ModelProto:
    """Writes a float32 model as QDQ (QCDQ where a width has no ONNX type).

    Args:
        model: Float32 model in topological order, one input; nodes of the kinds that GraphBuilder writes. Not
            changed.
        weights: Codes of every Conv and Gemm weight, by initializer name.
        activations: Quantizer of the input and of every node output that is to be quantized, by tensor name.
            A tensor that only a Relu or Clip reads has none in the result: that node's output has.
        keep_activations: Keep each Relu and Clip, also where the quantizer behind it cuts at the same place.

    Returns:
        The model at opset 21, or 25 where a 2-bit type occurs.
    """
    return _QdqWriter(model, weights, activations, keep_activations).write()
