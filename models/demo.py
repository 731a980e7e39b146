"""`make demo`: two quantized networks, before and after conversion.

The trained digits network shows that the answers stay: accuracy over the held-out images at each bit pair, in
stock ONNX Runtime and after conversion. A ResNet-50 with seeded weights shows size and speed of 4-bit
weights.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import lowbit
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from lowbit.measure.bench import Subject, fresh_process, pinned, take_turns
from rich.console import Console
from rich.table import Table

from . import digits
from .seeded import build, save

ROUNDS = 8


def show_digits(console: Console, folder: Path) -> bool:
    """Converts the digits models and prints their accuracy; False when lowbit's differs from stock's."""
    try:
        images, labels = digits.held_out()
    except ImportError:
        console.print("Skipped the digits network: scikit-learn, which holds its images, is not installed.")
        return True
    table = Table(title=f"The trained digits network, {len(labels)} held-out images", title_justify="left")
    table.add_column("bits")
    for column in ("stock accuracy", "lowbit accuracy", "differing labels", "QDQ KB", "lowbit KB"):
        table.add_column(column, justify="right")
    table.add_column("runs in stock")
    agree = True
    for bits in digits.BIT_PAIRS:
        source, target = digits.model_path(bits), folder / f"digits_{bits}.lowbit.onnx"
        lowbit.convert(source, target)
        stock, mode = digits.stock_session(source)
        converted = lowbit.session(target, threads=1)
        differing = int(np.count_nonzero(_labels(stock, images) != _labels(converted, images)))
        # Where stock computes in float, its sums may round a tie the other way.
        agree = agree and differing <= (0 if mode == "default" else 2)
        table.add_row(
            bits,
            f"{digits.accuracy(stock, images, labels):.1%}",
            f"{digits.accuracy(converted, images, labels):.1%}",
            str(differing),
            f"{source.stat().st_size / 1e3:.0f}",
            f"{target.stat().st_size / 1e3:.0f}",
            "yes" if mode == "default" else "in float",
        )
    console.print(table)
    return agree


def _labels(session: ort.InferenceSession, images: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    return np.asarray(np.argmax(session.run(None, {"input": images})[0], axis=1))


def show_resnet50(console: Console, folder: Path, core: int) -> None:
    """Converts ResNet-50 w8a8 and w4a8 and times both beside the stock models, one thread, in turns."""
    files: dict[str, Path] = {}
    for bits in ("w8a8", "w4a8"):
        source = save(build("resnet50", int(bits[1]), int(bits[3])), folder / f"resnet50_{bits}.onnx")
        files[f"stock ONNX Runtime {bits}"] = source
        files[f"lowbit {bits}"] = target = folder / f"resnet50_{bits}.lowbit.onnx"
        start = time.perf_counter()
        lowbit.convert(source, target)
        console.print(f"Converted ResNet-50 {bits} in {time.perf_counter() - start:.1f} s.")
    with pinned([core] if hasattr(os, "sched_setaffinity") else []):
        subjects = {name: Subject.read(str(path), 1, 0, None) for name, path in files.items()}
        seconds = take_turns([subject.bound_run() for subject in subjects.values()], ROUNDS)
        fresh = [fresh_process(subject) for subject in subjects.values()]
    median = {name: float(np.median(runs)) for name, runs in zip(subjects, seconds, strict=True)}
    table = Table(title="ResNet-50, 224x224, batch 1, one thread, seeded weights", title_justify="left")
    table.add_column("model")
    for column in ("ms", "of stock w8a8", "of stock w4a8", "file MB", "create ms", "peak MB"):
        table.add_column(column, justify="right")
    for (name, path), (load_ms, peak) in zip(files.items(), fresh, strict=True):
        table.add_row(
            name,
            f"{median[name] * 1e3:.1f}",
            f"{median[name] / median['stock ONNX Runtime w8a8']:.2f}",
            f"{median[name] / median['stock ONNX Runtime w4a8']:.2f}",
            f"{path.stat().st_size / 1e6:.1f}",
            f"{load_ms:.0f}",
            f"{peak / 1e6:.0f}",
        )
    console.print(table)


def main() -> int:
    """Runs the demo; the exit status is 1 when a converted digits model answers differently from stock."""
    parser = argparse.ArgumentParser(prog="python -m lowbit.models.demo", description=__doc__)
    parser.add_argument("--core", type=int, default=0, help="core that ResNet-50 is timed on (default: 0)")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 110)
    console.print(f"lowbit {lowbit.__version__}, onnxruntime {ort.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        agree = show_digits(console, Path(folder))
        show_resnet50(console, Path(folder), options.core)
    if not agree:
        console.print("The digits models answer differently after conversion: this should not happen.")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
