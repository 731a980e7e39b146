"""Shape inference."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from lowbit.errors import ModelError
from lowbit.graph.normal_form import is_dequantize, is_quantize


def infer_shapes(model: ir.Model) -> None:
    """Fills in the shapes and types that follow from the inputs; dynamic dims stay dynamic.

    ONNX knows nothing of ONNX Runtime's own QuantizeLinear and DequantizeLinear, so they pose as the standard
    ones meanwhile. Where inference fails the model is left without the shapes, and rules say what they miss.

    Raises:
        ModelError: if a node computes another type than the model declares for its output.
    """
    outputs = [value for node in model.graph for value in node.outputs]
    declared = {value: value.dtype for value in outputs if value.dtype is not None}
    renamed = [
        node
        for node in model.graph.all_nodes()
        if node.domain == "com.microsoft" and (is_quantize(node) or is_dequantize(node))
    ]
    for node in renamed:
        node.domain = ""
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level, inputs = logger.level, len(model.graph.inputs)
    logger.setLevel(logging.ERROR)
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    finally:
        logger.setLevel(level)
        del model.graph.inputs[inputs:]  # a failed pass leaves initializers behind that it lent to the inputs
        for node in renamed:
            node.domain = "com.microsoft"
    for value, dtype in declared.items():
        if value.dtype != dtype:
            raise ModelError(f"'{value.name}' is declared as {dtype}, but its node computes {value.dtype}")
