"""Shapes that come and go, sessions that come and go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.dialects.graphs import CASES
from tests.gpu.support import assert_equal, whole_on_gpu
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402

THREADS = 8


def test_image_sizes_that_the_model_leaves_open() -> None:
    built = CASES["ort_quantizer.residual_with_downsample"].build(0)
    model = lowbit.convert(built.model).model
    graph_input = model.graph.input[0].type.tensor_type
    batch, channels, height, width = (d.dim_value or 1 for d in graph_input.shape.dim)
    for axis, name in ((0, "N"), (2, "H"), (3, "W")):
        graph_input.shape.dim[axis].dim_param = name
    for value in [*model.graph.output, *model.graph.value_info]:
        value.type.tensor_type.ClearField("shape")
    session, on_cpu = whole_on_gpu(model), lowbit_session(model)
    rng = np.random.default_rng(2)
    for b, h, w in [
        (batch, height, width),
        (2, height + 4, width),
        (1, height, width + 8),
        (3, height, width),
    ]:
        feed = {model.graph.input[0].name: rng.normal(0, 1, (b, channels, h, w)).astype(np.float32)}
        assert_equal(session.run(None, feed), on_cpu.run(None, feed), f"{b}x{h}x{w}")


def test_sessions_come_and_go_while_others_run(model) -> None:
    feed = {"input": np.random.default_rng(3).normal(0, 1, (1, 3, 32, 32)).astype(np.float32)}
    expected = lowbit_session(model).run(None, feed)

    def caller(_: int) -> None:
        for _ in range(4):
            assert_equal(whole_on_gpu(model).run(None, feed), expected, "a fresh session")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(caller, range(THREADS)))
