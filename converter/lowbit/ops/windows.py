"""Pooling windows: which output positions there are, and the image seen through each tap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowbit.ops.codes import Array, Floats


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling node over an image [N, D1.., C] with sizes ``image_sizes`` = (D1, ..)."""

    image_sizes: Sequence[int]
    kernel_shape: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[int]
    ceil_mode: int

    @classmethod
    def of(
        cls,
        x: Array,
        kernel_shape: Sequence[int],
        strides: Sequence[int],
        dilations: Sequence[int],
        pads: Sequence[int],
        ceil_mode: int,
    ) -> Windows:
        """Fills in what the attributes leave empty: strides 1, dilations 1, pads 0."""
        n = len(kernel_shape)
        return cls(
            x.shape[1:-1],
            kernel_shape,
            strides or [1] * n,
            dilations or [1] * n,
            pads or [0] * (2 * n),
            ceil_mode,
        )

    def output_size(self, d: int) -> int:
        """ONNX's rule; with ceil_mode the last window must start inside the image or its left padding."""
        begin, end = self.pads[d], self.pads[len(self.kernel_shape) + d]
        span = self.image_sizes[d] + begin + end - self.dilations[d] * (self.kernel_shape[d] - 1) - 1
        if not self.ceil_mode:
            return span // self.strides[d] + 1
        size = -(-span // self.strides[d]) + 1
        starts_outside = (size - 1) * self.strides[d] >= self.image_sizes[d] + begin
        return size - 1 if starts_outside else size

    def padded(self, x: Array, outside: int | float) -> Array:
        """The image with ``outside`` wherever a window can look beyond it."""
        padding = [(0, 0)]
        for d, size in enumerate(self.image_sizes):
            reach = (
                (self.output_size(d) - 1) * self.strides[d]
                + self.dilations[d] * (self.kernel_shape[d] - 1)
                + 1
            )
            padding.append((self.pads[d], max(reach - size - self.pads[d], 0)))
        return np.pad(x, [*padding, (0, 0)], constant_values=outside)

    def tap_counts(self, include_pad: bool) -> Floats:
        """How many taps of each window [1, O1.., 1] lie in the image, or in the image and its padding."""
        counts = np.ones((1,), np.int64)
        for d, size in enumerate(self.image_sizes):
            begin, end = self.pads[d], self.pads[len(self.kernel_shape) + d]
            starts = np.arange(self.output_size(d)) * self.strides[d] - begin
            position = starts[:, None] + np.arange(self.kernel_shape[d]) * self.dilations[d]
            first, last = (-begin, size + end) if include_pad else (0, size)
            counts = counts[..., None] * ((position >= first) & (position < last)).sum(axis=1)
        return counts[..., None].astype(np.float32)

    def taps(self, padded: Array) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Every tap (t1, ..) in row-major order, with the image [N, O1.., C] that windows see through it."""
        for tap in itertools.product(*(range(k) for k in self.kernel_shape)):
            starts = (t * dilation for t, dilation in zip(tap, self.dilations, strict=True))
            window = tuple(
                slice(start, start + (self.output_size(d) - 1) * self.strides[d] + 1, self.strides[d])
                for d, start in enumerate(starts)
            )
            yield tap, padded[(slice(None), *window)]
