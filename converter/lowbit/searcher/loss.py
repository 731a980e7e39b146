"""How far a quantized model's outputs are from the float model's, over data that need no labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Loss:
    """What quantization did to the outputs.

    Attributes:
        divergence: mean Kullback-Leibler divergence of the float model's class probabilities from the
            quantized model's, in nats; of an output that holds no classes the squared error relative to its
            power; the mean over the outputs.
        disagreement: the share of samples whose best class is another one; None where no output has classes.
        top1: the share of labelled samples whose best class is right; None without labels.
    """

    divergence: float
    disagreement: float | None
    top1: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def classes(output: Array) -> Array | None:
    """An output as [samples, classes]; None where it is something else."""
    if output.ndim < 2 or output.dtype.kind != "f" or output.size != len(output) * max(output.shape[1:]):
        return None
    flat = output.reshape(len(output), -1)
    return flat if flat.shape[1] > 1 else None


def compare(exact: Sequence[Array], other: Sequence[Array]) -> Loss:
    """The loss over outputs of the same samples, each [samples, ...]."""
    divergences, changed = [], None
    for a, b in zip(exact, other, strict=True):
        p, q = classes(a), classes(b)
        if p is None or q is None:
            if a.dtype.kind == "f" and a.shape == b.shape:
                power = float(np.square(a, dtype=np.float64).sum())
                noise = float(np.square(a.astype(np.float64) - b).sum())
                divergences.append(noise / power if power else float(noise > 0))
            continue
        log_p, log_q = _log_probabilities(p), _log_probabilities(q)
        divergences.append(float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()))
        if changed is None:
            changed = float((p.argmax(axis=1) != q.argmax(axis=1)).mean())
    return Loss(max(0.0, float(np.mean(divergences))) if divergences else 0.0, changed)


def _log_probabilities(scores: Array) -> Array:
    """Logarithms of probabilities: of the scores themselves if they are some, else of their softmax."""
    scores = scores.astype(np.float64)
    if scores.min() >= 0 and np.allclose(scores.sum(axis=1), 1, atol=1e-3):
        scores = np.log(np.maximum(scores, 1e-12))
    shifted = scores - scores.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
