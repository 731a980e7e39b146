"""Random QONNX networks: whatever stands behind whatever, the result is the float32 chain's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dialects import qonnx_oracle
from tests.dialects.graphs.random_qonnx import random_qonnx
from tests.support import FLOAT_MATMULS, interface, lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")


@pytest.mark.parametrize("part", range(4))
def test_random_qonnx_networks(part: int, seeds) -> None:
    require_native()
    for seed in (part + 4 * s for s in seeds(10)):
        built = random_qonnx(seed)
        result = lowbit.convert(built.model)
        kept = {f"{n.op_type}: {n.reason}" for n in result.report.kept if n.op_type in FLOAT_MATMULS}
        assert not kept, f"seed {seed}"
        assert interface(result.model) == interface(built.model)
        session = lowbit_session(result.model)
        for k, sizes in enumerate(built.sizes):
            feeds = built.feed(k, **sizes)
            (ours,), (meant,) = session.run(None, feeds), qonnx_oracle.run(built.model, feeds)
            np.testing.assert_array_equal(ours, meant, err_msg=f"seed {seed}")
