"""LowBitImage against Pillow, whose resized pixels it gives bit for bit."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit import ops
from lowbit.proto.preprocess import Spec, Steps
from PIL import Image

from tests.support import require_native

native = require_native()

SEEDS = st.integers(0, 2**32 - 1)
IDENTITY = np.arange(256, dtype=np.uint8)
FILTERS = ("bilinear", "bicubic", "nearest")
RESIZES_TALL_PICTURES_DOWN_FIRST = int(PIL.__version__.split(".")[0]) >= 13


def sides(rng: np.random.Generator, largest: int) -> list[int]:
    """Two lengths, of which small ones are as likely as large ones."""
    return [int(side) for side in np.exp(rng.uniform(0, np.log(largest + 1), 2))]


def picture(rng: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Noise, or black and white, where a cubic filter overshoots most."""
    pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels if rng.random() < 0.7 else np.where(pixels < 128, np.uint8(0), np.uint8(255))


def same_order(picture: tuple[int, int], resized: tuple[int, int]) -> bool:
    """Whether the Pillow at hand goes along the sides in the order of the node; older ones have one order."""
    (height, width), (high, wide) = picture, resized
    down_first = height > high and height - high > 2 * (width - wide)
    return RESIZES_TALL_PICTURES_DOWN_FIRST or not down_first


@pytest.mark.parametrize("interpolation", FILTERS)
@given(seed=SEEDS)
def test_every_level_equals_pillow(interpolation: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    (height, width), (high, wide) = sides(rng, 700), sides(rng, 500)
    if not same_order((height, width), (high, wide)):
        return
    x = picture(rng, height, width, 3)
    kind = Image.Resampling[interpolation.upper()]
    expected = np.asarray(Image.fromarray(x).resize((wide, high), kind))
    attrs = {"resize": [high, wide], "interpolation": interpolation}
    for isa in native.isa_levels():
        y = native.run("LowBitImage", attrs, [x[None], IDENTITY], isa=isa, threads=2)
        np.testing.assert_array_equal(y[0], expected, err_msg=f"{isa}: {height}x{width} to {high}x{wide}")


@given(seed=SEEDS)
def test_a_node_equals_the_steps_of_preprocess(seed: int) -> None:
    """Sizes, crops, letterboxes, orders and pictures of one channel, as the commands prepare them."""
    rng = np.random.default_rng(seed)
    height, width = sides(rng, 300)
    interpolation, order = str(rng.choice(FILTERS)), str(rng.choice(["rgb", "bgr", "gray"]))
    spec = Spec(interpolation=interpolation, order=order, layout="nhwc", fill=int(rng.integers(256)))
    exact, short = tuple(sides(rng, 200)), int(rng.integers(1, 100))
    place = str(rng.choice(["center", "corner"]))
    kind = int(rng.integers(0, 4))
    changes = [{}, {"resize": exact}, {"resize": short}, {"letterbox": exact, "place": place}][kind]
    spec = Spec(**{**spec.__dict__, **changes})
    resize = [spec.resize] if isinstance(spec.resize, int) else list(spec.resize or ())
    resized = ops.image.resized_size(height, width, resize, spec.letterbox or ())
    if spec.letterbox is None and rng.random() < 0.5:
        crop = tuple(int(rng.integers(1, side + 1)) for side in resized)
        spec = Spec(**{**spec.__dict__, "crop": crop})
    if max(resized) > 3000 or not same_order((height, width), resized):
        return
    x = picture(rng, height, width, int(rng.choice([1, 3])))
    expected = Steps(spec, "x", np.dtype(np.uint8))(x, "x")["x"]
    attrs = {
        "resize": resize, "letterbox": list(spec.letterbox or ()), "crop": list(spec.crop or ()),
        "centered": int(spec.place == "center"), "fill": spec.fill,
        "interpolation": interpolation, "order": order,
    }  # fmt: skip
    y = native.run("LowBitImage", attrs, [x[None], IDENTITY], threads=1 + seed % 2)
    np.testing.assert_array_equal(y[0], expected, err_msg=str((spec, x.shape)))
    defined = ops.evaluate("LowBitImage", attrs, [x[None], IDENTITY])
    np.testing.assert_array_equal(defined[0], expected, err_msg=str((spec, x.shape)))


def test_sizes_that_were_met_before_are_resized_alike() -> None:
    """More sizes than a node keeps weights of, twice, through one session."""
    from tests.support import lowbit_session

    rng = np.random.default_rng(0)
    session = lowbit_session(one_node(resize=[9, 11]))
    for size in [(height, 7 + height % 5) for height in range(1, 30)] * 2:
        x = picture(rng, *size, 3)[None]
        expected = ops.evaluate("LowBitImage", {"resize": [9, 11]}, [x, IDENTITY])
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected, err_msg=str(size))


def one_node(**attributes: object):
    """A model that takes pictures of any size."""
    from onnx import TensorProto, helper, numpy_helper

    node = helper.make_node("LowBitImage", ["x", "table"], ["y"], domain=ops.DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "picture",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", "h", "w", 3])],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, None)],
        [numpy_helper.from_array(IDENTITY, "table")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ops.DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)
