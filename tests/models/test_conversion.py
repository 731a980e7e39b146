"""The standard networks through the converter: nothing left in float, the numbers of the graph as written."""

from __future__ import annotations

import lowbit
import numpy as np
import pytest
from lowbit.models import build
from lowbit.models.calibration import images

from tests.dialects import oracle
from tests.support import all_nodes, interface, require_native

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def native():
    return require_native()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("resnet18", (8, 8)),
        ("resnet18", (4, 8)),
        ("resnet18", (2, 2)),
        ("resnet18", (3, 5)),
        ("resnet18", (1, 2)),
        ("mobilenetv2", (8, 8)),
        ("mobilenetv2", (4, 4)),
        ("mobilenetv2", (2, 8)),
        ("densenet121", (8, 8)),
        ("densenet121", (4, 4)),
        ("resnet50", (8, 8)),
        ("resnet50", (2, 8)),
    ],
)
def test_every_logit_equals_the_numpy_execution(name, bits):
    model = build(name, *bits, image=32, classes=10, batch="N")
    result = lowbit.convert(model)
    ops = {node.op_type for node in all_nodes(result.model.graph)}
    assert not ops & {"Conv", "Gemm", "MatMul", "BatchNormalization", "Transpose", "QuantizeLinear"}, ops
    assert interface(result.model) == interface(model)
    feeds = {"input": images(2, 32, seed=21)}
    (expected,) = oracle.run(model, feeds)
    got = lowbit.session(result).run(None, feeds)
    np.testing.assert_array_equal(got[0], expected)


@pytest.mark.parametrize(
    ("bits", "megabytes"), [((8, 8), 26.5), ((4, 8), 13.5), ((4, 4), 13.5), ((2, 8), 7.1), ((2, 2), 7.1)]
)
def test_resnet50_is_as_small_as_its_bits_and_runs(bits, megabytes):
    # The image size does not change the weights.
    result = lowbit.convert(build("resnet50", *bits, image=32), strict=True)
    assert result.model.ByteSize() <= megabytes * 1e6
    (logits,) = lowbit.session(result).run(None, {"input": images(1, 32, seed=22)})
    assert logits.shape == (1, 1000)
    assert logits.std() > 0.05
