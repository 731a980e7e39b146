"""Measured kernel choices of a GPU: one profile run for each shape, with the execution provider's own tuner.

What is measured, and where it is kept, is the execution provider's business (option ``tuning``); this module
makes the runs, once for every batch size, and tells what they gained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.errors import LowBitError, ModelError, OutputError
from lowbit.ops import DOMAIN
from lowbit.proto.feeds import Feeds, Model, as_file, as_proto, random_feeds, shapes_of_batches
from lowbit.sessions.binding import bind, queued_seconds
from lowbit.sessions.devices import Device, devices, ep_device
from lowbit.sessions.session import for_device, session

Progress = Callable[[int, int], None]

QUEUED_RUNS = 50
"""Runs in one measurement of the gain: a millisecond or more of even the smallest networks."""

ROUNDS = 5


@dataclass
class ShapeTuning:
    """The model at one set of sizes.

    Attributes:
        inputs: the sizes of its inputs.
        seconds: the profile run, measurements included.
        estimated_us: device time of a run with the choices of the cost model.
        tuned_us: with the measured ones.
    """

    inputs: dict[str, list[int]]
    seconds: float = 0.0
    estimated_us: float = 0.0
    tuned_us: float = 0.0

    @property
    def gain(self) -> float:
        """How many times as fast the measured choices are."""
        return self.estimated_us / self.tuned_us if self.tuned_us else 1.0


@dataclass
class DeviceTuneReport:
    """What was measured on a device.

    Attributes:
        device: its name.
        description: the hardware.
        cache: the folder that holds the choices.
        shapes: one entry for each set of sizes.
    """

    device: str
    description: str
    cache: str
    shapes: list[ShapeTuning] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {**asdict(self), "shapes": [{**asdict(each), "gain": each.gain} for each in self.shapes]}


def tune_device(
    model: Model,
    device: str,
    *,
    cache: str,
    batches: Sequence[int] = (),
    shapes: Mapping[str, list[int]] | None = None,
    progress: Progress | None = None,
) -> DeviceTuneReport:
    """Runs a model once for each batch size with tuning on, and measures what it gained.

    Args:
        model: a converted model, or one that is converted in memory.
        device: its name in full.
        cache: the folder of measured choices.
        batches: batch sizes; none: the sizes that the model states, a symbolic batch counting as 1.
        shapes: sizes of inputs with other symbolic dims.
        progress: called with (sizes done, sizes in all).

    Raises:
        ModelError: if the model cannot be read, or run on the device, or holds no lowbit node.
        OutputError: if the choices cannot be kept in ``cache``.
        LowBitError: for sizes that nobody gave, a device that cannot be used, or where LOWBIT_TUNE is off.
    """
    ep_device(device)  # before anything else is done
    _require_cache(Path(cache))
    ready = for_device(model)
    if not any(node.domain == DOMAIN for node in as_proto(ready).graph.node):
        raise ModelError(
            "the model holds no lowbit node, so there is nothing to measure; give a converted model, or a "
            "quantized one that can be converted, not one that is compiled"
        )
    proto = as_proto(model)
    feeds = [random_feeds(proto, shapes=sizes) for sizes in shapes_of_batches(proto, batches, shapes)]
    hardware = next((each for each in devices() if each.name == device), Device(device, device))
    report = DeviceTuneReport(device, hardware.description, cache)
    with as_file(ready) as path:
        for done, feed in enumerate(feeds):
            if progress is not None:
                progress(done, len(feeds))
            report.shapes.append(_tune(path, device, feed, cache))
    return report


def _require_cache(folder: Path) -> None:
    """The execution provider goes on where it cannot keep its choices; here they are the whole purpose."""
    from lowbit import _native

    if not _native.tune_cache_enabled():
        raise LowBitError("LOWBIT_TUNE is off: measured choices are neither kept nor taken; unset it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot be created: {error.strerror or error}; set LOWBIT_CACHE_DIR"
        ) from error
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder}: no permission to write into it; set LOWBIT_CACHE_DIR")


def _tune(path: str, device: str, feed: Feeds, cache: str) -> ShapeTuning:
    shape = ShapeTuning({name: list(value.shape) for name, value in feed.items()})
    shape.estimated_us = _device_time(path, device, feed, {"tuning": "off"})
    start = time.perf_counter()
    session(path, device=device, provider_options={"tuning": "on", "cache_dir": cache}).run(None, feed)
    shape.seconds = time.perf_counter() - start
    shape.tuned_us = _device_time(path, device, feed, {"tuning": "cached", "cache_dir": cache})
    return shape


def _device_time(path: str, device: str, feed: Feeds, options: dict[str, str]) -> float:
    opened = session(path, device=device, provider_options=options)
    binding = bind(opened, feed, device)
    queued_seconds(opened, binding, QUEUED_RUNS)
    return float(np.median([queued_seconds(opened, binding, QUEUED_RUNS) for _ in range(ROUNDS)])) * 1e6
