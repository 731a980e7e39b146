"""What a QDQ or QCDQ model says, read for training: its steps, grids and layers, each with its float weights.

Names are the bond between the two models: ``lowbit quantize`` keeps those of the cleaned float model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from lowbit.errors import LowBitError
from lowbit.graph.normal_form import CODE_MOVERS

Array = npt.NDArray[Any]

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_BYTES = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.INT2)


@dataclass
class Grid:
    """One scale, or one per channel, that one or more quantizers have.

    Attributes:
        scale: float32, a scalar or [channels].
        zero: zero points, as float32 of the same shape.
        axis: of the channels.
        low: the smallest code.
        high: the largest one.
        initializers: the scales in the file; all get the same values.
        fed: whether the caller feeds the codes, so that the scale is not the model's to choose.
    """

    scale: Array
    zero: Array
    axis: int | None
    low: int
    high: int
    initializers: set[str]
    fed: bool = False


@dataclass
class Layer:
    """A convolution or matrix product on codes.

    Attributes:
        node: its name.
        op_type: its operator.
        weight: the name under which it reads its weights.
        bias: the name under which its bias is read; empty where it has none.
        codes: float32, as the model stores the weights.
        low: the smallest code.
        high: the largest one.
        scale: float32, a scalar or [rows].
        axis: of the weights' rows.
        bias_codes: int32 [rows].
        x: the rounded tensor that it reads.
        files: initializers of codes, scale, bias and the bias's scale; empty for what is not there.
        float_weight: of the float model.
        float_bias: of the float model.
    """

    node: str
    op_type: str
    weight: str
    bias: str
    codes: Array
    low: int
    high: int
    scale: Array
    axis: int
    bias_codes: Array
    x: str
    files: dict[str, str]
    float_weight: Array
    float_bias: Array

    @property
    def bits(self) -> int:
        """Of the weights: what their codes need."""
        return int(self.high + 1).bit_length()


@dataclass(frozen=True)
class Step:
    """One computation: a node, or a quantizer with all its nodes.

    Attributes:
        op_type: the operator; ``quantize`` for a quantizer.
        name: the node's.
        inputs: names, empty where an optional one is left out.
        outputs: names.
        attributes: of the node.
        grid: index of a quantizer's grid.
    """

    op_type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    grid: int = -1


@dataclass
class Network:
    """The part of a quantized model that ends in its layers.

    Attributes:
        model: the quantized model.
        steps: in order; every layer is among them, and all that leads to one.
        grids: of activations.
        layers: by the name of their weights.
        constants: other initializers that steps read.
        inputs: graph inputs that steps read.
        targets: what the part computes for the rest of the model.
        batch: the first dim that the model's inputs state; 0 where it is open.
    """

    model: onnx.ModelProto
    steps: list[Step]
    grids: list[Grid]
    layers: dict[str, Layer]
    constants: dict[str, Array]
    inputs: list[str]
    targets: list[str]
    batch: int

    def blocks(self) -> list[Block]:
        """The steps in parts that are trained one after the other, see :func:`_cut`."""
        return _cut(self)


@dataclass(frozen=True)
class Block:
    """Steps that follow each other.

    Attributes:
        steps: the steps.
        inputs: what they read of what others computed.
        outputs: what others read of theirs.
        layers: the layers among them, by the name of their weights.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[str, ...]


def read_network(model: onnx.ModelProto, exact: onnx.ModelProto) -> Network:
    """Reads a quantized model beside the cleaned float model that it was made from.

    Raises:
        LowBitError: if the one has no quantized layers, or the other does not match.
    """
    return _Reader(model, exact).run()


class _Reader:
    def __init__(self, model: onnx.ModelProto, exact: onnx.ModelProto) -> None:
        self.model = model
        self.tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output if name}
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self.exact = {node.name: node for node in exact.graph.node}
        self.exact_tensors = {tensor.name: tensor for tensor in exact.graph.initializer}
        self.grids: list[Grid] = []
        self.steps: list[Step] = []
        self.layers: dict[str, Layer] = {}
        self.places: dict[str, int] = {}  # rounded tensor -> its grid
        self.biases: set[str] = set()

    def run(self) -> Network:
        """All of it."""
        needed = self._needed()
        inputs = [v for v in self.model.graph.input if v.name not in self.tensors]
        for node in self.model.graph.node:
            if id(node) in needed:
                self._add(node)
        self._tie()
        self._check_unshared()
        made = {name for step in self.steps for name in step.outputs}
        read = {name for step in self.steps for name in step.inputs}
        constants = {
            name: numpy_helper.to_array(self.tensors[name]) for name in sorted(read & self.tensors.keys())
        }
        outside = {
            name for node in self.model.graph.node if id(node) not in needed for name in node.input
        } | {value.name for value in self.model.graph.output}
        targets = [name for step in self.steps for name in step.outputs if name in outside]
        known = made | self.layers.keys() | self.biases | self.tensors.keys() | {v.name for v in inputs}
        for step in self.steps:
            if missing := [name for name in step.inputs if name and name not in known]:
                raise LowBitError(
                    f"{step.op_type} '{step.name}' reads '{missing[0]}', which nothing computes"
                )
        sizes = {v.type.tensor_type.shape.dim[0].dim_value for v in inputs if v.type.tensor_type.shape.dim}
        return Network(
            self.model, self.steps, self.grids, self.layers, constants,
            [v.name for v in inputs if v.name in read], targets, sizes.pop() if len(sizes) == 1 else 0,
        )  # fmt: skip

    def _needed(self) -> set[int]:
        """The nodes that lead to a layer, or are one."""
        waiting = [node for node in self.model.graph.node if self._is_layer(node)]
        if not waiting:
            raise LowBitError(
                "the model to fine-tune has no layer whose weights are codes behind DequantizeLinear: "
                "expected the QDQ or QCDQ model that `lowbit quantize` wrote"
            )
        waiting += [
            add for node in waiting if node.op_type == "MatMul" and (add := self._bias_add(node)) is not None
        ]
        found: set[int] = set()
        while waiting:
            node = waiting.pop()
            if id(node) in found:
                continue
            found.add(id(node))
            waiting += [self.makers[name] for name in node.input if name in self.makers]
        return found

    def _is_layer(self, node: onnx.NodeProto) -> bool:
        return node.op_type in LAYERS and len(node.input) > 1 and self._is_weight(node.input[1])

    def _is_weight(self, name: str) -> bool:
        node = self.makers.get(name)
        if node is None or node.op_type != "DequantizeLinear":
            return False
        tensor = self.tensors.get(node.input[0])
        return tensor is not None and tensor.data_type in _BYTES

    def _is_bias(self, name: str) -> bool:
        node = self.makers.get(name)
        if node is None or node.op_type != "DequantizeLinear":
            return False
        tensor = self.tensors.get(node.input[0])
        return tensor is not None and tensor.data_type == TensorProto.INT32

    def _bias_add(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The Add of a MatMul's int32 bias."""
        users = self.users.get(node.output[0], [])
        if len(users) != 1 or users[0].op_type != "Add":
            return None
        return users[0] if any(self._is_bias(name) for name in users[0].input) else None

    def _add(self, node: onnx.NodeProto) -> None:
        if node.op_type == "QuantizeLinear":
            return  # told by its DequantizeLinear
        if node.op_type == "Clip" and self._quantizer(node.output[0]) is not None:
            return
        if node.op_type == "DequantizeLinear":
            if not self._is_weight(node.output[0]) and not self._is_bias(node.output[0]):
                self._add_quantizer(node)
            return
        if self._is_layer(node):
            self._add_layer(node)
        twin = self.exact.get(node.name)
        if twin is None or twin.op_type != node.op_type:
            raise LowBitError(
                f"the float model does not match: it has no {node.op_type} '{node.name}'; expected the model "
                "that `lowbit quantize` was given"
            )
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self.steps.append(Step(node.op_type, node.name, tuple(node.input), tuple(node.output), attributes))

    def _quantizer(self, codes: str) -> tuple[onnx.NodeProto, int, int] | None:
        """The QuantizeLinear behind codes, and their bounds."""
        node = self.makers.get(codes)
        low, high = -(2**31), 2**31
        while node is not None and node.op_type == "Clip":
            bounds = [self.tensors.get(name) for name in node.input[1:3]]
            if len(bounds) == 2 and bounds[0] is not None and bounds[1] is not None:
                low = max(low, int(numpy_helper.to_array(bounds[0])))
                high = min(high, int(numpy_helper.to_array(bounds[1])))
            node = self.makers.get(node.input[0])
        if node is None or node.op_type != "QuantizeLinear":
            return None
        zero = self.tensors.get(node.input[2]) if len(node.input) > 2 else None
        signed = zero is not None and zero.data_type == TensorProto.INT8
        return node, max(low, -128 if signed else 0), min(high, 127 if signed else 255)

    def _add_quantizer(self, node: onnx.NodeProto) -> None:
        found = self._quantizer(node.input[0])
        codes_fed = node.input[0] not in self.makers
        if found is None and not codes_fed:
            raise LowBitError(
                f"DequantizeLinear '{node.name}': its codes are not made by QuantizeLinear; expected the QDQ "
                "or QCDQ model that `lowbit quantize` wrote"
            )
        source, low, high = (found[0].input[0], *found[1:]) if found else (node.input[0], 0, 255)
        names = {node.input[1], *([found[0].input[1]] if found else [])}
        if any(name not in self.tensors for name in names):
            raise LowBitError(f"DequantizeLinear '{node.name}': its scale is computed at run time")
        scale = np.asarray(numpy_helper.to_array(self.tensors[node.input[1]]), np.float32)
        zero = np.zeros_like(scale)
        if len(node.input) > 2:
            zero = np.asarray(numpy_helper.to_array(self.tensors[node.input[2]]), np.float32)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        self.places[node.output[0]] = len(self.grids)
        self.steps.append(Step("quantize", node.name, (source,), (node.output[0],), grid=len(self.grids)))
        self.grids.append(Grid(scale, zero, None if scale.size == 1 else axis, low, high, names, codes_fed))

    def _add_layer(self, node: onnx.NodeProto) -> None:
        reader = self.makers[node.input[1]]
        codes = self._array(reader.input[0])
        scale = np.asarray(numpy_helper.to_array(self.tensors[reader.input[1]]), np.float32)
        if len(reader.input) > 2 and np.any(self._array(reader.input[2])):
            raise LowBitError(f"{node.op_type} '{node.name}': its weights have zero points, expected none")
        if node.input[0] not in self.places:
            raise LowBitError(f"{node.op_type} '{node.name}': its input is not quantized")
        axis = next((a.i for a in reader.attribute if a.name == "axis"), 1) % codes.ndim
        rows = self._rows(node, codes)
        holder = self._bias_add(node) if node.op_type == "MatMul" else node
        bias = next((n for n in holder.input if self._is_bias(n)), "") if holder is not None else ""
        files = {"codes": reader.input[0], "scale": reader.input[1]}
        bias_codes = np.zeros(rows, np.int32)
        if bias:
            made = self.makers[bias]
            files |= {"bias": made.input[0], "bias_scale": made.input[1]}
            bias_codes = numpy_helper.to_array(self.tensors[made.input[0]])
            self.biases.add(bias)
        weight, float_bias = self._float(node, holder or node, codes.shape, rows)
        low, high = _bounds(codes)
        self.layers[node.input[1]] = Layer(
            node.name, node.op_type, node.input[1], bias, codes, low, high, scale, axis, bias_codes,
            node.input[0], files, weight, float_bias,
        )  # fmt: skip

    def _array(self, name: str) -> Array:
        return np.asarray(numpy_helper.to_array(self.tensors[name]).astype(np.int32), np.float32)

    def _rows(self, node: onnx.NodeProto, codes: Array) -> int:
        attributes = {a.name: a.i for a in node.attribute}
        if node.op_type == "Conv":
            return int(codes.shape[0])
        if node.op_type == "ConvTranspose":
            return int(codes.shape[1] * attributes.get("group", 1))
        return int(codes.shape[0 if attributes.get("transB", 0) else 1])

    def _float(
        self, node: onnx.NodeProto, holder: onnx.NodeProto, shape: tuple[int, ...], rows: int
    ) -> tuple[Array, Array]:
        """Weights and bias in the float model."""
        twin, other = self.exact.get(node.name), self.exact.get(holder.name)
        weight = None if twin is None else self._exact_tensor(twin.input[1])
        if twin is None or other is None or weight is None or weight.shape != shape:
            found = "no such node" if twin is None else "none" if weight is None else str(list(weight.shape))
            raise LowBitError(
                f"the float model does not match: {node.op_type} '{node.name}' has weights of the shape "
                f"{list(shape)}, in the float model: {found}; expected the model that `lowbit quantize` was "
                "given"
            )
        given = other.input[2:] if other is twin else other.input
        bias = next((array for name in given if (array := self._exact_tensor(name)) is not None), None)
        return weight, np.zeros(rows, np.float32) if bias is None else np.broadcast_to(bias.ravel(), rows)

    def _exact_tensor(self, name: str) -> Array | None:
        tensor = self.exact_tensors.get(name)
        return None if tensor is None else np.asarray(numpy_helper.to_array(tensor))

    def _tie(self) -> None:
        """Quantizers whose codes are moved, not rounded again, stay on one grid."""
        makers = {name: step for step in self.steps for name in step.outputs}
        root = list(range(len(self.grids)))

        def leader(index: int) -> int:
            while root[index] != index:
                index = root[index]
            return index

        for step in self.steps:
            if step.grid < 0:
                continue
            waiting, seen = [step.inputs[0]], set[str]()
            while waiting:
                name = waiting.pop()
                maker = makers.get(name)
                if maker is None or name in seen:
                    continue
                seen.add(name)
                if maker.grid >= 0:
                    one, two = sorted((leader(maker.grid), leader(step.grid)))
                    if _same_grid(self.grids[one], self.grids[two]):
                        root[two] = one
                elif maker.op_type == "Concat":
                    waiting += maker.inputs
                elif maker.op_type in (*CODE_MOVERS, "Relu", "Clip"):
                    waiting.append(maker.inputs[0])
        kept = sorted({leader(index) for index in range(len(root))})
        for index in range(len(root)):
            self.grids[leader(index)].initializers |= self.grids[index].initializers
        number = {index: kept.index(leader(index)) for index in range(len(root))}
        self.grids = [self.grids[index] for index in kept]
        self.steps = [
            step if step.grid < 0
            else Step(step.op_type, step.name, step.inputs, step.outputs, grid=number[step.grid])
            for step in self.steps
        ]  # fmt: skip

    def _check_unshared(self) -> None:
        """Checks that each initializer that is trained speaks of one grid or layer alone."""
        groups = [grid.initializers for grid in self.grids]
        groups += [set(layer.files.values()) for layer in self.layers.values()]
        seen: set[str] = set()
        for names in groups:
            if shared := seen & names:
                raise LowBitError(
                    f"initializer '{min(shared)}' is that of several quantizers; expected the QDQ or QCDQ "
                    "model that `lowbit quantize` wrote"
                )
            seen |= names


def _same_grid(a: Grid, b: Grid) -> bool:
    return (
        (a.low, a.high, a.axis) == (b.low, b.high, b.axis)
        and np.array_equal(a.scale, b.scale)
        and np.array_equal(a.zero, b.zero)
    )


def _bounds(codes: Array) -> tuple[int, int]:
    """The codes of the fewest bits that hold these; at 8 bits symmetric ones, as the quantizer has them."""
    low, high = int(codes.min(initial=0)), int(codes.max(initial=0))
    bits = next(b for b in range(1, 9) if -(1 << (b - 1)) <= low and high < 1 << (b - 1))
    if bits == 8 and low > -128:
        return -127, 127
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


# Blocks -------------------------------------------------------------------------------------------------

_FEWEST = 2
"""Layers of a block: with one alone nothing can make up for what the other leaves."""

_MOST = 6
"""Layers of a block after which it may end where more than one value is read behind it."""


def _cut(network: Network) -> list[Block]:
    """Blocks end where one value alone goes on: in front of its quantizer, whose scale its readers learn.

    Where branches run side by side for long, they end where the fewest values go on.
    """
    steps = network.steps
    last = {name: i for i, step in enumerate(steps) for name in step.inputs}
    last |= dict.fromkeys(network.targets, len(steps))
    made = {name: i for i, step in enumerate(steps) for name in step.outputs}
    live = [
        sum(1 for name, at in made.items() if at < i <= last.get(name, -1)) for i in range(len(steps) + 1)
    ]
    ends, start = [], 0
    left = sum(_is_layer(network, step) for step in steps)
    while start < len(steps):
        layers, best = 0, None
        for i in range(start, len(steps)):
            layers += _is_layer(network, steps[i])
            if layers < _FEWEST or i + 1 == len(steps) or steps[i + 1].grid < 0 or left == layers:
                continue
            if best is None or live[i + 1] < live[best]:
                best = i + 1
            if live[i + 1] == 1 or layers >= _MOST:
                break
        else:
            best = len(steps)
        assert best is not None
        ends.append((start, best))
        left -= sum(_is_layer(network, step) for step in steps[start:best])
        start = best
    return [_block(network, steps[a:b], {*network.targets, *_read(steps[b:])}) for a, b in ends]


def _is_layer(network: Network, step: Step) -> bool:
    return len(step.inputs) > 1 and step.inputs[1] in network.layers


def _read(steps: Iterable[Step]) -> set[str]:
    return {name for step in steps for name in step.inputs}


def _block(network: Network, steps: list[Step], wanted: Collection[str]) -> Block:
    made = [name for step in steps for name in step.outputs]
    others = {name for step in network.steps for name in step.outputs} | set(network.inputs)
    inputs = sorted((_read(steps) & others) - set(made))
    layers = tuple(step.inputs[1] for step in steps if _is_layer(network, step))
    return Block(tuple(steps), tuple(inputs), tuple(n for n in made if n in wanted), layers)
