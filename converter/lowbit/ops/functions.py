"""The functions that a float tail may hold: float32 operations, each rounded once (docs/numerics.md).

`custom_ops/core/activation.h` has the same ones for kernels; numbers are equal to the bit everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Reals = npt.NDArray[np.float64]

_MOST = np.float32(86)
"""exp(t) and 1 + exp(t) are normal numbers up to here."""
_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_MAGIC = np.float32(12582912)
"""1.5 * 2^23, which rounds to whole numbers."""
_EXP = np.asarray(
    [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1],
    np.float32,
)
"""Of exp(r) beyond 1 + r, |r| up to ln(2) / 2: expf of Moshier's Cephes library."""
_ONE = np.float32(1)


def sigmoid(v: Floats) -> Floats:
    """``1 / (1 + exp(-v))`` of any shape; NaN of NaN, and within 4 units in the last place."""
    t = np.minimum(_MOST, np.maximum(-_MOST, v * np.float32(-1)))
    power = t * _LOG2E + _MAGIC
    n = power - _MAGIC
    r = (t + n * -_LN2_HIGH) + n * -_LN2_LOW
    p = np.full_like(r, _EXP[0])
    for constant in _EXP[1:]:
        p = p * r + constant
    p = (p * (r * r) + r) + _ONE
    grown = (np.asarray(p).view(np.uint32) + (np.asarray(power).view(np.uint32) << np.uint32(23))).view(
        np.float32
    )
    result: Floats = _ONE / (_ONE + grown)
    return result


def silu(v: Floats) -> Floats:
    """``v * sigmoid(v)``."""
    return v * sigmoid(v)


def hard_swish(v: Floats) -> Floats:
    """``v * min(max(v * f32(1 / 6) + 0.5, 0), 1)``, as ONNX defines HardSwish."""
    half = v * np.float32(1 / 6) + np.float32(0.5)
    result: Floats = v * np.minimum(_ONE, np.maximum(np.float32(0), half))
    return result


def _real_silu(v: Reals) -> Reals:
    with np.errstate(over="ignore"):
        result: Reals = v / (1 + np.exp(-v))
    return result


def _real_hard_swish(v: Reals) -> Reals:
    result: Reals = v * np.clip(v / 6 + 0.5, 0, 1)
    return result


FUNCTIONS: Mapping[str, Callable[[Floats], Floats]] = {"silu": silu, "hardswish": hard_swish}
"""By the step of a tail."""
REAL_FUNCTIONS: Mapping[str, Callable[[Reals], Reals]] = {"silu": _real_silu, "hardswish": _real_hard_swish}
"""What they stand for, in float64."""
