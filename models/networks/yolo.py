"""YOLOv8n (2023) and YOLO11 n, s, m (2024): detectors with the boxes decoded, as they are exported."""

from __future__ import annotations

import onnx

from ..graph import GraphBuilder
from ..zoo.detectors import c2f, c2psa, c3k2, distribution_head, sppf
from ..zoo.layers import conv, resize

# What PyTorch's exporter writes by default.
_OPSET = 17
# Keeps what a hundred layers make within float16.
_GAIN = 0.87


def _start(name: str, seed: int, image: int, batch: int | str) -> tuple[GraphBuilder, str]:
    g = GraphBuilder(name, seed, _OPSET, _GAIN)
    return g, g.known("input", [batch if isinstance(batch, int) else 1, 3, image, image])


def _finish(
    g: GraphBuilder, levels: list[str], image: int, batch: int | str, classes: int, light: bool
) -> onnx.ModelProto:
    # The widths follow the finest level, as in the published heads.
    finest = g.shape(levels[0])[1]
    output = distribution_head(
        g,
        levels,
        image,
        classes,
        light,
        box_width=max(64, finest // 4),
        score_width=max(finest, min(classes, 100)),
        batch=-1 if isinstance(batch, str) else batch,
    )
    cells = sum(g.shape(level)[2] ** 2 for level in levels)
    return g.finish(output, (batch, 3, image, image), 4 + classes, cells, name="output0")


def yolov8n(image: int = 640, batch: int | str = 1, classes: int = 80) -> onnx.ModelProto:
    """YOLOv8n: 3.2 M parameters, 4.4 GMAC at 640x640.

    Input `input` float32 [batch, 3, image, image]; output `output0` float32 [batch, 4 + classes, cells]: the
    centre, width and height of a box in pixels, and the probability of each class.
    """
    g, x = _start("yolov8n", 8, image, batch)
    x, routes = conv(g, x, 16, stride=2, act="silu"), []
    for out, blocks in ((32, 1), (64, 2), (128, 2), (256, 1)):
        x = c2f(g, conv(g, x, out, stride=2, act="silu"), out, blocks)
        routes.append(x)
    deep = sppf(g, x)
    middle = c2f(g, g.concat([resize(g, deep), routes[2]]), 128, 1, False)
    levels = [c2f(g, g.concat([resize(g, middle), routes[1]]), 64, 1, False)]
    for lateral, out in ((middle, 128), (deep, 256)):
        down = conv(g, levels[-1], out // 2, stride=2, act="silu")
        levels.append(c2f(g, g.concat([down, lateral]), out, 1, False))
    return _finish(g, levels, image, batch, classes, light=False)


def _yolo11(
    name: str, width: float, most: int, deep: bool, image: int, batch: int | str, classes: int
) -> onnx.ModelProto:
    """Channels are `width` of the table's, of at most `most`; `deep`: C3 in every block, not in some."""
    g, x = _start(name, 11, image, batch)

    def scaled(channels: int) -> int:
        return int(min(channels, most) * width)

    for channels in (64, 128):
        x = conv(g, x, scaled(channels), stride=2, act="silu")
    routes = []
    for down, out, ratio, c3 in ((0, 256, 0.25, deep), (256, 512, 0.25, deep), (512, 512, 0.5, True)):
        x = conv(g, x, scaled(down), stride=2, act="silu") if down else x
        x = c3k2(g, x, scaled(out), ratio, c3)
        routes.append(x)
    x = c3k2(g, conv(g, x, scaled(1024), stride=2, act="silu"), scaled(1024), deep=True)
    last = c2psa(g, sppf(g, x), -1 if isinstance(batch, str) else batch)
    middle = c3k2(g, g.concat([resize(g, last), routes[2]]), scaled(512), deep=deep)
    levels = [c3k2(g, g.concat([resize(g, middle), routes[1]]), scaled(256), deep=deep)]
    for lateral, down, out, c3 in ((middle, 256, 512, deep), (last, 512, 1024, True)):
        x = conv(g, levels[-1], scaled(down), stride=2, act="silu")
        levels.append(c3k2(g, g.concat([x, lateral]), scaled(out), deep=c3))
    return _finish(g, levels, image, batch, classes, light=True)


def yolo11n(image: int = 640, batch: int | str = 1, classes: int = 80) -> onnx.ModelProto:
    """YOLO11n: 2.6 M parameters, 3.3 GMAC at 640x640; input and output as those of `yolov8n`."""
    return _yolo11("yolo11n", 0.25, 1024, False, image, batch, classes)


def yolo11s(image: int = 640, batch: int | str = 1, classes: int = 80) -> onnx.ModelProto:
    """YOLO11s: 9.4 M parameters, 10.8 GMAC at 640x640; input and output as those of `yolov8n`."""
    return _yolo11("yolo11s", 0.5, 1024, False, image, batch, classes)


def yolo11m(image: int = 640, batch: int | str = 1, classes: int = 80) -> onnx.ModelProto:
    """YOLO11m: 20.1 M parameters, 34 GMAC at 640x640; input and output as those of `yolov8n`."""
    return _yolo11("yolo11m", 1.0, 512, True, image, batch, classes)
