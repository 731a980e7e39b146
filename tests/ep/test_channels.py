"""Regions whose tensors get channels (ep/region/channels.h) compute what custom ops compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ep.graphs import bottleneck, images
from tests.ep.test_context import compiled
from tests.support import lowbit_session


@pytest.mark.parametrize("seed", range(6))
def test_odd_channels(devices, seed: int) -> None:
    model = bottleneck(seed)
    ours, alone = devices.session(model), lowbit_session(model)
    for shape in ((2, 3, 14, 10), (1, 3, 9, 9)):
        x = images(*shape, seed=seed)
        np.testing.assert_array_equal(ours.run(None, {"x": x})[0], alone.run(None, {"x": x})[0])


def test_a_compiled_model_has_them_again(devices, tmp_path: Path) -> None:
    model = bottleneck(7)
    ours, alone = devices.session(compiled(devices, tmp_path, model)), lowbit_session(model)
    x = images(1, 3, 12, 12)
    np.testing.assert_array_equal(ours.run(None, {"x": x})[0], alone.run(None, {"x": x})[0])
