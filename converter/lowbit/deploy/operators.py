"""required_operators.config: what two builds, of ONNX Runtime and of lowbit, may leave out.

The file is ONNX Runtime's own format (`--include_ops_by_config`), one line for each domain and opset:

    domain;opset;Op,Op{"inputs": {"0": ["float"]}},Op

The text in braces is type reduction, which ONNX Runtime reads for ops that it knows and skips for others. So
lowbit's build finds there what kernels the matrix products of the model need:

    ai.lowbit;1;LowBitConv{"forms": ["u8 s8 3x3 stride 1x1 requantize", ...]}

A form says the codes of x and w (u unsigned, s signed, b bipolar, and their bits), the kernel, how it moves,
`depthwise` where it is, and the epilogue, with `residual` where there is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from lowbit.schemas import DOMAIN, signatures

PRODUCTS = ("LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm")
_HEADER = "# Made by `lowbit export --to mobile`: what builds of ONNX Runtime and lowbit need for\n"


def operators_config(models: Sequence[Path], proto: onnx.ModelProto) -> str:
    """The text of required_operators.config for .ort files that were made of one model.

    Args:
        models: the .ort files, in every style: runtime optimizations may or may not be replayed, so that the
            ops of both count.
        proto: the model they were made of.
    """
    with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
        written = Path(folder) / "operators.config"
        with _quiet_logging():
            from onnxruntime.tools.ort_format_model import create_config_from_models

            create_config_from_models(models, written, enable_type_reduction=True)
        lines = [line for line in written.read_text().splitlines() if not line.startswith("#")]
    header = _HEADER + "".join(f"# - {path.name}\n" for path in models)
    forms = forms_of(proto)
    return header + "".join(_with_forms(line, forms) + "\n" for line in lines)


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Keeps ONNX Runtime's tools from setting up the program's logging, and from talking."""
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:], root.manager.disable = handlers, disabled
        root.setLevel(level)


def _with_forms(line: str, forms: dict[str, list[str]]) -> str:
    domain, opset, ops = line.split(";", 2)
    if domain != DOMAIN:
        return line
    entries = [op + (json.dumps({"forms": forms[op]}) if op in forms else "") for op in ops.split(",")]
    return f"{domain};{opset};{','.join(entries)}"


def forms_of(proto: onnx.ModelProto) -> dict[str, list[str]]:
    """The different forms of every matrix product in a model, sorted."""
    forms: dict[str, set[str]] = {}
    for node in _nodes(proto.graph):
        if node.domain == DOMAIN and node.op_type in PRODUCTS:
            forms.setdefault(node.op_type, set()).add(_form(node))
    return {op: sorted(found) for op, found in sorted(forms.items())}


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(inner)


def _form(node: onnx.NodeProto) -> str:
    signature = signatures()[node.op_type]
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    attributes = {**signature.defaults, **given}
    words = [_codes(attributes, "x"), _codes(attributes, "w")]
    kernel, strides = _image_window(attributes)
    words += ["x".join(map(str, kernel)), "stride", "x".join(map(str, strides))]
    group = attributes.get("group", 1)
    if group > 1:
        depthwise = group == attributes["in_channels"] == attributes["out_channels"]
        words.append("depthwise" if depthwise else "grouped")
    words.append(_text(attributes["epilogue"]))
    residual = signature.inputs.index("residual")
    if len(node.input) > residual and node.input[residual]:
        words.append("residual")
    return " ".join(words)


def _image_window(attributes: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Kernel and strides of the convolution over images that runs; a Gemm has none.

    As in the native code, a window of one plane or of one pixel in every plane is a 2-D window.
    """
    kernel: list[int] = list(attributes.get("kernel_shape") or [1])
    strides: list[int] = list(attributes.get("strides") or [1] * len(kernel))
    if len(kernel) < 3:
        return kernel, strides
    pads = attributes.get("pads") or [0] * 6
    if kernel[0] == strides[0] == 1 and not (pads[0] or pads[3]):
        return kernel[1:], strides[1:]
    if kernel[1:] == strides[1:] == [1, 1] and not any(pads[1:3]) and not any(pads[4:]):
        return [kernel[0], 1], [strides[0], 1]
    return kernel, strides


def _codes(attributes: dict[str, Any], operand: str) -> str:
    return f"{_text(attributes[f'{operand}_encoding'])[0]}{attributes[f'{operand}_bits']}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
