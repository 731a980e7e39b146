"""Preprocessing inside the model: what ``--preprocess`` computes becomes nodes, raw pixels are fed."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lowbit.errors import LowBitError
from lowbit.proto.feeds import model_inputs
from lowbit.proto.preprocess import rest_of, spec_for
from lowbit.proto.user_function import is_function


def embed(model: onnx.ModelProto, preprocess: str) -> tuple[onnx.ModelProto, str]:
    """A model that does the arithmetic of a preprocessing itself, and the spec of what is left of it.

    Args:
        model: a float model with one image input.
        preprocess: a spec, see :func:`lowbit.proto.preprocess.parse_spec`.

    Returns:
        The model, whose input takes whole numbers from 0 to 255 in its own layout, and the spec that makes
        them: size, crop, layout and order. ``(x * scale - mean) / std`` is computed in the spec's order, so
        the outputs are the same.

    Raises:
        LowBitError: for a function instead of a spec, or a model with several inputs.
    """
    if is_function(preprocess):
        raise LowBitError(
            f"--io uint8 with --preprocess {preprocess}: a function cannot become part of the model; give a "
            "spec, or put its arithmetic into the model"
        )
    spec = spec_for(preprocess, model_inputs(model))
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    (name,) = model_inputs(model)
    used = {tensor.name for tensor in graph.initializer}
    used |= {each for node in graph.node for each in (*node.input, *node.output, node.name)}
    last, nodes = name, []
    shape = (-1, 1, 1) if spec.layout == "nchw" else (-1,)
    steps = (("Mul", (spec.scale,), 1.0), ("Sub", spec.mean, 0.0), ("Div", spec.std, 1.0))
    for op, numbers, neutral in steps:
        if all(number == neutral for number in numbers):
            continue
        constant, output = (_fresh(f"{name}.{op.lower()}{what}", used) for what in (".by", ""))
        values = np.asarray(numbers, np.float32).reshape(shape if len(numbers) > 1 else ())
        graph.initializer.append(numpy_helper.from_array(values, constant))
        nodes.append(helper.make_node(op, [last, constant], [output], _fresh(f"{name}.{op}", used)))
        last = output
    for node in graph.node:
        for i, given in enumerate(node.input):
            if given == name:
                node.input[i] = last
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])
    return made, rest_of(spec)


def _fresh(name: str, used: set[str]) -> str:
    while name in used:
        name += "_"
    used.add(name)
    return name
