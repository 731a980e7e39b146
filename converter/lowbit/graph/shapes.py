"""Shape inference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from lowbit.errors import ModelError
from lowbit.graph.normal_form import is_dequantize, is_quantize
from lowbit.graph.quantizers import is_law


def infer_shapes(model: ir.Model, *, keeps_shape: Callable[[ir.Node], bool] = lambda _: False) -> None:
    """Fills in the shapes and types that follow from the inputs; dynamic dims stay dynamic.

    Where inference fails the model is left without the shapes, and rules say what they miss.

    Args:
        model: the model.
        keeps_shape: tells the nodes of foreign domains whose output is like their first input.

    Raises:
        ModelError: if a node computes another type than the model declares for its output.
    """
    outputs = [value for node in model.graph for value in node.outputs]
    declared = {value: value.dtype for value in outputs if value.dtype is not None}
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level, inputs = logger.level, len(model.graph.inputs)
    logger.setLevel(logging.ERROR)
    try:
        with _posing(model, keeps_shape):
            ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    finally:
        logger.setLevel(level)
        del model.graph.inputs[inputs:]  # a failed pass leaves initializers behind that it lent to the inputs
    for value, dtype in declared.items():
        if value.dtype != dtype:
            raise ModelError(f"'{value.name}' is declared as {dtype}, but its node computes {value.dtype}")


@contextmanager
def _posing(model: ir.Model, keeps_shape: Callable[[ir.Node], bool]) -> Iterator[None]:
    """Lets nodes unknown to ONNX pose as standard ones with the same effect on shapes and types."""
    posing = []
    for node in model.graph.all_nodes():
        if node.domain == "com.microsoft" and (is_quantize(node) or is_dequantize(node)):
            posing.append((node, node.op_type, 3))
        elif is_law(node):
            posing.append((node, "Cast", 1))
        elif keeps_shape(node):
            posing.append((node, "Identity", 1))
    own = [(node, node.domain, node.op_type, tuple(node.inputs)) for node, _, _ in posing]
    for node, op_type, inputs in posing:
        node.domain, node.op_type = "", op_type
        node.resize_inputs(min(inputs, len(node.inputs)))
    try:
        yield
    finally:
        for node, domain, op_type, given in own:
            node.domain, node.op_type = domain, op_type
            node.resize_inputs(len(given))
            for index, value in enumerate(given):
                node.replace_input_with(index, value)
