"""``lowbit.finetune``: the order of the steps."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from lowbit import __version__
from lowbit.conversion.convert import convert
from lowbit.errors import LowBitError, UnsupportedError
from lowbit.finetuner.extra import require_torch
from lowbit.finetuner.network import Network, read_network
from lowbit.finetuner.report import BlockRecord, FinetuneReport, FinetuneResult, LayerRecord
from lowbit.frontends.load import Source, load_model
from lowbit.graph.normal_form import is_quantize
from lowbit.proto.atomic import check_writable, write_atomically
from lowbit.proto.model_file import save_model
from lowbit.proto.report import Result
from lowbit.proto.state import State
from lowbit.quantizer.data import Data, Spool
from lowbit.quantizer.prepare import prepare, refuse_quantized
from lowbit.quantizer.quantize import peak_bytes, silent, timed

if TYPE_CHECKING:
    from lowbit.finetuner.engine import Engine
    from lowbit.finetuner.judge import Judge
    from lowbit.finetuner.pool import Pool

Array = npt.NDArray[Any]
Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what is known so far in words."""

MODES = ("distill", "blocks")
"""Ways to train, in the order in which they are tried."""

STEPS = {"distill": 500, "blocks": 200}
"""Steps of the whole network, or of each block, where the caller does not say."""

MANY, STEPS_OF_MANY = 400, 2000
"""Images from which on the whole network is trained for more steps: so many are not learned by heart."""

AGAIN = 2
"""If training the whole helps those that judge, fewer images all train again, for its steps over this.

ResNet-8 at w2a2, 2000 other images: 100 that train instead of 80 take the divergence from 0.607 to 0.568.
Where blocks were the better way (ResNet-20, w2a4) it takes the divergence from 0.344 to 0.335, but
the error of logits from 0.100 to 0.126.
"""

RATE = 0.004
"""Of a code, per step: 0.01 raised the loss of ResNet-8 at w2a4 by two thirds."""

WHOLE, CALM = 2, 4
"""After the blocks the whole network is trained for the steps of one block, and at the rate, over these."""

_ALIKE = 0.3
"""Cosine of a layer's codes and its float weights below which they are not of one network."""


def finetune(
    float_model: str | Path | onnx.ModelProto,
    quantized_model: str | Path | onnx.ModelProto,
    data: Data,
    output: str | Path | None = None,
    *,
    mode: str | None = None,
    steps: int | None = None,
    rate: float = RATE,
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = None,
    convert_to: str | Path | bool = False,
    state: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> FinetuneResult:
    """Trains the codes, scales and biases of a quantized network to do what the float network does.

    Needs PyTorch (``pip install 'lowbit[torch]'``), no labels and no training code. The result has the nodes
    of what was given. Every fifth image does not train, but judges: only what is better on those replaces
    what was given. Where training the whole helps and there are fewer than 400 images, it goes on with all
    of them; nothing judges that.

    Args:
        float_model: a file or a proto; what `lowbit.quantize` was given.
        quantized_model: what it made of it: QDQ or QCDQ.
        data: images, as :func:`lowbit.quantize` takes them, all of one shape; no labels.
        output: where to write the result.
        mode: ``distill`` matches the whole network; ``blocks`` one block after the other and, for a short
            time, the whole; None: distill, and with fewer than 400 images blocks where that does not help.
        steps: of the whole network (None: 500, from 400 images on 2000), or of each block (None: 200).
        rate: how far a code may move in a step.
        seed: of the order of images, their changes and the drops.
        device: cpu, cuda or cuda:N.
        threads: of PyTorch and of ONNX Runtime's sessions; None: their own choice.
        convert_to: also convert the result; a path: write it there.
        state: a folder for what was trained, from which an interrupted call with the same arguments goes on.
        cache: a folder for temporary files; None: the system's.
        progress: called after every step.
        overwrite: replace ``output`` if it exists.

    Returns:
        The quantized model and the report. The same arguments, machine and number of threads give the same
        bytes on a CPU.

    Raises:
        LowBitError: without PyTorch; if the models do not belong together, the images do not fit, or an
            option means nothing.
        ModelError: if a model cannot be read or run.
        UnsupportedError: if the result does not convert where the given model does.
        OutputError: if the output cannot be written.

    Blocks are those of BRECQ (Li et al., 2021), drops those of QDrop (Wei et al., 2022), scales are learned
    as by Esser et al. ("Learned step size quantization", 2019).
    """
    torch = require_torch(device)
    if mode is not None and mode not in MODES:
        raise LowBitError(f"mode: expected {' or '.join(MODES)}, got '{mode}'")
    if steps is not None and steps < 1:
        raise LowBitError(f"steps: expected at least 1, got {steps}")
    if not 0 < rate < 1:
        raise LowBitError(f"rate: expected a part of a code between 0 and 1, got {rate}")
    target = None if output is None else Path(output)
    lowbit_target = Path(convert_to) if isinstance(convert_to, (str, Path)) else None
    inputs = tuple(Path(m) for m in (float_model, quantized_model) if not isinstance(m, onnx.ModelProto))
    for path in (target, lowbit_target):
        if path is not None:
            check_writable(path, overwrite=overwrite, inputs=inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_threads(torch, threads))
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-", dir=cache)))
        except OSError as error:
            raise LowBitError(f"{cache}: no folder for temporary files: {error.strerror or error}") from error
        run = _Run(float_model, quantized_model, data, folder, threads, device)
        made, report = run.run(mode, steps, rate, seed, state, progress or silent)
    result = convert(made)
    _check_converted(result, run.given.proto)
    report.converted = True
    for warning in result.report.warnings:
        report.warnings.append(f"convert: {warning}")
    converted = result.model if convert_to else None
    report.peak_bytes = peak_bytes()
    if target is not None:
        write_atomically(target, lambda path: save_model(made, path, "fine-tuned"), overwrite=overwrite)
    if lowbit_target is not None and converted is not None:
        save = functools.partial(save_model, converted, what="converted")
        write_atomically(lowbit_target, save, overwrite=overwrite)
    run.state.forget()
    return FinetuneResult(made, report, target, converted)


def _check_converted(result: Result, given: onnx.ModelProto) -> None:
    """Checks that what converted before still does: other scales may be worth other sums."""
    if not result.report.islands:
        return
    before = {island.name for island in convert(given, verify=False).report.islands}
    fresh = [island for island in result.report.islands if island.name not in before]
    if fresh:
        lines = "; ".join(f"{node.op_type} '{node.name}': {node.reason}" for node in fresh[:10])
        raise UnsupportedError(f"{len(fresh)} nodes do not convert any more: {lines}")


@contextlib.contextmanager
def _threads(torch: Any, threads: int | None) -> Iterator[None]:
    """Bounds PyTorch's threads, and has cuDNN compute the same sums every time, until the end."""
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[1:]


class _Run:
    """One fine-tuning."""

    state: State

    def __init__(
        self,
        float_model: str | Path | onnx.ModelProto,
        quantized_model: str | Path | onnx.ModelProto,
        data: Data,
        folder: Path,
        threads: int | None,
        device: str,
    ) -> None:
        self.folder, self.threads, self.device = folder, threads, device
        self.source, self.given = load_model(float_model), load_model(quantized_model)
        refuse_quantized(self.source)
        _refuse_float(self.given)
        (folder / "feeds").mkdir()
        self.spool = Spool(self.source.proto, data, folder / "feeds")

    def run(
        self,
        mode: str | None,
        steps: int | None,
        rate: float,
        seed: int,
        state: str | Path | None,
        progress: Progress,
    ) -> tuple[onnx.ModelProto, FinetuneReport]:
        """All steps."""
        from lowbit.finetuner.emit import write_back
        from lowbit.finetuner.engine import Engine
        from lowbit.finetuner.judge import Judge
        from lowbit.finetuner.pool import Pool

        few = self.spool.samples < MANY
        report = FinetuneReport(mode or "distill", rate=rate, seed=seed, device=self.device)
        with timed(report.seconds, "read"):
            cleaned, _ = prepare(self.source, self.spool, self.threads)
            exact = ir.to_proto(cleaned)
            network = read_network(self.given.proto, exact)
            _check_weights(network)
            pool = Pool(exact, self.spool, network.inputs, self.folder)
            engine = Engine(network, self.device)
            judge = Judge(engine, exact, pool, self.threads, seed)
            judge.check_exact()
            report.before = report.after = judge.error(self.given.proto)
        report.images, report.held_out = len(pool.train), len(pool.held)
        facts = [__version__, self.source.sha256, self.given.sha256, self.spool.digest, mode, steps, rate,
                 seed, self.device, self.threads]  # fmt: skip
        self.state = State(state, hashlib.sha256(json.dumps(facts).encode()).hexdigest())
        layers, grids = list(network.layers), range(len(network.grids))
        start = {name: array.copy() for name, array in engine.save(layers, grids).items()}
        made, tried = self.given.proto, []
        for way in [mode] if mode else MODES if few else MODES[:1]:
            engine.load(start)
            report.mode = way
            report.steps = steps or (STEPS[way] if few or way == "blocks" else STEPS_OF_MANY)
            blocks = len(network.blocks()) if way == "blocks" else 0
            whole = max(1, report.steps // WHOLE) if blocks else report.steps
            again = max(1, whole // AGAIN) if few and not blocks else 0
            clock = _Clock(blocks * report.steps + whole + again, progress)
            with timed(report.seconds, way):
                pace = self._blocks(engine, pool, judge, report, clock) if blocks else rate
                self._whole(engine, pool, judge, report, clock, whole, pace)
            with timed(report.seconds, "check"):
                trained = write_back(engine)
                error = judge.error(trained)
            tried.append(f"{error:.4g} by {way}")
            report.kept = error < report.before
            if report.kept:
                made, report.after = trained, error
                break
        if not report.kept:
            report.warnings.append(
                f"the outputs on held-out images did not get better (error {report.before:.4g} -> "
                f"{', '.join(tried)}): the result is the quantized model as it was given"
            )
            return made, report
        if again:
            with timed(report.seconds, "again"):
                report.again = again
                self._whole(engine, pool, judge, report, clock, again, rate, again=True)
                made = write_back(engine)
        report.layers = _changes(engine)
        return made, report

    def _blocks(
        self, engine: Engine, pool: Pool, judge: Judge, report: FinetuneReport, clock: _Clock
    ) -> float:
        """Block by block; returns the rate for the whole, which is less where they are its start."""
        from lowbit.finetuner.blocks import BlockTuning

        tuning = BlockTuning(engine, pool, self.folder, report.steps, report.rate, report.seed)
        count = len(tuning.blocks)
        layers, grids = list(engine.network.layers), range(len(engine.network.grids))
        start_state = {name: array.copy() for name, array in engine.save(layers, grids).items()}
        for index, block in enumerate(tuning.blocks):
            nodes = [engine.network.layers[name].node for name in block.layers]
            stored = self.state.load(f"block{index}")
            if stored is not None:
                facts, arrays = stored
                engine.load(arrays)
                record = BlockRecord(**facts)
                clock.skip(report.steps)
            else:
                start = time.perf_counter()
                tell = functools.partial(clock.tell, f"block {index + 1} of {count}")
                before, after = tuning.tune(index, tell)
                record = BlockRecord(nodes, before, after, after < before, time.perf_counter() - start)
                made = engine.save(block.layers, engine.grids_of(block))
                self.state.save(f"block{index}", record.__dict__, made)
            report.blocks.append(record)
            clock.end(report.steps, f"block {index + 1}: error {record.before:.4f} -> {record.after:.4f}")
            if index + 1 < count:
                tuning.advance(index)
        if judge.engine_error() < report.before:
            return report.rate / CALM
        # Blocks that are better one by one and worse together are no start for the whole.
        engine.load(start_state)
        for record in report.blocks:
            record.kept = False
        return report.rate

    def _whole(
        self,
        engine: Engine,
        pool: Pool,
        judge: Judge,
        report: FinetuneReport,
        clock: _Clock,
        steps: int,
        rate: float,
        *,
        again: bool = False,
    ) -> None:
        """The whole network; again: by all images, also those that have judged."""
        from lowbit.finetuner.distill import Distillation

        few = self.spool.samples < MANY
        numbers = np.arange(self.spool.samples) if again else pool.train
        distillation = Distillation(
            engine, pool, numbers, judge, steps, rate, report.seed, clock.before, few=few
        )
        name = "again" if again else f"whole {report.mode}"
        stored = self.state.load(name)
        first = 0
        if stored is not None:
            first = distillation.resume(*stored)
            clock.skip(first)

        def tell(step: int, error: float) -> None:
            text = "all images" if again else f"held-out error {report.before:.4g} -> {error:.4g}"
            clock.tell(text, step)

        distillation.train(first, tell, functools.partial(self.state.save, name))
        clock.end(steps)


class _Clock:
    """Progress with the time that is left.

    Attributes:
        before: steps of the stages that have ended.
    """

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.progress = total, progress
        self.start, self.skipped, self.before = time.perf_counter(), 0, 0

    def skip(self, steps: int) -> None:
        """Leaves out steps that took no time."""
        self.skipped += steps

    def tell(self, text: str, step: int) -> None:
        """Passes on what is known after some steps of a stage, with the seconds left."""
        done = self.before + step
        spent = time.perf_counter() - self.start
        left = spent / max(1, done - self.skipped) * (self.total - done)
        self.progress(done, self.total, f"{text}, {left:.0f} s left")

    def end(self, steps: int, text: str = "") -> None:
        """Ends a stage of so many steps."""
        if text:
            self.tell(text, steps)
        self.before += steps


def _refuse_float(source: Source) -> None:
    """Refuses a model without quantizers."""
    if not any(is_quantize(node) for node in source.model.graph.all_nodes()):
        raise LowBitError(
            f"{source.path or 'the model to fine-tune'} is not quantized: expected the QDQ or QCDQ model "
            "that `lowbit quantize` wrote, after the float model"
        )


def _check_weights(network: Network) -> None:
    """Refuses two models of one structure and different weights."""
    for layer in network.layers.values():
        shape = [1] * layer.codes.ndim
        shape[layer.axis] = -1
        real = layer.codes * (layer.scale.reshape(shape) if layer.scale.size > 1 else layer.scale)
        norms = float(np.linalg.norm(real) * np.linalg.norm(layer.float_weight))
        if norms and float(np.vdot(real, layer.float_weight)) / norms < _ALIKE:
            raise LowBitError(
                f"the float model does not match: its weights of {layer.op_type} '{layer.node}' are others "
                "than those that were quantized; expected the model that `lowbit quantize` was given"
            )


def _changes(engine: Engine) -> list[LayerRecord]:
    found = []
    for name, layer in engine.network.layers.items():
        changed = engine.codes(name).detach().cpu().numpy() != layer.codes
        growth = float(engine.layers[name].growth.mean().exp())
        found.append(LayerRecord(layer.node, layer.op_type, layer.bits, float(changed.mean()), growth))
    return found
