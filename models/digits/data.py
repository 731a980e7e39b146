"""The digits images of scikit-learn and their fixed split."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HELD_OUT = 450
"""Number of held-out images: the last quarter of the set.

The set is in the order in which it was collected, writer after writer. It is not shuffled, so that held-out
digits are not from the hands that the network was trained on.
"""


def _load() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)


def training() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Images [1347, 1, 8, 8] float32 in [0, 1] and labels [1347]. Needs scikit-learn."""
    images, labels = _load()
    return images[:-HELD_OUT], labels[:-HELD_OUT]


def held_out() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Images [450, 1, 8, 8] float32 in [0, 1] and labels [450], not trained on. Needs scikit-learn."""
    images, labels = _load()
    return images[-HELD_OUT:], labels[-HELD_OUT:]
