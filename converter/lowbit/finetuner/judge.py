"""Held-out images decide what the outputs of a model are worth, computed by ONNX Runtime from its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor

from lowbit.errors import LowBitError, ModelError
from lowbit.finetuner.engine import Engine, Values
from lowbit.finetuner.pool import Pool
from lowbit.finetuner.training import power, relative
from lowbit.quantizer.runner import Graph, open_float

Array = npt.NDArray[Any]

_BATCH = 50
_CHECKED = 3
"""Images on which the float network is compared with what ONNX Runtime computes."""

_TOLERANCE = 1e-2
"""Largest difference of that, relative to the largest output."""

_CLASSES = 2
"""Outputs [N, so many or more] are scores of classes, whose probabilities matter."""


class Judge:
    """The error of outputs against the float model's.

    Attributes:
        targets: the outputs.
        powers: their mean squares over the training images, by name.
    """

    def __init__(
        self, engine: Engine, exact: onnx.ModelProto, pool: Pool, threads: int | None, seed: int
    ) -> None:
        self.engine, self.exact, self.pool, self.threads, self.seed = engine, exact, pool, threads, seed
        self.targets = engine.network.targets
        self.powers = self._powers()

    @torch.no_grad()
    def _powers(self) -> dict[str, float]:
        sums, counts = dict.fromkeys(self.targets, 0.0), dict.fromkeys(self.targets, 0)
        numbers = self.pool.train[: 4 * _BATCH]
        for start in range(0, len(numbers), _BATCH):
            for name, value in self.compute(self.pool.images(numbers[start : start + _BATCH])).items():
                sums[name] += float((value.double() ** 2).sum())
                counts[name] += value.numel()
        return {name: power(sums[name], counts[name]) for name in self.targets}

    def compute(self, images: Values, *, exact: bool = True) -> Values:
        """What the float network computes, or the rounded one."""
        given = {name: value.to(self.engine.device) for name, value in images.items()}
        return self.engine.run(self.engine.network.steps, given, self.targets, exact=exact)

    def loss(self, made: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Any:
        """Squared error of outputs relative to their power, and divergence of class probabilities in nats."""
        total = relative(made, {name: wanted[name] for name in self.targets}, self.powers)
        for name in self.targets:
            if wanted[name].ndim == 2 and wanted[name].shape[1] >= _CLASSES:
                exact = wanted[name].log_softmax(1)
                total = total + (exact.exp() * (exact - made[name].log_softmax(1))).sum(1).mean()
        return total

    def engine_error(self) -> float:
        """The loss of the engine as it is."""
        return self._mean_loss(lambda images: self.compute(images, exact=False))

    def error(self, model: onnx.ModelProto) -> float:
        """The loss of a quantized model as ONNX Runtime runs it."""
        runner = _Runner(model, self.targets, self.engine.network.batch, self.threads)
        return self._mean_loss(
            lambda images: {
                name: torch.from_numpy(value).to(self.engine.device) for name, value in runner(images).items()
            }
        )

    @torch.no_grad()
    def _mean_loss(self, run: Callable[[Values], Values]) -> float:
        """The loss of what is made of the held-out images, changed, in batches."""
        total, count = 0.0, 0
        for images in self.pool.judges(_BATCH, self.seed):
            size = len(next(iter(images.values())))
            total += float(self.loss(run(images), self.compute(images))) * size
            count += size
        return total / count

    @torch.no_grad()
    def check_exact(self) -> None:
        """Compares the float network with ONNX Runtime's, on some images.

        Raises:
            LowBitError: if they differ, which tells that the float model does not match the quantized one, or
                that its graph fixes the batch in a way that is not understood here.
        """
        images = self.pool.images(self.pool.train[:_CHECKED])
        ours = self.compute(images)
        theirs = _Runner(self.exact, self.targets, self.engine.network.batch, self.threads)(images)
        for name, value in ours.items():
            array = value.cpu().numpy()
            same = array.shape == theirs[name].shape
            largest = float(np.abs(theirs[name]).max(initial=1e-9))
            if not same or float(np.abs(array - theirs[name]).max(initial=0.0)) > _TOLERANCE * largest:
                raise LowBitError(
                    f"'{name}' is not what the float model computes: the two models do not match, or the "
                    "graph fixes the batch inside; expected the model that `lowbit quantize` was given, best "
                    "with an open batch"
                )


class _Runner:
    """Some tensors of a model by ONNX Runtime, for batches of any size."""

    def __init__(self, model: onnx.ModelProto, targets: list[str], batch: int, threads: int | None) -> None:
        part, self.inputs = Graph(model).part(targets, [])
        self.targets, self.batch = targets, batch
        self.types = {
            value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            for value in part.graph.input
        }
        self.session = open_float(part, threads)

    def __call__(self, images: Values) -> dict[str, Array]:
        feed = {name: images[name].numpy().astype(self.types[name]) for name in self.inputs}
        size = len(next(iter(feed.values())))
        each = self.batch or size
        parts = []
        for start in range(0, size, each):
            rows = [min(i, size - 1) for i in range(start, start + each)]
            try:
                made = self.session.run(self.targets, {name: array[rows] for name, array in feed.items()})
            except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
                raise ModelError(
                    f"ONNX Runtime cannot run the model: {str(error).splitlines()[0]}"
                ) from error
            parts.append([value[: size - start] for value in made])
        return {
            name: np.concatenate(values)
            for name, values in zip(self.targets, zip(*parts, strict=True), strict=True)
        }
