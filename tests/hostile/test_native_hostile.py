"""Hostile lowbit models: ONNX Runtime answers with an error that names the node, the process lives on."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SANITIZED
from tests.hostile import native_nodes
from tests.support import lowbit_library, require_native

ROOT = Path(__file__).resolve().parents[2]
BATCH = 500  # for one process: to start one takes longer than hundreds of cases
NAMES = [name for name, _ in native_nodes.cases()]


def outcomes(*arguments: object) -> dict[str, str]:
    """Case -> what happened, from a child process that must survive all of them."""
    command = [
        sys.executable,
        "-m",
        "tests.hostile.native_nodes",
        str(lowbit_library()),
        *map(str, arguments),
    ]
    child = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    tried = [line[4:] for line in child.stdout.splitlines() if line.startswith("try ")]
    ended = [line[4:] for line in child.stdout.splitlines() if line.startswith("end ")]
    assert child.returncode == 0, f"the process died of case {tried[-1:]}: {child.stderr[-2000:]}"
    return dict(zip(tried, ended, strict=True))


def test_there_are_enough_cases() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert len(NAMES) >= 200


def test_sound_models_run() -> None:
    """The broken models below differ from these in one thing each."""
    assert {name: end for name, end in outcomes("sound").items() if end != "ran"} == {}


@pytest.mark.parametrize("start", range(0, len(NAMES), BATCH))
def test_broken_models_are_refused(start: int) -> None:
    ends = outcomes("broken", start, start + BATCH)
    assert {name: end for name, end in ends.items() if not end.startswith("refused: ")} == {}


def test_random_bytes_never_crash(seeds) -> None:
    for seed in seeds(2):
        assert len(outcomes("fuzz", seed, 150)) == 150


SIZES = [2**63 - 1, 2**62, 2**31, -5]


@pytest.mark.parametrize("base", ["conv", "conv_transpose", "conv_1d", "max_pool", "average_pool"])
@pytest.mark.parametrize("size", SIZES)
def test_declared_sizes_do_not_overflow(base: str, size: int) -> None:
    """A graph may declare any dimension; the arithmetic of windows stays inside int64."""
    native = require_native()
    node = native_nodes.SOUND[base]()
    shape = list(node.feeds["x"].shape)
    shape[1] = size
    shapes = [shape] + [None] * (len(node.order) - 1)
    present = [name in node.constants or name in node.feeds for name in node.order]
    with pytest.raises(native.LowBitError, match=rf"{size} pixels, expected 0\.\."):
        native.infer_output(node.op, node.attributes, shapes, present)


@pytest.mark.parametrize("threads", [0, 10**9])
def test_number_of_threads_is_bounded(threads: int) -> None:
    native = require_native()
    node = native_nodes.gemm()
    inputs = [node.constants.get(name, node.feeds.get(name)) for name in node.order]
    with pytest.raises(native.LowBitError, match=f"threads is {threads}"):
        native.run(node.op, node.attributes, inputs, threads=threads)


def wide_gemm(features: int, weight: int) -> native_nodes.Node:
    node = native_nodes.gemm()
    node.attributes |= {"w_bits": 8, "in_features": features, "out_features": 1}
    node.constants |= {"w": np.full(features, weight, np.uint8), "w_scale": np.ones(1, np.float32)}
    node.constants |= {"x_zero_point": np.int32(0), "bias": np.zeros(1, np.int32)}
    node.feeds["x"] = np.full((1, features), 255, np.uint8)
    return node


@pytest.mark.parametrize(
    ("features", "weight", "bias", "fits"),
    [
        (33025, 127, 0, True),  # too short to overflow with any weights of this width
        (140_000, 0, 0, True),  # long enough, but not with these weights
        (66_311, 127, 0, True),  # 66311 * 127 * 255 = 2**31 - 1 - 1912
        (66_312, 127, 0, False),
        (66_311, 127, 1912, True),
        (66_311, 127, 1913, False),
        (66_311, 127, -1913, False),
    ],
)
def test_the_bound_of_the_accumulator_is_exact(features: int, weight: int, bias: int, fits: bool) -> None:
    native = require_native()
    node = wide_gemm(features, weight)
    node.constants["bias"] = np.full(1, bias, np.int32)
    inputs = [node.constants.get(name, node.feeds.get(name)) for name in node.order]
    if fits:
        assert native.run(node.op, node.attributes, inputs).tolist() == [[255 if weight else 10]]
    else:
        with pytest.raises(native.LowBitError, match="may reach"):
            native.run(node.op, node.attributes, inputs)


def test_twice_the_sum_of_the_weights_may_leave_int32() -> None:
    """Kernels store twice the weights of bipolar activations, whose sum is then beyond int32."""
    native = require_native()
    side, channels = 30, 9400
    products = side * side * channels
    assert 127 * products < 2**31 <= 2 * 127 * products
    node = native_nodes.conv(kernel_shape=[side, side], pads=[0] * 4, in_channels=channels, out_channels=1)
    node.attributes |= {"x_bits": 1, "x_encoding": "bipolar", "w_bits": 7, "epilogue": "float"}
    node.attributes["w_encoding"] = "unsigned"
    row = native.pack_weights(np.full((1, products), 127, np.int64), 7)
    node.constants = {"w": row, "x_scale": np.float32(1), "w_scale": np.float32(1)}
    node.constants |= {"x_zero_point": np.int32(0), "w_zero_point": np.int32(0)}
    x = np.zeros((1, side, side, channels), np.uint8)
    x[0, 0, :, :] = 1
    inputs = [x if name == "x" else node.constants.get(name) for name in node.order]
    expected = np.float32(127 * (2 * int(x.sum()) - products))
    levels = native.isa_levels()
    for level in levels[:: max(len(levels) - 1, 1)] if SANITIZED else levels:  # four seconds each
        assert native.run(node.op, node.attributes, inputs, isa=level).item() == expected, level


class Library:
    """RegisterCustomOps as an ONNX Runtime calls it, with a function table that can only make statuses."""

    def __init__(self, path: str, newest: int) -> None:
        self.statuses: list[str] = []
        make = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
        self.create_status = make(self._create_status)
        self.table = (ctypes.c_void_p * 512)()
        self.table[0] = ctypes.cast(self.create_status, ctypes.c_void_p)  # OrtApi's first function
        table = ctypes.addressof(self.table)
        self.get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
            lambda version: table if version <= newest else None
        )
        self.version = ctypes.create_string_buffer(b"1.2.3")
        self.get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(self.version))
        self.base = (ctypes.c_void_p * 2)(
            ctypes.cast(self.get_api, ctypes.c_void_p), ctypes.cast(self.get_version, ctypes.c_void_p)
        )
        self.register = ctypes.CDLL(path).RegisterCustomOps
        self.register.restype = ctypes.c_void_p
        self.register.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def _create_status(self, _code: int, message: bytes) -> int:
        self.statuses.append(message.decode())
        return 1

    def message(self) -> str:
        assert self.register(None, ctypes.addressof(self.base)) == 1
        return self.statuses[-1]


def test_an_older_runtime_is_told_what_to_do() -> None:
    text = Library(str(lowbit_library()), newest=23).message()
    assert text == "lowbit needs ONNX Runtime 1.24 or newer, this is 1.2.3; update the onnxruntime package"


def test_a_second_runtime_in_the_process_is_refused() -> None:
    """Its tensors would be read through the functions of the first."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(lowbit_library()))
    assert "another ONNX Runtime" in Library(str(lowbit_library()), newest=24).message()
