"""Gemm or MatMul with constant weights [-> Add, Relu, Clip ...] [-> QuantizeLinear] becomes LowBitGemm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_float, get_int
from lowbit.graph.normal_form import dims_of, is_op
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, Stored, identity
from lowbit.rewrites.epilogue import same_shape
from lowbit.rewrites.matmul import Candidate, Product, ProductRegion, finish, first_region
from lowbit.rewrites.operands import read_activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.weights import Weights, read_weights


@dataclass
class GemmRegion(ProductRegion):
    """A matrix product with its epilogue."""

    in_features: int
    rank: int

    op_types = ("LowBitGemm", "APGemm")

    @property
    def output_order(self) -> Order:
        """As in the model."""
        return identity(self.rank)

    def read_x(self, lowering: Lowering) -> tuple[Stored, Weights, dict[str, Any]]:
        """The activation; a Flatten before the product is absorbed into the order of the weights' columns."""
        weights = self.product.weights
        geometry = {"in_features": self.in_features, "out_features": weights.rows}
        x = lowering.codes(self.product.x.codes)
        columns = None if x.flattened is None else _flattened_columns(x)
        if columns is None or columns.size != self.in_features:
            x = lowering.codes_in(self.product.x.codes, identity(self.rank), bipolar=True)
            return x, weights, geometry
        return x, weights.permuted(columns), geometry | {"axis": x.flattened}


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    return first_region(context, sink, ("Gemm", "MatMul"), _match)


def _match(context: Context, candidate: Candidate) -> Region | Refusal:
    node = candidate.chain.core
    x = read_activation(context.form, node.inputs[0], "input 0")
    if isinstance(x, Refusal):
        return x
    codes_grid = read_weights(context.form, node.inputs[1], rank=2)
    if isinstance(codes_grid, Refusal):
        return codes_grid
    codes, grid = codes_grid
    bias, alpha, beta, transposed = None, 1.0, 1.0, False
    if is_op(node, "Gemm"):
        if get_int(node, "transA", 0):
            return Refusal("transA=1: its activation is transposed")
        alpha, beta = get_float(node, "alpha", 1.0), get_float(node, "beta", 1.0)
        transposed = bool(get_int(node, "transB", 0))
        bias = node.inputs[2] if len(node.inputs) > 2 else None
    out_axis = 0 if transposed else 1
    if grid.axis not in (None, out_axis):
        return Refusal(
            f"its weights have one scale per entry of axis {grid.axis}; expected per output ({out_axis})"
        )
    rows = codes if transposed else codes.T
    weights = Weights(np.ascontiguousarray(rows), grid.scale, grid.zero_point)

    x_scale = x.grid.scale if alpha == 1.0 else (np.float32(alpha) * x.grid.scale).reshape(())
    if not x_scale > 0:
        return Refusal(f"its alpha is {alpha}; expected a positive one")
    dims = dims_of(x.codes)
    if dims and dims[-1] not in (None, rows.shape[1]):
        return Refusal(f"its input has {dims[-1]} features, its weights expect {rows.shape[1]}")
    if not dims:
        return Refusal("its input is a scalar")
    product = Product(x, x_scale, weights, bias, beta)
    rank = len(dims)
    if candidate.residual is not None and not same_shape(node.outputs[0], candidate.residual):
        return Refusal("the other operand of the Add behind it has another shape")
    epilogue = finish(context, candidate, product, rank=rank, channel_axis=rank - 1)
    if isinstance(epilogue, Refusal):
        return epilogue
    return GemmRegion(
        product, epilogue, candidate.chain, candidate.result, candidate.nodes, rows.shape[1], rank
    )


def _flattened_columns(x: Stored) -> np.ndarray[Any, np.dtype[np.intp]] | None:
    """Where the elements of a stored row stand in the model's flattened row; None if a dim is dynamic.

    The model flattens (C, H, W); stored are (H, W, C). Column j of the weights belongs to the model's element
    j, so the weights for the stored row are those columns in the stored order.
    """
    assert x.flattened is not None
    start, dims = x.flattened, x.flattened_dims()
    if dims is None:
        return None
    in_model = np.arange(math.prod(dims)).reshape(dims)
    return in_model.transpose([axis - start for axis in x.order[start:]]).reshape(-1)
