"""Nodes together with their subgraphs, the bodies of If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def graphs_of(node: ir.Node) -> list[ir.Graph]:
    """The subgraphs of a node: bodies of If, Loop, Scan."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def inputs_of(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, what its subgraphs capture included."""
    yield from (value for value in node.inputs if value is not None)
    for graph in graphs_of(node):
        for inner in graph.all_nodes():
            yield from (value for value in inner.inputs if value is not None)
        yield from graph.outputs


def remove_unused_nodes(model: ir.Model) -> None:
    """Removes the nodes of the main graph that nothing needs, and lets go what their subgraphs captured.

    The pass of onnx_ir leaves a removed node's subgraphs among the readers of what they captured.
    """
    needed: set[ir.Value] = set(model.graph.outputs)
    for node in reversed(model.graph):
        if any(output in needed for output in node.outputs):
            needed.update(inputs_of(node))
            continue
        for graph in graphs_of(node):
            for inner in graph.all_nodes():
                for index in range(len(inner.inputs)):
                    inner.replace_input_with(index, None)
    RemoveUnusedNodesPass()(model)
    for node in model.graph.all_nodes():
        # The pass takes away the inputs at the end that are left empty. A Loop has two, given or not.
        if node.op_type == "Loop" and node.domain == "" and len(node.inputs) < 2:
            node.resize_inputs(2)
