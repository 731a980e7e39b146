"""The advice of inspect: followed, it does what it says; where nothing would help, there is none."""

from __future__ import annotations

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.inspection.inspect import inspect
from onnx import TensorProto, helper, numpy_helper

from tests.support import require_native
from tests.tools.conftest import qdq_conv
from tests.tools.test_cli import run, run_json, save


@pytest.fixture(autouse=True)
def native():
    require_native()


class Net:
    """A QDQ graph whose quantizers can be left out, one by one."""

    def __init__(self, without: tuple[str, ...] = (), **kinds: str):
        self.without, self.kinds = without, kinds
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(0)

    def q(self, x: str) -> str:
        """A quantizer of an activation: 8 bits, or as ``kinds`` says, or none."""
        if x in self.without:
            return x
        kind = self.kinds.get(x, "")
        scale = np.float32(0.05) if kind != "per_channel" else np.linspace(0.02, 0.06, 4, dtype=np.float32)
        zero = np.uint16(30000) if kind == "16_bits" else np.uint8(120)
        self.constants |= {f"{x}_s": scale, f"{x}_z": np.broadcast_to(zero, scale.shape).copy()}
        self.node("QuantizeLinear", [x, f"{x}_s", f"{x}_z"], f"{x}_q", axis=1)
        return self.node("DequantizeLinear", [f"{x}_q", f"{x}_s", f"{x}_z"], f"{x}_dq", axis=1)

    def node(self, op_type: str, inputs: list[str], output: str, **attributes) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], f"n_{output}", **attributes))
        return output

    def conv(self, x: str, y: str) -> str:
        weights = self.rng.integers(-127, 128, (4, 4, 3, 3)).astype(np.int8)
        if f"{y}_w" in self.without:
            self.constants[f"{y}_w"] = weights.astype(np.float32) * np.float32(0.01)
            inputs = [x, f"{y}_w"]
        else:
            self.constants |= {f"{y}_w": weights, f"{y}_ws": np.float32(0.01), f"{y}_wz": np.int8(0)}
            inputs = [x, self.node("DequantizeLinear", [f"{y}_w", f"{y}_ws", f"{y}_wz"], f"{y}_wd")]
        return self.node("Conv", inputs, y, pads=[1, 1, 1, 1], kernel_shape=[3, 3])

    def model(self, output: str) -> onnx.ModelProto:
        ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4, 8, 8]) for n in ("x", output)]
        constants = [numpy_helper.from_array(np.asarray(v), n) for n, v in self.constants.items()]
        graph = helper.make_graph(self.nodes, "net", ends[:1], ends[1:], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def network(without: tuple[str, ...] = (), **kinds: str) -> onnx.ModelProto:
    """Conv, a normalization that lowbit has no form of, Conv, an Add of both, MaxPool, Conv."""
    net = Net(without, **kinds)
    x = net.q("x")
    a = net.q(net.conv(x, "a"))
    b = net.q(net.node("LpNormalization", [a], "b"))
    c = net.q(net.node("Add", [net.q(net.conv(b, "c")), b], "d"))
    d = net.q(net.node("MaxPool", [c], "e", kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
    return net.model(net.q(net.conv(d, "f")))


def kept(model: onnx.ModelProto, **options) -> set[str]:
    """The nodes that stay, quantizers apart."""
    nodes = lowbit.convert(model, **options).report.kept
    return {node.name for node in nodes if "Linear" not in node.op_type}


CASES = {
    "float input of a Conv and an Add": (("b",), {}, "n_d", ["b"], "quantize 'b' to 8 bits"),
    "float weights": (("f_w",), {}, "n_f", ["f_w"], "quantize the constant 'f_w'"),
    "float input and weights": (("b", "c_w"), {}, "n_c", ["b", "c_w"], "'b' to 8 bits; quantize the con"),
    "float input of the model": (("x",), {}, "n_a", ["x"], "the quantizer of input 'x' (--input-quant)"),
    "16-bit operand": ((), {"c": "16_bits"}, "n_d", ["c"], "give 'c' 8 bits"),
    "output with a scale per channel": (
        (), {"d": "per_channel"}, "n_d", ["d"], "give 'd' one scale instead of one per channel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_followed_it_converts_what_it_says(case):
    without, kinds, node, tensors, order = CASES[case]
    model, whole = network(without, **kinds), network()
    (advice,) = [each for each in inspect(model).advice if node in each.nodes]
    assert sorted(advice.tensors) == sorted(tensors)
    assert order in advice.text
    # The test's own quantizers instead of those that were tried.
    if case == "float input of the model":
        left = kept(model, input_quant="x:scale=0.05,bits=8,unsigned")
    else:
        left = kept(whole)
    assert node in kept(model)
    assert kept(model) - left == set(advice.nodes)


def test_nodes_of_one_reason_share_their_advice():
    net = Net(("r0", "r1", "r2"))
    x = net.q("x")
    for i in range(3):
        made = net.q(net.conv(x, f"c{i}"))
        x = net.q(net.node("Add", [made, net.node("LpNormalization", [x], f"r{i}")], f"s{i}"))
    (advice,) = inspect(net.model(net.q(net.conv(x, "y")))).advice
    assert advice.nodes == ["n_s0", "n_s1", "n_s2"]
    assert advice.tensors == ["r0", "r1", "r2"]
    assert "and 2 more" in advice.text
    assert "3 more nodes convert" in advice.text


def test_nodes_that_need_more_have_advice_of_their_own():
    """Both Concats have a float operand, which the second one's quantizer rounds; the first one has none."""
    net = Net(("r0", "r1", "s0"))
    x = net.q("x")
    a, b = net.q(net.conv(x, "a")), net.q(net.conv(x, "b"))
    first = net.node("Concat", [a, net.node("LpNormalization", [b], "r0", p=1)], "s0", axis=1)
    second = net.q(net.node("Concat", [a, net.node("LpNormalization", [b], "r1")], "s1", axis=1))
    pooled = net.q(net.node("MaxPool", [second], "p", kernel_shape=[1, 1]))
    net.node("Concat", [net.q(net.node("LpNormalization", [first], "t")), pooled], "y", axis=1)
    model = net.model("y")
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 16
    advice = {name: each for each in inspect(model).advice for name in each.nodes}
    assert "n_s1" not in advice
    assert sorted(advice["n_s0"].tensors) == ["r0", "s0"]
    assert "Concat 'n_s0':" in advice["n_s0"].text


def test_a_tensor_in_front_of_a_relu_stays():
    """It is computed together with the convolution; the quantizer belongs behind it."""
    net = Net(("a_w", "r"))
    made = net.node("Relu", [net.conv(net.q("x"), "a")], "r")
    (advice,) = inspect(net.model(net.q(net.node("LpNormalization", [made], "y")))).advice
    assert advice.tensors == ["a_w"]
    assert advice.nodes == ["n_a", "n_r"]


def test_gains_are_shares_of_the_network():
    """One of three equal convolutions is float: a third of the work; in time 1 of 1 + 2 * .44, less .44."""
    (advice,) = inspect(network(("f_w",))).advice
    assert advice.macs == 4 * 4 * 9 * 64
    assert advice.macs_share == pytest.approx(1 / 3)
    assert advice.time_share == pytest.approx(0.56 / 1.88)
    assert "33 % of the network's multiply-adds (about 30 % of its time)" in advice.text


def dynamic() -> onnx.ModelProto:
    """A quantizer whose scale is computed at run time; single tensors are not what is missing."""
    net = Net(("b",))
    net.node("LpNormalization", [net.q(net.conv(net.q("x"), "a"))], "b")
    net.nodes.append(helper.make_node("DynamicQuantizeLinear", ["b"], ["bq", "bs", "bz"], "n_dynamic"))
    real = net.node("DequantizeLinear", ["bq", "bs", "bz"], "bd")
    return net.model(net.q(net.conv(real, "y")))


@pytest.mark.parametrize(
    "model",
    [network(), qdq_conv(weight_is_input=True), dynamic()],
    ids=["no form", "fed weights", "dynamic"],
)
def test_there_is_none_where_nothing_helps(model):
    assert kept(model)
    assert inspect(model).advice == []


def test_advice_at_the_command_line(tmp_path):
    model = save(network(("b",)), tmp_path / "m.onnx")
    text = run("inspect", model).stdout
    assert "advice" in text
    assert "quantize 'b' to 8 bits" in text
    (advice,) = run_json("inspect", model)["advice"]
    assert advice["tensors"] == ["b"]
    page = tmp_path / "m.html"
    run("inspect", model, "--report", page)
    assert "quantize &#39;b&#39; to 8 bits" in page.read_text(encoding="utf-8")
