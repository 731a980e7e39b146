"""JPEG files in, boxes of faces out: resizing, a quantized YuNet and NMS in one lowbit model.

python examples/jpeg_to_boxes.py yunet_qdq.onnx photo.jpg other.jpg ...

Pillow decodes, in threads. The model takes uint8 pixels [height, width, 3] of any size, so that all the rest
runs in one session, on its device. The steps in front of the network and behind it are ONNX operators,
written as text below; another detector needs another text. Prints the boxes, and the milliseconds of each
stage in a session of its own beside those of the one model.
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
HEADER = (
    '<ir_version: 10, opset_import: ["": 18]>'  # the first opset whose Resize averages what it leaves out
)

# The longer side becomes SIZE, and grey fills the square. The network takes BGR as it is; one that takes
# RGB, or wants a mean and a deviation, has other steps behind Pad.
BEFORE = f"""{HEADER}
before (uint8[height, width, 3] image) => (float[1, 3, {SIZE}, {SIZE}] input, float[1] ratio)
<float size = {{{SIZE}.0}}, int64[2] square = {{{SIZE}, {SIZE}}}, int64[2] zeros = {{0, 0}},
 float grey = {{127.0}}, int64[2] sides = {{0, 1}}, int64[3] bgr = {{2, 1, 0}}, int64[1] batch = {{0}}>
{{
    lengths = Shape <end = 2> (image)
    real_lengths = Cast <to = 1> (lengths)
    longest = ReduceMax <keepdims = 1> (real_lengths)
    ratio = Div (size, longest)
    scales = Concat <axis = 0> (ratio, ratio)
    real = Cast <to = 1> (image)
    resized = Resize <mode = "linear", antialias = 1, axes = [0, 1]> (real, , scales)
    resized_lengths = Shape <end = 2> (resized)
    missing = Sub (square, resized_lengths)
    pads = Concat <axis = 0> (zeros, missing)
    padded = Pad (resized, pads, grey, sides)
    ordered = Gather <axis = 2> (padded, bgr)
    planes = Transpose <perm = [2, 0, 1]> (ordered)
    input = Unsqueeze (planes, batch)
}}"""

# Places are counted in strides from the cell that a box belongs to, sizes are logarithms of strides. NMS does
# not mind that x comes before y.
BEHIND = f"""{HEADER}
behind (float[1, n8, 1] cls_8, float[1, n16, 1] cls_16, float[1, n32, 1] cls_32,
        float[1, n8, 1] obj_8, float[1, n16, 1] obj_16, float[1, n32, 1] obj_32,
        float[1, n8, 4] bbox_8, float[1, n16, 4] bbox_16, float[1, n32, 4] bbox_32,
        float[1] ratio) => (float[faces, 4] boxes, float[faces] scores)
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
    kept_corners = Gather <axis = 0> (all_corners, index)
    boxes = Div (kept_corners, ratio)
    scores = Gather <axis = 0> (all_sure, index)
}}"""


Timed = tuple[list[Any], float]


def before() -> onnx.ModelProto:
    """uint8 pixels [height, width, 3] to the network's input, and by which ratio they were made smaller."""
    return parser.parse_model(BEFORE)


def behind() -> onnx.ModelProto:
    """The network's outputs to boxes [faces, 4] (left, top, right, bottom) in pixels, and their scores."""
    model = parser.parse_model(BEHIND)
    cells = [np.indices([SIZE // s] * 2)[::-1].reshape(2, -1).T for s in STRIDES]
    strides = [np.full([len(each), 1], s) for each, s in zip(cells, STRIDES, strict=True)]
    for name, parts in {"cells": cells, "strides": strides}.items():
        value = np.concatenate(parts)[None].astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def whole(network: onnx.ModelProto) -> onnx.ModelProto:
    """All three as one model, pixels to boxes."""
    network = version_converter.convert_version(network, 18)
    network.ir_version = 10
    used = [value.name for value in behind().graph.input if value.name != "ratio"]
    joined = compose.merge_models(before(), network, [("input", "input")], outputs=["ratio", *used])
    return compose.merge_models(joined, behind(), [(name, name) for name in ("ratio", *used)])


def decoded(path: str) -> tuple[np.ndarray, float]:
    """The pixels of a picture, uint8 [height, width, 3], and how much larger it is than they are.

    A decoder of JPEG makes an image of half, a quarter or an eighth of the size in a fraction of the time; it
    gets the smallest that is not smaller than what the network takes.
    """
    with Image.open(path) as image:
        width, height = image.size
        longest = max(image.size)
        image.draft("RGB", (width * SIZE // longest, height * SIZE // longest))
        pixels = np.asarray(image.convert("RGB"))
    return pixels, width / pixels.shape[1]


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
    result = lowbit.convert(whole(network))
    print(f"{len(result.report.converted)} nodes converted, {len(result.report.kept)} kept")
    session = lowbit.session(result)
    stages = [lowbit.session(model) for model in (before(), lowbit.convert(network), behind())]

    pictures, decoding = timed(decoded, photos)
    images = [pixels for pixels, _ in pictures]
    with ThreadPoolExecutor() as pool:
        _, in_threads = timed(decoded, photos, pool.map)
    inputs, resizing = timed(lambda image: stages[0].run(None, {"image": image}), images)
    outputs, running = timed(lambda fed: stages[1].run(None, {"input": fed[0]}), inputs)
    names = [value.name for value in stages[1].get_outputs()]
    taken = {value.name for value in stages[2].get_inputs()}
    feeds = [
        {key: value for key, value in zip([*names, "ratio"], [*out, fed[1]], strict=True) if key in taken}
        for out, fed in zip(outputs, inputs, strict=True)
    ]
    _, choosing = timed(lambda feed: stages[2].run(None, feed), feeds)
    found, together = timed(lambda image: session.run(["boxes", "scores"], {"image": image}), images)

    for photo, (_, larger), (boxes, scores) in zip(photos, pictures, found, strict=True):
        print(f"{photo}: {len(boxes)} faces")
        for box, score in zip(boxes * larger, scores, strict=True):
            print("  " + " ".join(f"{side:7.1f}" for side in box) + f"  {score:.3f}")
    print("milliseconds a picture")
    for what, value in {
        "decode": decoding,
        "decode, in threads": in_threads,
        "resize": resizing,
        "network": running,
        "boxes and NMS": choosing,
        "resize to NMS in one model": together,
    }.items():
        print(f"{what:28} {value:6.2f}")


if __name__ == "__main__":
    main()
