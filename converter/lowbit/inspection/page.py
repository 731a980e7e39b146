"""What the pages of reports have in common: one HTML file that needs nothing else.

Names of nodes, tensors and files come from whoever made the model, so the template engine escapes all of
them, and the page's content security policy lets no script run but its own, which it names by hash.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from lowbit.text import printable

_NAME_LENGTH = 64
"""Longest name that is shown in full where there is little room."""


def render_page(template: str, **values: Any) -> str:
    """A page, as text of one HTML document.

    Args:
        template: the file in lowbit/templates/, which extends base.html.j2.
        values: what it shows.
    """
    style, script = _asset("report.css"), _asset("report.js")
    return (
        _environment()
        .get_template(template)
        .render(
            **values,
            version=_version(),
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )


def _finalize(value: object) -> object:
    """What a name holds appears, as in a terminal; nothing in it turns the text around it."""
    return printable(value, keep="\n") if type(value) is str else value


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowbit", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
    )
    environment.filters.update(
        si=si,
        size=size,
        short=short,
        dims=lambda shape: "\u00d7".join("?" if dim is None else str(dim) for dim in shape) or "scalar",
        percent=lambda share: f"{share:.1%}",
        tiny_percent=lambda share: "none" if share == 0 else f"{share:.2%}" if share >= 5e-5 else "< 0.01%",
        number=lambda value: f"{value:.4g}",
        db=lambda value: f"{value:.1f} dB",
        db_gain=lambda value: f"{value:+.1f} dB",
        seconds=seconds,
        capitalize_first=lambda text: text[:1].upper() + text[1:],
    )
    return environment


def si(value: float | None, digits: int = 3) -> str:
    """A number with some digits and a unit prefix: ``2.12 M``."""
    if value is None:
        return ""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * (1 - 0.5 * 10**-digits):
            scaled = value / factor
            decimals = max(0, digits - 1 - int(math.log10(max(scaled, 1))))
            return f"{scaled:.{decimals}f} {prefix}"
    return f"{value:.0f}"


def size(value: float | None) -> str:
    """A number of bytes in units of 1000."""
    text = si(value)
    return text and (f"{text}B" if text[-1].isalpha() else f"{text} B")


def seconds(value: float) -> str:
    """A time as people read it: ``12.3 s``, ``4 min 5 s``."""
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s" if value < 100 else _minutes(round(value))


def _minutes(value: int) -> str:
    return f"{value // 60} min {value % 60} s"


def short(name: str) -> str:
    """A name's two ends: exporters that join the names of what they fused tell those apart by them."""
    half = _NAME_LENGTH // 2
    return name if len(name) <= _NAME_LENGTH else f"{name[:half]}\u2026{name[-half:]}"


def _asset(name: str) -> Markup:
    """A file of the package that goes into the page as it is."""
    return Markup((resources.files("lowbit") / "templates" / name).read_text(encoding="utf-8"))


def _hash(content: str) -> str:
    """The word by which a content security policy allows a style or a script."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _version() -> str:
    from lowbit import __version__

    return str(__version__)
