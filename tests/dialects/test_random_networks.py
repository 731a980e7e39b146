"""Random combinations of constructs: every layout, every shared tensor, every mixture of types, exact."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dialects import oracle
from tests.dialects.graphs.fuse import as_qoperators
from tests.dialects.graphs.random_network import random_network
from tests.support import FLOAT_MATMULS, interface, lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")


@pytest.mark.parametrize("part", range(5))
def test_random_networks(part: int, seeds) -> None:
    require_native()
    for seed in (part + 5 * s for s in seeds(12)):
        built = random_network(seed)
        result = lowbit.convert(built.model, all_regions=seed % 2 == 1)
        kept = {f"{n.op_type}: {n.reason}" for n in result.report.kept if n.op_type in FLOAT_MATMULS}
        assert not kept, f"seed {seed}"
        assert interface(result.model) == interface(built.model)
        session = lowbit_session(result.model)
        for k, sizes in enumerate(built.sizes):
            feeds = built.feed(k, **sizes)
            for i, (ours, meant) in enumerate(
                zip(session.run(None, feeds), oracle.run(built.model, feeds), strict=True)
            ):
                np.testing.assert_array_equal(ours, meant, err_msg=f"seed {seed}, output {i}")


def test_random_networks_of_qoperators(seeds) -> None:
    """The same networks in the operator form mean the same; nothing of that form stays."""
    require_native()
    operators = 0
    for seed in seeds(12):
        built = random_network(seed)
        model, count = as_qoperators(built.model)
        operators += count
        result = lowbit.convert(model)
        kept = {f"{n.op_type}: {n.reason}" for n in result.report.kept if "QLinear" in n.op_type}
        assert not kept, f"seed {seed}"
        feeds = built.feed(0, **built.sizes[0])
        ours = lowbit_session(result.model).run(None, feeds)
        for i, (got, meant) in enumerate(zip(ours, oracle.run(built.model, feeds), strict=True)):
            np.testing.assert_array_equal(got, meant, err_msg=f"seed {seed}, output {i}")
    assert operators > 10


@pytest.mark.parametrize("seed", [173, 219, 223])
def test_verify_sees_through_the_optimizer(seed: int) -> None:
    """ONNX Runtime merges two quantizers in a row; what the file says is what it computes unoptimized."""
    require_native()
    built = random_network(seed)
    result = lowbit.convert(built.model)
    report = lowbit.verify(result.model, built.model, data=built.feed(0, **built.sizes[0]))
    assert any("its optimizer changes" in note for note in report.notes), report.notes
    assert report.ok
    assert report.total("equal") > 0
