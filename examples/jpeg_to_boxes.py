"""JPEG files in, boxes of faces out: resizing, the quantized detector and NMS in one lowbit model.

python examples/jpeg_to_boxes.py yunet.qdq.onnx photo.jpg other.jpg ...

Pillow decodes on threads of its own; the model takes pixels of any size, uint8 [height, width, 3], so that
everything behind the decoder runs where the session runs. The steps in front of the network and behind it are
ONNX operators, written as text below; another detector needs another text. Prints the boxes, and what each
stage takes when it runs alone beside what the one model takes.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lowbit
import numpy as np
import onnx
from onnx import compose, numpy_helper, parser, version_converter
from PIL import Image

SIZE, STRIDES = 320, (8, 16, 32)
OPSET, IR_VERSION = 18, 10  # the first with Resize that averages what it leaves out

# The longer side becomes SIZE; grey below or beside the picture fills the square. The network wants BGR.
BEFORE = f"""
<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>
before (uint8[height, width, 3] image) => (float[1, 3, {SIZE}, {SIZE}] pixels, float[1] ratio)
<int64[2] zeros = {{0, 0}}, int64[1] first = {{0}}, int64[1] second = {{2}}, float size = {{{SIZE}.0}},
 float grey = {{127.0}}, int64[2] square = {{{SIZE}, {SIZE}}}, int64[2] spatial = {{0, 1}},
 int64[3] bgr = {{2, 1, 0}}>
{{
    sides = Shape <end = 2> (image)
    real_sides = Cast <to = 1> (sides)
    longest = ReduceMax <keepdims = 1> (real_sides)
    ratio = Div (size, longest)
    scales = Concat <axis = 0> (ratio, ratio)
    real = Cast <to = 1> (image)
    resized = Resize <mode = "linear", antialias = 1, axes = [0, 1]> (real, , scales)
    got = Shape <end = 2> (resized)
    missing = Sub (square, got)
    pads = Concat <axis = 0> (zeros, missing)
    padded = Pad (resized, pads, grey, spatial)
    reordered = Gather <axis = 2> (padded, bgr)
    planes = Transpose <perm = [2, 0, 1]> (reordered)
    pixels = Unsqueeze (planes, first)
}}
"""
