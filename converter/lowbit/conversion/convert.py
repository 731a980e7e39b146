"""Conversion: a quantized ONNX model in, a lowbit model out, no number changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    RemoveUnusedOpsetsPass,
    TopologicalSortPass,
)

from lowbit.conversion.attempts import Attempt, Staying, convert_what_holds
from lowbit.conversion.check import check_converted
from lowbit.conversion.picture_input import take_pictures
from lowbit.errors import ModelError, UnsupportedError
from lowbit.frontends import qdq, qonnx, qoperator, quark
from lowbit.frontends.input_quant import InputQuant, parse_input_quant, quantize_inputs
from lowbit.frontends.load import Source, drop_overridable_initializers, load_model
from lowbit.graph.quantizers import add_definitions
from lowbit.graph.subgraphs import remove_unused_nodes
from lowbit.library import require_onnxruntime
from lowbit.lowering.lowering import Lowering, name_uniquely
from lowbit.passes.scales import absorb_scales
from lowbit.proto.atomic import check_writable, write_atomically
from lowbit.proto.model_file import save_model
from lowbit.proto.report import NOT_QUANTIZED, Report, Result
from lowbit.rewrites.apply import Failed, apply_rules, attach_report


def convert(
    model: str | Path | onnx.ModelProto,
    output: str | Path | None = None,
    *,
    strict: bool = False,
    round_bias: bool = False,
    ap: bool = False,
    all_regions: bool = False,
    input_quant: str | Sequence[str] = (),
    keep_float16: bool = False,
    preprocess: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> Result:
    """Converts a quantized ONNX model into one whose quantized regions are lowbit nodes.

    What cannot be computed exactly stays as it was and is listed in the report with its reason. So does what
    fails: where a rule or the check of the result does, the nodes around the failure stay, with a warning.
    The input is never modified; names, order, types and symbolic dims of the model's inputs and outputs stay,
    but for the input that ``preprocess`` is about.

    Args:
        model: a file or a proto in one of the forms that README.md lists.
        output: where to write the result; it appears there only after it was verified.
        strict: raise if a node that could work on codes stays in float, or if anything fails; ops that lowbit
            has no form of, such as Softmax, do not count.
        round_bias: round a bias that is off the accumulator's grid onto it. Faster, but changes numbers; the
            report says by how much.
        ap: write APConv / APGemm everywhere, not only where an operand is bipolar.
        all_regions: convert also what gains nothing on a CPU: a few nodes that ONNX Runtime runs on codes as
            well, such as an Add or a pool, between nodes that stay.
        input_quant: quantizers of float inputs that the model does not say itself, each written as
            ``[NAME:]scale=1/255,bits=8,unsigned``. The model then rounds what it is fed.
        keep_float16: follow a model by the letter that computes in float16 around its quantizers, so that its
            convolutions stay. Otherwise it is read as if it said float32, and they become integer ones; how
            far that moves a number is bounded, which :func:`verify` checks.
        preprocess: how pictures become the model's one input, a spec as ``--preprocess`` takes it. The model
            then takes pictures, uint8 [N, height, width, 3] (RGB) of any size, and prepares them in its first
            node, which gives the bits that Pillow gives.
        overwrite: replace ``output`` if it exists.
        verify: check, load and run the result against the definitions of its ops.

    Returns:
        The model and the report.

    Raises:
        ModelError: if the input cannot be read, or ONNX Runtime refuses it and its conversion.
        UnsupportedError: if ``strict`` finds a node left in float.
        OutputError: if the output cannot be written.
        LowBitError: if ``preprocess`` is no spec or does not fit the model's input; if there is no ONNX
            Runtime, which computes tables of functions and checks the result.
    """
    require_onnxruntime()
    stated = [input_quant] if isinstance(input_quant, str) else list(input_quant)
    quantizers = [parse_input_quant(text) for text in stated]
    target = None if output is None else Path(output)
    if target is not None:
        inputs = () if isinstance(model, onnx.ModelProto) else (Path(model),)
        check_writable(target, overwrite=overwrite, inputs=inputs)
    source = load_model(model, widen_float16=not keep_float16)
    options: dict[str, Any] = {
        "strict": strict,
        "round_bias": round_bias,
        "ap": ap,
        "all_regions": all_regions,
        "input_quant": stated,
    }
    if preprocess is not None:
        options["preprocess"] = preprocess

    def converted(source: Source) -> tuple[onnx.ModelProto, Report]:
        stated = {**options, "widen_float16": source.widened}

        def attempt(model: ir.Model, staying: Staying, failed: Failed) -> Attempt:
            return _convert_once(source, model, staying, failed, quantizers, stated)

        return convert_what_holds(source, attempt, strict=strict, verify=verify)

    proto, report = converted(source)
    if source.widened and not report.converted:
        proto, report = converted(load_model(model))  # what gains nothing in float32 stays as it was
    if strict:
        _refuse_float_islands(report)
    if preprocess is not None:
        take_pictures(proto, preprocess, report)
        if verify:
            check_converted(proto)
    if target is not None:
        write_atomically(target, lambda path: save_model(proto, path, "converted"), overwrite=overwrite)
    return Result(proto, report, target)


def _convert_once(
    source: Source,
    model: ir.Model,
    staying: Staying,
    failed: Failed,
    quantizers: Sequence[InputQuant],
    options: dict[str, Any],
) -> Attempt:
    """One conversion of a source from beginning to end, in its graph."""
    overridable = drop_overridable_initializers(model.graph)
    interface = _interface(model.graph)
    names = {value.name for node in model.graph for value in (*node.inputs, *node.outputs) if value}
    report = attach_report(model.graph, staying)
    if overridable:
        report.warn(
            f"{overridable} initializers were graph inputs too; their values were taken as constants and can "
            "no longer be fed"
        )
    if source.widened:
        report.warn(
            "what the model computes in float16 is computed in float32, so that its products are integer "
            "ones; --keep-float16 leaves it as it is"
        )
    quark.normalize(model)
    qonnx.normalize(model)
    names |= {value.name for node in model.graph for value in node.outputs}  # codes of QONNX among them
    quantize_inputs(model.graph, quantizers, report)
    qoperator.normalize(model)
    qdq.normalize(model)
    absorb_scales(model.graph)
    lowering = apply_rules(
        model.graph,
        report,
        failed,
        round_bias=options["round_bias"],
        ap=options["ap"],
        all_regions=options["all_regions"],
    )
    remove_unused_nodes(model)
    lowering.check_replaced()
    add_definitions(model)
    InlinePass()(model)  # quantizers that no rule took, as standard ops
    _clean(model)
    name_uniquely(model.graph, lowering.origins)
    outputs = [ir.to_proto(value) for value in model.graph.outputs]
    _restore_interface(model.graph, interface)
    _write_metadata(source, model, lowering, options, names)
    proto = _serialize(model)
    # ONNX Runtime takes the type of a lowbit node of which it knows no rank from here.
    untyped = {info.name for info in proto.graph.output if not info.HasField("type")}
    proto.graph.value_info.extend(info for info in outputs if info.name in untyped and info.HasField("type"))
    return Attempt(proto, report, outputs)


def _interface(graph: ir.Graph) -> list[tuple[ir.TypeProtocol | None, ir.Shape | None]]:
    """Types and shapes of inputs and outputs as the model states them, before inference adds to them."""
    return [(v.type, None if v.shape is None else v.shape.copy()) for v in (*graph.inputs, *graph.outputs)]


def _restore_interface(
    graph: ir.Graph, interface: list[tuple[ir.TypeProtocol | None, ir.Shape | None]]
) -> None:
    for value, (dtype, shape) in zip((*graph.inputs, *graph.outputs), interface, strict=True):
        value.type, value.shape = dtype, shape


def _clean(model: ir.Model) -> None:
    remove_unused_nodes(model)
    RemoveUnusedOpsetsPass()(model)
    TopologicalSortPass()(model)


def _write_metadata(
    source: Source,
    model: ir.Model,
    lowering: Lowering,
    options: dict[str, Any],
    original: set[str | None],
) -> None:
    """Where the model comes from, in metadata_props, for ``verify``, ``inspect`` and the curious."""
    from lowbit import __version__

    if not lowering.origins and "lowbit.provenance" in model.metadata_props:
        return  # a lowbit model in which nothing was left to do
    present = {value.name for node in model.graph for value in node.outputs}
    provenance = {
        "version": 1,
        "source": {"file": source.path.name if source.path else None, "sha256": source.sha256},
        "values": {
            name: entry
            for name, entry in lowering.provenance.items()
            if name in present and entry["source"] in original
        },
        "nodes": lowering.origins,
    }
    properties = model.metadata_props
    properties["lowbit.version"] = str(__version__)
    properties["lowbit.source_sha256"] = source.sha256
    properties["lowbit.options"] = json.dumps(options)
    properties["lowbit.provenance"] = json.dumps(provenance, separators=(",", ":"))


def _serialize(model: ir.Model) -> onnx.ModelProto:
    try:
        proto = ir.to_proto(model)
    except ir.serde.SerdeError as error:
        cause = error.__cause__ or error
        raise ModelError(f"the model contradicts itself, it cannot be written: {cause}") from error
    # Initializers say their own types and shapes.
    told = {tensor.name for tensor in proto.graph.initializer}
    left = [info for info in proto.graph.value_info if info.name not in told]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(left)
    return proto


def _refuse_float_islands(report: Report) -> None:
    if not report.quantized and not report.converted:
        raise UnsupportedError(f"strict: {NOT_QUANTIZED}")
    left = report.islands
    if left:
        lines = "; ".join(f"{node.op_type} '{node.name}': {node.reason}" for node in left[:10])
        more = f" and {len(left) - 10} more" if len(left) > 10 else ""
        raise UnsupportedError(f"strict: {len(left)} nodes cannot be converted exactly: {lines}{more}")
