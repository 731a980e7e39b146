"""ONNX Runtime's own quantizer, run here on a small random network with many combinations of its options."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.dialects import oracle
from tests.support import FLOAT_MATMULS, interface, lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")
quantization = pytest.importorskip("onnxruntime.quantization", reason="needs onnxruntime's quantizer")


def _network(seed: int) -> onnx.ModelProto:
    """A float network with most of what the quantizer treats: residual, Clip, Concat, pools, Resize, Gemm."""
    rng = np.random.default_rng(seed)
    tensors, nodes = [], []

    def const(array, name):
        tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(op, inputs, **attributes):
        nodes.append(helper.make_node(op, inputs, [f"t{len(nodes)}"], f"n{len(nodes)}", **attributes))
        return f"t{len(nodes) - 1}"

    def conv(x, i, o, k, op="Conv", **attributes):
        n = len(nodes)
        group = attributes.get("group", 1)
        shape = (i, o, k, k) if op == "ConvTranspose" else (o, i // group, k, k)
        w = const((rng.normal(size=shape) / np.sqrt(i * k * k / group)).astype(np.float32), f"w{n}")
        b = const((rng.normal(size=o) * 0.1).astype(np.float32), f"b{n}")
        return node(op, [x, w, b], **attributes)

    same = {"pads": [1, 1, 1, 1]}
    x = node("Relu", [conv("x", 3, 8, 3, strides=[2, 2], **same)])
    bounds = [const(np.float32(v), f"bound{v}") for v in (0, 6)]
    a = node("Clip", [conv(x, 8, 8, 3, group=8, **same), *bounds])
    a = conv(a, 8, 8, 1)
    x = node("Relu", [node("Add", [a, x])])
    b = node("LeakyRelu", [conv(x, 8, 4, 3, **same)], alpha=0.1)
    c = node("Mul", [b, node("Sigmoid", [b])])
    x = node("Concat", [x, c], axis=1)
    d = node("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2])
    d = node("Resize", [d, "", const(np.array([1, 1, 2, 2], np.float32), "scales")], mode="nearest")
    x = node("Add", [conv(d, 12, 12, 1), x])
    x = node("AveragePool", [x], kernel_shape=[2, 2], strides=[2, 2])
    x = conv(x, 12, 6, 2, "ConvTranspose", strides=[2, 2])
    x = node("Transpose", [node("Transpose", [x], perm=[0, 2, 3, 1])], perm=[0, 3, 1, 2])
    pooled = node("Flatten", [node("GlobalAveragePool", [x])])
    g = const((rng.normal(size=(10, 6)) * 0.4).astype(np.float32), "gw")
    y = node("Gemm", [pooled, g, const(rng.normal(size=10).astype(np.float32), "gb")], transB=1)
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["N", 10]),
         helper.make_tensor_value_info(x, TensorProto.FLOAT, ["N", 6, 8, 8])], tensors,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    model.ir_version = 10
    return model


class _Calibration(quantization.CalibrationDataReader):
    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.rows = iter([{"x": rng.normal(size=(2, 3, 16, 16)).astype(np.float32)} for _ in range(4)])

    def get_next(self):
        return next(self.rows, None)


_TYPES = quantization.QuantType
_OPTIONS = {
    "default": {},
    "per_channel": {"per_channel": True},
    "u8s8_reduce_range": {"activation_type": _TYPES.QUInt8, "reduce_range": True, "per_channel": True},
    "u8u8": {"activation_type": _TYPES.QUInt8, "weight_type": _TYPES.QUInt8},
    "symmetric": {"per_channel": True, "extra_options": {"ActivationSymmetric": True}},
    "weight_pairs": {"per_channel": True, "extra_options": {"AddQDQPairToWeight": True}},
    "dedicated_pairs": {"extra_options": {"DedicatedQDQPair": True}},
    "float_bias": {"per_channel": True, "extra_options": {"QuantizeBias": False}},
    "contrib_ops": {"extra_options": {"UseQDQContribOps": True}},
    "forced_between": {"extra_options": {"ForceQuantizeNoInputCheck": True}},
    "int4_weights": {"weight_type": _TYPES.QInt4, "per_channel": True},
    "uint4_weights": {"weight_type": _TYPES.QUInt4, "activation_type": _TYPES.QUInt8},
    "asymmetric_weights": {
        "activation_type": _TYPES.QUInt8,
        "weight_type": _TYPES.QUInt8,
        "extra_options": {"WeightSymmetric": False},
    },
    "only_convolutions": {"op_types_to_quantize": ["Conv", "Gemm", "ConvTranspose"], "per_channel": True},
}


def _quantized(folder, seed: int, options: dict) -> onnx.ModelProto:
    logging.getLogger().setLevel(logging.ERROR)  # the quantizer recommends its pre-processing step
    source, target = folder / f"float_{seed}.onnx", folder / f"qdq_{seed}.onnx"
    onnx.save(_network(seed), source)
    quantization.quantize_static(str(source), str(target), _Calibration(seed), **options)
    return onnx.load(target)


@pytest.mark.parametrize("options", _OPTIONS)
def test_quantizer_output_converts_exactly(options: str, tmp_path, seeds) -> None:
    require_native()
    for seed in seeds(1):
        model = _quantized(tmp_path, seed, _OPTIONS[options])
        result = lowbit.convert(model)
        kept = {f"{n.op_type}: {n.reason}" for n in result.report.kept if n.op_type in FLOAT_MATMULS}
        assert not kept
        assert interface(result.model) == interface(model)
        session = lowbit_session(result.model)
        for batch in (1, 3):
            x = np.random.default_rng([seed, batch]).normal(size=(batch, 3, 16, 16)).astype(np.float32)
            for ours, meant in zip(session.run(None, {"x": x}), oracle.run(model, {"x": x}), strict=True):
                np.testing.assert_allclose(ours, meant, rtol=1e-6, atol=1e-12)
