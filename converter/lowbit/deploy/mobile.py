"""Everything that an app with a minimal build of ONNX Runtime needs of a lowbit model, in one folder.

| file | what it is |
| --- | --- |
| NAME.ort | the model, optimized when it was exported: what an app should ship |
| NAME.with_runtime_opt.ort | the model with optimizations that ONNX Runtime may replay on the device |
| required_operators.config | the ops, types and kernels that both files need, for both builds |
| BUILD.md | the commands that build ONNX Runtime and lowbit for them |
| manifest.json | sizes, checksums, inputs and outputs, where everything comes from |

The folder appears only after both files were opened in ONNX Runtime and gave the outputs of the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.deploy.build_commands import build_commands
from lowbit.deploy.folder import MANIFEST, appear, check_folder, digest
from lowbit.deploy.operators import operators_config
from lowbit.deploy.ort_file import STYLES, options_of, prepared, write_ort
from lowbit.errors import LowBitError, ModelError, OutputError
from lowbit.frontends.load import load_model
from lowbit.library import require_onnxruntime
from lowbit.proto.atomic import temporary_folder
from lowbit.proto.feeds import random_feeds
from lowbit.sessions.session import open_session, run_session

if TYPE_CHECKING:
    import onnx

    from lowbit.proto.feeds import Feeds

CONFIG = "required_operators.config"
COMMANDS = "BUILD.md"


@dataclass(frozen=True)
class MobileFile:
    """One file of the folder.

    Attributes:
        name: its name.
        kind: ``model``, ``operators`` or ``commands``.
        bytes: its size.
        sha256: its checksum.
        style: of a model: ``fixed`` or ``runtime``.
    """

    name: str
    kind: str
    bytes: int
    sha256: str
    style: str | None = None


@dataclass(frozen=True)
class TensorInfo:
    """An input or an output of the model.

    Attributes:
        name: its name.
        type: its element type as ONNX Runtime says it, such as ``float``.
        shape: numbers; names of symbolic dims; None for dims that the model says nothing about.
    """

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class MobileExport:
    """What :func:`export_mobile` wrote.

    Attributes:
        folder: where everything is.
        source: the file it was made from, or "" for a ModelProto.
        source_sha256: its checksum.
        files: all files but the manifest.
        inputs: of the model.
        outputs: of the model.
        operators: the lowbit ops in the model, and how often.
        elements: the output elements that were compared with the model's and are equal.
    """

    folder: Path
    source: str
    source_sha256: str
    files: list[MobileFile] = field(default_factory=list)
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)
    elements: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the manifest's own, with the folder."""
        return {"folder": str(self.folder), **self.manifest()}

    def manifest(self) -> dict[str, Any]:
        """What manifest.json holds."""
        onnxruntime = require_onnxruntime()

        from lowbit import __version__

        return {
            "format": 1,
            "lowbit": str(__version__),
            "onnxruntime": onnxruntime.__version__,
            "source": {"file": self.source, "sha256": self.source_sha256},
            "files": [{k: v for k, v in asdict(file).items() if v is not None} for file in self.files],
            "inputs": [asdict(value) for value in self.inputs],
            "outputs": [asdict(value) for value in self.outputs],
            "operators": self.operators,
            "verified_elements": self.elements,
        }


def export_mobile(
    model: str | os.PathLike[str] | onnx.ModelProto,
    folder: str | os.PathLike[str],
    *,
    shapes: Mapping[str, list[int]] | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> MobileExport:
    """Writes what an app with a minimal build of ONNX Runtime needs of a lowbit model.

    Args:
        model: a lowbit model, a file or a proto.
        folder: where to write everything; it appears whole or not at all.
        shapes: sizes of inputs with symbolic dims, for the comparison; a symbolic batch counts as 1.
        seed: of the random inputs of the comparison.
        overwrite: replace ``folder`` if it is an earlier export.

    Returns:
        What was written, as in the manifest.

    Raises:
        ModelError: if the input cannot be read, is no lowbit model, or holds what an .ort file cannot; if
            ONNX Runtime refuses the result or computes something else from it.
        OutputError: if the folder cannot be written.
        LowBitError: if sizes are missing that the comparison needs.
    """
    target = Path(folder)
    check_folder(target, overwrite=overwrite)
    source = load_model(Path(model) if isinstance(model, (str, os.PathLike)) else model)
    name = source.path.name if source.path else ""
    proto, operators = prepared(source)
    feed = _feed(proto, seed, shapes)
    stem = source.path.name.removesuffix(".onnx") if source.path else proto.graph.name or "model"
    try:
        with temporary_folder(target) as beside:
            staged = beside / "export"
            staged.mkdir()
            models = {style: staged / f"{stem}{ending}" for style, ending in STYLES.items()}
            for style, path in models.items():
                write_ort(proto, path, style)
            inputs, outputs, elements = _verified(proto, models, feed)
            config = operators_config(list(models.values()), proto)
            (staged / CONFIG).write_text(config, encoding="utf-8")
            names = {style: path.name for style, path in models.items()}
            commands = build_commands(names, CONFIG, classical="\nai.onnx.ml;" in config)
            (staged / COMMANDS).write_text(commands, encoding="utf-8")
            files = [
                *(_described(path, "model", style) for style, path in models.items()),
                _described(staged / CONFIG, "operators"),
                _described(staged / COMMANDS, "commands"),
            ]
            export = MobileExport(target, name, source.sha256, files, inputs, outputs, operators, elements)
            text = json.dumps(export.manifest(), indent=2) + "\n"
            (staged / MANIFEST).write_text(text, encoding="utf-8")
            appear(staged, target, overwrite=overwrite)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror or error}") from error
    return export


def _described(path: Path, kind: str, style: str | None = None) -> MobileFile:
    return MobileFile(path.name, kind, path.stat().st_size, digest(path), style)


def _feed(proto: onnx.ModelProto, seed: int, shapes: Mapping[str, list[int]] | None) -> Feeds:
    names = {value.name for value in proto.graph.input}
    for name in shapes or {}:
        if name not in names:
            raise LowBitError(f"--shape {name}: the model's inputs are {', '.join(sorted(names))}")
    return random_feeds(proto, seed, shapes)


def _verified(
    proto: onnx.ModelProto, models: Mapping[str, Path], feed: Feeds
) -> tuple[list[TensorInfo], list[TensorInfo], int]:
    """The interface of the written files, after both of them gave what the model gives."""
    original = open_session(proto, options_of("fixed"), without=["NchwcTransformer"])
    expected = run_session(original, feed)
    wanted = _infos(original.get_inputs()), _infos(original.get_outputs())
    for style, path in models.items():
        opened = open_session(path, options_of(style, replay=True))
        found = _infos(opened.get_inputs()), _infos(opened.get_outputs())
        if found != wanted:
            raise ModelError(f"{path.name}: its inputs and outputs are {found}, those of the model {wanted}")
        got = run_session(opened, feed)
        for name, value in expected.items():
            if not np.array_equal(value, got[name], equal_nan=value.dtype.kind == "f"):
                different = int(np.sum(value != got[name])) if value.shape == got[name].shape else value.size
                raise ModelError(
                    f"{path.name}: {different} of {value.size} elements of the output '{name}' differ from "
                    "the model's; nothing was written. This is a defect of lowbit or of ONNX Runtime"
                )
    return *wanted, sum(value.size for value in expected.values())


def _infos(values: Any) -> list[TensorInfo]:
    return [
        TensorInfo(str(value.name), str(value.type).removeprefix("tensor(").removesuffix(")"),
                   list(value.shape))
        for value in values
    ]  # fmt: skip
