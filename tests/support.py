"""Small helpers that several test folders share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.remote.native import RemoteNative

FLOAT_MATMULS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@functools.cache
def require_native():
    """The compiled module `lowbit._native`; skips with the reason when this checkout has not been built.

    Where LOWBIT_REMOTE is set, its nodes run on the machine that variable names (tests/remote/native.py).
    """
    native = pytest.importorskip(
        "lowbit._native", reason="lowbit's native module is not built", exc_type=ImportError
    )
    command = os.environ.get("LOWBIT_REMOTE")
    return RemoteNative(native, command) if command else native


@functools.cache
def stock_may_saturate() -> bool:
    """Whether stock's products of u8 and s8, where nothing prevents it, saturate at int16 on this machine.

    They do on x86-64 without VNNI. `session.x64quantprecision` reaches constant weights of optimized graphs
    only.
    """
    levels = require_native().isa_levels()
    return "sse41" in levels and not any("vnni" in level for level in levels)


def session_options(*, optimize: bool = True, threads: int = 1) -> ort.SessionOptions:
    """Options under which stock ONNX Runtime's integer kernels are exact on every x86-64 machine.

    Without `session.x64quantprecision` the U8S8 kernels saturate at int16 on machines that lack VNNI.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def stock_run(model: onnx.ModelProto | str | Path, feeds: Mapping[str, np.ndarray], *, optimize: bool = True):
    """Runs a model in ONNX Runtime as it is and returns its outputs in order."""
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = ort.InferenceSession(
        source, session_options(optimize=optimize), providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(feeds))


@functools.cache
def lowbit_library() -> str:
    """Absolute path of the custom-op library; skips when it is not built."""
    require_native()
    import lowbit

    return str(lowbit.get_library_path())


def lowbit_session(model: onnx.ModelProto | str | Path, *, threads: int = 1, optimize: bool = True):
    """A plain InferenceSession with lowbit's custom ops registered."""
    options = session_options(optimize=optimize, threads=threads)
    options.register_custom_ops_library(lowbit_library())
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def all_nodes(graph: onnx.GraphProto):
    """Every node of a graph, those of its subgraphs included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from all_nodes(attribute.g)


def interface(model: onnx.ModelProto) -> list[tuple]:
    """Names, element types and dims (numbers or symbols) of a model's inputs and outputs, in order."""

    def describe(value: onnx.ValueInfoProto) -> tuple:
        tensor = value.type.tensor_type
        dims = [d.dim_param or (d.dim_value if d.HasField("dim_value") else None) for d in tensor.shape.dim]
        return (value.name, tensor.elem_type, dims if tensor.HasField("shape") else None)

    initializers = {t.name for t in model.graph.initializer}
    return [
        *(("in", *describe(v)) for v in model.graph.input if v.name not in initializers),
        *(("out", *describe(v)) for v in model.graph.output),
    ]


class ClusterHere:
    """A stand-in for `lowbit.cluster.Cluster`: this process does what workers do, the last task first.

    Attributes:
        called: function, common value and task of each call.
    """

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def __call__(self, address: str, common: Any, **_: int) -> ClusterHere:
        self.common = common
        return self

    def each(self, function: Callable[[Any, Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for i, task in reversed(list(enumerate(tasks))):
            self.called.append((function, self.common, task))
            yield i, function(self.common, task)

    def close(self) -> None:
        pass
