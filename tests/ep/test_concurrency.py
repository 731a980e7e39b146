"""Many threads, few sessions, fewer instances."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.conftest import FULL
from tests.ep.graphs import chain, images
from tests.ep.test_binding import bound
from tests.support import lowbit_session

STEPS = 100 if FULL else 20


@pytest.mark.parametrize("device", ["cpu", "fake:0"])
@pytest.mark.parametrize("pieces", [("conv", "conv"), ("conv", "LpNormalization", "conv")])
def test_eight_threads_on_two_sessions(devices, device: str, pieces: tuple[str, ...]) -> None:
    model = chain(*pieces)
    sessions = [devices.session(model, device) for _ in range(2)]
    alone = lowbit_session(model)
    inputs = [images(1 + i % 2, 3, 6 + i, 7, seed=i) for i in range(6)]
    expected = [alone.run(None, {"x": x})[0] for x in inputs]

    def caller(index: int) -> None:
        for step in range(STEPS):
            which = (index + step) % len(inputs)
            (y,) = sessions[(index + step // 2) % 2].run(None, {"x": inputs[which]})
            np.testing.assert_array_equal(y, expected[which])

    with ThreadPoolExecutor(8) as pool:
        for finished in [pool.submit(caller, index) for index in range(8)]:
            finished.result()


def test_eight_threads_with_tensors_of_the_device(devices) -> None:
    model = chain("conv", "conv", "conv")
    sessions = [devices.session(model) for _ in range(2)]
    alone = lowbit_session(model)

    def caller(index: int) -> None:
        x = images(2, 3, 8, 8, seed=index)
        (expected,) = alone.run(None, {"x": x})
        y = devices.tensor(np.zeros_like(expected))
        bindings = [bound(session, devices.tensor(x), y) for session in sessions]
        for step in range(STEPS):
            sessions[step % 2].run_with_iobinding(bindings[step % 2])
            np.testing.assert_array_equal(y.numpy(), expected)
            y.update_inplace(np.zeros_like(expected))

    with ThreadPoolExecutor(8) as pool:
        for finished in [pool.submit(caller, index) for index in range(8)]:
            finished.result()


def test_sessions_come_and_go_while_others_run(devices) -> None:
    model = chain("conv", "conv")
    x = images(1, 3, 6, 6)
    (expected,) = lowbit_session(model).run(None, {"x": x})

    def caller(index: int) -> None:
        for _ in range(STEPS // 4):
            (y,) = devices.session(model, f"fake:{index % 2}").run(None, {"x": x})
            np.testing.assert_array_equal(y, expected)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(caller, range(8)))
