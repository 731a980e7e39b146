"""What a model consists of: operands, work and kernels; of an unconverted one, what would become of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from lowbit.errors import LowBitError, RefusedError
from lowbit.frontends.dialects import MOVES, Neighbours, dialect_of
from lowbit.inspection.advice import Advice, Work, advise
from lowbit.ops import DOMAIN
from lowbit.proto.feeds import Model, as_file, as_proto, model_inputs
from lowbit.proto.model_file import stored_bytes
from lowbit.proto.report import NodeReport, ReasonGroup, Result, group_reasons
from lowbit.proto.tensors import (
    Shape,
    StoredWeights,
    Tensors,
    dims,
    lowbit_macs,
    read_tensors,
    shape_text,
    standard_macs,
    weight_input,
)
from lowbit.schemas import attributes_of
from lowbit.sessions.devices import canonical, ep_device, has_own_memory, runs_as_it_is
from lowbit.sessions.placement import place as placed
from lowbit.sessions.session import told_apart

Array = npt.NDArray[Any]

SCHEMA = 1
"""Version of :meth:`InspectReport.to_dict`. Under one version fields may come, none goes or changes."""


@dataclass(frozen=True)
class Candidate:
    """A kernel that could run a node, and the cycles that one core is estimated to need for an image."""

    kernel: str
    cycles: float


@dataclass(frozen=True)
class Refused:
    """A kernel that cannot run a node, and why."""

    kernel: str
    reason: str


@dataclass
class NodeInfo:
    """One node.

    Operands are written as their encoding and bits: ``u8`` unsigned 8 bit, ``s4`` signed 4 bit, ``b1``
    bipolar, ``f32`` float; those of two inputs are joined by ``+``.

    Attributes:
        name: the node's name, or what it computes where it has none.
        op_type: its op, with the domain in front unless that is ONNX's or lowbit's own.
        dialect: a name of :data:`lowbit.frontends.dialects.DIALECTS`; None for what is not quantized.
        lowbit_op: the op of ``ai.lowbit`` that computes it.
        x: the activations it reads.
        w: its weights.
        y: what it writes.
        epilogue: what is done to its accumulators.
        input_shape: of the first input that is not constant.
        output_shape: of the first output.
        macs: multiply-adds of one run.
        bit_ops: ``macs`` times the bits of weights and activations; None for floats.
        weight_bytes: of the weights in the converted model, or of a float node's.
        source_weight_bytes: of the same weights in the unconverted model's file.
        packed_bytes: of the weights in memory, in the kernel's layout.
        workspace_bytes: scratch memory of the kernel, for each thread.
        kernel: what runs it on this machine.
        tuned: whether the kernel was measured to be the fastest (``lowbit tune``) rather than estimated.
        candidates: the kernels that could run it, the cheapest estimate first.
        refused: the kernels that could not.
        runs_on: where a session on ``InspectReport.device`` runs it: that device, or "cpu" for what stays
            with ONNX Runtime; None where that was not asked, or cannot be told for a node without a name.
        left: why the execution provider leaves it.
        action: of an unconverted model's node: ``converted``, ``absorbed`` into another one, ``kept`` with
            ONNX Runtime, or ``added`` by the conversion.
        into: the lowbit node that computes it.
        reason: why it stays with ONNX Runtime, or why no kernel could be chosen.
    """

    name: str
    op_type: str
    dialect: str | None = None
    lowbit_op: str | None = None
    x: str | None = None
    w: str | None = None
    y: str | None = None
    epilogue: str | None = None
    input_shape: Shape | None = None
    output_shape: Shape | None = None
    macs: int | None = None
    bit_ops: int | None = None
    weight_bytes: int | None = None
    source_weight_bytes: int | None = None
    packed_bytes: int | None = None
    workspace_bytes: int | None = None
    kernel: str | None = None
    tuned: bool | None = None
    candidates: list[Candidate] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    runs_on: str | None = None
    left: str | None = None
    action: str | None = None
    into: str | None = None
    reason: str | None = None

    @property
    def cycles(self) -> float | None:
        """The estimate for the chosen kernel."""
        return next((each.cycles for each in self.candidates if each.kernel == self.kernel), None)

    @property
    def codes(self) -> str:
        """``u8 * s4 -> u8``."""
        read = " * ".join(filter(None, (self.x, self.w)))
        return " -> ".join(filter(None, (read, self.y)))

    @property
    def becomes(self) -> str | None:
        """What the conversion makes of it, in words; None for a node of a converted model."""
        if self.action == "converted":
            return self.lowbit_op or f"{self.op_type} of codes"
        return f"part of {self.into}" if self.action == "absorbed" and self.into else self.action

    @property
    def why(self) -> str | None:
        """Why it stays with ONNX Runtime, or why no kernel could be chosen."""
        return self.reason or self.left

    @property
    def is_float(self) -> bool:
        """Whether it multiplies floats."""
        return self.macs is not None and self.bit_ops is None


@dataclass
class InspectReport:
    """All nodes of a model, and what they add up to.

    Attributes:
        kind: ``lowbit``: a converted model; ``source``: an unconverted one, seen through a dry conversion.
        bytes: size of the file and of its external data, or of the proto.
        model: the file's name, or the graph's.
        isa: the instruction set that kernels were chosen for.
        threads: as many as measured choices were looked up for; None: those for the most threads.
        device: the device that ``runs_on`` of the nodes is about; None where none was asked for.
        regions: how many regions the execution provider compiles for it.
        converted_bytes: size of the converted model; None for one that is converted already.
        inputs: name, type and shape of each.
        outputs: the same.
        assumed: inputs with symbolic sizes other than the batch, and the typical ones taken for them.
        nodes: in the order of the model.
        warnings: what the user should know beyond that.
        remark: one sentence about a model in which there is nothing to convert.
        advice: what to change in an unconverted model so that more of it converts.
    """

    kind: str
    bytes: int
    model: str | None = None
    isa: str | None = None
    threads: int | None = None
    device: str | None = None
    regions: int | None = None
    converted_bytes: int | None = None
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    assumed: dict[str, list[int]] = field(default_factory=dict)
    nodes: list[NodeInfo] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    remark: str | None = None
    advice: list[Advice] = field(default_factory=list)

    @property
    def reasons(self) -> list[ReasonGroup]:
        """Why nodes stay with ONNX Runtime or have no kernel, the reason of most nodes first."""
        return group_reasons((node.name, node.op_type, node.why) for node in self.nodes if node.why)

    @property
    def totals(self) -> dict[str, Any]:
        """Counts of nodes and sums over them; see docs/inspect.md."""
        nodes = self.nodes
        alone = [node for node in nodes if node.action != "absorbed"]
        stored = [node for node in nodes if node.source_weight_bytes is not None]
        return {
            "nodes": len(nodes),
            "ops": _counts(node.op_type for node in nodes),
            "actions": dict(Counter(node.action for node in nodes if node.action)),
            "dialects": _counts(node.dialect for node in alone if node.dialect),
            "kernels": _counts(node.kernel for node in nodes if node.kernel),
            "macs": sum(node.macs or 0 for node in nodes),
            "float_macs": sum(node.macs or 0 for node in nodes if node.is_float),
            "bit_ops": sum(node.bit_ops or 0 for node in nodes),
            "weight_bytes": sum(node.weight_bytes or 0 for node in nodes),
            "source_weight_bytes": sum(n.source_weight_bytes or 0 for n in stored) if stored else None,
            "tuned": sum(bool(node.tuned) for node in nodes),
            "runs_on": _counts(node.runs_on for node in nodes if node.runs_on),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        reasons = [asdict(group) for group in self.reasons]
        return {"schema": SCHEMA, **asdict(self), "reasons": reasons, "totals": self.totals}


def _counts(words: Any) -> dict[str, int]:
    return dict(Counter(words).most_common())


def inspect(
    model: Model,
    *,
    shapes: Mapping[str, list[int]] | None = None,
    isa: str | None = None,
    threads: int | None = None,
    device: str | None = None,
    input_quant: str | Sequence[str] = (),
) -> InspectReport:
    """Describes a model node by node.

    A converted model shows operands, shapes, multiply-adds, weight bytes and the kernel that this machine
    would run. Any other model is converted in memory, and every node tells what becomes of it, or why it
    would be left alone.

    Args:
        model: a path, a ModelProto, or what :func:`lowbit.convert` returned.
        shapes: sizes for inputs with symbolic dims; a symbolic batch counts as 1 otherwise, and an image as
            :data:`lowbit.proto.tensors.TYPICAL_SIZES` says.
        isa: choose kernels as for this level instead of this machine's best.
        threads: as many as sessions will have, where :func:`lowbit.tune` measured for several.
        device: open the model there and tell which nodes run there, which do not, and why.
        input_quant: see :func:`lowbit.convert`; a converted model takes none.

    Raises:
        ModelError: if the model cannot be read, or opened on ``device``.
        LowBitError: if ``device`` cannot be used.
    """
    place = None if device is None else canonical(device)
    if place is not None and not runs_as_it_is(place):
        ep_device(place)  # before anything else is done
    proto = as_proto(model)
    if input_quant or not any(node.domain == DOMAIN for node in proto.graph.node):
        from lowbit.conversion.convert import convert

        given = Path(model) if isinstance(model, (str, os.PathLike)) else proto
        result = convert(
            given, all_regions=place is not None and not runs_as_it_is(place), input_quant=input_quant
        )
        report = describe_conversion(model, result, shapes=shapes, isa=isa, threads=threads, device=place)
        work = {info.name: Work(info.macs, info.is_float) for info in report.nodes if info.macs}
        stated = [input_quant] if isinstance(input_quant, str) else input_quant
        report.advice = advise(proto, result.report, work, stated)
        return report
    report = _blank("lowbit", model, proto, isa, threads)
    report.nodes = _nodes_of(proto, report, shapes or {})
    if place is not None:
        _place(report, report.nodes, model, place, shapes)
    neighbours = Neighbours(proto.graph)
    for info, node in zip(report.nodes, _nodes(proto), strict=True):
        info.dialect = dialect_of([node], neighbours)
    return report


def describe_conversion(
    model: Model,
    result: Result,
    *,
    shapes: Mapping[str, list[int]] | None = None,
    isa: str | None = None,
    threads: int | None = None,
    device: str | None = None,
) -> InspectReport:
    """Describes what became of every node of a model.

    Args:
        model: the unconverted model.
        result: what :func:`lowbit.convert` made of it.
        shapes: see :func:`inspect`.
        isa: see :func:`inspect`.
        threads: see :func:`inspect`.
        device: see :func:`inspect`; in its full form.
    """
    proto = as_proto(model)
    report = _blank("source", model, proto, isa, threads)
    report.converted_bytes = result.model.ByteSize()
    report.warnings += result.report.warnings
    report.remark = result.report.remark
    made = {info.name: info for info in _nodes_of(result.model, report, shapes or {})}
    if device is not None:
        try:
            _place(report, list(made.values()), result, device, shapes)
        except RefusedError as error:
            raise told_apart(error, report.model or "the model", model) from error
    facts = _SourceFacts(proto, result.report.nodes)
    for entry in result.report.nodes:
        info = NodeInfo(entry.name, entry.op_type)
        if entry.action == "converted" and entry.into in made:
            info = replace(made.pop(entry.into), name=entry.name, op_type=entry.op_type)
            info.source_weight_bytes = facts.weight_bytes(entry)
        elif entry.action == "kept":
            kept = next((name for name in facts.names_kept(entry) if name in made), None)
            if kept is not None and made[kept].op_type == entry.op_type:
                info = replace(made.pop(kept), name=entry.name)
                info.source_weight_bytes = info.weight_bytes
        info.action, info.into, info.reason = entry.action, entry.into, entry.reason or info.reason
        info.dialect = facts.dialect(entry)
        report.nodes.append(info)
    for info in made.values():
        info.action = "added"
        report.nodes.append(info)
    return report


def _place(
    report: InspectReport,
    nodes: Sequence[NodeInfo],
    model: Model,
    device: str,
    shapes: Mapping[str, list[int]] | None,
) -> None:
    """Opens a converted model on a device and fills in where its nodes run, and a GPU's kernels."""
    report.device = device
    if runs_as_it_is(device):
        for info in nodes:
            info.runs_on = "cpu"
        return
    with as_file(model) as path:
        found = placed(path, device, {**report.assumed, **(shapes or {})})
    report.regions = len(found.regions)
    taken, elsewhere = found.taken, {*found.elsewhere, *found.reasons}
    for info in nodes:
        info.left = found.reasons.get(info.name)
        info.runs_on = device if info.name in taken else "cpu" if info.name in elsewhere else None
        if info.runs_on == device and has_own_memory(device):  # what was told is about this machine's CPU
            info.kernel = found.kernels.get(info.name)
            info.tuned = info.packed_bytes = info.workspace_bytes = None
            info.candidates, info.refused = [], []


class _SourceFacts:
    """What the file says about the nodes of a conversion's report."""

    def __init__(self, model: onnx.ModelProto, entries: list[NodeReport]):
        self._nodes = {_label(node): node for node in model.graph.node}
        self._neighbours = Neighbours(model.graph)
        self._weights = StoredWeights(model)
        self._regions: dict[str, list[onnx.NodeProto]] = {}
        for entry in entries:
            node = self._node(entry)
            if entry.into is not None and node is not None:
                self._regions.setdefault(entry.into, []).append(node)

    def _node(self, entry: NodeReport) -> onnx.NodeProto | None:
        """A node without a name goes by its op and output, and its op may be one of a newer opset by now."""
        return self._nodes.get(entry.name) or self._neighbours.makers.get(entry.name.partition(" of ")[2])

    def names_kept(self, entry: NodeReport) -> list[str]:
        """The names that a node which stays may have: one that works in another layout has a new one."""
        node = self._node(entry)
        outputs = [] if node is None else node.output
        return [entry.name, *(f"{output}.{entry.op_type}" for output in outputs)]

    def dialect(self, entry: NodeReport) -> str | None:
        """That of the region which the node is part of."""
        node = self._node(entry)
        alone = [] if node is None else [node]
        return dialect_of(self._regions.get(entry.into or "", alone), self._neighbours)

    def weight_bytes(self, entry: NodeReport) -> int | None:
        """How many bytes the node's weights take in the file; None where the node is not known."""
        node = self._node(entry)
        return None if node is None else self._weights.bytes_of(node)


def _blank(
    kind: str, model: Model, proto: onnx.ModelProto, isa: str | None, threads: int | None
) -> InspectReport:
    from lowbit import _native

    if isinstance(model, (str, os.PathLike)):
        name, size = os.path.basename(os.fspath(model)), stored_bytes(model)
    else:
        name, size = proto.graph.name, proto.ByteSize()
    return InspectReport(
        kind,
        size,
        model=name or None,
        isa=isa or _native.default_isa(),
        threads=threads,
        inputs=[_describe(value) for value in model_inputs(proto).values()],
        outputs=[_describe(value) for value in proto.graph.output],
    )


def _describe(value: onnx.ValueInfoProto) -> str:
    try:
        dtype = str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    except (KeyError, TypeError):
        dtype = "?"
    return f"{value.name} {dtype}{shape_text(dims(value.type))}"


def refusals_by_reason(node: NodeInfo) -> list[tuple[str, list[str]]]:
    """The reasons why kernels cannot run a node, each with the kernels that it holds for."""
    reasons: dict[str, list[str]] = {}
    for each in node.refused:
        reasons.setdefault(each.reason, []).append(each.kernel)
    return list(reasons.items())


def _label(node: onnx.NodeProto) -> str:
    """A node's name in reports, as the converter forms it."""
    return node.name or f"{node.op_type} of {node.output[0] if node.output else '?'}"


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type != "Constant"]


def _nodes_of(
    model: onnx.ModelProto, report: InspectReport, shapes: Mapping[str, list[int]]
) -> list[NodeInfo]:
    """Describes every node of a converted model; what was assumed about sizes goes into the report."""
    tensors = read_tensors(model, shapes)
    report.assumed = dict(tensors.assumed)
    for name, sizes in tensors.assumed.items():
        report.warnings.append(
            f"the sizes of input '{name}' are symbolic; work is counted and kernels are chosen for "
            f"{shape_text(list(sizes))}. Give others with --shape {name}=D0,D1,.."
        )
    weights = StoredWeights(model)
    codes: dict[str, str] = {}
    nodes = []
    for node in _nodes(model):
        domain = f"{node.domain}." if node.domain not in ("", "ai.onnx", DOMAIN) else ""
        info = NodeInfo(_label(node), domain + node.op_type)
        first = next((i for i in node.input if i and i not in tensors.constants), "")
        info.input_shape = tensors.shape(first)
        info.output_shape = tensors.shape(node.output[0]) if node.output else None
        if node.domain == DOMAIN:
            _describe_lowbit(info, node, tensors, codes, report)
        else:
            _describe_standard(info, node, tensors, weights)
            if first in codes and node.op_type in MOVES:
                codes.update((output, codes[first]) for output in node.output)
        nodes.append(info)
    return nodes


def _describe_standard(
    info: NodeInfo, node: onnx.NodeProto, tensors: Tensors, weights: StoredWeights
) -> None:
    """Operands and work of a convolution or matrix product that ONNX Runtime computes."""
    index = weight_input(node)
    if index is None:
        return
    info.x, info.w = tensors.element(node.input[0]), tensors.element(node.input[index])
    info.y = tensors.element(node.output[0])
    info.macs = standard_macs(node, tensors)
    info.bit_ops = _bit_ops(info)
    info.weight_bytes = weights.bytes_of(node)


def _describe_lowbit(
    info: NodeInfo, node: onnx.NodeProto, tensors: Tensors, codes: dict[str, str], report: InspectReport
) -> None:
    """Operands, work and kernel of a lowbit node.

    Ops that treat all codes alike do not say how many bits those have; ``codes`` holds what their makers
    said, and is added to.
    """
    from lowbit import _native

    schema = next((schema for schema in _native.schemas() if schema["name"] == node.op_type), None)
    if schema is None:
        info.reason = f"this version of lowbit knows no op {node.op_type}; update it"
        return
    info.lowbit_op = node.op_type
    attrs = {attribute["name"]: attribute["default"] for attribute in schema["attributes"]}
    given = attributes_of(node)
    attrs |= given

    def operand(name: str, value: str | None) -> str | None:
        if f"{name}_encoding" not in attrs:
            return codes.get(value or "")
        bits = attrs.get(f"{name}_bits")
        told = f"{attrs[f'{name}_encoding'][0]}{8 if bits is None else bits}"
        return codes.get(value or "", told) if bits is None else told

    names = [i["name"] for i in schema["inputs"]]
    values = dict(zip(names, node.input, strict=False))
    if "a" in values:
        info.x = "+".join(filter(None, (operand(side, values.get(side)) for side in "ab")))
    else:
        info.x = operand("x", node.input[0])
    info.w = operand("w", None)
    info.y = "f32" if tensors.element(node.output[0]) == "f32" else operand("y", None) or info.x
    codes[node.output[0]] = info.y or ""
    if "epilogue" in attrs:
        steps = attrs["tail"] if attrs["epilogue"] == "tail" else ""
        info.epilogue = f"tail: {steps}" if steps else attrs["epilogue"]
        if values.get("residual") and attrs["epilogue"] == "requantize":
            info.epilogue += " + residual"
        packed = tensors.constants.get(node.input[1])
        info.weight_bytes = None if packed is None else int(packed.size)
        info.macs = lowbit_macs(node, attrs, tensors)
        info.bit_ops = _bit_ops(info)
    if node.op_type == "LowBitMatMul":
        info.macs = lowbit_macs(node, attrs, tensors)
        info.bit_ops = _bit_ops(info)
    _choose_kernel(info, node, given, tensors, report)


def _bit_ops(info: NodeInfo) -> int | None:
    both = [info.x, info.w] if info.w is not None or info.x is None else info.x.split("+")
    x, w = map(operand_bits, both if len(both) == 2 else (None, None))
    return None if info.macs is None or x is None or w is None else info.macs * x * w


def operand_bits(operand: str | None) -> int | None:
    """The bits of an operand of integer codes, ``4`` of ``"s4"``; None for floats and several operands."""
    if operand is None or operand[0] not in "usb" or not operand[1:].isdigit():
        return None
    return int(operand[1:])


def _choose_kernel(
    info: NodeInfo, node: onnx.NodeProto, attrs: Mapping[str, Any], tensors: Tensors, report: InspectReport
) -> None:
    """Fills in the kernel that would run a node and why, or the reason why that cannot be told."""
    from lowbit import _native

    inputs: list[Array | None] = []
    for name in node.input:
        sizes = tensors.sizes(name)
        if not name:
            inputs.append(None)
        elif name in tensors.constants:
            inputs.append(tensors.constants[name])
        elif sizes is None:
            shape = shape_text(tensors.shape(name))
            info.reason = f"the shape {shape} of '{name}' is not known; give sizes with --shape"
            return
        else:
            dtype = helper.tensor_dtype_to_np_dtype(tensors.types[name].tensor_type.elem_type)
            try:
                inputs.append(np.zeros(sizes, dtype))
            except (MemoryError, ValueError):
                info.reason = f"'{name}' of shape {shape_text([*sizes])} is too large for this machine"
                return
    stated = tensors.stated.get(node.input[0], [])
    isa, threads = report.isa, report.threads or 0
    try:
        # A session chooses by what the model states; costs are told for the sizes at hand.
        plan = _native.plan(node.op_type, attrs, inputs, isa=isa, threads=threads, x_shape=stated)
        sized = _native.plan(node.op_type, attrs, inputs, isa=isa) if min(stated, default=-1) < 0 else plan
    except (_native.LowBitError, LowBitError) as error:
        info.reason = str(error)
        return
    info.kernel, info.tuned = plan["kernel"], plan["tuned"]
    info.packed_bytes, info.workspace_bytes = sized["packed_bytes"], sized["workspace_bytes"]
    info.candidates = [Candidate(each["kernel"], each["cycles"]) for each in sized["candidates"]]
    info.refused = [Refused(*text.split(": ", 1)) for text in plan["refused"]]
