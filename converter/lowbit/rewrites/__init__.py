"""The rules, in the order in which they are asked. The first that finds a region at a node has it."""

from __future__ import annotations

from lowbit.rewrites import (
    add,
    affine,
    average_pool,
    concat,
    conv,
    conv_transpose,
    depth_to_space,
    dequantize,
    gemm,
    global_average_pool,
    lookup,
    max_pool,
    mul,
    pad,
    quantize,
    requantize,
    reshape,
    resize,
    slice,
    split,
    squeeze,
    table,
    threshold,
    transpose,
)
from lowbit.rewrites.rule import Rule

RULES: tuple[Rule, ...] = (
    conv.match,
    conv_transpose.match,
    gemm.match,
    affine.match,
    requantize.match,
    lookup.match,
    table.match,
    add.match,
    mul.match,
    concat.match,
    average_pool.match,
    global_average_pool.match,
    max_pool.match,
    resize.match,
    depth_to_space.match,
    transpose.match,
    reshape.match,
    squeeze.match,
    slice.match,
    pad.match,
    split.match,
    threshold.match,
    quantize.match,
    dequantize.match,
)

__all__ = ["RULES"]
