"""Charts of a network: a column per node, with the bits of its operands above whatever a page measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# The geometry, in pixels.
_WIDTH = 1150  # of columns that fill the page
_COLUMN = (10, 72)  # narrowest and widest
_BIT_LANE = 15
_LANES = 9  # 1 to 8 bits, floats on top
_TOP, _GAP, _BOTTOM = 16, 34, 8
_TITLE_RISE = 6  # of a part's title above its top
LOWER_HEIGHT = 150

_BITS_BASE = _TOP + _LANES * _BIT_LANE
LOWER_TOP = _BITS_BASE + _GAP
LOWER_BASE = LOWER_TOP + LOWER_HEIGHT


@dataclass(frozen=True)
class Bar:
    """A rectangle of the chart."""

    x: float
    y: float
    width: float
    height: float
    kind: str


@dataclass(frozen=True)
class Band:
    """One node of the chart: a column of bars."""

    row: int
    x: float
    tip: str
    bars: list[Bar]


@dataclass(frozen=True)
class Line:
    """A line through the columns; ``points`` as SVG has them."""

    kind: str
    points: str


@dataclass(frozen=True)
class Tick:
    """A horizontal line of the chart, or a title; ``key`` is the metric that it belongs to, if to one."""

    y: float
    label: str
    key: str = ""


@dataclass(frozen=True)
class Chart:
    """Bits, and something else below them, along the network."""

    bands: list[Band]
    band: float  # the width of one
    ticks: list[Tick]
    titles: list[Tick]
    lines: list[Line] = field(default_factory=list)
    height: float = LOWER_BASE + _BOTTOM

    @property
    def width(self) -> float:
        """Of all columns."""
        return round(self.band * len(self.bands), 2)

    @property
    def has_floats(self) -> bool:
        """Whether a bar stands for an operand in float."""
        return any(bar.kind == "float" for band in self.bands for bar in band.bars)


def column_width(count: int) -> float:
    """The width of each of so many columns."""
    return min(max(_WIDTH / count, _COLUMN[0]), _COLUMN[1])


def bit_bars(operands: Sequence[tuple[str, int | None]], x: float, width: float) -> Iterator[Bar]:
    """The bits of two operands, side by side; floats (None) reach above 8 bits.

    Args:
        operands: kind of the bar and bits, for each.
        x: where the column begins.
        width: of the column.
    """
    for side, (kind, bits) in enumerate(operands):
        height = _BIT_LANE * (_LANES if bits is None else min(bits, _LANES))
        left = x + (0.1 + 0.4 * side) * width
        yield Bar(left, _BITS_BASE - height, 0.38 * width, height, "float" if bits is None else kind)


def bit_ticks(bands: Sequence[Band]) -> list[Tick]:
    """The lines of the part that shows bits."""
    ticks = [Tick(_BITS_BASE - bits * _BIT_LANE, str(bits)) for bits in (0, 1, 2, 4, 6, 8)]
    has_floats = any(bar.kind == "float" for band in bands for bar in band.bars)
    return ticks + ([Tick(_BITS_BASE - _LANES * _BIT_LANE, "float")] if has_floats else [])


BITS_TITLE = Tick(_TOP - _TITLE_RISE, "bits")


def lower_title(label: str, key: str = "") -> Tick:
    """The title of the lower part."""
    return Tick(LOWER_TOP - _TITLE_RISE, label, key)


def ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten, for the top of an axis."""
    power = 10.0 ** math.floor(math.log10(max(value, 1)))
    return next((step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8) if step * power >= value), 10 * power)
