"""The cost guard: what would only add conversions around float nodes stays with ONNX Runtime.

Regions that share tensors of codes form an island. An island of Add, Mul, Concat, GlobalAveragePool and ops
that move values gains nothing: ONNX Runtime runs these on codes as fast, in the layout of the nodes around
them, and at the edges of an island codes change their layout. One op of another kind on whole images, a
convolution, a matrix product, a pool, a function, makes the island worth it.

Ratios to stock ONNX Runtime of such islands between nodes that stay, images of [32, 56, 56] and
[128, 14, 14], one thread of an AMD EPYC with AVX-512 VNNI: Add 1.04 and 1.07, GlobalAveragePool 1.23 and
1.36, a gate (GlobalAveragePool, Sigmoid, Mul) 2.14 and 1.12; but AveragePool 3x3 0.11 and 0.09, Softmax 0.31
and 0.33, linear Resize 0.65 and 0.55, Sigmoid 0.68 and 0.76, a depthwise convolution 0.67 and 0.94.

Pools alone stay between the edges of the graph, too, where lowbit has little to do for what the change of
layout costs. There, images and volumes: GlobalAveragePool 1.1 to 2.7; AveragePool of 2, 3 and 4 channels
1.55, 1.3 and 0.97, of 7 and 12 channels 0.45 and 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import onnx_ir as ir

from lowbit.graph.constants import is_known
from lowbit.graph.normal_form import dims_of, is_dequantize, is_op, is_quantize, is_quantizer
from lowbit.graph.opsets import has_code_kernel
from lowbit.passes.questions import is_question
from lowbit.rewrites.dequantize import DequantizeRegion
from lowbit.rewrites.quantize import EntranceRegion
from lowbit.rewrites.rule import Region

GAINS_NOTHING = (
    "converting it would only add conversions around float nodes: ONNX Runtime runs it on codes as fast, and "
    "what shares its codes, too; --all converts it"
)
_WORTHWHILE = ("AveragePool", "Conv", "ConvTranspose", "Gemm", "MatMul", "MaxPool")
"""Ops that lowbit runs faster at every size."""
_AS_FAST = ("Add", "Concat", "GlobalAveragePool", "Mul")
"""Ops that ONNX Runtime runs on codes as fast."""
_FEWEST_CHANNELS = 4
"""Channels from which on an AveragePool alone is faster."""
_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)


def worthless_regions(graph: ir.Graph, regions: Mapping[ir.Node, Region]) -> set[ir.Node]:
    """The cores of regions whose island gains nothing: beside a node that stays, or pools alone.

    Args:
        graph: the graph.
        regions: all regions by their last node.
    """
    covered = {node for region in regions.values() for node in region.nodes}
    islands = _Islands()
    inner = [(sink, region) for sink, region in regions.items() if not _is_edge(region)]
    for sink, region in inner:
        for codes in (*region.codes, *sink.outputs):
            if not is_known(codes):
                islands.join(region.core, codes)
    gaining = {islands.find(region.core) for sink, region in inner if _gains(graph, sink, region)}
    beside = {
        islands.find(region.core)
        for sink, region in inner
        if any(_comes_from_kept(codes, covered) for codes in region.codes)
        or any(_goes_to_kept(codes, covered) for codes in sink.outputs)
    }
    pools = {islands.find(region.core) for _, region in inner if _is_slow_pool(region.core)}
    others = {
        islands.find(region.core)
        for sink, region in inner
        if not _is_slow_pool(region.core) and not _moves(sink, region)
    }
    idle = (beside - gaining) | (pools - others)
    return {region.core for _, region in inner if islands.find(region.core) in idle}


def _is_edge(region: Region) -> bool:
    return isinstance(region, (EntranceRegion, DequantizeRegion))


def _gains(graph: ir.Graph, sink: ir.Node, region: Region) -> bool:
    """Whether ONNX Runtime does not run a region on codes as it is, or does so more slowly than lowbit."""
    core = region.core
    if is_op(core, *_WORTHWHILE):
        return True
    if _has_one_pixel(core.outputs[0]):
        return False
    if any(codes.dtype not in _BYTES for codes in region.codes):
        return True
    if _moves(sink, region):
        assert core.inputs[0] is not None
        dtype = core.inputs[0].dtype
        return dtype is None or not has_code_kernel(graph, core, dtype)
    if not is_op(core, *_AS_FAST) or not is_quantize(sink) or sink.outputs[0].dtype not in _BYTES:
        return not is_op(core, "ArgMax", "ArgMin")
    behind = [node for node in region.nodes if node is not core]
    return not all(is_quantize(node) or is_op(node, "Relu", "Clip") for node in behind)


def _moves(sink: ir.Node, region: Region) -> bool:
    """Whether a region is an op that moves codes."""
    return sink is region.core and sink.inputs[0] in region.codes


def _is_slow_pool(node: ir.Node) -> bool:
    """Whether a node is a pool that is slower by itself."""
    if is_op(node, "AveragePool"):
        dims = [] if node.outputs[0].shape is None else dims_of(node.outputs[0])
        return len(dims) > 2 and (dims[1] or _FEWEST_CHANNELS) < _FEWEST_CHANNELS
    return is_op(node, "GlobalAveragePool", "ReduceMean")


def _has_one_pixel(value: ir.Value) -> bool:
    """Whether a value holds one number per channel, such as the gate of a squeeze-and-excitation block."""
    dims = [] if value.shape is None else dims_of(value)
    return len(dims) > 2 and all(dim == 1 for dim in dims[2:])


def _comes_from_kept(codes: ir.Value, covered: Set[ir.Node]) -> bool:
    maker = codes.producer()
    while maker is not None and (is_quantizer(maker) or is_op(maker, "Clip")) and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker is not None and maker not in covered and not is_known(codes)


def _goes_to_kept(codes: ir.Value, covered: Set[ir.Node]) -> bool:
    readers = [
        reader
        for user in codes.consumers()
        for reader in (user.outputs[0].consumers() if is_dequantize(user) else [user])
    ]
    return any(reader not in covered and not is_question(reader) for reader in readers)


class _Islands:
    """Disjoint sets of nodes and tensors."""

    def __init__(self) -> None:
        self._parents: dict[object, object] = {}

    def find(self, member: object) -> object:
        """What stands for the set of a member."""
        root = member
        while (parent := self._parents.setdefault(root, root)) is not root:
            root = parent
        while self._parents[member] is not root:
            self._parents[member], member = root, self._parents[member]
        return root

    def join(self, a: object, b: object) -> None:
        """Makes one set of two."""
        self._parents[self.find(a)] = self.find(b)
