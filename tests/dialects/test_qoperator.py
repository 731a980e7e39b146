"""The operator form held against the very kernels that ONNX Runtime runs it with."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.conftest import FULL
from tests.dialects.graphs import CASES, Built
from tests.dialects.test_ort_quantizer import _TYPES, _Calibration, _network
from tests.support import interface, lowbit_session, require_native, session_options, stock_run

lowbit = pytest.importorskip("lowbit")
quantization = pytest.importorskip("onnxruntime.quantization", reason="needs onnxruntime's quantizer")

# Convolutions and matrix products: one rounding of an exact sum, in both forms.
_PRODUCTS = [
    name
    for name, case in CASES.items()
    if name.startswith(("qoperator.conv", "qoperator.gemm", "qoperator.matmul")) and case.loads_in_stock
]
_OTHERS = [
    name
    for name, case in CASES.items()
    if name.startswith("qoperator.") and name not in _PRODUCTS and case.loads_in_stock
]


def _left(model: onnx.ModelProto) -> set[str]:
    """Operators of the form that are still there."""
    prefixes = ("QLinear", "QGemm", "ConvInteger", "MatMulInteger")
    return {node.op_type for node in model.graph.node if node.op_type.startswith(prefixes)}


@pytest.mark.parametrize("name", _PRODUCTS)
def test_products_equal_onnx_runtimes_integer_kernels(name: str, seeds) -> None:
    """In every element, ties and near ties included; unoptimized, so that no other kernel steps in."""
    require_native()
    for seed in seeds(3):
        built = CASES[name].build(seed)
        feeds = built.feed(1, **built.sizes[0])
        ours = lowbit_session(lowbit.convert(built.model).model).run(None, feeds)
        for a, b in zip(ours, stock_run(built.model, feeds, optimize=False), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"seed {seed}")


def _verified(built: Built, feeds: dict[str, np.ndarray]) -> lowbit.VerifyReport:
    """Every node on the codes that ONNX Runtime's kernels computed."""
    report = lowbit.verify(lowbit.convert(built.model).model, built.model, data=feeds)
    assert not any("not compared" in note for note in report.notes), report.notes
    assert report.ok, [(n.op_type, n.name, n.wrong, n.unexplained, n.note) for n in report.nodes if not n.ok]
    return report


@pytest.mark.parametrize("name", _OTHERS)
def test_other_operators_differ_at_ties_only(name: str, seeds) -> None:
    """One step, and only where the exact result lies within float32's error of a tie."""
    require_native()
    for seed in seeds(2):
        built = CASES[name].build(seed)
        report = _verified(built, built.feed(0, **built.sizes[0]))
        assert report.total("equal") > 0 or not report.nodes


def test_ties_do_occur(seeds) -> None:
    """The comparison above is no empty one: there are elements that only a tie explains."""
    require_native()
    near = Counter()
    for name in ("qoperator.average_pools", "qoperator.residual_block", "qoperator.concat_of_branches"):
        for seed in seeds(2):
            built = CASES[name].build(seed)
            near[name] += _verified(built, built.feed(0, **built.sizes[0])).total("near_tie")
    assert near["qoperator.average_pools"] > 0, near


# -- ONNX Runtime's own quantizer

_OPTIONS = {
    "default": {"activation_type": _TYPES.QUInt8},
    "per_channel": {"activation_type": _TYPES.QUInt8, "per_channel": True},
    "u8u8": {"activation_type": _TYPES.QUInt8, "weight_type": _TYPES.QUInt8},
    "reduce_range": {"activation_type": _TYPES.QUInt8, "reduce_range": True, "per_channel": True},
    "s8s8": {"activation_type": _TYPES.QInt8, "per_channel": True},
    "symmetric": {"activation_type": _TYPES.QInt8, "extra_options": {"ActivationSymmetric": True}},
    "forced_between": {
        "activation_type": _TYPES.QUInt8,
        "extra_options": {"ForceQuantizeNoInputCheck": True},
    },
}


def _quantized(folder, model: onnx.ModelProto, reader, **options) -> onnx.ModelProto:
    logging.getLogger().setLevel(logging.ERROR)  # the quantizer recommends its pre-processing step
    source, target = folder / "float.onnx", folder / "qoperator.onnx"
    onnx.save(model, source)
    form = quantization.QuantFormat.QOperator
    quantization.quantize_static(str(source), str(target), reader, quant_format=form, **options)
    return onnx.load(target)


@pytest.mark.parametrize("options", _OPTIONS)
def test_quantizer_output_converts(options: str, tmp_path, seeds) -> None:
    """Only what the quantizer leaves in float (ConvTranspose) stays so; every node equals its original."""
    require_native()
    for seed in seeds(1):
        model = _quantized(tmp_path, _network(seed), _Calibration(seed), **_OPTIONS[options])
        result = lowbit.convert(model)
        assert _left(model) >= {"QLinearConv", "QLinearAdd", "QLinearConcat", "QGemm"}
        assert not _left(result.model), [(n.op_type, n.reason) for n in result.report.kept]
        assert interface(result.model) == interface(model)
        x = np.random.default_rng(seed).normal(size=(2, 3, 16, 16)).astype(np.float32)
        report = lowbit.verify(result.model, model, data={"x": x})
        assert report.ok, [(n.op_type, n.name, n.wrong, n.unexplained) for n in report.nodes if not n.ok]
        assert report.total("equal") > 1000


@pytest.mark.parametrize("name", ["mobilenetv2", *(["densenet121"] if FULL else [])])
def test_benchmark_network_converts(name: str, tmp_path) -> None:
    """A whole network of QOperators becomes lowbit nodes without one operator between."""
    require_native()
    models = pytest.importorskip("lowbit.models")
    images = pytest.importorskip("lowbit.models.calibration").images

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.rows = iter([{"input": images(2, 32)}])

        def get_next(self):
            return next(self.rows, None)

    network = models.NETWORKS[name](image=32, classes=10, batch="N")
    model = _quantized(tmp_path, network, Reader(), activation_type=_TYPES.QUInt8, per_channel=True)
    result = lowbit.convert(model)
    left = {node.op_type for node in result.model.graph.node if node.domain != "ai.lowbit"}
    # ONNX Runtime's quantizer puts no quantizer behind DenseNet's last BatchNormalization.
    assert left <= ({"BatchNormalization", "Relu", "GlobalAveragePool"} if name == "densenet121" else set())
    report = lowbit.verify(result.model, model, data={"input": images(1, 32, 9)})
    assert report.ok
    assert report.total("equal") > 10_000


@pytest.mark.parametrize(
    "name", ["resnet8_mlperftiny_w8a8_ortptq", *(["mobilenetv2_1.0_224_w8a8_qat"] if FULL else [])]
)
def test_network_saved_by_onnx_runtimes_optimizer(name: str, tmp_path, shared_models) -> None:
    """It writes a QDQ network as QOperators, channels last; all of them are read, and compared with them."""
    require_native()
    options = session_options()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    source = str(shared_models / "qdq" / f"{name}.onnx")
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    model = onnx.load(tmp_path / "optimized.onnx")
    # The optimizer lists every domain that it knows, and this process has lowbit's registered.
    known = [entry for entry in model.opset_import if entry.domain != "ai.lowbit"]
    del model.opset_import[:]
    model.opset_import.extend(known)
    assert _left(model) >= {"QLinearConv"}
    result = lowbit.convert(model)
    assert _left(result.model) == {"QLinearSoftmax"}
    report = lowbit.verify(result.model, model, samples=1)
    assert report.ok
    assert report.total("equal") > 100_000


# -- what stays


@pytest.mark.parametrize(
    ("name", "operator", "reason"),
    [
        ("gemm_bias_per_row", "QGemm", "C has the shape"),
        ("sum_leaves_int32", "QLinearConv", "int32"),
        ("conv_integer_as_such", "ConvInteger", "int32 result"),
        ("dynamic_quantization", "MatMulInteger", "run time"),
        ("dynamic_quantization", "DynamicQuantizeLinear", "run time"),
        ("softmax_stays", "QLinearSoftmax", "fixed point"),
        ("where_stays", "QLinearWhere", "no integer form"),
    ],
)
def test_operator_stays_what_it_was(name: str, operator: str, reason: str) -> None:
    """Not as float operators between quantizers, but as the node with all its inputs that the model had."""
    require_native()
    built = CASES[f"qoperator.{name}"].build(1)
    result = lowbit.convert(built.model)
    (before,) = [n for n in built.model.graph.node if n.op_type == operator]
    (after,) = [n for n in result.model.graph.node if n.op_type == operator]
    assert after.name == before.name
    assert after.domain == before.domain
    assert len(after.input) == len(before.input)
    assert list(after.attribute) == list(before.attribute)
    (entry,) = [n for n in result.report.kept if n.op_type.endswith(operator)]
    assert reason in entry.reason


@pytest.mark.parametrize(
    "op", ["QLinearSoftmax", "QLinearSigmoid", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearWhere"]
)
def test_codes_of_an_operator_that_stays_are_known(op: str) -> None:
    """One scale is of no use to lowbit; the product behind the operator reads uint8 codes all the same."""
    require_native()
    constants = {
        "far": np.float32(1e36),
        "s": np.float32(0.1),
        "z": np.uint8(3),
        "yes": np.ones((1, 6), bool),
    }
    constants["w"] = np.random.default_rng(1).integers(0, 255, (6, 4)).astype(np.uint8)
    far, near = ["x", "far", "z"], ["x", "s", "z"]
    inputs = {
        "QLinearSoftmax": [*far, "s", "z"],
        "QLinearSigmoid": [*far, "s", "z"],
        "QLinearConcat": ["s", "z", *near, *far],
        "QLinearWhere": ["yes", *near, *far, "s", "z"],
    }.get(op, [*near, *far, "s", "z"])
    attributes = {"QLinearSoftmax": {"axis": -1, "opset": 13}, "QLinearConcat": {"axis": 0}}.get(op, {})
    nodes = [
        helper.make_node(op, inputs, ["c"], op, domain="com.microsoft", **attributes),
        helper.make_node("QLinearMatMul", ["c", "s", "z", "w", "s", "z", "s", "z"], ["y"], "product"),
    ]
    rows = 4 if op == "QLinearConcat" else 2
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.UINT8, shape)
        for name, shape in (("x", [2, 6]), ("y", [rows, 4]))
    )
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "stays", [x], [y], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    result = lowbit.convert(helper.make_model(graph, opset_imports=opsets, ir_version=8), all_regions=True)
    kept = {node.op_type.rpartition(".")[2]: node.reason for node in result.report.kept}
    assert set(kept) == {op}
    assert "near the ends of float32" in kept[op]


def test_omitted_zero_point_of_a_kept_operator_is_written() -> None:
    """ONNX Runtime aborts on a QLinearLeakyRelu with four inputs; what lowbit writes has five."""
    require_native()
    scale = numpy_helper.from_array(np.asarray(0.1, np.float32), "scale")
    node = helper.make_node(
        "QLinearLeakyRelu", ["x", "scale", "", "scale"], ["y"], "leaky", domain="com.microsoft", alpha=0.1
    )
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT8, [4]) for name in "xy")
    graph = helper.make_graph([node], "one", [x], [y], [scale])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    codes = np.array([-100, -5, 0, 77], np.int8)
    (ours,) = lowbit_session(lowbit.convert(model).model).run(None, {"x": codes})
    np.testing.assert_array_equal(ours, [-10, 0, 0, 77])


# -- operators that contradict themselves


def _conv_model() -> onnx.ModelProto:
    require_native()
    return CASES["qoperator.conv_per_channel"].build(1).model


def _edit(model: onnx.ModelProto, operator: str, position: int, array: np.ndarray) -> None:
    node = next(n for n in model.graph.node if n.op_type == operator)
    model.graph.initializer.append(numpy_helper.from_array(array, "edited"))
    node.input[position] = "edited"


_BROKEN = {
    "scales_per_channel_of_x": (1, np.array([0.1, 0.2, 0.3], np.float32)),
    "zero_points_per_channel_of_y": (7, np.zeros(8, np.uint8)),
    "scale_of_two": (1, np.array([0.1, 0.2], np.float32)),
    "scale_of_another_type": (1, np.array(0.1, np.float64)),
    "scale_zero": (1, np.array(0, np.float32)),
    "scale_nan": (4, np.full(8, np.nan, np.float32)),
    "scale_too_few": (4, np.full(3, 0.1, np.float32)),
    "scale_of_rank_two": (4, np.full((2, 4), 0.1, np.float32)),
    "output_scale_negative": (6, np.array(-1, np.float32)),
    "zero_point_of_another_type": (2, np.array(3, np.int8)),
    "zero_points_too_few": (5, np.zeros(3, np.int8)),
    "weights_of_rank_two": (3, np.zeros((8, 27), np.int8)),
    "weights_of_int32": (3, np.zeros((8, 3, 3, 3), np.int32)),
    "bias_of_another_length": (8, np.zeros(5, np.int32)),
    "bias_of_floats": (8, np.zeros(8, np.float32)),
}


@pytest.mark.parametrize("broken", _BROKEN)
def test_broken_convolution_is_refused_or_stays(broken: str) -> None:
    """One clear error, or the node as it was with its reason: never a result."""
    model = _conv_model()
    _edit(model, "QLinearConv", *_BROKEN[broken])
    result = _converted(model)
    if result is not None:
        first = next(n for n in model.graph.node if n.op_type == "QLinearConv").name
        entry = next(n for n in result.report.nodes if n.name == first)
        assert entry.action == "kept", entry
        assert entry.reason


def _converted(model: onnx.ModelProto) -> lowbit.Result | None:
    """The result, or None after one clear error."""
    message = None
    try:
        return lowbit.convert(model)
    except lowbit.LowBitError as error:
        message = str(error)
    assert 0 < len(message) < 1000
    assert "Traceback" not in message
    return None


_SOME = ["conv_per_channel", "gemm", "activations_and_products", "concat_of_branches", "where_stays"]


@pytest.mark.parametrize(
    "name",
    [n for n in CASES if n.startswith("qoperator.")] if FULL else [f"qoperator.{name}" for name in _SOME],
)
def test_any_input_may_be_missing(name: str) -> None:
    """Every input of every operator left out in turn: refused, kept, or converted where it is optional."""
    require_native()
    built = CASES[name].build(1)
    for index, node in enumerate(built.model.graph.node):
        if node.domain == "" and not node.op_type.startswith(("QLinear", "ConvInteger", "MatMulInteger")):
            continue
        for position in range(len(node.input)):
            model = onnx.ModelProto()
            model.CopyFrom(built.model)
            model.graph.node[index].input[position] = ""
            _converted(model)


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("factor", [0.25, [0.25, 0.25]])
def test_a_factor_behind_a_product_that_stays(opset: int, factor: float | list[float]) -> None:
    """A product whose sums leave int32 stays the operator that it was, and the Mul behind it with it."""
    require_native()
    features = 70000
    graph = helper.make_graph(
        [
            helper.make_node("MatMulInteger", ["x", "w"], ["sum"]),
            helper.make_node("Cast", ["sum"], ["real"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["real", "factor"], ["y"]),
        ],
        "factor",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, features])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [
            numpy_helper.from_array(np.full((features, 2), 127, np.int8), "w"),
            numpy_helper.from_array(np.asarray(factor, np.float32), "factor"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    x = np.zeros((1, features), np.uint8)
    x[0, :10] = 3
    converted = lowbit.convert(model).model
    assert [node.op_type for node in converted.graph.node] == ["MatMulInteger", "Cast", "Mul"]
    (y,) = lowbit_session(converted).run(None, {"x": x})
    np.testing.assert_array_equal(y, np.full((1, 2), 10 * 3 * 127 / 4, np.float32))
