"""Lowering: where the regions that rules found become lowbit nodes.

The graph is walked once, front to back, and every region writes its node in front of the last node it covers.
What makes this simple is that a tensor of the model and the tensor that stores it in the output need not have
the same layout: a :class:`Stored` says how one follows from the other. Activations are stored channels last,
signed codes are shifted to unsigned ones, a Transpose of codes is nothing but another reading of the same
bytes. Only where somebody needs the original layout (a node that stays as it is, a graph output) is a tensor
brought back into it, by :meth:`Lowering.original_codes` and :meth:`Lowering.original_real`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_int, get_ints
from lowbit.graph.constants import Array, add_initializer, constant
from lowbit.graph.normal_form import (
    ELEMENTWISE,
    ROUNDED,
    NormalForm,
    Quantization,
    dims_of,
    is_dequantize,
    is_op,
    is_quantizer,
)
from lowbit.graph.quantization import CODE_TYPES, Grid, bits_of
from lowbit.graph.reasons import Refusal, StepError
from lowbit.graph.subgraphs import graphs_of
from lowbit.graph.windows import resizes_in_any_layout
from lowbit.lowering.stored import CodesOutput, Order, Stored, StoredReal, channels_last, identity
from lowbit.passes.questions import is_question
from lowbit.proto.report import Report
from lowbit.schemas import DOMAIN, VERSION, signatures

WRITTEN_FOR = "lowbit.written_for"
"""Key of a new node's ``meta`` for the nodes of the model for which it was written."""


class Lowering:
    """The output graph in the making. Rules use it to read stored tensors and to write nodes."""

    def __init__(
        self,
        graph: ir.Graph,
        form: NormalForm,
        report: Report,
        *,
        ap: bool = False,
        units: Set[ir.Node] = frozenset(),
    ):
        """``units`` are nodes that ONNX Runtime fuses with quantizers of the standard around them."""
        self.graph = graph
        self.form = form
        self.report = report
        self.ap = ap
        self.units = units
        self.anchor: ir.Node | None = None
        self.written_for: tuple[ir.Node, ...] = ()
        self.provenance: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, list[str]] = {}
        self.kept: set[ir.Node] = set()
        self._codes: dict[ir.Value, Stored] = {}
        self._reordered: dict[tuple[ir.Value, Order, Order], Stored] = {}
        self._shifted: dict[tuple[ir.Value, Order], Stored] = {}
        self._reals: dict[ir.Value, StoredReal] = {}
        self._originals: dict[ir.Value, ir.Value] = {}
        self._scalars: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._names: set[str | None] = {node.name for node in graph.all_nodes()}
        self._value_names: set[str | None] = {
            value.name for node in graph.all_nodes() for value in node.outputs
        }
        self._value_names |= {value.name for value in (*graph.inputs, *graph.initializers.values())}

    # Reading ---------------------------------------------------------------------------------------------

    # Bipolar codes are handed out as such only to those who ask for them; others get them with an offset.

    def codes(self, value: ir.Value) -> Stored:
        """How a tensor of codes is stored, in whatever way; codes that no region made are as they are."""
        stored = self._codes.get(value)
        if stored is None:
            stored = self._codes[value] = self._foreign(value)
        return stored

    def is_original(self, value: ir.Value) -> bool:
        """Whether a tensor of codes is still stored by the model's own value."""
        return value not in self._codes or self._codes[value].value is value

    def codes_in(self, value: ir.Value, order: Order, *, bipolar: bool = False) -> Stored:
        """A tensor of codes in a given order of axes, transposed where it is stored in another."""
        stored = self.plain(value, bipolar=bipolar)
        return stored if stored.order == order else self._reorder(value, stored, order)

    def channels_last(self, value: ir.Value, *, bipolar: bool = False) -> Stored:
        """A tensor of codes with its channels (axis 1) last."""
        return self.codes_in(value, channels_last(self.rank(value)), bipolar=bipolar)

    def plain(self, value: ir.Value, *, bipolar: bool = False) -> Stored:
        """A tensor of codes in whatever order it has, but not flattened."""
        stored = self._unflatten(value)
        return stored if bipolar or not stored.bipolar else self._shift(value, stored)

    def original_codes(self, value: ir.Value) -> ir.Value:
        """A tensor of codes exactly as the model has it: axes, element type, offset."""
        if self.is_original(value):
            return value
        if value not in self._originals:
            stored = self.codes_in(value, identity(self.rank(value)))
            result = stored.value
            dtype = self._code_type(value)
            wanted_signed = CODE_TYPES[dtype][0] < 0
            if stored.offset != 0 or stored.signed != wanted_signed:
                # Both grids have scale 1, so that this only shifts: rint((q - offset) * 1 / 1) + 0.
                low, high = stored.low - stored.offset, stored.high - stored.offset
                result = self.node(
                    "LowBitRequantize",
                    {
                        "x": result,
                        "x_scale": np.float32(1),
                        "x_zero_point": np.int32(stored.offset),
                        "y_scale": np.float32(1),
                        "y_zero_point": np.int32(0),
                    },
                    {"x_encoding": stored.encoding, **self.range_attributes(low, high, signed=wanted_signed)},
                    value,
                    ir.DataType.INT8 if wanted_signed else ir.DataType.UINT8,
                    identity(self.rank(value)),
                )
            if dtype not in (ir.DataType.UINT8, ir.DataType.INT8):
                result = self.standard("Cast", [result], {"to": int(dtype)}, value, dtype)
            self._originals[value] = result
        return self._originals[value]

    def original_real(self, value: ir.Value) -> ir.Value:
        """A float tensor in the model's own order of axes."""
        stored = self._reals.get(value)
        if stored is None:
            return value
        if value not in self._originals:
            wanted = identity(len(stored.order))
            self._originals[value] = self._transposed(stored.value, stored.order, wanted, value)
        return self._originals[value]

    def real(self, value: ir.Value) -> StoredReal:
        """How a float tensor is stored."""
        return self._reals.get(value) or StoredReal(value, identity(self.rank(value)))

    @staticmethod
    def rank(value: ir.Value) -> int:
        """The rank of a value; rules have made sure that it is known."""
        assert value.shape is not None, f"rank of {value.name} is unknown"
        return len(value.shape)

    # Writing ---------------------------------------------------------------------------------------------

    def define_codes(self, value: ir.Value, stored: Stored) -> None:
        """Says how a tensor of codes is stored from here on."""
        self._codes[value] = stored
        self._remember(stored.value, value, stored)

    def define_real(self, value: ir.Value, stored: StoredReal) -> None:
        """Says how a float tensor is stored from here on."""
        self._reals[value] = stored
        self._remember(stored.value, value, stored)

    def constant(self, owner: ir.Value, name: str, array: Array | np.generic) -> ir.Value:
        """An initializer. Equal scalars, such as the scales of an output and of its reader's input, are one.

        Args:
            owner: the output of the node that needs it; names it.
            name: name of the input.
            array: its value.
        """
        array = np.asarray(array)
        if array.size > 1:
            return add_initializer(self.graph, f"{owner.name}.{name}", array)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._scalars:
            self._scalars[key] = add_initializer(self.graph, f"{owner.name}.{name}", array)
        return self._scalars[key]

    def node(
        self,
        op_type: str,
        inputs: Mapping[str, ir.Value | Array | np.generic | Sequence[ir.Value] | None],
        attributes: Mapping[str, Any],
        source: ir.Value,
        dtype: ir.DataType,
        order: Order,
        *,
        origins: Sequence[ir.Node] = (),
        shape: Sequence[Any] | None = None,
    ) -> ir.Value:
        """Writes one lowbit node.

        Args:
            op_type: an op of ``ai.lowbit``.
            inputs: by their names in the schema; arrays become initializers; the last one may be a sequence.
            attributes: those at their default value are left out.
            source: the model's tensor that the output stores.
            dtype: element type of the output.
            order: order of the output's axes.
            origins: the nodes of the model that it computes, the one that names it first.
            shape: the output's shape, where it is not ``source``'s in ``order``.

        Returns:
            The output.
        """
        signature = signatures()[op_type]
        unknown = set(inputs) - set(signature.inputs)
        assert not unknown, f"{op_type} has no input {unknown}"
        output = self._output(source, dtype, order, shape)
        arguments: list[ir.Value | None] = []
        for name in signature.inputs:
            given = inputs.get(name)
            if isinstance(given, (np.ndarray, np.generic)):
                arguments.append(self.constant(output, name, given))
            elif isinstance(given, Sequence):
                arguments.extend(given)
            else:
                arguments.append(given)
        while arguments and arguments[-1] is None:
            arguments.pop()
        given_attributes = {
            name: value
            for name, value in attributes.items()
            if name not in signature.defaults or signature.defaults[name] != value
        }
        named = next((origin.name for origin in origins if origin.name), source.name)
        self._names -= {origin.name for origin in origins} - set(self.origins)  # these nodes go away
        node = ir.node(
            op_type,
            arguments,
            given_attributes,
            domain=DOMAIN,
            outputs=[output],
            name=self._node_name(str(named)),
        )
        self.graph.opset_imports[DOMAIN] = VERSION
        self._insert(node)
        assert node.name is not None
        self.origins[node.name] = [
            str(origin.name)
            for origin in origins
            if origin.name and not is_quantizer(origin) and not is_dequantize(origin)
        ]
        return output

    def standard(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        source: ir.Value,
        dtype: ir.DataType,
        *,
        order: Order | None = None,
        shape: Sequence[Any] | None = None,
    ) -> ir.Value:
        """Writes one node of ONNX's own domain; arguments as in :meth:`node`."""
        output = self._output(source, dtype, order or identity(self.rank(source)), shape)
        self._write_standard(op_type, inputs, attributes, [output], f"{source.name}.{op_type}")
        return output

    def axes_operand(
        self, owner: ir.Value, axes: Sequence[int]
    ) -> tuple[list[ir.Value], dict[str, list[int]]]:
        """Axes of Squeeze and Unsqueeze in the form of the model's opset.

        Returns:
            Further inputs (since opset 13) and attributes (before it).
        """
        if self.graph.opset_imports.get("", 13) < 13:
            return [], {"axes": list(axes)}
        return [self.constant(owner, "axes", np.array(axes, np.int64))], {}

    def standard_many(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        sources: Sequence[ir.Value],
        dtype: ir.DataType,
        *,
        order: Order,
    ) -> list[ir.Value]:
        """Writes one node of ONNX's own domain with several outputs."""
        outputs = [self._output(source, dtype, order, None) for source in sources]
        self._write_standard(op_type, inputs, attributes, outputs, f"{sources[0].name}.{op_type}")
        return outputs

    def storage(self, codes: ir.Value, low: int, high: int) -> tuple[int, bool]:
        """How new codes are best stored: ``(offset, signed)``.

        The x86 kernels multiply unsigned activations with signed weights, so signed codes are shifted into
        the unsigned range of their bit width. Codes that the user of the model, or only nodes that stay, see
        keep their type.

        Args:
            codes: the tensor in the model.
            low: smallest code that occurs.
            high: largest.
        """
        if codes.is_graph_output() or self._stays_read(codes):
            return 0, CODE_TYPES[self._code_type(codes)][0] < 0
        quantization = self.form.quantization(codes, half=True)
        zero_points = quantization.grid.zero_point if isinstance(quantization, Quantization) else np.zeros(1)
        low, high = min(low, int(zero_points.min())), max(high, int(zero_points.max()))
        return (0 if low >= 0 else 1 << (bits_of(low, high, signed=True) - 1)), False

    def _stays_read(self, codes: ir.Value) -> bool:
        """Whether all readers of codes are DequantizeLinear nodes that stay."""
        readers = codes.consumers()
        return bool(readers) and all(
            is_dequantize(node)
            and (
                not self.units.isdisjoint(node.outputs[0].consumers())
                or isinstance(self.form.dequantization(node.outputs[0]), Refusal)
            )
            for node in readers
        )

    def range_attributes(
        self, low: int, high: int, *, signed: bool, prefix: str = "y", bits_for: Sequence[int] = ()
    ) -> dict[str, Any]:
        """The attributes that bound output codes: ``y_bits``, ``y_encoding``, ``y_min``, ``y_max``.

        Args:
            low: smallest code, as stored.
            high: largest code, as stored.
            signed: whether they are stored as int8.
            prefix: name of the operand.
            bits_for: further codes that the bit width must hold, such as the zero point.
        """
        bits = bits_of(min(low, *bits_for, low), max(high, *bits_for, high), signed=signed)
        smallest, largest = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        attributes: dict[str, Any] = {
            f"{prefix}_bits": bits,
            f"{prefix}_encoding": "signed" if signed else "unsigned",
        }
        if low != smallest:
            attributes[f"{prefix}_min"] = [low]
        if high != largest:
            attributes[f"{prefix}_max"] = [high]
        return attributes

    def quantized_output(
        self, quantization: Quantization, low: int, high: int
    ) -> tuple[CodesOutput, dict[str, Any]]:
        """What a node that ends in a quantizer needs to know about its output.

        Bipolar codes are stored as 0 and 1, without a zero point.

        Args:
            quantization: the quantizer.
            low: smallest code that the node can give, in the model's terms.
            high: largest.

        Returns:
            The storage of the output, and the node's attributes and inputs for it.
        """
        grid = quantization.grid
        if quantization.range.bipolar:
            bipolar = CodesOutput(0, False, 0, 1, grid.scale, np.zeros((), np.int32), bipolar=True)
            return bipolar, self.range_attributes(0, 1, signed=False)
        offset, signed = self.storage(quantization.codes, low, high)
        zero_point = (grid.zero_point + offset).astype(np.int32)
        attributes = self.range_attributes(
            low + offset,
            high + offset,
            signed=signed,
            bits_for=[int(zero_point.min()), int(zero_point.max())],
        )
        return CodesOutput(offset, signed, low + offset, high + offset, grid.scale, zero_point), attributes

    def zero_point(self, stored: Stored, grid: Grid) -> Array:
        """The zero point of codes as they are stored, int32; 0 for bipolar ones, which have none."""
        if stored.bipolar:
            return np.zeros((), np.int32)
        return (grid.zero_point + stored.offset).astype(np.int32)

    def keep(self, node: ir.Node) -> None:
        """Leaves a node as it is and gives it its inputs as the model has them, its subgraphs included.

        An elementwise node between tensors that are stored in another order of axes works in that order, and
        some that move numbers do.
        """
        self.kept.add(node)
        ways = (self._keep_in_order, self._keep_move, self._keep_resize, self._keep_question)
        if any(way(node) for way in ways):
            return
        inner = [n for graph in graphs_of(node) for n in graph.all_nodes()]
        for user in (node, *inner):
            for i, value in enumerate(user.inputs):
                if value is None or (user is not node and value.graph is not self.graph):
                    continue
                original = self.original(value)
                if original is not value:
                    user.replace_input_with(i, original)

    def original(self, value: ir.Value) -> ir.Value:
        """A value exactly as the model has it, codes or real numbers."""
        if value in self._codes:
            return self.original_codes(value)
        return self.original_real(value)

    def finish_outputs(self) -> None:
        """Gives every graph output its value under its own name."""
        self.anchor = None
        finished: dict[ir.Value, ir.Value] = {}
        for i, value in enumerate(self.graph.outputs):
            if value in finished:  # a model may list an output twice
                self.graph.outputs[i] = finished[value]
                continue
            producer = value.producer()
            self.written_for = () if producer is None else (producer,)
            original = finished[value] = self.original(value)
            if original is value:
                continue
            if original.is_graph_input() or original.is_graph_output() or original.is_initializer():
                original = finished[value] = self.standard(
                    "Identity", [original], {}, value, original.dtype or ir.DataType.FLOAT
                )
            name = value.name
            value.name = f"{name}.replaced"
            if original.name in self.provenance:
                self.provenance[str(name)] = self.provenance.pop(str(original.name))
            original.name = name
            original.shape, original.type = value.shape, value.type
            original.doc_string = value.doc_string
            original.metadata_props.update(value.metadata_props)
            self.graph.outputs[i] = original

    def check_replaced(self) -> None:
        """Checks that every node that regions stand for is gone; unused nodes have been removed.

        Raises:
            StepError: if one is left, which then is computed twice: something reads it that nobody asked for.
        """
        for node in self.graph:
            if WRITTEN_FOR not in node.meta and node not in self.kept:
                cause = RuntimeError(f"{node.op_type} '{node.name}' is computed beside what took its place")
                raise StepError((node,), cause)

    def _keep_in_order(self, node: ir.Node) -> bool:
        """Repeats an elementwise node on float tensors as they are stored; False if it is not that simple."""
        if not is_op(node, *ELEMENTWISE) or len(node.outputs) != 1:
            return False
        varying = [value for value in node.inputs if value is not None and constant(value) is None]
        orders = {self._reals[value].order for value in varying if value in self._reals}
        if len(orders) != 1:
            return False
        order, output = orders.pop(), node.outputs[0]
        if order == identity(len(order)) or output.shape is None or len(output.shape) != len(order):
            return False
        turned = [value for value in varying if value not in self._reals]
        if turned and (any(value.shape != output.shape for value in varying) or not _leads_to_layers(node)):
            return False
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            array = constant(value)
            if value in turned:
                inputs.append(self._transposed(self.original(value), identity(len(order)), order, value))
                continue
            if value is None or array is None or array.size == 1:
                inputs.append(self._reals[value].value if value in self._reals else value)
                continue
            wide = array.reshape((1,) * (len(order) - array.ndim) + array.shape)
            inputs.append(self.constant(output, "operand", wide.transpose(order)))
        dtype = output.dtype or ir.DataType.FLOAT
        moved = self.standard(node.op_type, inputs, node.attributes, output, dtype, order=order)
        self.define_real(output, StoredReal(moved, order))
        return True

    def _keep_move(self, node: ir.Node) -> bool:
        """Repeats a Concat or Split on float tensors as they are stored; a Transpose reads them in its order.

        False for other nodes, and for tensors that are stored as the model has them or in several orders.
        """
        if not is_op(node, "Concat", "Split", "Transpose"):
            return False
        sources = node.inputs if is_op(node, "Concat") else node.inputs[:1]
        reals = [None if value is None else self._reals.get(value) for value in sources]
        stored = [real for real in reals if real is not None]
        orders = {real.order for real in stored}
        if len(stored) != len(reals) or len(orders) != 1:
            return False
        (order,) = orders
        rank, outputs = len(order), node.outputs
        shapes = (output.shape for output in outputs)
        if order == identity(rank) or any(shape is None or len(shape) != rank for shape in shapes):
            return False
        if is_op(node, "Transpose"):
            perm = get_ints(node, "perm") or list(range(rank))[::-1]
            turned = tuple(perm.index(axis) for axis in order)
            self.define_real(outputs[0], StoredReal(stored[0].value, turned))
            return True
        axis = from_front(get_int(node, "axis", 0), rank)
        if axis is None:
            return False
        inputs = (
            [real.value for real in stored] if is_op(node, "Concat") else [stored[0].value, *node.inputs[1:]]
        )
        attributes = dict(node.attributes) | {"axis": ir.AttrInt64("axis", order.index(axis))}
        dtype = outputs[0].dtype or ir.DataType.FLOAT
        for output, value in zip(
            outputs,
            self.standard_many(node.op_type, inputs, attributes, outputs, dtype, order=order),
            strict=True,
        ):
            self.define_real(output, StoredReal(value, order))
        return True

    def _keep_resize(self, node: ir.Node) -> bool:
        """Repeats a Resize on a float image as it is stored, channels last; False if it cannot work so."""
        source = node.inputs[0] if resizes_in_any_layout(node) else None
        stored = None if source is None else self._reals.get(source)
        if stored is None or stored.order != channels_last(4):
            return False
        output, order = node.outputs[0], stored.order
        inputs: list[ir.Value | None] = [stored.value, None]  # a region is none of the spatial dims' business
        attributes = dict(node.attributes)
        axes = get_ints(node, "axes")
        if axes is not None:
            attributes["axes"] = ir.AttrInt64s("axes", [order.index(axis % 4) for axis in axes])
        for numbers in node.inputs[2:]:
            if numbers is None or axes is not None:
                inputs.append(numbers)
                continue
            array = constant(numbers)
            if array is not None:
                inputs.append(self.constant(output, "numbers", array[list(order)] if array.size else array))
                continue
            positions = self.constant(output, "axes", np.array(order, np.int64))
            dtype = numbers.dtype or (ir.DataType.FLOAT if len(inputs) == 2 else ir.DataType.INT64)
            given = [self.original(numbers), positions]
            inputs.append(
                self.standard("Gather", given, {}, output, dtype, order=identity(1), shape=[len(order)])
            )
        dtype = output.dtype or ir.DataType.FLOAT
        moved = self.standard("Resize", inputs, attributes, output, dtype, order=order)
        self.define_real(output, StoredReal(moved, order))
        return True

    def _keep_question(self, node: ir.Node) -> bool:
        """Answers a Shape or Size from the stored tensor, whose dims are the same in another order."""
        value = node.inputs[0] if is_question(node) else None
        stored = None if value is None else self._codes.get(value) or self._reals.get(value)
        if value is None or stored is None or (isinstance(stored, Stored) and stored.flattened is not None):
            return False
        order, rank = stored.order, len(stored.order)
        if is_op(node, "Size") or order == identity(rank):
            node.replace_input_with(0, stored.value)
            return True
        answer = node.outputs[0]
        asked = range(rank)[slice(get_int(node, "start", 0), get_int(node, "end", rank))]
        dims = self.standard(
            "Shape", [stored.value], {}, answer, ir.DataType.INT64, order=identity(1), shape=[rank]
        )
        positions = self.constant(answer, "axes", np.array([order.index(axis) for axis in asked], np.int64))
        node.op_type = "Gather"
        node.attributes.clear()
        node.resize_inputs(2)
        node.replace_input_with(0, dims)
        node.replace_input_with(1, positions)
        return True

    # Layout ----------------------------------------------------------------------------------------------

    def _code_type(self, codes: ir.Value) -> ir.DataType:
        """The element type that codes have in the model."""
        code_range = self.form.code_range(codes)
        assert code_range is not None, f"{codes.name} does not hold codes"
        return code_range.dtype

    def _foreign(self, value: ir.Value) -> Stored:
        """Codes that come from outside: a graph input, an initializer, a node that stays."""
        code_range = self.form.code_range(value)
        assert code_range is not None, f"{value.name} does not hold codes"
        order = identity(self.rank(value))
        signed = CODE_TYPES[code_range.dtype][0] < 0
        tensor = value
        if code_range.dtype not in (ir.DataType.UINT8, ir.DataType.INT8):
            byte = ir.DataType.INT8 if signed else ir.DataType.UINT8
            array = constant(value)
            tensor = (
                self.standard("Cast", [value], {"to": int(byte)}, value, byte)
                if array is None
                else self.constant(value, "bytes", array)
            )
        return Stored(tensor, order, 0, signed, code_range.low, code_range.high)

    def _unflatten(self, value: ir.Value) -> Stored:
        """Codes whose flattening has been put off until now get reshaped."""
        stored = self.codes(value)
        if stored.flattened is None:
            return stored
        rank = len(stored.order)
        straight = self._transposed(stored.value, stored.order, identity(rank), value)
        dims = dims_of(straight)[stored.flattened :]
        features = math.prod(dim for dim in dims if dim is not None)
        shape = [*(0 for _ in range(stored.flattened)), -1 if None in dims else features]
        target = self.constant(value, "shape", np.array(shape, np.int64))
        flat = self.standard(
            "Reshape", [straight, target], {}, value, ir.DataType.INT8 if stored.signed else ir.DataType.UINT8
        )
        result = replace(stored, value=flat, order=identity(stored.flattened + 1), flattened=None)
        self.define_codes(value, result)
        return result

    def _shift(self, value: ir.Value, stored: Stored) -> Stored:
        """Bipolar codes as unsigned ones of 2 bits with an offset, for readers that know zero points."""
        key = (stored.value, stored.order)  # a Transpose is another order of the same stored tensor
        if key not in self._shifted:
            table = np.array([0, 2] * 128, np.uint8)
            shifted = self.node(
                "LowBitLookup",
                {"x": stored.value, "table": table},
                {},
                value,
                ir.DataType.UINT8,
                stored.order,
            )
            self._shifted[key] = replace(stored, value=shifted, offset=1, low=0, high=2, bipolar=False)
            self._remember(shifted, value, self._shifted[key])
        return self._shifted[key]

    def _reorder(self, value: ir.Value, stored: Stored, order: Order) -> Stored:
        key = (stored.value, stored.order, order)
        if key not in self._reordered:
            tensor = self._transposed(stored.value, stored.order, order, value)
            self._reordered[key] = replace(stored, value=tensor, order=order)
            self._remember(tensor, value, self._reordered[key])
        return self._reordered[key]

    def _transposed(self, tensor: ir.Value, order: Order, wanted: Order, source: ir.Value) -> ir.Value:
        """A stored tensor in another order of axes.

        A constant is written in it; elsewhere a Reshape does where only dims of size 1 move, and a Transpose,
        which the report lists, where others do.
        """
        if order == wanted:
            return tensor
        perm = [order.index(axis) for axis in wanted]
        array = constant(tensor)
        if array is not None:
            return self.constant(source, "reordered", array.transpose(perm))
        assert tensor.dtype is not None
        assert tensor.shape is not None
        dims = list(tensor.shape)
        shape = [dims[axis] for axis in perm]
        if [axis for axis in perm if dims[axis] != 1] == sorted(
            axis for axis in range(len(dims)) if dims[axis] != 1
        ):
            numbers = [dim if isinstance(dim, int) else -1 for dim in shape]
            if numbers.count(-1) <= 1:
                target = self.constant(source, "shape", np.array(numbers, np.int64))
                return self.standard("Reshape", [tensor, target], {}, source, tensor.dtype, shape=shape)
        self.report.warn(
            f"a Transpose was added: {source.name} is stored with axes {list(order)}, "
            f"but needed with {list(wanted)}"
        )
        return self.standard("Transpose", [tensor], {"perm": perm}, source, tensor.dtype, shape=shape)

    # Names -----------------------------------------------------------------------------------------------

    def _output(
        self, source: ir.Value, dtype: ir.DataType, order: Order, shape: Sequence[Any] | None
    ) -> ir.Value:
        if shape is None and source.shape is not None and len(source.shape) == len(order):
            shape = [source.shape[axis] for axis in order]
        return ir.val(
            self._value_name(f"{source.name}.lb"), dtype, None if shape is None else ir.Shape(shape)
        )

    def _write_standard(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        outputs: Sequence[ir.Value],
        name: str,
    ) -> None:
        self._insert(ir.node(op_type, list(inputs), attributes, outputs=outputs, name=self._node_name(name)))

    def _insert(self, node: ir.Node) -> None:
        node.meta[WRITTEN_FOR] = self.written_for
        if self.anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.anchor, node)

    def _node_name(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._names:
            count += 1
            name = f"{wanted}.lb{count}" if count > 2 else f"{wanted}.lb"
        self._names.add(name)
        return name

    def _value_name(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._value_names:
            count += 1
            name = f"{wanted}{count}"
        self._value_names.add(name)
        return name

    def _remember(self, stored: ir.Value, source: ir.Value, how: Stored | StoredReal) -> None:
        entry: dict[str, Any] = {"source": source.name}
        if "lowbit.made" in source.meta and not source.meta.get("lowbit.named"):
            # The model has no such value; it may have the numbers that these codes are, or know the stored
            # tensor in another order of axes.
            if ROUNDED not in source.meta:
                return
            real, quantization = source.meta[ROUNDED]
            grid, codes = quantization.grid, quantization.range
            rounded = [float(grid.scale), int(grid.zero_point), codes.low, codes.high]
            entry = {"source": real, "rounded": rounded}
        if isinstance(how, Stored) and how.flattened is not None:
            dims = how.flattened_dims()
            if dims is None:
                return
            entry["dims"] = dims
        if how.order != identity(len(how.order)):
            entry["perm"] = list(how.order)
        if isinstance(how, Stored) and how.offset:
            entry["offset"] = how.offset
        if isinstance(how, Stored) and how.bipolar:
            entry["bipolar"] = True
        known = self.provenance.setdefault(str(stored.name), entry)
        if "rounded" in known and "rounded" not in entry:  # codes that the model has say more
            self.provenance[str(stored.name)] = entry


def _leads_to_layers(node: ir.Node) -> bool:
    """Whether a sum, cut off or not, is read by quantizers and further sums alone.

    Where its terms are stored in different orders, it is then made in that of a layer's, as the next one
    reads it: else the result of every layer along a shortcut would be transposed.
    """
    if not is_op(node, "Add"):
        return False
    pending = [node.outputs[0]]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return False
        for user in value.consumers():
            if is_op(user, "Relu", "Clip"):
                pending.append(user.outputs[0])
            elif not is_quantizer(user) and not is_op(user, "Add"):
                return False
    return True


def name_uniquely(graph: ir.Graph, taken: Collection[str]) -> None:
    """Gives nodes other names where two have the same, which ONNX Runtime refuses.

    Args:
        graph: the output graph.
        taken: the names by which the metadata knows lowbit nodes; those keep them.
    """
    used: set[str] = set(taken)
    for node in graph:
        if not node.name or node.domain == DOMAIN:
            continue
        name, count = node.name, 1
        while node.name in used:
            count += 1
            node.name = f"{name}.{count}"
        used.add(node.name)
