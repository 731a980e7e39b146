"""Preprocessing as the first node of a converted model: pictures of any size in, codes out, on its device.

Behind the resizing a pixel is a byte, so that all that follows, to the codes of the input's quantizer, is
one table for each channel. It is filled by the very steps that the commands take when they prepare an
image, and by the definition of the quantizer's node: the network is fed the same codes either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lowbit.errors import LowBitError, ModelError
from lowbit.graph.constants import Array
from lowbit.proto.feeds import model_inputs
from lowbit.proto.preprocess import Spec, Steps, dims_of, element_type, spec_for
from lowbit.proto.report import Report
from lowbit.proto.user_function import is_function
from lowbit.schemas import DOMAIN, VERSION, attributes_of

_SPATIAL = {"nchw": (2, 3), "nhwc": (1, 2)}


def take_pictures(proto: onnx.ModelProto, text: str, report: Report) -> None:
    """Makes a converted model take pictures, uint8 [N, H, W, 3] of any size, in place.

    Args:
        proto: a converted model whose one input goes into a quantizer that is a lowbit node.
        text: what is done with a picture, as ``--preprocess`` takes it.
        report: gets a warning that tells the new input.

    Raises:
        LowBitError: if the text is no spec, or does not fit the input.
        ModelError: if something else reads the input.
    """
    if is_function(text):
        raise LowBitError(
            f"--preprocess {text}: a function cannot become a node of the model; give a spec, such as "
            "imagenet"
        )
    inputs = model_inputs(proto)
    spec = spec_for(text, inputs)
    ((name, value),) = inputs.items()
    _check_size(spec, name, dims_of(value))
    readers = [node for node in proto.graph.node if name in _reads(node)]
    dtype = element_type(value)
    for node in readers:
        if not _makes_codes(node, spec, dtype):
            raise ModelError(
                f"--preprocess: expected that a quantizer of codes, channels last, reads the image input "
                f"'{name}', found {node.op_type} '{node.name}'; quantize the input (lowbit quantize, or "
                "--input-quant), or feed images that are prepared"
            )
    if not readers or any(output.name == name for output in proto.graph.output):
        raise ModelError(f"--preprocess: expected that quantizers alone read the image input '{name}'")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    given = {key for node in readers for key in node.input}
    for node in readers:
        _replace(proto.graph, node, spec, dtype, constants)
    if all(entry.domain != DOMAIN for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    _drop_unread(proto.graph, given)
    _restate(next(each for each in proto.graph.input if each.name == name), spec)
    channels = "1 or 3" if spec.order == "gray" else "3"
    report.warn(
        f"input '{name}' takes pictures, uint8 [N, height, width, {channels}] of any size, which the model "
        f"prepares itself (--preprocess {text})"
    )


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """All that a node reads, in its subgraphs too."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _reads(inner)


def _makes_codes(node: onnx.NodeProto, spec: Spec, dtype: np.dtype[Any]) -> bool:
    """Whether a node makes codes, channels last, of the input: it rounds floats, or moves codes."""
    moves = spec.layout == "nchw"
    if dtype in (np.uint8, np.int8):
        perm = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"]
        return moves and (node.domain, node.op_type) == ("", "Transpose") and perm == [[0, 2, 3, 1]]
    if (node.domain, node.op_type) != (DOMAIN, "LowBitQuantize"):
        return False
    return bool(attributes_of(node).get("to_channels_last", 0)) == moves


def _check_size(spec: Spec, name: str, dims: Sequence[int | None] | None) -> None:
    """Requires that the spec makes what the model takes, and that its crop fits."""
    made = spec.crop or spec.letterbox or (spec.resize if isinstance(spec.resize, tuple) else None)
    wanted = None if dims is None else [dims[axis] for axis in _SPATIAL[spec.layout or "nchw"]]
    if wanted is not None and not all(
        want in (None, found) for want, found in zip(wanted, made or (-1, -1), strict=True)
    ):
        sizes = "images of many sizes" if made is None else f"images of {made[0]}x{made[1]}"
        raise LowBitError(
            f"--preprocess: makes {sizes}, input '{name}' takes {wanted[0]}x{wanted[1]}; add crop= or "
            "letterbox=, or resize=HEIGHTxWIDTH"
        )
    if spec.crop is None or spec.resize is None:
        return
    # Of a picture whose shorter side is given, a crop may fit some and not others.
    resized = spec.resize if isinstance(spec.resize, tuple) else (spec.resize, max(spec.crop))
    crop = spec.crop if isinstance(spec.resize, tuple) else sorted(spec.crop)
    if any(side > most for side, most in zip(crop, resized, strict=True)):
        raise LowBitError("--preprocess: crop= is larger than what resize= makes")


def _replace(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    spec: Spec,
    dtype: np.dtype[Any],
    constants: dict[str, Array],
) -> None:
    """A LowBitImage in place of a node that makes codes of the input."""
    codes = _codes(node, spec, dtype, constants)
    rows = np.ascontiguousarray(codes.T).view(np.uint8)
    name = f"{node.output[0]}.table"
    table = numpy_helper.from_array(rows[0] if (rows == rows[0]).all() else rows, name)
    graph.initializer.append(table)
    resize = [spec.resize] if isinstance(spec.resize, int) else spec.resize
    given: dict[str, Any] = {
        "resize": resize, "letterbox": spec.letterbox, "crop": spec.crop,
        "interpolation": spec.interpolation, "order": spec.order,
        "y_encoding": "signed" if codes.dtype == np.int8 else "unsigned",
    }  # fmt: skip
    if spec.letterbox is not None:
        given |= {"fill": spec.fill, "centered": int(spec.place == "center")}
    node.op_type, node.domain = "LowBitImage", DOMAIN
    del node.input[1:], node.attribute[:]
    node.input.append(table.name)
    node.attribute.extend(
        helper.make_attribute(key, value) for key, value in given.items() if value is not None
    )


def _codes(node: onnx.NodeProto, spec: Spec, dtype: np.dtype[Any], constants: dict[str, Array]) -> Array:
    """The codes of each of the 256 values of a pixel, [256, channels]."""
    from lowbit import ops

    ramp = np.arange(256, dtype=np.uint8)[None]
    picture = ramp if spec.order == "gray" else np.repeat(ramp[..., None], 3, axis=2)
    plain = replace(spec, resize=None, letterbox=None, crop=None, layout="nhwc")
    values: Array = Steps(plain, "", dtype)(picture, "--preprocess: a pixel")[""]
    if node.op_type == "LowBitQuantize":
        quantizer = [values[None], *(constants[name] for name in node.input[1:])]
        attributes = attributes_of(node) | {"to_channels_last": 0}
        values = ops.evaluate("LowBitQuantize", attributes, quantizer)[0]
    codes: Array = values[0]
    return codes


def _drop_unread(graph: onnx.GraphProto, names: set[str]) -> None:
    """Drops those of some constants that nobody reads any more."""
    names = names - {name for node in graph.node for name in _reads(node)}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in names]:
        graph.initializer.remove(tensor)


def _restate(value: onnx.ValueInfoProto, spec: Spec) -> None:
    tensor = value.type.tensor_type
    batch = onnx.TensorShapeProto.Dimension(dim_param=f"{value.name}_batch")
    if tensor.HasField("shape"):
        batch.CopyFrom(tensor.shape.dim[0])
    tensor.elem_type = onnx.TensorProto.UINT8
    tensor.ClearField("shape")
    tensor.shape.dim.append(batch)
    for side in ("height", "width"):
        tensor.shape.dim.add().dim_param = f"{value.name}_{side}"
    channels = tensor.shape.dim.add()
    if spec.order == "gray":
        channels.dim_param = f"{value.name}_channels"
    else:
        channels.dim_value = 3
