"""Values inside a model, feed by feed: ONNX Runtime runs the part in front of them again.

Nothing is kept for all images in memory. What was computed for one layer is where the next one starts: it
lies in files, as far as their bound allows, and what is not there is computed again from further in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from lowbit.errors import LowBitError, ModelError, raise_if_out_of_memory
from lowbit.library import require_onnxruntime
from lowbit.quantizer.data import Spool

Array = npt.NDArray[Any]


def open_float(model: onnx.ModelProto, threads: int | None, *, optimize: bool = True) -> Any:
    """A session that computes quantizers as written: nothing is fused into integer kernels of its own."""
    onnxruntime = require_onnxruntime()
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_EXTENDED if optimize else level.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.enable_cpu_mem_arena = False  # an arena keeps the largest size it ever had
    options.log_severity_level = 4
    if threads:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
        raise_if_out_of_memory(error)
        raise ModelError(f"ONNX Runtime does not load the model: {str(error).splitlines()[0]}") from error


class Graph:
    """A model that can be cut into parts.

    Attributes:
        model: the model; it must not change.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.makers = {name: node for node in model.graph.node for name in node.output if name}
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.inputs = {value.name: value for value in model.graph.input}
        self._order = {id(node): i for i, node in enumerate(model.graph.node)}

    def behind(self, outputs: Iterable[str], known: Iterable[str]) -> tuple[list[onnx.NodeProto], set[str]]:
        """The nodes between known values and outputs, in order, and which values they read of those."""
        known = {*known, *self.inputs}
        waiting, nodes, read = list(outputs), {}, set()
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen or name in self.constants:
                continue
            seen.add(name)
            if name in known:
                read.add(name)
                continue
            node = self.makers.get(name)
            if node is None:
                raise LowBitError(f"nothing computes '{name}'")
            nodes[self._order[id(node)]] = node
            waiting.extend(used_by(node))
        return [nodes[i] for i in sorted(nodes)], read

    def part(self, outputs: Sequence[str], known: Iterable[str]) -> tuple[onnx.ModelProto, list[str]]:
        """The model of those nodes, and the names of its inputs."""
        nodes, read = self.behind(outputs, known)
        used = {name for node in nodes for name in used_by(node)}
        ends = [name for name in outputs if name not in read]
        graph = helper.make_graph(
            nodes,
            "part",
            [
                self.inputs[name]
                if name in self.inputs
                else helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
                for name in sorted(read)
            ],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ends],
            [self.constants[name] for name in sorted(used & self.constants.keys())],
        )
        part = helper.make_model(graph, opset_imports=self.model.opset_import)
        part.ir_version = self.model.ir_version
        part.functions.extend(self.model.functions)
        return part, sorted(read)


def used_by(node: onnx.NodeProto) -> list[str]:
    """What a node reads, what its subgraphs capture included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            inner = {name for inside in graph.node for name in inside.output}
            inner |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            names += [name for inside in graph.node for name in used_by(inside) if name not in inner]
            names += [value.name for value in graph.output if value.name not in inner]
    return names


class Tensors:
    """Values inside a model for every feed, some of which lie in files.

    Attributes:
        limit: bytes that the files of this model may take.
    """

    def __init__(self, spool: Spool, folder: Path, limit: int, threads: int | None) -> None:
        self.spool, self.folder, self.limit, self.threads = spool, folder, limit, threads
        self._stored: dict[str, tuple[Path, list[tuple[int, tuple[int, ...]]]]] = {}
        self._bytes: dict[str, int] = {}
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def known(self) -> set[str]:
        """The values that lie in files."""
        return set(self._stored)

    def run(
        self, graph: Graph, outputs: Sequence[str], keep: Iterable[str] = ()
    ) -> Iterator[dict[str, Array]]:
        """Computes values, one feed after the other.

        Args:
            graph: the model; values that lie in files must still be the same in it.
            outputs: the names wanted.
            keep: those of them to keep in files, if they fit.
        """
        fresh = [name for name in dict.fromkeys(outputs) if name not in self._stored]
        model, read = graph.part(fresh, self._stored)
        computed = [value.name for value in model.graph.output]
        session = open_float(model, self.threads) if computed else None
        del model  # the session has its own weights
        kept = [name for name in dict.fromkeys(keep) if name in fresh and name not in graph.inputs]
        writers = {name: _Writer(self.folder / f"{self._count + i}.bin") for i, name in enumerate(kept)}
        self._count += len(kept)
        try:
            for index in range(len(self.spool)):
                feed = self.spool.feed(index)
                given = {name: feed[name] if name in feed else self._load(name, index) for name in read}
                values = dict(given)
                if session is not None:
                    values |= zip(computed, _run(session, computed, given), strict=True)
                for name in outputs:
                    if name not in values:
                        values[name] = feed[name] if name in feed else self._load(name, index)
                used = sum(self._bytes.values()) + sum(writer.size for writer in writers.values())
                for name in list(writers):
                    if used + values[name].nbytes > self.limit or not writers[name].add(values[name]):
                        writers.pop(name).discard()
                    used += values[name].nbytes
                yield values
            for name, writer in writers.items():
                self._stored[name], self._bytes[name] = writer.close(), writer.size
            writers = {}
        finally:
            for writer in writers.values():
                writer.discard()

    def _load(self, name: str, index: int) -> Array:
        path, places = self._stored[name]
        offset, shape = places[index]
        count = int(np.prod(shape, dtype=np.int64))
        return np.fromfile(path, np.float32, count, offset=offset).reshape(shape)

    def forget_all_but(self, needed: set[str]) -> None:
        """Removes the files of values that nobody will ask for again."""
        for name in self.known - needed:
            self._stored.pop(name)[0].unlink(missing_ok=True)
            del self._bytes[name]


class _Writer:
    """A file of float32 arrays, one for each feed."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.places = path, 0, list[tuple[int, tuple[int, ...]]]()
        self._file = path.open("wb")

    def add(self, array: Array) -> bool:
        """Appends an array; False where that is impossible: values can always be computed again."""
        if array.dtype != np.float32:
            return False
        try:
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()
        except OSError:
            return False
        self.places.append((self.size, array.shape))
        self.size += array.nbytes
        return True

    def close(self) -> tuple[Path, list[tuple[int, tuple[int, ...]]]]:
        self._file.close()
        return self.path, self.places

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


def _run(session: Any, outputs: list[str], feed: dict[str, Array]) -> list[Array]:
    try:
        values: list[Array] = session.run(outputs, feed)
    except Exception as error:  # see open_float
        raise_if_out_of_memory(error)
        raise ModelError(f"ONNX Runtime cannot run the model on the calibration data: "
                         f"{str(error).splitlines()[0]}") from error  # fmt: skip
    return values
