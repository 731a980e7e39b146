"""A network on torch tensors: as the float model computes it, or with every code rounded.

The latent of a weight rounds to its code, and that of a scale is the logarithm of how much it grew: a network
that was not trained holds exactly what was read. Gradients pass the rounding unchanged
(straight-through); those of scales are those of Esser et al. ("Learned step size quantization", 2019).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowbit.errors import LowBitError
from lowbit.finetuner.network import Block, Layer, Network, Step
from lowbit.finetuner.ops import OPS

Array = npt.NDArray[Any]
Values = dict[str, Tensor]

_LARGEST_GROWTH = 4.0
"""A scale changes by this factor at most."""

_LEAN = 0.3
"""How far a latent begins from its code, towards the float weight, at most.

Steps are small: from the code itself none would reach the next one in the steps of a block. At 0.45 all that
quantize rounded against its weight, for the sake of the rest, would change at once. (ResNet-8 at w2a2, images
that did not train; agreement with the float model at 0 and 0.3: from 100 images .644, .663, from 3800
.690, .724.)
"""


@dataclass
class LayerState:
    """What is trained of a layer.

    Attributes:
        codes: latents, which round to the codes.
        growth: logarithm of the scale's growth, of the scale's shape.
        shift: of the bias, in units of ``unit``.
        unit: what one step of a weight's code adds to an output, about; float32 [rows].
    """

    codes: Tensor
    growth: Tensor
    shift: Tensor
    unit: Tensor


@dataclass(frozen=True)
class Drops:
    """Random drops of activation rounding (Wei et al., "QDrop", 2022): each element stays real by chance."""

    probability: float
    generator: torch.Generator

    def keep(self, x: Tensor) -> Tensor:
        """1 where an element is rounded, 0 where not; in the shape of ``x``."""
        # A byte decides; eight of them are drawn at once, which takes a tenth of the time of drawing numbers.
        drawn = torch.empty(-(-x.numel() // 8), dtype=torch.int64)
        drawn.random_(-(1 << 63), None, generator=self.generator)
        kept = drawn.view(torch.uint8)[: x.numel()].view(x.shape) >= round(256 * self.probability)
        return kept.to(x.device, x.dtype)


class _Rounding(torch.autograd.Function):
    """A quantizer: its real output, and gradients that pass rounding, but not clipping.

    With ``q = clip(rint(x / s) + z, low, high)`` and ``y = (q - z) s``, the gradient of ``log s`` is
    ``y - x`` inside the bounds and ``y`` outside. Written out, it takes a third of the single steps' time.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, growth: Tensor, scale: Tensor, zero: Tensor, bounds: tuple[int, int],
        keep: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Rounds ``x`` where ``keep`` is 1."""
        grown = scale * growth.exp()
        codes = torch.round(x / grown).add_(zero)
        inside = (codes >= bounds[0]) & (codes <= bounds[1])
        y = codes.clamp_(*bounds).sub_(zero).mul_(grown)
        context.save_for_backward(x, y, inside, *(() if keep is None else (keep,)))
        context.shape = growth.shape
        return y if keep is None else torch.addcmul(x, keep, y - x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Of ``x`` and of the logarithm of the scale."""
        x, y, inside, *keep = context.saved_tensors
        part = gradient * keep[0] if keep else gradient
        passed = part * inside
        of_scale = part.mul(y).addcmul_(passed, x, value=-1)
        while of_scale.ndim > len(context.shape):
            of_scale = of_scale.sum(0)
        axes = [i for i, n in enumerate(context.shape) if n == 1 and of_scale.shape[i] != 1]
        of_scale = of_scale.sum(axes, keepdim=True) if axes else of_scale
        return (passed if not keep else passed.add_(gradient).sub_(part)), of_scale, None, None, None, None


class Engine:
    """Runs the steps of a network, and holds what is trained.

    Attributes:
        network: the network.
        device: where it computes.
        layers: by the name of their weights.
        growths: of each grid of activations, like those of weights.
    """

    def __init__(self, network: Network, device: str) -> None:
        """Raises LowBitError for a step that has no form here."""
        self.network, self.device = network, torch.device(device)
        for step in network.steps:
            if step.grid < 0 and step.op_type not in OPS:
                raise LowBitError(
                    f"{step.op_type} '{step.name}' stands in front of a quantized layer and cannot be "
                    "trained through; leave layers behind it float (--nodes-to-exclude of lowbit quantize)"
                )
        self._grids = [(self._to(g.scale), self._to(g.zero)) for g in network.grids]
        self.growths = [torch.zeros_like(scale) for scale, _ in self._grids]
        self._constants = {name: self._constant(array) for name, array in network.constants.items()}
        self._floats = {}
        self._scales, self._biases, self.layers = {}, {}, dict[str, LayerState]()
        self._places = {step.outputs[0]: step.grid for step in network.steps if step.grid >= 0}
        self._owners = {layer.bias: name for name, layer in network.layers.items() if layer.bias}
        for name, layer in network.layers.items():
            self._floats[name] = self._to(layer.float_weight)
            if layer.bias:
                self._floats[layer.bias] = self._to(layer.float_bias)
            grid = network.grids[self.grid_index(layer)]
            x_scale = grid.scale.reshape(-1)
            x_scale = np.repeat(x_scale, len(layer.bias_codes) // len(x_scale))
            unit = (x_scale * layer.scale).astype(np.float32)
            self._scales[name] = self._to(layer.scale)
            self._biases[name] = self._to(layer.bias_codes.astype(np.float64) * unit)
            self.layers[name] = LayerState(
                self._to(_latents(layer)), torch.zeros_like(self._scales[name]),
                torch.zeros_like(self._biases[name]), self._to(unit * ((grid.high - grid.low) / 4)),
            )  # fmt: skip

    def _to(self, array: Array) -> Tensor:
        return torch.from_numpy(np.array(array, np.float32)).to(self.device)

    def _constant(self, array: Array) -> Tensor:
        made = torch.from_numpy(np.array(array))
        return made.to(self.device) if made.is_floating_point() else made

    def grid_index(self, layer: Layer) -> int:
        """Of the grid of what a layer reads."""
        return self._places[layer.x]

    # Parameters -------------------------------------------------------------------------------------------

    def state(self, layers: Iterable[str], grids: Iterable[int]) -> dict[str, Tensor]:
        """The tensors that are trained of some layers and grids, by a name that is the same in every run."""
        found: dict[str, Tensor] = {}
        for name in layers:
            state = self.layers[name]
            found |= {f"codes {name}": state.codes, f"growth {name}": state.growth}
            if self.network.layers[name].bias:
                found[f"shift {name}"] = state.shift
        for index in grids:
            if not self.network.grids[index].fed:
                found[f"grid {index}"] = self.growths[index]
        return found

    def save(self, layers: Iterable[str], grids: Iterable[int]) -> dict[str, Array]:
        """The same as arrays."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.state(layers, grids).items()}

    @torch.no_grad()
    def load(self, arrays: Mapping[str, Array]) -> None:
        """Takes back what :meth:`save` gave."""
        tensors = self.state(self.layers, range(len(self.growths)))
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(array))

    @torch.no_grad()
    def clamp(self, layers: Iterable[str], grids: Iterable[int]) -> None:
        """Brings what an optimizer changed back into its bounds."""
        bound = float(np.log(_LARGEST_GROWTH))
        for name in layers:
            layer, state = self.network.layers[name], self.layers[name]
            state.codes.clamp_(layer.low, layer.high)
            state.growth.clamp_(-bound, bound)
        for index in grids:
            self.growths[index].clamp_(-bound, bound)

    # Running ----------------------------------------------------------------------------------------------

    def run(
        self,
        steps: Sequence[Step],
        values: Mapping[str, Tensor],
        wanted: Collection[str],
        *,
        exact: bool = False,
        drops: Drops | None = None,
    ) -> Values:
        """Computes some steps.

        Args:
            steps: in order.
            values: what they read of what is not theirs.
            wanted: the outputs to return.
            exact: as the float model computes them, nothing rounded.
            drops: of activation rounding.
        """
        known = dict(values)
        last = {name: i for i, step in enumerate(steps) for name in step.inputs}
        for i, step in enumerate(steps):
            if step.grid >= 0:
                x = known[step.inputs[0]]
                known[step.outputs[0]] = x if exact else self._round(x, step.grid, drops)
            else:
                inputs = [self._read(name, known, exact=exact) for name in step.inputs]
                self._call(step, inputs, known)
            for name in step.inputs:
                if last[name] == i and name not in wanted:
                    known.pop(name, None)
        return {name: known[name] for name in wanted}

    def _call(self, step: Step, inputs: list[Any], known: Values) -> None:
        attributes = {**step.attributes, "outputs": len(step.outputs)}
        if step.op_type == "Reshape":
            inputs[1] = self._wider(inputs[0], inputs[1])
        try:
            made = OPS[step.op_type](inputs, attributes)
        except LowBitError as error:
            raise LowBitError(f"{step.op_type} '{step.name}': {error}") from error
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            what = str(error).splitlines()[0]
            raise LowBitError(f"{step.op_type} '{step.name}' cannot be computed here: {what}") from error
        known.update(zip(step.outputs, made if isinstance(made, list) else [made], strict=False))

    def _wider(self, x: Tensor, shape: Tensor) -> Tensor:
        """The shape of a Reshape that speaks of the model's fixed batch, for another batch."""
        batch = self.network.batch
        if batch and len(shape) and int(shape[0]) == batch and x.shape[0] != batch:
            shape = shape.clone()
            shape[0] = x.shape[0]
        return shape

    def _read(self, name: str, known: Values, *, exact: bool) -> Tensor | None:
        if not name:
            return None
        if name in known:
            return known[name]
        if name in self._constants:
            return self._constants[name]
        if exact:
            return self._floats[name]
        return self._weight(name) if name in self.layers else self.bias(self._owners[name])

    def _round(self, x: Tensor, index: int, drops: Drops | None) -> Tensor:
        grid, (scale, zero) = self.network.grids[index], self._grids[index]
        shape = [1] * x.ndim
        if grid.axis is not None:
            shape[grid.axis] = -1
        growth, scale, zero = (tensor.reshape(shape) for tensor in (self.growths[index], scale, zero))
        keep = None if drops is None else drops.keep(x)
        return _Rounding.apply(x, growth, scale, zero, (grid.low, grid.high), keep)

    def scale(self, name: str) -> Tensor:
        """Of a layer's weights, as it is now."""
        return self._scales[name] * self.layers[name].growth.exp()

    def grid_scale(self, index: int) -> Tensor:
        """Of a grid of activations, as it is now."""
        return self._grids[index][0] * self.growths[index].exp()

    def codes(self, name: str) -> Tensor:
        """Of a layer's weights, as they are now."""
        layer = self.network.layers[name]
        return _straight(self.layers[name].codes.clamp(layer.low, layer.high), torch.round)

    def _weight(self, name: str) -> Tensor:
        layer = self.network.layers[name]
        shape = [1] * layer.codes.ndim
        shape[layer.axis] = -1
        return self.codes(name) * self.scale(name).reshape(shape if layer.scale.size > 1 else [])

    @torch.no_grad()
    def bias_unit(self, name: str) -> Tensor:
        """What one code of a layer's bias is worth now: that of a product of the layer's codes."""
        rows, x_scale = len(self._biases[name]), self.grid_scale(self.grid_index(self.network.layers[name]))
        x_scale = x_scale.reshape(-1)
        return x_scale.repeat_interleave(rows // len(x_scale)) * self.scale(name)

    def bias(self, name: str) -> Tensor:
        """Of a layer by the name of its weights, as it is now; fewer bits make its grid coarser."""
        state, unit = self.layers[name], self.bias_unit(name)
        return _straight(self._biases[name] + state.shift * state.unit, lambda x: (x / unit).round() * unit)

    # Blocks -----------------------------------------------------------------------------------------------

    def grids_of(self, block: Block) -> list[int]:
        """The grids of a block's quantizers."""
        return sorted({step.grid for step in block.steps if step.grid >= 0})


def _latents(layer: Layer) -> Array:
    """What rounds to a layer's codes and leans to its float weights; float32, of the codes' shape."""
    shape = [1] * layer.codes.ndim
    shape[layer.axis] = -1
    scale = layer.scale.reshape(shape if layer.scale.size > 1 else [])
    real = np.divide(layer.float_weight, scale, out=np.zeros(layer.codes.shape), where=scale != 0)
    lean = np.clip(real - layer.codes, -_LEAN, _LEAN)
    return np.asarray(np.clip(layer.codes + lean, layer.low, layer.high), np.float32)


def _straight(x: Tensor, function: Any) -> Tensor:
    """A function that gradients pass as if it were not there."""
    return x + (function(x) - x).detach()
