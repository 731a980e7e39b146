"""Does a converted model compute what its original says? Node by node, and as a whole.

Comparing two networks end to end says little: one code that rounds the other way at a tie spreads through
every later layer. So the check is local to the node. The original runs in stock ONNX Runtime with the codes
at every quantizer exposed; every lowbit node is then fed *the original's* codes, and its output is compared

- with the op's numpy definition on the same codes: no element may differ;
- with the original's own codes at that place: equal, or one step apart where the exact real number lies
  within the float32 rounding error of a tie (ONNX Runtime evaluates some nodes by another formula, and
  differs from itself there between machines). Everything else is *unexplained*.

ONNX Runtime's optimizer does not always keep to the file: of two quantizers in a row it makes one on a third
grid. Where elements are unexplained, the original runs once more without it.

An original that computes in float16 was converted as if it said float32. All of this is done with that
float32 model, and once more with the original by its letter, where float16's roundings count as well.

How the values of the two graphs belong together is recorded by the converter in the model's metadata, under
``lowbit.provenance``.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from lowbit.checking.inner_values import Observed, Stock, exact_options
from lowbit.errors import LowBitError, ModelError, RefusedError
from lowbit.exporters.writer import captured
from lowbit.frontends.half import widened
from lowbit.frontends.standard_ops import needs_standard_form, standard_form, written_out
from lowbit.ops import DOMAIN, chain, evaluate, ties
from lowbit.proto.feeds import Model, as_proto, batches, constant_values, load_samples, random_feeds
from lowbit.proto.provenance import Place, other_source, read_places, widens_float16
from lowbit.schemas import attributes_of
from lowbit.sessions.devices import canonical, runs_as_it_is
from lowbit.sessions.placement import RECORD, assignments
from lowbit.sessions.session import open_session, run_session, session, told_apart

if TYPE_CHECKING:
    import onnxruntime

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]

_RESHAPES = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Ops that keep the order of elements."""
SUFFIX = "/lowbit"  # of the outputs of the model that holds every lowbit node side by side


@dataclass
class NodeCheck:
    """One lowbit node on the original's own codes."""

    name: str
    op_type: str
    source: str | None  # the value of the original that it was compared with
    runs: int = 0
    elements: int = 0  # of all its outputs; 0 where they are empty
    wrong: int = 0  # differ from the numpy definition
    equal: int = 0  # equal to the original's value
    near_tie: int = 0  # differ within float32 rounding; for codes that means one step, at a tie
    unexplained: int = 0
    note: str = ""

    @property
    def ok(self) -> bool:
        """The node was run, no element contradicts its definition, and none the original."""
        return self.runs > 0 and not self.wrong and not self.unexplained


@dataclass
class OutputCheck:
    """One output of the two whole models."""

    name: str
    elements: int = 0
    equal: int = 0
    max_difference: float = 0.0
    samples: int = 0
    top1_equal: int | None = None  # None: not a vector of class scores
    changed: list[int] = field(default_factory=list)  # samples with another top-1


@dataclass
class VerifyReport:
    """What :func:`verify` found; ``ok`` is its verdict."""

    samples: int = 0
    nodes: list[NodeCheck] = field(default_factory=list)
    outputs: list[OutputCheck] = field(default_factory=list)
    codes: int = 0  # codes inside the two whole models that were compared
    codes_equal: int = 0
    notes: list[str] = field(default_factory=list)
    float16: VerifyReport | None = None  # with the original's own numbers, where it computes in float16

    @property
    def ok(self) -> bool:
        """Every node is exact and nothing is unexplained; whole-model agreement is information only."""
        return all(node.ok for node in self.nodes) and (self.float16 is None or self.float16.ok)

    def total(self, counter: str) -> int:
        """The sum of one counter of :class:`NodeCheck` over all nodes."""
        return sum(int(getattr(node, counter)) for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        counters = ("elements", "wrong", "equal", "near_tie", "unexplained")
        return {
            "ok": self.ok,
            "samples": self.samples,
            "totals": {counter: self.total(counter) for counter in counters},
            "codes": self.codes,
            "codes_equal": self.codes_equal,
            "nodes": [{**asdict(node), "ok": node.ok} for node in self.nodes],
            "outputs": [asdict(output) for output in self.outputs],
            "notes": list(self.notes),
            **({} if self.float16 is None else {"float16": self.float16.to_dict()}),
        }


def verify(
    model: Model,
    against: Model,
    *,
    data: str | os.PathLike[str] | Mapping[str, Array] | None = None,
    samples: int | None = None,
    seed: int = 0,
    shapes: Mapping[str, list[int]] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks a converted model against the model it was made from.

    Args:
        model: the converted model: a path, a ModelProto, or what :func:`lowbit.convert` returned.
        against: its original.
        data: samples, an .npz (arrays named like the inputs, samples along the first dim) or such a dict;
            random inputs that cover every code of the first quantizer when absent.
        samples: how many samples to use; all of ``data``, or 2 random ones, when absent.
        seed: of the random samples.
        shapes: sizes of inputs with symbolic dims, for random samples.
        threads: intra-op threads of the sessions.
        device: where the converted model runs; its original always runs on the CPU.
        progress: called with (samples done, samples in all).

    Returns:
        The counts per node and for the whole model.

    Raises:
        ModelError: if a model cannot be read or run, or ``model`` was not made from ``against``.
    """
    converted, given = as_proto(model), as_proto(against)
    for node in converted.graph.node:
        if node.op_type == "LowBitImage":
            raise ModelError(
                "expected a model that takes what its original takes, found one that takes pictures at its "
                f"input '{node.input[0]}'; verify what `lowbit convert` makes without --preprocess: the rest "
                "is the same"
            )
    notes = []
    if isinstance(against, (str, os.PathLike)) and other_source(converted, against):
        notes.append(
            f"{os.fspath(against)} is not the very file that was converted (its sha256 differs); values are "
            "matched by name"
        )
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else converted.graph.name
    feeds = _samples(given, data, samples, seed, shapes)
    compare = functools.partial(_compare_with, converted, name, feeds, threads, canonical(device), progress)
    if not widens_float16(converted):
        return compare(given, notes)
    notes.append("the original was compared with float32 in the place of float16, as it was converted")
    report = compare(widened(given), notes)
    report.float16 = compare(given, [], in_float16=True)
    return report


def _compare_with(
    converted: onnx.ModelProto,
    name: str,
    feeds: list[dict[str, Array]],
    threads: int | None,
    device: str,
    progress: Progress | None,
    given: onnx.ModelProto,
    notes: list[str],
    *,
    in_float16: bool = False,
) -> VerifyReport:
    """Compares a converted model called ``name`` with an original, which may be stated in any form."""
    original = standard_form(given)
    mapping = read_places(converted, original)
    if needs_standard_form(given):
        notes.append(
            "ONNX Runtime does not load the original; it was compared with its quantizers as float operations"
        )
    compare = functools.partial(
        _compare, converted, original, mapping, feeds, threads, device, progress, notes, in_float16=in_float16
    )
    try:
        report = compare(optimize=True)
    except RefusedError as error:  # of the converted model: the original's is a note
        raise told_apart(error, name, original) from error
    if report.ok:
        return report
    notes.append(
        f"stock ONNX Runtime: its optimizer changes {report.total('unexplained')} elements; it was "
        "compared without optimization, convolutions in float"
    )
    literal = compare(optimize=False)
    return literal if literal.ok else report


def _compare(
    converted: onnx.ModelProto,
    original: onnx.ModelProto,
    mapping: Mapping[str, Place],
    feeds: list[dict[str, Array]],
    threads: int | None,
    device: str,
    progress: Progress | None,
    notes: list[str],
    *,
    in_float16: bool,
    optimize: bool,
) -> VerifyReport:
    """Compares the two models on samples; ``in_float16`` and ``optimize`` are about the original."""
    report = VerifyReport(notes=list(notes))
    wanted = {place.source for place in mapping.values()}
    stock = Stock(original, wanted, threads, report.notes, optimize=optimize)
    local = _Local(converted, original, mapping, threads, device, in_float16=in_float16)
    if not local.nodes:
        report.notes.append("the converted model has no lowbit node; only whole models were compared")
    whole = _Whole(converted, mapping, threads, device)
    for done, feed in enumerate(feeds):
        if progress is not None:
            progress(done, len(feeds))
        values = stock.run(feed)
        local.check(feed, values)
        whole.check(feed, values, report)
    if progress is not None:
        progress(len(feeds), len(feeds))
    if local.left:
        report.notes.append(
            f"{len(local.left)} of the {len(local.nodes)} lowbit nodes run as custom ops on the CPU, not on "
            f"'{device}', such as {local.left[0]}; `lowbit inspect --device {device}` says why"
        )
    report.nodes, report.samples = list(local.checks.values()), len(feeds)
    return report


# ---- every lowbit node on the original's codes


class _Local:
    """All lowbit nodes of the converted model side by side, each fed what the original has at that place."""

    def __init__(
        self,
        converted: onnx.ModelProto,
        original: onnx.ModelProto,
        mapping: Mapping[str, Place],
        threads: int | None,
        device: str,
        *,
        in_float16: bool,
    ) -> None:
        self.model, self.original, self.mapping = converted, original, mapping
        self.threads, self.device, self.in_float16 = threads, device, in_float16
        self.constants = constant_values(converted)
        self.producer = {name: node for node in converted.graph.node for name in node.output}
        self.moves: dict[str, onnx.NodeProto] = {}  # by what they move whole
        for node in converted.graph.node:
            if (node.domain == "" and node.op_type in (*_RESHAPES, "Transpose")) or _is_depth_to_space(node):
                self.moves.setdefault(node.input[0], node)
        stated = (*converted.graph.output, *converted.graph.value_info)  # an output may say nothing
        self.types = {value.name: value.type.tensor_type.elem_type for value in stated}
        self.nodes = [node for node in converted.graph.node if node.domain == DOMAIN]
        self.checks = {node.output[0]: self._new_check(node) for node in self.nodes}
        self.session: onnxruntime.InferenceSession | None = None
        self.small: dict[str, tuple[onnx.ModelProto, onnxruntime.InferenceSession]] = {}
        self.left: list[str] = []  # the nodes that do not run on the device
        self.known: dict[str, Array] = {}  # values of the converted model, of the present sample

    def _new_check(self, node: onnx.NodeProto) -> NodeCheck:
        place = self.mapping.get(node.output[0])
        return NodeCheck(node.name or node.output[0], node.op_type, place.source if place else None)

    def check(self, feed: Mapping[str, Array], values: Mapping[str, Array]) -> None:
        """Adds one sample to the counts."""
        originals = {
            name: place.carry(values[place.source])
            for name, place in self.mapping.items()
            if place.source in values
        }
        known = self.known = {**originals, **feed}  # grows by what is computed from these
        fed: dict[str, Array] = {}
        ready = []
        for node in self.nodes:
            try:
                inputs = [self._value(name, known) if name else None for name in node.input]
            except LowBitError as error:
                self.checks[node.output[0]].note = str(error)
                continue
            ready.append((node, inputs))
            for name, value in zip(node.input, inputs, strict=True):
                if name and name not in self.constants and value is not None:
                    fed[name] = value

        if not ready:
            return
        if self.session is None:
            self.session = self._side_by_side([node for node, _ in ready], fed)
        results = run_session(self.session, fed)
        for node, inputs in ready:
            got = results[node.output[0] + SUFFIX]
            self._compare(node, inputs, got, self._expected(node.output[0], originals, got.shape), values)

    def _expected(
        self, name: str, originals: Mapping[str, Array], shape: Sequence[int] | None
    ) -> Array | None:
        """What the original has for a value; where a quantizer was moved, it has that of a later place."""
        found, move = originals.get(name), self.moves.get(name)
        if found is None and move is not None and move.op_type in _RESHAPES:
            found = self._expected(move.output[0], originals, None)
        elif found is None and move is not None and shape is not None and _is_depth_to_space(move):
            found = self._expected(move.output[0], originals, None)
            if found is not None and found.size == math.prod(shape):
                places = np.arange(found.size, dtype=np.int32).reshape(shape)
                places = evaluate(move.op_type, attributes_of(move), [places])
                moved, found = found, np.empty_like(found, shape=found.size)
                found[places.ravel()] = moved.ravel()
        elif found is None and move is not None and shape is not None:
            perm = attributes_of(move).get("perm", [*range(len(shape))][::-1])
            found = self._expected(move.output[0], originals, [shape[axis] for axis in perm])
            if found is not None and found.ndim == len(perm):
                found = found.transpose(np.argsort(perm))
        if found is None or shape is None or found.size != math.prod(shape):
            return found
        return found.reshape(shape)

    def _compare(
        self,
        node: onnx.NodeProto,
        inputs: list[Array | None],
        got: Array,
        expected: Array | None,
        values: Mapping[str, Array],
    ) -> None:
        check, attrs = self.checks[node.output[0]], attributes_of(node)
        check.runs += 1
        check.elements += got.size
        definition = evaluate(node.op_type, attrs, inputs)
        same_form = definition.shape == got.shape and definition.dtype == got.dtype
        check.wrong += int(np.sum(~_same(got, definition))) if same_form else got.size
        if expected is None:
            check.note = check.note or "nothing of the original to compare with"
            return
        if expected.size != got.size:
            check.unexplained += got.size
            check.note = f"has the shape {list(got.shape)}, the original {list(expected.shape)}"
            return
        equal = _same(got, expected)
        check.equal += int(equal.sum())
        if equal.all():
            return
        chain = self._chain(node, attrs, inputs, values)
        if chain is not None and self.in_float16:
            with np.errstate(all="ignore"):
                chain = chain.in_float16()
        if chain is None:
            explained = self._explained_by_maker(node, attrs, inputs, expected) & ~equal
        else:
            explained = chain.explains(got, expected) & ~equal
        check.near_tie += int(explained.sum())
        check.unexplained += int((~equal & ~explained).sum())

    def _explained_by_maker(
        self, node: onnx.NodeProto, attrs: Mapping[str, Any], inputs: list[Array | None], expected: Array
    ) -> npt.NDArray[np.bool_]:
        """Where what only moves or chooses codes may give others, those that it reads being rounded at ties.

        A quantizer that was moved above it leaves nothing of the original to compare these codes with.
        """
        maker, codes = self.producer.get(node.input[0]), inputs[0]
        moves = node.op_type in ("LowBitMaxPool", "LowBitResize")
        if (
            not moves
            or maker is None
            or maker.domain != DOMAIN
            or node.input[0] in self.mapping
            or codes is None
        ):
            return np.zeros(expected.shape, bool)
        read = [self._value(name, self.known) if name else None for name in maker.input]
        rounded = self._chain(maker, attributes_of(maker), read, {})
        if rounded is None or not np.issubdtype(codes.dtype, np.integer):
            return np.zeros(expected.shape, bool)
        if self.in_float16:
            with np.errstate(all="ignore"):
                rounded = rounded.in_float16()
        limits, ends = np.iinfo(codes.dtype), []
        for step in (-1, 1):
            other = np.clip(codes.astype(np.int64) + step, limits.min, limits.max).astype(codes.dtype)
            may_be = np.where(rounded.explains(codes, other), other, codes)
            ends.append(evaluate(node.op_type, attrs, [may_be, *inputs[1:]]))
        return np.asarray((ends[0] <= expected) & (expected <= ends[1]))

    @functools.cached_property
    def written(self) -> onnx.ModelProto:
        """The original with operators such as QLinearSigmoid written out between their quantizers."""
        return written_out(self.original)

    def _chain(
        self,
        node: onnx.NodeProto,
        attrs: Mapping[str, Any],
        inputs: list[Array | None],
        values: Mapping[str, Array],
    ) -> ties.Chain | None:
        if node.op_type == "LowBitLookup":
            return self._lookup_chain(node, values)
        with np.errstate(all="ignore"):
            return chain(node.op_type, attrs, inputs)

    def _lookup_chain(self, node: onnx.NodeProto, values: Mapping[str, Array]) -> ties.Chain | None:
        """The real numbers behind a table: the original nodes between its two quantizers, unoptimized."""
        before, after = self.mapping.get(node.input[0]), self.mapping.get(node.output[0])
        if before is None or after is None or before.rounded or after.rounded:
            return None
        codes = values[before.source]
        piece = _between(self.written, before.source, codes, after.source)
        if piece is None:
            return None
        model, scale, inner = piece
        try:
            opened = open_session(model, exact_options(self.threads, optimize=False))
            nudged = _nudges(inner, ties.FLOAT16_ROUNDING * 3 if self.in_float16 else ties.ROUNDING * 16)
            results = [run_session(opened, {before.source: codes, **nudges}) for nudges in nudged]
        except ModelError:  # an odd piece of graph explains nothing; the differences are then unexplained
            return None
        reals = [np.asarray(real, np.float64) for result in results for real in result.values()]
        if after.perm is not None:
            reals = [real.transpose(after.perm) for real in reals]
        value, *others = reals
        size = np.maximum(np.abs(value), scale)
        error = 16 * ties.ROUNDING * size
        return ties.Nudged(value, error, np.asarray(scale, np.float64), size=size, others=others)

    def _value(self, name: str, known: dict[str, Array]) -> Array:
        """A value of the converted model, the original's where it has one, otherwise computed from those."""
        if name in known:
            return known[name]
        if name in self.constants:
            return self.constants[name]
        node = self.producer.get(name)
        if node is None:
            raise LowBitError(f"its input '{name}' has no counterpart in the original")
        if node.domain == DOMAIN:
            inputs = [self._value(i, known) if i else None for i in node.input]
            made = evaluate(node.op_type, attributes_of(node), inputs)
            # What moves it is fed the original's codes, too.
            expected = self._expected(name, known, made.shape) if name in self.moves else None
            fits = expected is not None and expected.dtype == made.dtype and expected.shape == made.shape
            known[name] = expected if expected is not None and fits else made
        else:
            read = sorted(({i for i in node.input if i} | captured(node)) - set(self.constants))
            known.update(self._run_standard(node, {i: self._value(i, known) for i in read}))
        return known[name]

    def _run_standard(self, node: onnx.NodeProto, given: Mapping[str, Array]) -> dict[str, Array]:
        """One node of ONNX Runtime's own between lowbit nodes, on what it reads that is not constant."""
        key = node.output[0]
        if key not in self.small:
            constant = sorted(({i for i in node.input if i} | captured(node)) & set(self.constants))
            graph = helper.make_graph(
                [node],
                "one_node",
                [_value_info(name, value) for name, value in given.items()],
                [onnx.ValueInfoProto(name=name) for name in node.output if name],
                [onnx.numpy_helper.from_array(self.constants[name], name) for name in constant],
            )
            model = helper.make_model(graph, opset_imports=list(self.model.opset_import))
            model.ir_version = self.model.ir_version
            self.small[key] = (model, open_session(model, exact_options(self.threads)))
        model, opened = self.small[key]
        try:
            return run_session(opened, given)
        except ModelError as refusal:
            # ONNX Runtime has no cubic Resize of uint8, yet runs a model where its optimizer puts a Transpose
            # in front of one. By itself such a node runs by the definition that onnx carries.
            try:
                values = ReferenceEvaluator(model).run(None, dict(given))
            except Exception:  # a definition may miss, or fail on, whatever ONNX Runtime refuses
                raise refusal from None
            return {value.name: got for value, got in zip(model.graph.output, values, strict=True)}

    def _side_by_side(
        self, nodes: list[onnx.NodeProto], fed: Mapping[str, Array]
    ) -> onnxruntime.InferenceSession:
        """One model in which every activation that a lowbit node reads is a graph input."""
        copies = []
        for node in nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.output[0] += SUFFIX
            copies.append(copy)
        used = {name for node in nodes for name in node.input if name in self.constants}
        graph = helper.make_graph(
            copies,
            "lowbit_nodes",
            [_value_info(name, value) for name, value in fed.items()],
            [self._output_info(node.output[0]) for node in nodes],
            [onnx.numpy_helper.from_array(self.constants[name], name) for name in sorted(used)],
        )
        model = helper.make_model(graph, opset_imports=list(self.model.opset_import))
        model.ir_version = self.model.ir_version
        options = exact_options(self.threads)
        if runs_as_it_is(self.device):
            return session(model, device=self.device, sess_options=options)
        options.add_session_config_entry(RECORD, "1")
        opened = session(model, device=self.device, sess_options=options)
        _, left = assignments(opened)
        self.left = [node.name for node in nodes if node.name in left]
        return opened

    def _output_info(self, name: str) -> onnx.ValueInfoProto:
        """A node's output under its own name; ONNX Runtime does not tell our ops of a scalar's type."""
        info = onnx.ValueInfoProto(name=name + SUFFIX)
        stated = self.types.get(name)
        if stated:
            info.type.tensor_type.elem_type = stated
        return info


def _is_depth_to_space(node: onnx.NodeProto) -> bool:
    return bool(node.domain == DOMAIN and node.op_type == "LowBitDepthToSpace")


def _between(
    model: onnx.ModelProto, start: str, codes: Array, end: str
) -> tuple[onnx.ModelProto, float, dict[str, Array]] | None:
    """The nodes from the codes ``start`` to the float that the quantizer of ``end`` rounds.

    Returns:
        A model of them, the scale of that quantizer, and the scales of the quantizers between: by the name of
        an input of the model that is added to what such a quantizer rounds.
    """
    producer = {name: node for node in model.graph.node for name in node.output}
    quantizer = producer.get(end)
    while quantizer is not None and quantizer.op_type == "Clip":  # QCDQ bounds behind the quantizer
        quantizer = producer.get(quantizer.input[0])
    if quantizer is None or quantizer.op_type != "QuantizeLinear":
        return None
    scale = constant_values(model, {quantizer.input[1]}).get(quantizer.input[1])
    if scale is None:
        return None
    real, between, pending = quantizer.input[0], set(), [quantizer.input[0]]
    while pending:
        name = pending.pop()
        if name and name != start and name not in between and name in producer:
            between.add(name)
            pending.extend(producer[name].input)
    nodes: list[onnx.NodeProto] = []
    inner: dict[str, Array] = {}
    for node in model.graph.node:
        if not between.intersection(node.output):
            continue
        step = constant_values(model, {node.input[1]}) if node.op_type == "QuantizeLinear" else {}
        if step:
            nudge, nudged = f"{node.output[0]}/nudge", onnx.NodeProto()
            inner[nudge] = next(iter(step.values())).max()
            nodes.append(helper.make_node("Add", [node.input[0], nudge], [f"{nudge}d"]))
            nudged.CopyFrom(node)
            nudged.input[0] = f"{nudge}d"
            node = nudged
        nodes.append(node)
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "between",
        [_value_info(start, codes), *(_value_info(name, np.asarray(scale)) for name, scale in inner.items())],
        [onnx.ValueInfoProto(name=real)],
        [init for init in model.graph.initializer if init.name in used],
    )
    piece = helper.make_model(graph, opset_imports=list(model.opset_import))
    piece.ir_version = model.ir_version
    return piece, float(scale.max()), inner


def _nudges(inner: Mapping[str, Array], rounding: float) -> list[dict[str, Array]]:
    """What to add to what inner quantizers round: nothing, then a rounding error, to each and to all."""
    error = rounding * 256  # of the largest code
    groups = [{name} for name in inner] + ([set(inner)] if len(inner) > 1 else [])
    signs: list[tuple[set[str], float]] = [(set(), 0.0), *((g, s * error) for g in groups for s in (1, -1))]
    return [
        {name: np.asarray(sign * step if name in group else 0, step.dtype) for name, step in inner.items()}
        for group, sign in signs
    ]


def _value_info(name: str, value: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
    )


def _same(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Equal elements; a NaN equals a NaN."""
    equal: npt.NDArray[np.bool_] = a == b
    if np.issubdtype(a.dtype, np.floating) and np.issubdtype(b.dtype, np.floating):
        equal = equal | (np.isnan(a) & np.isnan(b))
    return equal


# ---- the two whole models


class _Whole:
    """The converted model from input to output, beside the original."""

    def __init__(
        self, converted: onnx.ModelProto, mapping: Mapping[str, Place], threads: int | None, device: str
    ) -> None:
        self.outputs = [value.name for value in converted.graph.output]
        self.places = {
            name: place
            for name, place in mapping.items()
            if name not in self.outputs and name != place.source
        }
        self.observed = Observed(
            converted,
            set(self.places),
            lambda model, options: session(model, device=device, sess_options=options),
            threads,
        )

    def check(self, feed: Mapping[str, Array], values: Mapping[str, Array], report: VerifyReport) -> None:
        """Adds one sample to the report."""
        results = self.observed.run(feed)
        for name, got in results.items():
            place = self.places.get(name)
            if place and place.source in values and not np.issubdtype(got.dtype, np.floating):
                expected = place.carry(values[place.source])
                report.codes += got.size
                if expected.size == got.size:
                    report.codes_equal += int((expected.reshape(got.shape) == got).sum())
        if not report.outputs:
            report.outputs = [OutputCheck(name) for name in self.outputs if name in values]
        for output in report.outputs:
            _compare_outputs(output, results[output.name], values[output.name])


def _compare_outputs(check: OutputCheck, got: Array, expected: Array) -> None:
    first = check.samples
    check.samples += len(got) if got.ndim else 1
    check.elements += got.size
    check.equal += int(_same(got, expected).sum())
    if got.size:
        difference = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        check.max_difference = max(check.max_difference, float(np.max(difference, initial=0.0)))
    if got.ndim == 2 and got.shape[1] > 1:  # class scores
        same = got.argmax(axis=1) == expected.argmax(axis=1)
        check.top1_equal = (check.top1_equal or 0) + int(same.sum())
        check.changed += [first + int(i) for i in np.flatnonzero(~same)]


# ---- samples


def _samples(
    original: onnx.ModelProto,
    data: str | os.PathLike[str] | Mapping[str, Array] | None,
    samples: int | None,
    seed: int,
    shapes: Mapping[str, list[int]] | None,
) -> list[dict[str, Array]]:
    if data is None:
        return [random_feeds(original, seed + i, shapes) for i in range(2 if samples is None else samples)]
    arrays = dict(data) if isinstance(data, Mapping) else load_samples(data, original)
    return list(batches(arrays, original, samples))
