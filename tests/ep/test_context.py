"""Compiled models: written through ONNX Runtime's own ways, loaded again, and refused with a reason."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as native

from tests.ep.graphs import chain, images
from tests.ep.test_sessions import OTHER, within
from tests.support import lowbit_session

DEVICES = ["cpu", "fake:0"]
SHAPE = (2, 3, 7, 5)
UINT8 = TensorProto.UINT8
WEIGHTLESS = "ep.enable_weightless_ep_context_nodes"
VERSION = tuple(int(n) for n in ort.__version__.split(".")[:2])
KEEPS_WEIGHTS = VERSION >= (1, 26)


def compiled(
    devices,
    folder: Path,
    model: onnx.ModelProto,
    device: str = "fake:0",
    *,
    embed: bool = True,
    weightless: bool = False,
) -> Path:
    """The path of the compiled model, made with ModelCompiler."""
    source, target = folder / "model.onnx", folder / "compiled.onnx"
    onnx.save(model, source)
    options = devices.options(device, entries={WEIGHTLESS: "1"} if weightless else {})
    compiler = ort.ModelCompiler(options, source, embed_compiled_data_into_model=embed)
    compiler.compile_to_file(str(target))
    return target


def context_nodes(path: Path) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(path).graph.node if node.op_type == "EPContext"]


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(attribute for attribute in node.attribute if attribute.name == name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("pieces", [("conv", "conv"), ("conv", OTHER, "conv")])
def test_round_trip(devices, tmp_path: Path, device: str, embed: bool, pieces: tuple[str, ...]) -> None:
    model = chain(*pieces)
    path = compiled(devices, tmp_path, model, device, embed=embed)
    nodes = context_nodes(path)
    assert len(nodes) == pieces.count(OTHER) + 1
    assert len(list(tmp_path.glob("*.bin"))) == (0 if embed else len(nodes))
    assert not list(tmp_path.glob("*.tmp*"))
    session, alone = devices.session(path, device), lowbit_session(model)
    for seed in range(3):
        x = images(*SHAPE, seed=seed)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], alone.run(None, {"x": x})[0])


@pytest.mark.skipif(
    VERSION < (1, 31),
    reason="before 1.31 ONNX Runtime's ModelCompiler writes initializers of subgraphs twice and then refuses "
    "the file; `lowbit compile` mends it",
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["If", "Loop"])
def test_subgraphs_are_written_as_they_are(devices, tmp_path: Path, device: str, op: str) -> None:
    model = within(op, chain("conv"), constants_outside=op == "If")
    session = devices.session(compiled(devices, tmp_path, model, device), device)
    feeds = {"x": images(*SHAPE)} | ({"condition": np.array(True)} if op == "If" else {})
    np.testing.assert_array_equal(session.run(None, feeds)[0], lowbit_session(model).run(None, feeds)[0])


def test_by_a_session_entry(devices, tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    model = chain("conv")
    onnx.save(model, source)
    session = devices.session(source, entries={"ep.context_enable": "1"})
    path = tmp_path / "model_ctx.onnx"
    (node,) = context_nodes(path)
    assert attribute(node, "source").s == b"LowBitExecutionProvider"
    assert (tmp_path / attribute(node, "ep_cache_context").s.decode()).is_file()
    x = images(*SHAPE)
    (expected,) = lowbit_session(model).run(None, {"x": x})
    for opened in (session, devices.session(path)):
        np.testing.assert_array_equal(opened.run(None, {"x": x})[0], expected)


def test_nothing_is_overwritten(devices, tmp_path: Path) -> None:
    path = compiled(devices, tmp_path, chain("conv"), embed=False)
    (binary,) = tmp_path.glob("*.bin")
    before = binary.read_bytes()
    path.unlink()
    with pytest.raises(Exception, match="exists; remove it"):
        compiled(devices, tmp_path, chain("conv", "conv"), embed=False)
    assert binary.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", binary.name}


def test_a_model_from_memory_needs_to_be_told_where_its_files_lie(devices, tmp_path: Path) -> None:
    model = chain("conv")
    path = compiled(devices, tmp_path, model, embed=False)
    proto = onnx.load(path)
    with pytest.raises(Exception, match=r"ep\.context_file_path"):
        devices.session(proto)
    session = devices.session(proto, entries={"ep.context_file_path": str(path)})
    x = images(*SHAPE)
    expected = lowbit_session(model).run(None, {"x": x})[0]
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.onnx", "a/../../b", ""])
def test_files_outside_of_the_models_folder_are_not_read(devices, tmp_path: Path, name: str) -> None:
    path = compiled(devices, tmp_path, chain("conv"), embed=False)
    proto = onnx.load(path)
    attribute(proto.graph.node[0], "ep_cache_context").s = name.encode()
    onnx.save(proto, path)
    with pytest.raises(Exception, match="relative to the model's folder"):
        devices.session(path)


def test_a_missing_file_is_named(devices, tmp_path: Path) -> None:
    path = compiled(devices, tmp_path, chain("conv"), embed=False)
    (binary,) = tmp_path.glob("*.bin")
    binary.unlink()
    with pytest.raises(Exception, match=rf"node '.*cannot open .*{binary.name}"):
        devices.session(path)
    binary.mkdir()
    with pytest.raises(Exception, match=rf"node '.*cannot open .*{binary.name}"):
        devices.session(path)


@pytest.mark.parametrize(("made", "opened"), [("cpu", "fake:0"), ("fake:0", "cpu")])
def test_another_machines_model_is_refused(devices, tmp_path: Path, made: str, opened: str) -> None:
    path = compiled(devices, tmp_path, chain("conv"), made)
    unfit = r"lowbit: .*the model was compiled for '.*', this is '.*' \(another kind of device\)"
    with pytest.raises(Exception, match=unfit):
        devices.session(path, opened)


def test_onnxruntime_can_ask_before(devices, tmp_path: Path) -> None:
    path = compiled(devices, tmp_path, chain("conv"))
    (key,) = (entry for entry in onnx.load(path).metadata_props if "ep_compatibility_info" in entry.key)
    assert "fake device" in key.value
    ask = native.get_model_compatibility_for_ep_devices
    optimal = native.OrtCompiledModelCompatibility.EP_SUPPORTED_OPTIMAL
    assert ask([devices.by_name["fake:0"]], key.value) == optimal
    unsupported = native.OrtCompiledModelCompatibility.EP_UNSUPPORTED
    assert ask([devices.by_name["fake:0"]], "cuda sm_10, lowbit 0.0.1") == unsupported


@pytest.mark.skipif(not KEEPS_WEIGHTS, reason="this onnxruntime writes addresses in the place of weights")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("pieces", [("conv", "conv"), ("conv", OTHER, "conv")])
def test_weights_stay_outside_of_the_nodes(
    devices, tmp_path: Path, device: str, embed: bool, pieces: tuple[str, ...]
) -> None:
    model = chain(*pieces)
    path = compiled(devices, tmp_path, model, device, embed=embed, weightless=True)
    constants = {tensor.name: tensor.raw_data for tensor in onnx.load(path).graph.initializer}
    for node in context_nodes(path):
        assert {name for name in node.input if name in constants}
    for weights in (name for name in constants if name.endswith(".w")):
        stored = [attribute(node, "ep_cache_context").s for node in context_nodes(path)]
        stored += [file.read_bytes() for file in tmp_path.glob("*.bin")]
        assert not any(constants[weights] in region for region in stored)
    session, alone = devices.session(path, device), lowbit_session(model)
    x = images(*SHAPE)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], alone.run(None, {"x": x})[0])


@pytest.mark.skipif(not KEEPS_WEIGHTS, reason="this onnxruntime writes addresses in the place of weights")
def test_weights_that_changed_are_refused(devices, tmp_path: Path) -> None:
    proto = onnx.load(compiled(devices, tmp_path, chain("conv"), weightless=True))
    weights = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith(".w"))
    intact = weights.raw_data
    weights.raw_data = bytes([intact[0] ^ 1]) + intact[1:]
    with pytest.raises(Exception, match=rf"node '.*the weights '{weights.name}' are not those"):
        devices.session(proto)
    weights.raw_data = intact
    del proto.graph.node[0].input[-1]
    with pytest.raises(Exception, match=r"the model brings \d+ weights, and not '"):
        devices.session(proto)


@pytest.mark.skipif(not KEEPS_WEIGHTS, reason="this onnxruntime writes addresses in the place of weights")
def test_weights_in_a_file_that_ends_early_are_refused(devices, tmp_path: Path) -> None:
    model = chain("conv", shape=("N", 16, "H", "W"))
    path = compiled(devices, tmp_path, model, weightless=True)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=128)
    devices.session(path)
    (tmp_path / "weights").write_bytes(b"")
    with pytest.raises(Exception, match=r"lowbit: .*cannot be read|lowbit: .*out of bounds"):
        devices.session(path)


@pytest.mark.skipif(KEEPS_WEIGHTS, reason="of older releases")
def test_older_releases_write_no_weightless_models(devices, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"needs ONNX Runtime 1\.26 or newer"):
        compiled(devices, tmp_path, chain("conv"), weightless=True)


def test_a_compiled_model_is_not_compiled_again(devices, tmp_path: Path) -> None:
    path = compiled(devices, tmp_path, chain("conv"))
    with pytest.raises(Exception, match="the model is compiled already"):
        ort.ModelCompiler(devices.options("fake:0"), path).compile_to_file(str(tmp_path / "again.onnx"))


def test_damaged_regions_are_refused(devices, tmp_path: Path) -> None:
    path = compiled(devices, tmp_path, chain("conv"))
    proto = onnx.load(path)
    whole = attribute(proto.graph.node[0], "ep_cache_context").s
    rng = np.random.default_rng(0)
    for length in [0, 1, len(whole) // 2, len(whole) - 1, *rng.integers(0, len(whole), 10)]:
        attribute(proto.graph.node[0], "ep_cache_context").s = whole[: int(length)]
        with pytest.raises(Exception, match="lowbit: "):
            devices.session(proto)
    x = images(*SHAPE)
    for place in rng.integers(0, len(whole), 40):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        attribute(proto.graph.node[0], "ep_cache_context").s = bytes(damaged)
        # Refused with a reason, or the change is one that does not matter (the bits of a weight).
        with contextlib.suppress(native.InvalidArgument):
            devices.session(proto).run(None, {"x": x})


@pytest.mark.parametrize("device", DEVICES)
def test_an_initializer_may_bring_the_region(devices, tmp_path: Path, device: str) -> None:
    model = chain("conv", OTHER, "conv")
    proto = onnx.load(compiled(devices, tmp_path, model, device))
    for node in proto.graph.node:
        if node.op_type == "EPContext":
            held = attribute(node, "ep_cache_context")
            proto.graph.initializer.append(helper.make_tensor(node.name, UINT8, [len(held.s)], held.s, True))
            node.input.append(node.name)
            held.s = b""
    x = images(*SHAPE)
    expected = lowbit_session(model).run(None, {"x": x})[0]
    np.testing.assert_array_equal(devices.session(proto, device).run(None, {"x": x})[0], expected)

    region = next(tensor for tensor in proto.graph.initializer if tensor.name in proto.graph.node[0].input)
    whole = region.raw_data
    for cut in (0, 1, 40, len(whole) - 1):
        region.CopyFrom(helper.make_tensor(region.name, UINT8, [cut], whole[:cut], True))
        with pytest.raises(Exception, match=r"lowbit: node '.*(no compiled region|is damaged)"):
            devices.session(proto, device)
    for kind, dims in ((TensorProto.INT8, [len(whole)]), (UINT8, [1, len(whole)])):
        region.CopyFrom(helper.make_tensor(region.name, kind, dims, whole, True))
        with pytest.raises(Exception, match=r"initializer that it reads is none \(uint8 \[bytes\]\)"):
            devices.session(proto, device)
    del proto.graph.node[0].input[-1]
    with pytest.raises(Exception, match="the last initializer that it reads is none"):
        devices.session(proto, device)


def test_what_the_model_says_around_the_region_is_checked(devices, tmp_path: Path) -> None:
    path = compiled(devices, tmp_path, chain("conv"))
    x = images(*SHAPE)

    wrong_type = onnx.load(path)
    wrong_type.graph.output[0].type.tensor_type.elem_type = UINT8
    with pytest.raises(Exception, match="lowbit: "):
        devices.session(wrong_type).run(None, {"x": x})

    more_outputs = onnx.load(path)
    more_outputs.graph.node[0].output.append("another")
    more_outputs.graph.output.append(more_outputs.graph.output[0])
    more_outputs.graph.output[1].name = "another"
    with pytest.raises(Exception, match="lowbit: "):
        devices.session(more_outputs).run(None, {"x": x})

    no_inputs = onnx.load(path)
    no_inputs.graph.node[0].input[0] = ""
    with pytest.raises(Exception, match="lowbit: "):
        devices.session(no_inputs).run(None, {"x": x})
