"""MatMul of two activations."""

from __future__ import annotations

import lowbit
import numpy as np

from tests.converter.graphs import converted, converts, image, output, refuses
from tests.dialects import oracle
from tests.dialects.graphs.builder import Graph, Quant, as_tensor
from tests.support import lowbit_session


def test_transposes_around_are_ways_to_read() -> None:
    """Heads as exporters write them: no Transpose of codes is left, the products read what is stored."""

    def build(g: Graph) -> None:
        xq = g.act(0.03)
        x = g.qdq(g.input(("n", 5, 2, 8), step=float(xq.scale)), xq)
        q, k = (g.node("Transpose", [x], perm=perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1]))
        sq = g.after(xq, xq, 8)
        scores = g.qdq(g.node("Relu", [g.node("MatMul", [q, k])]), sq)
        y = g.node("MatMul", [scores, q])
        output(g, g.qdq(y, g.after(sq, xq, 5)), "n", 2, 5, 8)

    result = converts(build, "LowBitMatMul", "LowBitMatMul")
    first = next(node for node in result.result.model.graph.node if node.op_type == "LowBitMatMul")
    assert {a.name for a in first.attribute} >= {"a_perm", "b_perm", "y_min"}
    nodes = lowbit.inspect(result.result.model, shapes={"input0": [3, 5, 2, 8]}).nodes
    macs = 3 * 2 * 5 * 5 * 8
    assert [(n.macs, n.bit_ops) for n in nodes if n.macs] == [(macs, 64 * macs)] * 2


def test_images_in_any_layout() -> None:
    """A convolution's output is stored channels last; a constant factor and a batch that broadcasts."""

    def build(g: Graph) -> None:
        x, xq = image(g, kind="s8")
        constant = g.dq(g.const(as_tensor(g.codes((1, 1, 6, 3), "s8"), "s8", "")), g.act(0.2, "s8"))
        y = g.node("MatMul", [x, constant])
        output(g, g.qdq(y, Quant(np.float32(0.4), xq.zero, "s8")), 2, 4, 6, 3)

    converts(build, "LowBitMatMul")


def test_float_output() -> None:
    def build(g: Graph) -> None:
        (a, _), (b, _) = image(g), image(g)
        output(g, g.node("MatMul", [a, b]), 2, 4, 6, 6)

    converts(build, "LowBitMatMul")


def test_what_stays_says_why() -> None:
    def vector(g: Graph) -> None:
        a, _ = image(g)
        bq = g.act(0.03)
        b = g.qdq(g.input((6,), step=float(bq.scale)), bq)
        output(g, g.node("MatMul", [a, b]), 2, 4, 6)

    def float_operand(g: Graph) -> None:
        a, _ = image(g)
        output(g, g.node("MatMul", [a, g.input((2, 4, 6, 6))]), 2, 4, 6, 6)

    def long(g: Graph) -> None:
        aq = g.act(0.03, zero=0)
        a, b = (g.qdq(g.input(s, step=0.03), aq) for s in ((1, 33_026), (33_026, 1)))
        output(g, g.node("MatMul", [a, b]), 1, 1)

    refuses(vector, "MatMul", "a vector")
    refuses(float_operand, "MatMul", "operand 1 is not quantized")
    refuses(long, "MatMul", "33026 products may leave int32")


def test_verify_bounds_the_difference_from_stock() -> None:
    """Stock computes the float product of a MatMul without a quantizer; with one its integer kernel."""

    def build(g: Graph) -> None:
        (a, aq), (b, bq) = image(g), image(g)
        y = g.qdq(g.node("MatMul", [a, b]), g.after(aq, bq, 6))
        output(g, g.node("MatMul", [y, b]), 2, 4, 6, 6)

    for seed in range(3):
        result = converted(build, seed)
        report = lowbit.verify(result.result.model, result.built.model, samples=1)
        assert report.ok, report.nodes
        assert all(node.elements == node.equal + node.near_tie for node in report.nodes)


def test_open_sizes_are_checked_with_sizes_that_fit() -> None:
    """The check after conversion makes sizes up: sums of one length, batches that fit."""

    def build(g: Graph) -> None:
        aq = g.act(0.03)
        a = g.qdq(g.input(("n", 3, "tokens", "depth"), step=float(aq.scale)), aq)
        b = g.qdq(g.input((1, "heads", 2, 7), step=float(aq.scale)), aq)
        c = g.qdq(g.input((2, 3, 7, "columns"), step=float(aq.scale)), aq)
        y = g.qdq(g.node("MatMul", [a, b]), g.after(aq, aq, 2))
        output(g, g.qdq(g.node("MatMul", [y, c]), g.after(aq, aq, 200)), "n", "h", "t", "c")

    result = converted(build)
    assert result.ops["LowBitMatMul"] == 2
    rng = np.random.default_rng(0)
    for sizes in ((1, 3, 5, 2, 9), (2, 1, 1, 2, 1)):
        n, heads, rows, depth, columns = sizes
        shapes = [(n, 3, rows, depth), (1, heads, 2, 7), (2, 3, 7, columns)]
        feeds = {f"input{i}": rng.normal(size=s).astype(np.float32) for i, s in enumerate(shapes)}
        (ours,) = lowbit_session(result.result.model).run(None, feeds)
        (meant,) = oracle.run(result.built.model, feeds)
        np.testing.assert_array_equal(ours, meant)
