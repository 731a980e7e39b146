"""LowBitConvTranspose: 1-D or 2-D transposed convolution of codes, channels last."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.ops.codes import Array, low_bits, values
from lowbit.ops.conv import grouped_product, product_chain, weight_values
from lowbit.ops.epilogue import Epilogue
from lowbit.ops.ties import Attributes, Chain


def low_bit_conv_transpose(
    x: Array,
    w: Array,
    x_scale: Array,
    x_zero_point: Array,
    w_scale: Array,
    w_zero_point: Array,
    *epilogue_inputs: Array | None,
    in_channels: int,
    out_channels: int,
    kernel_shape: Sequence[int],
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    dilations: Sequence[int] = (),
    output_padding: Sequence[int] = (),
    group: int = 1,
    x_bits: int = 8,
    x_encoding: str = "unsigned",
    w_bits: int = 8,
    w_encoding: str = "unsigned",
    **epilogue: Any,
) -> Array:
    """Transposed convolution with one of the four epilogues.

    ``acc[n, p, c]`` sums ``v(x[n, o, i]) * v(w[c, t, i])`` over all o, t with
    ``o * stride + t * dilation - pad == p``.

    Args and returns as in :func:`lowbit.ops.conv.low_bit_conv`; weight rows are stored per output channel.
    """
    weights = weight_values(
        w, w_zero_point, out_channels, kernel_shape, in_channels // group, w_bits, w_encoding
    )
    activations = values(low_bits(x, x_bits, x_encoding), x_zero_point, x_encoding)
    acc = convolve_transposed(activations, weights, strides, pads, dilations, output_padding, group)
    return Epilogue(x_scale, w_scale, *epilogue_inputs, **epilogue).apply(acc)


def convolve_transposed(
    x: Array,
    weights: Array,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    output_padding: Sequence[int],
    group: int,
) -> Array:
    """The sums [N, P1.., out_channels] of values [N, D1.., in_channels]: of int64 the exact accumulators.

    Args:
        weights: [out_channels, kernel..., in_channels / group].
    """
    kernel = weights.shape[1:-1]
    spatial = len(kernel)
    strides = strides or [1] * spatial
    dilations = dilations or [1] * spatial
    pads = pads or [0] * (2 * spatial)
    output_padding = output_padding or [0] * spatial

    # The sums before the pads are cut off: position o * stride + t * dilation.
    full = [
        (x.shape[1 + d] - 1) * strides[d] + (kernel[d] - 1) * dilations[d] + 1 + output_padding[d]
        for d in range(spatial)
    ]
    by_tap = weights.reshape(weights.shape[0], -1, weights.shape[-1]).swapaxes(0, 1)
    acc: Array = np.zeros((x.shape[0], *full, weights.shape[0]), x.dtype)
    for tap, at in zip(itertools.product(*(range(k) for k in kernel)), by_tap, strict=True):
        reached: tuple[Any, ...] = tuple(
            slice(t * dilation, t * dilation + (size - 1) * stride + 1, stride)
            for t, dilation, size, stride in zip(tap, dilations, x.shape[1:-1], strides, strict=True)
        )
        acc[:, *reached] += grouped_product(x, at, group)
    inside: tuple[Any, ...] = tuple(slice(pads[d], full[d] - pads[spatial + d]) for d in range(spatial))
    return acc[:, *inside]


def conv_transpose_chain(attrs: Attributes, *inputs: Array | None) -> Chain:
    """The real result of the node, see :func:`lowbit.ops.conv.product_chain`."""
    group = attrs.get("group", 1)
    geometry = (attrs.get("strides", ()), attrs.get("pads", ()), attrs.get("dilations", ()))
    return product_chain(
        attrs,
        inputs,
        attrs["out_channels"],
        attrs["kernel_shape"],
        attrs["in_channels"] // group,
        lambda x, w: convolve_transposed(x, w, *geometry, attrs.get("output_padding", ()), group),
    )
