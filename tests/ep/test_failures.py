"""A device without memory, and one that is lost: an error that says so, and nothing worse."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ep.graphs import chain, images
from tests.ep.test_binding import bound
from tests.support import lowbit_session

GIGABYTE = 1 << 30  # what a fake device has


def test_a_device_without_memory_left(devices) -> None:
    model = chain("conv", "conv")
    session = devices.session(model)
    hog = devices.tensor(np.zeros(GIGABYTE - (1 << 16), np.uint8))
    with pytest.raises(Exception, match=r"(?i)memory|allocat"):
        session.run(None, {"x": images(1, 3, 200, 200)})
    del hog
    x = images(1, 3, 200, 200)
    np.testing.assert_array_equal(
        session.run(None, {"x": x})[0], lowbit_session(model).run(None, {"x": x})[0]
    )


def test_a_lost_device(devices) -> None:
    session = devices.session(chain("conv"))
    x = images(1, 3, 5, 5)
    session.run(None, {"x": x})
    bound_x, y = devices.tensor(x), devices.tensor(x)
    binding = bound(session, bound_x, y)
    devices.lose(True)
    try:
        with pytest.raises(Exception, match="Allocation failed"):  # ONNX Runtime's words; the log says why
            session.run(None, {"x": x})
        with pytest.raises(Exception, match="the device was lost"):
            session.run_with_iobinding(binding)
        with pytest.raises(Exception, match="the device was lost"):
            devices.session(chain("conv"))
    finally:
        devices.lose(False)
    session.run(None, {"x": x})
