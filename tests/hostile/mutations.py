"""Broken copies of quantized models, for a process that may die of them.

Run as `python -m tests.hostile.mutations FIRST COUNT`: converts that many mutants, each announced and
answered by one line of JSON; the exit status tells whether all were survived.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np
import onnx

from tests.dialects.graphs import CASES

Mutation = Callable[[onnx.ModelProto, np.random.Generator], str]

# Small graphs that between them hold most of what the converter knows.
SOURCES = [
    "ort_quantizer.residual_with_downsample",
    "ort_quantizer.gemm",
    "ort_quantizer.conv_transpose",
    "exporters.brevitas_w4a4",
    "exporters.tf2onnx_classifier",
    "exporters.fake_quantize",
    "narrow_types.w_s4_a_u4",
    "constructs.dense_block",
    "constructs.between_resize_nearest",
    "constructs.between_average_pool",
    "constructs.between_channel_slice",
    "constructs.reshaped_detection_head",
    "brevitas.per_channel_through_a_pool",
    "qoperator.mobile_block_to_classes",
    "qoperator.concat_of_branches",
    "qoperator.pools_with_channels_last",
    "qoperator.zero_points_left_out",
    "qoperator.conv_integer",
    "qoperator.where_stays",
]
_INTEGERS = [0, -1, 1, 2, 7, -7, 255, 2**15, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**63)]
_FLOATS = [0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38, -0.0]


def _pick(rng: np.random.Generator, items):
    return items[int(rng.integers(len(items)))]


def flip_bytes(model: onnx.ModelProto, rng: np.random.Generator) -> bytes:
    raw = bytearray(model.SerializeToString())
    for _ in range(int(rng.integers(1, 12))):
        raw[int(rng.integers(len(raw)))] = int(rng.integers(256))
    return bytes(raw)


def cut_out(model: onnx.ModelProto, rng: np.random.Generator) -> bytes:
    raw = model.SerializeToString()
    start = int(rng.integers(len(raw)))
    return raw[:start] + raw[start + int(rng.integers(1, 200)) :]


def change_integer_attribute(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    kinds = (onnx.AttributeProto.INT, onnx.AttributeProto.INTS)
    choices = [(n, a) for n in model.graph.node for a in n.attribute if a.type in kinds]
    if not choices:
        return "nothing to change"
    node, attribute = _pick(rng, choices)
    value = _pick(rng, _INTEGERS)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = value
    elif len(attribute.ints) and rng.random() < 0.7:
        attribute.ints[int(rng.integers(len(attribute.ints)))] = value
    else:
        attribute.ints.append(value)
    return f"{node.op_type}.{attribute.name} = {value}"


def drop_attribute(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    node = _pick(rng, [n for n in model.graph.node if n.attribute] or list(model.graph.node))
    if node.attribute:
        del node.attribute[int(rng.integers(len(node.attribute)))]
    return f"attribute of {node.op_type} dropped"


def drop_input(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    node = _pick(rng, [n for n in model.graph.node if n.input])
    index = int(rng.integers(len(node.input)))
    if rng.random() < 0.5:
        node.input[index] = ""
    else:
        del node.input[index]
    return f"input {index} of {node.op_type} dropped"


def swap_inputs(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    first, second = (_pick(rng, [n for n in model.graph.node if n.input]) for _ in range(2))
    i, j = int(rng.integers(len(first.input))), int(rng.integers(len(second.input)))
    first.input[i], second.input[j] = second.input[j], first.input[i]
    return f"inputs of {first.op_type} and {second.op_type} swapped"


def change_operator(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    node = _pick(rng, list(model.graph.node))
    node.op_type = _pick(
        rng, ["Conv", "Gemm", "Add", "Relu", "QuantizeLinear", "DequantizeLinear", "Concat", "Clip"]
    )
    return f"a node became {node.op_type}"


def change_dims(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    tensor = _pick(rng, list(model.graph.initializer) or [onnx.TensorProto()])
    if len(tensor.dims) and rng.random() < 0.7:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = _pick(rng, _INTEGERS)
    else:
        tensor.dims.append(_pick(rng, _INTEGERS))
    return f"{tensor.name}: dims {list(tensor.dims)}"


def change_type(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    tensor = _pick(rng, list(model.graph.initializer) or [onnx.TensorProto()])
    tensor.data_type = int(rng.integers(0, 30))
    return f"{tensor.name}: type {tensor.data_type}"


def change_values(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    scales = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and t.raw_data]
    if not scales:
        return "nothing to change"
    tensor = _pick(rng, scales)
    values = np.frombuffer(tensor.raw_data, np.float32).copy()
    value = _pick(rng, _FLOATS)
    values[int(rng.integers(len(values)))] = value
    tensor.raw_data = values.tobytes()
    return f"{tensor.name}: {value}"


def shorten_data(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    tensor = _pick(rng, [t for t in model.graph.initializer if t.raw_data] or [onnx.TensorProto()])
    tensor.raw_data = tensor.raw_data[: int(rng.integers(len(tensor.raw_data) + 1))]
    return f"{tensor.name}: {len(tensor.raw_data)} bytes"


def change_input_shape(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    shape = model.graph.input[0].type.tensor_type.shape
    dim = _pick(rng, list(shape.dim))
    dim.dim_value = _pick(rng, _INTEGERS)
    return f"input shape {[d.dim_value for d in shape.dim]}"


def change_opset(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    model.opset_import[0].version = _pick(rng, [0, -1, 1, 9, 12, 18, 24, 2**40])
    return f"opset {model.opset_import[0].version}"


RAW = [flip_bytes, cut_out]
STRUCTURED: list[Mutation] = [
    change_integer_attribute, drop_attribute, drop_input, swap_inputs, change_operator, change_dims,
    change_type, change_values, shorten_data, change_input_shape, change_opset,
]  # fmt: skip


def mutant(seed: int) -> tuple[str, bytes]:
    """A broken model and what was done to it."""
    rng = np.random.default_rng(seed)
    name = _pick(rng, SOURCES)
    model = CASES[name].build(int(rng.integers(3))).model
    if rng.random() < 0.2:
        change = _pick(rng, RAW)
        return f"{name}: {change.__name__}", change(model, rng)
    told = [_pick(rng, STRUCTURED)(model, rng) for _ in range(int(rng.integers(1, 3)))]
    return f"{name}: {'; '.join(told)}", model.SerializeToString()


def main(first: int, count: int) -> None:
    import tempfile
    from pathlib import Path

    import lowbit

    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            what, raw = mutant(seed)
            source, target = Path(folder, f"{seed}.onnx"), Path(folder, f"{seed}_out.onnx")
            source.write_bytes(raw)
            print(json.dumps({"seed": seed, "what": what}), flush=True)  # before, so that a crash has a name
            outcome = "converted"
            try:
                lowbit.convert(source, target)
            except lowbit.LowBitError as error:
                outcome = f"refused: {error}"
            except Exception as error:
                outcome = f"ESCAPED {type(error).__name__}: {error}"
            if target.exists() != (outcome == "converted") or source.read_bytes() != raw:
                outcome = f"LEFT BEHIND after {outcome}"
            left = {p.name for p in Path(folder).iterdir()} - {source.name, target.name}
            if left:
                outcome = f"LEFT BEHIND {left} after {outcome}"
            print(json.dumps({"seed": seed, "outcome": outcome[:500]}), flush=True)
            source.unlink()
            target.unlink(missing_ok=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
