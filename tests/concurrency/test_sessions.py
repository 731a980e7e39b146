"""Eight threads on two sessions of one model: Compute is re-entrant and shared weights stay what they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.dialects.graphs import CASES
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402


@pytest.mark.parametrize("intra_op_threads", [1, 2])
def test_eight_threads_on_two_sessions(intra_op_threads: int) -> None:
    built = CASES["ort_quantizer.residual_with_downsample"].build(0)
    model = lowbit.convert(built.model).model
    sessions = [lowbit_session(model, threads=intra_op_threads) for _ in range(2)]
    feeds = [built.feed(seed) for seed in range(8)]
    expected = [sessions[0].run(None, feed) for feed in feeds]

    def caller(index: int) -> None:
        for step in range(40):
            which = (index + step) % len(feeds)
            outputs = sessions[(index + step // 2) % 2].run(None, feeds[which])
            for got, want in zip(outputs, expected[which], strict=True):
                np.testing.assert_array_equal(got, want)

    with ThreadPoolExecutor(8) as pool:
        for finished in [pool.submit(caller, index) for index in range(8)]:
            finished.result()


def test_sessions_come_and_go_while_others_run() -> None:
    built = CASES["ort_quantizer.u8_activations_s8_weights"].build(1)
    model = lowbit.convert(built.model).model
    feeds = built.feed(0)
    expected = lowbit_session(model).run(None, feeds)

    def caller(_: int) -> None:
        for _ in range(10):
            for got, want in zip(lowbit_session(model).run(None, feeds), expected, strict=True):
                np.testing.assert_array_equal(got, want)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(caller, range(8)))
