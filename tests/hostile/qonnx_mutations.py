"""Broken copies of QONNX models, for a process that may die of them.

Run as `python -m tests.hostile.qonnx_mutations FIRST COUNT`: converts that many mutants, each announced and
answered by one line of JSON. A mutant that converts is run, and compared with what its graph means.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from tests.dialects import qonnx_oracle
from tests.dialects.graphs.builder import Built
from tests.dialects.graphs.qonnx import CASES
from tests.hostile.mutations import RAW, STRUCTURED, Mutation
from tests.support import FLOAT_MATMULS, lowbit_session

SOURCES = [
    "between_batch_norm_relu", "between_chain", "between_norm_max_pool", "between_resize", "bias_32_bits",
    "bipolar_padding", "mlp", "multithreshold_signed", "multithreshold_sign", "nhwc_between_layers",
    "no_opset_import", "opset_9_ir_4", "parameters_folded", "parameters_node", "residual_add",
    "rounding_UP_signed", "trunc_v1", "trunc_v2", "weights_transposed", "zero_point_7",
]  # fmt: skip
_NUMBERS = [0.0, -1.0, 0.5, 1.0, 2.0, 3.0, 9.0, 31.5, 32.0, 1e9, float("nan"), float("inf"), 1e-45, -0.0]


def _pick(rng: np.random.Generator, items):
    return items[int(rng.integers(len(items)))]


def _quantizers(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain in qonnx_oracle.DOMAINS and len(node.input) > 1]


def change_parameter(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Another number, or another shape, for a scale, zero point, bit width or list of thresholds."""
    node = _pick(rng, _quantizers(model))
    index = int(rng.integers(1, len(node.input)))
    shape = _pick(rng, [(), (), (), (1,), (8,), (8, 1, 1), (1, 8, 1, 1), (8, 1, 1, 1), (2, 3), (0,)])
    value = np.full(shape, _pick(rng, _NUMBERS), _pick(rng, [np.float32, np.float32, np.float64, np.int64]))
    name = f"mutated_{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(value, name))
    node.input[index] = name
    return f"input {index} of {node.op_type} = {value.reshape(-1)[:1]} of shape {shape}"


def change_law(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Another operator or attribute for a quantizer."""
    node = _pick(rng, _quantizers(model))
    if rng.random() < 0.4:
        node.op_type = _pick(
            rng, ["Quant", "BipolarQuant", "Trunc", "MultiThreshold", "FloatQuant", "IntQuant"]
        )
        return f"a quantizer became {node.op_type}"
    name, value = _pick(
        rng,
        [("signed", 0), ("signed", 1), ("narrow", 1), ("narrow", 7), ("rounding_mode", "UP"),
         ("rounding_mode", ""), ("rounding_mode", "sideways"), ("data_layout", "NHWC"),
         ("out_bias", -3.0), ("out_scale", 0.0)],
    )  # fmt: skip
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
    return f"{node.op_type}.{name} = {value!r}"


def rewire(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """A node reads another tensor of the graph than it did; cycles arise."""
    node = _pick(rng, [node for node in model.graph.node if node.input])
    source = _pick(rng, [value for other in model.graph.node for value in other.output])
    index = int(rng.integers(len(node.input)))
    node.input[index] = source
    return f"input {index} of {node.op_type} is {source}"


QONNX: list[Mutation] = [change_parameter, change_parameter, change_law, rewire]


def mutant(seed: int) -> tuple[str, bytes, Built]:
    """A broken model, what was done to it, and what it was."""
    rng = np.random.default_rng([seed, 3])
    name = _pick(rng, SOURCES)
    built = CASES[name].build(int(rng.integers(3)))
    model = onnx.ModelProto()
    model.CopyFrom(built.model)
    if rng.random() < 0.15:
        change = _pick(rng, RAW)
        return f"{name}: {change.__name__}", change(model, rng), built
    told = []
    for _ in range(int(rng.integers(1, 3))):
        told.append(_pick(rng, QONNX if rng.random() < 0.7 else STRUCTURED)(model, rng))
    return f"{name}: {'; '.join(told)}", model.SerializeToString(), built


def compare(raw: bytes, converted: onnx.ModelProto, built: Built) -> str:
    """Whether a converted mutant computes what the mutant means, where both can be run."""
    feeds = built.feed(**built.sizes[0])
    try:
        with np.errstate(all="ignore"):
            meant = qonnx_oracle.run(onnx.ModelProto.FromString(raw), feeds)
    except Exception:  # the oracle executes graphs that make sense
        return "converted, not executable"
    if any(node.op_type in FLOAT_MATMULS for node in converted.graph.node):
        return "converted, partly float"
    session = lowbit_session(converted)
    try:
        ours = session.run(None, feeds)
    except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument:  # the mutant declares other inputs
        return "converted, not executable"
    for a, b in zip(ours, meant, strict=True):
        if a.shape != b.shape or not np.array_equal(a, b, equal_nan=True):
            different = "shape" if a.shape != b.shape else f"{int((a != b).sum())} of {a.size} elements"
            return f"CHANGED: {different}"
    return "converted, equal"


def main(first: int, count: int) -> None:
    import lowbit

    for seed in range(first, first + count):
        what, raw, built = mutant(seed)
        print(json.dumps({"seed": seed, "what": what}), flush=True)  # before, so that a crash has a name
        try:
            proto = onnx.ModelProto.FromString(raw)
        except Exception:
            outcome = "refused: no model at all"
        else:
            try:
                outcome = compare(raw, lowbit.convert(proto).model, built)
            except lowbit.LowBitError as error:
                outcome = f"refused: {error}"
            except Exception as error:
                outcome = f"ESCAPED {type(error).__name__}: {error}"
        print(json.dumps({"seed": seed, "outcome": outcome[:500]}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
