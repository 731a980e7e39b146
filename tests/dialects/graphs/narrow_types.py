"""4- and 2-bit types of ONNX itself: (u)int4 since opset 21, (u)int2 since opset 25."""

from __future__ import annotations

from tests.dialects.graphs.blocks import conv_layer, gemm_weight, quantized_input
from tests.dialects.graphs.builder import Graph, case


def _opset(g: Graph, *kinds: str) -> None:
    g.opset, g.ir_version = (25, 13) if any(k.endswith("2") for k in kinds) else (21, 10)


def _network(g: Graph, w_kind: str, a_kind: str, *, symmetric: bool = True, bias: str | None = "int") -> None:
    _opset(g, w_kind, a_kind)
    about = {"8": 0.03, "4": 0.4, "2": 1.5}[a_kind[1]]
    x, xq = quantized_input(g, (1, 5, 9, 9), a_kind, about=about)
    options = {"w_kind": w_kind, "symmetric": symmetric, "bias": bias}
    y, yq = conv_layer(g, x, xq, (7, 5, 3, 3), y_kind=a_kind, pads=[1, 1, 1, 1], **options)
    y, yq = conv_layer(g, y, yq, (7, 1, 3, 3), y_kind=a_kind, group=7, **options)
    z, _ = conv_layer(g, y, yq, (9, 7, 1, 1), y_kind="u8", **options)
    g.output(z, (1, 9, 7, 7))


def _register() -> None:
    pairs = [
        ("s4", "u8"), ("s4", "s8"), ("u4", "u8"), ("s4", "u4"), ("s4", "s4"), ("u4", "u4"),
        ("s2", "u8"), ("s2", "u4"), ("s2", "u2"), ("u2", "u2"), ("s2", "s2"), ("u2", "s8"), ("s8", "u4"),
        ("s8", "s2"),
    ]  # fmt: skip
    for w_kind, a_kind in pairs:

        def build(g: Graph, w_kind=w_kind, a_kind=a_kind) -> None:
            _network(g, w_kind, a_kind)

        build.__name__ = f"w_{w_kind}_a_{a_kind}"
        case()(build)


_register()


@case()
def asymmetric_u4_weights(g: Graph) -> None:
    _network(g, "u4", "u8", symmetric=False)


@case()
def asymmetric_s2_weights_float_bias(g: Graph) -> None:
    _network(g, "s2", "u4", symmetric=False, bias="float")


@case()
def gemm_s4(g: Graph) -> None:
    _opset(g, "s4")
    x, xq = quantized_input(g, (3, 21))
    w, wq = gemm_weight(g, 21, 10, kind="s4", transposed=True)
    y = g.node("Gemm", [x, w, g.bias(10, xq, wq)], transB=1)
    g.output(g.qdq(y, g.after(xq, wq, 21)), (3, 10))


@case()
def matmul_u2_asymmetric(g: Graph) -> None:
    _opset(g, "u2")
    x, xq = quantized_input(g, (3, 21))
    w, wq = gemm_weight(g, 21, 10, kind="u2", symmetric=False)
    g.output(g.qdq(g.node("MatMul", [x, w]), g.after(xq, wq, 21)), (3, 10))


@case()
def conv_transpose_s4(g: Graph) -> None:
    _opset(g, "s4")
    x, xq = quantized_input(g, (1, 6, 5, 5), "u4", about=0.4)
    y, _ = conv_layer(g, x, xq, (6, 5, 2, 2), w_kind="s4", transposed=True, strides=[2, 2])
    g.output(y, (1, 5, 10, 10))


@case()
def int8_container_of_few_codes(g: Graph) -> None:
    """int8-typed weights that hold 16, 4 or 3 codes may be packed narrower; the numbers stay."""
    x, xq = quantized_input(g, (1, 5, 9, 9))
    y, yq = conv_layer(g, x, xq, (7, 5, 3, 3), w_range=(-8, 7))
    y, yq = conv_layer(g, y, yq, (7, 7, 3, 3), w_range=(-2, 1))
    z, _ = conv_layer(g, y, yq, (9, 7, 1, 1), w_range=(-1, 1))
    g.output(z, (1, 9, 5, 5))


@case()
def one_code_only(g: Graph) -> None:
    """Every weight is the same code: one bit at most."""
    x, xq = quantized_input(g, (1, 5, 9, 9))
    y, _ = conv_layer(g, x, xq, (7, 5, 3, 3), w_range=(3, 3))
    g.output(y, (1, 7, 7, 7))
