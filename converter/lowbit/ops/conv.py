"""LowBitConv and APConv: 1-D, 2-D or 3-D convolution of codes, channels last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.ops.codes import Array, Ints, low_bits, unpack, values
from lowbit.ops.epilogue import Epilogue, Operands, epilogue_chain
from lowbit.ops.ties import Attributes, Chain, rounded_operands


def low_bit_conv(
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
    group: int = 1,
    x_bits: int = 8,
    x_encoding: str = "unsigned",
    w_bits: int = 8,
    w_encoding: str = "unsigned",
    **epilogue: Any,
) -> Array:
    """Convolution with one of the four epilogues.

    ``acc[n, o, c] = sum over taps t, channels i: v(x[n, o * stride + t * dilation - pad, i]) *
    v(w[c, t, i])``

    Args:
        x: codes [N, D1.., in_channels].
        w: packed codes; row c holds w[c, t, i], t over the kernel, i over the input channels of c's group.
        epilogue_inputs: the schema's inputs from ``bias`` on, see :class:`lowbit.ops.epilogue.Epilogue`.
        epilogue: its attributes.

    Returns:
        codes or float32 [N, D1.., out_channels].
    """
    weights = weight_values(
        w, w_zero_point, out_channels, kernel_shape, in_channels // group, w_bits, w_encoding
    )
    activations = values(low_bits(x, x_bits, x_encoding), x_zero_point, x_encoding)
    acc = convolve(activations, weights, strides, pads, dilations, group)
    return Epilogue(x_scale, w_scale, *epilogue_inputs, **epilogue).apply(acc)


def convolve(
    x: Array,
    weights: Array,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
) -> Array:
    """The sums [N, O1.., out_channels] of values [N, D1.., in_channels]: of int64 the exact accumulators.

    Args:
        weights: [out_channels, kernel..., in_channels / group].
    """
    kernel = weights.shape[1:-1]
    spatial = len(kernel)
    strides = strides or [1] * spatial
    dilations = dilations or [1] * spatial
    pads = pads or [0] * (2 * spatial)

    # Padding is the real number zero, for bipolar codes too, so it is applied to values, not to codes.
    image = np.pad(x, [(0, 0), *((pads[d], pads[spatial + d]) for d in range(spatial)), (0, 0)])
    sizes = [
        (image.shape[1 + d] - dilations[d] * (kernel[d] - 1) - 1) // strides[d] + 1 for d in range(spatial)
    ]
    by_tap = weights.reshape(weights.shape[0], -1, weights.shape[-1]).swapaxes(0, 1)
    acc: Array = np.zeros((x.shape[0], *sizes, weights.shape[0]), x.dtype)
    for tap, at in zip(itertools.product(*(range(k) for k in kernel)), by_tap, strict=True):
        window: tuple[Any, ...] = tuple(
            slice(t * dilation, t * dilation + (size - 1) * stride + 1, stride)
            for t, dilation, size, stride in zip(tap, dilations, sizes, strides, strict=True)
        )
        acc += grouped_product(image[:, *window], at, group)
    return acc


def weight_values(
    w: Array,
    w_zero_point: Array,
    out_channels: int,
    kernel_shape: Sequence[int],
    group_channels: int,
    bits: int,
    encoding: str,
) -> Ints:
    """The integer weights [out_channels, kernel..., group_channels] of a packed initializer."""
    codes = unpack(w, out_channels, int(np.prod(kernel_shape)) * group_channels, bits, encoding)
    zero_point = w_zero_point.reshape(-1, 1)  # scalar or one per row
    return values(codes, zero_point, encoding).reshape(out_channels, *kernel_shape, group_channels)


def grouped_product(pixels: Array, weights: Array, group: int) -> Array:
    """``out[..., c] = sum over i: pixels[..., g(c), i] * weights[c, i]`` with g(c) the group of channel c.

    The product runs in float64, for speed: integers below 2^53 are exact there, and no accumulator exceeds
    2^31.

    Args:
        pixels: [..., group * I].
        weights: [group * O, I].

    Returns:
        [..., group * O] of the type of the pixels.
    """
    lead = pixels.shape[:-1]
    left = (
        pixels.reshape(-1, group, pixels.shape[-1] // group).transpose(1, 0, 2).astype(np.float64)
    )  # [g, P, I]
    right = weights.reshape(group, -1, weights.shape[-1]).transpose(0, 2, 1).astype(np.float64)  # [g, I, O]
    product: npt.NDArray[np.float64] = left @ right
    return product.transpose(1, 0, 2).reshape(*lead, weights.shape[0]).astype(pixels.dtype)


def conv_chain(attrs: Attributes, *inputs: Array | None) -> Chain:
    """The real result of the node, see :func:`product_chain`."""
    group = attrs.get("group", 1)
    geometry = (attrs.get("strides", ()), attrs.get("pads", ()), attrs.get("dilations", ()))
    return product_chain(
        attrs,
        inputs,
        attrs["out_channels"],
        attrs["kernel_shape"],
        attrs["in_channels"] // group,
        lambda x, w: convolve(x, w, *geometry, group),
    )


def product_chain(
    attrs: Attributes,
    inputs: Sequence[Array | None],
    out: int,
    kernel: Sequence[int],
    depth: int,
    product: Callable[[Array, Array], Array],
) -> Chain:
    """The real result of a convolution or matrix product.

    Args:
        attrs: its attributes.
        inputs: its inputs.
        out: output channels.
        kernel: sizes of the kernel.
        depth: input channels that one output channel reads.
        product: the sums of the values of x and of weights [out, kernel.., depth].
    """
    given = Operands(inputs)
    x = values(given["x"], given["x_zero_point"], attrs.get("x_encoding", "unsigned"))
    bits, encoding = attrs.get("w_bits", 8), attrs.get("w_encoding", "unsigned")
    w = weight_values(given["w"], given["w_zero_point"], out, kernel, depth, bits, encoding)
    total, magnitude = product(x, w).astype(np.float64), product(np.abs(x), np.abs(w)).astype(np.float64)
    terms = depth * int(np.prod(kernel))
    chain = epilogue_chain(attrs, given, total, magnitude, terms)

    def of_rounded_operands() -> list[Chain]:
        x_scale, w_scale = (given[name].astype(np.float64) for name in ("x_scale", "w_scale"))
        operands = rounded_operands(x * x_scale, w * w_scale.reshape(-1, *(1,) * (w.ndim - 1)))
        sums = [product(*pair) / (x_scale * w_scale) for pair in operands]
        return [epilogue_chain(attrs, given, each, magnitude, terms) for each in sums]

    return replace(chain, of_rounded_operands=of_rounded_operands)
