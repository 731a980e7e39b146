"""Block by block: each is trained until its output is the float model's, on what the blocks in front make.

The loss is that of BRECQ (Li et al., 2021) without second derivatives, with QDrop's (Wei et al., 2022) random
drops of activation rounding. What stands between two blocks lies in files, for every image, so that memory
does not grow with the images or the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowbit.finetuner.engine import Drops, Engine, Values
from lowbit.finetuner.network import Block
from lowbit.finetuner.pool import Pool, store
from lowbit.finetuner.training import Trainer, power, relative

Array = npt.NDArray[Any]

BATCH = 32
DROP = 0.5
"""Probability that the rounding of one element is left out."""

LOOKS = 4
"""Times that a block's held-out error is measured while it is trained; the best is kept."""

_COPIES = 8
"""Changed copies of each training image at most."""

_CACHE = 1 << 29
"""Bytes of one tensor between two blocks, above which there are fewer copies."""


class BlockTuning:
    """All blocks, in order."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        folder: Path,
        steps: int,
        rate: float,
        seed: int,
    ) -> None:
        self.engine, self.pool, self.folder = engine, pool, folder
        self.steps, self.rate, self.seed = steps, rate, seed
        self.blocks = engine.network.blocks()
        self.exact: dict[str, Array] = {}
        self.rounded: dict[str, Array] = {}
        self.count = 0
        self._fill()

    def _fill(self) -> None:
        """The images: changed held-out ones, the training ones, and changed copies of those."""
        pool = self.pool
        sizes = [v.numel() for v in pool.images(pool.train[:1]).values()]
        # Values inside a network take some times what its images take.
        copies = max(1, min(_COPIES, _CACHE // max(1, 16 * 4 * max(sizes) * len(pool.train))))
        self.held = pool.judged
        self.total = self.held + len(pool.train) * copies
        generator = torch.Generator().manual_seed(self.seed)
        at = 0
        for part in self._image_parts(copies, generator):
            for name, value in part.items():
                if name not in self.exact:
                    self.exact[name] = self._store(value)
                self.exact[name][at : at + len(value)] = value.numpy()
            at += len(next(iter(part.values())))
        self.rounded = dict(self.exact)

    def _image_parts(self, copies: int, generator: torch.Generator) -> Iterator[Values]:
        pool = self.pool
        yield from pool.judges(BATCH, self.seed)
        for start in range(0, len(pool.train), BATCH):
            yield pool.images(pool.train[start : start + BATCH])
        for _ in range(copies - 1):
            for start in range(0, len(pool.train), BATCH):
                yield pool.changed(pool.train[start : start + BATCH], generator, 0.0)

    def _store(self, value: Tensor) -> Array:
        self.count += 1
        dtype = value.numpy().dtype
        return store(self.folder / f"value{self.count}.npy", (self.total, *value.shape[1:]), dtype)

    def _part(self, arrays: dict[str, Array], names: tuple[str, ...], numbers: Any) -> Values:
        return {
            name: torch.from_numpy(np.array(arrays[name][numbers])).to(self.engine.device) for name in names
        }

    def tune(self, index: int, tell: Callable[[int], None]) -> tuple[float, float]:
        """Trains a block; :meth:`advance` must have passed those in front.

        Args:
            index: of the block.
            tell: called after every step.

        Returns:
            The held-out error before and after, relative to the float output's power.
        """
        block, engine = self.blocks[index], self.engine
        powers = self._exact_outputs(block)
        before = self._held_error(block, powers)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index + 1)
        drops = Drops(DROP, generator)
        trainer = Trainer(engine, block.layers, engine.grids_of(block), self.steps, self.rate)
        best, kept = before, trainer.copy()
        for step in range(self.steps):
            numbers = torch.randint(self.held, self.total, (BATCH,), generator=generator).numpy()
            exact, rounded = (self._part(a, block.inputs, numbers) for a in (self.exact, self.rounded))
            given = {
                name: torch.addcmul(x, drops.keep(x), rounded[name] - x) if x.is_floating_point() else x
                for name, x in exact.items()
            }
            wanted = self._part(self.exact, block.outputs, numbers)
            made = engine.run(block.steps, given, block.outputs, drops=drops)
            trainer.step(step, relative(made, wanted, powers))
            if (step + 1) % max(1, self.steps // LOOKS) == 0 or step + 1 == self.steps:
                error = self._held_error(block, powers)
                if error < best:
                    best, kept = error, trainer.copy()
            tell(step + 1)
        trainer.restore(kept)
        trainer.close()
        return before, best

    def advance(self, index: int) -> None:
        """Computes what a finished block makes of all images, and forgets what no later one reads."""
        block = self.blocks[index]
        if not all(name in self.exact for name in block.outputs):
            self._exact_outputs(block)
        self._compute(block, self.rounded, self.rounded, exact=False)
        later = {name for other in self.blocks[index + 1 :] for name in other.inputs}
        for arrays in (self.exact, self.rounded):
            for name in set(arrays) - later:
                array = arrays.pop(name)
                if isinstance(array, np.memmap) and array.filename is not None:
                    Path(array.filename).unlink(missing_ok=True)

    def _exact_outputs(self, block: Block) -> dict[str, float]:
        """Computes a block's float outputs, and their power over the training images."""
        sums = self._compute(block, self.exact, self.exact, exact=True)
        return {name: power(square, self.exact[name].size) for name, square in sums.items()}

    @torch.no_grad()
    def _compute(
        self, block: Block, source: dict[str, Array], target: dict[str, Array], *, exact: bool
    ) -> dict[str, float]:
        sums = dict.fromkeys(block.outputs, 0.0)
        fresh: dict[str, Array] = {}
        for start in range(0, self.total, BATCH):
            where = slice(start, min(start + BATCH, self.total))
            made = self.engine.run(
                block.steps, self._part(source, block.inputs, where), block.outputs, exact=exact
            )
            for name, value in made.items():
                held = value.cpu()
                if name not in fresh:
                    fresh[name] = self._store(held)
                fresh[name][where] = held.numpy()
                sums[name] += float((held.double() ** 2).sum())
        target.update(fresh)
        return sums

    @torch.no_grad()
    def _held_error(self, block: Block, powers: dict[str, float]) -> float:
        total = 0.0
        for start in range(0, self.held, BATCH):
            where = slice(start, min(start + BATCH, self.held))
            made = self.engine.run(block.steps, self._part(self.rounded, block.inputs, where), block.outputs)
            wanted = self._part(self.exact, block.outputs, where)
            total += float(relative(made, wanted, powers)) * (where.stop - where.start)
        return total / self.held
