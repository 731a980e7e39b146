"""examples/jpeg_to_boxes.py: the boxes of its one model beside those that numpy makes of the network's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import onnx
import pytest
from PIL import Image

from tests.support import require_native

from .conftest import EXAMPLES

require_native()
sys.path.insert(0, str(EXAMPLES))
import face_metric  # noqa: E402
import jpeg_to_boxes  # noqa: E402


@pytest.fixture(scope="module")
def network(shared_models: Path) -> Path:
    path = shared_models / "qdq/yunet_n_320_w8a8_ortptq.onnx"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture(scope="module")
def photos(shared_models: Path) -> list[np.ndarray]:
    return list(np.load(shared_models / "data/yunet_n_320_images.npz")["eval"])


def whole_session(network: Path):
    """The one model that the example makes."""
    whole = jpeg_to_boxes.whole(onnx.load(network))
    return lowbit.session(lowbit.convert(whole, preprocess=jpeg_to_boxes.PREPROCESS))


def test_the_boxes_are_those_of_the_network(network: Path, photos: list[np.ndarray]) -> None:
    whole = whole_session(network)
    alone = lowbit.session(lowbit.convert(network))
    names = [value.name for value in alone.get_outputs()]
    for photo in photos:
        planes = photo[:, :, ::-1].transpose(2, 0, 1)[None].astype(np.float32)
        outputs = dict(zip(names, alone.run(None, {"input": planes}), strict=True))
        expected = face_metric.decode({name: value[0] for name, value in outputs.items()})
        assert len(expected) > 0
        (boxes,) = whole.run(["boxes"], {"input": photo[None]})
        np.testing.assert_allclose(boxes, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("height", "width"), [(320, 320), (480, 640), (1000, 333), (64, 48), (1, 700)])
def test_any_size_is_prepared_as_by_pillow(network: Path, height: int, width: int) -> None:
    model = onnx.load(network)
    pictures = lowbit.session(lowbit.convert(model, preprocess=jpeg_to_boxes.PREPROCESS))
    pixels = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), np.uint8)
    outputs = pictures.run(None, {"input": pixels})
    expected = lowbit.session(lowbit.convert(model)).run(None, {"input": jpeg_to_boxes.prepared(pixels)})
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output, other)


def test_a_large_picture_is_decoded_small(network: Path, photos: list[np.ndarray], tmp_path: Path) -> None:
    """The boxes are those of the picture itself, in its pixels, but for what enlarging and JPEG change."""
    whole = whole_session(network)
    Image.fromarray(photos[0]).resize((1280, 1280), Image.Resampling.BICUBIC).save(
        tmp_path / "x.jpg", quality=95
    )
    pixels, larger = jpeg_to_boxes.decoded(str(tmp_path / "x.jpg"))
    assert (pixels.shape, larger) == ((1, 320, 320, 3), 4)
    found, expected = (whole.run(["boxes"], {"input": image})[0] for image in (pixels, photos[0][None]))
    assert len(found) == len(expected) > 0
    assert face_metric.matches(found, expected) == len(expected)


def test_the_example_runs(network: Path, photos: list[np.ndarray], tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    Image.fromarray(photos[0]).resize((500, 500), Image.Resampling.BICUBIC).save(photo, quality=95)
    command = [sys.executable, str(EXAMPLES / "jpeg_to_boxes.py"), str(network), str(photo)]
    shown = subprocess.run(command, text=True, capture_output=True)
    assert shown.returncode == 0, shown.stderr
    assert "photo.jpg: 4 faces" in shown.stdout
    assert "resize to NMS in one model" in shown.stdout
