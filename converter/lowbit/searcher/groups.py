"""What is given bits as one: the weights of a layer, or all tensors that share codes.

Two readers of one tensor read the same codes, operands and result of a Concat may share a grid, and along a
residual trunk every Add reads what the one before it wrote: such tensors have one width, or none gains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from lowbit.quantizer.sites import Plan

Widths = dict[str, int]
"""Name of a group -> bits."""


@dataclass(frozen=True)
class Group:
    """One decision of the search.

    Attributes:
        name: ``weights of <layer>`` or ``activations of <tensor>``.
        layers: the layers whose weights, or whose inputs, it is.
        tensors: the quantized tensors of activations; empty for weights.
        widths: the bits that it may have, ascending; one where a rule of placement decides.
        rule: that rule, else empty.
    """

    name: str
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    widths: tuple[int, ...]
    rule: str = ""


def groups_of(
    model: onnx.ModelProto, plan: Plan, weight_bits: Sequence[int], activation_bits: Sequence[int]
) -> list[Group]:
    """The groups of a plan: weights in the order of the layers, then activations in that of the tensors.

    Args:
        model: the model that the plan is for.
        plan: placed for the least of ``weight_bits`` and the most of ``activation_bits``, Concats shared.
        weight_bits: the widths to choose from, ascending.
        activation_bits: the same for activations.
    """
    groups = []
    for layer in plan.layers.values():
        free = layer.rule == "asked"
        widths = tuple(weight_bits) if free else (layer.bits,)
        groups.append(
            Group(f"weights of {layer.node}", (layer.node,), (), widths, "" if free else layer.rule)
        )
    for tensors in _shared(model, plan):
        layers = tuple(layer.node for layer in plan.layers.values() if layer.x in tensors)
        if not layers:
            continue  # a tensor that no layer reads keeps its bits
        rules = {plan.grid(name).rule for name in tensors if any(plan.layers[n].x == name for n in layers)}
        rules |= {plan.layers[name].rule for name in layers if plan.layers[name].rule == "ends"}
        fixed = " ".join(sorted(rules - {"asked"}))
        widths = (max(plan.grid(name).bits for name in tensors),) if fixed else tuple(activation_bits)
        groups.append(Group(f"activations of {tensors[0]}", layers, tensors, widths, fixed))
    return groups


def _shared(model: onnx.ModelProto, plan: Plan) -> list[tuple[str, ...]]:
    """The sites of a plan in sets of one width, each in the order of the graph."""
    root = {name: plan.leader(name) for name in plan.sites}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    def join(names: Iterable[str]) -> None:
        roots = sorted({find(name) for name in names}, key=list(root).index)
        for other in roots[1:]:
            root[other] = roots[0]

    for output, operands in plan.concats.items():
        join([output, *operands])
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in model.graph.node:
        if node.op_type == "Add" and any((node.name, i) in plan.readers for i in range(len(node.input))):
            ends = [name for name in node.input if name in plan.sites]
            written = node.output[0]
            while written not in plan.sites and len(readers.get(written, ())) == 1:
                written = readers[written][0].output[0]
            join([*ends, *([written] if written in plan.sites else [])])
    sets: dict[str, list[str]] = {}
    for name in plan.sites:
        sets.setdefault(find(name), []).append(name)
    return [tuple(names) for names in sets.values()]


def overrides_of(groups: Sequence[Group], widths: Widths) -> dict[str, dict[str, Any]]:
    """The entry ``overrides`` of a quantizer's configuration that gives groups their widths."""
    made: dict[str, dict[str, Any]] = {}
    for group in groups:
        if group.rule:
            continue
        what = "input_bits" if group.tensors else "weight_bits"
        for layer in group.layers:
            made.setdefault(re.escape(layer), {})[what] = widths[group.name]
    return made


def widest(groups: Sequence[Group]) -> Widths:
    """Every group at its most bits."""
    return {group.name: group.widths[-1] for group in groups}


def weight_bytes(groups: Sequence[Group], sizes: Mapping[str, int], widths: Widths) -> int:
    """Bytes of packed weights; ``sizes`` are elements by layer."""
    return sum(-(-sizes[group.layers[0]] * widths[group.name] // 8) for group in groups if not group.tensors)
