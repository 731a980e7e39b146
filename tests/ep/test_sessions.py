"""Sessions on the provider's devices compute what plain sessions with custom ops compute."""

from __future__ import annotations

import ctypes
import gc
import warnings
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.proto.feeds import random_feeds
from onnx import TensorProto, helper, numpy_helper

from tests.conftest import FULL
from tests.dialects.graphs import CASES
from tests.ep.graphs import Chain, chain, images
from tests.support import lowbit_session

OTHER = "LpNormalization"  # an op that no region takes
DEVICES = ["cpu", "fake:0", "fake:1"]
SHARED = [
    "mobilenetv2_1.0_224_w8a8_qat", "resnet20_cifar10_w4a8_ortptq", "resnet20_cifar10_w8a8u_ortptq",
    "resnet8_mlperftiny_w8a8_ortptq", "yunet_n_320_w8a8_ortptq",
]  # fmt: skip


def assert_same(ours: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for got, value in zip(ours, expected, strict=True):
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHARED)
def test_shared_models(devices, shared_models: Path, device: str, name: str) -> None:
    model = lowbit.convert(shared_models / "qdq" / f"{name}.onnx").model
    feed = random_feeds(model)
    assert_same(devices.session(model, device).run(None, feed), lowbit_session(model).run(None, feed))


# tests/dialects/test_regions.py takes them all, on the CPU device.
@pytest.mark.parametrize("name", [name for i, name in enumerate(CASES) if i % (3 if FULL else 4) == 1])
def test_every_dialect_on_the_fake_device(devices, name: str) -> None:
    built = CASES[name].build(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = lowbit.convert(built.model).model
    ours, alone = devices.session(model), lowbit_session(model)
    for k, sizes in enumerate(built.sizes):
        feed = built.feed(k, **sizes)
        for got, value in zip(ours.run(None, feed), alone.run(None, feed), strict=True):
            assert got.dtype == value.dtype
            if CASES[name].left or CASES[name].float_tail:
                np.testing.assert_allclose(got, value, rtol=1e-6, atol=1e-30)
            else:
                np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("device", DEVICES)
def test_fifty_shapes(devices, device: str) -> None:
    model = chain("conv", "conv", "conv")
    ours, alone = devices.session(model, device), lowbit_session(model)
    ours.run(None, {"x": images(4, 3, 24, 24)})
    before = devices.bytes_in_use()
    for i in range(50):
        x = images(1 + i % 4, 3, 3 + i % 19, 5 + i % 13, seed=i)
        assert_same(ours.run(None, {"x": x}), alone.run(None, {"x": x}))
    assert devices.bytes_in_use() == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 4, 4)])
def test_tensors_without_elements(devices, device: str, shape: tuple[int, ...]) -> None:
    model = chain("conv", OTHER, "conv")
    x = images(*shape)
    try:
        expected = lowbit_session(model).run(None, {"x": x})
    except Exception:  # an op that ONNX Runtime does not run without elements
        pytest.skip("ONNX Runtime does not run it either")
    assert_same(devices.session(model, device).run(None, {"x": x}), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "pieces",
    [
        ("conv", OTHER, "conv"),
        (OTHER, "conv", OTHER, "conv", OTHER),
        ("conv", OTHER, OTHER, "conv", "conv"),
    ],
)
def test_nodes_of_the_cpu_between_regions(devices, device: str, pieces: tuple[str, ...]) -> None:
    model = chain(*pieces)
    x = images(2, 3, 7, 5)
    assert_same(devices.session(model, device).run(None, {"x": x}), lowbit_session(model).run(None, {"x": x}))


@pytest.mark.parametrize("device", DEVICES)
def test_branches_that_leave_and_meet_again(devices, device: str) -> None:
    """A node of the CPU beside the region: no region may hold what stands before and behind it."""
    graph = Chain()
    first = graph.conv("x")
    beside = graph.node(OTHER, [first])
    total = graph.node("Add", [graph.conv(first), beside])
    model = graph.model([graph.conv(total), first, total])
    x = images(2, 3, 6, 6)
    assert_same(devices.session(model, device).run(None, {"x": x}), lowbit_session(model).run(None, {"x": x}))


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_that_is_input_and_output(devices, device: str) -> None:
    """The model's input is an output too, and what one region makes is an output and another's input."""
    graph = Chain()
    first = graph.conv("x")
    normal = graph.node(OTHER, [first])
    model = graph.model([first, graph.conv(normal), normal])
    model.graph.output.append(model.graph.input[0])
    x = images(1, 3, 5, 5)
    assert_same(devices.session(model, device).run(None, {"x": x}), lowbit_session(model).run(None, {"x": x}))


@pytest.mark.parametrize("device", DEVICES)
def test_only_some_outputs_are_wanted(devices, device: str) -> None:
    graph = Chain()
    first = graph.conv("x")
    second = graph.conv(first)
    model = graph.model([first, second])
    x = images(1, 3, 5, 5)
    expected = lowbit_session(model).run(None, {"x": x})
    session = devices.session(model, device)
    for name, value in zip([first, second], expected, strict=True):
        assert_same(session.run([name], {"x": x}), [value])


def within(op: str, inner: onnx.ModelProto, *, constants_outside: bool = False) -> onnx.ModelProto:
    """A model whose `If` or `Loop` runs the nodes of `inner` on the outer graph's x."""
    body = onnx.GraphProto()
    body.CopyFrom(inner.graph)
    outer_x, y = body.input[0], body.output[0]
    del body.input[:]
    values = [outer_x, y]
    del body.value_info[:]
    inputs = [values[0]]
    initializers = []
    if op == "If":
        other = helper.make_graph(
            [helper.make_node("Neg", ["x"], ["negative"])], "else", [],
            [helper.make_tensor_value_info("negative", TensorProto.FLOAT, None)],
        )  # fmt: skip
        condition = helper.make_tensor_value_info("condition", TensorProto.BOOL, [])
        inputs.append(condition)
        node = helper.make_node("If", ["condition"], ["z"], then_branch=body, else_branch=other)
    else:
        body.input.extend(
            [
                helper.make_tensor_value_info("i", TensorProto.INT64, []),
                helper.make_tensor_value_info("go", TensorProto.BOOL, []),
                helper.make_tensor_value_info("sum", TensorProto.FLOAT, None),
            ]
        )
        body.node.extend(
            [
                helper.make_node("Add", ["sum", y.name], ["more"]),
                helper.make_node("Identity", ["go"], ["go_on"]),
            ]
        )
        del body.output[:]
        body.output.extend(
            [
                helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
                helper.make_tensor_value_info("more", TensorProto.FLOAT, None),
            ]
        )
        trips = helper.make_tensor("trips", TensorProto.INT64, [], [3])
        truth = helper.make_tensor("truth", TensorProto.BOOL, [], [True])
        initializers = [trips, truth]
        node = helper.make_node("Loop", ["trips", "truth", "x"], ["z"], body=body)
    if constants_outside:
        branch = next(
            attribute.g for attribute in node.attribute if attribute.name in ("then_branch", "body")
        )
        initializers.extend(branch.initializer)
        del branch.initializer[:]
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "outer", inputs, [out], initializers)
    return helper.make_model(graph, opset_imports=inner.opset_import, ir_version=inner.ir_version)


def count_regions(devices, model: onnx.ModelProto, device: str, capfd) -> int:
    """How many regions a session of the model has."""
    options = devices.options(device)
    options.log_severity_level = 1
    capfd.readouterr()
    ort.InferenceSession(model.SerializeToString(), options)
    log = capfd.readouterr().err
    assert "GetCapability() for LowBitExecutionProvider failed" not in log
    return log.count("lowbit: region of ")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["If", "Loop"])
@pytest.mark.parametrize("constants_outside", [False, True])
def test_regions_in_subgraphs(devices, device: str, op: str, constants_outside: bool, capfd) -> None:
    model = within(op, chain("conv", "conv"), constants_outside=constants_outside)
    assert count_regions(devices, model, device, capfd) == 1
    feeds = [{"x": images(1, 3, 5, 5)}]
    if op == "If":
        feeds = [{**feeds[0], "condition": np.array(truth)} for truth in (True, False)]
    ours, alone = devices.session(model, device), lowbit_session(model)
    for feed in feeds:
        assert_same(ours.run(None, feed), alone.run(None, feed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64, np.bool_])
def test_constants_that_no_lowbit_op_knows(devices, device: str, dtype: type, capfd) -> None:
    graph = Chain()
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    y = graph.node("Cast", [graph.conv(graph.conv("x"))], to=to)
    y = graph.node("Equal" if dtype is np.bool_ else "Mul", [y, graph.const(np.ones(1, dtype), "factor")])
    model = graph.model([graph.node("Cast", [y], to=TensorProto.FLOAT)])
    model.graph.output.append(helper.make_tensor_value_info("alone", TensorProto.DOUBLE, [2]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2), "alone"))
    assert count_regions(devices, model, device, capfd) == 1
    x = {"x": images(1, 3, 5, 5)}
    assert_same(devices.session(model, device).run(None, x), lowbit_session(model).run(None, x))


class Mallinfo2(ctypes.Structure):
    """Glibc's struct: what its allocator says about itself."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_in_use() -> int:
    """Bytes that the C library's allocator has given out and not got back; skips where it does not tell."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        pytest.skip("the C library has no mallinfo2 (glibc 2.33)")
    ask.restype = Mallinfo2
    gc.collect()
    found = ask()
    return found.hblkhd + found.uordblks  # mapped blocks, and those of the heap


@pytest.mark.parametrize("device", DEVICES)
def test_a_session_holds_weights_once(devices, device: str, tmp_path: Path) -> None:
    """Packed, by the region; what the model brought is freed. (Each of a node's own custom op keeps both.)"""
    channels, convs = 256, 8
    path = tmp_path / "model.onnx"
    onnx.save(chain(*["conv"] * convs, shape=("N", channels, "H", "W")), path)
    weights = convs * channels * channels * 9
    devices.session(chain("conv"), device)  # what only the first session allocates
    before = heap_in_use()
    session = devices.session(path, device)
    held = heap_in_use() - before
    assert held < 1.5 * weights, f"{held / weights:.2f} times the weights"
    x = images(1, channels, 4, 4)
    assert_same(session.run(None, {"x": x}), lowbit_session(path).run(None, {"x": x}))


@pytest.mark.parametrize("device", DEVICES)
def test_external_data(devices, device: str, tmp_path: Path) -> None:
    model = chain("conv", "conv")
    x = images(1, 3, 5, 5)
    expected = lowbit_session(model).run(None, {"x": x})
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=16)
    assert_same(devices.session(path, device).run(None, {"x": x}), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ir_version", [3, 9])
def test_initializers_that_are_inputs_too(devices, device: str, ir_version: int) -> None:
    """Constant before IR version 4, later a default that callers may override, which no region can pack."""
    model = chain("conv")
    model.ir_version = ir_version
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    x = images(1, 3, 5, 5)
    try:
        alone = lowbit_session(model)
    except Exception as refused:
        with pytest.raises(type(refused)):
            devices.session(model, device)
        return
    assert_same(devices.session(model, device).run(None, {"x": x}), alone.run(None, {"x": x}))


@pytest.mark.parametrize("device", DEVICES)
def test_models_without_lowbit_nodes_stay_as_they_are(devices, device: str, capfd) -> None:
    model = chain("conv", converted=False)
    x = images(1, 3, 5, 5)
    options = devices.options(device)
    options.log_severity_level = 2
    session = ort.InferenceSession(model.SerializeToString(), options)
    log = capfd.readouterr().err
    assert log.count("not converted, so LowBitExecutionProvider runs none of it") == 1
    assert "lowbit convert" in log
    stock = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert_same(session.run(None, {"x": x}), stock.run(None, {"x": x}))


def test_the_log_tells_regions_and_what_stays(devices, capfd) -> None:
    options = devices.options("cpu")
    options.log_severity_level = 1
    ort.InferenceSession(chain("conv", OTHER, "conv").SerializeToString(), options)
    log = capfd.readouterr().err
    assert log.count("lowbit: region of ") == 2
    assert log.count("(LpNormalization) stays with ONNX Runtime: ") == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_session_may_refuse_the_cpu(devices, device: str) -> None:
    entries = {"session.disable_cpu_ep_fallback": "1"}
    devices.session(chain("conv", "conv"), device, entries=entries)
    with pytest.raises(Exception, match="fallback"):
        devices.session(chain("conv", OTHER, "conv"), device, entries=entries)


def test_errors_of_a_run_name_the_region(devices) -> None:
    session = devices.session(chain("conv"), "cpu")
    with pytest.raises(Exception, match=r"lowbit: region '.*'"):
        session.run(None, {"x": images(1, 3, 0, 4)})
