"""Conversion: a quantized ONNX model in, a lowbit model out, no number changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass, TopologicalSortPass

from lowbit.atomic import check_writable, write_atomically
from lowbit.errors import ModelError, UnsupportedError
from lowbit.frontends import qdq
from lowbit.graph.load import Source, load_model
from lowbit.graph.lowering import Lowering, graphs_of
from lowbit.graph.normal_form import NormalForm, is_dequantize, is_op, is_quantize
from lowbit.graph.reasons import Refusal
from lowbit.report import NodeReport, Report
from lowbit.rewrites import RULES
from lowbit.rewrites.rule import Context, Region

_REPORT = "lowbit.report"


@dataclass(frozen=True)
class Result:
    """What :func:`convert` returns.

    Attributes:
        model: the converted model.
        report: what became of every node.
        output: the file it was written to, if any.
    """

    model: onnx.ModelProto
    report: Report
    output: Path | None = None


def convert(
    model: str | Path | onnx.ModelProto,
    output: str | Path | None = None,
    *,
    strict: bool = False,
    round_bias: bool = False,
    ap: bool = False,
    overwrite: bool = False,
    verify: bool = True,
) -> Result:
    """Converts a quantized ONNX model into one whose quantized regions are lowbit nodes.

    What cannot be computed exactly stays as it was and is listed in the report with its reason. The input is
    never modified; names, order, types and symbolic dims of the model's inputs and outputs stay.

    Args:
        model: a file or a proto in the QDQ or QCDQ form.
        output: where to write the result; it appears there only after it was verified.
        strict: raise if a node that computes on quantized tensors stays in float.
        round_bias: round a bias that is off the accumulator's grid onto it. Faster, but changes numbers; the
            report says by how much.
        ap: write APConv / APGemm, with 1-bit weights of value +-1 stored as such.
        overwrite: replace ``output`` if it exists.
        verify: check, load and run the result against the definitions of its ops.

    Returns:
        The model and the report.

    Raises:
        ModelError: if the input cannot be read or the result does not verify.
        UnsupportedError: if ``strict`` finds a node left in float.
        OutputError: if the output cannot be written.
    """
    target = None if output is None else Path(output)
    if target is not None:
        inputs = () if isinstance(model, onnx.ModelProto) else (Path(model),)
        check_writable(target, overwrite=overwrite, inputs=inputs)
    source = load_model(model)
    overridable = _drop_overridable_initializers(source.model.graph)
    interface = _interface(source.model.graph)
    names = {value.name for node in source.model.graph for value in (*node.inputs, *node.outputs) if value}
    report = _attach_report(source.model.graph)
    if overridable:
        report.warn(
            f"{overridable} initializers were graph inputs too; their values were taken as constants and can "
            "no longer be fed"
        )
    qdq.normalize(source.model)
    lowering = _rewrite(source.model, report, round_bias=round_bias, ap=ap)
    _clean(source.model)
    _restore_interface(source.model.graph, interface)
    options = {"strict": strict, "round_bias": round_bias, "ap": ap}
    _write_metadata(source, lowering, options, names)
    proto = _serialize(source.model)
    if strict:
        _refuse_float_islands(report)
    if verify:
        from lowbit.graph.check import check_converted

        check_converted(proto)
    if target is not None:
        write_atomically(target, lambda path: _save(proto, path), overwrite=overwrite)
    return Result(proto, report, target)


def _drop_overridable_initializers(graph: ir.Graph) -> int:
    """Takes initializers off the list of inputs; returns how many there were.

    Files before IR version 4 had to list them, and some exporters still do, though nobody feeds a scale.
    """
    overridable = [value for value in graph.inputs if value.is_initializer()]
    for value in overridable:
        graph.inputs.remove(value)
    return len(overridable)


def _interface(graph: ir.Graph) -> list[tuple[ir.TypeProtocol | None, ir.Shape | None]]:
    """Types and shapes of inputs and outputs as the model states them, before inference adds to them."""
    return [(v.type, None if v.shape is None else v.shape.copy()) for v in (*graph.inputs, *graph.outputs)]


def _restore_interface(
    graph: ir.Graph, interface: list[tuple[ir.TypeProtocol | None, ir.Shape | None]]
) -> None:
    for value, (dtype, shape) in zip((*graph.inputs, *graph.outputs), interface, strict=True):
        value.type, value.shape = dtype, shape


def _attach_report(graph: ir.Graph) -> Report:
    """A report with one entry per node; the entry travels with the node through all rewriting."""
    report = Report()
    for node in graph:
        domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
        entry = NodeReport(node.name or f"{node.op_type} of {node.outputs[0].name}", domain + node.op_type)
        node.meta[_REPORT] = entry
        report.nodes.append(entry)
    return report


def _rewrite(model: ir.Model, report: Report, *, round_bias: bool, ap: bool) -> Lowering:
    """Finds the regions back to front, then writes them front to back."""
    graph = model.graph
    form = NormalForm(graph)
    context = Context(form, round_bias, set())
    regions: dict[ir.Node, Region] = {}
    refusals: dict[ir.Node, str] = {}
    needed: set[ir.Value] = set(graph.outputs)
    nodes = list(graph)
    for node in reversed(nodes):
        if not any(output in needed for output in node.outputs):
            continue
        found = _ask(context, node)
        if isinstance(found, Region):
            regions[node] = found
            needed.update(found.codes)
            needed.update(found.reals)
            if not found.passive:
                context.wanted.update(found.codes)
        else:
            _collect_reasons(node, found, refusals)
            needed.update(_inputs_of(node))

    lowering = Lowering(graph, form, report, ap=ap)
    for node in nodes:
        if not any(output in needed for output in node.outputs):
            continue
        lowering.anchor = node
        region = regions.get(node)
        if region is None:
            lowering.keep(node)
            _explain(node, refusals.get(node))
            continue
        value = region.emit(lowering)
        _report_region(report, region, value)
    lowering.finish_outputs()
    return lowering


def _ask(context: Context, node: ir.Node) -> Region | list[Refusal]:
    """The first rule that has a region ending in a node; else the reasons why there is none."""
    refusals = []
    for rule in RULES:
        found = rule(context, node)
        if isinstance(found, Region):
            unknown = [v.name for v in (*found.codes, *found.reals, *node.outputs) if v.shape is None]
            if not unknown:
                return found
            found = Refusal(f"the rank of '{unknown[0]}' is unknown")
        if found is not None:
            refusals.append(found)
    return refusals


def _collect_reasons(node: ir.Node, found: list[Refusal], reasons: dict[ir.Node, str]) -> None:
    """Remembers why a node stays.

    A rule that looked from a quantizer at what computes its input speaks about that; the quantizer's own
    reason is the last one, that of its own rule.
    """
    if not found:
        return
    if is_quantize(node) and node.inputs[0] is not None:
        maker = node.inputs[0].producer()
        if len(found) > 1 and maker is not None and not is_op(maker, "Relu", "Clip"):
            reasons[maker] = found[0].reason
        reasons[node] = found[-1].reason
    else:
        reasons.setdefault(node, found[0].reason)


def _inputs_of(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, what its subgraphs capture included."""
    yield from (value for value in node.inputs if value is not None)
    for graph in graphs_of(node):
        for inner in graph.all_nodes():
            yield from (value for value in inner.inputs if value is not None)
        yield from graph.outputs


def _explain(node: ir.Node, reason: str | None) -> None:
    entry = node.meta.get(_REPORT)
    if isinstance(entry, NodeReport):
        entry.action = "kept"
        entry.reason = reason or _default_reason(node)


def _default_reason(node: ir.Node) -> str:
    if graphs_of(node):
        inner = [n for graph in graphs_of(node) for n in graph.all_nodes()]
        hidden = sum(is_quantize(n) or is_dequantize(n) for n in inner)
        return f"it holds a subgraph ({len(inner)} nodes, {hidden} of them Q/DQ); those are left alone"
    if is_quantize(node) or is_dequantize(node):
        return "it stands at the edge of a node that stays"
    return "lowbit has no integer form of it between the tensors it reads and writes"


def _report_region(report: Report, region: Region, value: ir.Value | None) -> None:
    producer = None if value is None else value.producer()
    into = None if producer is None else producer.name
    for node in region.nodes:
        entry = node.meta.get(_REPORT)
        if isinstance(entry, NodeReport):
            entry.action = "converted" if node is region.core and value is not None else "absorbed"
            entry.into = into
            if entry.action == "converted" and producer is not None:
                entry.details = {
                    name: attribute.value
                    for name, attribute in producer.attributes.items()
                    if name in ("x_bits", "w_bits", "y_bits", "epilogue", "tail")
                }
    for note in region.notes:
        report.warn(f"{region.core.name}: {note}")


def _clean(model: ir.Model) -> None:
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    TopologicalSortPass()(model)


def _write_metadata(
    source: Source, lowering: Lowering, options: dict[str, Any], original: set[str | None]
) -> None:
    """Where the model comes from, in metadata_props, for ``verify``, ``inspect`` and the curious."""
    from lowbit import __version__

    if not lowering.origins and "lowbit.provenance" in source.model.metadata_props:
        return  # a lowbit model in which nothing was left to do
    present = {value.name for node in source.model.graph for value in node.outputs}
    provenance = {
        "version": 1,
        "source": {"file": source.path.name if source.path else None, "sha256": source.sha256},
        "values": {
            name: entry
            for name, entry in lowering.provenance.items()
            if name in present and entry["source"] in original
        },
        "nodes": lowering.origins,
    }
    properties = source.model.metadata_props
    properties["lowbit.version"] = str(__version__)
    properties["lowbit.source_sha256"] = source.sha256
    properties["lowbit.options"] = json.dumps(options)
    properties["lowbit.provenance"] = json.dumps(provenance, separators=(",", ":"))


def _serialize(model: ir.Model) -> onnx.ModelProto:
    try:
        proto = ir.to_proto(model)
    except ir.serde.SerdeError as error:
        cause = error.__cause__ or error
        raise ModelError(f"the model contradicts itself, it cannot be written: {cause}") from error
    # Initializers say their own types and shapes.
    told = {tensor.name for tensor in proto.graph.initializer}
    left = [info for info in proto.graph.value_info if info.name not in told]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(left)
    return proto


def _refuse_float_islands(report: Report) -> None:
    left = [node for node in report.kept if node.reason]
    if left:
        lines = "; ".join(f"{node.op_type} '{node.name}': {node.reason}" for node in left[:10])
        more = f" and {len(left) - 10} more" if len(left) > 10 else ""
        raise UnsupportedError(f"strict: {len(left)} nodes cannot be converted exactly: {lines}{more}")


def _save(proto: onnx.ModelProto, path: Path) -> None:
    try:
        data = proto.SerializeToString()
    except ValueError as error:
        raise ModelError(f"the converted model is too large for one file: {error}") from error
    path.write_bytes(data)
