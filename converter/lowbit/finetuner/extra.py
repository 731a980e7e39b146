"""PyTorch, which only this package needs: it is asked for when it is used."""

from __future__ import annotations

from typing import Any

from lowbit.errors import LowBitError


def require_torch(device: str) -> Any:
    """The module ``torch``.

    Args:
        device: what shall compute: cpu, cuda or cuda:N.

    Raises:
        LowBitError: if it is not installed, or has no such device.
    """
    try:
        import torch
    except ImportError as error:
        raise LowBitError(
            f"finetune needs PyTorch, which cannot be imported ({error}): pip install 'lowbit[torch]'"
        ) from error
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise LowBitError(f"device: expected cpu, cuda or cuda:N, got '{device}'") from error
    if place.type not in ("cpu", "cuda"):
        raise LowBitError(f"device: expected cpu, cuda or cuda:N, got '{device}'")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise LowBitError(f"device: PyTorch sees {torch.cuda.device_count()} GPUs here, '{device}' is none")
    return torch
