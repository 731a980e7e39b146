"""AMD Quark's extended quantizers: standard ones where there is a counterpart, else refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.dialects import oracle
from tests.dialects.graphs import CASES
from tests.support import FLOAT_MATMULS, interface, lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")

_NAMES = {
    "com.amd.quark": ("ExtendedQuantizeLinear", "ExtendedDequantizeLinear"),
    "com.vai.quantize": ("VitisQuantizeLinear", "VitisDequantizeLinear"),
}
_GRAPHS = [
    "ort_quantizer.u8_activations_s8_weights",
    "ort_quantizer.constants_as_nodes",
    "ort_quantizer.add_qdq_pair_to_weight",
    "ort_quantizer.residual_add_relu",
    "ort_quantizer.gemm",
    "exporters.quark_power_of_two",
    "exporters.brevitas_w4a4",
]


def extended(model: onnx.ModelProto, domain: str) -> onnx.ModelProto:
    """The model as Quark writes it: every quantizer of its own domain, with `axis` and zero point."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantize, dequantize = _NAMES[domain]
    for node in copy.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.op_type = quantize if node.op_type == "QuantizeLinear" else dequantize
            node.domain = domain
            if not node.attribute:
                node.attribute.append(helper.make_attribute("axis", 1))
    copy.opset_import.append(helper.make_opsetid(domain, 1))
    return copy


@pytest.mark.parametrize("domain", _NAMES)
@pytest.mark.parametrize("name", _GRAPHS)
def test_extended_quantizers_mean_the_standard_ones(name: str, domain: str, seeds) -> None:
    require_native()
    for seed in seeds(1):
        built = CASES[name].build(seed)
        model = extended(built.model, domain)
        result = lowbit.convert(model)
        assert interface(result.model) == interface(model)
        assert not any(node.op_type in FLOAT_MATMULS for node in result.model.graph.node)
        assert not any(entry.domain == domain for entry in result.model.opset_import)
        feeds = built.feed(**built.sizes[0])
        ours = lowbit_session(result.model).run(None, feeds)
        for a, b in zip(ours, oracle.run(built.model, feeds), strict=True):
            np.testing.assert_array_equal(a, b)
        report = lowbit.verify(result.model, model, data=feeds)
        assert report.ok
        assert report.total("equal") > 0


def test_per_channel_before_opset_13() -> None:
    """The standard DequantizeLinear has no axis there; com.microsoft's takes its place."""
    require_native()
    built = CASES["ort_quantizer.u8_activations_s8_weights"].build(1)
    model = extended(built.model, "com.amd.quark")
    model.opset_import[0].version = 12
    ours = lowbit_session(lowbit.convert(model).model).run(None, built.feed())
    for a, b in zip(ours, oracle.run(built.model, built.feed()), strict=True):
        np.testing.assert_array_equal(a, b)


def _pair(dtype: int, *, domain: str = "com.amd.quark", zero_point: bool = True) -> onnx.ModelProto:
    """Quantizer, dequantizer, and a Relu behind them."""
    zero = helper.make_tensor("zero", dtype, [], [0])
    scale = numpy_helper.from_array(np.asarray(0.1, np.float32), "scale")
    parameters = ["scale", "zero"] if zero_point else ["scale"]
    quantize, dequantize = _NAMES[domain]
    nodes = [
        helper.make_node(quantize, ["x", *parameters], ["q"], "first", domain=domain, axis=1),
        helper.make_node(dequantize, ["q", *parameters], ["r"], "second", domain=domain, axis=1),
        helper.make_node("Relu", ["r"], ["y"], "relu"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "pair", [x], [y], [scale, zero])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (TensorProto.BFLOAT16, "BFLOAT16"),
        (TensorProto.FLOAT16, "FLOAT16"),
        (TensorProto.INT32, "INT32"),
        (TensorProto.UINT32, "UINT32"),
    ],
)
@pytest.mark.parametrize("domain", _NAMES)
def test_other_types_are_refused_by_name(dtype: int, said: str, domain: str) -> None:
    with pytest.raises(lowbit.UnsupportedError, match=rf"'first'.*{said}.*AMD's library"):
        lowbit.convert(_pair(dtype, domain=domain))


@pytest.mark.parametrize("dtype", [TensorProto.INT16, TensorProto.UINT16])
def test_sixteen_bits_stay_as_what_onnx_runtime_loads(dtype: int) -> None:
    require_native()
    result = lowbit.convert(_pair(dtype))
    kinds = {(node.domain, node.op_type) for node in result.model.graph.node}
    assert kinds == {("com.microsoft", "QuantizeLinear"), ("com.microsoft", "DequantizeLinear"), ("", "Relu")}
    assert all("16" in n.reason for n in result.report.kept if n.op_type.endswith("ExtendedQuantizeLinear"))
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    (y,) = lowbit_session(result.model).run(None, {"x": x})
    np.testing.assert_allclose(y, np.maximum(np.rint(x / np.float32(0.1)) * np.float32(0.1), 0))


def test_a_missing_zero_point_is_refused() -> None:
    """It says the type of the codes."""
    with pytest.raises(lowbit.UnsupportedError, match=r"'first'.*zero point"):
        lowbit.convert(_pair(TensorProto.INT8, zero_point=False))


@pytest.mark.parametrize("operator", ["BFPQuantizeDequantize", "MXQuantizeDequantize", "ExtendedLSTM"])
def test_other_operators_of_the_domain_are_refused(operator: str) -> None:
    model = _pair(TensorProto.INT8)
    model.graph.node[2].op_type, model.graph.node[2].domain = operator, "com.amd.quark"
    with pytest.raises(lowbit.UnsupportedError, match=f"{operator} 'relu'"):
        lowbit.convert(model)
