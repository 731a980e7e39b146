"""Quantizers that the user states for float inputs of a model.

Networks trained with quantization often read float images in their first layer, so that this layer has no
integer form. Who knows that the images are, say, bytes divided by 255 can say so: the input is then rounded
to that grid, which changes nothing for such images and everything for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from lowbit.errors import ModelError
from lowbit.graph.constants import add_initializer
from lowbit.graph.quantizers import quantizer
from lowbit.proto.report import Report

_SYNTAX = "[NAME:]scale=1/255,bits=8,unsigned[,zero_point=0]"


@dataclass(frozen=True)
class InputQuant:
    """One stated quantizer.

    Attributes:
        name: the graph input; None for every float32 input.
        scale: what one code is worth.
        bits: 1 to 8.
        signed: codes from ``-2^(bits-1)`` instead of 0.
        zero_point: the code of 0.
    """

    name: str | None
    scale: np.float32
    bits: int
    signed: bool
    zero_point: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest code."""
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.signed else (0, 2**self.bits - 1)


def parse_input_quant(text: str) -> InputQuant:
    """Reads ``[NAME:]scale=1/255,bits=8,unsigned[,zero_point=0]``.

    Raises:
        ModelError: if it says something else, or numbers that no quantizer has.
    """
    name, _, settings = text.rpartition(":")
    fields: dict[str, str] = {}
    for part in settings.split(","):
        key, _, value = part.strip().partition("=")
        if key in fields or key not in ("scale", "bits", "zero_point", "signed", "unsigned"):
            raise ModelError(f"--input-quant '{text}': cannot read '{part.strip()}'; expected {_SYNTAX}")
        fields[key] = value
    if "scale" not in fields or "bits" not in fields or ("signed" in fields) == ("unsigned" in fields):
        raise ModelError(
            f"--input-quant '{text}': expected a scale, bits, and one of signed and unsigned: {_SYNTAX}"
        )
    try:
        scale = np.float32(float(Fraction(fields["scale"].replace(" ", ""))))
        bits, zero_point = int(fields["bits"]), int(fields.get("zero_point", "0"))
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise ModelError(f"--input-quant '{text}': {error}; expected numbers, as in {_SYNTAX}") from error
    read = InputQuant(name or None, scale, bits, "signed" in fields, zero_point)
    if not (math.isfinite(scale) and scale > 0 and 1 <= bits <= 8):
        raise ModelError(f"--input-quant '{text}': expected a positive scale and 1 to 8 bits")
    low, high = (-128, 127) if read.signed else (0, 255)
    if not low <= zero_point <= high:
        raise ModelError(f"--input-quant '{text}': expected a zero point from {low} to {high}")
    return read


def quantize_inputs(graph: ir.Graph, stated: Iterable[InputQuant], report: Report) -> None:
    """Puts stated quantizers behind the float inputs of a graph, in place.

    Args:
        graph: a graph in normal form.
        stated: the quantizers.
        report: gets one warning per input.

    Raises:
        ModelError: if there is no such input, or it is no float32 tensor.
    """
    done: set[ir.Value] = set()
    for quant in stated:
        for value in _inputs(graph, quant.name):
            if value in done:
                raise ModelError(f"--input-quant: two quantizers are stated for input '{value.name}'")
            done.add(value)
            _quantize(graph, value, quant)
            kind = "signed" if quant.signed else "unsigned"
            report.warn(
                f"input '{value.name}' is rounded to {quant.bits} {kind} bits with scale {quant.scale:.9g} "
                f"and zero point {quant.zero_point}, as --input-quant says; the original reads it as it is"
            )


def _inputs(graph: ir.Graph, name: str | None) -> Sequence[ir.Value]:
    floats = [value for value in graph.inputs if value.dtype == ir.DataType.FLOAT]
    found = floats if name is None else [value for value in floats if value.name == name]
    if not found:
        listed = ", ".join(f"'{value.name}' ({value.dtype})" for value in graph.inputs) or "none"
        wanted = "any float32 input" if name is None else f"a float32 input '{name}'"
        raise ModelError(f"--input-quant: expected {wanted}; the model's inputs are {listed}")
    return found


def _quantize(graph: ir.Graph, value: ir.Value, quant: InputQuant) -> None:
    low, high = quant.bounds
    uses = list(value.uses())
    scale, zero = np.asarray(quant.scale), np.asarray(quant.zero_point)
    node = quantizer(
        graph, "QuantizeRound", value, scale, zero, low=low, high=high, name=f"{value.name}.quantize"
    )
    codes = node.outputs[0]
    assert codes.dtype is not None
    parameters = [
        add_initializer(graph, f"{value.name}.scale", scale),
        add_initializer(graph, f"{value.name}.zero_point", zero.astype(np.int8 if low < 0 else np.uint8)),
    ]
    real = ir.val(f"{value.name}.quantized", ir.DataType.FLOAT, value.shape)
    pair = [
        node,
        ir.Node(
            "", "DequantizeLinear", [codes, *parameters], outputs=[real], name=f"{value.name}.dequantize"
        ),
    ]
    first = next(iter(graph), None)
    if first is None:
        return
    graph.insert_before(first, pair)
    for user, index in uses:
        user.replace_input_with(index, real)
