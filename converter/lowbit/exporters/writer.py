"""Writing a graph: nodes, shared initializers, names, and the steps of float chains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowbit.ops.codes import Array


class Writer:
    """A graph in the making.

    Attributes:
        nodes: its nodes so far.
        initializers: its initializers by name.
        current: the node of the source whose counterparts are being written; names them.
        forms: for every node of the source, which ops say it.
    """

    def __init__(self, used: set[str], node_names: set[str]) -> None:
        """Starts an empty graph.

        Args:
            used: names that no new tensor may take.
            node_names: names of the source's nodes.
        """
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.current = ""
        self.forms: dict[str, Counter[str]] = {}
        self._used = used
        self._node_names = node_names
        self._shared: dict[tuple[Any, ...], str] = {}

    def constant(
        self, array: Array | np.generic | float, dtype: int | None = None, *, shared: bool = True
    ) -> str:
        """An initializer.

        Args:
            array: its value.
            dtype: its ONNX type where numpy has none, such as INT4.
            shared: whether equal initializers are one.
        """
        array = np.asarray(array, np.float32) if isinstance(array, float) else np.asarray(array)
        key = (array.dtype.str, array.shape, array.tobytes(), dtype)
        if shared and key in self._shared:
            return self._shared[key]
        name = self.fresh(f"{self.current}.constant" if self.current else "constant")
        if dtype is None:
            tensor = numpy_helper.from_array(np.array(array, order="C"), name)
        else:
            tensor = helper.make_tensor(name, dtype, array.shape, array.reshape(-1))
        self.initializers[name] = tensor
        if shared:
            self._shared[key] = name
        return name

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        output: str | None = None,
        main: bool = False,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Writes a node with one output and returns that.

        Args:
            op_type: its op.
            inputs: names of tensors.
            output: wanted name of the output.
            main: whether it takes the name of the lowbit node that it stands for.
            domain: its domain.
            attributes: those given as None are left out.
        """
        told = output or self.fresh(f"{self.current}.{op_type}")
        self.append(op_type, inputs, [told], main=main, domain=domain, attributes=attributes)
        return told

    def fresh(self, wanted: str) -> str:
        """A name that no tensor has."""
        name, count = wanted, 1
        while name in self._used:
            count += 1
            name = f"{wanted}.{count}"
        self._used.add(name)
        return name

    def is_written_last(self, tensor: str) -> bool:
        """Whether a tensor is the output of the last node, so that nobody reads it yet."""
        return bool(self.nodes) and tensor in self.nodes[-1].output

    def rename_last(self, name: str) -> str:
        """Gives the output of the last node another name, and returns that."""
        self.nodes[-1].output[0] = name
        return name

    def append(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        main: bool,
        domain: str,
        attributes: Mapping[str, Any],
    ) -> None:
        """Writes a node; arguments as in :meth:`node`."""
        name = self.current if main and self.current in self._node_names else f"{outputs[0]}.{op_type}"
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(
            helper.make_node(op_type, list(inputs), list(outputs), name=name, domain=domain, **given)
        )
        self.forms.setdefault(self.current, Counter())[op_type] += 1

    # ---- float chains: one node each, nothing where it would change nothing

    def scaled(self, tensor: str, factor: Array | np.generic) -> str:
        """``tensor * factor``."""
        return tensor if np.all(factor == 1) else self.node("Mul", [tensor, self.constant(factor)])

    def shifted(self, tensor: str, summand: Array | np.generic) -> str:
        """``tensor + summand``."""
        return tensor if not np.any(summand) else self.node("Add", [tensor, self.constant(summand)])

    def clipped(self, tensor: str, low: Array | float, high: Array | float) -> str:
        """``min(max(tensor, low), high)``, bounds () or per channel."""
        bounds = np.asarray(low, np.float32), np.asarray(high, np.float32)
        if bounds[0].ndim == bounds[1].ndim == 0:
            return self.node("Clip", [tensor, *map(self.constant, bounds)])
        above = self.node("Max", [tensor, self.constant(bounds[0])])
        return self.node("Min", [above, self.constant(bounds[1])])


def captured(node: onnx.NodeProto) -> set[str]:
    """The outer values that the subgraphs of a node read."""
    names: set[str] = set()
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            own = {name for inner in graph.node for name in inner.output}
            own |= {value.name for value in graph.input} | {t.name for t in graph.initializer}
            for inner in graph.node:
                names |= (set(inner.input) | captured(inner)) - own
            names |= {value.name for value in graph.output} - own
    return names - {""}
