"""One verdict on every device: the same models are refused, the same codes mean the same."""

from __future__ import annotations

import os
from pathlib import Path

import lowbit.ops
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.ep.conftest import registered_devices
from tests.hostile import campaign, native_nodes
from tests.support import require_native

native = require_native()

from tests.hostile.lowbit_mutants import Sessions  # noqa: E402

F32, I32 = np.float32, np.int32
X = np.random.default_rng(0).integers(0, 256, (2, 5, 5, 4)).astype(np.uint8)


@pytest.fixture(scope="module")
def sessions() -> list[Sessions]:
    """Custom ops alone, and both devices of the provider that are found everywhere."""
    registered_devices()
    return [Sessions(device) for device in ("cpu", "cpu-ep", "fake:0")]


class Model:
    """Nodes one after the other, of constants that are named after their node."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.nodes, self.constants = x, [], []

    def lowbit(self, node: native_nodes.Node, y: str, **fed: str) -> Model:
        order = [name for name in node.order if name in node.constants or name in node.feeds]
        last = node.order.index(order[-1])
        inputs = [
            fed.get(name, f"{y}_{name}" if name in node.constants else "") for name in node.order[: last + 1]
        ]
        self.constants += [
            numpy_helper.from_array(np.asarray(a), f"{y}_{name}") for name, a in node.constants.items()
        ]
        self.nodes.append(helper.make_node(node.op, inputs, [y], y, domain="ai.lowbit", **node.attributes))
        return self

    def onnx(self, op: str, inputs: list[str], y: str, **attributes) -> Model:
        self.nodes.append(helper.make_node(op, inputs, [y], y, **attributes))
        return self

    def const(self, name: str, value) -> Model:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return self

    def bytes(self, *outputs: str, of: int = TensorProto.UINT8) -> bytes:
        x = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(self.x.dtype), self.x.shape)
        made = [helper.make_tensor_value_info(y, of, None) for y in outputs]
        graph = helper.make_graph(self.nodes, "verdicts", [x], made, self.constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.lowbit", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def reader(op: str = "LowBitConv", **attributes) -> native_nodes.Node:
    node = native_nodes.conv(op, y_bits=8, **attributes)
    node.constants["x_zero_point"] = I32(0)
    return node


def quantizer(bits: int) -> native_nodes.Node:
    node = native_nodes.quantize()
    node.attributes = {"y_bits": bits}
    node.constants = {"y_scale": F32(0.1), "y_zero_point": I32(0)}
    return node


def ends(sessions: list[Sessions], model: bytes, x: np.ndarray) -> list[tuple[str, list[np.ndarray] | str]]:
    return [each.ended(model, {"x": x}, optimized=True) for each in sessions]


@pytest.mark.parametrize("encoding", ["unsigned", "signed", "bipolar"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("op", ["LowBitConv", "LowBitConvTranspose", "LowBitGemm"])
def test_wild_codes_are_read_as_their_low_bits(sessions, op: str, bits: int, encoding: str) -> None:
    if encoding == "bipolar" and bits > 1:
        pytest.skip("bipolar codes have one bit")
    node = native_nodes.gemm() if op == "LowBitGemm" else reader(op)
    node.attributes |= {"x_bits": bits, "x_encoding": encoding}
    node.constants["x_zero_point"] = I32(0)
    x = X.reshape(-1)[: 3 * 16].reshape(3, 16) if op == "LowBitGemm" else X
    x = x.view(np.int8) if encoding == "signed" else x
    low = (x.astype(int) + (flip := 1 << (bits - 1) if encoding == "signed" else 0)) % (1 << bits) - flip
    inputs = [x if name == "x" else node.constants.get(name) for name in node.order]
    expected = lowbit.ops.evaluate(node.op, node.attributes, inputs)
    inputs[0] = low.astype(x.dtype)
    np.testing.assert_array_equal(lowbit.ops.evaluate(node.op, node.attributes, inputs), expected)
    inputs[0] = x
    for level in native.isa_levels():
        np.testing.assert_array_equal(native.run(node.op, node.attributes, inputs, isa=level), expected)
    for _, got in ends(sessions, Model(x).lowbit(node, "y", x="x").bytes("y"), x):
        np.testing.assert_array_equal(got, [expected])


def between(kind: str, y: str, bits: int) -> bytes:
    """A quantizer to four bits, something that passes its codes on, and a reader."""
    model = Model(X.astype(F32)).lowbit(quantizer(4), "q", x="x")
    reads = "q"
    if kind == "MaxPool":
        model.lowbit(native_nodes.max_pool(kernel_shape=[1, 1]), "moved", x="q")
        reads = "moved"
    elif kind == "Concat":
        node = native_nodes.concat()
        node.constants |= {"x_scales": np.full(2, 0.1, F32), "y_scale": F32(0.1)}
        node.attributes["axis"] = 0
        model.lowbit(node, "moved", p="q", q="q")
        reads = "moved"
    elif kind == "Transpose":
        model.onnx("Transpose", ["q"], "moved", perm=[0, 2, 1, 3])
        reads = "moved"
    elif kind == "two regions":  # the residual comes through a node that no region takes
        model.lowbit(
            native_nodes.Node(
                "LowBitDequantize",
                ["x", "x_scale", "x_zero_point"],
                {},
                {"x_scale": F32(1), "x_zero_point": I32(0)},
                {"x": X},
            ),
            "f",
            x="q",
        )
        model.onnx("LpNormalization", ["f"], "g").lowbit(quantizer(2), "r", x="g")
        node = reader(x_bits=bits)
        node.constants |= {name: F32(0.3) for name in ("residual_scale", "inner_scale")}
        node.constants |= {name: I32(0) for name in ("residual_zero_point", "inner_zero_point")}
        node.feeds["residual"] = X
        node.attributes["out_channels"] = 4
        for name, count in (("w", 72), ("w_scale", 4), ("bias", 4)):
            node.constants[name] = np.asarray(node.constants[name])[:count]
        return model.lowbit(node, y, x="q", residual="r").bytes(y)
    model.lowbit(reader(x_bits=bits), y, x=reads)
    if kind == "written first":  # ONNX Runtime sorts nodes, but creates them in the order of the file
        model.nodes.reverse()
    return model.bytes(y)


@pytest.mark.parametrize("kind", ["directly", "written first", "MaxPool", "Concat", "two regions"])
def test_a_producer_of_more_bits_is_refused_at_load(sessions, kind: str) -> None:
    for bits in (2, 4):
        ended = ends(sessions, between(kind, "y", bits), X.astype(F32))
        if bits == 4:
            assert {stage for stage, _ in ended} == {"end"}, ended
            for _, got in ended[1:]:
                np.testing.assert_array_equal(got, ended[0][1])
            continue
        assert {stage for stage, _ in ended} == {"load"}, ended
        for _, text in ended:
            assert "node 'y' (LowBitConv)" in text
            assert "states the codes 0..15, attribute 'x_bits' is 2, codes 0..3" in text


def test_codes_behind_a_standard_node_are_read_as_their_low_bits(sessions) -> None:
    narrow = ends(sessions, between("Transpose", "y", 2), X.astype(F32))
    assert {stage for stage, _ in narrow} == {"end"}, narrow
    for _, got in narrow[1:]:
        np.testing.assert_array_equal(got, narrow[0][1])
    wide = ends(sessions[:1], between("Transpose", "y", 4), X.astype(F32))
    assert not np.array_equal(narrow[0][1], wide[0][1])


def unused(kind: str) -> bytes:
    """A sound convolution, and beside it a node that cannot run, and whose output nobody reads."""
    model = Model(X).lowbit(reader(), "y", x="x")
    if kind == "tail_scale of the wrong length":
        node = native_nodes.with_tail()
        node.constants["tail_scale"] = np.ones(5, F32)
        return model.lowbit(node, "z", x="x").bytes("y")
    if kind == "no broadcast":
        return model.lowbit(native_nodes.binary("LowBitAdd"), "z", a="x", b="y").bytes("y")
    if kind == "window larger than its input":
        return model.lowbit(native_nodes.max_pool(kernel_shape=[50, 50]), "z", x="x").bytes("y")
    if kind == "channels that do not fit":
        return model.lowbit(reader(), "z", x="y").bytes("y")
    if kind == "of constants alone":
        node = native_nodes.unary("LowBitRequantize")
        return model.const("c", np.ones((1, 4), F32)).lowbit(node, "z", x="c").bytes("y")
    assert kind == "behind one that runs"
    model.lowbit(native_nodes.max_pool(), "z", x="y")
    return model.lowbit(native_nodes.binary("LowBitAdd"), "u", a="z", b="y").bytes("y")


UNUSED = ["tail_scale of the wrong length", "no broadcast", "window larger than its input",
          "channels that do not fit", "of constants alone", "behind one that runs"]  # fmt: skip


@pytest.mark.parametrize("kind", UNUSED)
def test_nodes_that_nobody_needs_are_checked_too(sessions, kind: str) -> None:
    ended = ends(sessions, unused(kind), X)
    assert all(isinstance(text, str) for _, text in ended), ended
    assert len({stage for stage, _ in ended}) == 1, ended


@pytest.mark.parametrize("dims", [[4, -1], [[4, -1]]])
def test_a_shape_is_a_vector(sessions, dims: list) -> None:
    model = Model(X).lowbit(reader(), "a", x="x").const("dims", np.array(dims, np.int64))
    model.onnx("Reshape", ["a", "dims"], "b")
    node = native_nodes.unary("LowBitRequantize")
    ended = ends(sessions, model.lowbit(node, "y", x="b").bytes("y"), X)
    assert {stage for stage, _ in ended} == {"end" if np.ndim(dims) == 1 else "run"}, ended


def test_constants_per_channel_lie_along_one_dim(sessions) -> None:
    node = reader()
    node.constants["w_scale"] = np.full((6, 1), 0.1, F32)
    for stage, text in ends(sessions, Model(X).lowbit(node, "y", x="x").bytes("y"), X):
        assert stage == "load"
        assert "input 'w_scale' has shape [6, 1], expected 6 elements along one dim" in text


# --- the campaign itself


class Fuzzer:
    """A kind of campaign for the test below, in its worker's process."""

    def __init__(self, device: str) -> None:
        self.device = device

    def case(self, seed: int) -> tuple[str, str]:
        if seed == 3:
            os._exit(7)
        if seed == 4:
            os.write(2, b"/opt/rh/gcc-toolset-14/bits/stl_algo.h: std::clamp: Assertion failed.")
            os.abort()
        while seed == 5:
            pass
        return "sound", "FAILED: different" if seed == 8 else "equal"


def test_a_campaign_survives_crashes_and_hangs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(campaign, "HANGS", 2.0)
    monkeypatch.setitem(campaign.KINDS, "lowbit", "tests.hostile.test_verdicts")
    state = campaign.State.read(tmp_path / "state.json")
    assert campaign.fuzz("lowbit", "cpu", 10, None, 1, state) == 3
    run = campaign.State.read(state.path).of("lowbit cpu")
    assert run["seeds"] == [[0, 10]]
    assert run["verdicts"] == {"equal": 6, "ONNX Runtime aborted": 1, "FAILED": 3}
    told = {failure["seed"]: failure["verdict"] for failure in run["failures"]}
    assert "status 7" in told[3]
    assert "no end after 2 s" in told[5]
    assert "different" in told[8]
    assert campaign.State.read(state.path).next_seed("lowbit cpu") == 10


@pytest.mark.parametrize(("kind", "count"), [("lowbit", 100), ("context", 40)])
def test_a_little_of_each_campaign(tmp_path: Path, kind: str, count: int, seeds) -> None:
    state = campaign.State.read(tmp_path / "state.json")
    assert campaign.fuzz(kind, "cpu-ep", count * len(seeds(1)), None, 1, state) == 0, state.runs
    words = {verdict.split()[0].rstrip(",") for verdict in state.of(f"{kind} cpu-ep")["verdicts"]}
    assert {"equal", "refused"} <= words
