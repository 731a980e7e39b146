"""LowBitGemm and APGemm: matrix product of codes with constant weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.ops.codes import Array, low_bits, values
from lowbit.ops.conv import grouped_product, product_chain, weight_values
from lowbit.ops.epilogue import Epilogue
from lowbit.ops.ties import Attributes, Chain, Reals


def low_bit_gemm(
    x: Array,
    w: Array,
    x_scale: Array,
    x_zero_point: Array,
    w_scale: Array,
    w_zero_point: Array,
    *epilogue_inputs: Array | None,
    in_features: int,
    out_features: int,
    axis: int = -1,
    x_bits: int = 8,
    x_encoding: str = "unsigned",
    w_bits: int = 8,
    w_encoding: str = "unsigned",
    **epilogue: Any,
) -> Array:
    """``acc[m, c] = sum over k: v(x[m, k]) * v(w[c, k])``.

    Args:
        x: codes [M.., K..]; the dims from ``axis`` on are flattened into in_features.
        w: packed codes, out_features rows of in_features.
        epilogue_inputs: the schema's inputs from ``bias`` on, see :class:`lowbit.ops.epilogue.Epilogue`.
        epilogue: its attributes.

    Returns:
        codes or float32 [M.., out_features].
    """
    lead = x.shape[:axis] if axis >= 0 else x.shape[: x.ndim + axis]
    activations = values(low_bits(x, x_bits, x_encoding), x_zero_point, x_encoding)
    rows = activations.reshape(*lead, in_features)
    weights = weight_values(w, w_zero_point, out_features, [1], in_features, w_bits, w_encoding)[:, 0]
    acc = grouped_product(rows, weights, group=1).astype(np.int64)
    return Epilogue(x_scale, w_scale, *epilogue_inputs, **epilogue).apply(acc)


def gemm_chain(attrs: Attributes, *inputs: Array | None) -> Chain:
    """The real result of the node, see :func:`lowbit.ops.conv.product_chain`."""
    depth = attrs["in_features"]

    def product(x: Array, w: Array) -> Reals:
        axis = attrs.get("axis", -1) % x.ndim
        rows = x.reshape(*x.shape[:axis], depth)
        return np.asarray(rows.astype(np.float64) @ w[:, 0].T.astype(np.float64))

    return product_chain(attrs, inputs, attrs["out_features"], [1], depth, product)
