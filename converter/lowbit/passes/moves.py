"""Moving QuantizeLinear and DequantizeLinear across ops that only move values.

Exporters put pairs around, before or behind a Reshape, a Slice, a MaxPool, or leave them out. Where
rounding and moving commute, which they do element by element, one form says it all: the op works on codes,
with DequantizeLinear behind and QuantizeLinear in front of it. Rules then need to know that form only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_float, get_int, get_ints, get_string
from lowbit.graph.constants import add_initializer, constant, scalar
from lowbit.graph.normal_form import (
    CODE_CHOOSERS,
    CODE_MOVERS,
    ROUNDED,
    Dequantization,
    NormalForm,
    Quantization,
    clip_bounds,
    dims_of,
    is_dequantize,
    is_op,
    is_quantize,
    is_quantizer,
    rank_of,
)
from lowbit.graph.opsets import has_code_kernel
from lowbit.graph.quantization import (
    CODE_TYPES,
    CodeRange,
    Grid,
    dequantize_array,
    quantize_scalar,
    survives_half,
)
from lowbit.graph.quantizers import Law, is_law
from lowbit.graph.reasons import REASON, Refusal, for_each, has_to_stay
from lowbit.graph.reductions import read_reduction
from lowbit.graph.windows import read_max_pool, read_resize, read_space_to_depth

_READERS = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool"),
    *("ReduceMean", "MaxPool", "Resize", "Softmax"),
    *("LayerNormalization", "GroupNormalization", "InstanceNormalization"),
)
"""Ops that have a region on codes, so that their input is worth being codes."""


_ROUNDED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul")
"""Ops whose region rounds behind Relu and Clip as well as it would in front of them."""

_Ranges = dict[ir.Value, CodeRange | None]


def move_onto_codes(graph: ir.Graph) -> None:
    """Turns ``op(DQ(q))`` into ``DQ(op(q))``, ``Q(op(x))`` into ``op(Q(x))`` and ``Q(DQ(q))`` into ``q``."""
    ranges: _Ranges = {}  # of all nodes: a long row of them would be walked again for each

    def down(node: ir.Node) -> None:
        if is_op(node, *CODE_MOVERS):
            _sink_dequantize(graph, node, ranges)
        elif is_op(node, "Concat"):
            _sink_dequantize_below_concat(graph, node, ranges)
        elif is_op(node, "Relu", "Clip"):
            _close_clip(graph, node, ranges)
        elif is_quantizer(node) and not _drop_pair(graph, node, ranges):
            _drop_clipped_pair(graph, node)

    def up(node: ir.Node) -> None:
        quantizer: ir.Node | None = node if is_quantizer(node) else None
        while quantizer is not None:
            quantizer = raise_quantize(graph, quantizer)

    for_each(graph, down)
    for_each(reversed(graph), up)


def _sink_dequantize(graph: ir.Graph, node: ir.Node, ranges: _Ranges) -> None:
    form = NormalForm(graph, ranges)
    read = form.dequantization(node.inputs[0], half=True)
    if not isinstance(read, Dequantization) or read.codes.dtype not in CODE_TYPES:
        return
    if read.half and _pads_with_value(node):
        return
    if has_to_stay(read.node):
        return
    code_range = form.code_range(read.codes)
    if code_range is None or not moves_exactly(node, code_range.dtype):
        return
    if read.codes.shape is None and node.inputs[0] is not None:
        read.codes.shape = node.inputs[0].shape  # which the model may declare of the real numbers alone
    if not may_hold(graph, node, code_range.dtype):
        return
    grid = _moved_grid(node, read.grid)
    if grid is None or _gains_nothing(node):
        return
    inputs: list[ir.Value | None] = [read.codes, *parameters(node)]
    if _pads_with_value(node):
        code = _pad_code(node, read.grid, code_range, exact=not _rounded_to(form, node.outputs[0], read.grid))
        if code is None:
            return
        inputs = _with_pad_code(graph, node, inputs, code, code_range.dtype)
    assert code_range is not None
    moved = on_codes(graph, node, inputs, code_range.dtype)
    for old, new in zip(node.outputs, moved.outputs, strict=True):
        _dequantize_behind(graph, moved, read.node, new, old, grid)
    graph.remove(node, safe=True)


def _sink_dequantize_below_concat(graph: ir.Graph, node: ir.Node, ranges: _Ranges) -> None:
    """A Concat of tensors on one grid whose result no quantizer rounds joins codes."""
    form = NormalForm(graph, ranges)
    reads = [form.dequantization(value, half=True) for value in node.inputs]
    first = reads[0]
    if not isinstance(first, Dequantization) or not first.grid.per_tensor:
        return
    if not first.half and any(is_quantize(user) for user in node.outputs[0].consumers()):
        return
    dtype = first.codes.dtype
    for read in reads:
        if (
            not isinstance(read, Dequantization)
            or not read.grid.equals(first.grid)
            or read.half != first.half
            or read.codes.dtype != dtype
        ):
            return
        if constant(read.codes) is None and form.code_range(read.codes) is None:
            return
    assert dtype is not None
    if rank_of(node.outputs[0]) is None and not has_code_kernel(graph, node, dtype):
        return
    inputs: list[ir.Value | None] = [read.codes for read in reads if isinstance(read, Dequantization)]
    moved = on_codes(graph, node, inputs, dtype)
    _dequantize_behind(graph, moved, first.node, moved.outputs[0], node.outputs[0], first.grid)
    graph.remove(node, safe=True)


def _drop_pair(graph: ir.Graph, node: ir.Node, ranges: _Ranges) -> bool:
    """Removes a quantizer of a DequantizeLinear with the same grid: its codes are the codes before.

    ``rint(f32(f32(q - z) * s) / s)`` is q - z exactly: the two roundings move a quotient of at most 255 by
    less than 2^-13. Where real numbers are float16, or QONNX rounds them, every code is tried.
    """
    form = NormalForm(graph, ranges)
    quantization = form.quantization(node.outputs[0], half=True)
    read = form.dequantization(node.inputs[0], half=True)
    if not isinstance(quantization, Quantization) or not isinstance(read, Dequantization):
        return False
    code_range = form.code_range(read.codes)
    codes, output = read.codes, node.outputs[0]
    if (
        code_range is None
        or code_range.dtype != quantization.range.dtype
        or not read.grid.equals(quantization.grid)
        or read.half != quantization.half
        or output.is_graph_output()
        or (read.half and not survives_half(read.grid, code_range))
        or (quantization.law is not None and not _survives_law(quantization.law, read.grid, code_range))
    ):
        return False
    clips = [user for user in output.consumers() if is_op(user, "Clip")]
    if any(clip.graph is not graph for clip in clips):
        return False
    for clip in clips:
        clipped = form.quantization(clip.outputs[0], half=True)
        if not isinstance(clipped, Quantization):
            return False
        if clipped.range.low > code_range.low or clipped.range.high < code_range.high:
            return False  # the Clip narrows the codes, which takes a node
        if clip.outputs[0].is_graph_output():
            return False
        clip.outputs[0].replace_all_uses_with(codes)
        graph.remove(clip, safe=True)
    output.replace_all_uses_with(codes)
    if not codes.is_graph_input() and "lowbit.made" in codes.meta and not codes.meta.get("lowbit.named"):
        # Codes that moving made take the name that the model has for them.
        name, output.name = output.name, f"{output.name}.dropped"
        codes.name = name
        codes.meta["lowbit.named"] = True
    graph.remove(node, safe=True)
    return True


def _drop_clipped_pair(graph: ir.Graph, node: ir.Node) -> None:
    """Removes the pair in front of Relu or Clip where these end in a quantizer of the pair's grid.

    ``rq(clip(dq(rq(v)))) = clip(rq(v))`` with the bounds' own codes, as ``rq`` is monotone and ``rq(dq(q))``
    is q (see :func:`_drop_pair`), and that is ``rq(clip(v))`` for every number v.
    """
    form = NormalForm(graph)
    quantization = form.quantization(node.outputs[0])
    value, clip = node.inputs[0], None
    while value is not None and form.used_once(value) and is_op(value.producer(), "Relu", "Clip"):
        clip = value.producer()
        assert clip is not None
        if clip_bounds(clip) is None:
            return
        value = clip.inputs[0]
    if clip is None or value is None or not form.used_once(value):
        return
    read = form.dequantization(value)
    if not isinstance(quantization, Quantization) or not isinstance(read, Dequantization):
        return
    first = form.quantization(read.codes)
    if (
        not isinstance(first, Quantization)
        or first.nodes != (read.codes.producer(),)
        or first.law is not None
        or quantization.law is not None
        or first.range.dtype != quantization.range.dtype
        or not first.grid.equals(quantization.grid)
        or not read.grid.equals(quantization.grid)
        or not form.used_once(read.codes)
        or not form.used_once(first.source)
        or not is_op(first.source.producer(), *_ROUNDED)
        or any(has_to_stay(each) for each in (*first.nodes, read.node))
    ):
        return
    clip.replace_input_with(0, first.source)


def _survives_law(law: Law, grid: Grid, codes: CodeRange) -> bool:
    """Whether every code is itself again after DequantizeLinear and a quantizer of QONNX."""
    given = np.arange(codes.low, codes.high + 1)
    return grid.per_tensor and law.uniform and np.array_equal(law.codes(dequantize_array(given, grid)), given)


def _close_clip(graph: ir.Graph, node: ir.Node, ranges: _Ranges) -> None:
    """Puts a pair behind a Relu or Clip of dequantized codes whose result a region reads as it is.

    ``max(DQ(q), 0)`` is ``DQ(max(q, z))``: where every bound is the real number of a code, rounding the
    result to the grid that it came from changes nothing.
    """
    form = NormalForm(graph, ranges)
    read = form.dequantization(node.inputs[0])
    output, bounds = node.outputs[0], clip_bounds(node)
    if not isinstance(read, Dequantization) or not read.grid.per_tensor or bounds is None:
        return
    code_range = form.code_range(read.codes)
    if code_range is None or not any(is_op(user, *_READERS) for user in output.consumers()):
        return
    ends = dequantize_array(np.array([code_range.low, code_range.high]), read.grid)
    for bound in bounds:
        code = quantize_scalar(bound, read.grid, code_range.low, code_range.high)
        inside = ends[0] <= bound <= ends[1]
        if inside and dequantize_array(np.array(code), read.grid) != np.float32(bound):
            return
    if bounds[0] > ends[1] or bounds[1] < ends[0]:
        return  # all results are one bound, which no code stands for
    codes = ir.val(f"{output.name}.codes", code_range.dtype, output.shape)
    codes.meta["lowbit.made"] = True
    pair = [
        ir.Node(read.node.domain, "QuantizeLinear", [output, *read.node.inputs[1:]], outputs=[codes]),
        ir.Node(
            read.node.domain,
            "DequantizeLinear",
            [codes, *read.node.inputs[1:]],
            outputs=[ir.val(f"{output.name}.real", ir.DataType.FLOAT, output.shape)],
        ),
    ]
    if len(read.node.inputs) < 3 and code_range.dtype != ir.DataType.UINT8:
        return  # without a zero point QuantizeLinear would give uint8
    users = [(user, index) for user, index in output.uses() if is_op(user, *_READERS)]
    graph.insert_after(node, pair)
    for user, index in users:
        user.replace_input_with(index, pair[1].outputs[0])


def _rounded_to(form: NormalForm, value: ir.Value, grid: Grid) -> bool:
    """Whether only quantizers of one grid read a float value."""
    quantizations = [form.quantization(user.outputs[0]) for user in value.consumers() if is_quantize(user)]
    return (
        len(quantizations) == len(value.uses()) > 0
        and not value.is_graph_output()
        and all(isinstance(q, Quantization) and q.grid.equals(grid) for q in quantizations)
    )


def raise_quantize(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """Rewrites ``Q(op(x))`` to ``op(Q(x))`` where nobody else reads op(x).

    What stands between the two and works on every element alike, and a Clip on the codes behind Q, go along.
    An op that compares elements, such as MaxPool, commutes with everything that rises.

    Returns:
        The quantizer at its new place; None if it stays.
    """
    form = NormalForm(graph)
    codes = node.outputs[0]
    users = codes.consumers()
    rounding = [node]
    if len(users) == 1 and is_op(users[0], "Clip") and not codes.is_graph_output():
        if users[0].graph is not graph:
            return None
        rounding.append(users[0])
        codes = users[0].outputs[0]
    quantization = form.quantization(codes, half=True)
    if not isinstance(quantization, Quantization) or not quantization.grid.per_tensor:
        return None
    if quantization.law is not None and not quantization.law.uniform:
        return None
    moved, between = _below_uniform(form, quantization.source)
    op = None if moved is None else moved.producer()
    if op is None or op.graph is not graph or len(op.outputs) != 1 or not is_op(op, *CODE_MOVERS):
        return None
    if any(map(has_to_stay, (op, *between, *rounding))):
        return None
    source = op.inputs[0]
    if source is None or constant(source) is not None or is_dequantize(source.producer()):
        return None
    if not form.used_once(source) or (between and _pads_with_value(op)):
        return None
    if not moves_exactly(op, quantization.range.dtype) or not may_hold(graph, op, quantization.range.dtype):
        return None
    if _gains_nothing(op):
        return None
    if is_op(op, *CODE_CHOOSERS) and not all(map(_rises, between)):
        return None
    if between and rank_of(op.outputs[0]) != rank_of(quantization.source):
        return None  # a constant gives the result more dims
    if _pads_with_value(op) and (quantization.range.bipolar or quantization.half):
        return None

    code_range = quantization.range
    value = source
    for step in (*between, *rounding):
        dtype = source.dtype or ir.DataType.FLOAT if step in between else code_range.dtype
        output = ir.val(f"{step.outputs[0].name}.raised", dtype, source.shape)
        output.meta["lowbit.made"] = True
        path = _path(step)
        raised = ir.Node(
            step.domain,
            step.op_type,
            [value if i == path else _rank_free(graph, given, step) for i, given in enumerate(step.inputs)],
            step.attributes,
            outputs=[output],
            name=step.name,
        )
        raised.meta.update(step.meta)
        graph.insert_before(op, raised)
        value = output
    if not between:
        remember_rounded(value, source, quantization)
    inputs = [value, *parameters(op)]
    if _pads_with_value(op):
        code = _pad_code(op, quantization.grid, code_range, exact=False)
        assert code is not None
        code = min(max(code, code_range.low), code_range.high)
        inputs = _with_pad_code(graph, op, inputs, code, code_range.dtype)
    new = on_codes(graph, op, inputs, code_range.dtype).outputs[0]
    name, codes.name = codes.name, f"{codes.name}.replaced"
    codes.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name = name
    take_place(new, codes)
    for old in (*reversed(rounding), *reversed(between), op):
        graph.remove(old, safe=True)
    return next(user for user in _behind(source, len(between)).consumers() if is_quantizer(user))


def remember_rounded(codes: ir.Value, real: ir.Value, quantization: Quantization) -> None:
    """Says of codes that a pass made which numbers of the model they are, if that has these numbers."""
    if "lowbit.made" not in real.meta and quantization.law is None and not quantization.half:
        codes.meta[ROUNDED] = (real.name, quantization)


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Says of codes that a pass made what is known of those whose name they took."""
    new.meta["lowbit.named"] = "lowbit.made" not in old.meta or old.meta.get("lowbit.named", False)
    if ROUNDED in old.meta:
        new.meta[ROUNDED] = old.meta[ROUNDED]


def _below_uniform(form: NormalForm, value: ir.Value) -> tuple[ir.Value | None, list[ir.Node]]:
    """The value under a run of nodes that treat all elements alike and have one reader, and the run."""
    between: list[ir.Node] = []
    while form.used_once(value):
        node = value.producer()
        if node is None or not _is_uniform(node):
            return value, between
        below = node.inputs[_path(node)]
        assert below is not None
        between.insert(0, node)
        value = below
    return None, between


def _is_uniform(node: ir.Node) -> bool:
    """Whether a node computes each element from one element, by the same function everywhere."""
    if is_op(node, "Relu", "LeakyRelu", "HardSigmoid", "Neg"):
        return True
    if is_op(node, "Clip"):
        return clip_bounds(node) is not None
    if is_op(node, "Add", "Sub", "Mul", "Div"):
        return any(scalar(value) is not None for value in node.inputs)
    return False


def _path(node: ir.Node) -> int:
    """The input of a uniform node, or of a quantizer, that is no parameter."""
    return 1 if is_op(node, "Add", "Sub", "Mul", "Div") and scalar(node.inputs[0]) is not None else 0


def _rises(node: ir.Node) -> bool:
    """Whether the result of a uniform node never falls where its input rises."""
    if is_op(node, "Relu", "Clip"):
        return True
    if is_op(node, "LeakyRelu"):
        return get_float(node, "alpha", 0.01) >= 0
    if is_op(node, "HardSigmoid"):
        return get_float(node, "alpha", 0.2) >= 0
    path = _path(node)
    given = None if is_op(node, "Neg") else scalar(node.inputs[1 - path])
    if given is None or is_op(node, "Neg"):
        return False
    if is_op(node, "Mul") or (is_op(node, "Div") and path == 0):
        return given > 0
    return is_op(node, "Add") or (is_op(node, "Sub") and path == 0)


def _rank_free(graph: ir.Graph, value: ir.Value | None, node: ir.Node) -> ir.Value | None:
    """A node's constant without dims of size 1, so that it broadcasts against tensors of every rank.

    The thresholds of a quantizer that counts them keep the one dim that runs over them.
    """
    array = constant(value)
    dims = int(is_law(node) and node.op_type == "Count" and value is node.inputs[-1])
    if value is None or array is None or array.ndim == dims or (array.size != 1 and not dims):
        return value
    return add_initializer(graph, f"{value.name}.flat", array.reshape((-1,) * dims))


def _behind(value: ir.Value, count: int) -> ir.Value:
    """The value that a number of nodes in a row make of a value."""
    for _ in range(count):
        value = value.consumers()[0].outputs[0]
    return value


def moves_exactly(node: ir.Node, dtype: ir.DataType) -> bool:
    """Whether an op of :data:`CODE_MOVERS` moves codes as it moves real numbers, and runs on codes of a type.

    An op may stay on codes where no lowbit node reads them, so that ONNX Runtime must have a kernel for them.
    """
    if is_op(node, "SpaceToDepth", "Gather", "Tile", "Expand", "ReduceMax", "ReduceMin"):
        if dtype not in (ir.DataType.UINT8, ir.DataType.INT8):
            return False
        if is_op(node, "SpaceToDepth"):
            return not isinstance(read_space_to_depth(node), Refusal)
        return not is_op(node, *CODE_CHOOSERS) or not isinstance(read_reduction(node), Refusal)
    if is_op(node, "MaxPool"):
        return not isinstance(read_max_pool(node), Refusal)
    if is_op(node, "Resize"):
        return get_string(node, "mode", "nearest") == "nearest" and not isinstance(read_resize(node), Refusal)
    if is_op(node, "DepthToSpace"):
        return node.inputs[0] is not None and rank_of(node.inputs[0]) == 4
    if is_op(node, "Pad"):
        # Before opset 11 the pads are attributes; those models keep their Pad on real numbers.
        return "pads" not in node.attributes and (not _pads_with_value(node) or _pad_real(node) is not None)
    return True


def may_hold(graph: ir.Graph, node: ir.Node, dtype: ir.DataType) -> bool:
    """Whether an op of :data:`CODE_MOVERS` may work on codes of a type.

    Where ONNX Runtime has no such kernel a region has to take the op. None is refused whose ranks are known,
    whose tensors have elements and whose parameters are constants.
    """
    if has_code_kernel(graph, node, dtype):
        return True
    moved = [value.shape for value in (node.inputs[0], *node.outputs) if value is not None]
    return not any(shape is None or 0 in shape for shape in moved) and all(
        constant(value) is not None for value in node.inputs[1:] if value is not None
    )


_FEW_CHANNELS = 16
"""Below it a SpaceToDepth alone is faster on real numbers. Ratios to stock on codes, one core of an AMD EPYC:
1.3 to 1.6 for 3 channels, 0.8 for 16, 0.55 for 32."""


def _gains_nothing(node: ir.Node) -> bool:
    """Whether an op that ONNX Runtime lacks on codes stands alone, and is faster on real numbers; says so."""
    source = node.inputs[0]
    if not is_op(node, "SpaceToDepth") or source is None or source.shape is None:
        return False
    channels = dims_of(source)[1]
    if channels is None or channels >= _FEW_CHANNELS or not _stands_alone(node):
        return False
    node.meta[REASON] = (
        f"it stands alone between the edges of the graph: real numbers of {channels} channels move "
        "faster than codes, which change their layout twice"
    )
    return True


def _stands_alone(node: ir.Node) -> bool:
    """Whether nothing but quantizers is found between a node and the edges of the graph."""
    source = node.inputs[0]
    while source is not None and (maker := source.producer()) is not None:
        if not (is_quantizer(maker) or is_dequantize(maker)):
            return False
        source = maker.inputs[0]
    waiting = list(node.outputs)
    while waiting:
        readers = waiting.pop().consumers()
        if not all(is_quantizer(reader) or is_dequantize(reader) for reader in readers):
            return False
        waiting.extend(output for reader in readers for output in reader.outputs)
    return True


def _moved_grid(node: ir.Node, grid: Grid) -> Grid | None:
    """The grid behind an op; None if its channels cannot be followed."""
    if grid.axis is None:
        return grid
    if is_op(node, "Transpose"):
        rank = None if node.inputs[0] is None else rank_of(node.inputs[0])
        perm = get_ints(node, "perm") or (None if rank is None else list(range(rank))[::-1])
        return None if perm is None or grid.axis not in perm else grid.with_axis(perm.index(grid.axis))
    if is_op(node, "Gather"):
        return _gathered_grid(node, grid, grid.axis)
    return grid if is_op(node, "MaxPool", "Resize") and grid.axis == 1 else None


def _gathered_grid(node: ir.Node, grid: Grid, channels: int) -> Grid | None:
    """The grid behind a Gather from a tensor whose axis ``channels`` has one scale per entry."""
    data, indices = node.inputs[0], node.inputs[1]
    if data is None or data.shape is None or indices is None or indices.shape is None:
        return None
    axis = from_front(get_int(node, "axis", 0), len(data.shape))
    if axis is None or axis == channels:
        return None
    return grid if channels < axis else grid.with_axis(channels + len(indices.shape) - 1)


def on_codes(graph: ir.Graph, node: ir.Node, inputs: list[ir.Value | None], dtype: ir.DataType) -> ir.Node:
    """A copy of an op that works on codes, in front of the op."""
    outputs = [ir.val(f"{output.name}.codes", dtype, output.shape) for output in node.outputs]
    for output in outputs:
        output.meta["lowbit.made"] = True
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        node.attributes,
        outputs=outputs,
        name=node.name,
        version=node.version,
    )
    copy.meta.update(node.meta)
    graph.insert_before(node, copy)
    return copy


def _dequantize_behind(
    graph: ir.Graph, moved: ir.Node, pattern: ir.Node, codes: ir.Value, real: ir.Value, grid: Grid
) -> None:
    """A DequantizeLinear like ``pattern`` that takes the place of a float value."""
    output = ir.val(f"{real.name}.real", pattern.outputs[0].dtype or ir.DataType.FLOAT, real.shape)
    attributes = dict(pattern.attributes)
    if grid.axis is not None:
        attributes["axis"] = ir.AttrInt64("axis", grid.axis)
    node = ir.Node(
        pattern.domain,
        "DequantizeLinear",
        [codes, *pattern.inputs[1:]],
        attributes,
        outputs=[output],
        name=f"{real.name}.DequantizeLinear",
    )
    graph.insert_after(moved, node)
    name, real.name = real.name, f"{real.name}.moved"
    if real.type is not None:
        output.type = real.type
    real.replace_all_uses_with(output, replace_graph_outputs=True)
    output.name = name


def parameters(node: ir.Node) -> list[ir.Value | None]:
    """The inputs of an op that say how it moves; a real number that a Pad of another mode ignores is none."""
    given = list(node.inputs[1:])
    if is_op(node, "Pad") and not _pads_with_value(node) and len(given) > 1:
        given[1] = None
    return given


def _pads_with_value(node: ir.Node) -> bool:
    return is_op(node, "Pad") and get_string(node, "mode", "constant") == "constant"


def _pad_real(node: ir.Node) -> float | None:
    given = node.inputs[2] if len(node.inputs) > 2 else None
    return 0.0 if given is None else scalar(given)


def _pad_code(node: ir.Node, grid: Grid, code_range: CodeRange, *, exact: bool) -> int | None:
    """The code of a Pad's value; None if ``exact`` and the value lies between two codes."""
    value = _pad_real(node)
    if value is None or not grid.per_tensor:
        return None
    full = CodeRange.of(code_range.dtype)
    code = quantize_scalar(value, grid, full.low, full.high)
    if exact and dequantize_array(np.array(code), grid) != np.float32(value):
        return None
    return code


def _with_pad_code(
    graph: ir.Graph, node: ir.Node, inputs: list[ir.Value | None], code: int, dtype: ir.DataType
) -> list[ir.Value | None]:
    signed = CODE_TYPES[dtype][0] < 0
    value = add_initializer(
        graph, f"{node.outputs[0].name}.pad", np.array(code, np.int8 if signed else np.uint8)
    )
    return [*inputs[:2], value, *inputs[3:]]
