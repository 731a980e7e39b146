"""QDQ graphs in the operator form: DequantizeLinear, an operator and QuantizeLinear as one node."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_BYTES = (TensorProto.UINT8, TensorProto.INT8)
_UNARY = ("Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool")


class _Fuser:
    def __init__(self, model: onnx.ModelProto):
        self.graph = model.graph
        self.producer = {name: node for node in self.graph.node for name in node.output}
        self.tensors = {tensor.name: tensor for tensor in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type == "Constant":
                self.tensors[node.output[0]] = node.attribute[0].t
        names = [name for node in self.graph.node for name in node.input]
        names += [value.name for value in self.graph.output]
        self.readers = {name: names.count(name) for name in names}

    def run(self) -> int:
        """Replaces the nodes of the graph; returns how many operators it wrote."""
        written, gone = {}, set()
        for node in self.graph.node:
            core = self.producer.get(node.input[0]) if node.op_type == "QuantizeLinear" else None
            if core is None or self.readers.get(core.output[0]) != 1 or not self._is_byte(node):
                continue
            fused = self._fuse(core, node)
            if fused is not None:
                written[node.output[0]] = fused
                gone |= {node.output[0], core.output[0]}
        nodes = []
        for node in self.graph.node:
            if node.output[0] in written:
                nodes.append(written[node.output[0]])
            elif node.output[0] not in gone:
                nodes.append(node)
        needed = {value.name for value in self.graph.output}
        kept = []
        for node in reversed(nodes):
            if needed.intersection(node.output):
                kept.insert(0, node)
                needed.update(node.input)
        del self.graph.node[:]
        self.graph.node.extend(kept)
        return sum(node.output[0] in written for node in kept)

    def _is_byte(self, node: onnx.NodeProto) -> bool:
        zero = self.tensors.get(node.input[2]) if len(node.input) > 2 else None
        scale = self.tensors.get(node.input[1])
        simple = zero is not None and scale is not None and zero.data_type in _BYTES
        return simple and node.domain == "" and not any(a.name == "output_dtype" for a in node.attribute)

    def _operand(self, name: str, *, channels: int | None = None) -> list[str] | None:
        """Codes, scale, zero point; one of each, or `channels` of each."""
        node = self.producer.get(name)
        if node is None or node.op_type != "DequantizeLinear" or not self._is_byte(node):
            return None
        sizes = {int(np.prod(self.tensors[parameter].dims)) for parameter in node.input[1:3]}
        return list(node.input) if sizes <= {1, channels or 1} and len(sizes) == 1 else None

    def _bias(self, core: onnx.NodeProto, x: list[str], w: list[str]) -> list[str] | None:
        """The int32 bias on the accumulator's grid; an empty list if there is none."""
        if len(core.input) < 3:
            return []
        node = self.producer.get(core.input[2])
        codes = None if node is None or not node.input else self.tensors.get(node.input[0])
        if codes is None or codes.data_type != TensorProto.INT32:
            return None
        given, x_scale, w_scale = (
            numpy_helper.to_array(self.tensors[name]) for name in (node.input[1], x[1], w[1])
        )
        grid = x_scale * w_scale
        exact = given.size in (1, grid.size) and np.array_equal(np.broadcast_to(given, grid.shape), grid)
        return [node.input[0]] if exact else None

    def _fuse(self, core: onnx.NodeProto, quantize: onnx.NodeProto) -> onnx.NodeProto | None:
        y = list(quantize.input[1:3])
        attributes = {a.name: helper.get_attribute_value(a) for a in core.attribute}
        if core.op_type in ("Conv", "Gemm"):
            return self._product(core, quantize, y, attributes)
        if core.op_type not in (*_UNARY, "Add", "Mul", "Concat"):
            return None
        operands = [self._operand(name) for name in core.input]
        if None in operands:
            return None
        flat = [name for operand in operands for name in operand]
        # One type for all of them, as these operators want it.
        kinds = {self.tensors[name].data_type for name in (*flat[2::3], y[1])}
        if len(kinds) != 1:
            return None
        inputs = [*y, *flat] if core.op_type == "Concat" else [*flat, *y]
        if core.op_type == "GlobalAveragePool":
            attributes["channels_last"] = 0
        return self._node(f"QLinear{core.op_type}", inputs, quantize, core, attributes, "com.microsoft")

    def _product(self, core, quantize, y, attributes) -> onnx.NodeProto | None:
        weights = self.producer.get(core.input[1])
        codes = None if weights is None or not weights.input else self.tensors.get(weights.input[0])
        gemm = core.op_type == "Gemm"
        axis = 0 if not gemm or attributes.get("transB", 0) else 1
        if codes is None or attributes.get("transA", 0) or attributes.get("beta", 1.0) != 1.0:
            return None
        given = next((a.i for a in weights.attribute if a.name == "axis"), 1)
        x, w = self._operand(core.input[0]), self._operand(core.input[1], channels=codes.dims[axis])
        if x is None or w is None or (given != axis and np.prod(self.tensors[w[1]].dims) > 1):
            return None
        bias = self._bias(core, x, w)
        if bias is None:
            return None
        attributes.pop("beta", None)
        if gemm and attributes.get("alpha", 1.0) != 1.0:
            return None
        inputs = [*x, *w, bias[0] if bias else "", *y] if gemm else [*x, *w, *y, *bias]
        return self._node("QGemm" if gemm else "QLinearConv", inputs, quantize, core, attributes,
                          "com.microsoft" if gemm else "")  # fmt: skip

    @staticmethod
    def _node(op_type, inputs, quantize, core, attributes, domain) -> onnx.NodeProto:
        return helper.make_node(
            op_type, inputs, list(quantize.output), name=core.name, domain=domain, **attributes
        )


def as_qoperators(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """The model in the operator form, as far as that goes, and how many operators that gave."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    count = _Fuser(copy).run()
    if not any(entry.domain == "com.microsoft" for entry in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    del copy.graph.value_info[:]
    return copy, count
