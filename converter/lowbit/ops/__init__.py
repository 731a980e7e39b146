"""The meaning of every op of domain ``ai.lowbit``, as runnable numpy.

One op per file. These definitions decide: the C++ reference kernels equal them, every other kernel equals
those. They are written to be read; the names and the order of the parameters are those of the schema, the
defaults too.

    >>> lowbit.ops.evaluate("LowBitAdd", {"y_bits": 4}, [a, a_scale, a_zero, b, b_scale, b_zero, ...])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lowbit.errors import LowBitError
from lowbit.ops.add import add_chain, low_bit_add
from lowbit.ops.affine import affine_chain, low_bit_affine
from lowbit.ops.average_pool import average_pool_chain, low_bit_average_pool
from lowbit.ops.codes import Array, pack, unpack
from lowbit.ops.concat import concat_chain, low_bit_concat
from lowbit.ops.conv import conv_chain, low_bit_conv
from lowbit.ops.conv_transpose import conv_transpose_chain, low_bit_conv_transpose
from lowbit.ops.depth_to_space import low_bit_depth_to_space
from lowbit.ops.dequantize import dequantize_chain, low_bit_dequantize
from lowbit.ops.epilogue import Epilogue
from lowbit.ops.gemm import gemm_chain, low_bit_gemm
from lowbit.ops.global_average_pool import global_average_pool_chain, low_bit_global_average_pool
from lowbit.ops.image import low_bit_image
from lowbit.ops.lookup import low_bit_lookup
from lowbit.ops.mat_mul import low_bit_mat_mul, mat_mul_chain
from lowbit.ops.max_pool import low_bit_max_pool
from lowbit.ops.mul import low_bit_mul, mul_chain
from lowbit.ops.normalization import low_bit_normalization, normalization_chain
from lowbit.ops.quantize import low_bit_quantize, quantize_chain
from lowbit.ops.registration import register_schemas
from lowbit.ops.requantize import low_bit_requantize, requantize_chain
from lowbit.ops.resize import low_bit_resize, resize_chain
from lowbit.ops.softmax import low_bit_softmax, softmax_chain
from lowbit.ops.threshold import low_bit_threshold, threshold_chain
from lowbit.ops.ties import Chain
from lowbit.schemas import DOMAIN

__all__ = ["CHAINS", "DEFINITIONS", "DOMAIN", "chain", "evaluate", "pack", "register_schemas", "unpack"]

DEFINITIONS: dict[str, Callable[..., Array]] = {
    "LowBitConv": low_bit_conv,
    "APConv": low_bit_conv,
    "LowBitConvTranspose": low_bit_conv_transpose,
    "LowBitGemm": low_bit_gemm,
    "APGemm": low_bit_gemm,
    "LowBitAffine": low_bit_affine,
    "LowBitLookup": low_bit_lookup,
    "LowBitAdd": low_bit_add,
    "LowBitMul": low_bit_mul,
    "LowBitMatMul": low_bit_mat_mul,
    "LowBitMaxPool": low_bit_max_pool,
    "LowBitAveragePool": low_bit_average_pool,
    "LowBitGlobalAveragePool": low_bit_global_average_pool,
    "LowBitConcat": low_bit_concat,
    "LowBitNormalization": low_bit_normalization,
    "LowBitResize": low_bit_resize,
    "LowBitImage": low_bit_image,
    "LowBitDepthToSpace": low_bit_depth_to_space,
    "LowBitSoftmax": low_bit_softmax,
    "LowBitRequantize": low_bit_requantize,
    "LowBitQuantize": low_bit_quantize,
    "LowBitThreshold": low_bit_threshold,
    "LowBitDequantize": low_bit_dequantize,
}

CHAINS: dict[str, Callable[..., Chain | None]] = {
    "LowBitConv": conv_chain,
    "APConv": conv_chain,
    "LowBitConvTranspose": conv_transpose_chain,
    "LowBitGemm": gemm_chain,
    "APGemm": gemm_chain,
    "LowBitAffine": affine_chain,
    "LowBitAdd": add_chain,
    "LowBitMul": mul_chain,
    "LowBitMatMul": mat_mul_chain,
    "LowBitAveragePool": average_pool_chain,
    "LowBitGlobalAveragePool": global_average_pool_chain,
    "LowBitConcat": concat_chain,
    "LowBitNormalization": normalization_chain,
    "LowBitResize": resize_chain,
    "LowBitSoftmax": softmax_chain,
    "LowBitRequantize": requantize_chain,
    "LowBitQuantize": quantize_chain,
    "LowBitThreshold": threshold_chain,
    "LowBitDequantize": dequantize_chain,
}
"""The real result of every op that rounds; the others only move codes."""


def evaluate(op_type: str, attrs: Mapping[str, Any], inputs: Sequence[Array | None]) -> Array:
    """Computes one node by its definition.

    Args:
        op_type: an op of ``ai.lowbit``, such as "LowBitConv".
        attrs: its attributes; those left out have the schema's defaults.
        inputs: one array per schema input in order, None where an optional one is absent; trailing ones may
            be left out. Codes are uint8 or int8, zero points and biases int32, scales float32. As in the
            kernels, a scale, a zero point or a bias of one element may have any dims.

    Returns:
        The output: uint8 or int8 codes, or float32.

    Raises:
        LowBitError: for an op, attribute or input that the schema does not have, and for values that no
            kernel takes.
    """
    if op_type not in DEFINITIONS:
        raise LowBitError(f"{op_type} is not an op of {DOMAIN}; it has {', '.join(DEFINITIONS)}")
    arrays = [None if given is None else np.asarray(given) for given in inputs]
    for i, array in enumerate(arrays):
        if array is not None and array.dtype not in (np.uint8, np.int8, np.int32, np.float32):
            raise LowBitError(
                f"{op_type}: input {i} is {array.dtype}; expected uint8, int8, int32 or float32"
            )
    try:
        return DEFINITIONS[op_type](*_with_dims_of_one(op_type, arrays), **attrs)
    except TypeError as error:  # too many inputs, an unknown attribute, a missing required one
        raise LowBitError(f"{op_type}: {error}") from error


def chain(op_type: str, attrs: Mapping[str, Any], inputs: Sequence[Array | None]) -> Chain | None:
    """The real result of a node, and how far a float32 evaluation may be from it, see :mod:`lowbit.ops.ties`.

    Args:
        op_type: an op of ``ai.lowbit``.
        attrs: its attributes.
        inputs: one array per schema input in order, None where an optional one is absent.

    Returns:
        None for nodes that only move codes, where nothing explains a difference.

    Raises:
        KeyError: for an op that there is not.
    """
    if op_type not in DEFINITIONS:
        raise KeyError(op_type)
    return CHAINS[op_type](attrs, *inputs) if op_type in CHAINS else None


_DIMS_OF_ONE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["scale", "point"], ()),
    **dict.fromkeys(["scales", "points", "bias", "shift", "base", "dir"], (1,)),
}
"""The dims of a parameter of one element in the definitions, by the last word of its name."""


def _with_dims_of_one(op_type: str, inputs: list[Array | None]) -> list[Array | None]:
    """The inputs, with parameters of one element in the dims that the definitions expect of them."""
    names = [*inspect.signature(DEFINITIONS[op_type]).parameters]
    if "epilogue_inputs" in names:
        fields = [*inspect.signature(Epilogue).parameters]
        names[names.index("epilogue_inputs") :] = fields[fields.index("bias") :]
    words = [name.rpartition("_")[2] for name in names] + [""] * len(inputs)  # the last input may be variadic
    return [
        array.reshape(_DIMS_OF_ONE[word])
        if array is not None and array.size == 1 and word in _DIMS_OF_ONE
        else array
        for word, array in zip(words, inputs, strict=False)
    ]
