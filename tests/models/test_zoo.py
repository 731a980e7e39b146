"""The zoo: its networks are what they say, repeat to the byte, and run in stock ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.models import zoo
from lowbit.models.graph import GraphBuilder
from lowbit.models.zoo import layers
from lowbit.proto.feeds import random_feeds

# One of each family; `benchmarks/zoo.py` runs all of them.
SMALL = [
    "shufflenet_v2_dynamic",
    "cbam_resnet",
    "efficientformer",
    "nanodet",
    "lraspp",
    "angle_classifier",
    "nafnet",
    "soft_argmax",
    "voice_activity",
    "temporal_shift",
]


def test_sizes():
    assert len(zoo.NETWORKS) >= 60
    assert {zoo.FAMILIES[name] for name in SMALL} == set(zoo.FAMILIES.values())
    with pytest.raises(ValueError, match="unknown network 'resnet'; known: mobilenet_v1"):
        zoo.build("resnet")


@pytest.mark.parametrize("name", SMALL)
def test_networks_run(name):
    model, shapes = zoo.build(name)
    assert zoo.build(name)[0].SerializeToString(deterministic=True) == model.SerializeToString(
        deterministic=True
    )
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = session.run(None, random_feeds(model, 0, shapes))
    for value, result in zip(model.graph.output, results, strict=True):
        assert len(value.type.tensor_type.shape.dim) == result.ndim
        assert np.isfinite(result).all()
        assert result.size == 1 or result.std() > 1e-6


def test_shapes_that_the_builder_states_are_those_of_a_run():
    """The builder states shapes where inference would need the values of other tensors."""
    g = GraphBuilder("shapes", 1, opset=18)
    x = g.input([2, 12, 8, 10], free={0: "batch"})
    stated = [
        layers.view(g, x, "0", 3, -1, "3"),
        layers.channel_shuffle(g, x, 3, by_shape=True),
        layers.resize(g, x, 1.5, mode="linear", coordinates="half_pixel"),
        layers.resize(g, x, 2, by_sizes=True),
        layers.resize_like(g, x, layers.resize(g, x, 3)),
        layers.group_norm(g, x, 4),
        layers.deconv(g, x, 5, 3, output_padding=1),
        layers.max_pool(g, x, 3, 2, ceil=True),
    ]
    shapes = [g.shape(y) for y in stated]
    session = ort.InferenceSession(g.model(stated).SerializeToString(), providers=["CPUExecutionProvider"])
    results = session.run(None, {"input": np.ones((2, 12, 8, 10), np.float32)})
    assert [list(result.shape) for result in results] == shapes


def test_channel_shuffle_says_the_same_in_both_forms():
    g = GraphBuilder("shuffle", 1)
    x = g.input([1, 6, 2, 2])
    model = g.model([layers.channel_shuffle(g, x, 3, by_shape=by_shape) for by_shape in (False, True)])
    codes = np.arange(24, dtype=np.float32).reshape(1, 6, 2, 2)
    fixed, dynamic = ort.InferenceSession(model.SerializeToString()).run(None, {"input": codes})
    assert (fixed == dynamic).all()
    assert fixed[0, :, 0, 0].tolist() == [0, 8, 16, 4, 12, 20]
