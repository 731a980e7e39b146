"""What a QONNX graph means, executed in numpy: its float32 chain on exact accumulators.

Every node is one float32 operation per element, in graph order, as the operators' definitions in the qonnx
package state them, except that Conv, Gemm and MatMul between tensors that are integers times a scale sum
those integers exactly: ``f32(sum) * f32(sx * sw)``. There is no fused formula: a Quant behind a convolution
divides by its scale, clips and rounds like any other.

The operators of the standard come from :mod:`tests.dialects.oracle`; nothing is shared with the converter.
"""

# ruff: noqa: N802 - methods are named after the operators they execute
from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto

from tests.dialects.oracle import F32, Grid, Oracle, Value, _attributes

DOMAINS = ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general", "qonnx.custom_op")

ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ROUND": np.round,
    "HALF_EVEN": np.round,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "UP": lambda x: np.sign(x) * np.ceil(np.abs(x)),
    "DOWN": np.fix,
    "HALF_UP": lambda x: np.sign(x) * np.floor(np.abs(x) + F32(0.5)),
    "HALF_DOWN": lambda x: np.sign(x) * np.ceil(np.abs(x) - F32(0.5)),
}


def bounds(bits: int, signed: bool, narrow: bool) -> tuple[int, int]:
    """The integers of a Quant."""
    if signed:
        return -(2 ** (bits - 1)) + (1 if narrow else 0), 2 ** (bits - 1) - 1
    return 0, 2**bits - (2 if narrow else 1)


class QonnxOracle(Oracle):
    """Executes one QONNX graph; ``values`` holds every tensor afterwards."""

    def _execute(self, node: onnx.NodeProto) -> list[Value]:
        if node.domain not in DOMAINS:
            return super()._execute(node)
        inputs = [self.values[name].array for name in node.input]
        special = getattr(self, f"_q_{node.op_type}")
        return [special(*inputs, **_attributes(node))]

    def _codes_of_a_sum(self, node, scale, shift, low, high) -> None:
        return None

    def _q_Quant(self, x, scale, zero, bits, signed=1, narrow=0, rounding_mode=b"ROUND") -> Value:
        x, scale, zero, bits = (np.asarray(a, F32) for a in (x, scale, zero, bits))
        width = int(bits.reshape(()))
        y = x / scale + zero
        if width == 1 and signed:
            y = np.where(y >= 0, F32(1), F32(-1))
        else:
            low, high = bounds(width, bool(signed), bool(narrow))
            y = np.where(y > F32(high), F32(high), y)
            y = np.where(y < F32(low), F32(low), y)
            y = ROUNDINGS[rounding_mode.decode().upper()](y).astype(F32)
        return _value(y - zero, scale, (y - zero) * scale)

    def _q_IntQuant(self, *inputs, **attributes) -> Value:
        return self._q_Quant(*inputs, **attributes)

    def _q_BipolarQuant(self, x, scale) -> Value:
        y = np.where(x >= 0, F32(1), F32(-1))
        return _value(y, np.asarray(scale, F32), y * np.asarray(scale, F32))

    def _q_Trunc(self, x, scale, zero, in_bits, *rest, rounding_mode=b"FLOOR", signed=1, narrow=0) -> Value:
        x, scale, zero = (np.asarray(a, F32) for a in (x, scale, zero))
        y = np.round(x / scale + zero)
        rounding = ROUNDINGS[rounding_mode.decode().upper()]
        if len(rest) == 1:
            shift = F32(2.0 ** (float(in_bits) - float(rest[0])))
            y = rounding(y / shift).astype(F32)
            return _value(y - zero, scale, (y - zero) * scale)
        out_scale, out_bits = np.asarray(rest[0], F32), int(rest[1])
        shift = F32(2) ** np.round(np.log2(out_scale / scale))
        low, high = bounds(out_bits, bool(signed), bool(narrow))
        y = y / shift
        y = np.where(y > F32(high), F32(high), y)
        y = np.where(y < F32(low), F32(low), y)
        y = rounding(y).astype(F32)
        out_zero = zero / shift
        return _value(y - out_zero, out_scale, (y - out_zero) * out_scale)

    def _q_MultiThreshold(self, x, thresholds, out_scale=1.0, out_bias=0.0, data_layout=b"", **_) -> Value:
        layout = data_layout.decode() or {2: "NC", 3: "NWC", 4: "NCHW"}.get(x.ndim, "")
        axis = layout.index("C") if "C" in layout else 1
        moved = np.moveaxis(x, axis, -1)
        count = np.moveaxis((moved[..., None] >= thresholds).sum(-1), -1, axis).astype(F32)
        real = F32(out_scale) * count + F32(out_bias)
        for scale in (F32(out_scale), F32(out_scale) / F32(2)):
            codes = np.round(real / scale)
            if np.array_equal(codes * scale, real):
                return _value(codes, np.asarray(scale), real)
        return Value(real, TensorProto.FLOAT)


def _value(codes: np.ndarray, scale: np.ndarray, real: np.ndarray) -> Value:
    """A float tensor, with its integers where they are integers."""
    real = np.asarray(real, F32)
    grid = None
    if np.all(np.isfinite(codes)) and np.array_equal(codes, np.round(codes)):
        uniform = scale.reshape(()) if scale.size == 1 else scale
        grid = Grid(np.broadcast_to(codes, real.shape).astype(np.int64), uniform)
    return Value(real, TensorProto.FLOAT, grid)


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of a QONNX model in order, as its graph defines them."""
    results = QonnxOracle(model).run(feeds)
    return [results[o.name] for o in model.graph.output]
