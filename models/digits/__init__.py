"""A small CNN trained on scikit-learn's handwritten digits, shipped as QDQ models at several bit pairs."""

from .data import held_out, training
from .evaluate import BIT_PAIRS, accuracy, model_path, stock_session

__all__ = ["BIT_PAIRS", "accuracy", "held_out", "model_path", "stock_session", "training"]
