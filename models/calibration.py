"""Ranges of every tensor of a float32 network, measured by running it in ONNX Runtime on seeded images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper


@dataclass(frozen=True)
class Statistics:
    """What calibration knows of a tensor: its smallest and largest value and its root mean square."""

    low: float
    high: float
    rms: float


def images(count: int, image: int, seed: int = 7) -> npt.NDArray[np.float32]:
    """Draws seeded images [count, 3, image, image] of normal noise, float32."""
    return np.random.default_rng(seed).standard_normal((count, 3, image, image), dtype=np.float32)


def measure(model: onnx.ModelProto, samples: Iterable[npt.NDArray[np.float32]]) -> dict[str, Statistics]:
    """Runs `model` and returns the statistics of its input and of every node output.

    Args:
        model: A float32 model with one input; it is not changed.
        samples: Batches for that input.

    Returns:
        Tensor name -> statistics over all samples.
    """
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    outputs = [name for node in model.graph.node for name in node.output]
    del probe.graph.output[:]
    probe.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs
    )
    options = ort.SessionOptions()
    # Two threads sum in another order than one; a fixed number gives the same ranges on every machine of a
    # kind.
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    input_name = model.graph.input[0].name

    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in [input_name, *outputs]}
    for sample in samples:
        values = session.run(outputs, {input_name: sample})
        for name, value in zip([input_name, *outputs], [sample, *values], strict=True):
            mean_square = float(np.mean(np.square(value, dtype=np.float64)))
            seen[name].append((float(value.min()), float(value.max()), mean_square))
    return {
        name: Statistics(
            min(low for low, _, _ in rows),
            max(high for _, high, _ in rows),
            float(np.sqrt(np.mean([square for _, _, square in rows]))),
        )
        for name, rows in seen.items()
    }
