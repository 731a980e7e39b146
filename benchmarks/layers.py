"""Single convolutions, channels-last codes in and out: lowbit beside stock ONNX Runtime int8.

python benchmarks/layers.py                                       the layers of ResNet-50, w8a8
python benchmarks/layers.py --networks vgg16 --bits w8a8,w4a4
python benchmarks/layers.py --networks resnet50_v1 --bits w1a1,w1a1u,w1a2,w2a2,w1a4

A pair of bits is written w<bits>a<bits>. One-bit operands are bipolar, -1 and +1; `u` behind the activations
makes them 0 and 1. Other activations are unsigned, other weights signed over the whole range of their bits;
`n` behind the weights leaves out the least code: w2n are -1, 0 and 1.

Both sides are one-node models in plain sessions with bound inputs and outputs, and take turns. ONNX Runtime's
side is a QDQ convolution with Relu between two Transposes, which its optimizer cancels against its own
channels-last QLinearConv; a run checks that no Transpose is left, and that both sides give the same codes.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from lowbit import _native
from lowbit.measure.bench import pinned, take_turns
from onnx import TensorProto, helper, numpy_helper
from results import Table, write

STOCK = "onnxruntime w8a8"
LAYERS = Path(__file__).with_name("layers.json")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """A convolution with square kernel, stride and pads; `count` is how often the network has it."""

    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: int
    stride: int
    pad: int
    group: int
    count: int

    @property
    def name(self) -> str:
        """Such as `3x3/2 64->128 @56`."""
        stride = f"/{self.stride}" if self.stride > 1 else ""
        kind = "dw " if self.group > 1 else ""
        size = f"{self.kernel}x{self.kernel}{stride}"
        return f"{kind}{size} {self.in_channels}->{self.out_channels} @{self.height}"

    @property
    def macs(self) -> int:
        """Multiplications of one run at batch 1."""
        height, width = self.output
        taps = self.kernel**2 * self.in_channels // self.group
        return height * width * self.out_channels * taps

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the output."""
        height, width = (
            (size + 2 * self.pad - self.kernel) // self.stride + 1 for size in (self.height, self.width)
        )
        return height, width

    @property
    def window(self) -> dict[str, Any]:
        """The attributes that ONNX's Conv and LowBitConv share."""
        return {
            "kernel_shape": [self.kernel] * 2,
            "strides": [self.stride] * 2,
            "pads": [self.pad] * 4,
            "group": self.group,
        }


@dataclass(frozen=True)
class Pair:
    """Bits and encodings of weights and activations, as `w1a2` says them; see the module."""

    text: str
    w_bits: int
    x_bits: int
    narrow: bool
    w_encoding: str
    x_encoding: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Raises ValueError for what is no pair."""
        match = re.fullmatch(r"w([1-8])(n?)a([1-8])(u?)", text)
        if match is None:
            raise ValueError(f"expected a pair of bits such as w8a8, w1a1u or w2na2, got '{text}'")
        w_bits, x_bits = int(match[1]), int(match[3])
        w_encoding = "bipolar" if w_bits == 1 else "signed"
        x_encoding = "bipolar" if x_bits == 1 and not match[4] else "unsigned"
        return cls(text, w_bits, x_bits, bool(match[2]), w_encoding, x_encoding)

    @property
    def codes_of_weights(self) -> tuple[int, int]:
        """The least and the largest."""
        if self.w_encoding == "bipolar":
            return 0, 1
        return -(2 ** (self.w_bits - 1)) + self.narrow, 2 ** (self.w_bits - 1) - 1


@dataclass(frozen=True)
class Problem:
    """Seeded codes and scales of a layer at a bit pair; zero points are 0."""

    layer: Layer
    pair: Pair
    x: Array  # uint8 [1, H, W, I]
    weight: Array  # int8 [O, I / group, kH, kW]
    bias: Array  # int32 [O]
    x_scale: np.float32
    w_scale: Array  # float32 [O]
    y_scale: np.float32

    @classmethod
    def seeded(cls, layer: Layer, pair: Pair) -> Problem:
        """Draws uniform codes; y_scale is such that few results saturate."""
        random = np.random.default_rng(1)
        low, high = pair.codes_of_weights
        x = random.integers(0, 2**pair.x_bits, (1, layer.height, layer.width, layer.in_channels), np.uint8)
        depth = layer.in_channels // layer.group
        shape = (layer.out_channels, depth, layer.kernel, layer.kernel)
        weight = random.integers(low, high + 1, shape, np.int8)
        bias = random.integers(-1000, 1000, layer.out_channels, np.int32)
        w_scale = random.uniform(0.001, 0.002, layer.out_channels).astype(np.float32)
        # The sum of K products of uniform codes has this deviation; 3 of them fill the output range.
        deviation = np.sqrt(depth * layer.kernel**2) * (2**pair.x_bits / 2) * (max(high, 1) / 1.7) + 1
        y_scale = np.float32(0.02 * 0.0015 * 3 * deviation / (2**pair.x_bits - 1))
        return cls(layer, pair, x, weight, bias, np.float32(0.02), w_scale, y_scale)

    def stock_model(self) -> onnx.ModelProto:
        """QDQ between Transposes, int8 weights and uint8 activations; only w8a8 says the same."""
        layer = self.layer
        height, width = layer.output
        constants = {
            "x_scale": self.x_scale,
            "zero": np.uint8(0),
            "w": self.weight,
            "w_scale": self.w_scale,
            "w_zero": np.zeros(layer.out_channels, np.int8),
            "b": self.bias,
            "b_scale": self.x_scale * self.w_scale,
            "b_zero": np.zeros(layer.out_channels, np.int32),
            "y_scale": self.y_scale,
        }
        nodes = [
            helper.make_node("Transpose", ["x"], ["xt"], perm=[0, 3, 1, 2]),
            helper.make_node("DequantizeLinear", ["xt", "x_scale", "zero"], ["xd"]),
            helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wd"], axis=0),
            helper.make_node("DequantizeLinear", ["b", "b_scale", "b_zero"], ["bd"], axis=0),
            helper.make_node("Conv", ["xd", "wd", "bd"], ["c"], **layer.window),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("QuantizeLinear", ["r", "y_scale", "zero"], ["yt"]),
            helper.make_node("Transpose", ["yt"], ["y"], perm=[0, 2, 3, 1]),
        ]
        return self._model(
            nodes, constants, [helper.make_opsetid("", 21)], (1, height, width, layer.out_channels)
        )

    def lowbit_node(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Attributes and constant inputs of the LowBitConv."""
        layer = self.layer
        rows = self.weight.transpose(0, 2, 3, 1).reshape(layer.out_channels, -1)
        attributes = {
            **layer.window,
            "in_channels": layer.in_channels,
            "out_channels": layer.out_channels,
            "x_bits": self.pair.x_bits,
            "x_encoding": self.pair.x_encoding,
            "w_bits": self.pair.w_bits,
            "w_encoding": self.pair.w_encoding,
            "y_bits": self.pair.x_bits,
        }
        constants: dict[str, Array] = {
            "w": _native.pack_weights(rows.astype(np.int32), self.pair.w_bits),
            "x_scale": np.asarray(self.x_scale),
            "x_zero_point": np.asarray(0, np.int32),
            "w_scale": self.w_scale,
            "w_zero_point": np.asarray(0, np.int32),
            "bias": self.bias,
            "y_scale": np.asarray(self.y_scale),
            "y_zero_point": np.asarray(0, np.int32),
        }
        return attributes, constants

    def lowbit_model(self) -> onnx.ModelProto:
        """One LowBitConv."""
        attributes, constants = self.lowbit_node()
        node = helper.make_node("LowBitConv", ["x", *constants], ["y"], domain="ai.lowbit", **attributes)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.lowbit", 1)]
        return self._model([node], constants, opsets, (1, *self.layer.output, self.layer.out_channels))

    def _model(
        self,
        nodes: list[onnx.NodeProto],
        constants: dict[str, Any],
        opsets: list[onnx.OperatorSetIdProto],
        shape: tuple[int, ...],
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            nodes,
            "layer",
            [helper.make_tensor_value_info("x", TensorProto.UINT8, self.x.shape)],
            [helper.make_tensor_value_info("y", TensorProto.UINT8, shape)],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
        )
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def bound(session: ort.InferenceSession, x: Array) -> tuple[Callable[[], None], Callable[[], Array]]:
    """A function that runs the session once, and one that returns what it wrote."""
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    return lambda: session.run_with_iobinding(binding), lambda: binding.copy_outputs_to_cpu()[0]


def stock_session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """Opens the stock model and checks that only a QLinearConv is left of it."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    if ops != ["QLinearConv"]:
        raise RuntimeError(f"stock ONNX Runtime does not run the layer as one QLinearConv: {ops}")
    return session


def measure(layer: Layer, pairs: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Measures a layer at each bit pair; the stock figure is its int8 kernel's."""
    runs: dict[str, Callable[[], None]] = {}
    different: dict[str, int] = {}
    kernels: dict[str, str] = {}
    for bits in pairs:
        problem = Problem.seeded(layer, Pair.parse(bits))
        attributes, constants = problem.lowbit_node()
        kernels[bits] = _native.plan("LowBitConv", attributes, [problem.x, *constants.values()])["kernel"]
        run, result = bound(lowbit.session(problem.lowbit_model(), threads=threads), problem.x)
        run()
        runs[f"lowbit {bits}"] = run
        if bits == "w8a8":
            stock_run, stock_result = bound(stock_session(problem.stock_model(), threads), problem.x)
            stock_run()
            runs[STOCK] = stock_run
            different[bits] = int(np.count_nonzero(result() != stock_result()))
    seconds = dict(zip(runs, take_turns(list(runs.values()), rounds), strict=True))
    return {
        "layer": layer.name,
        "count": layer.count,
        "macs": layer.macs,
        "median_ms": {name: float(np.median(values)) * 1e3 for name, values in seconds.items()},
        "p10_ms": {name: float(np.percentile(values, 10)) * 1e3 for name, values in seconds.items()},
        "kernels": kernels,
        "different_elements": different,
    }


def table(network: str, measured: list[dict[str, Any]], pairs: list[str]) -> Table:
    """A row per layer, the sums over the network with each layer as often as it occurs, and the means."""
    columns = ["layer", "count", "MMAC", "onnxruntime ms"]
    columns += [text for bits in pairs for text in (f"{bits} ms", "ratio")] + ["kernel"]
    out = Table(network, columns)
    sums = dict.fromkeys(measured[0]["median_ms"], 0.0)
    for row in measured:
        times = row["median_ms"]
        for name in sums:
            sums[name] += times[name] * row["count"]
        cells: list[str | int | float] = [row["layer"], row["count"], row["macs"] / 1e6]
        out.rows.append(cells + _times(times, pairs) + [row["kernels"][pairs[-1]]])
    total = sum(row["macs"] * row["count"] for row in measured) / 1e6
    out.rows.append(["sum", sum(row["count"] for row in measured), total, *_times(sums, pairs), ""])
    means: list[str | int | float] = ["geometric mean of the ratios", "", "", ""]
    for bits in pairs:
        means += ["", mean_ratio(measured, f"lowbit {bits}")]
    out.rows.append([*means, ""])
    return out


def mean_ratio(measured: list[dict[str, Any]], name: str) -> float:
    """Geometric mean over the layers, each counted once, of a time over stock ONNX Runtime's."""
    times = [row["median_ms"] for row in measured]
    return float(np.exp(np.mean([np.log(each[name] / each[STOCK]) for each in times])))


def _times(times: dict[str, float], pairs: list[str]) -> list[str | int | float]:
    stock = times[STOCK]
    return [
        stock,
        *[value for bits in pairs for value in (times[f"lowbit {bits}"], times[f"lowbit {bits}"] / stock)],
    ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    networks = json.loads(LAYERS.read_text(encoding="utf-8"))["networks"]
    parser.add_argument("--networks", default="resnet50", help=f"of {', '.join(networks)}; default: resnet50")
    parser.add_argument("--bits", default="w8a8", help="w8a8 first, then other pairs; default: w8a8")
    parser.add_argument("--threads", type=int, default=1, help="default: 1, pinned")
    parser.add_argument("--core", type=int, default=0, help="core of a run with one thread; default: 0")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of 50 ms per session; default: 10")
    parser.add_argument("--only", default="", help="only layers whose name contains this")
    parser.add_argument("--name", help="name of the results file; default: layers_<threads>t")
    options = parser.parse_args()
    pairs = ["w8a8", *[bits for bits in options.bits.split(",") if bits != "w8a8"]]
    tables, raw = [], {}
    with pinned([options.core] if options.threads == 1 else []):
        for network in options.networks.split(","):
            layers = [
                layer for layer in (Layer(*row) for row in networks[network]) if options.only in layer.name
            ]
            raw[network] = [measure(layer, pairs, options.threads, options.rounds) for layer in layers]
            tables.append(table(network, raw[network], pairs))
    different = sum(sum(row["different_elements"].values()) for rows in raw.values() for row in rows)
    notes = [
        "One-node models, channels-last uint8 codes in and out, batch 1, medians.",
        f"Elements of w8a8 outputs that differ from stock ONNX Runtime: {different}.",
        "Ratios are times over onnxruntime w8a8's; the kernel is the last pair's.",
        *[
            f"{network}, {bits}: {1 / mean_ratio(rows, f'lowbit {bits}'):.2f} times as fast as onnxruntime "
            f"w8a8 (geometric mean over {len(rows)} layers)."
            for network, rows in raw.items()
            for bits in pairs
        ],
        f"Threads: {options.threads}"
        + (f", pinned to core {options.core}." if options.threads == 1 else "."),
    ]
    title = f"Convolutions, {options.threads} thread{'s' if options.threads > 1 else ''}"
    write(options.name or f"layers_{options.threads}t", title, tables, notes, raw)


if __name__ == "__main__":
    main()
