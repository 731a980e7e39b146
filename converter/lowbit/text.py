"""Text from a model on its way to a terminal."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """Text without characters that do anything but appear, such as those that move a terminal's cursor.

    Names in a model are whatever its author wrote. Control characters, marks that reverse the direction of
    writing, invisible ones and halves of surrogate pairs are written in the escapes of a Python literal.

    Args:
        text: any text.
        keep: characters that stay nevertheless.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
