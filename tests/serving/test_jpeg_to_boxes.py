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


def test_the_boxes_are_those_of_the_network(network: Path, photos: list[np.ndarray]) -> None:
    whole = lowbit.session(lowbit.convert(jpeg_to_boxes.whole(onnx.load(network))))
    alone = lowbit.session(lowbit.convert(network))
    names = [value.name for value in alone.get_outputs()]
    for photo in photos:
        planes = photo[:, :, ::-1].transpose(2, 0, 1)[None].astype(np.float32)
        outputs = dict(zip(names, alone.run(None, {"input": planes}), strict=True))
        expected = face_metric.decode({name: value[0] for name, value in outputs.items()})
        assert len(expected) > 0
        (boxes,) = whole.run(["boxes"], {"image": photo})
        np.testing.assert_allclose(boxes, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("height", "width"), [(320, 320), (480, 640), (1000, 333), (64, 48), (1, 700)])
def test_any_size_becomes_a_square(height: int, width: int) -> None:
    """As Pillow resizes; what the picture does not fill is grey."""
    rough = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    picture = Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)
    session = lowbit.session(jpeg_to_boxes.before())
    pixels, ratio = session.run(["input", "ratio"], {"image": np.asarray(picture)})
    assert ratio == pytest.approx(320 / max(height, width))
    rows, columns = int(height * ratio[0] + 1e-4), int(width * ratio[0] + 1e-4)
    image = pixels[0].transpose(1, 2, 0)[:, :, ::-1]
    assert np.all(image[rows:] == 127)
    assert np.all(image[:, columns:] == 127)
    if rows and columns:
        expected = np.asarray(picture.resize((columns, rows), Image.Resampling.BILINEAR), np.float32)
        assert np.abs(image[:rows, :columns] - expected).mean() < 2


def test_a_large_picture_is_decoded_small(network: Path, photos: list[np.ndarray], tmp_path: Path) -> None:
    """The boxes are those of the picture itself, in its pixels, but for what enlarging and JPEG change."""
    whole = lowbit.session(lowbit.convert(jpeg_to_boxes.whole(onnx.load(network))))
    Image.fromarray(photos[0]).resize((1280, 1280), Image.Resampling.BICUBIC).save(
        tmp_path / "x.jpg", quality=95
    )
    pixels, larger = jpeg_to_boxes.decoded(str(tmp_path / "x.jpg"))
    assert (pixels.shape, larger) == ((320, 320, 3), 4)
    found, expected = (whole.run(["boxes"], {"image": image})[0] for image in (pixels, photos[0]))
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
