"""Export: a lowbit model back into the words that other tools read.

One file per target (:mod:`~lowbit.exporters.qonnx`, :mod:`~lowbit.exporters.qdq`); what they share is
:mod:`~lowbit.exporters.exporter`. ``docs/export.md`` says what each of them can express.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from lowbit.errors import LowBitError, ModelError, raise_if_out_of_memory
from lowbit.exporters.exporter import Exporter, places_of
from lowbit.exporters.qdq import QdqExporter, weight_opset
from lowbit.exporters.qonnx import QonnxExporter
from lowbit.frontends.load import load_model
from lowbit.graph.opsets import raise_opset
from lowbit.proto.atomic import check_writable, write_atomically
from lowbit.proto.model_file import save_model
from lowbit.schemas import DOMAIN

TARGETS = ("qonnx", "qdq")


@dataclass(frozen=True)
class ExportedNode:
    """What became of one node of the lowbit model.

    Attributes:
        name: its name.
        op_type: its op.
        form: the ops that say it now, with their numbers.
    """

    name: str
    op_type: str
    form: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportResult:
    """What :func:`lowbit.export` returns.

    Attributes:
        model: the exported model.
        target: ``qonnx`` or ``qdq``.
        nodes: one entry per lowbit node.
        output: the file it was written to, if any.
    """

    model: onnx.ModelProto
    target: str
    nodes: list[ExportedNode]
    output: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {"target": self.target, "nodes": [asdict(node) for node in self.nodes]}


def export(
    model: str | Path | onnx.ModelProto,
    output: str | Path | None = None,
    *,
    to: str,
    sub_byte: bool = False,
    overwrite: bool = False,
) -> ExportResult:
    """Writes a lowbit model in another dialect; every element that it computes stays.

    Names, order, types and symbolic dims of the model's inputs and outputs stay; images are channels first
    again. The input is never modified.

    Args:
        model: a lowbit model, a file or a proto.
        output: where to write the result.
        to: ``qonnx``, which can say all but LowBitSoftmax and a LowBitResize that computes, or ``qdq``, which
            can say those that have no thresholds.
        sub_byte: with ``qdq``, store weights of up to 4 and 2 bits in ONNX's types of that width (opsets 21
            and 25), which not every ONNX Runtime runs; otherwise all codes take a byte.
        overwrite: replace ``output`` if it exists.

    Returns:
        The model, and what became of every lowbit node.

    Raises:
        ModelError: if the input cannot be read or is no lowbit model.
        UnsupportedError: if the target cannot say some node; the message names all of them.
        OutputError: if the output cannot be written.
    """
    if to not in TARGETS:
        raise LowBitError(
            f"to must be one of {', '.join(TARGETS)}, got '{to}'; for minimal builds there is export_mobile"
        )
    if sub_byte and to != "qdq":
        raise LowBitError("sub_byte is about the element types of qdq; qonnx keeps weights as float32")
    target = None if output is None else Path(output)
    if target is not None:
        inputs = () if isinstance(model, onnx.ModelProto) else (Path(model),)
        check_writable(target, overwrite=overwrite, inputs=inputs)
    label = "the given model" if isinstance(model, onnx.ModelProto) else str(model)
    source = load_model(model)
    if not any(node.domain == DOMAIN for node in source.model.graph):
        raise ModelError(
            f"{label}: is no lowbit model, it has no node of {DOMAIN}; make one with `lowbit convert` first"
        )
    lowbit_model = ir.to_proto(raise_opset(source.model, label))
    if sub_byte:
        lowbit_model = _for_narrow_weights(lowbit_model, label)
    exporter = _exporter(to, lowbit_model, sub_byte=sub_byte)
    exported = exporter.export()
    _write_metadata(exported, lowbit_model, source.sha256, to)
    try:
        onnx.checker.check_model(exported)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{label}: its export is not valid ONNX: {str(error).splitlines()[0]}") from error
    if target is not None:
        write_atomically(target, lambda path: save_model(exported, path, "exported"), overwrite=overwrite)
    nodes = [
        ExportedNode(node.name, node.op_type, dict(exporter.forms.get(node.name or node.output[0], {})))
        for node in lowbit_model.graph.node
        if node.domain == DOMAIN
    ]
    return ExportResult(exported, to, nodes, target)


def _exporter(to: str, model: onnx.ModelProto, *, sub_byte: bool) -> Exporter:
    places = places_of(model)
    return QonnxExporter(model, places) if to == "qonnx" else QdqExporter(model, places, sub_byte=sub_byte)


def _for_narrow_weights(model: onnx.ModelProto, label: str) -> onnx.ModelProto:
    """The lowbit model in an opset that has element types for weights of its widths."""
    widths = [a.i for node in model.graph.node for a in node.attribute if a.name == "w_bits"]
    wanted = weight_opset(widths)
    present = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if present >= wanted:
        return model
    try:
        raised = onnx.version_converter.convert_version(model, wanted)
    except Exception as error:  # the version converter's exceptions are of many kinds
        raise_if_out_of_memory(error)
        raise ModelError(
            f"{label}: cannot be brought to opset {wanted}, which has weights of {min(widths)} bits: "
            f"{str(error).strip().splitlines()[0]}; export without --sub-byte"
        ) from error
    raised.metadata_props.MergeFrom(model.metadata_props)
    return raised


def _write_metadata(exported: onnx.ModelProto, model: onnx.ModelProto, sha256: str, to: str) -> None:
    """What the lowbit model's users wrote, and where the export comes from."""
    from lowbit import __version__

    kept = {e.key: e.value for e in model.metadata_props if not e.key.startswith("lowbit.")}
    kept |= {
        "lowbit.version": str(__version__),
        "lowbit.exported_to": to,
        "lowbit.source_sha256": sha256,
    }
    onnx.helper.set_model_props(exported, kept)
