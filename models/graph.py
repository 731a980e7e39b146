"""A small builder of float32 ONNX graphs with seeded weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

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
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._count = 0

    def constant(self, value: npt.NDArray[np.generic], prefix: str = "constant") -> str:
        """Adds an initializer."""
        self._count += 1
        name = f"{prefix}_{self._count}"
        self._initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds a node with one output."""
        self._count += 1
        name = f"{op_type.lower()}_{self._count}"
        self._nodes.append(
            helper.make_node(op_type, inputs, [name], name=f"{op_type}_{self._count}", **attributes)
        )
        return name

    def normal(self, shape: Sequence[int], deviation: float) -> FloatArray:
        """Draws float32 values of a normal distribution around 0."""
        return self._random.standard_normal(tuple(shape), dtype=np.float32) * np.float32(deviation)

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
        stride: int = 1,
        pad: int = 0,
        group: int = 1,
    ) -> str:
        """Adds a Conv with given weights [O, I/group, kH, kW] and bias [O]."""
        inputs = [x, self.constant(weight, "weight")]
        if bias is not None:
            inputs.append(self.constant(bias, "bias"))
        return self.node(
            "Conv",
            inputs,
            kernel_shape=list(weight.shape[2:]),
            strides=[stride] * 2,
            pads=[pad] * 4,
            group=group,
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

    def finish(self, output: str, input_shape: Sequence[int | str], classes: int) -> onnx.ModelProto:
        """Names the output `logits` and returns the model, whose input is called `input`."""
        assert self._nodes[-1].output[0] == output, "the last node gives the output"
        self._nodes[-1].output[0] = "logits"
        graph = helper.make_graph(
            self._nodes,
            self.name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, list(input_shape))],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [input_shape[0], classes])],
            self._initializers,
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="lowbit.models",
        )
