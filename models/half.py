"""Models that compute in float16 around their quantizers, as NVIDIA's tools write them."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_HALF, _FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def in_half(model: onnx.ModelProto, *, ends: bool) -> onnx.ModelProto:
    """A quantized float32 model as NVIDIA ModelOpt makes it float16 (``high_precision_dtype="fp16"``).

    Args:
        model: With nodes of ONNX alone.
        ends: Whether inputs and outputs are float16, too; otherwise Casts stand behind and in front of them.

    Returns:
        A copy. Scales are float16, which opset 19 has.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph = model.graph
    for entry in model.opset_import:  # float16 scales
        if entry.domain in ("", "ai.onnx"):
            entry.version = max(entry.version, 19)
    model.ir_version = max(model.ir_version, 9)
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    for tensor in (*graph.initializer, *(a.t for a in attributes if a.HasField("t"))):
        if tensor.data_type == _FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    del graph.value_info[:]
    values = {v.name: v for v in (*graph.input, *graph.output) if v.type.tensor_type.elem_type == _FLOAT}
    if ends:
        for value in values.values():
            value.type.tensor_type.elem_type = _HALF
        return model
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}_half" if name in values else name for name in names]
    inside = list(graph.node)
    del graph.node[:]
    for value in graph.input:
        if value.name in values:
            graph.node.append(helper.make_node("Cast", [value.name], [f"{value.name}_half"], to=_HALF))
    graph.node.extend(inside)
    for value in graph.output:
        if value.name in values:
            graph.node.append(helper.make_node("Cast", [f"{value.name}_half"], [value.name], to=_FLOAT))
    return model
