"""Data for a model from images and arrays: every step of a spec, batches, one clear error for each fault."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from lowbit.errors import LowBitError
from lowbit.proto.images import Samples, load_feeds
from lowbit.proto.preprocess import parse_spec
from onnx import TensorProto, helper

Image = pytest.importorskip("PIL.Image")

IMAGENET = "imagenet"


def inputs(**shapes):
    """Model inputs by name; float32 unless a shape begins with another type."""
    made = {}
    for name, dims in shapes.items():
        kind = TensorProto.FLOAT
        if dims[0] in ("UINT8", "INT64"):
            kind, dims = getattr(TensorProto, dims[0]), dims[1:]
        made[name] = helper.make_tensor_value_info(name, kind, dims)
    return made


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 12, 10, 3)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Five lossless images of 12x10, one of them in a subfolder, among other files."""
    home = tmp_path / "images"
    (home / "sub").mkdir(parents=True)
    for i, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(home / ("sub" if i == 4 else "") / f"{i}.png")
    (home / "labels.json").write_text("{}")
    (home / "._0.png").write_bytes(b"what a Mac leaves behind")
    return home


def all_of(*args, **kwargs):
    return list(load_feeds(*args, **kwargs))


# ---- values


def test_images_are_fed_as_bytes_in_the_order_of_their_paths(folder):
    feeds = all_of(folder, inputs(x=("UINT8", 1, 3, 12, 10)))
    assert [batch.names for batch in feeds] == [
        [f"{folder}/{name}"] for name in ("0.png", "1.png", "2.png", "3.png", "sub/4.png")
    ]
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in feeds]), PIXELS.transpose(0, 3, 1, 2))


def test_a_spec_scales_and_normalizes(folder):
    mean, std = np.float32([0.1, 0.2, 0.3]), np.float32([0.5, 0.25, 2])
    spec = "scale=1/255,mean=.1;.2;.3,std=.5;1/4;2,order=bgr,layout=nhwc"
    (batch,) = all_of(folder, inputs(x=["N", "H", "W", 3]), spec, batch=8)
    expected = (PIXELS[..., ::-1] * np.float32(1 / 255) - mean) / std
    np.testing.assert_allclose(batch["x"], expected, rtol=1e-6)
    assert batch["x"].dtype == np.float32
    assert batch["x"].flags.c_contiguous


def test_resize_and_crop_are_torchvisions(folder):
    """The shorter side becomes 20, the longer one int(20 * 12 / 10) = 24; the middle 16 x 18 is kept."""
    feeds = all_of(folder, inputs(x=[1, 3, 16, 18]), "resize=20,crop=16x18")
    large = Image.fromarray(PIXELS[0]).resize((20, 24), Image.Resampling.BILINEAR)
    expected = np.asarray(large)[4:20, 1:19].transpose(2, 0, 1)
    np.testing.assert_array_equal(feeds[0]["x"][0], expected)


def test_gray_and_color_follow_the_model(tmp_path):
    digits = PIXELS[..., 0]
    np.save(tmp_path / "gray.npy", digits)
    gray = all_of(tmp_path / "gray.npy", inputs(x=[1, 1, 12, 10]), "raw")
    np.testing.assert_array_equal(gray[3]["x"][0, 0], digits[3])
    color = all_of(tmp_path / "gray.npy", inputs(x=[1, 3, 12, 10]), "raw")
    np.testing.assert_array_equal(color[3]["x"][0], [digits[3]] * 3)
    np.save(tmp_path / "color.npy", PIXELS)
    weighted = all_of(tmp_path / "color.npy", inputs(x=[1, 12, 10, 1]), "scale=0.5")
    assert weighted[0]["x"].shape == (1, 12, 10, 1)
    assert weighted[0]["x"].max() <= 127.5


def test_pictures_stand_as_a_viewer_shows_them(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter to see it upright
    Image.fromarray(PIXELS[0]).save(tmp_path / "turned.png", exif=exif)
    (batch,) = all_of(tmp_path, inputs(x=("UINT8", 1, 10, 12, 3)))
    np.testing.assert_array_equal(batch["x"][0], np.rot90(PIXELS[0], -1))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_row_by_row(tmp_path, save):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 3, 4))
    save(tmp_path / "a.npz", x=x, y=np.arange(7), other=np.asfortranarray(rng.random((7, 5))))
    feeds = all_of(tmp_path / "a.npz", inputs(x=["N", 3, 4]), batch=3)
    assert [(batch.count, batch["x"].shape) for batch in feeds] == [
        (3, (3, 3, 4)), (3, (3, 3, 4)), (1, (1, 3, 4)),
    ]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in feeds]), x.astype(np.float32))
    some = all_of(tmp_path / "a.npz", inputs(x=["N", 3, 4]), limit=3)
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in some]), x[[0, 2, 4]].astype(np.float32))
    assert some[1].names == [f"{tmp_path / 'a.npz'}[2]"]
    feeds = all_of(f"{tmp_path / 'a.npz'}:other", inputs(x=["N", 5]))
    other = np.load(tmp_path / "a.npz")["other"].astype(np.float32)
    np.testing.assert_array_equal([batch["x"][0] for batch in feeds], other)


def test_a_model_of_a_fixed_batch_gets_whole_ones(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10, dtype=np.float32).reshape(5, 2))
    feeds = all_of(tmp_path / "x.npy", inputs(x=[3, 2]), batch=1)
    assert [batch.count for batch in feeds] == [3, 2]
    np.testing.assert_array_equal(feeds[1]["x"], [[6, 7], [8, 9], [6, 7]])
    assert len(feeds[1].names) == 2
    short = all_of(tmp_path / "x.npy", inputs(x=[3, 2]), fill=False)
    np.testing.assert_array_equal(short[1]["x"], [[6, 7], [8, 9]])


def test_several_inputs_come_from_arrays_of_their_names(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones((4, 2), np.float32), b=np.arange(4))
    feeds = all_of(tmp_path / "a.npz", inputs(a=[1, 2], b=("INT64", 1)))
    assert [int(batch["b"][0]) for batch in feeds] == [0, 1, 2, 3]
    with pytest.raises(LowBitError, match=r"expected arrays named a, c, found a \[4, 2\], b \[4\]"):
        all_of(tmp_path / "a.npz", inputs(a=[1, 2], c=[1, 2]))


def test_a_zip_holds_images_too(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, file.relative_to(folder))
    there = all_of(tmp_path / "a.zip", inputs(x=[1, 3, 12, 10]), "raw")
    here = all_of(folder, inputs(x=[1, 3, 12, 10]), "raw")
    np.testing.assert_array_equal([b["x"] for b in there], [b["x"] for b in here])


def test_a_function_of_the_user(folder, tmp_path, monkeypatch):
    (tmp_path / "mine_of_images.py").write_text(
        "import numpy as np\n"
        "def half(image): return image[::2, ::2].astype(np.float32)\n"
        "def both(image): return {'a': image[0, :, 0], 'b': image[:, 0, 0]}\n"
        "def broken(image): raise KeyError('size')\n"
        "def nothing(image): return None\n"
    )
    monkeypatch.chdir(tmp_path)
    feeds = all_of(folder, inputs(x=[1, 6, 5, 3]), "mine_of_images:half")
    np.testing.assert_array_equal(feeds[0]["x"][0], PIXELS[0, ::2, ::2])
    assert str(tmp_path) not in sys.path
    named = f"{tmp_path / 'mine_of_images.py'}:both"
    feeds = all_of(folder, inputs(a=("UINT8", 1, 10), b=("UINT8", 1, 12)), named)
    assert feeds[2]["b"].shape == (1, 12)
    with pytest.raises(LowBitError, match=r"0\.png: --preprocess .* failed: KeyError: 'size'"):
        all_of(folder, inputs(x=[1, 6, 5, 3]), "mine_of_images:broken")
    with pytest.raises(LowBitError, match="expected numpy arrays for x, returned x: NoneType"):
        all_of(folder, inputs(x=[1, 6, 5, 3]), "mine_of_images:nothing")
    with pytest.raises(LowBitError, match="has no function 'gone'"):
        all_of(folder, inputs(x=[1, 6, 5, 3]), "mine_of_images:gone")
    with pytest.raises(LowBitError, match="importing 'no_such_module_here' failed: ModuleNotFoundError"):
        all_of(folder, inputs(x=[1, 6, 5, 3]), "no_such_module_here:f")


# ---- faults


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("size=3", r"'size=3' is unknown; expected raw, imagenet, or KEY=VALUE"),
        ("resize", r"'resize' is unknown"),
        ("resize=0", r"resize expects a length for the shorter side, such as 256, or HEIGHTxWIDTH, got '0'"),
        ("crop=2x3x4", r"crop expects a size"),
        ("scale=1/0", r"scale expects a number"),
        ("mean=1;2", r"mean expects one number or three"),
        ("std=0.5;0;1", r"std expects one number or three other than 0"),
        ("scale=nan", r"scale expects a number"),
        ("order=brg", r"order expects one of rgb, bgr, gray, got 'brg'"),
    ],
)
def test_a_spec_that_says_nothing_is_refused(spec, message):
    with pytest.raises(LowBitError, match=message):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((1, 3, 12, 10), None, r"images hold bytes, the model takes x: float32; say with --preprocess"),
        ((1, 3, 8, 8), "raw", r"0\.png: expected a sample \[3, 8, 8\] for input 'x', found \[3, 12, 10\]"),
        ((1, 3, 64, 64), "crop=64", r"0\.png: is 12x10 where crop=64x64 cuts"),
        ((1, 3, 12, 10), "order=gray", r"order=gray and layout=nchw make 1 channels, input 'x' takes 3"),
        ((1, 4, 12, 12), "raw", r"does not tell where its channels are; add layout="),
        ((1, 1, 12, 10), "mean=1;2;3", r"mean has 3 numbers for 1 channels"),
        ((1, 30), "raw", r"rank 4, input 'x' has rank 2; give module:function"),
        (("UINT8", 1, 3, 12, 10), "scale=2", r"input 'x' is uint8; leave out scale"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(folder, shape, spec, message):
    with pytest.raises(LowBitError, match=message):
        all_of(folder, inputs(x=shape), spec)


def test_a_corrupt_image_is_named(folder):
    whole = (folder / "2.png").read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"no image"):
        (folder / "2.png").write_bytes(data)
        with pytest.raises(LowBitError, match=r"2\.png: expected an image, it cannot be decoded"):
            all_of(folder, inputs(x=[1, 3, 12, 10]), "raw")


def test_sixteen_bits_are_not_clipped_in_silence(tmp_path):
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(LowBitError, match=r"deep\.png: expected 8 bits a channel, found Pillow's mode 'I;16"):
        all_of(tmp_path, inputs(x=[1, 1, 4, 4]), "raw")


def test_images_of_several_sizes_are_no_batch(folder):
    Image.fromarray(PIXELS[0, :8]).save(folder / "1.png")
    wide = inputs(x=["N", 3, "H", "W"])
    assert all_of(folder, wide, "raw")[1]["x"].shape == (1, 3, 8, 10)
    with pytest.raises(LowBitError, match=r"1\.png: expected \[3, 12, 10\] like .*0\.png in the same batch"):
        all_of(folder, wide, "raw", batch=2)


def test_nothing_to_read(tmp_path):
    one = inputs(x=[1, 3, 4, 4])
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4")
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 3, 4, 4)), b=np.zeros((2, 3, 4, 4)), y=np.zeros(2))
    np.savez(tmp_path / "none.npz", a=np.zeros((0, 3, 4, 4)))
    np.savez(tmp_path / "words.npz", a=np.array([["a"], ["b"]]))
    for path, message in {
        "gone": "gone: no such file or folder",
        "empty": r"expected images \(.*\), found nothing",
        "notes": "found 1 other files",
        "bad.npz": r"expected a folder or \.zip of images, an \.npz or an \.npy",
        "two.npz": r"expected one array of samples, or one named 'x', found a \[2, 3, 4, 4\].*choose one",
        "two.npz:c": "expected an array 'c'",
        "none.npz": r"expected samples along the first dim, found the shape \[0, 3, 4, 4\]",
        "words.npz": "expected numbers, found <U1",
    }.items():
        with pytest.raises(LowBitError, match=message):
            load_feeds(tmp_path / path, one)


def test_a_damaged_archive_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 12, 10, 3)).astype(np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x=noise)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(LowBitError, match=r"a\.npz:x: cannot be read: .*is the file whole"):
        all_of(tmp_path / "a.npz", inputs(x=[1, 3, 12, 10]), "raw")


def test_the_type_of_an_array_must_fit(tmp_path):
    np.save(tmp_path / "x.npy", PIXELS)
    with pytest.raises(LowBitError, match=r"x\.npy\[0\]: expected float32 for input 'x', found uint8"):
        all_of(tmp_path / "x.npy", inputs(x=[1, 12, 10, 3]))
    np.save(tmp_path / "f.npy", PIXELS.astype(np.float64))
    with pytest.raises(LowBitError, match="expected uint8 pixels to resize"):
        all_of(tmp_path / "f.npy", inputs(x=[1, 3, 4, 4]), "resize=4,crop=4")


def test_without_pillow_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(LowBitError, match=r"needs Pillow, .* pip install 'lowbit\[quantize\]'"):
        load_feeds(folder, inputs(x=[1, 3, 12, 10]), "raw")


def test_memory_does_not_grow_with_the_data(tmp_path):
    import tracemalloc

    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((400, 100, 100, 3), np.uint8))  # 12 MB
    tracemalloc.start()
    count = sum(1 for _ in load_feeds(tmp_path / "a.npz", inputs(x=[1, 3, 100, 100]), "raw"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 400
    assert peak < 2e6


def test_samples_can_be_read_again(folder):
    samples = Samples(folder, inputs(x=[1, 3, 12, 10]), IMAGENET + ",resize=12x10,crop=12x10")
    first, second = ([b["x"] for b in samples.batches()] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(samples) == len(samples.names) == 5
    assert isinstance(samples.inputs["x"], onnx.ValueInfoProto)
