"""Functions that users name on the command line: a metric, a preprocessing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowbit.errors import LowBitError


def is_function(text: str) -> bool:
    """Whether a text names a function rather than anything built in."""
    return ":" in text


def load_function(text: str, what: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    A module is looked for in the current folder as well, as ``python -m`` does.

    Args:
        text: the name.
        what: the option that it came from, for messages.

    Raises:
        LowBitError: if there is no such file, module or function, or importing it fails.
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise LowBitError(f"{what}: expected module:function or file.py:function, got '{text}'")
    try:
        module = _from_file(place, what) if place.endswith(".py") else _from_path(place)
    except LowBitError:
        raise
    except Exception as error:  # whatever the user's code raises while it is imported
        raise LowBitError(
            f"{what}: importing '{place}' failed: {type(error).__name__}: {error}; the module must lie in "
            f"the current folder ({os.getcwd()}) or be installed"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        kind = "no function" if function is None else f"a {type(function).__name__}, no function,"
        raise LowBitError(f"{what}: '{place}' has {kind} '{name}'")
    return function  # type: ignore[no-any-return]


def _from_file(place: str, what: str) -> Any:
    path = Path(place)
    if not path.is_file():
        raise LowBitError(f"{what}: {path}: no such file")
    name = f"lowbit_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def _from_path(place: str) -> Any:
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    finally:
        if added:
            sys.path.remove(here)
