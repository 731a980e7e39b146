"""Broken converted models on a device of the provider and without it, in a process of its own.

`python -m tests.ep.mutants FIRST COUNT`, the device in LOWBIT_TEST_DEVICE: JSON lines before and after each.
The outcome is right where both refuse the model, or both run it and agree.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

import lowbit
import numpy as np
import onnx
import onnxruntime as ort

from tests.ep.graphs import Chain, chain, images
from tests.hostile import mutations
from tests.support import lowbit_library


def branches() -> onnx.ModelProto:
    graph = Chain()
    first = graph.conv("x")
    total = graph.node("Add", [graph.conv(first), graph.node("LpNormalization", [first])])
    return graph.model([graph.conv(total), first])


def mutant(seed: int) -> tuple[str, bytes]:
    rng = np.random.default_rng(seed)
    sources = (
        lambda: chain("conv", "conv"), lambda: chain("conv", "LpNormalization", "conv"),
        lambda: chain("conv", "Relu", "Sigmoid"), branches,
    )  # fmt: skip
    model = sources[seed % len(sources)]()
    if rng.random() < 0.2:
        change = mutations.RAW[int(rng.integers(len(mutations.RAW)))]
        return change.__name__, change(model, rng)
    changes = [
        mutations.STRUCTURED[int(rng.integers(len(mutations.STRUCTURED)))] for _ in range(1 + seed % 2)
    ]
    told = [change(model, rng) for change in changes]
    return "; ".join(told), model.SerializeToString()


def outcome(
    model: bytes, options: ort.SessionOptions, feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray] | str:
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return ort.InferenceSession(model, options, enable_fallback=0).run(None, dict(feeds))
    except Exception as error:
        return "refused: " + " ".join(str(error).split())[:300]


def compared(with_provider: list[np.ndarray] | str, alone: list[np.ndarray] | str) -> str:
    if isinstance(with_provider, str) and isinstance(alone, str):
        return with_provider
    if isinstance(with_provider, str) or isinstance(alone, str):
        return f"DIFFERENT: with the provider {with_provider}, without {alone}"
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(with_provider, alone, strict=True))
    return "converted" if same else "DIFFERENT numbers"  # the word that tests.hostile.campaign knows


def main(first: int, count: int) -> None:
    ort.register_execution_provider_library("lowbit", lowbit_library())
    name = os.environ["LOWBIT_TEST_DEVICE"]
    device = next(found for found in ort.get_ep_devices() if found.ep_metadata.get("device") == name)
    feeds = {"x": images(2, 3, 5, 4)}
    for seed in range(first, first + count):
        what, model = mutant(seed)
        print(json.dumps({"seed": seed, "what": what}), flush=True)
        provider, plain = ort.SessionOptions(), ort.SessionOptions()
        provider.add_provider_for_devices([device], {})
        plain.register_custom_ops_library(lowbit.get_library_path())
        ended = compared(outcome(model, provider, feeds), outcome(model, plain, feeds))
        print(json.dumps({"seed": seed, "outcome": ended}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
