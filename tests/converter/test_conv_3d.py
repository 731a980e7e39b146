"""Three spatial dims: convolutions and pools of volumes."""

from __future__ import annotations

from typing import Any

import lowbit
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.deploy.operators import forms_of
from onnx import helper

from tests.converter.graphs import Converted, converted, converts, output, refuses
from tests.dialects.graphs.blocks import conv_layer, quantized_input
from tests.dialects.graphs.builder import Graph, Quant

SIZE = (1, 4, 5, 6, 7)
DIMS = 3


def layer(g: Graph, shape: tuple[int, ...] = (6, 4, 3, 3, 3), **options: Any) -> None:
    """A quantized Conv3d of a quantized volume."""
    x, xq = quantized_input(g, SIZE)
    y, _ = conv_layer(g, x, xq, shape, **options)
    output(g, y, "n", shape[0], "d", "h", "w")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((6, 4, 3, 3, 3), {"pads": [1] * 6}),
        ((6, 4, 3, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 1, 2]}),
        ((6, 4, 2, 3, 4), {"auto_pad": "SAME_LOWER", "dilations": [1, 2, 1]}),
        ((6, 4, 2, 3, 1), {"auto_pad": "VALID"}),
        ((6, 4, 3, 1, 2), {"pads": [2, 0, 1, 0, 1, 0], "dilations": [2, 1, 3]}),
        ((6, 4, 1, 3, 3), {"pads": [0, 1, 1, 0, 1, 1], "strides": [1, 2, 2]}),
        ((6, 4, 3, 1, 1), {"pads": [1, 0, 0, 2, 0, 0], "strides": [2, 1, 1]}),
        ((6, 4, 1, 1, 1), {}),
        ((6, 4, 1, 1, 1), {"strides": [2, 2, 2]}),
        ((6, 2, 3, 3, 3), {"group": 2}),
        ((8, 1, 3, 3, 3), {"group": 4, "pads": [1] * 6}),
        ((4, 1, 3, 3, 3), {"group": 4, "bias": None}),
        ((6, 4, 2, 2, 2), {"bias": "float"}),
    ],
    ids=str,
)
def test_convolution_is_one_node(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    def build(g: Graph) -> None:
        layer(g, shape, **options)

    result = converts(build, "LowBitConv")
    given_window = result.attributes("LowBitConv")
    assert given_window["kernel_shape"] == list(shape[2:])
    assert len(given_window.get("pads", [0] * 6)) == 6
    assert "auto_pad" not in given_window


def test_residual_and_activation_are_part_of_the_node() -> None:
    def build(g: Graph) -> None:
        x, xq = quantized_input(g, (1, 4, 5, 6, 7))
        y, yq = conv_layer(g, x, xq, (4, 4, 3, 3, 3), pads=[1] * 6)
        y = g.qdq(g.node("Relu", [g.node("Add", [y, x])]), Quant(yq.scale, np.asarray(0), "u8"))
        output(g, y, 1, 4, 5, 6, 7)

    assert len(converts(build, "LowBitConv").node("LowBitConv").input) > 15


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "window",
    [
        {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]},
        {"kernel_shape": [1, 3, 3], "strides": [1, 2, 2], "pads": [0, 1, 1, 0, 1, 1]},
        {"kernel_shape": [3, 2, 1], "pads": [1, 0, 0, 2, 1, 0], "ceil_mode": 1, "strides": [2, 2, 3]},
    ],
    ids=str,
)
def test_pools(op: str, window: dict[str, Any]) -> None:
    def build(g: Graph) -> None:
        x, xq = quantized_input(g, SIZE)
        y, yq = conv_layer(g, x, xq, (5, 4, 1, 1, 1))
        y = g.qdq(g.node(op, [y], **window), yq)
        output(g, y, "n", 5, "d", "h", "w")

    converts(build, "LowBitConv", f"LowBit{op}")


def test_a_network_stays_channels_last_in_between() -> None:
    def build(g: Graph) -> None:
        x, xq = quantized_input(g, SIZE)
        y, yq = conv_layer(g, x, xq, (5, 4, 3, 3, 3), pads=[1] * 6)
        z, zq = conv_layer(g, y, yq, (5, 5, 3, 1, 1), pads=[1, 0, 0, 1, 0, 0])
        y = g.qdq(g.node("Add", [z, y]), zq)
        y = g.qdq(g.node("GlobalAveragePool", [y]), zq)
        output(g, y, 1, 5, 1, 1, 1)

    result = converted(build)
    result.assert_equal()
    assert "Transpose" not in result.ops, result.ops


def test_four_spatial_dims_stay() -> None:
    def build(g: Graph) -> None:
        x, xq = quantized_input(g, (1, 2, 3, 3, 3, 3))
        y, _ = conv_layer(g, x, xq, (2, 2, 1, 1, 1, 1))
        output(g, y, 1, 2, 3, 3, 3, 3)

    refuses(build, "Conv", "4 spatial dims; lowbit has 1 to 3")


def test_transposed_volumes_stay() -> None:
    def build(g: Graph) -> None:
        x, xq = quantized_input(g, SIZE)
        y, _ = conv_layer(g, x, xq, (4, 3, 2, 2, 2), transposed=True)
        output(g, y, 1, 3, "d", "h", "w")

    refuses(build, "ConvTranspose", "3 spatial dims; lowbit has 1 and 2")


@given(data=st.data())
def test_random_windows_equal_stock(data: st.DataObject) -> None:
    """Stock's QLinearConv is exact where its sums do not saturate, which int8 weights of 6 bits assure."""
    draw = data.draw
    numbers = st.lists(st.integers(1, 3), min_size=DIMS, max_size=DIMS)
    kernel, strides, dilations = (
        draw(numbers),
        draw(numbers),
        draw(st.lists(st.integers(1, 2), min_size=DIMS, max_size=DIMS)),
    )
    pads = draw(st.lists(st.integers(0, 2), min_size=2 * DIMS, max_size=2 * DIMS))
    group, depth = draw(st.sampled_from([(1, 4), (2, 2), (4, 1)]))
    spatial = [
        max(dilation * (k - 1) + 1 - begin - end, 1) + draw(st.integers(0, 4))
        for k, dilation, begin, end in zip(kernel, dilations, pads[:DIMS], pads[DIMS:], strict=True)
    ]
    out = group * draw(st.integers(1, 3))

    def build(g: Graph) -> None:
        x, xq = quantized_input(g, (2, 4, *spatial))
        y, _ = conv_layer(
            g, x, xq, (out, depth, *kernel), w_range=(-31, 31),
            strides=strides, pads=pads, dilations=dilations, group=group,
        )  # fmt: skip
        output(g, y, 2, out, "d", "h", "w")

    result: Converted = converted(build, draw(st.integers(0, 2)))
    assert result.ops["LowBitConv"] == 1, result.result.report.kept
    result.assert_equal()


def test_forms_of_a_mobile_build_are_those_of_the_convolution_that_runs() -> None:
    def forms(kernel: list[int], **attributes: list[int]) -> list[str]:
        node = helper.make_node(
            "LowBitConv", [f"i{i}" for i in range(9)], ["y"], domain="ai.lowbit",
            in_channels=4, out_channels=4, kernel_shape=kernel, **attributes,
        )  # fmt: skip
        return forms_of(onnx.ModelProto(graph=onnx.GraphProto(node=[node])))["LowBitConv"]

    assert forms([3, 3, 3]) == ["u8 u8 3x3x3 stride 1x1x1 requantize"]
    assert forms([1, 3, 3], pads=[0, 1, 1, 0, 1, 1]) == ["u8 u8 3x3 stride 1x1 requantize"]
    assert forms([1, 3, 3], pads=[1, 0, 0, 0, 0, 0]) == ["u8 u8 1x3x3 stride 1x1x1 requantize"]
    assert forms([3, 1, 1], strides=[2, 1, 1]) == ["u8 u8 3x1 stride 2x1 requantize"]
    assert forms([1, 3, 3], strides=[2, 1, 1]) == ["u8 u8 1x3x3 stride 2x1x1 requantize"]


def test_inspect_counts_the_taps_of_all_planes() -> None:
    report = lowbit.inspect(converted(lambda g: layer(g, pads=[1] * 6)).result.model)
    (conv,) = (node for node in report.nodes if node.op_type == "LowBitConv")
    assert conv.macs == 5 * 6 * 7 * 6 * 27 * 4
    assert conv.kernel is not None
