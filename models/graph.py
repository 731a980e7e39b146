"""A small builder of float32 ONNX graphs with seeded weights, which knows the shape of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference

FloatArray = npt.NDArray[np.float32]

OPSET = 21
IR_VERSION = 10


class GraphBuilder:
    """Builds a float32 ONNX graph node by node; every method returns the name of its output tensor.

    Weights come from a generator with a fixed seed, drawn in the order of the calls, so that the same calls
    give the same file.

    Args:
        name: Name of the graph; tensors are called `<op>_<number>`.
        seed: Seed of the weights.
        opset: Version of ONNX's operators.
        gain: Factor on everything that is drawn, where a deep network without normalization would grow.
    """

    def __init__(self, name: str, seed: int, opset: int = OPSET, gain: float = 1.0) -> None:
        self.name, self.opset = name, opset
        self._gain = gain
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._count = 0
        # What shape inference knows so far: of the first `_inferred` nodes.
        self._types: dict[str, onnx.TypeProto] = {}
        self._values: dict[str, onnx.TensorProto] = {}
        self._inferred = 0

    def input(
        self,
        shape: Sequence[int],
        name: str = "input",
        dtype: int = TensorProto.FLOAT,
        free: Mapping[int, str] | None = None,
    ) -> str:
        """Adds a graph input; `free` names the dims that the model leaves open, by axis."""
        self.known(name, shape, dtype)
        declared = [(free or {}).get(axis, dim) for axis, dim in enumerate(shape)]
        self._inputs.append(helper.make_tensor_value_info(name, dtype, declared))
        return name

    def known(self, name: str, shape: Sequence[int], dtype: int = TensorProto.FLOAT) -> str:
        """States the type of a tensor, where shape inference would need the values of other tensors."""
        self._types[name] = helper.make_tensor_type_proto(dtype, list(shape))
        return name

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor; free dims have the size that was stated for the input.

        Raises:
            ValueError: If shape inference does not know it.
        """
        self._infer()
        dims = self._types[name].tensor_type.shape.dim if name in self._types else []
        if name not in self._types or not all(dim.HasField("dim_value") for dim in dims):
            raise ValueError(f"{self.name}: the shape of {name} is not known")
        return [dim.dim_value for dim in dims]

    def _infer(self) -> None:
        opset_imports = [helper.make_opsetid("", self.opset)]
        for node in self._nodes[self._inferred :]:
            schema = defs.get_schema(node.op_type, self.opset, node.domain)
            types = {name: self._types[name] for name in node.input if name in self._types}
            values = {name: self._values[name] for name in node.input if name in self._values}
            inferred = shape_inference.infer_node_outputs(
                schema, node, types, values, opset_imports=opset_imports
            )
            for name, found in inferred.items():
                self._types.setdefault(name, found)
        self._inferred = len(self._nodes)

    def constant(self, value: npt.NDArray[np.generic], prefix: str = "constant") -> str:
        """Adds an initializer."""
        self._count += 1
        name = f"{prefix}_{self._count}"
        tensor = numpy_helper.from_array(np.asarray(value), name)
        self._initializers.append(tensor)
        self._values[name] = tensor
        self.known(name, tensor.dims, tensor.data_type)
        return name

    def constant_node(self, value: npt.NDArray[np.generic]) -> str:
        """Adds a Constant node: what exporters write for numbers that are not parameters."""
        tensor = numpy_helper.from_array(np.asarray(value))
        name = self.node("Constant", [], value=tensor)
        self._values[name] = tensor
        return name

    def node(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds a node with one output."""
        return self.nodes(op_type, inputs, 1, **attributes)[0]

    def nodes(self, op_type: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """Adds a node with several outputs."""
        self._count += 1
        name = f"{op_type.lower()}_{self._count}"
        names = [name] if outputs == 1 else [f"{name}_{index}" for index in range(outputs)]
        self._nodes.append(
            helper.make_node(op_type, inputs, names, name=f"{op_type}_{self._count}", **attributes)
        )
        return names

    def normal(self, shape: Sequence[int], deviation: float) -> FloatArray:
        """Draws float32 values of a normal distribution around 0."""
        return self._random.standard_normal(tuple(shape), dtype=np.float32) * np.float32(
            deviation * self._gain
        )

    def conv(
        self,
        x: str,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        pad: int = 0,
        group: int = 1,
        gain: float = 1.0,
        bias: bool = True,
    ) -> str:
        """Adds a Conv with He-initialized weights, deviation `gain * sqrt(2 / fan_in)`, and a small bias.

        The bias stands for the BatchNormalization that training leaves behind a convolution and exporters
        fold.
        """
        fan_in = in_channels // group * kernel * kernel
        weight = self.normal(
            (out_channels, in_channels // group, kernel, kernel), gain * float(np.sqrt(2 / fan_in))
        )
        values = self.normal((out_channels,), 0.02) if bias else None
        return self.conv_with(x, weight, values, stride=stride, pad=pad, group=group)

    def conv_with(
        self,
        x: str,
        weight: FloatArray,
        bias: FloatArray | None,
        *,
        stride: int | Sequence[int] = 1,
        pad: int | Sequence[int] = 0,
        group: int = 1,
        dilation: int = 1,
        op_type: str = "Conv",
        **attributes: Any,
    ) -> str:
        """Adds a Conv with given weights [O, I/group, k...] and bias [O], of as many dims as the weights.

        Args:
            x: The input.
            weight: The weights.
            bias: The bias, if any.
            stride: Of all dims, or one per dim.
            pad: Of all sides, one per dim, or one per side in ONNX's order.
            group: Number of groups.
            dilation: Of all dims.
            op_type: Conv, or ConvTranspose with weights [I, O/group, k...].
            **attributes: Further ones.
        """
        rank = weight.ndim - 2
        inputs = [x, self.constant(weight, "weight")]
        if bias is not None:
            inputs.append(self.constant(bias, "bias"))
        pads = [pad] * rank if isinstance(pad, int) else list(pad)
        if dilation != 1:
            attributes["dilations"] = [dilation] * rank
        return self.node(
            op_type,
            inputs,
            kernel_shape=list(weight.shape[2:]),
            strides=[stride] * rank if isinstance(stride, int) else list(stride),
            pads=pads if len(pads) == 2 * rank else pads * 2,
            group=group,
            **attributes,
        )

    def gemm(self, x: str, in_features: int, out_features: int, *, gain: float = 1.0) -> str:
        """Adds a fully connected layer with weights of deviation `gain * sqrt(1 / in_features)`."""
        weight = self.normal((out_features, in_features), gain * float(np.sqrt(1 / in_features)))
        return self.gemm_with(x, weight, self.normal((out_features,), 0.02))

    def gemm_with(self, x: str, weight: FloatArray, bias: FloatArray) -> str:
        """Adds a Gemm with given weights [O, I] and bias [O]."""
        return self.node("Gemm", [x, self.constant(weight, "weight"), self.constant(bias, "bias")], transB=1)

    def batch_norm(self, x: str, channels: int) -> str:
        """Adds a BatchNormalization with seeded statistics."""
        spread = [self._random.uniform(0.8, 1.2, channels).astype(np.float32) for _ in range(2)]
        shift = [self.normal((channels,), 0.1) for _ in range(2)]
        parameters = {"gamma": spread[0], "beta": shift[0], "mean": shift[1], "variance": spread[1]}
        inputs = [self.constant(value, name) for name, value in parameters.items()]
        return self.node("BatchNormalization", [x, *inputs], epsilon=1e-5)

    def relu(self, x: str) -> str:
        """Adds a Relu."""
        return self.node("Relu", [x])

    def relu6(self, x: str) -> str:
        """Adds a Clip to [0, 6]."""
        bounds = [self.constant(np.array(bound, np.float32), "bound") for bound in (0, 6)]
        return self.node("Clip", [x, *bounds])

    def add(self, a: str, b: str) -> str:
        """Adds an Add."""
        return self.node("Add", [a, b])

    def concat(self, xs: Sequence[str]) -> str:
        """Adds a Concat along the channels."""
        return self.node("Concat", xs, axis=1)

    def max_pool(self, x: str, kernel: int, stride: int, pad: int = 0) -> str:
        """Adds a MaxPool."""
        return self.node("MaxPool", [x], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)

    def average_pool(self, x: str, kernel: int, stride: int) -> str:
        """Adds an AveragePool."""
        return self.node("AveragePool", [x], kernel_shape=[kernel] * 2, strides=[stride] * 2)

    def flatten(self, x: str) -> str:
        """Adds a Flatten to [N, features]."""
        return self.node("Flatten", [x], axis=1)

    def classifier(self, x: str, channels: int, classes: int) -> str:
        """Adds GlobalAveragePool, Flatten and a fully connected layer."""
        return self.gemm(self.flatten(self.node("GlobalAveragePool", [x])), channels, classes)

    def finish(
        self, output: str, input_shape: Sequence[int | str], *dims: int, name: str = "logits"
    ) -> onnx.ModelProto:
        """Names the output and returns the model, whose input is called `input`.

        Args:
            output: What the last node gives.
            input_shape: Of `input`, the batch first.
            *dims: Of the output, behind the batch.
            name: Of the output.
        """
        assert self._nodes[-1].output[0] == output, "the last node gives the output"
        self._nodes[-1].output[0] = name
        return self._model(
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, list(input_shape))],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [input_shape[0], *dims])],
        )

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """Returns the model with the inputs that were added and these outputs, `output` or `output_<n>`.

        Outputs state their element type and rank. Their dims are names where an input has free dims.
        """
        self._infer()
        names = ["output"] if len(outputs) == 1 else [f"output_{index}" for index in range(len(outputs))]
        renamed = dict(zip(outputs, names, strict=True))
        for node in self._nodes:
            for fields in (node.input, node.output):
                fields[:] = [renamed.get(name, name) for name in fields]
        open_dims = any(
            dim.HasField("dim_param") for info in self._inputs for dim in info.type.tensor_type.shape.dim
        )
        infos = []
        for old, new in renamed.items():
            shape: Sequence[int | str] = self.shape(old)
            if open_dims:
                shape = [f"{new}_dim_{axis}" for axis in range(len(shape))]
            infos.append(helper.make_tensor_value_info(new, self._types[old].tensor_type.elem_type, shape))
        return self._model(self._inputs, infos)

    def _model(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, self.name, inputs, outputs, self._initializers)
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=IR_VERSION,
            producer_name="lowbit.models",
        )
