"""A model in stock ONNX Runtime, with the values inside it exposed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import onnx
from onnx import helper

from lowbit.errors import ModelError
from lowbit.library import require_onnxruntime
from lowbit.sessions.session import open_session, run_session

if TYPE_CHECKING:
    import onnxruntime

Array = npt.NDArray[Any]

MOVING_OPS = (
    "Clip",
    "MaxPool",
    "Reshape",
    "Transpose",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Identity",
    "Slice",
)
"""Ops whose output holds the codes of their first input, in its type."""


class Observed:
    """A model in ONNX Runtime with values inside it as further outputs, in the first form that runs.

    Further outputs change what the optimizer fuses, and without it ONNX Runtime misses kernels: either can
    make a model fail that runs as it is. So a model is opened with them and optimized, with them as written,
    and at last as it is, when only its outputs are to be had.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        wanted: set[str],
        open_form: Callable[[onnx.ModelProto, onnxruntime.SessionOptions], onnxruntime.InferenceSession],
        threads: int | None,
        *,
        optimize: bool = True,
    ) -> None:
        """Exposes the values ``wanted`` besides the outputs; without ``optimize`` only as written."""
        outputs = {value.name for value in model.graph.output}
        produced = {name for node in model.graph.node for name in node.output}
        exposed, self.renamed = expose(model, sorted((wanted & produced) - outputs))
        self.forms = [(exposed, True), (exposed, False), (model, True)] if optimize else [(exposed, False)]
        self.open_form, self.threads = open_form, threads
        self.session: onnxruntime.InferenceSession | None = None
        self.failed: list[ModelError] = []  # why, for each form that did not run

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The wanted values and the outputs, by their names in the model.

        Raises:
            ModelError: of the last form, where none runs.
        """
        while True:
            model, optimize = self.forms[len(self.failed)]
            try:
                if self.session is None:
                    self.session = self.open_form(model, exact_options(self.threads, optimize=optimize))
                values = run_session(self.session, feed)
                return {self.renamed.get(name, name): value for name, value in values.items()}
            except ModelError as error:
                if len(self.failed) + 1 == len(self.forms):
                    raise
                self.failed.append(error)
                self.session = None


class Stock:
    """A model as ONNX Runtime runs it today, at full optimization if it can.

    Some models it loads, or runs, only unoptimized (2-bit weights among them): then it follows the graph as
    written, convolutions in float, and ``notes`` says so.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        wanted: set[str],
        threads: int | None,
        notes: list[str],
        *,
        optimize: bool = True,
    ) -> None:
        """Exposes the values ``wanted`` besides the outputs."""
        self.observed = Observed(model, wanted, open_session, threads, optimize=optimize)
        self.notes = notes

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs, the wanted values and the outputs, by their names in the model.

        Only inputs and outputs where ONNX Runtime runs the model as it is alone, only the inputs where it
        does not run it at all; a note says so.
        """
        try:
            values = self.observed.run(feed)
        except ModelError as error:
            self._note(f"not compared, nodes are checked against their definitions only, because: {error}")
            return dict(feed)
        failed = self.observed.failed
        if len(failed) == 1:
            # Refused at loading, or by a kernel that does not take what the optimizer fused into it.
            self._note(f"compared without optimization, convolutions in float, because: {failed[0]}")
        elif failed:
            self._note(
                "its inner values are not to be had, outputs alone are compared with it and nodes with their "
                f"definitions, because: {failed[-1]}"
            )
        return {**feed, **values}

    def _note(self, text: str) -> None:
        note = f"stock ONNX Runtime: {text}"
        if note not in self.notes:
            self.notes.append(note)


def exact_options(threads: int | None = None, *, optimize: bool = True) -> onnxruntime.SessionOptions:
    """Options for exact results: without x64quantprecision ONNX Runtime's u8 x s8 saturates on AVX2."""
    ort = require_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised; printing them as well helps nobody
    options.add_session_config_entry("session.x64quantprecision", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def expose(model: onnx.ModelProto, names: Iterable[str]) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of a model with inner values as outputs, and {output name: value name} of those renamed.

    4- and 2-bit codes come out as int8 or uint8 through a Cast: numpy cannot hold them.
    """
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    narrow = _narrow_values(model)
    renamed = {}
    for name in names:
        output = name
        if name in narrow:
            output = f"{name}/8bit"
            renamed[output] = name
            exposed.graph.node.append(helper.make_node("Cast", [name], [output], to=narrow[name]))
        exposed.graph.output.append(onnx.ValueInfoProto(name=output))
    return exposed, renamed


def _narrow_values(model: onnx.ModelProto) -> dict[str, int]:
    """Outputs of quantizers to 4 or 2 bits, each with the 8-bit type that holds them."""
    signed, unsigned = ("INT4", "INT2"), ("UINT4", "UINT2")
    holder = {
        getattr(onnx.TensorProto, kind): onnx.TensorProto.INT8 if kind in signed else onnx.TensorProto.UINT8
        for kind in (*signed, *unsigned)
        if hasattr(onnx.TensorProto, kind)
    }
    types = {init.name: init.data_type for init in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            types.update((node.output[0], a.t.data_type) for a in node.attribute if a.name == "value")
    found: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            kinds = [a.i for a in node.attribute if a.name == "output_dtype"]
            kinds += [types[name] for name in node.input[2:3] if name in types]
            found.update((node.output[0], holder[kind]) for kind in kinds if kind in holder)
        elif node.op_type in MOVING_OPS and node.input and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    return found
