"""Drawn source models through the converter: what ONNX Runtime loads must convert and agree with it.

The kind `source` of tests/hostile/campaign.py. A case of a seed is a quantized graph of `random_sources.py`;
stock ONNX Runtime runs it twice, literally and optimized, and is the oracle. Verdicts:

- ``equal``: converted; no element differs from its definition, none from stock but at a tie, and outputs are
  equal where no tie was involved;
- ``refused``: stock does not run the source, and lowbit says why it does not convert it;
- ``converted``: stock does not run the source, lowbit converts it;
- ``no oracle``: something would be FAILED, but stock does not say what the source computes. Either it runs
  the source only where its optimizer hides a node that does not run (a DequantizeLinear that lacks the axis
  it names, fused into a QLinearConv), and what it hides depends on options and neighbours. Or a tensor has no
  elements: stock's Concat ignores the other dims of such an operand and never writes its part of the result,
  and stock has empty results where no window fits, which lowbit refuses when it runs;
- FAILED: stock runs the source, and lowbit refuses it, raises, gives a model that does not load or that has
  another interface, wrong or unexplained elements, or other outputs.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import lowbit
import numpy as np
import onnx
from lowbit.checking.inner_values import exact_options, expose
from lowbit.conversion.attempts import STRICT_CHECKS
from lowbit.sessions.session import open_session, run_session

from tests.hostile.campaign import oracle_begins, oracle_done
from tests.hostile.random_sources import random_source
from tests.support import interface


class Fuzzer:
    """One process's part of a campaign."""

    def __init__(self, device: str) -> None:
        self._device = device
        os.environ[STRICT_CHECKS] = "1"  # a conversion that is taken back is a failure

    def case(self, seed: int) -> tuple[str, str]:
        """What the source of a seed is, and its verdict."""
        source = random_source(seed)
        return source.told, verdict(source.model, source.feeds, self._device)


def verdict(model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]], device: str) -> str:
    """What becomes of a source; see the module."""
    overridable = {tensor.name for tensor in model.graph.initializer}
    original = onnx.ModelProto()
    original.CopyFrom(model)  # what may be fed is folded by neither optimizer; lowbit takes it as a constant
    original.graph.ClearField("input")
    original.graph.input.extend(v for v in model.graph.input if v.name not in overridable)
    oracle_begins()
    # Literally as the file says, and optimized: stock breaks some models that it runs, and changes others.
    stock = [_run(original, feeds, None, optimize=optimize) for optimize in (False, True)]
    runs = [bool(outputs) for outputs, _ in stock]
    oracle_done()
    try:
        result = lowbit.convert(model)
    except lowbit.LowBitError as error:
        return f"FAILED: refused: {error}" if any(runs) else "refused"
    except Exception as error:
        return _raised(error)
    if not any(runs):
        return "converted"
    if interface(model) != interface(result.model):
        return "FAILED: another interface"
    literal = len(stock[False][0])
    pairs = []
    for optimize in (False, True):
        theirs = stock[optimize][0][: literal or None]
        if theirs:
            ours, complaint = _run(result.model, feeds[: len(theirs)], device, optimize=optimize)
            if len(ours) < len(theirs):
                bad = f"FAILED: does not run, optimized {optimize}: {complaint}"
                return _unless_unstated(bad, original, feeds[len(ours)], literal=bool(literal))
            pairs.append((ours, theirs))
    for i, feed in enumerate(feeds):
        compared = [(ours[i], theirs[i]) for ours, theirs in pairs if len(theirs) > i]
        if not compared:
            break
        bad = _compare(result.model, original, feed, compared, device, literal=bool(literal))
        if bad:
            return _unless_unstated(bad, original, feed, literal=bool(literal))
    return "equal"


def _unless_unstated(
    bad: str, original: onnx.ModelProto, feed: dict[str, np.ndarray], *, literal: bool
) -> str:
    """What is wrong, unless stock does not say what the source computes from a set of inputs.

    Args:
        bad: what is wrong.
        original: the source.
        feed: the inputs.
        literal: whether stock runs the source as it is written.
    """
    if not literal:
        return "no oracle: hidden by the optimizer"
    names = dict.fromkeys(name for node in original.graph.node for name in node.output if name)
    exposed, _ = expose(
        original, [name for name in names if name not in {v.name for v in original.graph.output}]
    )
    oracle_begins()
    outputs, complaint = _run(exposed, [feed], None, optimize=False)
    oracle_done()
    assert outputs, complaint
    return "no oracle: empty tensors" if any(not value.size for value in outputs[0]) else bad


def _raised(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"FAILED: raised {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"


def _run(
    model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]], device: str | None, *, optimize: bool
) -> tuple[list[list[np.ndarray]], str]:
    """The outputs for each set of inputs, up to the first that is refused, and the complaint.

    ``device`` is None for stock.
    """
    results: list[list[np.ndarray]] = []
    options = exact_options(1, optimize=optimize)
    try:
        if device is None:
            session = open_session(model, options)
        else:
            session = lowbit.session(model, device=device, sess_options=options)
        for feed in feeds:
            results.append(list(run_session(session, feed).values()))
    except lowbit.LowBitError as error:
        return results, str(error)
    return results, ""


def _compare(
    converted: onnx.ModelProto,
    original: onnx.ModelProto,
    feed: dict[str, np.ndarray],
    pairs: list[tuple[list[np.ndarray], list[np.ndarray]]],
    device: str,
    *,
    literal: bool,
) -> str | None:
    """What is wrong with the outputs on one set of inputs, ours beside stock's; None if nothing is.

    Node by node where stock runs the source as it is written, which takes its inner tensors.
    """
    for i, (ours, theirs) in enumerate(zip(*pairs[0], strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            told = [f"{v.dtype}{list(v.shape)}" for v in (ours, theirs)]
            return f"FAILED: output {i} is {told[0]}, stock's {told[1]}"
    if not literal:
        return _differing(pairs)
    try:
        report = lowbit.verify(converted, _sized(original, feed), data=feed, threads=1, device=device)
    except lowbit.LowBitError as error:
        return f"FAILED: not verified: {error}"
    except Exception as error:
        return _raised(error)
    for node in report.nodes:
        if node.wrong:
            return f"FAILED: wrong: {node.op_type} '{node.name}': {node.wrong} of {node.elements}"
        if node.unexplained:
            return f"FAILED: unexplained: {node.op_type} '{node.name}': {node.unexplained} of {node.elements}"
        if not node.runs:
            return f"FAILED: not compared: {node.op_type} '{node.name}': {node.note}"
    # The induction below is about the run whose codes were compared; to expose them changes what stock fuses.
    agreed = report.outputs and all(output.equal == output.elements for output in report.outputs)
    if report.total("near_tie") or agreed:
        return None
    return _differing(pairs)


def _differing(pairs: list[tuple[list[np.ndarray], list[np.ndarray]]]) -> str | None:
    """Which output differs, ours from stock's; None if none does.

    Every node agrees on stock's own codes, so by induction all codes are equal, and the outputs. What the
    optimizer makes of float parts may differ, so that one of the pairs is enough.
    """
    for i in range(len(pairs[0][0])):
        far = min(_far(ours[i], theirs[i]) for ours, theirs in pairs)
        if far:
            return f"FAILED: output {i}: {far} of {pairs[0][0][i].size} elements"
    return None


def _sized(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A copy whose inputs state the sizes of a feed: samples are cut into batches of the model's size."""
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    for info in sized.graph.input:
        if info.name in feed:
            for dim, size in zip(info.type.tensor_type.shape.dim, feed[info.name].shape, strict=True):
                dim.dim_value = size
    return sized


def _far(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements differ by more than float rounding makes of equal codes."""
    if a.dtype.kind != "f":
        return int((a != b).sum())
    size = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
    near = np.isclose(a, b, rtol=1e-4, atol=1e-4 * size, equal_nan=True)
    return int((~near).sum())
