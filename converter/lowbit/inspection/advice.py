"""What to change in a quantized model so that more of it converts: tried, not guessed.

Nodes that stay for one reason are looked at together. Whatever their operands lack (a quantizer, one scale
instead of one per channel, 8 bits instead of 16) is put into a copy of the model with made-up scales, and the
copy is converted. What the conversion takes then, and did not before, is what following the advice gains;
where it takes nothing, there is no advice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lowbit.errors import LowBitError
from lowbit.frontends import qonnx
from lowbit.frontends.dialects import MOVES, Neighbours, is_quantized_op
from lowbit.proto.feeds import constant_values, model_inputs
from lowbit.proto.report import NodeReport, Report, group_reasons
from lowbit.proto.tensors import weight_input

FLOAT_RATIO = 0.44
"""Time of a multiply-add on codes of 8 bits over that of a float one in ONNX Runtime.

The median of ResNet-20 (.40), ResNet-8 (.44) and MobileNetV2 (.88), whole networks of 8 bits beside their
float originals, one thread, medians of turns on an AMD EPYC with AVX-512 VNNI (``lowbit bench``).
"""

_MOST_REASONS = 8
"""Reasons that are looked into, those with most work first; each costs a few conversions."""
_SECONDS = 20.0
"""No further reason is looked into after this time."""
_NAMED = 3
"""Tensors that a sentence names."""

_ALL_OPERANDS = ("Add", "Sub", "Mul", "Div", "Concat", "MatMul", "Max", "Min", "Sum")
_CONSTANT_OPERANDS = ("Add", "Sub", "Mul", "Concat")
_CLIPPED = ("Relu", "Clip")
_MOVES = frozenset(MOVES) - {"Concat"}
_SCALE, _ZERO_POINT = np.float32(1 / 16), np.uint8(128)


@dataclass(frozen=True)
class Advice:
    """A change that was tried, and what it gained.

    Attributes:
        text: what stands in the way, what to do, and what that gains, in words.
        tensors: the tensors to change.
        nodes: the nodes that are converted then.
        macs: their multiply-adds.
        macs_share: of all multiply-adds of the network.
        time_share: of the network's time, estimated from multiply-adds and :data:`FLOAT_RATIO`.
    """

    text: str
    tensors: list[str]
    nodes: list[str]
    macs: int
    macs_share: float
    time_share: float


@dataclass(frozen=True)
class Work:
    """The multiply-adds of a node, and whether they are done in float."""

    macs: int
    in_float: bool


@dataclass(frozen=True)
class _Edit:
    """One change of the model.

    Attributes:
        what: ``quantize``, ``weights`` (of a constant), ``input`` (of the model), ``scale`` (one, not one per
            channel) or ``bits`` (8 of them).
        tensor: what it is about.
    """

    what: str
    tensor: str


def advise(
    model: onnx.ModelProto, report: Report, work: Mapping[str, Work], input_quant: Sequence[str] = ()
) -> list[Advice]:
    """What to change so that more nodes of a model convert, the most work first.

    Args:
        model: the unconverted model, with its data.
        report: of its conversion.
        work: of its nodes, by name.
        input_quant: what the conversion was told about the model's inputs.
    """
    dynamic = any(entry.op_type == "DynamicQuantizeLinear" for entry in report.kept)
    if report.remark or dynamic or not report.kept:  # dynamic: not some tensors, the whole model is to change
        return []
    graph = _Graph(model)
    kept = [entry for entry in report.kept if entry.reason and not _is_quantizer(entry)]
    groups = group_reasons((entry.name, entry.op_type, entry.reason or "") for entry in kept)
    groups.sort(key=lambda group: (-_macs(group.nodes, work), -len(group.nodes)))
    began = time.monotonic()
    given: list[Advice] = []
    for group in groups[:_MOST_REASONS]:
        taken = {name for advice in given for name in advice.nodes}
        names = [name for name in group.nodes if name not in taken]
        if not names or time.monotonic() - began > _SECONDS:
            continue
        for helped, edits, gained in _try(graph, report, names, list(input_quant)):
            first = next(entry for entry in kept if entry.name == helped[0])
            reason = group.reason if len(helped) > 1 else str(first.reason)
            given.append(_tell(first, reason, len(helped), edits, gained, work))
    return sorted(given, key=lambda advice: (-advice.macs, -len(advice.nodes)))


def _is_quantizer(entry: NodeReport) -> bool:
    domain, _, op_type = entry.op_type.rpartition(".")
    return is_quantized_op(domain, op_type)


def _macs(names: Iterable[str], work: Mapping[str, Work]) -> int:
    return sum(work[name].macs for name in names if name in work)


# Trying ---------------------------------------------------------------------------------------------------


def _try(
    graph: _Graph, report: Report, names: list[str], input_quant: list[str]
) -> Iterator[tuple[list[str], list[_Edit], list[str]]]:
    """Changes that let some of the nodes convert: those nodes, the changes, all nodes that convert then."""
    for outputs_too in (False, True):
        edits = {name: graph.edits(name, outputs_too=outputs_too) for name in names}
        gained = _gain(graph, report, edits, input_quant)
        effective = {name: edits[name] for name in names if name in gained}
        if effective and len(effective) < len(edits):  # the others' changes do nothing
            gained = _gain(graph, report, effective, input_quant)
        if effective and set(effective) <= set(gained):
            yield [*effective], _without_needless(graph, report, effective, gained, input_quant), gained
            names = [name for name in names if name not in gained]
        if not names:
            return


def _without_needless(
    graph: _Graph,
    report: Report,
    edits: Mapping[str, Sequence[_Edit]],
    gained: list[str],
    input_quant: list[str],
) -> list[_Edit]:
    """The changes less those of a kind that the nodes convert without as well."""
    listed = list(dict.fromkeys(edit for each in edits.values() for edit in each))
    for what in sorted({edit.what for edit in listed}):
        left = [edit for edit in listed if edit.what != what]
        if left and len(left) < len(listed) and _gain(graph, report, {"": left}, input_quant) == gained:
            listed = left
    return listed


def _gain(
    graph: _Graph, report: Report, edits: Mapping[str, Sequence[_Edit]], input_quant: list[str]
) -> list[str]:
    """The nodes that convert with some changes and not without; none if another one does not any more."""
    from lowbit.conversion.convert import convert

    listed = list(dict.fromkeys(edit for each in edits.values() for edit in each))
    if not listed:
        return []
    stated = [f"{edit.tensor}:scale={_SCALE},bits=8,unsigned" for edit in listed if edit.what == "input"]
    try:
        tried = convert(graph.edited(listed), input_quant=[*input_quant, *stated], verify=False).report
    except LowBitError:  # an operator of an old opset among others: the change cannot be written
        return []
    after = {entry.name: entry.action for entry in tried.nodes}
    before = [entry for entry in report.nodes if not _is_quantizer(entry)]
    if any(entry.action == "converted" and after.get(entry.name) == "kept" for entry in before):
        return []
    return [
        entry.name
        for entry in before
        if entry.action == "kept" and after.get(entry.name, "kept") in ("converted", "absorbed")
    ]


class _Graph:
    """A model, what its nodes lack, and copies of it that lack less."""

    def __init__(self, model: onnx.ModelProto):
        self.model = model
        self.neighbours = Neighbours(model.graph)
        self.constants = constant_values(model)
        self.inputs = set(model_inputs(model))
        self._nodes: dict[str, onnx.NodeProto] = {}
        for node in model.graph.node:
            self._nodes.setdefault(node.name or f"{node.op_type} of {node.output[0]}", node)

    def edits(self, name: str, *, outputs_too: bool) -> list[_Edit]:
        """What the operands of a node lack, and its output if that is asked for."""
        node = self._nodes.get(name)
        if node is None:
            return []
        found = [self._operand(node, index) for index in range(len(node.input))]
        if outputs_too and node.output:
            found.append(self._output(node.output[0]))
        return [edit for edit in found if edit is not None]

    def _operand(self, node: onnx.NodeProto, index: int) -> _Edit | None:
        name = node.input[index]
        if name in self.constants:
            array = self.constants[name]
            wanted = index == weight_input(node) or (node.op_type in _CONSTANT_OPERANDS and array.size > 1)
            return _Edit("weights", name) if wanted and array.dtype == np.float32 else None
        if not name or not (index == 0 or node.op_type in _ALL_OPERANDS):
            return None
        source = self._unmoved(name)
        maker = self.neighbours.makers.get(source)
        if maker is not None and _quantizes(maker):
            return self._mend(maker)
        if maker is not None and maker.op_type == "Concat" and all(map(self._is_quantized, maker.input)):
            return None
        if node.op_type in _CLIPPED:  # it is computed together with what it clips
            return None
        return _Edit("input", source) if source in self.inputs else _Edit("quantize", name)

    def _is_quantized(self, name: str) -> bool:
        maker = self.neighbours.makers.get(self._unmoved(name))
        return maker is not None and _quantizes(maker)

    def _unmoved(self, name: str) -> str:
        """The tensor in front of moves of data; name itself where nothing moved it."""
        seen = {name}
        while (
            (node := self.neighbours.makers.get(name)) is not None and node.op_type in _MOVES and node.input
        ):
            name = node.input[0]
            if name in seen:  # a damaged model
                break
            seen.add(name)
        return name

    def _output(self, name: str) -> _Edit | None:
        readers = self.neighbours.readers.get(name, [])
        while len(readers) == 1 and readers[0].op_type in _CLIPPED:
            name = readers[0].output[0]
            readers = self.neighbours.readers.get(name, [])
        quantizer = next((reader for reader in readers if _quantizes(reader)), None)
        return _Edit("quantize", name) if quantizer is None else self._mend(quantizer)

    def _mend(self, quantizer: onnx.NodeProto) -> _Edit | None:
        """What is odd about a quantizer of activations, if anything is."""
        if quantizer.op_type == "DequantizeLinear":
            quantizer = self.neighbours.makers.get(quantizer.input[0], quantizer)
        given = [self.constants.get(name) for name in quantizer.input[1:4]]
        if not given or given[0] is None:
            return None
        if quantizer.op_type in ("Quant", "IntQuant"):
            wide = len(given) > 2 and given[2] is not None and given[2].size == 1 and given[2].item() > 8
        else:
            wide = len(given) > 1 and given[1] is not None and given[1].dtype in (np.uint16, np.int16)
        tensor = quantizer.input[0] if quantizer.op_type != "DequantizeLinear" else quantizer.output[0]
        if wide:
            return _Edit("bits", tensor)
        return _Edit("scale", tensor) if given[0].size > 1 else None

    def edited(self, edits: Sequence[_Edit]) -> onnx.ModelProto:
        """A copy of the model with some changes."""
        draft = onnx.ModelProto()
        draft.CopyFrom(self.model)
        for number, edit in enumerate(edits):
            if edit.what in ("quantize", "weights"):
                self._insert_pair(draft.graph, edit, f"{edit.tensor}/advice{number}")
            elif edit.what in ("scale", "bits"):
                self._simplify(draft.graph, edit, f"{edit.tensor}/advice{number}")
        return draft

    def _insert_pair(self, graph: onnx.GraphProto, edit: _Edit, stem: str) -> None:
        """Lets the readers of a tensor have it behind a quantizer, one that it has already if need be."""
        scale, zero_point = _SCALE, np.asarray(_ZERO_POINT)
        if edit.what == "weights":
            largest = np.abs(self.constants[edit.tensor]).max(initial=0)
            scale, zero_point = np.float32(largest / 127 if largest > 0 else 1), np.zeros((), np.int8)
        readers = [node for node in graph.node if edit.tensor in node.input]
        quantizers = {node.output[0] for node in readers if node.op_type == "QuantizeLinear"}
        quantized = next(
            (node.output[0] for node in graph.node
             if node.op_type == "DequantizeLinear" and node.input[0] in quantizers), None,
        )  # fmt: skip
        result = quantized or f"{stem}/real"
        for node in readers:
            if node.output[0] not in quantizers:
                node.input[:] = [result if name == edit.tensor else name for name in node.input]
        if quantized is not None:
            return
        source = edit.tensor
        if not readers:  # an output of the model: it keeps its name
            source, result = f"{stem}/float", edit.tensor
            maker = next(node for node in graph.node if edit.tensor in node.output)
            maker.output[:] = [source if name == edit.tensor else name for name in maker.output]
        for what, value in (("scale", scale), ("zero_point", zero_point)):
            graph.initializer.append(numpy_helper.from_array(np.asarray(value), f"{stem}/{what}"))
        parameters = [f"{stem}/scale", f"{stem}/zero_point"]
        graph.node.append(
            helper.make_node("QuantizeLinear", [source, *parameters], [f"{stem}/codes"], f"{stem}/q")
        )
        graph.node.append(
            helper.make_node("DequantizeLinear", [f"{stem}/codes", *parameters], [result], f"{stem}/dq")
        )

    def _simplify(self, graph: onnx.GraphProto, edit: _Edit, stem: str) -> None:
        """Gives a tensor's quantizers one scale, or 8 bits."""
        codes = {node.input[0] for node in graph.node
                 if node.op_type == "DequantizeLinear" and edit.tensor in node.output}  # fmt: skip
        codes |= {node.output[0] for node in graph.node
                  if node.op_type == "QuantizeLinear" and edit.tensor in node.input}  # fmt: skip
        for count, node in enumerate(graph.node):
            if qonnx.is_quantizer(node):
                if edit.tensor not in (*node.input[:1], *node.output):
                    continue
            elif not (node.op_type in ("QuantizeLinear", "DequantizeLinear")
                      and codes & {node.input[0], node.output[0]}):  # fmt: skip
                continue
            for index, value in self._simpler(node, edit.what).items():
                graph.initializer.append(numpy_helper.from_array(value, f"{stem}/{count}.{index}"))
                node.input[index] = f"{stem}/{count}.{index}"
            if edit.what == "scale":
                kept = [attribute for attribute in node.attribute if attribute.name != "axis"]
                del node.attribute[:]
                node.attribute.extend(kept)

    def _simpler(self, node: onnx.NodeProto, what: str) -> dict[int, np.ndarray]:
        """New parameters of a quantizer, by position."""
        values = {index: self.constants[name] for index, name in enumerate(node.input)
                  if index in (1, 2) and name in self.constants}  # fmt: skip
        if what == "scale":
            largest = values[1].max()
            return {index: np.asarray(largest if index == 1 else value.reshape(-1)[0], value.dtype)
                    for index, value in values.items()}  # fmt: skip
        if node.op_type in ("Quant", "IntQuant"):
            return {3: np.asarray(8, np.float32)}
        narrow = {np.dtype(np.uint16): np.uint8, np.dtype(np.int16): np.int8}
        return {
            index: np.asarray(value * 257 if index == 1 else value // 257,
                              value.dtype if index == 1 else narrow[value.dtype])
            for index, value in values.items()
        }  # fmt: skip


def _quantizes(node: onnx.NodeProto) -> bool:
    return node.op_type in ("QuantizeLinear", "DequantizeLinear") or qonnx.is_quantizer(node)


# Telling --------------------------------------------------------------------------------------------------

_ORDERS = {
    "quantize": "quantize {tensors} to 8 bits",
    "weights": "quantize the constant {tensors}",
    "input": "state the quantizer of input {tensors} (--input-quant)",
    "scale": "give {tensors} one scale instead of one per channel",
    "bits": "give {tensors} 8 bits",
}


def _tell(
    first: NodeReport,
    reason: str,
    count: int,
    edits: Sequence[_Edit],
    gained: Sequence[str],
    work: Mapping[str, Work],
) -> Advice:
    orders = []
    for what, order in _ORDERS.items():
        tensors = list(dict.fromkeys(edit.tensor for edit in edits if edit.what == what))
        if tensors:
            orders.append(order.format(tensors=_listed(tensors)))
    others = f" and {count - 1} more" if count > 1 else ""
    macs, total = _macs(gained, work), sum(each.macs for each in work.values())
    in_float = sum(work[name].macs for name in gained if name in work and work[name].in_float)
    time_now = sum(each.macs * (1 if each.in_float else FLOAT_RATIO) for each in work.values())
    macs_share = macs / total if total else 0.0
    time_share = in_float * (1 - FLOAT_RATIO) / time_now if time_now else 0.0
    gain = f"{len(gained)} more node{'s'[: len(gained) != 1]} convert{'s'[: len(gained) == 1]}"
    if macs:
        gain += f", {_percent(macs_share)} of the network's multiply-adds"
        if time_share:
            gain += f" (about {_percent(time_share)} of its time)"
    return Advice(
        f"{first.op_type} '{first.name}'{others}: {reason}. To convert: {'; '.join(orders)} -> {gain}",
        list(dict.fromkeys(edit.tensor for edit in edits)),
        list(gained),
        macs,
        macs_share,
        time_share,
    )


def _listed(tensors: Sequence[str]) -> str:
    named = ", ".join(f"'{name}'" for name in tensors[:_NAMED])
    more = len(tensors) - _NAMED
    return f"{named} and {more} more" if more > 0 else named


def _percent(share: float) -> str:
    return "less than 1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")
