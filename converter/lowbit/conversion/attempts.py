"""Converting what holds: where a conversion fails, the nodes around the failure stay and the rest converts.

A rule that raises, a converted model that does not load, a node that differs from the definition of its op:
each is a defect of lowbit, of ONNX Runtime or of the model, and none should cost the user the whole network.
So the conversion starts again from the source, with some nodes that no step may touch:

1. those that the failure names, which are those that the failing node was made of;
2. where that does not help, their neighbours too, in circles that double;
3. where it names none, the node that completes the shortest failing beginning of the model, which is found by
   bisection.

Every restart adds nodes to those that stay, and there are at most :data:`MOST_ATTEMPTS` of them; then
everything stays. A warning says what happened at which node. Under ``strict``, and where the environment
variable ``LOWBIT_STRICT_CHECKS`` is set, as it is in lowbit's own tests, nothing is taken back and the caller
hears of the failure: there it is a defect that nothing may hide. What ONNX Runtime's optimizer breaks is no
defect of lowbit's; there too it is taken back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from lowbit.errors import CheckError, LowBitError, OptimizerError, UnsupportedError, raise_if_out_of_memory
from lowbit.frontends.load import Source
from lowbit.graph.reasons import StepError
from lowbit.graph.subgraphs import inputs_of
from lowbit.lowering.lowering import WRITTEN_FOR
from lowbit.proto.report import Report
from lowbit.rewrites.apply import POSITION, Failed, attach_report

MOST_ATTEMPTS = 32
"""Conversions of one model, a few for each defect in it; a network of 1000 nodes is bisected in 10."""

STRICT_CHECKS = "LOWBIT_STRICT_CHECKS"

Staying = Mapping[int, str]
"""The positions, in the source, of the nodes that no step may touch, and why."""


@dataclass(frozen=True)
class Attempt:
    """One conversion, not yet checked.

    Attributes:
        proto: the converted model.
        report: what became of every node.
        outputs: its outputs as inference knows them; the model may say less.
    """

    proto: onnx.ModelProto
    report: Report
    outputs: Sequence[onnx.ValueInfoProto] = ()


Convert = Callable[[ir.Model, Staying, Failed], Attempt]
"""Converts a model from beginning to end, in place, but for some nodes."""


@dataclass(frozen=True)
class _Failure:
    """Why an attempt is of no use, and the positions of the nodes that it is about, if that is known."""

    error: Exception
    where: frozenset[int] = frozenset()

    @property
    def message(self) -> str:
        text = f"{self.error}" if isinstance(self.error, LowBitError) else _described(self.error)
        return text.splitlines()[0] if text else type(self.error).__name__

    @property
    def request(self) -> str:
        return "" if isinstance(self.error, OptimizerError) else "; please report this"


def convert_what_holds(
    source: Source, convert: Convert, *, strict: bool, verify: bool
) -> tuple[onnx.ModelProto, Report]:
    """Converts a model; what fails stays as it was.

    Args:
        source: the model; its graph is rewritten.
        convert: how.
        strict: raise instead of leaving something as it was.
        verify: whether the result is checked.

    Returns:
        The converted model, and the report.

    Raises:
        ModelError: if ONNX Runtime refuses the model and its conversion; if ``strict``, or in lowbit's own
            tests, if anything fails.
        UnsupportedError: if ``strict``, instead of an exception that is no error of lowbit's.
    """
    search = _Search(source, convert, strict, verify)
    result = search.run()
    return result.proto, result.report


class _Search:
    """The attempts at one model."""

    def __init__(self, source: Source, convert: Convert, strict: bool, verify: bool):
        self.source, self.convert = source, convert
        self.strict, self.verify = strict, verify
        self.attempts = 0
        self.warnings: dict[str, None] = {}
        self.model = _inlined(source.model)
        nodes = attach_report(self.model.graph, {}).nodes
        self.names = [f"{node.op_type} '{node.name}'" for node in nodes]
        self.links = _links_between(self.model.graph)

    @property
    def fails_loudly(self) -> bool:
        """Whether a failure ends the conversion."""
        return self.strict or os.environ.get(STRICT_CHECKS, "") not in ("", "0")

    def run(self) -> Attempt:
        """The first attempt that holds."""
        staying: dict[int, str] = {}
        while True:
            found = self.attempt(staying)
            if isinstance(found, Attempt):
                for warning in self.warnings:
                    found.report.warn(warning)
                return found
            if self.fails_loudly and not isinstance(found.error, OptimizerError):
                raise self._as_stated(found.error)
            added = self._circle(found.where, staying) or self._culprit(staying)
            if not added or self.attempts >= MOST_ATTEMPTS:
                return self._untouched(found)
            self._warn(found.where or added, added, found)
            staying |= {position: self._reason(found) for position in added - staying.keys()}

    def attempt(self, staying: Staying) -> Attempt | _Failure:
        """One conversion and its check."""
        from lowbit.conversion.check import check_converted

        model = self.model if self.attempts == 0 else _inlined(self.source.again().model)
        self.attempts += 1
        try:
            found = self.convert(model, staying, self._rule_failed)
            if self.verify:
                check_converted(found.proto, found.outputs, self.source.proto)
        except StepError as error:
            return _Failure(error.error, _positions(error.nodes))
        except CheckError as error:
            written = [node for node in model.graph if node.name in error.nodes]
            return _Failure(error, _positions(written))
        except (LowBitError, MemoryError):
            raise
        except Exception as error:  # a defect may show as anything
            raise_if_out_of_memory(error)
            return _Failure(error)
        return found

    def _rule_failed(self, node: ir.Node, error: Exception) -> None:
        """A rule that only reads the graph has failed at a node, which stays."""
        if self.fails_loudly:
            raise StepError((node,), error) from error
        self._warn(_positions((node,)), (), _Failure(error))

    def _circle(self, where: frozenset[int], staying: Staying) -> frozenset[int]:
        """The nodes around some, those included, in the smallest circle that holds a new one; else none."""
        found, radius = where, 0
        while found and found <= staying.keys():
            radius = 2 * radius or 1
            wider = self._around(where, radius)
            if wider == found:
                return frozenset()
            found = wider
        return found

    def _culprit(self, staying: Staying) -> frozenset[int]:
        """The node that completes the shortest failing beginning; none if a model left alone fails too."""
        if not self._holds(staying, 0):
            return frozenset()
        holds, fails = 0, len(self.names)
        while fails - holds > 1 and self.attempts < MOST_ATTEMPTS:
            middle = (holds + fails) // 2
            if self._holds(staying, middle):
                holds = middle
            else:
                fails = middle
        return frozenset(range(holds, fails))

    def _holds(self, staying: Staying, count: int) -> bool:
        rest = dict.fromkeys(range(count, len(self.names)), "")
        return isinstance(self.attempt({**rest, **staying}), Attempt)

    def _around(self, where: frozenset[int], radius: int) -> frozenset[int]:
        found, edge = set(where), set(where)
        for _ in range(radius):
            edge = {other for position in edge for other in self.links[position]} - found
            found |= edge
        return frozenset(found)

    def _untouched(self, failure: _Failure) -> Attempt:
        """The source as it is, where nothing of its conversion holds."""
        from lowbit.conversion.check import refusal_of

        if refusal_of(self.source.proto) is not None:
            raise self._as_stated(failure.error)
        source = self.source.again()
        report = attach_report(_inlined(source.model).graph, {})
        for entry in report.nodes:
            entry.action, entry.reason = "kept", self._reason(failure)
        for warning in self.warnings:
            report.warn(warning)
        report.warn(f"nothing was converted: {failure.message}{failure.request}")
        proto = onnx.ModelProto()
        proto.CopyFrom(self.source.proto)
        return Attempt(proto, report)

    def _as_stated(self, error: Exception) -> Exception:
        if isinstance(error, LowBitError) or not self.strict:
            return error
        stated = UnsupportedError(f"strict: lowbit fails: {_described(error)}; please report this")
        stated.__cause__ = error
        return stated

    @staticmethod
    def _reason(failure: _Failure) -> str:
        return f"its conversion was taken back: {failure.message}"

    def _warn(self, where: Iterable[int], added: Iterable[int], failure: _Failure) -> None:
        named = [self.names[position] for position in sorted(where)]
        what = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        further = len(set(added) - set(where))
        circle = f", with {further} nodes around it," if further else ""
        self.warnings[f"{what}{circle} stays as it was: {failure.message}{failure.request}"] = None


def _inlined(model: ir.Model) -> ir.Model:
    """A model without functions of its own, in place: its nodes are those that reports are about."""
    if model.functions:
        InlinePass()(model)
    return model


def _links_between(graph: ir.Graph) -> dict[int, set[int]]:
    """The nodes that every node of a model reads from and that read from it, all by their positions."""
    positions = {node: position for position, node in enumerate(graph)}
    links: dict[int, set[int]] = {position: set() for position in positions.values()}
    for node, position in positions.items():
        for value in inputs_of(node):
            producer = value.producer()
            maker = None if producer is None else positions.get(producer)
            if maker is not None:
                links[maker].add(position)
                links[position].add(maker)
    return links


def _positions(nodes: Iterable[ir.Node]) -> frozenset[int]:
    """What nodes were made of, by positions in the source; of the nearest around them where they are new."""
    seen, edge = set(), [*nodes]
    while edge:
        found: set[int] = set()
        for node in edge:
            made_of = (node, *node.meta.get(WRITTEN_FOR, ()))
            found |= {origin.meta[POSITION] for origin in made_of if POSITION in origin.meta}
        if found:
            return frozenset(found)
        seen.update(edge)
        near = [value.producer() for node in edge for value in node.inputs if value is not None]
        near += [user for node in edge for output in node.outputs for user in output.consumers()]
        edge = [node for node in dict.fromkeys(near) if node is not None and node not in seen]
    return frozenset()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
