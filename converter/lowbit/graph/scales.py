"""Scales that stand in a graph as nodes of their own, back into the quantizers.

Streamlined QONNX graphs (FINN's, and those that ``lowbit export`` writes) carry integers: their quantizers
have the scale 1, and a Mul or Div beside them says what an integer is worth. In the normal form the grids
say that. Every step here is an equation in float32, since multiplying or dividing by 1 rounds nothing:

- ``law(scale 1) = QuantizeLinear(scale 1)`` for a law that rounds half to even without a zero point, behind
  a product too: the multiplier ``f32(f32(sx * sw) / 1)`` is ``f32(sx * sw)``;
- ``law(Round(v), scale 1, z) = QuantizeLinear(v, 1, z)``: integers reach the law, which adds z and clips;
- ``product(x, w) * c = product(x, w of scale c)`` where x and w have the scale 1, and the bias too;
- ``DequantizeLinear(q, 1, z) * c = DequantizeLinear(q, c, z)``;
- ``QuantizeLinear(v / c, 1, z) = QuantizeLinear(v, c, z)``, unless v is a product: product and QuantizeLinear
  together mean one multiplication (see docs/numerics.md), but the graph divides.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_float, get_int
from lowbit.graph.constants import Array, add_initializer, constant
from lowbit.graph.normal_form import (
    CODE_MOVERS,
    Dequantization,
    NormalForm,
    is_op,
    is_quantize,
    rank_of,
    read_quantize,
)
from lowbit.graph.quantization import CODE_TYPES, Grid
from lowbit.graph.quantizers import is_law, read_law
from lowbit.graph.reasons import Refusal

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_LARGEST = np.finfo(np.float32).max / 512
"""Larger scales are refused by every reader of grids."""


def absorb_scales(graph: ir.Graph) -> None:
    """Moves scales into quantizers wherever that is exact."""
    for node in list(graph):
        if is_law(node):
            _absorb_law(graph, node)
    for node in list(graph):
        if is_op(node, "Mul") and not node.outputs[0].is_graph_output():
            _absorb_factor(graph, node)
    for node in list(graph):
        if is_quantize(node):
            _absorb_divisor(graph, node)


# Laws -----------------------------------------------------------------------------------------------------


def _absorb_law(graph: ir.Graph, node: ir.Node) -> None:
    read = read_law(node)
    source, codes = node.inputs[0], node.outputs[0]
    if isinstance(read, Refusal) or source is None or codes.is_graph_output():
        return
    law, grid, allowed = read
    if not law.op_type.startswith("Quantize") or np.any(law.scale != 1):
        return
    producer = source.producer()
    if is_op(producer, "Round"):
        assert producer is not None
        source = producer.inputs[0]
    elif not law.linear:
        return
    assert source is not None
    name, cut = str(codes.name), (allowed.low, allowed.high) != CODE_TYPES[allowed.dtype]
    output = _quantize(graph, node, source, grid, allowed.dtype, f"{name}.whole" if cut else name)
    if cut:
        bounds = [
            add_initializer(graph, f"{name}.{what}", np.asarray(bound, allowed.dtype.numpy()))
            for what, bound in (("low", allowed.low), ("high", allowed.high))
        ]
        output = _emit(graph, node, "Clip", [output, *bounds], {}, codes, name)
    codes.replace_all_uses_with(output)
    graph.remove(node, safe=True)


def _quantize(
    graph: ir.Graph, node: ir.Node, source: ir.Value, grid: Grid, dtype: ir.DataType, name: str
) -> ir.Value:
    """A QuantizeLinear in place of a node."""
    inputs = [
        source,
        add_initializer(graph, f"{name}.scale", grid.scale),
        add_initializer(graph, f"{name}.zero_point", grid.zero_point.astype(dtype.numpy())),
    ]
    attributes = {} if grid.axis is None else {"axis": grid.axis}
    output = ir.val(name, dtype, source.shape)
    graph.insert_before(node, ir.node("QuantizeLinear", inputs, attributes, outputs=[output], name=node.name))
    return output


# Factors --------------------------------------------------------------------------------------------------


def _absorb_factor(graph: ir.Graph, node: ir.Node) -> None:
    form = NormalForm(graph)
    for path in (0, 1):
        source, factor = node.inputs[path], constant(node.inputs[1 - path])
        if source is None or factor is None or factor.dtype != np.float32:
            continue
        if not (np.all(factor > 0) and np.all(factor <= _LARGEST)):
            continue
        replaced = _scaled_codes(graph, form, node, source, factor) or _scaled_product(
            graph, form, node, source, factor
        )
        if replaced is not None:
            node.outputs[0].replace_all_uses_with(replaced)
            graph.remove(node, safe=True)
            return


def _scaled_codes(
    graph: ir.Graph, form: NormalForm, node: ir.Node, source: ir.Value, factor: Array
) -> ir.Value | None:
    """Codes on the grid that the factor gives them."""
    dequantization = form.dequantization(source)
    if not isinstance(dequantization, Dequantization) or np.any(dequantization.grid.scale != 1):
        return None
    grid, rank = dequantization.grid, rank_of(source)
    axis = None
    if factor.size > 1:
        axis = _varying_axis(factor, rank)
        if axis is None or grid.axis not in (None, axis):
            return None
    name = str(node.outputs[0].name)
    return _dequantize(graph, node, dequantization, factor.reshape(-1), axis, f"{name}.scaled")


def _scaled_product(
    graph: ir.Graph, form: NormalForm, node: ir.Node, source: ir.Value, factor: Array
) -> ir.Value | None:
    """A product whose weights have the factor as their scale."""
    added: ir.Node | None = None
    core = source.producer()
    if is_op(core, "Add") and core is not None and form.used_once(source):
        added = core
        if core.inputs[0] is None or constant_codes(form, core.inputs[1]) is None:
            return None
        source = core.inputs[0]
        core = source.producer()
    if (
        core is None
        or not is_op(core, *_PRODUCTS)
        or not form.used_once(source)
        or get_int(core, "transA", 0)
    ):
        return None
    if (get_float(core, "alpha", 1.0), get_float(core, "beta", 1.0)) != (1.0, 1.0):
        return None
    x, w = form.dequantization(core.inputs[0]), constant_codes(form, core.inputs[1])
    if not isinstance(x, Dequantization) or np.any(x.grid.scale != 1) or w is None:
        return None
    owner, place = (added, 1) if added is not None else (core, 2)
    bias = owner.inputs[place] if len(owner.inputs) > place else None
    codes = None if bias is None else constant_codes(form, bias)
    if bias is not None and (codes is None or np.any(codes.grid.zero_point)):
        return None
    rank = rank_of(source)
    channel_axis = 1 if is_op(core, "Conv", "ConvTranspose") else -1
    w_axis = _output_axis(core)
    shape = w.codes.shape
    if rank is None or shape is None or w_axis is None:
        return None
    if factor.size > 1:
        axis = _varying_axis(factor, rank)
        if axis != channel_axis % rank or factor.size != shape[w_axis]:
            return None
        factor = factor.reshape(-1)
    per_channel = w_axis if factor.size > 1 else None
    name = str(core.outputs[0].name)
    core.replace_input_with(1, _dequantize(graph, core, w, factor, per_channel, f"{name}.weights"))
    if codes is not None:
        along = 0 if factor.size > 1 else None
        owner.replace_input_with(place, _dequantize(graph, core, codes, factor, along, f"{name}.bias"))
    return owner.outputs[0]


def constant_codes(form: NormalForm, value: ir.Value | None) -> Dequantization | None:
    """Constant codes on a grid of scale 1."""
    dequantization = form.dequantization(value)
    if not isinstance(dequantization, Dequantization) or constant(dequantization.codes) is None:
        return None
    return None if np.any(dequantization.grid.scale != 1) else dequantization


def _output_axis(core: ir.Node) -> int | None:
    """The axis of a product's weights that runs over its output channels; None where none does."""
    if is_op(core, "Conv"):
        return 0
    if is_op(core, "ConvTranspose"):
        return 1 if get_int(core, "group", 1) == 1 else None
    if is_op(core, "Gemm"):
        return 0 if get_int(core, "transB", 0) else 1
    w = core.inputs[1]
    return 1 if w is not None and rank_of(w) == 2 else None


def _varying_axis(array: Array, rank: int | None) -> int | None:
    """The one axis along which an operand varies, counted from the front of a tensor of a known rank."""
    wide = [i - array.ndim for i, size in enumerate(array.shape) if size != 1]
    return wide[0] + rank if rank is not None and len(wide) == 1 and array.ndim <= rank else None


def _dequantize(
    graph: ir.Graph, node: ir.Node, read: Dequantization, scale: Array, axis: int | None, name: str
) -> ir.Value:
    """The codes of a DequantizeLinear on a grid of another scale, in front of a node."""
    dtype = read.codes.dtype
    assert dtype is not None
    grid = _grid(scale, read.grid, axis)
    inputs = [read.codes, add_initializer(graph, f"{name}.scale", grid.scale)]
    if dtype != ir.DataType.INT32:  # which has no zero point
        inputs.append(add_initializer(graph, f"{name}.zero_point", grid.zero_point.astype(dtype.numpy())))
    attributes = {} if grid.axis is None else {"axis": grid.axis}
    return _emit(graph, node, "DequantizeLinear", inputs, attributes, read.node.outputs[0], name)


def _grid(scale: Array, grid: Grid, axis: int | None) -> Grid:
    """A grid with another scale, which may vary along an axis."""
    axis = grid.axis if axis is None else axis
    if axis is None:
        return Grid(scale.reshape(()), grid.zero_point)
    count = max(scale.size, grid.zero_point.size)
    wide = [np.ascontiguousarray(np.broadcast_to(a.reshape(-1), count)) for a in (scale, grid.zero_point)]
    return Grid(wide[0], wide[1], axis)


# Divisors -------------------------------------------------------------------------------------------------


def _absorb_divisor(graph: ir.Graph, node: ir.Node) -> None:
    read = read_quantize(node)
    source = node.inputs[0]
    division = None if source is None else source.producer()
    if isinstance(read, Refusal) or division is None or not is_op(division, "Div"):
        return
    value, divisor = division.inputs[0], constant(division.inputs[1])
    if value is None or divisor is None or divisor.dtype != np.float32 or np.any(read.grid.scale != 1):
        return
    if not (np.all(divisor > 0) and np.all(divisor <= _LARGEST)) or _is_product(value):
        return
    axis = read.grid.axis
    if divisor.size > 1:
        varying = _varying_axis(divisor, rank_of(value))
        if varying is None or axis not in (None, varying):
            return
        axis = varying
    codes = node.outputs[0]
    if not codes.is_graph_output():
        grid = _grid(divisor, read.grid, axis)
        made = _quantize(graph, node, value, grid, read.range.dtype, str(codes.name))
        codes.replace_all_uses_with(made)
        graph.remove(node, safe=True)


def _is_product(value: ir.Value) -> bool:
    """Whether a QuantizeLinear of this value would be read together with the product, or mean, behind it."""
    node = value.producer()
    while node is not None:
        if is_op(node, *_PRODUCTS, "GlobalAveragePool", "ReduceMean"):
            return True
        passes = is_op(node, "Relu", "Clip", *CODE_MOVERS)
        idle = is_op(node, "Add") and not np.any(_or_one(node.inputs[1]))
        if not passes and not idle:
            return False
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return False


def _or_one(value: ir.Value | None) -> Array:
    array = constant(value)
    return np.ones(()) if array is None else array


def _emit(
    graph: ir.Graph,
    node: ir.Node,
    op_type: str,
    inputs: list[ir.Value],
    attributes: dict[str, int],
    like: ir.Value,
    name: str,
) -> ir.Value:
    output = ir.val(name, like.dtype, like.shape)
    graph.insert_before(node, ir.node(op_type, inputs, attributes, outputs=[output], name=name))
    return output
