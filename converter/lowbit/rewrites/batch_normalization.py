"""BatchNormalization as one multiplication and one addition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.attributes import get_float
from lowbit.graph.normal_form import NormalForm
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.operands import real_constant

Floats = npt.NDArray[np.float32]


def fold_batch_normalization(
    form: NormalForm, node: ir.Node, channels: int | None = None, axis: int = 1
) -> tuple[Floats, Floats] | Refusal:
    """A BatchNormalization as ``y = x * scale + shift``, each [C].

    Args:
        form: the graph.
        node: the node.
        channels: how many there must be, where that is known.
        axis: the axis along which the reader has its channels; a BatchNormalization's is always 1.

    ``inv = 1 / sqrt(var + eps); scale = gamma * inv; shift = beta - mean * scale`` in float32, computed here
    once and for all targets.
    """
    if axis != 1:
        return Refusal(f"its BatchNormalization is along axis 1, its channels along axis {axis}")
    arrays = [real_constant(form, value) for value in node.inputs[1:5]]
    if any(array is None for array in arrays):
        return Refusal("the parameters of its BatchNormalization are not float32 constants")
    gamma, beta, mean, variance = (np.asarray(array, np.float32) for array in arrays)
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / np.sqrt(variance + np.float32(get_float(node, "epsilon", 1e-5)))
        scale = gamma * inverse
        shift = beta - mean * scale
    if channels not in (None, scale.size):
        return Refusal(f"its BatchNormalization has {scale.size} channels, expected {channels}")
    if not (np.all(np.isfinite(scale)) and np.all(np.isfinite(shift))):
        return Refusal("its BatchNormalization is not finite")
    return scale, shift
