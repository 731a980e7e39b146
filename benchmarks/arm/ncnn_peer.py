"""ncnn's int8 convolution, one thread: `python ncnn_peer.py LAYER...`, a region for each layer.

A layer is `in_channels,height,width,out_channels,kernel,stride,pad`. As inside an int8 network of ncnn:
8 channels packed together in and out, ReLU, requantized int8 out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import ncnn
import numpy as np
from region import region

PACKING = 8
INT8_REQUANTIZED = 102
"""ncnn's int8_scale_term: per-channel weight scales (2), and int8 output (+ 100)."""
RELU = 1


def options() -> ncnn.Option:
    """Int8 as ncnn ships it, nothing in half precision."""
    option = ncnn.Option()
    option.num_threads = 1
    option.use_packing_layout = option.use_int8_inference = True
    option.use_fp16_packed = option.use_fp16_storage = option.use_fp16_arithmetic = False
    option.use_bf16_storage = False
    return option


def open_net(option: ncnn.Option, layer: list[int], random: np.random.Generator) -> ncnn.Net:
    """A network of one convolution, with weights in -127..127."""
    in_channels, height, width, out_channels, kernel, stride, pad = layer
    weights = random.integers(-127, 128, (out_channels, in_channels, kernel, kernel), np.int8)
    bias = random.uniform(-100, 100, out_channels).astype(np.float32)
    # 1 / scale of weights and input; the output is scaled so that few results saturate.
    weight_scale = np.full(out_channels, 16, np.float32)
    in_scale = np.float32(8)
    deviation = np.sqrt(in_channels * kernel**2) * 73.0**2
    out_scale = np.float32(16 * 8 * 127 / (3 * deviation))
    arguments = {
        0: out_channels,
        1: kernel,
        2: 1,  # dilation
        3: stride,
        4: pad,
        5: 1,  # with bias
        6: weights.size,
        8: INT8_REQUANTIZED,
        9: RELU,
    }
    text = " ".join(f"{key}={value}" for key, value in arguments.items())
    net = ncnn.Net()
    net.opt = option
    with tempfile.TemporaryDirectory() as folder:
        graph, data = Path(folder) / "layer.param", Path(folder) / "layer.bin"
        graph.write_text(
            "7767517\n2 2\n"  # magic, layers, blobs
            f"Input input 0 1 x 0={width} 1={height} 2={in_channels}\n"
            f"Convolution convolution 1 1 x y {text}\n"
        )
        tag_of_int8 = np.uint32(0x000D4B38).tobytes()
        padding = bytes(-weights.size % 4)
        scales = weight_scale.tobytes() + in_scale.tobytes() + out_scale.tobytes()
        data.write_bytes(tag_of_int8 + weights.tobytes() + padding + bias.tobytes() + scales)
        if net.load_param(str(graph)) != 0 or net.load_model(str(data)) != 0:
            raise RuntimeError(f"ncnn does not load {layer}")
    return net


def run(net: ncnn.Net, x: ncnn.Mat) -> ncnn.Mat:
    """The output of a run, its channels packed as the layer left them."""
    as_it_is = 1
    extractor = net.create_extractor()
    extractor.input("x", x)
    status, y = extractor.extract("y", as_it_is)
    if status != 0:
        raise RuntimeError(f"ncnn fails with {status}")
    return y


def main() -> None:
    """Entry point."""
    option = options()
    for index, argument in enumerate(sys.argv[1:]):
        layer = [int(number) for number in argument.split(",")]
        random = np.random.default_rng(1)
        net = open_net(option, layer, random)
        codes = ncnn.Mat(random.integers(-127, 128, (layer[0], layer[1], layer[2]), np.int8))
        x = ncnn.convert_packing(codes, PACKING, option)
        run(net, x)
        with region(index):
            y = run(net, x)
        if y.elempack != PACKING or y.elemsize != PACKING:
            raise RuntimeError(f"ncnn gives no packed int8: elempack {y.elempack}, elemsize {y.elemsize}")
        values = np.array(ncnn.convert_packing(y, 1, option))
        print(json.dumps({"codes_in_output": len(np.unique(values))}), flush=True)


if __name__ == "__main__":
    main()
