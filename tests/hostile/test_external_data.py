"""Tensors whose data lie in other files: found beside the model, wherever a tensor sits, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.proto.feeds import as_proto, random_feeds
from onnx import TensorProto, helper, numpy_helper

from tests.dialects.graphs import CASES
from tests.hostile.test_bad_models import refuse
from tests.support import lowbit_session, require_native, stock_run

CASE = "ort_quantizer.u8_activations_s8_weights"


@pytest.fixture
def model() -> onnx.ModelProto:
    require_native()
    return CASES[CASE].build(1).model


def put_outside(tensor: TensorProto, name: str = "weights.bin") -> bytes:
    """Makes a tensor's data external and returns them."""
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=name)
    return data


def weight(model: onnx.ModelProto) -> TensorProto:
    return next(t for t in model.graph.initializer if len(t.dims) == 4)


def as_constant(model: onnx.ModelProto) -> TensorProto:
    """The weight as the value of a Constant node."""
    tensor = weight(model)
    node = helper.make_node("Constant", [], [tensor.name], "constant", value=tensor)
    model.graph.initializer.remove(tensor)
    model.graph.node.insert(0, node)
    return model.graph.node[0].attribute[0].t


def in_a_subgraph(model: onnx.ModelProto) -> TensorProto:
    """An initializer of a branch inside a branch."""
    shift = numpy_helper.from_array(np.full((1,), 0.25, np.float32), "shift")
    graph, last = model.graph, model.graph.output[0]
    result = helper.make_tensor_value_info("shifted", last.type.tensor_type.elem_type, None)
    inner = helper.make_graph(
        [helper.make_node("Add", [last.name, "shift"], ["shifted"])], "inner", [], [result], [shift]
    )
    for name in ("outer", "main"):
        node = helper.make_node(
            "If", ["yes"], ["shifted"], f"if_{name}", then_branch=inner, else_branch=inner
        )
        inner = helper.make_graph([node], name, [], [result])
    graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
    graph.node.append(inner.node[0])
    graph.output.append(result)
    (outer,) = (a.g for a in graph.node[-1].attribute if a.name == "then_branch")
    (branch,) = (a.g for a in outer.node[0].attribute if a.name == "then_branch")
    return branch.initializer[0]


def in_a_function(model: onnx.ModelProto) -> TensorProto:
    """A Constant inside a function of the model's own."""
    shift = numpy_helper.from_array(np.full((1,), 0.25, np.float32), "shift")
    nodes = [
        helper.make_node("Constant", [], ["shift"], value=shift),
        helper.make_node("Add", ["x", "shift"], ["y"]),
    ]
    opsets = [helper.make_opsetid("", model.opset_import[0].version)]
    model.functions.append(helper.make_function("own", "Shift", ["x"], ["y"], nodes, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    last = model.graph.output[0]
    model.graph.node.append(helper.make_node("Shift", [last.name], ["shifted"], "shift", domain="own"))
    model.graph.output.append(helper.make_tensor_value_info("shifted", TensorProto.FLOAT, None))
    return model.functions[0].node[0].attribute[0].t


PLACES: dict[str, Callable[[onnx.ModelProto], TensorProto]] = {
    "initializer": weight,
    "constant": as_constant,
    "subgraph": in_a_subgraph,
    "function": in_a_function,
}


@pytest.mark.parametrize("place", PLACES)
def test_data_come_from_the_folder_of_the_model(place: str, model, tmp_path, monkeypatch) -> None:
    """A file of the same name and size in the current folder is never read."""
    tensor = PLACES[place](model)
    feed = random_feeds(model)
    expected = lowbit_session(lowbit.convert(model).model).run(None, feed)
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    data = put_outside(tensor)
    (folder / "weights.bin").write_bytes(data)
    (elsewhere / "weights.bin").write_bytes(bytes(len(data)))
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())

    monkeypatch.chdir(elsewhere)
    converted = lowbit.convert(path, tmp_path / "out.onnx").model
    (elsewhere / "weights.bin").unlink()  # nothing is read later either
    (folder / "weights.bin").unlink()
    for got, wanted in zip(lowbit_session(converted).run(None, feed), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    (folder / "weights.bin").write_bytes(data)
    for got, wanted in zip(stock_run(as_proto(path), feed), stock_run(path, feed), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_sparse_tensors_too(tmp_path, monkeypatch) -> None:
    """Values and indices of a sparse initializer, and a list of tensors in an attribute."""
    values = numpy_helper.from_array(np.array([1.5, 2.5], np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([0, 3], np.int64), "indices")
    parts = {
        "values.bin": put_outside(values, "values.bin"),
        "indices.bin": put_outside(indices, "indices.bin"),
    }
    sparse = helper.make_sparse_tensor(values, indices, [4])
    listed = numpy_helper.from_array(np.array([7.0], np.float32), "listed")
    parts["listed.bin"] = put_outside(listed, "listed.bin")
    node = helper.make_node("Identity", ["x"], ["y"])
    node.attribute.append(helper.make_attribute("tensors", [listed]))
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    graph = helper.make_graph(
        [node], "g", [value], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])]
    )
    graph.sparse_initializer.append(sparse)
    for name, data in parts.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    monkeypatch.chdir("/")
    read = as_proto(tmp_path / "m.onnx").graph
    assert numpy_helper.to_array(read.sparse_initializer[0].values).tolist() == [1.5, 2.5]
    assert numpy_helper.to_array(read.sparse_initializer[0].indices).tolist() == [0, 3]
    assert numpy_helper.to_array(read.node[0].attribute[0].tensors[0]).tolist() == [7.0]


def test_missing_file(tmp_path, model) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    refuse(path, "weights.bin", command=True)


def test_short_file(tmp_path, model) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    os.truncate(tmp_path / "weights.bin", 10)
    refuse(path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["climbs", "absolute", "link", "linked folder", "pipe"])
def test_no_way_out_of_the_folder(tmp_path, model, place: str, way: str) -> None:
    tensor = PLACES[place](model)
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    name = {"climbs": "../secret.bin", "absolute": str(secret), "linked folder": "out/secret.bin"}.get(
        way, "s"
    )
    secret.write_bytes(put_outside(tensor, name))
    if way == "link":
        (folder / "s").symlink_to(secret)
    elif way == "linked folder":
        (folder / "out").symlink_to(tmp_path)
    elif way == "pipe":
        os.mkfifo(folder / "s")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    refuse(path, "external data of", {"pipe": "regular file"}.get(way, "folder"))
    with pytest.raises(lowbit.ModelError, match="external data of"):
        as_proto(path)


@pytest.mark.parametrize("place", PLACES)
def test_a_model_in_memory_has_no_folder(tmp_path, model, monkeypatch, place: str) -> None:
    """ONNX and ONNX Runtime would look in the current one."""
    feed = random_feeds(model)
    (tmp_path / "weights.bin").write_bytes(put_outside(PLACES[place](model)))
    monkeypatch.chdir(tmp_path)
    for use in (lowbit.convert, lowbit.inspect, lowbit.session, as_proto):
        with pytest.raises(lowbit.ModelError, match="give the path of the model's file"):
            use(model)
    with pytest.raises(lowbit.ModelError, match="give the path of the model's file"):
        lowbit.session(model.SerializeToString())
    assert random_feeds(model).keys() == feed.keys(), "what needs no data works without"
