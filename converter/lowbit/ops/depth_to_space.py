"""LowBitDepthToSpace: blocks of channels become blocks of pixels, channels last."""

from __future__ import annotations

from lowbit.errors import LowBitError
from lowbit.ops.codes import Array


def low_bit_depth_to_space(
    x: Array, *, blocksize: int, mode: str = "DCR", x_encoding: str = "unsigned"
) -> Array:
    """ONNX DepthToSpace of codes [N, H, W, C * b^2], b = blocksize, which gives [N, H * b, W * b, C].

    Row i and column j of a block take channel ``(i * b + j) * C + c`` (mode DCR) or
    ``c * b^2 + i * b + j`` (CRD).

    Raises:
        LowBitError: for another mode, or channels that are no multiple of blocksize^2.
    """
    if mode not in ("DCR", "CRD"):
        raise LowBitError(f"mode must be DCR or CRD, got '{mode}'")
    n, height, width, depth = x.shape
    if depth % blocksize**2:
        raise LowBitError(f"{depth} channels are no multiple of blocksize^2 = {blocksize**2}")
    channels = depth // blocksize**2
    if mode == "DCR":
        blocks = x.reshape(n, height, width, blocksize, blocksize, channels).transpose(0, 1, 3, 2, 4, 5)
    else:
        blocks = x.reshape(n, height, width, channels, blocksize, blocksize).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, height * blocksize, width * blocksize, channels)
