"""Applying the rules to a graph: which region has which node, and what the report says about it."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from lowbit.frontends import qoperator
from lowbit.graph.lowering import Lowering, graphs_of
from lowbit.graph.normal_form import NormalForm, is_dequantize, is_op, is_quantizer
from lowbit.graph.reasons import REASON, Refusal
from lowbit.report import NodeReport, Report
from lowbit.rewrites import RULES, quantize
from lowbit.rewrites.rule import Context, Region

_REPORT = "lowbit.report"
_OTHER_FORMS = ("Quant", "BipolarQuant", "IntQuant")


def attach_report(graph: ir.Graph) -> Report:
    """A report with one entry per node; the entry travels with the node through all rewriting."""
    report = Report()
    for node in graph:
        domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
        entry = NodeReport(node.name or f"{node.op_type} of {node.outputs[0].name}", domain + node.op_type)
        node.meta[_REPORT] = entry
        report.nodes.append(entry)
    return report


def apply_rules(graph: ir.Graph, report: Report, *, round_bias: bool, ap: bool) -> Lowering:
    """Finds the regions back to front, then writes them front to back.

    Args:
        graph: a graph in normal form; it is rewritten in place, what became useless is left in it.
        report: gets what became of every node.
        round_bias: see :func:`lowbit.convert`.
        ap: see :func:`lowbit.convert`.
    """
    while True:
        form = NormalForm(graph)
        regions, refusals, needed = _find_regions(Context(form, round_bias, set()))
        covered = {node for region in regions.values() for node in region.nodes}
        reasons = {node: reason for node, reason in refusals.items() if reason != quantize.NO_READER}
        if not qoperator.restore(graph, covered, reasons):
            break

    nodes = list(graph)
    lowering = Lowering(graph, form, report, ap=ap)
    for node in nodes:
        if not any(output in needed for output in node.outputs):
            continue
        lowering.anchor = node
        region = regions.get(node)
        if region is None:
            lowering.keep(node)
        else:
            _report_region(report, region, region.emit(lowering))
        if node in lowering.kept:
            _explain(report, node, refusals.get(node))
    lowering.finish_outputs()
    return lowering


def _find_regions(context: Context) -> tuple[dict[ir.Node, Region], dict[ir.Node, str], set[ir.Value]]:
    """Asks the rules about every node that something needs, back to front.

    Returns:
        The regions by their last node, why nodes are in none, and the values that are needed.
    """
    graph = context.form.graph
    regions: dict[ir.Node, Region] = {}
    refusals: dict[ir.Node, str] = {}
    needed: set[ir.Value] = set(graph.outputs)
    for node in reversed(list(graph)):
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
    return regions, refusals, needed


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
    if is_quantizer(node) and node.inputs[0] is not None:
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


def _explain(report: Report, node: ir.Node, reason: str | None) -> None:
    """Says in the report why a node stays; one that could have become a lowbit node is an island of float."""
    entry = node.meta.get(_REPORT)
    if not isinstance(entry, NodeReport):
        return
    entry.action, entry.into = "kept", None
    island = False
    reason = node.meta.get(REASON) or reason  # a frontend's words are about the cause
    if reason is not None:
        island = reason != quantize.NO_READER
    elif graphs_of(node):
        inner = [n for graph in graphs_of(node) for n in graph.all_nodes()]
        hidden = sum(is_quantizer(n) or is_dequantize(n) for n in inner)
        island = hidden > 0
        reason = f"it holds a subgraph ({len(inner)} nodes, {hidden} of them Q/DQ); those are left alone"
    elif is_quantizer(node) or is_dequantize(node):
        reason = "it stands at the edge of a node that stays"
    elif node.op_type.startswith(_OTHER_FORMS):
        island = True
        reason = "it belongs to another form of quantization than QDQ, which lowbit does not read yet"
    else:
        reason = "lowbit has no integer form of it between the tensors it reads and writes"
    entry.reason = reason
    if island:
        report.islands.append(entry)


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
