"""Weights that a compiled model leaves in the files of the model that it was made from."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.errors import ModelError, OutputError
from lowbit.library import require_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

_LEAST_BYTES = 128
"""ONNX Runtime keeps smaller tensors in the model as well, wherever they came from."""


class WeightsInPlace:
    """Tells ONNX Runtime, as it writes a compiled model, where the bytes of each initializer lie already.

    External data of the source are named as they are. Whatever else stands in the source's own file, as it
    is used, is named as external data, too: a file and a range of its bytes is all that ONNX asks for.

    Attributes:
        files: those that the compiled model needs, relative to its folder.
        folder: of the compiled model.
    """

    def __init__(self, source: Path, output: Path) -> None:
        """Opens the source.

        Args:
            source: the model's file.
            output: where the compiled model will lie; ONNX Runtime reads external data from its folder and
                below alone.

        Raises:
            OutputError: if the source lies elsewhere.
        """
        self.files: set[str] = set()
        self._source = source.resolve()
        self.folder = output.resolve().parent
        self._relative(self._source)
        with self._source.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._end = 0  # of what was found last: initializers come in the order of the file

    def locate(
        self,
        name: str,
        value: onnxruntime.OrtValue,
        external: onnxruntime.OrtExternalInitializerInfo | None,
    ) -> onnxruntime.OrtExternalInitializerInfo | None:
        """Where an initializer lies; None: in the compiled model itself."""
        if value.data_type() == "tensor(string)" or value.tensor_size_in_bytes() < _LEAST_BYTES:
            return None
        size = value.tensor_size_in_bytes()
        if external is not None:
            return self._at(self._source.parent / external.filepath, external.file_offset, size)
        data = ctypes.string_at(value.data_ptr(), size)
        offset = self._data.find(data, self._end)
        if offset < 0:
            offset = self._data.find(data)
        if offset < 0:
            return None
        self._end = offset + size
        return self._at(self._source, offset, size)

    def check_some(self) -> None:
        """Refuses a compiled model that leaves no weights behind.

        Raises:
            ModelError: says what to do.
        """
        if not self.files:
            raise ModelError(
                f"{self._source}: none of the compiled model's weights stand in this file as they are used; "
                "convert the model into a file with `lowbit convert`, and compile that"
            )

    def _at(self, path: Path, offset: int, size: int) -> onnxruntime.OrtExternalInitializerInfo:
        relative = self._relative(path)
        self.files.add(relative)
        return require_onnxruntime().OrtExternalInitializerInfo(relative, offset, size)

    def _relative(self, path: Path) -> str:
        resolved = path.resolve()
        if not resolved.is_relative_to(self.folder):
            raise OutputError(
                f"{resolved}: holds weights that are to stay there, but ONNX Runtime reads weights only from "
                f"the folder of a model and those below it, here {self.folder}; write the compiled model "
                "beside it"
            )
        return resolved.relative_to(self.folder).as_posix()
