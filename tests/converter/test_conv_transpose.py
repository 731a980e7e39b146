from __future__ import annotations

import pytest

from tests.converter.graphs import converts, image, output, refuses
from tests.dialects.graphs.builder import Graph


@pytest.mark.parametrize("options", [
    {"strides": [2, 2]},
    {"strides": [2, 2], "pads": [1, 0, 1, 0], "output_padding": [1, 1]},
    {"dilations": [2, 1], "group": 2},
    {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"strides": [3, 2], "output_shape": [17, 12]},
])  # fmt: skip
def test_becomes_one_node(options) -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        out = 6 // options.get("group", 1)
        wq = g.weight_quant(out, axis=1)
        y = g.node("ConvTranspose", [x, g.weight(g.codes((4, out, 3, 3)), wq)], **options)
        output(g, g.qdq(y, g.after(xq, wq, 9)), 2, 6, "h", "w")

    attributes = converts(build, "LowBitConvTranspose").attributes("LowBitConvTranspose")
    assert (attributes["in_channels"], attributes["out_channels"]) == (4, 6)


def test_scale_per_input_channel_is_refused() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        wq = g.weight_quant(4, axis=0)
        y = g.node("ConvTranspose", [x, g.weight(g.codes((4, 6, 3, 3)), wq)])
        output(g, g.qdq(y, g.after(xq, wq, 9)), 2, 6, 8, 8)

    refuses(build, "ConvTranspose", r"axis 0; expected per output channel \(1\)")
