"""Where the shipped digits models are, and how they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

BIT_PAIRS = ("w8a8", "w4a4", "w2a2", "w1a2")


def model_path(bits: str) -> Path:
    """Path of the shipped QDQ model, `bits` one of BIT_PAIRS."""
    return Path(__file__).with_name(f"digits_{bits}.onnx")


def stock_session(path: Path, threads: int = 1) -> tuple[ort.InferenceSession, str]:
    """Opens a QDQ model in ONNX Runtime as it is, with as many of its optimizations as it stands.

    ONNX Runtime moves 4- and 2-bit quantizers into operators that have no such kernel, and then refuses the
    model; with its QDQ handling off it dequantizes and computes in float.

    Returns:
        The session, and `default` or `disable_quant_qdq`.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]), "default"
    except Exception:  # onnxruntime raises NotImplemented, Fail or InvalidGraph, which share no other base
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]), "disable_quant_qdq"


def accuracy(
    session: ort.InferenceSession, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> float:
    """Share of images whose largest logit is their label's."""
    (logits,) = session.run(None, {session.get_inputs()[0].name: images})
    return float(np.mean(np.argmax(logits, axis=1) == labels))
