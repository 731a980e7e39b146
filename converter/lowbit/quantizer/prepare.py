"""Clean-up of the float model, pass by pass, so that a quantizer stands where one rounding is enough.

Every pass is checked: the model must compute what it computed before, within :data:`TOLERANCE`, on the first
calibration feed. One that does not is undone, and the report says so.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    IdentityEliminationPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedOpsetsPass,
)

from lowbit.errors import LowBitError, ModelError
from lowbit.frontends.load import Source, drop_overridable_initializers
from lowbit.graph.attributes import get_float, get_int
from lowbit.graph.constants import Array, add_initializer, constant, is_known
from lowbit.graph.evaluate import run_unoptimized
from lowbit.graph.normal_form import (
    NormalForm,
    dims_of,
    is_dequantize,
    is_identity,
    is_op,
    is_quantizer,
    rank_of,
)
from lowbit.graph.opsets import NORMAL_FORM_OPSET, raise_opset
from lowbit.graph.reasons import Refusal
from lowbit.graph.shapes import infer_shapes
from lowbit.graph.subgraphs import graphs_of, remove_unused_nodes
from lowbit.passes.fold import fold_constants
from lowbit.quantizer.data import Spool
from lowbit.quantizer.report import StepRecord
from lowbit.quantizer.runner import open_float
from lowbit.rewrites.batch_normalization import fold_batch_normalization
from lowbit.rewrites.operands import per_channel
from lowbit.schemas import DOMAIN

TOLERANCE = 1e-5
"""Largest difference of an output, relative to its largest value, that a pass may make."""

_Pass = Callable[[ir.Model, str], tuple[ir.Model, int]]
"""Takes a model and its name in errors; gives the changed model and how many nodes it changed."""

_MOST_FOLDED = 1 << 24
"""Elements of a folded constant beyond which a graph that computes it is smaller than its value."""

_RANDOM = (
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)


def refuse_quantized(source: Source) -> None:
    """Refuses a model that is quantized already, or that lowbit made.

    Raises:
        LowBitError: names the first node that says so, and what to do.
    """
    for node in source.model.graph.all_nodes():
        spoken = node.op_type.startswith(("QLinear", "ConvInteger", "MatMulInteger", "DynamicQuantize"))
        foreign = node.op_type in ("Quant", "IntQuant", "BipolarQuant", "Trunc", "QGemm")
        if node.domain == DOMAIN:
            raise LowBitError(
                f"{node.op_type} '{node.name}': this model was made by lowbit; quantize the "
                "float model instead"
            )
        if is_quantizer(node) or is_dequantize(node) or spoken or foreign:
            raise LowBitError(
                f"{node.op_type} '{node.name}': this model is quantized already; `lowbit convert` makes a "
                "lowbit model of it, `lowbit quantize` starts from the float model"
            )
    floats = [v for v in source.model.graph.inputs if v.dtype == ir.DataType.FLOAT16]
    half = [
        value
        for value in source.model.graph.initializers.values()
        if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    ]
    if floats or half:
        raise LowBitError(
            f"'{(floats or half)[0].name}' is {(floats or half)[0].dtype}: expected a float32 model; "
            "export it with float32"
        )


def prepare(
    source: Source, spool: Spool, threads: int | None, opset: tuple[int, int] = (NORMAL_FORM_OPSET, 7)
) -> tuple[ir.Model, list[StepRecord]]:
    """Runs all passes.

    Args:
        source: the float model; its graph is used up.
        spool: the calibration data.
        threads: of the sessions that check.
        opset: the opset and IR version that the result needs.

    Returns:
        The model with shapes, every node with a name of its own, and what each pass did.

    Raises:
        ModelError: if the model cannot be brought to that opset, or ONNX Runtime does not run it.
    """
    model = source.model
    label = str(source.path or "the given model")
    feed = spool.feed(0)
    proto = ir.to_proto(model)
    before = _outputs(proto, feed, threads)
    steps = []
    passes: list[tuple[str, _Pass]] = [("opset", functools.partial(_opset, to=opset)), *_PASSES]
    for name, function in passes:
        start = time.perf_counter()
        changed = ir.from_proto(proto)
        try:
            changed, changes = function(changed, label)
            after_proto = _written(changed) if changes else proto
            error = _difference(before, _outputs(after_proto, feed, threads)) if changes else None
            note = "" if error is None or error <= TOLERANCE else f"outputs differ by {error:.2g}; undone"
        except ModelError as raised:
            if name == "opset":
                raise
            changes, error, note = 0, None, f"undone: {raised}"
        kept = not note
        if kept and changes:
            proto = after_proto
        seconds = time.perf_counter() - start
        steps.append(StepRecord(name, changes, error, kept, note, seconds))
    model = ir.from_proto(proto)
    _name_nodes(model.graph)
    infer_shapes(model, anew=True)
    return model, steps


def _written(model: ir.Model) -> onnx.ModelProto:
    remove_unused_nodes(model)
    RemoveUnusedOpsetsPass()(model)
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]  # the passes do not keep it up to date
    return proto


def _outputs(model: onnx.ModelProto, feed: dict[str, Array], threads: int | None) -> dict[str, Array]:
    session = open_float(model, threads, optimize=False)
    names = [value.name for value in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, feed), strict=True))
    except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
        raise ModelError(f"ONNX Runtime cannot run the model: {str(error).splitlines()[0]}") from error


def _difference(before: dict[str, Array], after: dict[str, Array]) -> float:
    worst = 0.0
    for name, array in before.items():
        other = after[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            return float("inf")
        if array.dtype.kind != "f":
            worst = max(worst, float(np.any(array != other)))
            continue
        finite = np.isfinite(array)
        if not np.array_equal(finite, np.isfinite(other)):
            return float("inf")
        if np.any(finite):
            largest = float(np.abs(array[finite]).max())
            change = float(np.abs(array[finite].astype(np.float64) - other[finite]).max())
            worst = max(worst, change / largest if largest else change)
    return worst


def _name_nodes(graph: ir.Graph) -> None:
    """Gives every node a name of its own: reports, overrides and exclusions speak of nodes by name."""
    taken: set[str] = set()
    for node in graph:
        name = node.name or f"{node.op_type}_{node.outputs[0].name}"
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}.{count}"
        node.name = unique
        taken.add(unique)


# Passes ---------------------------------------------------------------------------------------------------


def _opset(model: ir.Model, label: str, to: tuple[int, int]) -> tuple[ir.Model, int]:
    changes = drop_overridable_initializers(model.graph)
    older = model.graph.opset_imports.get("", NORMAL_FORM_OPSET) < to[0]
    return raise_opset(model, label, *to), changes + int(older or (model.ir_version or 0) < to[1])


def _constants(model: ir.Model, _: str) -> tuple[ir.Model, int]:
    """Constant nodes become initializers, and so does all that follows from constants alone."""
    InlinePass()(model)
    graph = model.graph
    before = len(graph)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fold_constants(graph)
    infer_shapes(model, anew=True)
    known: set[ir.Value] = set(graph.initializers.values())
    folded: list[ir.Node] = []
    for node in list(graph):
        inputs = [value for value in node.inputs if value is not None]
        if node.domain not in ("", "ai.onnx") or graphs_of(node) or node.op_type in _RANDOM:
            continue
        shape_of = node.op_type == "Shape" and _is_static(inputs[0])
        if shape_of or (inputs and all(value in known for value in inputs)):
            folded.append(node)
            known.update(node.outputs)
    if folded:
        _fold(model, folded)
    return model, before - len(graph)


def _is_static(value: ir.Value) -> bool:
    return value.shape is not None and all(isinstance(dim, int) for dim in value.shape)


def _fold(model: ir.Model, nodes: list[ir.Node]) -> None:
    graph, inside = model.graph, set(nodes)
    for node in nodes:
        if node.op_type == "Shape" and not is_known(node.inputs[0]):
            assert node.inputs[0] is not None
            assert node.inputs[0].shape is not None
            start = get_int(node, "start", 0)
            end = node.attributes["end"].as_int() if "end" in node.attributes else None
            sizes = np.array(dims_of(node.inputs[0])[start:end], np.int64)
            _replace_by(graph, node.outputs[0], sizes)
    nodes = [node for node in nodes if node.graph is graph and any(out.uses() for out in node.outputs)]
    wanted = [
        out
        for node in nodes
        for out in node.outputs
        if any(user not in inside for user in out.consumers()) or out.is_graph_output()
    ]
    if not wanted:
        return
    inputs = dict.fromkeys(v for node in nodes for v in node.inputs if v is not None and v.const_value)
    tensors = []
    for value in inputs:
        assert value.const_value is not None
        tensor = ir.to_proto(value.const_value)
        tensor.name = str(value.name)
        tensors.append(tensor)
    body = onnx.helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "constants",
        [],
        [onnx.helper.make_empty_tensor_value_info(str(out.name)) for out in wanted],
        tensors,
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in graph.opset_imports.items()]
    results = run_unoptimized(onnx.helper.make_model(body, opset_imports=opsets, ir_version=10), {})
    if isinstance(results, Refusal):
        raise ModelError(results.reason)
    for out, array in zip(wanted, results, strict=True):
        if array.size <= _MOST_FOLDED and not out.is_graph_output():
            _replace_by(graph, out, array)


def _replace_by(graph: ir.Graph, value: ir.Value, array: Array) -> None:
    made = add_initializer(graph, f"{value.name}.constant", array)
    value.replace_all_uses_with(made, replace_graph_outputs=False)
    node = value.producer()
    if node is not None and not any(out.uses() or out.is_graph_output() for out in node.outputs):
        graph.remove(node, safe=True)


def _identities(model: ir.Model, _: str) -> tuple[ir.Model, int]:
    graph = model.graph
    before = len(graph)
    for node in list(graph):
        if not is_op(node, "Dropout") or not is_identity(node):
            continue
        node_is_output = node.outputs[0].is_graph_output()
        identity = ir.node("Identity", [node.inputs[0]], name=f"{node.name}.identity")
        graph.insert_before(node, identity)
        _take_over(node.outputs[0], identity.outputs[0], output=node_is_output)
        graph.remove(node, safe=True)
    IdentityEliminationPass()(model)
    return model, before - len(graph)


def _take_over(old: ir.Value, new: ir.Value, *, output: bool) -> None:
    """Lets a new value stand for an old one, under its name."""
    new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=output)
    name, old.name = old.name, f"{old.name}.replaced"
    new.name = name


_WEIGHTED = ("Conv", "ConvTranspose", "Gemm")


def _fold_affine(model: ir.Model, _: str) -> tuple[ir.Model, int]:
    """BatchNormalization, Mul, Div, Add and Sub by constants per channel behind a weighted layer.

    ``(W x + b) * scale + shift = (scale W) x + (scale b + shift)``, one row of W per output channel.
    """
    graph, changes = model.graph, 0
    for node in list(graph):
        layer = _layer_in_front(node)
        if layer is None:
            continue
        core, path = layer
        channels = _channels(core)
        affine = None if channels is None else _affine(graph, node, path, core, channels)
        if affine is not None and _absorb(graph, core, *affine):
            core_out, out = core.outputs[0], node.outputs[0]
            name, core_out.name = out.name, f"{core_out.name}.raw"
            is_output = out.is_graph_output()
            out.name = f"{out.name}.replaced"
            core_out.name = name
            core_out.type, core_out.shape = out.type or core_out.type, out.shape or core_out.shape
            out.replace_all_uses_with(core_out, replace_graph_outputs=is_output)
            graph.remove(node, safe=True)
            changes += 1
    return model, changes


def _layer_in_front(node: ir.Node) -> tuple[ir.Node, int] | None:
    """The weighted layer whose result a node alone reads, and by which of its inputs."""
    if not is_op(node, "BatchNormalization", "Mul", "Div", "Add", "Sub"):
        return None
    for path in (0, 1) if is_op(node, "Mul", "Add") else (0,):
        value = node.inputs[path]
        core = None if value is None else value.producer()
        if value is None or core is None or not is_op(core, *_WEIGHTED) or len(value.uses()) != 1:
            continue
        if not value.is_graph_output() and constant(core.inputs[1]) is not None:
            return core, path
    return None


def _channels(core: ir.Node) -> int | None:
    w = constant(core.inputs[1])
    if w is None or w.dtype != np.float32 or core.inputs[0] is None:
        return None
    if is_op(core, "Conv"):
        return int(w.shape[0])
    if is_op(core, "ConvTranspose"):
        return int(w.shape[1] * get_int(core, "group", 1))
    return int(w.shape[0 if get_int(core, "transB", 0) else 1])


def _affine(
    graph: ir.Graph, node: ir.Node, path: int, core: ir.Node, channels: int
) -> tuple[Array, Array] | None:
    """A node as ``y * scale + shift``, both [channels]."""
    if is_op(node, "BatchNormalization"):
        if get_int(node, "training_mode", 0) or len(node.outputs) > 1:
            return None
        folded = fold_batch_normalization(NormalForm(graph), node, channels)
        return None if isinstance(folded, Refusal) else folded
    other = constant(node.inputs[1 - path])
    if other is None or other.dtype != np.float32:
        return None
    if is_op(core, "Conv", "ConvTranspose"):
        weights = constant(core.inputs[1])
        assert weights is not None
        rank = weights.ndim
        values = per_channel(other, rank, 1, channels)
    else:
        values = per_channel(other, 2, 1, channels)
    if values is None:
        return None
    one, zero = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    if is_op(node, "Mul"):
        return values, zero
    if is_op(node, "Div"):
        return (1 / values, zero) if np.all(values != 0) else None
    return one, -values if is_op(node, "Sub") else values


def _absorb(graph: ir.Graph, core: ir.Node, scale: Array, shift: Array) -> bool:
    """Multiplies a layer's weights by a scale per output channel and adds a shift to its bias."""
    if not (np.all(np.isfinite(scale)) and np.all(np.isfinite(shift))):
        return False
    w = constant(core.inputs[1])
    assert w is not None
    bias_now = constant(core.inputs[2]) if len(core.inputs) > 2 and core.inputs[2] is not None else None
    if len(core.inputs) > 2 and core.inputs[2] is not None and bias_now is None:
        return False
    if is_op(core, "Gemm"):
        beta, alpha = get_float(core, "beta", 1.0), get_float(core, "alpha", 1.0)
        if alpha != 1 or beta != 1:
            return False
    if bias_now is not None:
        spread = per_channel(bias_now, max(1, bias_now.ndim), max(0, bias_now.ndim - 1), scale.size)
        if spread is None:
            return False
        shift = spread * scale + shift
    if np.any(scale != 1):
        if is_op(core, "Conv"):
            w = w * scale.reshape([-1] + [1] * (w.ndim - 1))
        elif is_op(core, "ConvTranspose"):
            groups = get_int(core, "group", 1)
            by_group = w.reshape([groups, -1, *w.shape[1:]])
            w = (by_group * scale.reshape([groups, 1, -1] + [1] * (w.ndim - 2))).reshape(w.shape)
        else:
            w = w * (scale[:, None] if get_int(core, "transB", 0) else scale)
        _set(graph, core, 1, w)
    _set(graph, core, 2, shift)
    return True


def _set(graph: ir.Graph, node: ir.Node, index: int, array: Array) -> None:
    """Gives a node a constant of its own."""
    value = add_initializer(
        graph, f"{node.name}.{'weight' if index == 1 else 'bias'}", array.astype(np.float32)
    )
    while len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _gemm(model: ir.Model, _: str) -> tuple[ir.Model, int]:
    """MatMul of a matrix and constant weights becomes Gemm, which has a place for a bias."""
    infer_shapes(model, anew=True)
    graph, changes = model.graph, 0
    for node in list(graph):
        weights = constant(node.inputs[1]) if is_op(node, "MatMul") else None
        if (
            weights is not None
            and weights.ndim == 2
            and node.inputs[0] is not None
            and rank_of(node.inputs[0]) == 2
        ):
            gemm = ir.node("Gemm", [node.inputs[0], node.inputs[1]], name=node.name)
            graph.insert_before(node, gemm)
            output = node.outputs[0].is_graph_output()
            _take_over(node.outputs[0], gemm.outputs[0], output=output)
            graph.remove(node, safe=True)
            changes += 1
    return model, changes


_PASSES: tuple[tuple[str, _Pass], ...] = (
    ("constants", _constants),
    ("identities", _identities),
    ("gemm", _gemm),
    ("fold affine", _fold_affine),
)
