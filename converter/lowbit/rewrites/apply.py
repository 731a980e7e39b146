"""Applying the rules to a graph: which region has which node, and what the report says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from lowbit.errors import LowBitError, raise_if_out_of_memory
from lowbit.frontends import qoperator
from lowbit.frontends.dialects import is_quantized_op
from lowbit.graph.normal_form import NormalForm, is_dequantize, is_op, is_quantizer
from lowbit.graph.reasons import REASON, STAYS, Refusal, has_to_stay, working_on
from lowbit.graph.subgraphs import graphs_of, inputs_of
from lowbit.graph.units import find_units
from lowbit.lowering.lowering import Lowering
from lowbit.proto.report import NodeReport, Report
from lowbit.rewrites import RULES, quantize
from lowbit.rewrites.guard import GAINS_NOTHING, worthless_regions
from lowbit.rewrites.rule import Context, Region
from lowbit.schemas import DOMAIN

_REPORT = "lowbit.report"
POSITION = "lowbit.position"
"""Key of a node's ``meta`` for the place that it, or what became of it, had in the model."""
_OTHER_FORMS = ("Quant", "BipolarQuant", "IntQuant")


def attach_report(graph: ir.Graph, staying: Mapping[int, str]) -> Report:
    """A report with one entry per node; the entry travels with the node through all rewriting.

    Args:
        graph: the model.
        staying: the positions of the nodes that no step may touch, and why.
    """
    report = Report()
    report.quantized = any(is_quantized_op(node.domain, node.op_type) for node in graph.all_nodes())
    report.lowbit = any(node.domain == DOMAIN for node in graph.all_nodes())
    for position, node in enumerate(graph):
        domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
        entry = NodeReport(node.name or f"{node.op_type} of {node.outputs[0].name}", domain + node.op_type)
        node.meta[_REPORT] = entry
        node.meta[POSITION] = position
        if position in staying:
            node.meta[STAYS] = staying[position]
        report.nodes.append(entry)
    return report


Failed = Callable[[ir.Node, Exception], None]
"""Is told that a rule failed when it was asked about a node; raises where that ends the conversion."""


def apply_rules(
    graph: ir.Graph,
    report: Report,
    failed: Failed,
    *,
    round_bias: bool,
    ap: bool,
    all_regions: bool = False,
) -> Lowering:
    """Finds the regions back to front, then writes them front to back.

    Args:
        graph: a graph in normal form; it is rewritten in place, what became useless is left in it.
        report: gets what became of every node.
        failed: hears of rules that fail, which only reads the graph: the node stays.
        round_bias: see :func:`lowbit.convert`.
        ap: see :func:`lowbit.convert`.
        all_regions: see :func:`lowbit.convert`.

    Raises:
        StepError: if a region cannot be written. The graph is of no use then.
    """
    aside: set[ir.Node] = set()
    while True:
        form = NormalForm(graph)
        regions, refusals, needed = _find_regions(Context(form, round_bias, set(), aside), failed)
        worthless = set() if all_regions else worthless_regions(graph, regions)
        if worthless:
            aside |= worthless
            continue
        covered = {node for region in regions.values() for node in region.nodes}
        reasons = {node: reason for node, reason in refusals.items() if reason != quantize.NO_READER}
        if not qoperator.restore(graph, covered, reasons):
            break

    nodes = [node for node in graph if any(output in needed for output in node.outputs)]
    units = find_units(node for node in nodes if node not in covered)
    lowering = Lowering(graph, form, report, ap=ap, units=units)
    for node in nodes:
        region = regions.get(node)
        written_for = (node,) if region is None else tuple(region.nodes)
        lowering.anchor, lowering.written_for = node, written_for
        with working_on(*written_for):
            if region is None:
                lowering.keep(node)
            else:
                _report_region(report, region, region.emit(lowering))
        for kept in written_for:
            if kept in lowering.kept:
                _explain(report, kept, refusals.get(kept))
    lowering.finish_outputs()
    return lowering


def _find_regions(
    context: Context, failed: Failed
) -> tuple[dict[ir.Node, Region], dict[ir.Node, str], set[ir.Value]]:
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
        found = _ask(context, node, failed)
        if isinstance(found, Region):
            regions[node] = found
            needed.update(found.codes)
            needed.update(found.reals)
            if not found.passive:
                context.wanted.update(found.codes)
        else:
            _collect_reasons(node, found, refusals)
            needed.update(inputs_of(node))
    return regions, refusals, needed


def _ask(context: Context, node: ir.Node, failed: Failed) -> Region | list[Refusal]:
    """The first rule that has a region ending in a node; else the reasons why there is none."""
    if has_to_stay(node):
        return [Refusal(node.meta[STAYS])]
    refusals = []
    for rule in RULES:
        try:
            found = rule(context, node)
        except (LowBitError, MemoryError):
            raise
        except Exception as error:  # a defect may show as anything
            raise_if_out_of_memory(error)
            failed(_spoken_of(node), error)
            return [Refusal(f"a rule of lowbit fails at it ({type(error).__name__}: {error})")]
        if isinstance(found, Region):
            left = next((inner for inner in found.nodes if has_to_stay(inner)), None)
            if left is not None:
                refusals.append(Refusal(f"'{left.name}', which belongs to it, has to stay"))
                continue
            held = (*found.codes, *found.reals, *node.outputs)
            unknown = [v.name for v in held if v.shape is None]
            empty = [v.name for v in held if v.shape is not None and 0 in v.shape]
            if found.core in context.aside:
                found = Refusal(GAINS_NOTHING)
            elif empty:
                found = Refusal(f"'{empty[0]}' has no elements")
            elif not unknown:
                return found
            else:
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
    if is_quantizer(node):
        if len(found) > 1:
            idle = any(refusal.reason == GAINS_NOTHING for refusal in found)
            reasons[_spoken_of(node)] = GAINS_NOTHING if idle else found[0].reason
        reasons[node] = found[-1].reason
    else:
        reasons.setdefault(node, found[0].reason)


def _spoken_of(node: ir.Node) -> ir.Node:
    """The node that rules speak about when asked about one: of a quantizer, what computes its input."""
    maker = node.inputs[0].producer() if is_quantizer(node) and node.inputs[0] is not None else None
    return node if maker is None or is_op(maker, "Relu", "Clip") else maker


def _explain(report: Report, node: ir.Node, reason: str | None) -> None:
    """Says in the report why a node stays; one that could have become a lowbit node is an island of float."""
    entry = node.meta.get(_REPORT)
    if not isinstance(entry, NodeReport):
        return
    entry.action, entry.into = "kept", None
    island = False
    # What happened to the node itself comes first, then a frontend's words, which are about the cause.
    reason = node.meta.get(STAYS) or node.meta.get(REASON) or reason
    if reason is not None:
        island = reason not in (quantize.NO_READER, GAINS_NOTHING)
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
