"""LowBitLookup: any unary function between two quantized tensors, as a table."""

from __future__ import annotations

import numpy as np

from lowbit.ops.codes import Array, storage


def low_bit_lookup(
    x: Array, table: Array, *, x_encoding: str = "unsigned", y_encoding: str = "unsigned"
) -> Array:
    """``y = table[u]``, u the byte of the code (an int8 code's two's complement pattern).

    Args:
        x: codes, any shape.
        table: uint8 [256], or [C, 256] where row c serves channel c (last dim; one row serves all); its bytes
            are the output codes' bytes.
    """
    byte = x.view(np.uint8).astype(np.int64)
    y = table.reshape(-1)[byte] if table.size == 256 else table[np.arange(x.shape[-1]), byte]
    return y.view(storage(y_encoding))
