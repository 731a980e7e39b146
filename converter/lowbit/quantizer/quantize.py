"""``lowbit.quantize``: the order of the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from lowbit.conversion.convert import convert
from lowbit.errors import LowBitError, UnsupportedError
from lowbit.frontends.load import load_model
from lowbit.graph.opsets import NORMAL_FORM_OPSET
from lowbit.graph.quantization import Grid
from lowbit.proto.atomic import check_writable, write_atomically
from lowbit.proto.model_file import save_model
from lowbit.proto.state import State, load_arrays, save_arrays
from lowbit.quantizer.config import Config
from lowbit.quantizer.data import FEW, Data, Spool
from lowbit.quantizer.emit import OPSET_INT2, OPSET_INT4, LayerCodes, Ranged, emit, finish_layer
from lowbit.quantizer.gram import LARGEST, Moments, Unfold, number_type, reads_output, to_rows
from lowbit.quantizer.prepare import prepare, refuse_quantized
from lowbit.quantizer.ranges import (
    Statistics,
    choose_grids,
    code_bounds,
    collect,
    decibels,
    share_concats,
)
from lowbit.quantizer.report import Histogram, LayerRecord, QuantizeReport, Result
from lowbit.quantizer.rounding.layer import chooses, round_layer
from lowbit.quantizer.rounding.problem import code_bounds as weight_bounds
from lowbit.quantizer.runner import Graph, Tensors
from lowbit.quantizer.sites import Layer, Plan, place

Array = npt.NDArray[Any]
Progress = Callable[[int, int, str], None]
"""Called with layers done, layers in all, and what is known so far in words."""

CACHE_BYTES = 1 << 31
"""Bytes of files, by default, that save computing the front of the network again. Half of that does not hold
both ends of ResNet-50's first blocks for 40 images and their mirror images: two fifths of its time."""

_MOMENT_BYTES = 1 << 29
"""Bytes of Gram matrices above which layers that could be measured in one run get a run each."""

_MOST_TRIALS = 8
"""Trial conversions, each of which may find more nodes that have to stay float."""


def quantize(
    model: str | Path | onnx.ModelProto,
    data: Data,
    output: str | Path | None = None,
    *,
    bits: str | None = None,
    config: Config | Mapping[str, Any] | None = None,
    convert_to: str | Path | bool = False,
    threads: int | None = None,
    cache: str | Path | None = None,
    cache_bytes: int = CACHE_BYTES,
    state: str | Path | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Result:
    """Quantizes a float32 network after training, from a few unlabeled images.

    Args:
        model: a file or a proto; float32. data: calibration images as the model reads them: ONNX Runtime's
        ``CalibrationDataReader``, an iterable
            of arrays or dicts (read once), or all samples in one array or dict, along the first dim.
        output: where to write the quantized model; the effective configuration goes beside it, as ``.yaml``.
        bits: ``w4a8``: 4-bit weights, 8-bit activations; 1 to 8 each.
        config: a configuration, or its entries; see :class:`lowbit.quantizer.config.Config`.
        convert_to: also convert the result; a path: write it there.
        threads: of ONNX Runtime's sessions; None: its own choice. The result depends on it, in last bits.
        cache: a folder for temporary files; None: the system's.
        cache_bytes: bound of the files that save computing the front of the network again.
        state: a folder for finished layers, from which an interrupted call with the same arguments goes on.
        progress: called after every layer.
        overwrite: replace ``output`` if it exists.
        options: entries of the configuration, which win over ``config``.

    Returns:
        The quantized model, a QDQ or QCDQ model that any ONNX Runtime runs, and the report.

    Raises:
        LowBitError: for data that do not fit the model, a model that is quantized already, or options that
            mean nothing.
        ModelError: if the model cannot be read or run, or computes NaN or infinity from the data.
        UnsupportedError: if a quantized node does not convert; it names the node and the reason.
        OutputError: if the output cannot be written.

    The rounding is error feedback (Lybrand and Saab, 2021) with GPTQ (Frantar et al., 2022) and coordinate
    descent on a layer's second moments; see ``docs/quantize.md``.
    """
    given = dict(config.to_dict() if isinstance(config, Config) else config or {})
    given |= options
    if bits is not None:
        given["bits"] = bits
    effective = Config.of(given)
    target = None if output is None else Path(output)
    lowbit_target = Path(convert_to) if isinstance(convert_to, (str, Path)) else None
    inputs = () if isinstance(model, onnx.ModelProto) else (Path(model),)
    for path in (target, lowbit_target):
        if path is not None:
            check_writable(path, overwrite=overwrite, inputs=inputs)
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-", dir=cache)))
        except OSError as error:
            raise LowBitError(f"{cache}: no folder for temporary files: {error.strerror or error}") from error
        run = Run(model, data, effective, folder, threads, cache_bytes, state, progress or silent)
        made, report = run.quantize()
    converted = None
    checked = _convert(made, run.plan, report)
    if convert_to is not False and convert_to is not None:
        converted = checked
    report.peak_bytes = peak_bytes()
    if target is not None:
        write_atomically(target, lambda path: save_model(made, path, "quantized"), overwrite=overwrite)
        text = json.dumps(report.config, indent=1) + "\n"
        write_atomically(target.with_suffix(".yaml"), lambda path: _save_text(text, path), overwrite=True)
    if lowbit_target is not None and converted is not None:
        converted_to = functools.partial(save_model, checked, what="converted")
        write_atomically(lowbit_target, converted_to, overwrite=overwrite)
    run.finished.forget()
    return Result(made, report, target, converted)


def silent(done: int, total: int, text: str) -> None:
    """The progress that nobody asked for."""


@contextlib.contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the time of what is done meanwhile to that of a stage."""
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def _save_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _convert(model: onnx.ModelProto, plan: Plan, report: QuantizeReport) -> onnx.ModelProto:
    """Converts what was made; every node that was quantized must become a lowbit node, or part of one."""
    result = convert(model)
    left = [
        (island, owner)
        for island in result.report.islands
        if (owner := _owner(island.name, model, plan.quantized)) is not None
    ]
    if left:
        lines = "; ".join(f"{node.op_type} '{owner}': {node.reason}" for node, owner in left[:10])
        raise UnsupportedError(
            f"{len(left)} quantized nodes do not convert: {lines}; leave them float (--nodes-to-exclude)"
        )
    report.converted = True
    for warning in result.report.warnings:
        report.warn(f"convert: {warning}")
    return result.model


def peak_bytes() -> int:
    """The largest resident memory of this process so far; 0 where nothing tells it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if os.uname().sysname == "Darwin" else peak * 1024)


class Run:
    """One quantization: what the steps share. `lowbit.search` runs some of them many times."""

    def __init__(
        self,
        model: str | Path | onnx.ModelProto,
        data: Data,
        config: Config,
        folder: Path,
        threads: int | None,
        cache_bytes: int,
        state: str | Path | None,
        progress: Progress,
    ) -> None:
        self.config, self.folder, self.threads, self.progress = config, folder, threads, progress
        self.cache_bytes = cache_bytes
        self.report = QuantizeReport(config.bits, config=config.to_dict())
        with timed(self.report.seconds, "read"):
            self.source = load_model(model)
            refuse_quantized(self.source)
            proto = self.source.proto
            (folder / "feeds").mkdir()
            self.spool = Spool(proto, data, folder / "feeds", mirror=config.rule("mirror"))
        self.report.images, self.report.batches = self.spool.samples, len(self.spool)
        if self.spool.repeated:
            self.report.warn(
                f"the model's batch is fixed: samples were repeated {self.spool.repeated} times to fill it up"
            )
        key = json.dumps([self.source.sha256, self.spool.digest, config.to_dict(), threads], sort_keys=True)
        self.key = hashlib.sha256(key.encode()).hexdigest()
        self.finished = State(state, self.key)

    def quantize(self) -> tuple[onnx.ModelProto, QuantizeReport]:
        """All steps."""
        statistics = self.open()
        with timed(self.report.seconds, "ranges"):
            self.grids, self.report.tensors, warnings = choose_grids(self.plan, statistics, self.config)
            for warning in warnings:
                self.report.warn(warning)
        self.report.decisions = self.plan.decisions
        self.report.kept_float = self.plan.kept
        with timed(self.report.seconds, "round"):
            codes = self._round_layers()
        with timed(self.report.seconds, "emit"):
            made = self._emit(codes, final=True)[0]
        with timed(self.report.seconds, "check"):
            self.report.outputs = self._compare(codes)
        return made, self.report

    def open(self) -> Statistics:
        """The steps that no width changes: the clean-up, the plan, and what the tensors' values are."""
        with timed(self.report.seconds, "prepare"):
            model, self.report.steps = prepare(self.source, self.spool, self.threads, self._opset())
            # Large networks are in memory once: the source goes, and model and proto share their tensors.
            del self.source
            self.proto = ir.to_proto(model)
            self.model = ir.from_proto(self.proto)
            del model, self.proto.graph.value_info[:]
        with timed(self.report.seconds, "place"):
            self.plan = self._place()
        with timed(self.report.seconds, "ranges"):
            statistics = self._measure()
            share_concats(self.plan, statistics, self.config)
        return statistics

    def _opset(self) -> tuple[int, int]:
        """The opset that the result needs: int4 and int2 are younger than the normal form."""
        config = self.config
        asked = [given.get("weight_bits", 8) for given in config.overrides.values()]
        fewest = min(config.weight_bits, config.first_last, *asked, 8)
        if not config.sub_byte or fewest > 4:
            return NORMAL_FORM_OPSET, 7
        return OPSET_INT4 if fewest > 2 else OPSET_INT2

    # Placement --------------------------------------------------------------------------------------------

    def _place(self) -> Plan:
        """A plan whose every node converts: trial conversions with made-up ranges tell which do not."""
        refused: dict[str, str] = {}
        raw = self._raw_inputs() if self.config.io == "uint8" else set()
        for _ in range(_MOST_TRIALS):
            plan = place(self.model, self.config, refused, raw)
            if not plan.layers:
                reasons = "; ".join(f"'{node}': {reason}" for node, reason in list(plan.kept.items())[:5])
                raise LowBitError(
                    "nothing to quantize: expected a convolution or matrix product with constant float32 "
                    f"weights{f' ({reasons})' if reasons else ''}"
                )
            islands = self._islands(plan)
            fresh = {name: reason for name, reason in islands.items() if name not in refused}
            if not fresh:
                return plan
            refused |= fresh
        return plan

    def _raw_inputs(self) -> set[str]:
        """The inputs that are fed raw images: all of them that are float.

        Raises:
            LowBitError: if the calibration data are no whole numbers from 0 to 255.
        """
        names = {str(v.name) for v in self.model.graph.inputs if v.dtype == ir.DataType.FLOAT}
        for feed in self.spool:
            for name in names:
                array = feed[name]
                odd = array[(array != np.rint(array)) | (array < 0) | (array > 255)]
                if odd.size:
                    raise LowBitError(
                        f"io uint8: input '{name}' is fed {odd[0]:.4g}; expected raw pixels, whole numbers "
                        "from 0 to 255: the preprocessing must be part of the model"
                    )
        return names

    def _islands(self, plan: Plan) -> dict[str, str]:
        """The nodes that the converter would leave float, with its reasons."""
        grids: dict[str, Ranged] = {}
        for name in plan.sites:
            site = plan.grid(name)
            low, high = code_bounds(max(site.bits, 2 if site.signed else 1), signed=site.signed)
            scale = np.full(site.channels or (), 0.05, np.float32)
            zero = np.zeros(scale.shape, np.int32)
            grids[name] = (Grid(scale, zero, None if site.channels is None else 1), low, high)
        codes = {}
        for layer in plan.layers.values():
            rows = to_rows(layer, np.sign(layer.weight))
            scale = np.full(rows.shape[:2], 1e-3)
            codes[layer.node] = finish_layer(layer, rows, scale, np.zeros(layer.rows), grids[layer.x])
        trial, _ = emit(self.proto, plan, grids, codes, final=True)
        result = convert(trial, verify=False)
        found: dict[str, str] = {}
        for island in result.report.islands:
            owner = _owner(island.name, trial, plan.quantized)
            if owner is not None:
                found.setdefault(owner, f"the converter keeps it: {island.reason}")
        return found

    # Ranges -----------------------------------------------------------------------------------------------

    def _measure(self) -> Statistics:
        graph, statistics = Graph(self.proto), Statistics({}, {})
        tensors = Tensors(self.spool, self.folder / "ranges", 0, self.threads)
        for values in tensors.run(graph, list(self.plan.sites)):
            collect(self.plan, values, statistics)
        return statistics

    # Rounding ---------------------------------------------------------------------------------------------

    def _emit(
        self, codes: Mapping[str, LayerCodes], *, final: bool = False
    ) -> tuple[onnx.ModelProto, dict[str, str]]:
        sub_byte = final and self.config.sub_byte
        return emit(self.proto, self.plan, self.grids, codes, sub_byte=sub_byte, final=final)

    def _round_layers(self) -> dict[str, LayerCodes]:
        plan, codes = self.plan, dict[str, LayerCodes]()
        records: dict[str, LayerRecord] = {}
        exact = Graph(self.proto)
        floats = Tensors(self.spool, self.folder / "float", self.cache_bytes // 2, self.threads)
        rounded = Tensors(self.spool, self.folder / "rounded", self.cache_bytes // 2, self.threads)
        nodes = {str(node.name): node for node in self.model.graph}
        start = time.perf_counter()
        for name in plan.layers:
            stored = self._load_state(name)
            if stored is not None:
                codes[name], records[name] = stored
        while len(codes) < len(plan.layers):
            model, read = self._emit(codes)
            graph = Graph(model)
            stage = self._stage(graph, read, codes, rounded.known)
            begun = time.perf_counter()
            moments = self._gather(stage, exact, graph, read, floats, rounded, nodes)
            shared = (time.perf_counter() - begun) / len(stage)
            left = [layer for name, layer in plan.layers.items() if name not in codes and name not in moments]
            floats.forget_all_but(
                exact.behind([n for v in left for n in (v.x, v.y, v.residual) if n], floats.known)[1]
            )
            rounded.forget_all_but(
                graph.behind([read[n] for v in left for n in (v.x, v.residual) if n], rounded.known)[1]
            )
            del model, graph  # a copy of all weights that are not rounded yet
            for layer in stage:
                made = self._round_layer(layer, *moments.pop(layer.node), seconds=shared)
                codes[layer.node], records[layer.node] = made
                self._save_state(layer.node, *made)
            self._tell(records, codes, start)
        self.report.layers = [records[name] for name in plan.layers]
        return codes

    def _tell(self, records: Mapping[str, LayerRecord], codes: Mapping[str, Any], start: float) -> None:
        done, total = len(codes), len(self.plan.layers)
        seconds = time.perf_counter() - start
        last = list(records.values())[-1]
        left = seconds / max(done, 1) * (total - done)
        sqnr = "" if last.sqnr_accumulated is None else f", SQNR {last.sqnr_accumulated:.1f} dB"
        self.progress(
            done, total, f"{last.node[-40:]}{sqnr}, {left:.0f} s left, {peak_bytes() / 1e6:.0f} MB at most"
        )

    def _stage(
        self,
        graph: Graph,
        read: Mapping[str, str],
        codes: Mapping[str, Any],
        known: set[str],
        *,
        wait: bool = True,
    ) -> list[Layer]:
        """The layers whose input no layer that is still to be rounded takes part in; else as many as fit.

        None does in what is ``known``, where the search ends.
        """
        stage: list[Layer] = []
        size = 0
        for layer in self.plan.layers.values():
            if layer.node in codes:
                continue
            front, _ = graph.behind([read[name] for name in (layer.x, layer.residual) if name], known)
            if wait and any(node.name in self.plan.layers and node.name not in codes for node in front):
                continue
            columns = to_rows(layer, layer.weight).shape[2]
            blocks = -(-columns // LARGEST)
            size += 32 * layer.group * columns * -(-columns // blocks)
            if stage and size > _MOMENT_BYTES:
                break
            stage.append(layer)
        return stage

    def _gather(
        self,
        stage: Sequence[Layer],
        exact: Graph,
        graph: Graph,
        read: Mapping[str, str],
        floats: Tensors,
        rounded: Tensors,
        nodes: Mapping[str, ir.Node],
    ) -> dict[str, list[Moments]]:
        """The sums of every layer of a stage, over the images to round for and those that judge."""
        unfolds = {layer.node: Unfold(layer, nodes[layer.node]) for layer in stage}
        moments = {
            name: [
                Moments.empty(unfold.layer, unfold.columns, self.config.seed)
                for _ in range(1 + chooses(unfold.columns))
            ]
            for name, unfold in unfolds.items()
        }
        wanted = [name for layer in stage for name in (layer.x, layer.residual) if name]
        wanted += [layer.y for layer in stage if reads_output(unfolds[layer.node].columns)]
        inputs = [read[name] for layer in stage for name in (layer.x, layer.residual) if name]
        runs = zip(
            floats.run(exact, wanted, keep=[layer.x for layer in stage]),
            rounded.run(graph, inputs, keep=inputs),
            strict=True,
        )
        for index, (x, x_q) in enumerate(runs):
            for layer in stage:
                a, b, y = x[layer.x], x_q[read[layer.x]], x.get(layer.y)
                shift = x[layer.residual] - x_q[read[layer.residual]] if layer.residual else None
                held = self.spool.held_out(index, len(a))
                split = len(moments[layer.node]) > 1 and y is not None and len(y) == len(a)
                masks = [~held, held] if split else [held | True]
                for sums, mask in zip(moments[layer.node], masks, strict=False):
                    if mask.all():
                        sums.add(unfolds[layer.node], a, b, y, shift)
                    elif mask.any():
                        part = None if shift is None else shift[mask]
                        some = None if y is None else y[mask]
                        sums.add(unfolds[layer.node], a[mask], b[mask], some, part)
        return moments

    def _round_layer(
        self, layer: Layer, fit: Moments, held: Moments | None = None, *, seconds: float = 0.0
    ) -> tuple[LayerCodes, LayerRecord]:
        config, start = self.config, time.perf_counter()
        rows = to_rows(layer, layer.weight)
        weights = rows.astype(number_type(rows.shape[2]), copy=False)
        method = config.override(layer.node, "rounding") or config.rounding
        neglected = fit.neglected()
        result = round_layer(
            weights, fit, held, layer.bits, method=method, ridge=config.ridge, sweeps=config.sweeps,
            per_channel=config.per_channel, feedback=config.rule("feedback"), few=self.spool.samples < FEW,
            bias=layer.bias.reshape(weights.shape[:2]),
        )  # fmt: skip
        # ``fit`` holds the sums over all images now.
        bias = layer.bias
        if config.rule("bias") and result.moves_bias and layer.takes_bias:
            # E y = w^ E x^ + bias: y holds the float bias, but its parts by blocks of columns do not.
            bias = result.mean.reshape(-1) + (0 if len(fit.blocks) == 1 else layer.bias)
        codes = finish_layer(layer, result.codes, result.scale, bias, self.grids[layer.x])
        if not config.per_channel:
            codes.scale = codes.scale[:1]
        packed = -(-layer.weight.size * layer.bits // 8)
        output = self._output_bits(layer)
        low, high = weight_bounds(layer.bits)
        record = LayerRecord(
            layer.node, layer.op_type, list(layer.weight.shape), layer.bits, self.plan.grid(layer.x).bits,
            output, layer.x, layer.y, layer.rule, result.method, float(result.ridge),
            decibels(result.power, result.noise), decibels(fit.power, fit.noise),
            decibels(1.0, result.alone), decibels(1.0, result.error),
            decibels(1.0, result.nearest), float(result.error), result.held_out, neglected,
            layer.weight.nbytes, packed, seconds + time.perf_counter() - start,
            Histogram(1.5 * low - 0.5, 1.5 * high + 0.5, result.histogram.tolist()),
        )  # fmt: skip
        if not np.any(layer.weight):
            self.report.warn(f"{layer.op_type} '{layer.node}': all its weights are 0")
        if neglected:
            self.report.warn(
                f"{layer.op_type} '{layer.node}': its Gram matrix goes in {len(fit.blocks)} blocks, which "
                f"neglects {neglected:.0%} of its squared norm"
            )
        columns = weights.shape[-1]
        if fit.count < columns:
            self.report.warn(
                f"{layer.op_type} '{layer.node}': {fit.count} positions of the images for {columns} weights "
                "of a row; the ridge decides the rest, more images would help"
            )
        return codes, record

    def _output_bits(self, layer: Layer) -> int | None:
        """Bits of the tensor that a layer's result is rounded to, past what belongs to it."""
        values = {str(v.name): v for node in self.model.graph for v in node.outputs}
        value = values.get(layer.y)
        while value is not None and str(value.name) not in self.plan.sites:
            users = list(value.consumers())
            if len(users) != 1:
                return None
            value = users[0].outputs[0]
        return None if value is None else self.plan.grid(str(value.name)).bits

    # State ------------------------------------------------------------------------------------------------

    def _state_file(self, name: str) -> Path | None:
        return self.finished.path(hashlib.sha256(name.encode()).hexdigest()[:24])

    def _save_state(self, name: str, codes: LayerCodes, record: LayerRecord) -> None:
        path = self._state_file(name)
        if path is not None:
            save_arrays(path, dataclasses.asdict(record), vars(codes))

    def _load_state(self, name: str) -> tuple[LayerCodes, LayerRecord] | None:
        path = self._state_file(name)
        stored = None if path is None else load_arrays(path)
        if stored is None:
            return None
        facts, arrays = stored
        try:
            record = LayerRecord(**facts | {"histogram": Histogram(**facts["histogram"])})
            return LayerCodes(**arrays), record
        except (KeyError, TypeError):
            return None  # a damaged file: the layer is rounded again

    # Check ------------------------------------------------------------------------------------------------

    def _compare(self, codes: Mapping[str, LayerCodes]) -> dict[str, float | None]:
        """SQNR of every float output over the calibration data."""
        names = [value.name for value in self.proto.graph.output]
        sums = {name: [0.0, 0.0] for name in names}
        exact = Tensors(self.spool, self.folder / "exact", 0, self.threads)
        other = Tensors(self.spool, self.folder / "other", 0, self.threads)
        made = self._emit(codes)[0]  # whose inputs are float, as the calibration data are
        for a, b in zip(exact.run(Graph(self.proto), names), other.run(Graph(made), names), strict=True):
            for name in names:
                if a[name].dtype.kind == "f" and a[name].shape == b[name].shape:
                    difference = a[name].astype(np.float64) - b[name]
                    sums[name][0] += float(np.square(a[name], dtype=np.float64).sum())
                    sums[name][1] += float(np.square(difference).sum())
        return {name: decibels(signal, noise) for name, (signal, noise) in sums.items()}


def _owner(name: str, model: onnx.ModelProto, quantized: set[str]) -> str | None:
    """The quantized node that a node is, or whose quantizer it is; None for nodes that were to stay float."""
    makers = {output: node for node in model.graph.node for output in node.output}
    at = next((node for node in model.graph.node if node.name == name), None)
    while at is not None and at.name not in quantized:
        is_quantizer = at.op_type in ("QuantizeLinear", "DequantizeLinear", "Clip", "Relu")
        at = makers.get(at.input[0]) if is_quantizer else None
    return None if at is None else at.name
