"""Where quantizers sit: which nodes compute on codes, which tensors are rounded, to how many bits.

The graph's own words decide (:mod:`lowbit.graph.normal_form`): ops that move codes share the grid of what
they move, elementwise ops between two tensors become one function, Relu and Clip belong to what stands in
front of them, as the converter has it. The rules have the names of :data:`lowbit.quantizer.config.RULES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_float, get_int, get_ints, get_string
from lowbit.graph.constants import Array, constant, integers, is_known
from lowbit.graph.normal_form import CODE_MOVERS, ELEMENTWISE, clip_bounds, dims_of, is_op, rank_of
from lowbit.quantizer.config import Config
from lowbit.quantizer.report import Decision
from lowbit.rewrites.operands import per_channel

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_POOLS = ("AveragePool", "GlobalAveragePool", "ReduceMean")
_CORES = ("Add", "Mul", "Concat", "BatchNormalization", "MatMul", *_POOLS)
"""Ops other than weighted layers that compute one rounding from codes."""


@dataclass
class Layer:
    """A convolution or matrix product with constant weights.

    Attributes:
        node: its name.
        op_type: its operator.
        weight: float32, as the model stores it.
        bias: float32 [rows], zeros where it has none.
        bias_node: the node whose operand the bias is: the layer, or an Add behind a MatMul.
        x: the float tensor that it reads.
        y: the float tensor that it computes, its bias added.
        rows: output channels.
        group: groups.
        bits: of its weights.
        rule: which rule decided them.
        depthwise: whether every channel is a group of its own.
        transposed: whether a matrix product's weights have a row per output channel.
        residual: the other operand of the Add behind it where nothing rounds between; else empty.
    """

    node: str
    op_type: str
    weight: Array
    bias: Array
    bias_node: str
    x: str
    y: str
    rows: int
    group: int
    bits: int
    rule: str
    depthwise: bool
    transposed: bool
    residual: str = ""

    @property
    def takes_bias(self) -> bool:
        """Whether there is a place for a bias: a MatMul without an Add has none."""
        return self.op_type != "MatMul" or self.bias_node != self.node


@dataclass
class Site:
    """A float tensor that is rounded to codes.

    Attributes:
        name: the tensor.
        bits: of the codes.
        signed: whether values below 0 can occur.
        rule: which rule decided the bits.
        leader: the site that shares its grid and comes first; itself if it is alone.
        channels: size of axis 1 where it has one scale per channel.
        eight: whether it may have a zero point.
    """

    name: str
    bits: int
    signed: bool
    rule: str
    leader: str
    channels: int | None = None


@dataclass
class Plan:
    """All decisions of placement.

    Attributes:
        layers: the weighted layers in the order of the graph, by name.
        sites: the quantized tensors in the order of the graph.
        readers: (node, input index) pairs that read codes.
        raw: graph inputs that are fed codes already: whole numbers from 0 to 255.
        concats: output of a Concat -> its operands, for those whose ranges decide whether they share a grid.
        kept: node -> why it stays float.
        quantized: the nodes that compute on codes.
        decisions: what the rules decided.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    readers: set[tuple[str, int]] = field(default_factory=set)
    raw: set[str] = field(default_factory=set)
    concats: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    quantized: set[str] = field(default_factory=set)
    decisions: list[Decision] = field(default_factory=list)

    def leader(self, name: str) -> str:
        """The site that stands for all that share a grid with a site."""
        while self.sites[name].leader != name:
            name = self.sites[name].leader
        return name

    def join(self, a: str, b: str) -> None:
        """Lets two sites share a grid: that of more bits, signed if either is."""
        first, second = self.leader(a), self.leader(b)
        if first == second:
            return
        order = list(self.sites)
        if order.index(second) < order.index(first):
            first, second = second, first
        one, two = self.sites[first], self.sites[second]
        if two.bits > one.bits:
            one.bits, one.rule = two.bits, two.rule
        one.signed |= two.signed
        one.channels = None
        two.leader = first

    def members(self, leader: str) -> list[str]:
        """All sites with the grid of a leader."""
        return [name for name in self.sites if self.leader(name) == leader]

    def grid(self, name: str) -> Site:
        """The site whose bits and sign a site has."""
        return self.sites[self.leader(name)]


def place(model: ir.Model, config: Config, refused: Mapping[str, str], raw: Collection[str] = ()) -> Plan:
    """Decides where quantizers sit.

    Args:
        model: the cleaned float model, with shapes and node names.
        config: what the caller asks for.
        refused: nodes that stay float because the converter has no form of them, with its reasons.
        raw: graph inputs that are fed codes.
    """
    placement = _Placement(model.graph, config, refused)
    placement.plan.raw = set(raw)
    return placement.run()


class _Placement:
    def __init__(self, graph: ir.Graph, config: Config, refused: Mapping[str, str]) -> None:
        self.graph, self.config, self.refused = graph, config, refused
        self.nodes = list(graph)
        self.plan = Plan()
        self.quantized: set[ir.Node] = set()
        self.fused: set[ir.Node] = set()  # Relu and Clip that belong to what is in front of them
        self.inside: set[ir.Value] = set()  # values that are not rounded, between two nodes on codes
        self.roots: dict[ir.Value, ir.Value] = {}
        self.residuals: dict[ir.Node, ir.Value] = {}  # layer -> the other operand of the Add behind it
        self.biases: dict[ir.Node, ir.Node] = {}  # MatMul -> the Add of its bias

    def run(self) -> Plan:
        """All steps in order."""
        self._choose_nodes()
        self._fuse()
        self._add_layers()
        self._add_sites()
        self._share()
        self._give_bits()
        self.plan.quantized = {str(node.name) for node in (*self.quantized, *self.biases.values())}
        return self.plan

    def decide(self, rule: str, target: str, decision: str) -> None:
        """Notes a decision."""
        self.plan.decisions.append(Decision(rule, target, decision))

    # Which nodes ------------------------------------------------------------------------------------------

    def _choose_nodes(self) -> None:
        plan, possible = self.plan, set()
        for node in self.nodes:
            reason = self._why_not(node)
            if reason is None:
                possible.add(node)
            elif any(output.dtype in (None, ir.DataType.FLOAT) for output in node.outputs):
                plan.kept[str(node.name)] = reason
        # In front of the first layers there is preprocessing, behind the last ones there is decoding: only
        # what stands between two layers is quantized besides these.
        ahead: set[ir.Node] = set()
        for node in reversed(self.nodes):
            if node in possible and (
                self._is_layer(node)
                or any(user in ahead for output in node.outputs for user in output.consumers())
            ):
                ahead.add(node)
        behind: set[ir.Node] = set()
        for node in self.nodes:
            if node not in ahead:
                continue
            makers = [value.producer() for value in node.inputs if value is not None]
            coded = any(value is not None and value.name in plan.raw for value in node.inputs)
            if self._is_layer(node) or coded or any(maker in behind for maker in makers):
                behind.add(node)
        self.quantized = behind
        for node in possible - behind:
            where = "behind the last" if node not in ahead else "in front of the first"
            plan.kept[str(node.name)] = f"it stands {where} quantized layer"

    def _why_not(self, node: ir.Node) -> str | None:
        name = str(node.name)
        if name in self.refused:
            return self.refused[name]
        if self._is_layer(node):
            excluded = self.config.excluded(name, node.op_type)
            if excluded is not None:
                return excluded
            return self._layer_refusal(node)
        if not is_op(node, "Relu", "Clip"):  # which belong to what stands in front of them
            excluded = self.config.excluded(name, node.op_type, layer=False)
            if excluded is not None:
                return excluded
        if not is_op(node, *_CORES, *CODE_MOVERS, *ELEMENTWISE):
            return f"lowbit has no integer form of {node.op_type}"
        if is_op(node, "MaxPool") and len(node.outputs) > 1:
            return "it also returns the indices of the maxima"
        if any(out.dtype not in (None, ir.DataType.FLOAT) for out in node.outputs):
            return "it does not compute float32"
        fed = [value for value in node.inputs if value is not None and not is_known(value)]
        if not fed:
            return "it reads constants alone"
        if is_op(node, *CODE_MOVERS) and node.inputs[0] not in fed:
            return "it moves constants"
        if is_op(node, "Concat") and len(fed) != len(node.inputs):
            return "one of its operands is constant"
        if is_op(node, *CODE_MOVERS) and any(
            value.dtype not in (None, ir.DataType.INT64, ir.DataType.INT32)
            for value in fed
            if value is not node.inputs[0]
        ):
            return "how it moves values is computed at run time"
        return None

    def _is_layer(self, node: ir.Node) -> bool:
        return is_op(node, *WEIGHTED) and len(node.inputs) > 1 and constant(node.inputs[1]) is not None

    def _layer_refusal(self, node: ir.Node) -> str | None:
        weight = constant(node.inputs[1])
        assert weight is not None
        if weight.dtype != np.float32 or not weight.size:
            return f"its weights are {weight.dtype} of shape {list(weight.shape)}, expected float32"
        if not np.all(np.isfinite(weight)):
            return "its weights hold NaN or infinity"
        if is_known(node.inputs[0]):
            return "its input is constant"
        if is_op(node, "Conv", "ConvTranspose"):
            if weight.ndim not in (3, 4, 5):
                return f"it has {weight.ndim - 2} spatial dims; lowbit has 1 to 3"
            group = get_int(node, "group", 1)
            if is_op(node, "ConvTranspose") and group > 1 and weight.shape[:2] != (group, 1):
                return "a grouped ConvTranspose has no axis for scales per output channel"
        elif weight.ndim != 2:
            return f"its weights have rank {weight.ndim}, expected a matrix"
        if is_op(node, "Gemm"):
            if get_int(node, "transA", 0):
                return "transA=1: its activation is transposed"
            if get_float(node, "alpha", 1.0) != 1 or get_float(node, "beta", 1.0) != 1:
                return "its alpha or beta is not 1"
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None and (
            not is_known(bias) or per_channel_bias(constant(bias), _rows(node, weight)) is None
        ):
            return "its bias is not one constant per output channel"
        return None

    # What belongs together --------------------------------------------------------------------------------

    def _fuse(self) -> None:
        self._fuse_biases()
        for node in self.nodes:
            if node not in self.quantized:
                continue
            if is_op(node, "Relu", "Clip") and self._fuses_bounds(node):
                assert node.inputs[0] is not None
                self.fused.add(node)
                self.inside.add(node.inputs[0])
                self.roots[node.outputs[0]] = node.outputs[0]
            elif self._is_function(node):
                self._add_function(node)
        self._fuse_residuals()

    def _fuse_biases(self) -> None:
        for node in self.nodes:
            if not (node in self.quantized and is_op(node, "MatMul") and self._is_layer(node)):
                continue
            users = list(node.outputs[0].consumers())
            if len(users) != 1 or not is_op(users[0], "Add") or str(users[0].name) in self.refused:
                continue
            if node.outputs[0].is_graph_output():
                continue
            weight = constant(node.inputs[1])
            others = [constant(value) for value in users[0].inputs if value is not node.outputs[0]]
            if weight is None or len(others) != 1 or others[0] is None:
                continue
            if per_channel_bias(others[0], weight.shape[1]) is not None:
                self.biases[node] = users[0]
                self.quantized.discard(users[0])
                self.plan.kept.pop(str(users[0].name), None)

    def _end(self, node: ir.Node) -> ir.Value:
        """What a layer computes, its bias added; any other node's output."""
        return self.biases.get(node, node).outputs[0]

    def _maker(self, value: ir.Value | None) -> ir.Node | None:
        """The quantized node that computes a value; of an Add of a bias, the layer in front of it."""
        node = None if value is None else value.producer()
        for layer, add in self.biases.items():
            if add is node:
                return layer
        return node if node in self.quantized else None

    def _fuses_bounds(self, node: ir.Node) -> bool:
        source = node.inputs[0]
        if source is None or clip_bounds(node) is None or len(source.uses()) != 1 or source.is_graph_output():
            return False
        maker = self._maker(source)
        if maker is None:
            return False
        return (
            maker in self.fused
            or self._is_layer(maker)
            or (is_op(maker, *_CORES) and not self._is_function(maker))
        )

    def _is_function(self, node: ir.Node) -> bool:
        """Whether a node is, or is part of, a function of one tensor."""
        if not is_op(node, *ELEMENTWISE) or node in self.fused:
            return False
        return (
            len({self._root(value) for value in node.inputs if value is not None and not is_known(value)})
            == 1
        )

    def _root(self, value: ir.Value) -> ir.Value:
        return self.roots.get(value, value)

    def _add_function(self, node: ir.Node) -> None:
        (root,) = {self._root(value) for value in node.inputs if value is not None and not is_known(value)}
        self.roots[node.outputs[0]] = root

    def _fuse_residuals(self) -> None:
        if not self.config.rule("residual"):
            return
        for node in self.nodes:
            if not is_op(node, "Add") or node not in self.quantized or self._is_function(node):
                continue
            bare = []
            for value in node.inputs:
                maker = self._maker(value)
                if value is None or maker is None or not self._is_layer(maker) or maker in self.biases:
                    continue
                if value is self._end(maker) and len(value.uses()) == 1 and not value.is_graph_output():
                    bare.append(value)
            a, b = node.inputs[0], node.inputs[1]
            if not bare or a is None or b is None or not _same_shape(a, b):
                continue
            chosen = max(bare, key=lambda value: self.nodes.index(value.producer()))  # type: ignore[arg-type]
            self.inside.add(chosen)
            maker, other = self._maker(chosen), b if chosen is a else a
            if maker is not None and self.config.rule("feedback"):
                self.residuals[maker] = other
            self.decide("residual", str(chosen.name), f"no quantizer in front of the Add '{node.name}'")

    # Layers and sites -------------------------------------------------------------------------------------

    def _add_layers(self) -> None:
        for node in self.nodes:
            if node not in self.quantized or not self._is_layer(node):
                continue
            weight = constant(node.inputs[1])
            assert weight is not None
            assert node.inputs[0] is not None
            rows, group = _rows(node, weight), get_int(node, "group", 1)
            holder = self.biases.get(node, node)
            given = (
                next((constant(v) for v in holder.inputs if is_known(v)), None)
                if holder is not node
                else constant(node.inputs[2])
                if len(node.inputs) > 2
                else None
            )
            bias = np.zeros(rows, np.float32) if given is None else per_channel_bias(given, rows)
            assert bias is not None
            depthwise = is_op(node, "Conv") and group > 1 and weight.shape[1] == 1
            self.plan.layers[str(node.name)] = Layer(
                str(node.name), node.op_type, weight, bias, str(holder.name), str(node.inputs[0].name),
                str(self._end(node).name), rows, group, self.config.weight_bits, "asked", depthwise,
                is_op(node, "Gemm") and bool(get_int(node, "transB", 0)),
                str(self.residuals[node].name) if node in self.residuals else "",
            )  # fmt: skip

    def _operands(self, node: ir.Node) -> list[tuple[int, ir.Value]]:
        """The inputs of a quantized node that are values computed at run time."""
        count = (
            1 if is_op(node, *CODE_MOVERS, "BatchNormalization", *_POOLS) or self._is_layer(node) else None
        )
        return [
            (i, value)
            for i, value in enumerate(node.inputs[:count])
            if value is not None and not is_known(value)
        ]

    def _add_sites(self) -> None:
        wanted: set[ir.Value] = set()
        for node in self.nodes:
            if node not in self.quantized or node in self.fused:
                continue
            for index, value in self._operands(node):
                if value in self.inside:
                    continue
                if self._is_function(node) and self._root(value) is not value:
                    continue  # inside a function of another tensor
                wanted.add(value)
                self.plan.readers.add((str(node.name), index))
        for node in self.nodes:
            function = node in self.quantized and self._is_function(node)
            for output in node.outputs:
                ends = function and any(
                    user in self.quantized
                    and not (self._is_function(user) and self._root(output) is not output)
                    for user in output.consumers()
                )
                if ends:
                    wanted.add(output)
        ordered = [*self.graph.inputs, *(output for node in self.nodes for output in node.outputs)]
        bits = self.config.activation_bits
        for value in ordered:
            if value in wanted:
                name, signed = str(value.name), not self._is_never_negative(value)
                if name in self.plan.raw:
                    self.plan.sites[name] = Site(name, 8, False, "io", name)
                    self.decide("io", name, "uint8, as it is fed")
                    continue
                if not self.config.rule("unsigned"):
                    signed = True
                elif not signed:
                    self.decide("unsigned", name, "unsigned, zero point 0")
                self.plan.sites[name] = Site(name, bits, signed, "asked", name)
        # A function's inner values read the dequantized root, never each other's codes.
        self.plan.readers = {
            (name, index) for name, index in self.plan.readers
            if str(self._by_name(name).inputs[index].name) in self.plan.sites  # type: ignore[union-attr]
        }  # fmt: skip

    def _by_name(self, name: str) -> ir.Node:
        if not hasattr(self, "_names"):
            self._names = {str(node.name): node for node in self.nodes}
        return self._names[name]

    def _is_never_negative(self, value: ir.Value) -> bool:
        """Whether nothing in front of a tensor lets it be negative."""
        waiting, seen = [value], set()
        while waiting:
            given = waiting.pop()
            if given in seen:
                continue
            seen.add(given)
            node = given.producer()
            if node is None:
                if given.dtype in (ir.DataType.UINT8, ir.DataType.UINT16):
                    continue
                return False
            bounds = clip_bounds(node) if is_op(node, "Clip", "Relu") else None
            if bounds is not None and bounds[0] >= 0:
                continue
            if is_op(node, "Sigmoid", "HardSigmoid", "Softmax", "Exp", "Abs", "Softplus", "Sqrt"):
                continue
            if is_op(node, *CODE_MOVERS, *_POOLS, "MaxPool", "Clip", "Identity", "Dropout", "Cast"):
                if is_op(node, "Resize") and get_string(node, "mode", "nearest") == "cubic":
                    return False
                if is_op(node, "Pad") and len(node.inputs) > 2 and node.inputs[2] is not None:
                    fill = constant(node.inputs[2])
                    if fill is None or np.any(fill < 0):
                        return False
                waiting += [v for v in node.inputs[:1] if v is not None]
                continue
            if is_op(node, "Concat", "Add", "Mul", "Max"):
                for operand in node.inputs:
                    array = constant(operand)
                    if array is not None and np.any(array < 0):
                        return False
                    if array is None and operand is not None:
                        waiting.append(operand)
                continue
            return False
        return True

    def _share(self) -> None:
        plan = self.plan
        for node in self.nodes:
            if node not in self.quantized or node in self.fused:
                continue
            source = node.inputs[0]
            if is_op(node, *CODE_MOVERS) and source is not None and str(source.name) in plan.sites:
                for output in node.outputs:
                    if str(output.name) in plan.sites:
                        plan.join(str(source.name), str(output.name))
                        self.decide("share", str(output.name), f"the grid of '{source.name}', which it moves")
            elif is_op(node, "Concat"):
                names = [str(value.name) for value in node.inputs if value is not None]
                out = self._after(node.outputs[0])
                if all(name in plan.sites for name in names) and str(out.name) in plan.sites:
                    plan.concats[str(out.name)] = names

    def _after(self, value: ir.Value) -> ir.Value:
        """A value behind the Relu and Clip that belong to it."""
        while value in self.inside:
            user = next(iter(value.consumers()))
            if user not in self.fused:
                break
            value = user.outputs[0]
        return value

    # Bits -------------------------------------------------------------------------------------------------

    def _give_bits(self) -> None:
        config, plan = self.config, self.plan
        if config.rule("ends"):
            self._give_ends()
        for layer in plan.layers.values():
            if layer.depthwise and config.rule("depthwise") and layer.bits < 8:
                self._weights(layer, 8, "depthwise")
        if config.rule("gate"):
            self._give_gates()
        values = {str(value.name): value for node in self.nodes for value in node.outputs}
        for site in plan.sites.values():
            value = values.get(site.name)
            maker = None if value is None else self._maker(value)
            if value is None or config.activation_bits == 8:
                continue
            bare = maker is not None and self._is_layer(maker) and value is self._end(maker)
            if bare and config.rule("residual") and any(is_op(user, "Add") for user in value.consumers()):
                self._tensor(site.name, 8, "residual")
            elif plan.grid(site.name).signed and config.rule("trunk"):
                self._tensor(site.name, 8, "trunk")
            if config.rule("pool"):
                readers = [user for user in value.consumers() if user in self.quantized]
                if readers and all(self._is_global_pool(user) for user in readers):
                    self._tensor(site.name, 8, "pool")
                source = value.producer()
                if source is not None and self._is_global_pool(source):
                    self._tensor(site.name, 8, "pool")
        if config.rule("channels"):
            self._give_channels(values)
        for name, layer in plan.layers.items():
            asked = config.override(name, "weight_bits")
            if asked is not None:
                self._weights(layer, int(asked), "override")
            asked = config.override(name, "input_bits")
            if asked is not None and layer.x in plan.sites:
                grid = plan.grid(layer.x)
                grid.bits, grid.rule = int(asked), "override"
                self.decide("override", layer.x, f"{asked} bits")

    def _weights(self, layer: Layer, bits: int, rule: str) -> None:
        if layer.bits != bits:
            layer.bits, layer.rule = bits, rule
            self.decide(rule, layer.node, f"weights at {bits} bits")

    def _tensor(self, name: str, bits: int, rule: str) -> None:
        grid = self.plan.grid(name)
        if grid.bits < bits:
            grid.bits, grid.rule = bits, rule
            self.decide(rule, name, f"{bits} bits")

    def _give_ends(self) -> None:
        """First and last layers: no weighted layer, of those that exist at all, in front or behind."""
        bits = self.config.first_last
        layers = [node for node in self.nodes if self._is_layer(node)]
        after: set[ir.Value] = set()
        for node in self.nodes:
            fed = any(value in after for value in node.inputs if value is not None)
            if node in layers:
                if not fed and str(node.name) in self.plan.layers:
                    self._end_layer(node, bits, "first")
                after.update(node.outputs)
            elif fed:
                after.update(node.outputs)
        before: set[ir.Value] = set()
        for node in reversed(self.nodes):
            feeds = any(output in before for output in node.outputs)
            if node in layers:
                if not feeds and str(node.name) in self.plan.layers:
                    self._end_layer(node, bits, "last")
                feeds = True
            if feeds:
                before.update(value for value in node.inputs if value is not None)

    def _end_layer(self, node: ir.Node, bits: int, which: str) -> None:
        layer = self.plan.layers[str(node.name)]
        if layer.bits != bits:
            layer.bits, layer.rule = bits, "ends"
            self.decide("ends", layer.node, f"{which} layer: weights at {bits} bits")
        if layer.x in self.plan.sites and self.plan.grid(layer.x).bits < bits:
            self._tensor(layer.x, bits, "ends")

    def _is_global_pool(self, node: ir.Node) -> bool:
        if is_op(node, "GlobalAveragePool"):
            return True
        source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
        if not is_op(node, "AveragePool", "ReduceMean") or source is None:
            return False
        if is_op(node, "AveragePool"):
            rank = rank_of(output)
            return rank is not None and rank > 2 and all(dim == 1 for dim in dims_of(output)[2:])
        rank = rank_of(source)
        axes = integers(node.inputs[1]) if len(node.inputs) > 1 else get_ints(node, "axes")
        if rank is None or not axes:
            return False
        reduced = {from_front(axis, rank) for axis in axes}
        return rank > 2 and (reduced == set(range(2, rank)) or reduced == set(range(1, rank - 1)))

    def _give_gates(self) -> None:
        """Layers on one pixel whose result multiplies a larger image: squeeze and excitation."""
        for node in self.nodes:
            if not is_op(node, "Mul") or node not in self.quantized or self._is_function(node):
                continue
            for value in node.inputs:
                if value is None or rank_of(value) is None or len(dims_of(value)) < 3:
                    continue
                if not all(dim == 1 for dim in dims_of(value)[2:]):
                    continue
                waiting, seen = [value], set()
                while waiting:
                    maker = waiting.pop().producer()
                    if maker is None or maker in seen or maker not in self.quantized:
                        continue
                    seen.add(maker)
                    if self._is_global_pool(maker):
                        continue
                    name = str(maker.name)
                    if name in self.plan.layers and self.plan.layers[name].bits < 8:
                        self._weights(self.plan.layers[name], 8, "gate")
                    for operand in maker.inputs:
                        if operand is not None and str(operand.name) in self.plan.sites:
                            self._tensor(str(operand.name), 8, "gate")
                    waiting += [operand for operand in maker.inputs if operand is not None]

    def _give_channels(self, values: Mapping[str, ir.Value]) -> None:
        """One scale per channel in front of depthwise convolutions, where the producer can round to them."""
        plan = self.plan
        for site in plan.sites.values():
            value = values.get(site.name)
            if (
                value is None
                or plan.grid(site.name).bits == 8
                or len(plan.members(plan.leader(site.name))) > 1
            ):
                continue
            readers = list(value.consumers())
            wide = [
                user for user in readers if str(user.name) not in plan.layers
                or not plan.layers[str(user.name)].depthwise
            ]  # fmt: skip
            source = value.producer()
            while source in self.fused and source is not None and source.inputs[0] is not None:
                source = source.inputs[0].producer()
            made_by_layer = source is not None and is_op(source, "Conv") and self._is_layer(source)
            dims = dims_of(value) if rank_of(value) is not None else []
            if wide or not readers or not made_by_layer or value.is_graph_output() or len(dims) < 3:
                continue
            if isinstance(dims[1], int) and not site.signed:
                site.channels = dims[1]
                self.decide("channels", site.name, "one scale per channel")


def _rows(node: ir.Node, weight: Array) -> int:
    if is_op(node, "Conv"):
        return int(weight.shape[0])
    if is_op(node, "ConvTranspose"):
        return int(weight.shape[1] * get_int(node, "group", 1))
    return int(weight.shape[0 if is_op(node, "Gemm") and get_int(node, "transB", 0) else 1])


def per_channel_bias(array: Array | None, rows: int) -> Array | None:
    """A bias operand as float32 [rows]; None if it is something else."""
    if array is None or array.dtype != np.float32 or not np.all(np.isfinite(array)):
        return None
    if array.shape == (rows,):
        return array
    return per_channel(array, max(1, array.ndim), max(0, array.ndim - 1), rows)


def _same_shape(a: ir.Value, b: ir.Value) -> bool:
    if rank_of(a) is None or rank_of(b) is None or len(dims_of(a)) != len(dims_of(b)):
        return False
    return all(
        x == y or not (isinstance(x, int) or isinstance(y, int))
        for x, y in zip(dims_of(a), dims_of(b), strict=True)
    )
