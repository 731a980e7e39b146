"""BatchNormalization, or Mul or Add of one constant per channel, on codes becomes LowBitAffine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.attributes import get_int
from lowbit.graph.normal_form import dims_of, is_op
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.batch_normalization import fold_batch_normalization
from lowbit.rewrites.clipped import Clipped, clipped_at, real_numbers
from lowbit.rewrites.operands import Activation, is_constant, per_channel, read_activation, real_constant
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.unary import UnaryRegion


@dataclass
class AffineRegion(UnaryRegion):
    """A per-channel multiply and add."""

    scale: npt.NDArray[np.float32]
    shift: npt.NDArray[np.float32]

    op_type = "LowBitAffine"

    def geometry(self) -> dict[str, Any]:
        """None."""
        return {}

    def extra_inputs(self) -> dict[str, Any]:
        """The factors and summands."""
        return {"scale": self.scale, "shift": self.shift}


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, ("BatchNormalization", "Mul", "Add"), laws=True)
    if clipped is None:
        return None
    node = clipped.core
    path = 0
    if not is_op(node, "BatchNormalization"):
        path = 0 if is_constant(node.inputs[1]) else 1
        array = real_constant(context.form, node.inputs[1 - path])
        if array is None or array.size == 1:
            return None  # one number for all channels is a function of the code: a lookup
    elif get_int(node, "training_mode", 0) or len(node.outputs) > 1:
        return Refusal("it computes its statistics at run time")
    x = read_activation(context.form, node.inputs[path], f"input {path}")
    if isinstance(x, Refusal):
        return x
    folded = fold_batch_normalization(context.form, node) if is_op(node, "BatchNormalization") else None
    if isinstance(folded, Refusal):
        return folded
    if (refusal := clipped.refuse_output(codes_alone=True)) is not None:
        return refusal
    dims = dims_of(x.codes)
    if len(dims) < 2:
        return Refusal(f"its input has rank {len(dims)}; expected [N, C, ..]")
    if folded is not None:
        return _region(x, clipped, *folded)
    array = real_constant(context.form, node.inputs[1 - path])
    channels = dims[1]
    constants = None if array is None or channels is None else per_channel(array, len(dims), 1, channels)
    if constants is None:
        return Refusal("its constant operand is not one number per channel")
    if not np.all(np.isfinite(constants)):
        return Refusal("its constant operand is not finite")
    if is_op(node, "Mul"):
        return _region(x, clipped, constants, np.zeros_like(constants))
    return _region(x, clipped, np.ones_like(constants), constants)


def _region(
    x: Activation, clipped: Clipped, scale: npt.NDArray[np.float32], shift: npt.NDArray[np.float32]
) -> Region | Refusal:
    reals = real_numbers(x)[:, None] * scale + shift
    return clipped.refuse_rounding(reals) or AffineRegion(x, clipped, clipped.nodes, scale, shift)
