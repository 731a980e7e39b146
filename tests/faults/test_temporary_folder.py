"""What the fault injection found in temporary folders."""

from __future__ import annotations

import os

import pytest
from lowbit.errors import OutputError
from lowbit.proto.atomic import write_atomically


def test_a_folder_that_cannot_be_opened_is_an_error(tmp_path, monkeypatch) -> None:
    """Too many files are open, say: it made folders without end."""

    def refuses(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(OutputError, match="Too many open files"):
        write_atomically(tmp_path / "out", lambda path: None, overwrite=False)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
