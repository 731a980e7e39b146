"""Sums over the columns that a layer's weights meet, streamed feed by feed.

With x^ a column of the input that the quantized layers in front make, and y what the layer shall compute
there, everything that rounding needs is in ``sum x^ x^'``, ``sum y x^'``, ``sum x^``, ``sum y`` and a few
numbers. Convolutions unfold their input, a transposed one that of the convolution it is equal to (zeros
between the pixels, the kernel turned around).

What a layer shall compute is its float output. Where nothing rounds between it and a residual Add, it is that
less the error of the other operand: ``y = W x + (r - r^)``, so that the sum comes out right.
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
from lowbit.quantizer.sites import Layer

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

LARGEST = 4608
"""Columns of weights beyond which the Gram matrix goes in blocks: 4608, a 3x3 window of 512 channels, squared
are 85 MB of float32."""

_PRECISE = 1024
"""Columns up to which sums and weights are float64. Beyond, products take the time and Gram matrices the
memory, and the ridge is far above float32's rounding."""

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


def reads_output(columns: int) -> bool:
    """Whether a layer's sums need its float output: of one in blocks they are made from its weights.

    A session that computes VGG-16's first Gemm would hold its weights four times (1.6 GB).
    """
    return columns <= LARGEST


def number_type(columns: int) -> type[np.float64] | type[np.float32]:
    """The type of the sums, and of the weights, of a layer with so many columns."""
    return np.float64 if columns <= _PRECISE else np.float32


class Unfold:
    """A layer's input as columns.

    Attributes:
        columns: of the weights.
        taps: axes of the kernel.
    """

    def __init__(self, layer: Layer, node: ir.Node) -> None:
        self.layer, self.node = layer, node
        self.columns = to_rows(layer, layer.weight).shape[2]
        self.taps = 0 if layer.op_type in ("Gemm", "MatMul") else layer.weight.ndim - 2

    def slabs(self, *arrays: Array) -> Iterator[list[Array]]:
        """Arrays of one shape as [groups, columns, positions], a part of the positions at a time."""
        views = [self._view(array) for array in arrays]
        if not views[0].size:
            return
        for places in self._places(views[0].shape):
            some = (slice(None),) * (self.taps + 2) + (places,)
            parts = [np.ascontiguousarray(view[some]) for view in views]  # the one copy of what is unfolded
            yield [part.reshape(len(part), self.columns, -1) for part in parts]

    def outputs(self, y: Array, x: Array) -> Iterator[Array]:
        """The output as [groups, rows, positions], in the parts in which :meth:`slabs` gives the input."""
        view = self._by_position(y)
        for places in self._places(self._view(x).shape):
            yield np.ascontiguousarray(view[:, :, places]).reshape(*view.shape[:2], -1)

    def _places(self, shape: tuple[int, ...]) -> Iterator[slice]:
        """Parts of the first axis of positions, each of a bounded size."""
        count = shape[self.taps + 2]
        step = max(1, _SLAB * count // max(1, int(np.prod(shape, dtype=np.int64))))
        return (slice(start, start + step) for start in range(0, count, step))

    def by_row(self, y: Array) -> Array:
        """All of an output as [groups, rows, positions]."""
        view = self._by_position(y)
        return view.reshape(*view.shape[:2], -1)

    def _by_position(self, y: Array) -> Array:
        layer = self.layer
        groups, rows = layer.group, layer.rows // layer.group
        if layer.op_type in ("Gemm", "MatMul"):
            return y.reshape(-1, layer.rows).T[None]
        by_group = y.reshape(len(y), groups, rows, *y.shape[2:])
        return by_group.transpose(1, 2, 3, 0, *range(4, by_group.ndim))

    def _view(self, x: Array) -> Array:
        """[groups, channels of a group, taps..., positions...], without a copy."""
        layer = self.layer
        if layer.op_type in ("Gemm", "MatMul"):
            flat = x.reshape(-1, x.shape[-1])
            return flat.T[None]
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
        return grouped.transpose(order)

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


@dataclass
class Moments:
    """Streamed sums of one layer over some images.

    Attributes:
        blocks: the blocks of columns.
        gram: ``sum x^ x^'``, one [groups, k, k] per block of columns.
        cross: ``sum y x^'``, [groups, rows, columns]; of several blocks each with the part of y that its own
            columns make.
        mean_q: ``sum x^``, [groups, columns].
        out: ``sum y``, one [groups, rows] per block.
        out_power: ``sum y^2``, the same.
        signal: ``sum (W x)^2``, what errors are relative to, less ``signal_mean``.
        signal_mean: ``sum W x``.
        count: columns.
        power: ``sum x^2`` over all elements of the input.
        noise: ``sum (x - x^)^2``.
        probes: ``sum x^ (x^' v)`` for random v, [groups, columns, probes]; where there are several blocks.
    """

    blocks: list[slice]
    gram: list[Array]
    cross: Array
    mean_q: Floats
    out: list[Floats]
    out_power: list[Floats]
    signal: Floats
    signal_mean: Floats
    count: int = 0
    power: float = 0.0
    noise: float = 0.0
    probes: Floats | None = None
    vectors: Array | None = field(default=None, repr=False)

    @classmethod
    def empty(cls, layer: Layer, columns: int, seed: int) -> Moments:
        """Sums over nothing."""
        count = -(-columns // LARGEST)
        size = -(-columns // count)
        blocks = [slice(start, min(columns, start + size)) for start in range(0, columns, size)]
        dtype = number_type(columns)
        groups, rows = layer.group, layer.rows // layer.group
        made = cls(
            blocks,
            [np.zeros((groups, b.stop - b.start, b.stop - b.start), dtype) for b in blocks],
            np.zeros((groups, rows, columns), np.float64 if len(blocks) == 1 else np.float32),
            np.zeros((groups, columns)),
            [np.zeros((groups, rows)) for _ in blocks],
            [np.zeros((groups, rows)) for _ in blocks],
            np.zeros((groups, rows)),
            np.zeros((groups, rows)),
        )
        if len(blocks) > 1:
            rng = np.random.default_rng(seed)
            made.vectors = rng.choice(np.array([-1, 1], np.float32), (columns, _PROBES))
            made.probes = np.zeros((groups, columns, _PROBES))
        return made

    def add(self, unfold: Unfold, x: Array, x_q: Array, y: Array | None, shift: Array | None) -> None:
        """Adds some images.

        Args:
            unfold: the layer's input as columns.
            x: the float input.
            x_q: the quantized one.
            y: the float output; unused where :func:`reads_output` says so.
            shift: what is to be added to that; None: nothing.
        """
        if len(self.blocks) == 1:
            assert y is not None
            target = y if shift is None else y + shift
            pairs = zip(unfold.slabs(x_q), unfold.outputs(target, x_q), strict=True)
            for (rounded,), wanted in pairs:
                self._add_inputs(rounded)
                for g in range(len(rounded)):
                    self.cross[g] += wanted[g] @ rounded[g].T
        else:
            rows = to_rows(unfold.layer, unfold.layer.weight)
            for exact, rounded in unfold.slabs(x, x_q):
                self._add_inputs(rounded)
                whole = np.zeros((*rows.shape[:2], exact.shape[2]), np.float32)
                for i, block in enumerate(self.blocks):
                    for g in range(len(rounded)):
                        part = rows[g][:, block] @ exact[g, block]
                        whole[g] += part
                        self.cross[g][:, block] += part @ rounded[g, block].T
                        self.out[i][g] += part.sum(axis=1, dtype=np.float64)
                        self.out_power[i][g] += np.square(part, dtype=np.float64).sum(axis=1)
                self._add_signal(whole)
        self.power += float(np.square(x, dtype=np.float64).sum())
        self.noise += float(np.square(x - x_q, dtype=np.float64).sum())
        if len(self.blocks) == 1:
            assert y is not None
            by_row = unfold.by_row(target)
            self.out[0] += by_row.sum(axis=2, dtype=np.float64)
            self.out_power[0] += np.square(by_row, dtype=np.float64).sum(axis=2)
            self._add_signal(unfold.by_row(y))

    def _add_signal(self, by_row: Array) -> None:
        self.signal_mean += by_row.sum(axis=2, dtype=np.float64)
        self.signal += np.square(by_row, dtype=np.float64).sum(axis=2)

    def _add_inputs(self, rounded: Array) -> None:
        self.count += rounded.shape[2]
        self.mean_q += rounded.sum(axis=2, dtype=np.float64)
        for i, block in enumerate(self.blocks):
            for g in range(len(rounded)):
                part = rounded[g, block]
                self.gram[i][g] += part @ part.T  # numpy computes half of a symmetric product
        if self.probes is not None and self.vectors is not None:
            self.probes += rounded @ (rounded.transpose(0, 2, 1) @ self.vectors)

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
    for mine, others in ((a.gram, b.gram), (a.out, b.out), (a.out_power, b.out_power)):
        for one, other in zip(mine, others, strict=True):
            one += other
    for name in ("cross", "mean_q", "signal", "signal_mean", "count", "power", "noise"):
        setattr(a, name, getattr(a, name) + getattr(b, name))
    if a.probes is not None and b.probes is not None:
        a.probes += b.probes
    return a
