"""Windows, resizes and reductions as nodes state them: each default resolved, what none can have refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowbit.graph.reasons import Refusal
from lowbit.graph.reductions import Reduction, read_reduction
from lowbit.graph.windows import (
    read_max_pool,
    read_resize,
    read_space_to_depth,
    read_transposed_window,
    read_window,
    resizes_in_any_layout,
)
from onnx import TensorProto, helper, numpy_helper

IMAGE = (1, 4, 9, 8)


def node(
    op_type: str,
    *operands: np.ndarray | None,
    shape: tuple[int | None, ...] | None = IMAGE,
    opset: int = 21,
    names: tuple[str, ...] = ("y",),
    out: tuple[int | None, ...] | None = None,
    **attributes: Any,
) -> ir.Node:
    """A node of a model: on a tensor x of that shape, on constants, and on tensors of no constant (None)."""
    inputs, constants = ["x"], []
    for i, array in enumerate(operands):
        inputs.append(f"c{i}")
        if array is not None:
            constants.append(numpy_helper.from_array(array, f"c{i}"))
    known = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    known += [helper.make_tensor_value_info(f"c{i}", TensorProto.INT64, None)
              for i, array in enumerate(operands) if array is None]  # fmt: skip
    made = helper.make_node(op_type, inputs, list(names), **attributes)
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)]
    graph = helper.make_graph([made], "g", known, results, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ir.serde.deserialize_model(model).graph[0]


def refused(answer: object) -> str:
    assert isinstance(answer, Refusal), answer
    return str(answer.reason)


@pytest.mark.parametrize(
    ("kernel", "spatial", "attributes", "why"),
    [
        ((3, 3), (9, 8), {"kernel_shape": [5, 5]}, r"kernel_shape is \[5, 5\], but its weights"),
        ((3, 3, 3, 3), (9, 8, 7, 6), {}, "4 spatial dims"),
        ((3, 3), (9,), {}, "window has 2 dims, its input has rank 3"),
        ((3, 3), (9, 8), {"strides": [2]}, "strides, dilations or pads do not fit"),
        ((3, 3), (9, 8), {"pads": [1, 1]}, "strides, dilations or pads do not fit"),
        ((3, 3), (9, 8), {"dilations": [0, 1]}, "must be positive"),
        ((3, 3), (9, 8), {"pads": [-1, 0, 0, 0]}, "negative pads"),
        ((3, 3), (None, 8), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, "stride 2 on an image of dynamic"),
        ((3, 3), (9, 8), {"auto_pad": "SAME"}, "auto_pad SAME is not known"),
        ((3, 11), (9, 8), {"pads": [0, 1, 0, 1]}, "window of 11 pixels does not fit into 8"),
    ],
)
def test_a_window_that_no_image_has(kernel, spatial, attributes: dict[str, Any], why: str) -> None:
    assert re.search(why, refused(read_window(node("Conv", **attributes), kernel, spatial)))


@pytest.mark.parametrize("auto_pad", ["VALID", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_automatic_pads_are_those_of_onnx(auto_pad: str, stride: int) -> None:
    """The output of ONNX's own shape inference is as large as explicit pads make it."""
    given = node("MaxPool", auto_pad=auto_pad, strides=[stride] * 2, kernel_shape=[3, 4])
    window = read_max_pool(given)
    assert not isinstance(window, Refusal)
    sizes = []
    for stated in ({"auto_pad": auto_pad}, {"pads": list(window.pads)}):
        pool = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 4], strides=[stride] * 2, **stated)
        ends = (("x", IMAGE), ("y", None))
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ends)
        model = helper.make_model(helper.make_graph([pool], "g", [x], [y]))
        (found,) = onnx.shape_inference.infer_shapes(model).graph.output
        sizes.append([dim.dim_value for dim in found.type.tensor_type.shape.dim])
    assert sizes[0] == sizes[1]
    if auto_pad == "SAME_LOWER":
        assert all(begin >= end for begin, end in zip(window.pads[:2], window.pads[2:], strict=True))


def test_pools_that_return_or_do_not_know_enough() -> None:
    pool = {"kernel_shape": [2, 2]}
    assert "indices" in refused(read_max_pool(node("MaxPool", names=("y", "indices"), **pool)))
    assert "rank" in refused(read_max_pool(node("MaxPool", shape=None, **pool)))
    assert refused(read_space_to_depth(node("SpaceToDepth", shape=(4, 9, 8), blocksize=2))).endswith("rank 4")
    several = node("SpaceToDepth", shape=(1, None, None, 8), blocksize=2)
    assert "more than one" in refused(read_space_to_depth(several))
    assert "does not divide" in refused(read_space_to_depth(node("SpaceToDepth", blocksize=2)))


def test_transposed_windows() -> None:
    """What an output_shape, an automatic padding or neither makes of the pads."""

    def pads(spatial=(9, 8), **attributes: Any) -> Any:
        window = read_transposed_window(node("ConvTranspose", **attributes), (3, 3), spatial)
        return refused(window) if isinstance(window, Refusal) else window.pads

    assert pads(auto_pad="VALID", strides=[2, 2]) == (0, 0, 0, 0)
    assert pads(pads=[1, 0, 1, 0]) == (1, 0, 1, 0)
    assert pads(output_shape=[10, 9], strides=[1, 1]) == (1, 1, 0, 0)
    assert pads(output_shape=[10, 9], auto_pad="SAME_UPPER") == (0, 0, 1, 1)
    assert "dynamic size" in pads(spatial=(None, 8), output_shape=[10, 9])
    assert "larger than its window reaches" in pads(output_shape=[30, 30])
    assert "negative pads" in pads(pads=[-1, 0, 0, 0])


NONE, DOUBLED = np.zeros(0, np.float32), np.float32([1, 1, 2, 2])


@pytest.mark.parametrize(
    ("operands", "attributes", "why"),
    [
        ((NONE, DOUBLED), {"mode": "bicubic"}, "mode bicubic"),
        ((NONE, DOUBLED), {"shape": (4, 9)}, "must have the rank 3 or 4"),
        ((NONE, DOUBLED), {"coordinate_transformation_mode": "tf_crop_and_resize"}, "tf_crop"),
        ((NONE, DOUBLED), {"keep_aspect_ratio_policy": "not_larger"}, "keep_aspect_ratio"),
        ((NONE, DOUBLED), {"mode": "linear", "antialias": 1}, "antialias"),
        ((NONE, DOUBLED), {"mode": "linear", "exclude_outside": 1}, "in mode linear"),
        ((NONE, DOUBLED), {"mode": "cubic", "cubic_coeff_a": 40.0}, "beyond 16"),
        ((NONE, np.float32([2, 1, 2, 2])), {}, "batch or the channels"),
        ((NONE, NONE, np.int64([1, 8, 18, 16])), {}, "batch or the channels"),
        ((NONE, NONE, np.int64([18])), {"axes": [2]}, "some of the spatial dims only"),
        ((NONE, NONE, None), {}, "computed at run time"),
        ((NONE,), {}, "computed at run time"),
    ],
)
def test_a_resize_that_codes_do_not_have(operands, attributes: dict[str, Any], why: str) -> None:
    assert why in refused(read_resize(node("Resize", *operands, **attributes)))


def test_resizes_that_codes_have() -> None:
    scales = np.float32([2.0, 0.5])
    assert read_resize(node("Resize", NONE, scales, axes=[-2, 3])) == {
        "mode": "nearest", "coordinate_transformation_mode": "half_pixel",
        "nearest_mode": "round_prefer_floor", "scales": [2.0, 0.5],
    }  # fmt: skip
    old = node("Resize", np.float32([1, 1, 2, 2]), opset=10)
    old.version = 10
    assert read_resize(old) == {
        "mode": "nearest", "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor", "scales": [2.0, 2.0],
    }  # fmt: skip
    sizes = read_resize(node("Resize", NONE, NONE, np.int64([1, 4, 18, 5]), mode="cubic"))
    assert not isinstance(sizes, Refusal)
    assert sizes["sizes"] == [18, 5]


@pytest.mark.parametrize(
    ("attributes", "does"),
    [
        ({"mode": "linear"}, True),
        ({"mode": "nearest"}, False),
        ({"mode": "linear", "antialias": 1}, False),
        ({"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}, False),
        ({"mode": "linear", "keep_aspect_ratio_policy": "not_smaller"}, False),
        ({"mode": "linear", "shape": (4, 9, 8)}, False),
        ({"mode": "linear", "out": (1, 8, 18, 16)}, False),
    ],
)
def test_resizes_of_real_numbers_in_any_layout(attributes: dict[str, Any], does: bool) -> None:
    given = {"out": (1, 4, 18, 16), **attributes}
    assert resizes_in_any_layout(node("Resize", NONE, DOUBLED, **given)) == does


def test_reductions() -> None:
    axes = np.int64([-1, 1])
    assert read_reduction(node("ReduceMax", axes)) == Reduction((1, 3), True)
    assert read_reduction(node("ReduceMax", keepdims=0)) == Reduction((0, 1, 2, 3), False)
    assert read_reduction(node("ReduceMax", np.int64([]), noop_with_empty_axes=1)) == Reduction((), True)
    assert read_reduction(node("ReduceMin", opset=13, axes=[2])) == Reduction((2,), True)
    assert "run time" in refused(read_reduction(node("ReduceMax", None)))
    assert "rank 4" in refused(read_reduction(node("ReduceMax", np.int64([4]))))
    assert "rank of its input" in refused(read_reduction(node("ReduceMax", axes, shape=None)))
    assert "before opset 12" in refused(read_reduction(node("ReduceMax", opset=11, axes=[2])))
    assert "no input" in refused(read_reduction(node("ReduceMax", axes, opset=13)))
