"""Sums over the columns that a layer's weights meet, streamed feed by feed.

With x a column of the float model's input and x^ the one that the quantized layers in front make, everything
that rounding needs is in ``sum x^ x^'``, ``sum x x^'``, ``sum x``, ``sum x^`` and a few numbers. Convolutions
unfold their input, a transposed one that of the convolution it is equal to (zeros between the pixels, the
kernel turned around).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.errors import LowBitError
from lowbit.graph.attributes import get_ints
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import Window, read_transposed_window, read_window
from lowbit.quantize.sites import Layer

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

LARGEST = 4096
"""Columns of weights beyond which the Gram matrix goes in blocks: 4096^2 float64 are 134 MB."""

_SLAB = 1 << 23
"""Elements of unfolded input that are in memory at once (32 MB)."""

_PROBES = 8
"""Random vectors that estimate the norm of a Gram matrix of which only blocks are kept."""


def to_rows(layer: Layer, weight: Array) -> Array:
    """Weights as the model stores them -> [groups, rows of a group, columns]."""
    g = layer.group
    if layer.op_type == "Conv":
        return weight.reshape(g, layer.rows // g, -1)
    if layer.op_type == "ConvTranspose":
        turned = weight[(slice(None), slice(None), *[slice(None, None, -1)] * (weight.ndim - 2))]
        by_group = turned.reshape(g, weight.shape[0] // g, *weight.shape[1:])
        return np.ascontiguousarray(np.moveaxis(by_group, 2, 1)).reshape(g, weight.shape[1], -1)
    return (weight if layer.transposed else weight.T)[None]


def from_rows(layer: Layer, rows: Array) -> Array:
    """The way back from :func:`to_rows`."""
    shape = layer.weight.shape
    if layer.op_type == "Conv":
        return rows.reshape(shape)
    if layer.op_type == "ConvTranspose":
        by_group = rows.reshape(layer.group, shape[1], shape[0] // layer.group, *shape[2:])
        turned = np.moveaxis(by_group, 1, 2).reshape(shape)
        return np.ascontiguousarray(
            turned[(slice(None), slice(None), *[slice(None, None, -1)] * (len(shape) - 2))]
        )
    return np.ascontiguousarray(rows[0] if layer.transposed else rows[0].T)


class Unfold:
    """A layer's input as columns."""

    def __init__(self, layer: Layer, node: ir.Node) -> None:
        self.layer, self.node = layer, node
        self.columns = to_rows(layer, layer.weight).shape[2]

    def slabs(self, *arrays: Array) -> Iterator[list[Array]]:
        """Arrays of one shape as [groups, columns, positions], a part of the positions at a time."""
        views = [self._view(array) for array in arrays]
        if not views[0].size:
            return
        groups, channels, taps = views[0].shape[:3]
        positions = views[0].shape[3:]
        per_row = groups * channels * taps * int(np.prod(positions[1:], dtype=np.int64))
        step = max(1, _SLAB // max(1, per_row))
        for start in range(0, positions[0], step):
            parts = [view[:, :, :, start : start + step] for view in views]
            yield [np.ascontiguousarray(part).reshape(groups, channels * taps, -1) for part in parts]

    def _view(self, x: Array) -> Array:
        """[groups, channels of a group, taps, positions...], without a copy of the taps where possible."""
        layer = self.layer
        if layer.op_type in ("Gemm", "MatMul"):
            flat = x.reshape(-1, x.shape[-1])
            return flat.T[None, :, None]
        if layer.op_type == "ConvTranspose":
            x, window = self._spread(x)
        else:
            read = read_window(self.node, layer.weight.shape[2:], x.shape[2:])
            if isinstance(read, Refusal):
                raise LowBitError(f"{layer.op_type} '{layer.node}': {read.reason}")
            window = read
        dims = len(window.kernel)
        pads = [(0, 0), (0, 0), *((window.pads[i], window.pads[dims + i]) for i in range(dims))]
        padded = np.pad(x, pads) if any(map(any, pads)) else x
        extents = tuple((k - 1) * d + 1 for k, d in zip(window.kernel, window.dilations, strict=True))
        if all(extent == 1 for extent in extents) and all(stride == 1 for stride in window.strides):
            view = padded[(...,) + (None,) * dims]
        else:
            view = np.lib.stride_tricks.sliding_window_view(padded, extents, axis=tuple(range(2, 2 + dims)))
            places = tuple(slice(None, None, stride) for stride in window.strides)
            taps = tuple(slice(None, None, dilation) for dilation in window.dilations)
            view = view[(slice(None), slice(None), *places, *taps)]
        n, channels = view.shape[:2]
        groups = layer.group
        out = view.shape[2 : 2 + dims]
        grouped = view.reshape(n, groups, channels // groups, *out, *view.shape[2 + dims :])
        # -> groups, channels, taps, first spatial dim, batch, others: a slab is cut along the first dim.
        order = (1, 2, *range(3 + dims, 3 + 2 * dims), 3, 0, *range(4, 3 + dims))
        moved = grouped.transpose(order)
        return _merge_taps(moved, dims)

    def _spread(self, x: Array) -> tuple[Array, Window]:
        """Zeros between the pixels: the input of the convolution that a ConvTranspose is equal to."""
        kernel = self.layer.weight.shape[2:]
        read = read_transposed_window(self.node, kernel, x.shape[2:])
        if isinstance(read, Refusal):
            raise LowBitError(f"ConvTranspose '{self.layer.node}': {read.reason}")
        dims = len(kernel)
        extra = get_ints(self.node, "output_padding") or [0] * dims
        sizes = [(size - 1) * stride + 1 for size, stride in zip(x.shape[2:], read.strides, strict=True)]
        spread = np.zeros((*x.shape[:2], *sizes), x.dtype)
        spread[(slice(None), slice(None), *(slice(None, None, s) for s in read.strides))] = x
        pads = []
        for i in range(dims):
            extent = (kernel[i] - 1) * read.dilations[i]
            pads.append((extent - read.pads[i], extent - read.pads[dims + i] + extra[i]))
        # A pad larger than the kernel cuts pixels off.
        cut = tuple(slice(max(0, -a), spread.shape[2 + i] - max(0, -b)) for i, (a, b) in enumerate(pads))
        spread = spread[(slice(None), slice(None), *cut)]
        begins, ends = [max(0, a) for a, _ in pads], [max(0, b) for _, b in pads]
        return spread, Window(tuple(kernel), (1,) * dims, (*begins, *ends), tuple(read.dilations))


def _merge_taps(view: Array, dims: int) -> Array:
    """Axes 2 .. 2 + dims as one: a copy where there is more than one tap along more than one axis."""
    taps = view.shape[2 : 2 + dims]
    return view.reshape(*view.shape[:2], int(np.prod(taps)), *view.shape[2 + dims :])


@dataclass
class Moments:
    """Streamed sums of one layer over some images.

    Attributes:
        count: columns.
        gram: ``sum x^ x^'``, one [groups, k, k] per block of columns.
        cross: ``sum x x^'``, the same.
        mean: ``sum x``, [groups, columns].
        mean_q: ``sum x^``.
        power: ``sum x^2`` over all columns.
        noise: ``sum (x - x^)^2``.
        out: ``sum y`` of the float output, [rows].
        out_power: ``sum y^2``, [rows].
        out_count: positions of the output.
        probes: ``sum x^ (x^' v)`` for random v, [groups, columns, probes]; where there are several blocks.
    """

    blocks: list[slice]
    gram: list[Array]
    cross: list[Array]
    mean: Floats
    mean_q: Floats
    out: Floats
    out_power: Floats
    count: int = 0
    power: float = 0.0
    noise: float = 0.0
    out_count: int = 0
    probes: Floats | None = None
    vectors: Array | None = field(default=None, repr=False)

    @classmethod
    def empty(cls, layer: Layer, columns: int, seed: int) -> Moments:
        """Sums over nothing."""
        count = -(-columns // LARGEST)
        size = -(-columns // count)
        blocks = [slice(start, min(columns, start + size)) for start in range(0, columns, size)]
        dtype = np.float64 if columns <= 1024 else np.float32
        shapes = [(layer.group, b.stop - b.start, b.stop - b.start) for b in blocks]
        made = cls(
            blocks,
            [np.zeros(shape, dtype) for shape in shapes],
            [np.zeros(shape, dtype) for shape in shapes],
            np.zeros((layer.group, columns)),
            np.zeros((layer.group, columns)),
            np.zeros(layer.rows),
            np.zeros(layer.rows),
        )
        if len(blocks) > 1:
            rng = np.random.default_rng(seed)
            made.vectors = rng.choice(np.array([-1, 1], np.float32), (columns, _PROBES))
            made.probes = np.zeros((layer.group, columns, _PROBES))
        return made

    def add(self, unfold: Unfold, x: Array, x_q: Array, y: Array) -> None:
        """Adds some images: the float input, the quantized one, and the float output."""
        for exact, rounded in unfold.slabs(x, x_q):
            self.count += exact.shape[2]
            self.mean += exact.sum(axis=2, dtype=np.float64)
            self.mean_q += rounded.sum(axis=2, dtype=np.float64)
            for i, block in enumerate(self.blocks):
                a, b = exact[:, block], rounded[:, block]
                for g in range(a.shape[0]):
                    # One array twice lets numpy compute half of a symmetric product.
                    self.gram[i][g] += b[g] @ b[g].T
                    self.cross[i][g] += a[g] @ b[g].T
            if self.probes is not None and self.vectors is not None:
                self.probes += rounded @ (rounded.transpose(0, 2, 1) @ self.vectors)
        self.power += float(np.square(x, dtype=np.float64).sum())
        self.noise += float(np.square(x - x_q, dtype=np.float64).sum())
        axis = -1 if unfold.layer.op_type in ("Gemm", "MatMul") else 1
        by_row = np.moveaxis(y, axis, 0).reshape(unfold.layer.rows, -1)
        self.out += by_row.sum(axis=1, dtype=np.float64)
        self.out_power += np.square(by_row, dtype=np.float64).sum(axis=1)
        self.out_count += by_row.shape[1]

    def neglected(self) -> float:
        """The part of the Gram matrix's squared norm that lies outside of its blocks.

        ``E |G v|^2 = |G|^2`` for v of independent signs, so the probes tell the whole from its parts.
        """
        if self.probes is None:
            return 0.0
        whole = float(np.square(self.probes).sum(axis=1).mean(axis=1).sum())
        kept = sum(float(np.square(gram, dtype=np.float64).sum()) for gram in self.gram)
        return max(0.0, 1 - kept / whole) if whole > 0 else 0.0


def plus(a: Moments, b: Moments) -> Moments:
    """The sums over both sets of images; ``a`` is used up."""
    for mine, others in ((a.gram, b.gram), (a.cross, b.cross)):
        for one, other in zip(mine, others, strict=True):
            one += other
    a.mean += b.mean
    a.mean_q += b.mean_q
    a.out += b.out
    a.out_power += b.out_power
    a.count += b.count
    a.out_count += b.out_count
    a.power += b.power
    a.noise += b.noise
    if a.probes is not None and b.probes is not None:
        a.probes += b.probes
    return a

