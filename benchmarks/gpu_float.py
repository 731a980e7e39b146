"""Float layers and networks on a GPU, with operands of each precision, beside torch.

python benchmarks/gpu_float.py                                        layers, maps, then networks
python benchmarks/gpu_float.py --layers 3 --maps 0 --networks ""      the first three layers alone

- Layers: convolution, bias and Relu; COPIES of them read one image and so are one CUDA graph: what is queued
  takes longer than queueing it. Networks: float32 files of `lowbit.models`, none of whose nodes is left to
  the CPU.
- Device time of a run among many (`gpu_networks.py`), in turns; of a layer by the number of copies.
- torch: cuDNN's kernels in a CUDA graph, chosen by measuring (`cudnn.benchmark`): float32 without and with
  TF32, float16 with channels last.
- Maps: the convolutions of a paper on direct kernels (docs/papers.md), kernels of 1, 3 and 5, batch 1, with a
  floor: 1.5 us and whatever takes longer, its bytes at 4.1 TB/s or its products at 60 TFLOPS.
- Error of a layer: the largest difference to float64, over the sum of |x| |w| of the same output.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
from gpu_forms import TorchSubject
from gpu_networks import Subject, facts_of, torch
from lowbit.models import build, save
from lowbit.models.calibration import images
from lowbit.sessions.devices import canonical
from onnx import TensorProto, helper, numpy_helper
from results import RESULTS, WORK, Table, write

Array = npt.NDArray[Any]

PRECISIONS = ("float32", "winograd", "3xtf32", "tf32", "float16")
PEERS: dict[str, dict[str, Any]] = {
    "torch float32": {"dtype": "float32", "channels_last": False},
    "torch TF32": {"dtype": "float32", "channels_last": False},
    "torch float16": {"dtype": "float16", "channels_last": True},
}
COPIES = 16
FEW_OUTPUTS, FEW_COPIES = 1 << 23, 8
"""Layers with more outputs have fewer copies: a GB of outputs."""
LAYERS = [
    # kernel, channels, outputs, height and width, batch: ResNet's at 14x14 (two papers' shapes), then others
    (3, 128, 128, 14, 1),
    (3, 256, 256, 14, 1),
    (1, 512, 128, 14, 1),
    (1, 128, 512, 14, 1),
    (1, 1024, 256, 14, 1),
    (1, 256, 1024, 14, 1),
    (3, 64, 64, 56, 1),
    (3, 256, 256, 14, 16),
    (1, 1024, 256, 14, 16),
    (1, 64, 256, 56, 16),
    (3, 64, 64, 56, 16),
]
MAPS = [
    # height and width, channels, outputs
    *((28, 1, 512), (56, 1, 256), (112, 1, 128), (224, 1, 64), (512, 1, 32), (1024, 1, 32)),
    *((7, 512, 512), (14, 512, 512), (28, 256, 256), (56, 256, 256), (112, 128, 128)),
    *((224, 64, 64), (512, 64, 64)),
]
NETWORKS = [("resnet50", 1), ("resnet50", 16), ("resnet18", 1), ("resnet18", 16)]


def layer(kernel: int, channels: int, outputs: int, copies: int = COPIES) -> onnx.ModelProto:
    """Convolutions with bias and Relu that read one image."""
    rng = np.random.default_rng(1)
    nodes, constants, made = [], [], []
    for i in range(copies):
        weights = rng.standard_normal((outputs, channels, kernel, kernel)) / np.sqrt(channels * kernel**2)
        bias = rng.standard_normal(outputs) / 10
        constants += [
            numpy_helper.from_array(weights.astype(np.float32), f"w{i}"),
            numpy_helper.from_array(bias.astype(np.float32), f"b{i}"),
        ]
        conv = helper.make_node("Conv", ["x", f"w{i}", f"b{i}"], [f"c{i}"], pads=[kernel // 2] * 4)
        nodes += [conv, helper.make_node("Relu", [f"c{i}"], [f"y{i}"])]
        made.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["N", outputs, "H", "W"]))
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", channels, "H", "W"])
    graph = helper.make_graph(nodes, "layer", [image], made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def error(model: onnx.ModelProto, x: Array, y: Array) -> float:
    """Of the first of its layers, against float64."""
    weights, bias = (
        torch.from_numpy(numpy_helper.to_array(each).copy()) for each in model.graph.initializer[:2]
    )
    pad = weights.shape[-1] // 2
    wide = torch.from_numpy(x).double()
    exact = torch.nn.functional.conv2d(wide, weights.double(), bias.double(), padding=pad)
    terms = torch.nn.functional.conv2d(wide.abs(), weights.double().abs(), bias.double().abs(), padding=pad)
    return float(((torch.from_numpy(y).double() - exact.clamp(min=0)).abs() / terms).max())


def floor_us(kernel: int, channels: int, outputs: int, size: int) -> float:
    """Microseconds below which no kernel is expected to make this layer of one image."""
    floats = size * size * (channels + outputs) + channels * outputs * kernel**2
    products = size * size * channels * outputs * kernel**2
    return 1.5 + max(4 * floats / 4.1e6, 2 * products / 60e6)


def measure(
    model: onnx.ModelProto,
    path: Path,
    feed: Array,
    device: str,
    rounds: int,
    copies: int,
    precisions: Sequence[str] = PRECISIONS,
    peers: Sequence[str] = tuple(PEERS),
) -> tuple[dict[str, float], dict[str, Array]]:
    """Medians of microseconds by precision and peer, and the first output of each precision."""
    place: Any = SimpleNamespace(path=path)
    name = model.graph.input[0].name
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        subjects: dict[str, Any] = {}
        for precision in precisions:
            more = {"float_regions": "1", "float_precision": precision}
            subjects[precision] = Subject(place, device, "cached", cache, {name: feed}, more)
        outputs = {precision: subject.output for precision, subject in subjects.items()}
        if torch is not None:
            for peer in peers:
                torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = "TF32" in peer
                subjects[peer] = TorchSubject(model, feed, **PEERS[peer])
        for _ in range(rounds):
            for each, subject in subjects.items():
                times.setdefault(each, []).append(subject.queued() * 1e6 / copies)
    return {each: float(np.median(rounds)) for each, rounds in times.items()}, outputs


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=len(LAYERS), help="how many of them")
    parser.add_argument("--maps", type=int, default=len(MAPS), help="how many of them")
    parser.add_argument("--networks", help="name:batch,.. (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of 50 ms each (default: 7)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    options = parser.parse_args()
    device = canonical(options.device)
    WORK.mkdir(parents=True, exist_ok=True)
    columns = [*(f"{each} us" for each in (*PRECISIONS, *PEERS)), "float32 / torch", "float16 / torch"]
    layers = Table("layers", ["layer", "batch", *columns, *(f"error {each}" for each in PRECISIONS)])
    maps = Table(
        "maps",
        [
            "layer",
            "float32 us",
            "winograd us",
            "torch float32 us",
            "floor us",
            "float32 / floor",
            "float32 / torch",
            "float32 / winograd",
        ],
    )
    networks = Table(
        "networks", ["network", "batch", *columns, *(f"difference {each}" for each in PRECISIONS[1:])]
    )
    raw: dict[str, Any] = {}

    def ratio(times: dict[str, float], ours: str, theirs: str) -> str | float:
        return times[ours] / times[theirs] if theirs in times else "-"

    def row(times: dict[str, float]) -> list[str | int | float]:
        ratios = [ratio(times, "float32", "torch float32"), ratio(times, "float16", "torch float16")]
        return [*(times.get(each, "-") for each in (*PRECISIONS, *PEERS)), *ratios]

    for kernel, channels, outputs, size, batch in LAYERS[: options.layers]:
        name = f"{kernel}x{kernel} {channels}->{outputs} {size}x{size}"
        model, path = layer(kernel, channels, outputs), WORK / "gpu_float_layer.onnx"
        onnx.save(model, path)
        feed = np.random.default_rng(2).standard_normal((batch, channels, size, size), dtype=np.float32)
        times, made = measure(model, path, feed, device, options.rounds, COPIES)
        errors = [error(model, feed, made[each]) if torch is not None else "-" for each in PRECISIONS]
        layers.rows.append([name, batch, *row(times), *errors])
        raw[f"{name} b{batch}"] = {"us": times, "errors": dict(zip(PRECISIONS, errors, strict=True))}
        print(name, batch, times, errors, flush=True)
    for size, channels, outputs in MAPS[: options.maps]:
        for kernel in (1, 3, 5):
            name = f"{kernel}x{kernel} {channels}->{outputs} {size}x{size}"
            copies = COPIES if outputs * size * size < FEW_OUTPUTS else FEW_COPIES
            model, path = layer(kernel, channels, outputs, copies), WORK / "gpu_float_layer.onnx"
            onnx.save(model, path)
            feed = np.random.default_rng(2).standard_normal((1, channels, size, size), dtype=np.float32)
            transformed = kernel == 3 and channels > 1
            precisions = ("float32", "winograd") if transformed else ("float32",)
            times, _ = measure(
                model, path, feed, device, options.rounds, copies, precisions, ("torch float32",)
            )
            times["floor"] = floor_us(kernel, channels, outputs, size)
            measured = [times.get(each, "-") for each in ("float32", "winograd", "torch float32", "floor")]
            ratios = [ratio(times, "float32", each) for each in ("floor", "torch float32", "winograd")]
            maps.rows.append([name, *measured, *ratios])
            raw[name] = {"us": times}
            print(name, times, flush=True)
    chosen = NETWORKS
    if options.networks is not None:
        pairs = (each.split(":") for each in options.networks.split(",") if each)
        chosen = [(network, int(batch)) for network, batch in pairs]
    for network, batch in chosen:
        path = WORK / f"{network}_float_batch.onnx"
        if not path.exists():
            save(build(network, batch="N"), path)
        feed = images(batch, 224, seed=3)
        times, made = measure(onnx.load(path), path, feed, device, options.rounds, 1)
        expected = lowbit.session(path).run(None, {onnx.load(path).graph.input[0].name: feed[:4]})[0]
        differences = [
            float(np.abs(made[each][:4] - expected).max() / np.abs(expected).max()) for each in PRECISIONS[1:]
        ]
        networks.rows.append([network, batch, *row(times), *differences])
        raw[f"{network} b{batch}"] = {"us": times, "differences": differences}
        print(network, batch, times, differences, flush=True)
    write(
        "gpu_float",
        "Float layers and networks on a GPU",
        [table for table in (layers, maps, networks) if table.rows],
        [
            f"Layers: convolution, bias, Relu; {COPIES} of them read one image, in one CUDA graph; "
            "time of one. Where Tensor Cores want the channels last, it is turned once for all. "
            "Networks: float32 files.",
            "Maps: one image; floor: 1.5 us and the longer of bytes at 4.1 TB/s and products at 60 TFLOPS.",
            "Device time, the median of rounds in which all take turns; torch's kernels in a CUDA graph.",
            "Error: the largest difference to float64 over the sum of |x| |w|. Difference: of the outputs of "
            "four images to the CPU's, over the largest of those.",
        ],
        raw,
        folder=options.out,
        machine=facts_of(device),
        commit=options.commit or None,
    )


if __name__ == "__main__":
    main()
