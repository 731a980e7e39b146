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
  together mean one multiplication (see docs/numerics.md), but the graph divides;
- ``QuantizeLinear(sum over all pixels * c, 1, z) = QuantizeLinear(mean of codes of scale c, s, z)`` with s
  such that ``f32(s * pixels)`` is 1, by the formula of a mean;
- ``product of scale c -> QuantizeLinear(1, z)`` whose reader has the scale s is ``product of scale a ->
  QuantizeLinear(s, z)`` if an a is found with ``f32(a / s) = c``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_float, get_int, get_ints
from lowbit.graph.constants import Array, add_initializer, constant, integers
from lowbit.graph.normal_form import (
    CODE_MOVERS,
    Dequantization,
    NormalForm,
    Quantization,
    clip_bounds,
    dims_of,
    is_dequantize,
    is_op,
    is_quantize,
    may_return,
    rank_of,
    read_quantize,
)
from lowbit.graph.opsets import quantizer_domain
from lowbit.graph.quantization import CODE_TYPES, Grid
from lowbit.graph.quantizers import is_law, read_law
from lowbit.graph.reasons import Refusal, for_each

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_LARGEST = np.finfo(np.float32).max / 512
"""Larger scales are refused by every reader of grids."""


def absorb_scales(graph: ir.Graph) -> None:
    """Moves scales into quantizers wherever that is exact."""
    steps: tuple[tuple[Callable[[ir.Node], bool], Callable[[ir.Graph, ir.Node], None]], ...] = (
        (is_law, _absorb_law),
        (lambda node: is_op(node, "Mul"), _absorb_factor),
        (is_quantize, _absorb_bounds),
        (is_quantize, _absorb_divisor),
        (is_quantize, _absorb_sum),
        (is_quantize, _match_reader),
    )
    for concerns, step in steps:
        concerned = [node for node in graph if concerns(node)]
        for_each(concerned, functools.partial(step, graph))


# Laws -----------------------------------------------------------------------------------------------------


def _absorb_law(graph: ir.Graph, node: ir.Node) -> None:
    read = read_law(node)
    source, codes = node.inputs[0], node.outputs[0]
    if isinstance(read, Refusal) or source is None:
        return
    law, grid, allowed = read
    if not law.op_type.startswith("Quantize") or np.any(law.scale != 1) or _adds_codes(source):
        return
    producer = source.producer()
    if is_op(producer, "Round"):
        assert producer is not None
        source = producer.inputs[0]
    elif not law.linear:
        return
    assert source is not None
    name, cut = f"{codes.name}.linear", (allowed.low, allowed.high) != CODE_TYPES[allowed.dtype]
    output = _quantize(graph, node, source, grid, allowed.dtype, f"{name}.whole" if cut else name)
    if cut:
        bounds = [
            add_initializer(graph, f"{name}.{what}", np.asarray(bound, allowed.dtype.numpy()))
            for what, bound in (("low", allowed.low), ("high", allowed.high))
        ]
        output = _emit(graph, node, "Clip", [output, *bounds], {}, codes, name)
    _replace(codes, output)
    _remove(graph, node)


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
    domain = quantizer_domain(graph, per_channel=grid.axis is not None)
    graph.insert_before(
        node, ir.node("QuantizeLinear", inputs, attributes, domain=domain, outputs=[output], name=node.name)
    )
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
            _replace(node.outputs[0], replaced)
            _remove(graph, node)
            return


def _scaled_codes(
    graph: ir.Graph, form: NormalForm, node: ir.Node, source: ir.Value, factor: Array
) -> ir.Value | None:
    """Codes on the grid that the factor gives them."""
    dequantization = form.dequantization(source)
    if not isinstance(dequantization, Dequantization) or np.any(dequantization.grid.scale != 1):
        return None
    if not _keeps_shape(source, factor):
        return None
    grid, axis = dequantization.grid, None
    if factor.size > 1:
        axis = _varying_axis(factor, rank_of(source))
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
        if core.inputs[0] is None or _constant_codes(form, core.inputs[1]) is None:
            return None
        source = core.inputs[0]
        core = source.producer()
    if core is None or not is_op(core, *_PRODUCTS) or not form.used_once(source):
        return None
    if get_int(core, "transA", 0) or not _multiplies_plainly(core) or not _keeps_shape(source, factor):
        return None
    if may_return(core) or _meets_scale(node.outputs[0]):  # which would make one multiplication of two
        return None
    x, w = form.dequantization(core.inputs[0]), _constant_codes(form, core.inputs[1])
    if not isinstance(x, Dequantization) or np.any(x.grid.scale != 1) or w is None:
        return None
    if added is not None and len(core.inputs) > 2:
        return None
    owner, place = (added, 1) if added is not None else (core, 2)
    bias = owner.inputs[place] if len(owner.inputs) > place else None
    codes = None if bias is None else _bias_codes(form, bias)
    if bias is not None and (codes is None or np.any(codes.grid.scale != 1)):
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


def _constant_codes(form: NormalForm, value: ir.Value | None) -> Dequantization | None:
    """Constant codes on a grid of scale 1."""
    dequantization = form.dequantization(value)
    if not isinstance(dequantization, Dequantization) or constant(dequantization.codes) is None:
        return None
    return None if np.any(dequantization.grid.scale != 1) else dequantization


def _bias_codes(form: NormalForm, value: ir.Value | None) -> Dequantization | None:
    """A constant vector of codes without a zero point, which may lie on an accumulator's grid."""
    read = form.dequantization(value)
    if not isinstance(read, Dequantization) or constant(read.codes) is None:
        return None
    return None if np.any(read.grid.zero_point) or rank_of(read.codes) != 1 else read


def _multiplies_plainly(core: ir.Node) -> bool:
    """Whether a product has no factors of its own (a Gemm's alpha and beta)."""
    return all(get_float(core, name, 1.0) == 1 for name in ("alpha", "beta"))


def _keeps_shape(value: ir.Value, operand: Array) -> bool:
    """Whether a constant operand broadcasts to a tensor without widening it, as parameters of a grid do."""
    rank = rank_of(value)
    if rank is None or operand.ndim > rank:
        return operand.ndim == 0
    dims = dims_of(value)[rank - operand.ndim :]
    return all(size in (1, dim) for size, dim in zip(operand.shape, dims, strict=True))


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
    if dtype != ir.DataType.INT32 or np.any(grid.zero_point):  # an int32 mostly has none
        inputs.append(add_initializer(graph, f"{name}.zero_point", grid.zero_point.astype(dtype.numpy())))
    attributes = {} if grid.axis is None else {"axis": grid.axis}
    domain = quantizer_domain(graph, per_channel=grid.axis is not None)
    return _emit(graph, node, "DequantizeLinear", inputs, attributes, read.node.outputs[0], name, domain)


def _grid(scale: Array, grid: Grid, axis: int | None) -> Grid:
    """A grid with another scale, which may vary along an axis."""
    axis = grid.axis if axis is None else axis
    if axis is None:
        return Grid(scale.reshape(()), grid.zero_point)
    count = max(scale.size, grid.zero_point.size)
    wide = [np.ascontiguousarray(np.broadcast_to(a.reshape(-1), count)) for a in (scale, grid.zero_point)]
    return Grid(wide[0], wide[1], axis)


# Divisors -------------------------------------------------------------------------------------------------


def _absorb_bounds(graph: ir.Graph, node: ir.Node) -> None:
    """A Clip between whole numbers in front of a rounding, as a Clip on its codes: rounding is monotone."""
    read = read_quantize(node)
    clip = None if node.inputs[0] is None else node.inputs[0].producer()
    if isinstance(read, Refusal) or clip is None or not is_op(clip, "Clip", "Relu"):
        return
    bounds, source = clip_bounds(clip), clip.inputs[0]
    if bounds is None or source is None or np.any(read.grid.scale != 1) or not read.grid.per_tensor:
        return
    if not is_op(source.producer(), "Div") or not (bounds[0] <= bounds[1]):
        return
    if any(np.isfinite(bound) and bound != round(bound) for bound in bounds):
        return
    zero_point = int(read.grid.zero_point)
    low = int(max(bounds[0] + zero_point, read.range.low))
    high = int(min(bounds[1] + zero_point, read.range.high))
    # A quantizer has one Clip on its codes at most.
    codes_now = node.outputs[0]
    readers = list(codes_now.consumers())
    narrowed = clip_bounds(readers[0]) if len(readers) == 1 and is_op(readers[0], "Clip") else None
    if narrowed is not None and not codes_now.is_graph_output():
        low, high = int(max(low, narrowed[0])), int(min(high, narrowed[1]))
        codes_now = readers[0].outputs[0]
    if low > high:
        return
    name = f"{codes_now.name}.bounded"
    codes = _quantize(graph, node, source, read.grid, read.range.dtype, f"{name}.whole")
    limits = [
        add_initializer(graph, f"{name}.{what}", np.asarray(bound, read.range.dtype.numpy()))
        for what, bound in (("low", low), ("high", high))
    ]
    _replace(codes_now, _emit(graph, node, "Clip", [codes, *limits], {}, codes_now, name))
    _remove(graph, node if codes_now is node.outputs[0] else readers[0])


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
    if not _keeps_shape(value, divisor):
        return
    axis = read.grid.axis
    if divisor.size > 1:
        varying = _varying_axis(divisor, rank_of(value))
        if varying is None or axis not in (None, varying):
            return
        axis = varying
    made = _quantize(
        graph,
        node,
        value,
        _grid(divisor, read.grid, axis),
        read.range.dtype,
        f"{node.outputs[0].name}.scaled",
    )
    _replace(node.outputs[0], made)
    _remove(graph, node)


def _is_product(value: ir.Value) -> bool:
    """Whether a QuantizeLinear of this value would be read together with the product, or mean, behind it.

    Bounds, moves, and the addition of a bias on the accumulator's grid may stand between them.
    """
    node = value.producer()
    while node is not None:
        if is_op(node, *_PRODUCTS, "GlobalAveragePool", "ReduceMean"):
            return True
        if is_op(node, "Add"):
            path = _unless_real(node)
        else:
            path = 0 if is_op(node, "Relu", "Clip", *CODE_MOVERS) else None
        source = None if path is None else node.inputs[path]
        node = None if source is None else source.producer()
    return False


def _adds_codes(value: ir.Value) -> bool:
    """Whether constant codes of another scale than 1 are added on the way to a value.

    A QuantizeLinear of it would be read together with the product behind it, and the sum as one of integers,
    where a law means a float32 addition.
    """
    node = value.producer()
    while node is not None:
        path = 0 if is_op(node, "Relu", "Clip", "Round", *CODE_MOVERS) else None
        if is_op(node, "Add"):
            path = _unless_real(node)
            other = None if path is None else node.inputs[1 - path]
            maker = None if other is None else other.producer()
            scale = constant(maker.inputs[1]) if maker is not None and is_dequantize(maker) else None
            if scale is not None and np.any(scale != 1):
                return True
        source = None if path is None else node.inputs[path]
        node = None if source is None else source.producer()
    return False


def _unless_real(node: ir.Node) -> int | None:
    """The path of an Add whose other operand is zero, or constant codes; None if it adds real numbers."""
    for path in (0, 1):
        other = node.inputs[1 - path]
        array = constant(other)
        if array is not None:
            return None if np.any(array) else path
        maker = None if other is None else other.producer()
        if maker is not None and is_dequantize(maker) and constant(maker.inputs[0]) is not None:
            return path
    return None


def _meets_scale(value: ir.Value) -> bool:
    """Whether a QuantizeLinear of another scale than 1 reads a value, bounded or moved perhaps.

    Or an addition of zeros or of constant codes does, which would be read as part of the product.
    """
    waiting = [value]
    while waiting:
        for node in waiting.pop().consumers():
            if is_quantize(node):
                scale = constant(node.inputs[1])
                if scale is None or np.any(scale != 1):
                    return True
            elif is_op(node, "Add") and _unless_real(node) is not None:
                return True
            elif is_op(node, "Relu", "Clip", *CODE_MOVERS):
                waiting.extend(node.outputs)
    return False


# Means ----------------------------------------------------------------------------------------------------


def _absorb_sum(graph: ir.Graph, node: ir.Node) -> None:
    """A sum of all pixels times a constant, as the mean that lowbit has an op for."""
    form = NormalForm(graph)
    read = form.quantization(node.outputs[0])
    source = node.inputs[0]
    if not isinstance(read, Quantization) or source is None or np.any(read.grid.scale != 1):
        return
    producer, factor = source.producer(), np.ones((), np.float32)
    if is_op(producer, "Mul") and producer is not None and form.used_once(source):
        given = constant(producer.inputs[1])
        if given is None or given.dtype != np.float32 or given.size != 1 or not 0 < given <= _LARGEST:
            return
        if producer.inputs[0] is None or not _keeps_shape(producer.inputs[0], given):
            return
        factor, source = given.reshape(()), producer.inputs[0]
        producer = None if source is None else source.producer()
    if source is None or producer is None or not is_op(producer, "ReduceSum") or not form.used_once(source):
        return
    x = form.dequantization(producer.inputs[0])
    axes = integers(producer.inputs[1]) if len(producer.inputs) > 1 else get_ints(producer, "axes")
    if not isinstance(x, Dequantization) or np.any(x.grid.scale != 1) or not x.grid.per_tensor or not axes:
        return
    rank = len(axes) + 2
    if rank_of(x.codes) != rank or sorted(axis % rank for axis in axes) != list(range(2, rank)):
        return
    sizes = [size for size in dims_of(x.codes)[2:] if size is not None]
    pixels = np.float32(np.prod(sizes))
    scale = _solve(np.float32(1), np.float32(1) / pixels, lambda s: s * pixels)
    if len(sizes) != len(axes) or scale is None or not read.grid.per_tensor:
        return
    name = str(source.name)
    inputs = [_dequantize(graph, node, x, factor, None, f"{name}.image")]
    attributes: dict[str, Any] = {"keepdims": get_int(producer, "keepdims", 1)}
    if graph.opset_imports.get("", 13) >= 18:
        inputs.append(add_initializer(graph, f"{name}.axes", np.array(axes, np.int64)))
    else:
        attributes["axes"] = list(axes)
    mean = _emit(graph, node, "ReduceMean", inputs, attributes, source, f"{name}.mean")
    grid = Grid(scale, read.grid.zero_point)
    made = _quantize(graph, node, mean, grid, read.range.dtype, f"{node.outputs[0].name}.scaled")
    _replace(node.outputs[0], made)
    _remove(graph, node)


# Readers --------------------------------------------------------------------------------------------------


def _match_reader(graph: ir.Graph, node: ir.Node) -> None:
    """Gives codes of scale 1 the scale that all their readers use, where that changes no multiplier.

    A residual region is only recognized where the inner quantizer and its reader have one grid.
    """
    form = NormalForm(graph)
    read = read_quantize(node)
    if isinstance(read, Refusal) or read.divides or np.any(read.grid.scale != 1) or not read.grid.per_tensor:
        return
    scale = _readers_scale(form, node.outputs[0])
    source = node.inputs[0]
    while source is not None and form.used_once(source):
        core = source.producer()
        if core is None or not is_op(core, "Relu"):
            break
        source = core.inputs[0]
    core = None if source is None or not form.used_once(source) else source.producer()
    if scale is None or core is None or not is_op(core, *_PRODUCTS) or not _multiplies_plainly(core):
        return
    if may_return(core):
        return
    x, w = form.dequantization(core.inputs[0]), form.dequantization(core.inputs[1])
    if not isinstance(x, Dequantization) or not isinstance(w, Dequantization) or np.any(x.grid.scale != 1):
        return
    if constant(w.codes) is None:
        return
    given = core.inputs[2] if len(core.inputs) > 2 else None
    bias = _bias_codes(form, given)
    if given is not None and (bias is None or not np.array_equal(bias.grid.scale, w.grid.scale)):
        return
    with np.errstate(all="ignore"):
        found = _solve(w.grid.scale, w.grid.scale * scale, lambda a: a / scale)
    if found is None or not np.all((found > 0) & (found <= _LARGEST)):
        return
    name = str(core.outputs[0].name)
    core.replace_input_with(1, _dequantize(graph, core, w, found, w.grid.axis, f"{name}.read.weights"))
    if bias is not None:
        along = 0 if found.size > 1 else None
        core.replace_input_with(2, _dequantize(graph, core, bias, found, along, f"{name}.read.bias"))
    assert node.inputs[0] is not None
    grid = Grid(scale, read.grid.zero_point)
    made = _quantize(graph, node, node.inputs[0], grid, read.range.dtype, f"{node.outputs[0].name}.read")
    _replace(node.outputs[0], made)
    _remove(graph, node)


def _readers_scale(form: NormalForm, codes: ir.Value) -> Array | None:
    """The one scale, other than 1, on which all readers of codes read them."""
    readers = list(codes.consumers())
    if len(readers) == 1 and is_op(readers[0], "Clip"):
        codes = readers[0].outputs[0]
        readers = list(codes.consumers())
    if codes.is_graph_output():
        return None
    grids = []
    for reader in readers:
        read = form.dequantization(reader.outputs[0])
        if not isinstance(read, Dequantization) or not read.grid.per_tensor:
            return None
        grids.append(read.grid)
    if not grids or grids[0].scale == 1 or not all(grid.equals(grids[0]) for grid in grids):
        return None
    return grids[0].scale


def _solve(
    wanted: Array | np.generic, guess: Array | np.generic, function: Callable[[Any], Any]
) -> Array | None:
    """The arguments near a guess for which a float32 function gives exactly the wanted numbers."""
    wanted, guess = np.asarray(wanted, np.float32), np.asarray(guess, np.float32)
    found = np.full(wanted.shape, np.nan, np.float32)
    tried = np.nextafter(np.nextafter(guess, np.float32(0)), np.float32(0))
    for _ in range(5):
        found = np.where(np.isnan(found) & (function(tried) == wanted), tried, found)
        tried = np.nextafter(tried, np.float32(np.inf))
    return None if np.any(np.isnan(found)) else found


# Editing ------------------------------------------------------------------------------------------------


def _replace(old: ir.Value, new: ir.Value) -> None:
    """Lets readers of a value, and the caller of the model, read another one under its name."""
    if old.is_graph_output():
        new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    name, old.name = old.name, f"{old.name}.replaced"
    new.name = name


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Removes a node, and those in front of it that nobody else reads."""
    before = [value.producer() for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    for producer in before:
        if producer is None or producer.graph is not graph:
            continue
        if not any(output.uses() or output.is_graph_output() for output in producer.outputs):
            _remove(graph, producer)


def _emit(
    graph: ir.Graph,
    node: ir.Node,
    op_type: str,
    inputs: list[ir.Value],
    attributes: dict[str, Any],
    like: ir.Value,
    name: str,
    domain: str = "",
) -> ir.Value:
    output = ir.val(name, like.dtype, like.shape)
    graph.insert_before(
        node, ir.node(op_type, inputs, attributes, domain=domain, outputs=[output], name=name)
    )
    return output
