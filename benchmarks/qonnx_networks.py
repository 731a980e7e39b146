"""QONNX networks: lowbit beside stock ONNX Runtime running the same network with Quant written as float ops.

python benchmarks/qonnx_networks.py FOLDER      a folder of .onnx files, such as one of the QONNX model zoo

Stock ONNX Runtime does not load QONNX. What its users run instead is the network with every quantizer
expanded to Div, Round, Clip and Mul (`lowbit.frontends.standard_ops`): ONNX Runtime folds the weights'
quantizers into constants and computes all convolutions in float32. Every run compares the outputs of both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from lowbit.frontends.standard_ops import standard_form
from lowbit.measure.bench import pinned, take_turns
from lowbit.proto.feeds import random_feeds
from results import Table, write

Array = npt.NDArray[Any]


def bound(
    session: ort.InferenceSession, feed: dict[str, Array]
) -> tuple[Callable[[], None], Callable[[], list[Array]]]:
    """A function that runs the session once, and one that returns what it wrote."""
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_cpu_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    return lambda: session.run_with_iobinding(binding), binding.copy_outputs_to_cpu


def stock_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """The network in standard ops, one thread, all of ONNX Runtime's optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    source = standard_form(model).SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Both sessions in turns."""
    model = onnx.load(path)
    feed = random_feeds(model)
    run, result = bound(lowbit.session(lowbit.convert(model), threads=1), feed)
    stock_run, stock_result = bound(stock_session(model), feed)
    run()
    stock_run()
    different = sum(
        int(np.count_nonzero(ours != theirs)) for ours, theirs in zip(result(), stock_result(), strict=True)
    )
    elements = sum(output.size for output in result())
    ours, theirs = (np.asarray(each) * 1e3 for each in take_turns([run, stock_run], rounds))
    return {
        "network": path.stem,
        "lowbit_ms": float(np.median(ours)),
        "onnxruntime_ms": float(np.median(theirs)),
        "lowbit_p10_ms": float(np.percentile(ours, 10)),
        "onnxruntime_p10_ms": float(np.percentile(theirs, 10)),
        "different_elements": different,
        "elements": elements,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the networks lie")
    parser.add_argument("--core", type=int, default=0, help="core to pin to (default: 0)")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of 50 ms per session (default: 20)")
    parser.add_argument("--name", default="qonnx_1t", help="name of the results file (default: %(default)s)")
    options = parser.parse_args()
    columns = ["network", "lowbit ms", "onnxruntime ms", "times as fast", "different outputs"]
    table = Table("QONNX networks", columns)
    raw = []
    with pinned([options.core]):
        for path in sorted(options.folder.glob("*.onnx")):
            row = measure(path, options.rounds)
            raw.append(row)
            table.rows.append(
                [
                    row["network"],
                    row["lowbit_ms"],
                    row["onnxruntime_ms"],
                    row["onnxruntime_ms"] / row["lowbit_ms"],
                    f"{row['different_elements']} of {row['elements']}",
                ]
            )
    notes = [
        "Random input, batch 1, medians; both sessions take turns, inputs and outputs bound.",
        "onnxruntime runs the same network with every quantizer written as float operations.",
        "Outputs may differ where ONNX Runtime's float sums are not exact.",
        f"One thread, pinned to core {options.core}.",
    ]
    write(options.name, "QONNX networks, 1 thread", [table], notes, raw)


if __name__ == "__main__":
    main()
