"""Writes the float model with its quantizers: QDQ, and QCDQ where codes have fewer than 8 bits.

What computes a quantized tensor is followed by QuantizeLinear, a Clip on codes that bounds them where the
type has more, and DequantizeLinear, which everybody reads. Weights are codes behind DequantizeLinear. Biases
are int32 on exactly ``f32(x_scale * w_scale)``, which is what makes them part of the integer sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowbit.errors import ModelError
from lowbit.graph.quantization import Grid
from lowbit.quantizer.gram import from_rows
from lowbit.quantizer.sites import Layer, Plan

Array = npt.NDArray[Any]
Ranged = tuple[Grid, int, int]
"""A grid, the smallest and the largest code."""

LARGEST_BIAS = 2**30
"""Bound of a bias in codes: half of int32 is left for the sum that it is added to."""

OPSET_INT4, OPSET_INT2 = (21, 10), (25, 13)
"""The first opset with tensors of that type, and its IR version."""


@dataclass
class LayerCodes:
    """What rounding made of a layer.

    Attributes:
        codes: int8, as the model stores the weights.
        scale: float32 [rows], or [1].
        bias: float32 [rows], before it is rounded to its grid.
    """

    codes: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    def weights(self, layer: Layer) -> Array:
        """The real weights that they stand for."""
        shape = [1] * self.codes.ndim
        shape[weight_axis(layer)] = -1
        return self.codes.astype(np.float32) * self.scale.reshape(shape)


def weight_axis(layer: Layer) -> int:
    """The axis of a layer's weights that has an entry for each output channel."""
    if layer.op_type == "ConvTranspose":
        return 0 if layer.group > 1 else 1
    return 0 if layer.op_type == "Conv" or layer.transposed else 1


def finish_layer(layer: Layer, codes: Array, scale: Array, bias: Array, x: Ranged) -> LayerCodes:
    """Codes [groups, rows, columns] and scales [groups, rows] as a model stores them.

    A bias that int32 cannot hold in units of ``x_scale * w_scale`` asks for a larger scale: the codes shrink.
    """
    x_scale = np.broadcast_to(_per_row(layer, x[0].scale), (layer.rows,)).astype(np.float64)
    rows = scale.reshape(-1).astype(np.float64)
    needed = np.abs(bias) / (x_scale * LARGEST_BIAS)
    needed = np.maximum(needed, 2.0**-100 / np.minimum(x_scale, 1))
    if rows.size == 1 or np.all(rows == rows[0]):
        needed = np.full_like(needed, needed.max())
    if np.any(rows < needed):
        wider = np.maximum(rows, needed)
        codes = np.rint(codes * (rows / wider).reshape(*scale.shape, 1))
        rows = wider
    stored = np.ascontiguousarray(from_rows(layer, codes.astype(np.int8)))
    return LayerCodes(stored, rows.astype(np.float32), np.asarray(bias, np.float32))


def _per_row(layer: Layer, x_scale: Array) -> Array:
    """The scale of the input that each output channel of a layer reads."""
    if x_scale.ndim == 0 or x_scale.size == 1:
        return x_scale.reshape(-1)
    return np.repeat(x_scale, layer.rows // layer.group)


def emit(
    model: onnx.ModelProto,
    plan: Plan,
    grids: Mapping[str, Ranged],
    layers: Mapping[str, LayerCodes],
    *,
    sub_byte: bool = False,
    final: bool = False,
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The quantized model, and the name under which it has each rounded tensor.

    Args:
        model: the cleaned float model.
        plan: where quantizers sit.
        grids: the grid of every site.
        layers: the layers that are rounded; others keep their float weights.
        sub_byte: weights of 3 and 4 bits as int4, of 1 and 2 bits as int2.
        final: whether inputs of raw codes are uint8; until then the float model's feeds fit.
    """
    emitter = _Emitter(model, plan, grids, layers, sub_byte=sub_byte, final=final)
    return emitter.run(), emitter.read


class _Emitter:
    def __init__(
        self,
        model: onnx.ModelProto,
        plan: Plan,
        grids: Mapping[str, Ranged],
        layers: Mapping[str, LayerCodes],
        *,
        sub_byte: bool,
        final: bool,
    ) -> None:
        self.model, self.plan, self.grids, self.layers = model, plan, grids, layers
        self.sub_byte, self.final = sub_byte, final
        self.nodes: list[onnx.NodeProto] = []
        self.made: list[onnx.TensorProto] = []
        self.read: dict[str, str] = {}
        graph = model.graph
        self.used = {t.name for t in graph.initializer} | {v.name for v in graph.input}
        self.used |= {name for node in graph.node for name in node.output}
        self.outputs = {value.name for value in graph.output}

    def run(self) -> onnx.ModelProto:
        """The whole model."""
        graph = self.model.graph
        biases = {layer.bias_node: layer for layer in self.plan.layers.values()}
        for value in graph.input:
            if value.name in self.plan.sites:
                self._quantize(value.name, value.name)
        if self.final:
            for value in graph.input:
                if value.name in self.plan.raw:
                    self._feed_codes(value.name)
        for original in graph.node:
            node = onnx.NodeProto()
            node.CopyFrom(original)
            for i, name in enumerate(original.input):
                node.input[i] = self.read.get(name, name)
            self._rename_captured(node)
            layer = self.plan.layers.get(node.name)
            if layer is not None and node.name in self.layers:
                node.input[1] = self._weights(layer)
            holder = biases.get(node.name)
            if holder is not None and holder.node in self.layers:
                self._set_bias(node, holder)
            self.nodes.append(node)
            for i, name in enumerate(original.output):
                if name in self.plan.sites:
                    source = name
                    if name in self.outputs:  # the caller gets what everybody reads
                        source = self._fresh(f"{name}.float")
                        node.output[i] = source
                    self._quantize(name, source, final=name if name in self.outputs else None)
        return self._model()

    def _rename_captured(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                own = {n for inner in graph.node for n in inner.output} | {v.name for v in graph.input}
                for inner in graph.node:
                    for i, name in enumerate(inner.input):
                        if name not in own:
                            inner.input[i] = self.read.get(name, name)
                    self._rename_captured(inner)

    def _fresh(self, name: str) -> str:
        unique, count = name, 1
        while unique in self.used:
            count += 1
            unique = f"{name}.{count}"
        self.used.add(unique)
        return unique

    def _constant(self, name: str, array: Array, dtype: int | None = None) -> str:
        unique = self._fresh(name)
        if dtype is None:
            self.made.append(numpy_helper.from_array(np.array(array, order="C"), unique))
        else:
            self.made.append(helper.make_tensor(unique, dtype, array.shape, array.reshape(-1)))
        return unique

    def _quantize(self, name: str, source: str, final: str | None = None) -> None:
        grid, low, high = self.grids[name]
        signed = low < 0
        dtype = np.int8 if signed else np.uint8
        scale = self._constant(f"{name}.scale", grid.scale)
        zero = self._constant(f"{name}.zero_point", grid.zero_point.astype(dtype))
        attributes: dict[str, Any] = {} if grid.axis is None else {"axis": grid.axis}
        codes = self._fresh(f"{name}.codes")
        self.nodes.append(
            helper.make_node(
                "QuantizeLinear",
                [source, scale, zero],
                [codes],
                self._fresh(f"{name}.quantize"),
                **attributes,
            )
        )
        if (low, high) != ((-128, 127) if signed else (0, 255)):
            bounds = [self._constant(f"{name}.{what}", np.array(bound, dtype))
                      for what, bound in (("lowest", low), ("highest", high))]  # fmt: skip
            clipped = self._fresh(f"{name}.bounded")
            self.nodes.append(
                helper.make_node("Clip", [codes, *bounds], [clipped], self._fresh(f"{name}.clip"))
            )
            codes = clipped
        real = final or self._fresh(f"{name}.rounded")
        self.nodes.append(
            helper.make_node(
                "DequantizeLinear",
                [codes, scale, zero],
                [real],
                self._fresh(f"{name}.dequantize"),
                **attributes,
            )
        )
        self.read[name] = real

    def _feed_codes(self, name: str) -> None:
        """Takes the quantizer off an input that is fed codes."""
        quantizer = next(i for i, node in enumerate(self.nodes) if node.input[0] == name)
        codes = self.nodes.pop(quantizer).output[0]
        for node in self.nodes:
            for i, given in enumerate(node.input):
                if given == codes:
                    node.input[i] = name

    def _weights(self, layer: Layer) -> str:
        made = self.layers[layer.node]
        dtype = None
        if self.sub_byte and layer.bits <= 4:
            dtype = TensorProto.INT4 if layer.bits > 2 else TensorProto.INT2
        name = f"{layer.node}.weight"
        codes = self._constant(f"{name}.codes", made.codes, dtype)
        scale = made.scale.reshape(()) if made.scale.size == 1 else made.scale
        inputs = [codes, self._constant(f"{name}.scale", scale)]
        zero = np.zeros(scale.shape, np.int8)
        inputs.append(self._constant(f"{name}.zero_point", zero, dtype))
        attributes: dict[str, Any] = {} if scale.ndim == 0 else {"axis": weight_axis(layer)}
        real = self._fresh(f"{name}.rounded")
        self.nodes.append(
            helper.make_node(
                "DequantizeLinear", inputs, [real], self._fresh(f"{name}.dequantize"), **attributes
            )
        )
        return real

    def _set_bias(self, node: onnx.NodeProto, layer: Layer) -> None:
        made = self.layers[layer.node]
        x_scale = _per_row(layer, self.grids[layer.x][0].scale)
        # The grid of the sum, with the one rounding that the numeric contract gives it.
        scale = np.broadcast_to((x_scale * made.scale).astype(np.float32), (layer.rows,))
        codes = np.rint(made.bias.astype(np.float64) / scale)
        if np.abs(codes).max(initial=0) > 2**31 - 1:
            raise ModelError(f"{layer.op_type} '{layer.node}': its bias does not fit int32 on its grid")
        if not np.any(codes) and node.name == layer.node and len(node.input) < 3:
            return
        name = f"{layer.node}.bias"
        real = self._fresh(f"{name}.rounded")
        inputs = [
            self._constant(f"{name}.codes", codes.astype(np.int32)),
            self._constant(f"{name}.scale", np.ascontiguousarray(scale)),
        ]
        self.nodes.append(
            helper.make_node("DequantizeLinear", inputs, [real], self._fresh(f"{name}.dequantize"), axis=0)
        )
        if node.name != layer.node:  # the Add behind a MatMul
            constants = {tensor.name for tensor in self.model.graph.initializer}
            index = next(i for i, given in enumerate(node.input) if given in constants)
            node.input[index] = real
        elif len(node.input) > 2:
            node.input[2] = real
        else:
            node.input.append(real)

    def _model(self) -> onnx.ModelProto:
        source = self.model.graph
        used = {name for node in self.nodes for name in node.input}
        used |= {name for node in self.nodes for a in node.attribute if a.HasField("g")
                 for inner in a.g.node for name in inner.input}  # fmt: skip
        used |= self.outputs
        kept = [tensor for tensor in source.initializer if tensor.name in used]
        inputs = []
        for value in source.input:
            inputs.append(onnx.ValueInfoProto())
            inputs[-1].CopyFrom(value)
            if self.final and value.name in self.plan.raw:
                inputs[-1].type.tensor_type.elem_type = TensorProto.UINT8
        graph = helper.make_graph(
            self.nodes, source.name or "quantized", inputs, source.output, [*kept, *self.made]
        )
        made = helper.make_model(graph, opset_imports=self.model.opset_import, producer_name="lowbit")
        made.ir_version = max(self.model.ir_version, 7)
        made.functions.extend(self.model.functions)
        for entry in self.model.metadata_props:
            made.metadata_props.add(key=entry.key, value=entry.value)
        return made
