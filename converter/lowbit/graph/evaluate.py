"""Running a few nodes of a model in ONNX Runtime, for tables of functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from lowbit.errors import raise_if_out_of_memory
from lowbit.graph.constants import Array
from lowbit.graph.quantization import CODE_TYPES
from lowbit.graph.quantizers import DOMAIN, definition, is_law
from lowbit.graph.reasons import Refusal
from lowbit.library import require_onnxruntime


def evaluate_nodes(
    graph: ir.Graph, nodes: Sequence[ir.Node], source: ir.Value, codes: Array, result: ir.Value
) -> Array | Refusal:
    """What nodes of a graph compute from codes.

    Args:
        graph: their graph; it stays as it is.
        nodes: the nodes in topological order; besides ``source`` they read constants only.
        source: a tensor of codes.
        codes: its value, integers of any type.
        result: the output wanted, codes of at most 8 bits or float32.

    Returns:
        The output as int8, uint8 or float32; a refusal if ONNX Runtime does not run the nodes.
    """
    dtype = source.dtype or ir.DataType.UINT8
    wanted = result.dtype or ir.DataType.UINT8
    real = wanted == ir.DataType.FLOAT
    if dtype not in CODE_TYPES or not (real or wanted in CODE_TYPES):
        return Refusal(f"'{source.name}' is {dtype} and '{result.name}' {wanted}; expected codes of 8 bits")
    byte = ir.DataType.INT8 if CODE_TYPES[dtype][0] < 0 else ir.DataType.UINT8
    out_type = wanted if real else ir.DataType.INT8 if CODE_TYPES[wanted][0] < 0 else ir.DataType.UINT8
    # numpy has no type below a byte, so the codes come and go as bytes.
    before = onnx.helper.make_node("Cast", ["lowbit.codes"], [str(source.name)], to=int(dtype))
    after = onnx.helper.make_node("Cast", [str(result.name)], ["lowbit.result"], to=int(out_type))
    body = onnx.helper.make_graph(
        [before, *(ir.to_proto(node) for node in nodes), after],
        "function",
        [onnx.helper.make_tensor_value_info("lowbit.codes", int(byte), codes.shape)],
        [onnx.helper.make_tensor_value_info("lowbit.result", int(out_type), None)],
        constants_of(nodes),
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in graph.opset_imports.items()]
    laws = sorted({node.op_type for node in nodes if is_law(node)})
    model = onnx.helper.make_model(
        body,
        opset_imports=[*opsets, *([onnx.helper.make_opsetid(DOMAIN, 1)] if laws else [])],
        functions=[definition(law, graph.opset_imports.get("", 13)) for law in laws],
        ir_version=13,
    )
    fed = codes.astype(np.int8 if byte == ir.DataType.INT8 else np.uint8)
    results = run_unoptimized(model, {"lowbit.codes": fed})
    return results if isinstance(results, Refusal) else results[0]


def constants_of(nodes: Sequence[ir.Node]) -> list[onnx.TensorProto]:
    """The constants that nodes read, under the names by which they read them."""
    values = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    tensors = []
    for value in values:
        if value.const_value is not None:
            tensor = ir.to_proto(value.const_value)
            tensor.name = str(value.name)  # the tensor of a lifted or folded constant may have another
            tensors.append(tensor)
    return tensors


def run_unoptimized(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array] | Refusal:
    """All outputs of a small model, as ONNX Runtime follows its graph; a refusal if it does not run it."""
    onnxruntime = require_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results: list[Array] = session.run(None, dict(feeds))
    except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
        raise_if_out_of_memory(error)
        return Refusal(f"ONNX Runtime does not run it: {str(error).splitlines()[0]}")
    return results
