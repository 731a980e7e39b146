"""docs/api.md: the public names of the Python package, from signatures and docstrings (Google style)."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import lowbit
from result_pages import table

SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes")


def plain(text: str) -> str:
    """A docstring's text as Markdown: roles and double backticks become code."""
    return re.sub(r"(?::\w+:)?``?([^`]+)``?", r"`\1`", text)


def one_line(text: str) -> str:
    """The text of a cell of a table."""
    return plain(" ".join(text.split()))


def first_sentence(value: object) -> str:
    """What the name is, in a line."""
    doc = inspect.getdoc(value) or ""
    return one_line(doc.split("\n\n")[0])


def entries(block: str) -> Iterator[tuple[str, str]]:
    """`name: what it is` of a section; further lines of an entry are indented."""
    for part in re.split(r"\n(?=\S)", textwrap.dedent(block).strip()):
        name, _, text = part.partition(":")
        yield name.strip(), one_line(text)


def document(value: object) -> str:
    """The docstring as Markdown: text, then a table for the arguments and the errors."""
    doc = inspect.getdoc(value)
    if not doc:
        raise ValueError(f"{value!r} is public and has no docstring")
    names = "|".join(SECTIONS)
    text, *sections = re.split(rf"^({names}):\n", doc, flags=re.MULTILINE)
    parts = [plain(text.strip()) + "\n"]
    for name, block in zip(sections[::2], sections[1::2], strict=True):
        indented, behind = re.match(r"((?:(?:[ ]{4}.*)?\n?)*)(.*)", block, flags=re.DOTALL).groups()  # type: ignore[union-attr]
        if name in ("Returns", "Yields"):
            parts.append(f"**{name}** {one_line(indented)}\n")
        else:
            header = [{"Args": "Argument", "Raises": "Error"}.get(name, "Attribute"), ""]
            parts.append(table(header, [(f"`{key}`", what) for key, what in entries(indented)]))
        if behind.strip():
            parts.append(plain(behind.strip()) + "\n")
    return "\n".join(parts)


def signature(name: str, value: Callable[..., Any]) -> str:
    """The call as code, an argument a line where it is long."""
    found = inspect.signature(value)
    parameters, marked = [], False
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not marked:
            parameters.append("*")
            marked = True
        default = "" if each.default is each.empty else f" = {each.default!r}"
        parameters.append(f"{each.name}: {each.annotation}{default}")
    end = f" -> {found.return_annotation}"
    line = f"{name}({', '.join(parameters)}){end}"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){end}"
    return f"```python\n{line}\n```\n"


def returned_classes(value: Callable[..., Any]) -> Iterator[type]:
    """The classes of this package that an annotation of the result names."""
    home = vars(sys.modules[value.__module__])
    for word in re.findall(r"\w+", str(inspect.signature(value).return_annotation)):
        found = home.get(word)
        if isinstance(found, type) and found.__module__.startswith("lowbit"):
            yield found


def class_entry(value: type) -> str:
    """A result class: what it holds, and what it can tell."""
    rows = []
    if dataclasses.is_dataclass(value):
        rows += [(f"`{each.name}`", f"`{each.type}`", "") for each in dataclasses.fields(value)]
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            rows.append((f"`{name}`", "property", first_sentence(member)))
        elif inspect.isfunction(member):
            rows.append((f"`{name}()`", "method", first_sentence(member)))
    parts = [f"### {value.__name__}\n", document(value)]
    if rows:
        parts.append(table(["Member", "", ""], rows))
    return "\n".join(parts)


def reference() -> str:
    """docs/api.md without the notice that it is generated."""
    public = {name: getattr(lowbit, name) for name in lowbit.__all__ if not name.startswith("_")}
    functions = {name: value for name, value in public.items() if not isinstance(value, type)}
    errors = {name: value for name, value in public.items() if isinstance(value, type)}
    rows = [
        (f"[`lowbit.{name}`](#lowbit{name.lower()})", first_sentence(value)) for name, value in public.items()
    ]
    parts = [
        "# Python\n",
        "Everything stands in the package itself (`import lowbit`), is imported on first use, and does what "
        "the [command](commands.md) of the same name does.\n",
        table(["Name", ""], rows),
    ]
    classes: dict[type, None] = {}
    for name, value in functions.items():
        parts += [f"## lowbit.{name}\n", signature(f"lowbit.{name}", value), document(value)]
        classes |= dict.fromkeys(returned_classes(value))
    parts += ["## What they return\n", *map(class_entry, classes), "## Errors\n"]
    for name, value in errors.items():
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        parts += [f"### lowbit.{name}\n", f"A {bases}.\n", document(value)]
    return "\n".join(parts)
