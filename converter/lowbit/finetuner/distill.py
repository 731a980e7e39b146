"""The whole network at once: its outputs and its blocks' follow the float model's on unlabeled images.

Knowledge distillation (Hinton et al., 2015) with the network itself as its teacher. The images are flipped,
moved and mixed, so that few of them go a long way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from lowbit.finetuner.engine import Engine, Values
from lowbit.finetuner.judge import Judge
from lowbit.finetuner.pool import Pool
from lowbit.finetuner.training import Trainer, power, relative

Array = npt.NDArray[Any]

BATCH = 32
LOOKS = 10
"""Times that the held-out error is measured; the best state is kept."""

_MIX = 0.3
"""Probability that an image is mixed with another one, see below."""

# Weight of blocks' outputs beside the network's. Few images are learned by heart, unless what they teach is
# held back: of 80 that train (ResNet-8, w2a4, 500 steps of 50, 2000 others) weights of 3 and 30 have a
# divergence of 0.226 and 0.244 from the float model; 0.3, at three times the rate and without the squared
# error of outputs, one of 0.256. Mixing 0.3 with weight 5 and mixing 1 with weight 3 are about equal:
# ResNet-20 at w2a4 0.298 and 0.297, error of logits 0.113 (350 steps) and 0.131 (500); ResNet-8 at w2a2, at
# the end, 0.580 and 0.562, agreement 0.690 and 0.685. benchmarks/results/finetune.md has the others.
_INNER, _INNER_OF_FEW = 0.3, 5.0


class Distillation:
    """One training of the whole network, by the images of some numbers."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        numbers: Array,
        judge: Judge,
        steps: int,
        rate: float,
        seed: int,
        before: int,
        *,
        few: bool,
    ) -> None:
        """Begins where the engine is; ``before``: steps that others have drawn images for."""
        self.engine, self.pool, self.numbers, self.judge = engine, pool, numbers, judge
        self.steps, self.seed, self.before = steps, seed, before
        network = engine.network
        self.weight = _INNER_OF_FEW if few else _INNER
        self.inner = [
            name for block in network.blocks() for name in block.outputs if name not in judge.targets
        ]
        self.wanted = [*self.inner, *judge.targets]
        self.trainer = Trainer(engine, network.layers, range(len(network.grids)), steps, rate)
        self.best, self.kept = judge.engine_error(), self.trainer.copy()

    def train(
        self,
        first: int,
        tell: Callable[[int, float], None],
        save: Callable[[Any, Mapping[str, Array]], None],
    ) -> None:
        """Trains from one step on, and leaves the best state in the engine.

        Args:
            first: the number of that step.
            tell: called after every step with steps done and the least held-out error.
            save: keeps, after every look, what :meth:`resume` takes.
        """
        every = max(1, self.steps // LOOKS)
        for step in range(first, self.steps):
            self.trainer.step(step, self._loss(step))
            if (step + 1) % every == 0 or step + 1 == self.steps:
                error = self.judge.engine_error()
                if error < self.best:
                    self.best, self.kept = error, self.trainer.copy()
                kept = {f"kept {name}": tensor.cpu().numpy() for name, tensor in self.kept.items()}
                save([step + 1, self.best], kept | self.trainer.save())
            tell(step + 1, self.best)
        self.trainer.restore(self.kept)
        self.trainer.close()

    def resume(self, facts: Any, arrays: Mapping[str, Array]) -> int:
        """Takes back what was saved; returns the number of the next step."""
        first, self.best = facts
        self.trainer.load(arrays)
        for name, tensor in self.kept.items():
            tensor.copy_(torch.from_numpy(arrays[f"kept {name}"]))
        return int(first)

    def _loss(self, step: int) -> Tensor:
        # Each step draws from a generator of its own, so that one which goes on draws the same.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.before + step)
        numbers = self.numbers[torch.randint(len(self.numbers), (BATCH,), generator=generator).numpy()]
        images = self.pool.changed(numbers, generator, _MIX)
        given = {name: value.to(self.engine.device) for name, value in images.items()}
        steps = self.engine.network.steps
        with torch.no_grad():
            wanted = self.engine.run(steps, given, self.wanted, exact=True)
        made = self.engine.run(steps, given, self.wanted)
        loss: Tensor = self.judge.loss(made, wanted)
        if self.inner:
            loss = loss + self.weight / len(self.inner) * self._inner(made, wanted)
        return loss

    def _inner(self, made: Values, wanted: Values) -> Any:
        """Of blocks in between; each relative to this batch's own power."""
        exact = {name: wanted[name] for name in self.inner}
        powers = {name: power(float((v.double() ** 2).sum()), v.numel()) for name, v in exact.items()}
        return relative(made, exact, powers)
