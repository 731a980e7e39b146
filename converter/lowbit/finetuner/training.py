"""What both losses share: how parameters move, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from lowbit.finetuner.engine import Engine

Array = npt.NDArray[Any]

_UNIT_BITS = 2
"""The rate is that of codes of so many bits. More bits have finer codes, and a step is more of them."""

_FINER = 2 / 3
"""How many, as a power of two for each bit: at 1 the last layer learns what the few images say by chance."""

_RISE = 0.1
"""Part of the steps in which the rate rises: Adam's first steps have the size of all others."""

_SMALLEST = 1e-12


class Trainer:
    """Adam on some layers and grids of a network, its rate falling along half a cosine."""

    def __init__(
        self, engine: Engine, layers: Iterable[str], grids: Iterable[int], steps: int, rate: float
    ) -> None:
        """Makes them trainable until :meth:`close`."""
        self.engine, self.layers, self.grids = engine, list(layers), list(grids)
        self.steps, self.rate = steps, rate
        self.tensors = engine.state(self.layers, self.grids)
        for tensor in self.tensors.values():
            tensor.requires_grad_(True)
        paces = dict.fromkeys(self.tensors, 1.0)  # steps in units of the rate
        for name in self.layers:
            paces[f"codes {name}"] *= 2.0 ** (_FINER * (engine.network.layers[name].bits - _UNIT_BITS))
        self.optimizer = torch.optim.Adam(
            [{"params": [tensor], "pace": paces[name]} for name, tensor in self.tensors.items()],
            lr=rate,
        )

    def step(self, number: int, loss: Tensor) -> None:
        """One step, of a number from 0."""
        rate = self.rate * (1 + math.cos(math.pi * number / self.steps)) / 2
        rate *= min(1.0, (number + 1) / max(1.0, _RISE * self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["pace"]
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.engine.clamp(self.layers, self.grids)

    def copy(self) -> dict[str, Tensor]:
        """What the parameters hold now."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`copy` took."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def save(self) -> dict[str, Array]:
        """Everything that :meth:`load` needs to go on, by name."""
        found = {f"at {name}": tensor.detach().cpu().numpy() for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            for key, value in self.optimizer.state[tensor].items():
                found[f"{key} {name}"] = value.cpu().numpy()
        return found

    @torch.no_grad()
    def load(self, arrays: Mapping[str, Array]) -> None:
        """Takes back what :meth:`save` gave."""
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.from_numpy(arrays[f"at {name}"]))
            self.optimizer.state[tensor] = {
                key: torch.from_numpy(arrays[f"{key} {name}"]).to(tensor.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }

    def close(self) -> None:
        """Ends training."""
        for tensor in self.tensors.values():
            tensor.requires_grad_(False)
            tensor.grad = None


def relative(made: Mapping[str, Tensor], exact: Mapping[str, Tensor], powers: Mapping[str, float]) -> Any:
    """The mean squared error of some tensors, each relative to the float tensor's power, summed."""
    return sum(((made[name] - exact[name]) ** 2).mean() / powers[name] for name in exact)


def power(square_sum: float, count: int) -> float:
    """The mean square that errors are relative to."""
    return max(square_sum / max(count, 1), _SMALLEST)
