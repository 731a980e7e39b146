"""From an image to what a model is fed: the spec that ``--preprocess`` takes, and the steps that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from lowbit.errors import LowBitError
from lowbit.proto.user_function import is_function, load_function

if TYPE_CHECKING:
    from PIL.Image import Image

Array = npt.NDArray[Any]
Sample = dict[str, Array]
"""One sample: an array for each input, without the batch dim."""

Preprocess = Callable[[Array, str], Sample]
"""Makes a sample of an image (uint8 [H, W, 3] in RGB, or [H, W]) and its name."""

PRESETS = {
    "raw": "",
    "imagenet": "resize=256,crop=224,scale=1/255,mean=0.485;0.456;0.406,std=0.229;0.224;0.225",
}
"""Words that stand for a spec, or for the beginning of one."""

KEYS = "resize, letterbox, fill, place, crop, interpolation, scale, mean, std, layout, order"

_ORDERS = ("rgb", "bgr", "gray")
_LAYOUTS = ("nchw", "nhwc")
_FILTERS = ("bilinear", "bicubic", "nearest")
_PLACES = ("center", "corner")


@dataclass(frozen=True)
class Spec:
    """What ``--preprocess`` says.

    Attributes:
        resize: the shorter side's new length, or (height, width) for exactly that; None leaves the size.
        letterbox: (height, width) into which the whole image fits, its sides in proportion; None for
            ``resize``.
        fill: the value of the pixels around the image in a letterbox.
        place: where in a letterbox the image is, "center" or "corner" (at the top left).
        crop: height and width of the middle part that is kept; None keeps all.
        interpolation: the filter of ``resize`` and ``letterbox``.
        scale: what pixels are multiplied by, before ``mean`` and ``std``.
        mean: subtracted, one number or one a channel.
        std: divided by, likewise.
        layout: "nchw" or "nhwc"; None as the model's input has it.
        order: "rgb", "bgr" or "gray"; None as many channels as the model's input has, in RGB.
    """

    resize: int | tuple[int, int] | None = None
    letterbox: tuple[int, int] | None = None
    fill: int = 0
    place: str = "center"
    crop: tuple[int, int] | None = None
    interpolation: str = "bilinear"
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layout: str | None = None
    order: str | None = None


def parse_spec(text: str) -> Spec:
    """``"resize=256,crop=224,scale=1/255,mean=0.485;0.456;0.406,std=...,layout=nchw,order=rgb"`` as a Spec.

    A word of :data:`PRESETS` may stand first; later keys replace what it says.

    Raises:
        LowBitError: for anything else, with what was expected.
    """
    first, _, rest = text.partition(",")
    if first.strip() in PRESETS:
        text = ",".join(filter(None, (PRESETS[first.strip()], rest)))
    spec = Spec()
    for entry in filter(None, (word.strip() for word in text.split(","))):
        key, separator, value = (part.strip() for part in entry.partition("="))
        if not separator or key not in _READERS:
            raise LowBitError(
                f"--preprocess: '{entry}' is unknown; expected {', '.join(PRESETS)}, or KEY=VALUE,.. with "
                f"{KEYS}, or module:function"
            )
        try:
            spec = replace(spec, **{key: _READERS[key](value)})
        except (ValueError, ZeroDivisionError) as error:
            raise LowBitError(f"--preprocess: {key} expects {_EXPECTED[key]}, got '{value}'") from error
    if spec.letterbox is not None and (spec.resize is not None or spec.crop is not None):
        raise LowBitError("--preprocess: letterbox says the whole size; leave out resize and crop")
    return spec


def _size(text: str) -> tuple[int, int]:
    numbers = [int(word) for word in text.split("x")]
    if len(numbers) > 2 or min(numbers) < 1:
        raise ValueError(text)
    return numbers[0], numbers[-1]


def _resize(text: str) -> int | tuple[int, int]:
    return _size(text) if "x" in text else _size(text)[0]


def _byte(text: str) -> int:
    if not 0 <= (value := int(text)) <= 255:
        raise ValueError(text)
    return value


def _number(text: str) -> float:
    numerator, _, denominator = text.partition("/")
    value = float(numerator) / float(denominator or 1)
    if not np.isfinite(value):
        raise ValueError(text)
    return value


def _numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(_number(word) for word in text.split(";"))
    if len(numbers) not in (1, 3):
        raise ValueError(text)
    return numbers


def _nonzero(text: str) -> tuple[float, ...]:
    if 0 in (numbers := _numbers(text)):
        raise ValueError(text)
    return numbers


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "resize": _resize, "letterbox": _size, "fill": _byte, "place": _one_of(*_PLACES), "crop": _size,
    "interpolation": _one_of(*_FILTERS), "scale": _number, "mean": _numbers, "std": _nonzero,
    "layout": _one_of(*_LAYOUTS), "order": _one_of(*_ORDERS),
}  # fmt: skip

_EXPECTED = {
    "resize": "a length for the shorter side, such as 256, or HEIGHTxWIDTH",
    "letterbox": "a size, such as 640, or HEIGHTxWIDTH",
    "fill": "a number from 0 to 255",
    "place": f"one of {', '.join(_PLACES)}",
    "crop": "a size, such as 224, or HEIGHTxWIDTH",
    "interpolation": f"one of {', '.join(_FILTERS)}",
    "scale": "a number, such as 1/255",
    "mean": "one number or three, such as 0.485;0.456;0.406",
    "std": "one number or three other than 0, such as 0.229;0.224;0.225",
    "layout": f"one of {', '.join(_LAYOUTS)}",
    "order": f"one of {', '.join(_ORDERS)}",
}


def make_preprocess(text: str, inputs: Mapping[str, onnx.ValueInfoProto]) -> Preprocess:
    """The function that ``--preprocess`` names, for a model's inputs.

    A user's function is called with one image, uint8 [H, W, 3] in RGB (of an array: one sample as it is
    stored), and returns what the model is fed for it, without the batch dim: an array, or of a model
    with several inputs a dict of them by name.

    Args:
        text: a spec (:func:`parse_spec`), ``module:function`` or ``file.py:function``.
        inputs: the model's inputs by name, as :func:`lowbit.proto.feeds.model_inputs` gives them.

    Raises:
        LowBitError: if the text is neither, or a spec does not fit the model's inputs.
    """
    if is_function(text):
        return _from_user(text, load_function(text, "--preprocess"), list(inputs))
    spec = spec_for(text, inputs)
    ((name, value),) = inputs.items()
    return Steps(spec, name, element_type(value))


def spec_for(text: str, inputs: Mapping[str, onnx.ValueInfoProto]) -> Spec:
    """The spec of a text, its layout and order filled in from a model's one input.

    Raises:
        LowBitError: if it is no spec, or does not fit the model's inputs.
    """
    spec = parse_spec(text)
    if len(inputs) != 1:
        raise LowBitError(
            f"--preprocess: a spec makes one input of an image, the model has {len(inputs)} "
            f"({', '.join(inputs)}); give module:function, which returns a dict of arrays"
        )
    return _for_input(spec, next(iter(inputs.values())))


def rest_of(spec: Spec) -> str:
    """The text of a spec without scale, mean and std: raw pixels in the size and form that it makes."""
    sizes = {"resize": spec.resize, "letterbox": spec.letterbox, "crop": spec.crop}
    words = ["raw"]
    for key, size in sizes.items():
        if size is not None:
            words.append(f"{key}={size if isinstance(size, int) else 'x'.join(map(str, size))}")
    if spec.letterbox is not None:
        words.append(f"fill={spec.fill},place={spec.place}")
    if spec.resize is not None or spec.letterbox is not None:
        words.append(f"interpolation={spec.interpolation}")
    return ",".join([*words, f"layout={spec.layout}", f"order={spec.order}"])


def _from_user(text: str, function: Callable[..., Any], names: list[str]) -> Preprocess:
    def call(image: Array, label: str) -> Sample:
        try:
            made = function(image)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise LowBitError(f"{label}: --preprocess {text} failed: {what}") from error
        arrays = made if isinstance(made, Mapping) else dict.fromkeys(names[:1], made)
        if set(arrays) != set(names) or not all(isinstance(array, np.ndarray) for array in arrays.values()):
            found = ", ".join(f"{key}: {type(value).__name__}" for key, value in arrays.items())
            raise LowBitError(
                f"{label}: --preprocess {text}: expected numpy arrays for {', '.join(names)}, returned "
                f"{found}"
            )
        return {name: arrays[name] for name in names}

    return call


def dims_of(value: onnx.ValueInfoProto) -> list[int | None] | None:
    """The dims of an input, None for symbolic ones; None of an input that states no shape."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]


def element_type(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    """The numpy type of an input.

    Raises:
        LowBitError: if it holds no numbers.
    """
    element = value.type.tensor_type.elem_type
    if element == onnx.TensorProto.STRING or element not in onnx.helper.get_all_tensor_dtypes():
        raise LowBitError(f"input '{value.name}' holds no numbers, data cannot be fed to it")
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element))


def _for_input(spec: Spec, value: onnx.ValueInfoProto) -> Spec:
    """The spec with its layout and order filled in from the model's input."""
    dims = dims_of(value)
    if dims is not None and len(dims) != 4:
        raise LowBitError(
            f"--preprocess: a spec makes an image batch of rank 4, input '{value.name}' has rank "
            f"{len(dims)}; give module:function"
        )
    places = {"nchw": 1, "nhwc": 3}
    channels = {layout: dims[place] if dims else None for layout, place in places.items()}
    fitting = [layout for layout in _LAYOUTS if channels[layout] in (1, 3)]
    layout = spec.layout or (fitting[0] if len(fitting) == 1 else None)
    if layout is None:
        raise LowBitError(
            f"--preprocess: input '{value.name}' has the shape {dims}, which does not tell where its "
            "channels are; add layout=nchw or layout=nhwc"
        )
    count = channels[layout]
    order = spec.order or ("gray" if count == 1 else "rgb")
    made = 1 if order == "gray" else 3
    if count is not None and count != made:
        raise LowBitError(
            f"--preprocess: order={order} and layout={layout} make {made} channels, input '{value.name}' "
            f"takes {count} (shape {dims})"
        )
    for key, numbers in (("mean", spec.mean), ("std", spec.std)):
        if len(numbers) not in (0, 1, made):
            raise LowBitError(f"--preprocess: {key} has {len(numbers)} numbers for {made} channels")
    return replace(spec, layout=layout, order=order)


class Steps:
    """The steps of a spec whose layout and order are known."""

    def __init__(self, spec: Spec, name: str, dtype: np.dtype[Any]) -> None:
        """``name`` and ``dtype`` are those of the model's one input."""
        self.spec, self.name, self.dtype = spec, name, dtype
        channel = [slice(None)] * 2 + [slice(None, None, -1)] if spec.order == "bgr" else None
        self._flip = None if channel is None else tuple(channel)

    def __call__(self, image: Array, label: str) -> Sample:
        """Resizes, crops, orders, scales and normalizes one image.

        Args:
            image: uint8 [H, W, 3] in RGB, or [H, W].
            label: what to call the image in messages.

        Raises:
            LowBitError: if the image is smaller than the crop, or its values do not fit an integer input.
        """
        spec = self.spec
        pixels = self._boxed(self._crop(self._resized(self._channels(image, label), label), label))
        if self._flip is not None:
            pixels = pixels[self._flip]
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        plain = spec.scale == 1 and not spec.mean and not spec.std
        if not (plain and pixels.dtype == self.dtype):
            values = pixels.astype(np.float32)
            if spec.scale != 1:
                values *= np.float32(spec.scale)
            if spec.mean:
                values -= np.asarray(spec.mean, np.float32)
            if spec.std:
                values /= np.asarray(spec.std, np.float32)
            pixels = self._stored(values, label)
        if spec.layout == "nchw":
            pixels = pixels.transpose(2, 0, 1)
        return {self.name: np.ascontiguousarray(pixels)}

    def _channels(self, image: Array, label: str) -> Array:
        if image.ndim == 3 and image.shape[2] == 1:
            image = image[:, :, 0]
        if not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)):
            raise LowBitError(
                f"{label}: expected an image [H, W], [H, W, 1] or [H, W, 3], found {list(image.shape)}; "
                "store images channels last, or give --preprocess module:function"
            )
        if self.spec.order == "gray":
            return image if image.ndim == 2 else np.asarray(_to_pillow(image, label).convert("L"))
        return image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)

    def _resized(self, image: Array, label: str) -> Array:
        height, width = image.shape[:2]
        if self.spec.letterbox is not None:
            high, wide = self.spec.letterbox
            new_height, new_width = high, wide
            if high * width <= wide * height:
                new_width = min(max((2 * width * high + height) // (2 * height), 1), wide)
            else:
                new_height = min(max((2 * height * wide + width) // (2 * width), 1), high)
        elif self.spec.resize is None:
            return image
        elif isinstance(self.spec.resize, tuple):
            new_height, new_width = self.spec.resize
        else:  # the longer side is cut off to whole pixels, as torchvision does
            short = self.spec.resize
            new_height = short if height <= width else int(short * height / width)
            new_width = short if width <= height else int(short * width / height)
        if (new_height, new_width) == (height, width):
            return image
        from PIL.Image import Resampling

        kind = Resampling[self.spec.interpolation.upper()]
        return np.asarray(_to_pillow(image, label).resize((new_width, new_height), kind))

    def _crop(self, image: Array, label: str) -> Array:
        if self.spec.crop is None:
            return image
        height, width = self.spec.crop
        if image.shape[0] < height or image.shape[1] < width:
            raise LowBitError(
                f"{label}: is {image.shape[0]}x{image.shape[1]} where crop={height}x{width} cuts its middle "
                "out; add a resize= that is no smaller"
            )
        top, left = round((image.shape[0] - height) / 2), round((image.shape[1] - width) / 2)
        return image[top : top + height, left : left + width]

    def _boxed(self, image: Array) -> Array:
        if self.spec.letterbox is None:
            return image
        box = np.full((*self.spec.letterbox, *image.shape[2:]), self.spec.fill, image.dtype)
        (height, width), (high, wide) = image.shape[:2], self.spec.letterbox
        centered = self.spec.place == "center"
        top, left = ((high - height) // 2, (wide - width) // 2) if centered else (0, 0)
        box[top : top + height, left : left + width] = image
        return box

    def _stored(self, values: Array, label: str) -> Array:
        if not np.issubdtype(self.dtype, np.integer):
            return values.astype(self.dtype)
        rounded, info = np.rint(values), np.iinfo(self.dtype)
        if rounded.min() < info.min or rounded.max() > info.max:
            raise LowBitError(
                f"{label}: its values reach from {rounded.min():g} to {rounded.max():g}, input '{self.name}' "
                f"is {self.dtype}; leave out scale, mean and std where the model takes pixels"
            )
        return rounded.astype(self.dtype)


def _to_pillow(image: Array, label: str) -> Image:
    if image.dtype != np.uint8:
        raise LowBitError(
            f"{label}: expected uint8 pixels to resize or to make gray, found {image.dtype}; store images as "
            "uint8, or give --preprocess module:function"
        )
    return pillow(label).fromarray(image)  # type: ignore[no-any-return]


def pillow(label: str) -> Any:
    """The module ``PIL.Image``.

    Raises:
        LowBitError: if it is not installed.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise LowBitError(
            f"{label}: reading and resizing images needs Pillow, which is not installed; "
            "pip install 'lowbit[quantize]', or give an .npz of arrays"
        ) from error
    return PIL.Image
