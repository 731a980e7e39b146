"""Pieces that many graphs share: a quantized input, and one quantized convolution or matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.dialects.graphs.builder import Graph, Quant


def quantized_input(
    g: Graph, shape: Sequence[int | str], kind: str = "u8", *, zero: int | str = "random", about: float = 0.03
) -> tuple[str, Quant]:
    """A float graph input behind Q and DQ: (dequantized tensor, its quantizer)."""
    quant = g.act(about, kind, zero=zero)
    return g.qdq(g.input(shape, step=float(quant.scale), about=about), quant), quant


def conv_node(
    g: Graph,
    x: str,
    x_quant: Quant,
    shape: Sequence[int],
    *,
    w_kind: str = "s8",
    per_channel: bool = True,
    symmetric: bool = True,
    bias: str | None = "int",
    weights: str = "int",
    w_range: tuple[int, int] | None = None,
    transposed: bool = False,
    **attributes,
) -> tuple[str, Quant, int]:
    """A Conv (or ConvTranspose) with quantized weights: (result, weight quantizer, terms per sum).

    Args:
        shape: Of the weights in ONNX's order.
        bias: "int" (scale sx*sw), "float", or None.
        weights: "int" (initializer + DQ) or "float" (fp32 initializer + Q + DQ).
        w_range: Smallest and largest code used.
    """
    group = attributes.get("group", 1)
    channels = shape[1] * group if transposed else shape[0]
    axis = 1 if transposed else 0
    count = shape[axis] if per_channel else None
    w_quant = g.weight_quant(count, w_kind, symmetric=symmetric, axis=axis)
    low, high = w_range or (None, None)
    codes = g.codes(shape, w_kind, low=low, high=high)
    weight = g.weight(codes, w_quant) if weights == "int" else g.float_weight(codes, w_quant)
    inputs = [x, weight]
    terms = int(np.prod(shape[1:])) if not transposed else int(shape[0] // group * np.prod(shape[2:]))
    deviation = g.deviation(x_quant, w_quant, terms, w_range and high - low)
    if bias == "int":
        w_channels = Quant(np.tile(w_quant.scale, channels // np.size(w_quant.scale)), w_quant.zero, "s8", 0)
        inputs.append(g.bias(channels, x_quant, w_channels if per_channel else w_quant, int(deviation)))
    elif bias == "float":
        real = float(x_quant.scale) * float(np.mean(w_quant.scale)) * deviation
        inputs.append(g.floats(g.rng.normal(size=channels) * real, "bias"))
    op = "ConvTranspose" if transposed else "Conv"
    return g.node(op, inputs, **attributes), w_quant, terms


def conv_layer(
    g: Graph,
    x: str,
    x_quant: Quant,
    shape: Sequence[int],
    *,
    y_kind: str = "u8",
    y_zero: int | str = "random",
    then: Sequence = (),
    **options,
) -> tuple[str, Quant]:
    """Conv, then the functions in `then`, then Q and DQ: (dequantized tensor, quantizer)."""
    y, w_quant, terms = conv_node(g, x, x_quant, shape, **options)
    w_range = options.get("w_range")
    y_quant = g.after(
        x_quant, w_quant, terms, y_kind, w_range=w_range and w_range[1] - w_range[0], zero=y_zero
    )
    for step in then:
        y = step(y)
    return g.qdq(y, y_quant), y_quant


def gemm_weight(
    g: Graph,
    k: int,
    n: int,
    *,
    kind: str = "s8",
    per_channel: bool = True,
    transposed: bool = False,
    **options,
) -> tuple[str, Quant]:
    """Weights [k, n] (or [n, k] when transposed) behind a DQ, per output channel."""
    axis = 0 if transposed else 1
    quant = g.weight_quant(n if per_channel else None, kind, axis=axis, **options)
    return g.weight(g.codes((n, k) if transposed else (k, n), kind), quant), quant


def batch_norm(g: Graph, x: str, channels: int) -> str:
    """A BatchNormalization with a gamma of 0 and some negative ones."""
    gamma = g.rng.uniform(-0.2, 1.6, channels)
    gamma[0] = 0.0
    parts = [gamma, g.rng.normal(size=channels), g.rng.normal(size=channels), g.rng.uniform(0.3, 2, channels)]
    return g.node("BatchNormalization", [x, *(g.floats(p, "bn") for p in parts)], epsilon=1e-4)
