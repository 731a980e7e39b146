"""JPEG files in, boxes of faces out: resizing, a quantized YuNet and NMS in one lowbit model.

python examples/jpeg_to_boxes.py yunet_qdq.onnx photo.jpg other.jpg ...

Pillow decodes, in threads. The model takes uint8 pixels [1, height, width, 3] of any size, so that all the
rest runs in one session, on its device: `lowbit.convert(.., preprocess=..)` puts the steps in front of the
network into its first node. Those behind it are ONNX operators, written as text below; another detector
needs another text. Prints the boxes, and the milliseconds of each stage in a session of its own, or with
Pillow, beside those of the one model.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lowbit
import numpy as np
import onnx
from onnx import compose, numpy_helper, parser, version_converter
from PIL import Image

SIZE, STRIDES = 320, (8, 16, 32)
GREY = 127
# The longer side becomes SIZE, and grey fills the square. The network takes BGR as it is; one that takes
# RGB, or wants a mean and a deviation, has other keys.
PREPROCESS = f"letterbox={SIZE},place=corner,fill={GREY},order=bgr"
HEADER = '<ir_version: 10, opset_import: ["": 18]>'

# Places are counted in strides from the cell that a box belongs to, sizes are logarithms of strides. NMS does
# not mind that x comes before y.
BEHIND = f"""{HEADER}
behind (float[1, n8, 1] cls_8, float[1, n16, 1] cls_16, float[1, n32, 1] cls_32,
        float[1, n8, 1] obj_8, float[1, n16, 1] obj_16, float[1, n32, 1] obj_32,
        float[1, n8, 4] bbox_8, float[1, n16, 4] bbox_16, float[1, n32, 4] bbox_32)
       => (float[faces, 4] boxes, float[faces] scores)
<int64 most = {{1000}}, float overlap = {{0.45}}, float least = {{0.6}}, float half = {{0.5}},
 int64 box = {{2}}, int64[1] single = {{0}}>
{{
    cls = Concat <axis = 1> (cls_8, cls_16, cls_32)
    obj = Concat <axis = 1> (obj_8, obj_16, obj_32)
    bbox = Concat <axis = 1> (bbox_8, bbox_16, bbox_32)
    both = Mul (cls, obj)
    sure = Sqrt (both)
    place, logarithm = Split <axis = 2, num_outputs = 2> (bbox)
    from_cell = Add (place, cells)
    centre = Mul (from_cell, strides)
    in_strides = Exp (logarithm)
    extent = Mul (in_strides, strides)
    reach = Mul (extent, half)
    top_left = Sub (centre, reach)
    bottom_right = Add (centre, reach)
    corners = Concat <axis = 2> (top_left, bottom_right)
    sure_by_class = Transpose <perm = [0, 2, 1]> (sure)
    kept = NonMaxSuppression (corners, sure_by_class, most, overlap, least)
    index = Gather <axis = 1> (kept, box)
    all_corners = Squeeze (corners, single)
    all_sure = Squeeze (sure)
    boxes = Gather <axis = 0> (all_corners, index)
    scores = Gather <axis = 0> (all_sure, index)
}}"""


Timed = tuple[list[Any], float]


def behind() -> onnx.ModelProto:
    """The network's outputs to boxes [faces, 4] (left, top, right, bottom) in its pixels, and scores."""
    model = parser.parse_model(BEHIND)
    cells = [np.indices([SIZE // s] * 2)[::-1].reshape(2, -1).T for s in STRIDES]
    strides = [np.full([len(each), 1], s) for each, s in zip(cells, STRIDES, strict=True)]
    for name, parts in {"cells": cells, "strides": strides}.items():
        value = np.concatenate(parts)[None].astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def whole(network: onnx.ModelProto) -> onnx.ModelProto:
    """The network and what is behind it as one model."""
    network = version_converter.convert_version(network, 18)
    network.ir_version = 10
    names = [value.name for value in behind().graph.input]
    return compose.merge_models(network, behind(), [(name, name) for name in names])


def decoded(path: str) -> tuple[np.ndarray, float]:
    """The pixels of a picture, uint8 [1, height, width, 3], and how many of its own one of the network's is.

    A decoder of JPEG makes an image of half, a quarter or an eighth of the size in a fraction of the time; it
    gets the smallest that is not smaller than what the network takes.
    """
    with Image.open(path) as image:
        width, height = image.size
        longest = max(image.size)
        image.draft("RGB", (width * SIZE // longest, height * SIZE // longest))
        return np.asarray(image.convert("RGB"))[None], longest / SIZE


def prepared(pixels: np.ndarray) -> np.ndarray:
    """What the first node of the model makes, by Pillow: float32 [1, 3, SIZE, SIZE]."""
    height, width = pixels.shape[1:3]
    ratio = SIZE / max(height, width)
    size = max(1, round(width * ratio)), max(1, round(height * ratio))
    small = np.asarray(Image.fromarray(pixels[0]).resize(size, Image.Resampling.BILINEAR))
    square = np.full((SIZE, SIZE, 3), GREY, np.uint8)
    square[: small.shape[0], : small.shape[1]] = small
    return np.ascontiguousarray(square[:, :, ::-1].transpose(2, 0, 1)[None]).astype(np.float32)


def timed(stage: Callable[..., Any], items: Sequence[Any], apply: Callable[..., Any] = map) -> Timed:
    """What a function makes of items, and the mean milliseconds of one in the quickest of ten rounds.

    The first round allocates, and other work on the machine disturbs some of them.
    """
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        results = list(apply(stage, items))
        seconds.append(time.perf_counter() - start)
    return results, 1e3 * min(seconds) / len(items)


def main() -> None:
    """Converts, runs, prints boxes and times."""
    source, *photos = sys.argv[1:]
    network = onnx.load(source)
    result = lowbit.convert(whole(network), preprocess=PREPROCESS)
    print(f"{len(result.report.converted)} nodes converted, {len(result.report.kept)} kept")
    session = lowbit.session(result)
    alone, last = lowbit.session(lowbit.convert(network)), lowbit.session(behind())

    pictures, decoding = timed(decoded, photos)
    images = [pixels for pixels, _ in pictures]
    with ThreadPoolExecutor() as pool:
        _, in_threads = timed(decoded, photos, pool.map)
    inputs, resizing = timed(prepared, images)
    outputs, running = timed(lambda planes: alone.run(None, {"input": planes}), inputs)
    names = [value.name for value in alone.get_outputs()]
    taken = {value.name for value in last.get_inputs()}
    feeds = [{key: value for key, value in zip(names, out, strict=True) if key in taken} for out in outputs]
    _, choosing = timed(lambda feed: last.run(None, feed), feeds)
    found, together = timed(lambda pixels: session.run(["boxes", "scores"], {"input": pixels}), images)

    for photo, (_, larger), (boxes, scores) in zip(photos, pictures, found, strict=True):
        print(f"{photo}: {len(boxes)} faces")
        for box, score in zip(boxes * larger, scores, strict=True):
            print("  " + " ".join(f"{side:7.1f}" for side in box) + f"  {score:.3f}")
    print("milliseconds a picture")
    for what, value in {
        "decode": decoding,
        "decode, in threads": in_threads,
        "resize with Pillow": resizing,
        "network": running,
        "boxes and NMS": choosing,
        "resize to NMS in one model": together,
    }.items():
        print(f"{what:28} {value:6.2f}")


if __name__ == "__main__":
    main()
