"""Trains the digits network and writes its QDQ models: `python -m lowbit.models.digits.train`.

Needs torch and scikit-learn (`pip install 'lowbit[torch]'`); two minutes on one core.

First a float network with BatchNormalization is trained. Then, per bit pair, its normalizations are folded
and it is fine-tuned with every weight and activation quantized in the forward pass; gradients pass the
rounding unchanged (straight-through estimator). Weight scales follow the weights, one per output channel, by
the rule that also writes the file. Activation scales are learned (Esser et al., "Learned step size
quantization", 2019). Last, the written files are run in ONNX Runtime over the held-out images, and that
accuracy is recorded.
"""

# torch is typed where it is installed and unknown to mypy where it is not; both must pass.
# mypy: disable-error-code="no-any-return, no-untyped-call, misc"

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..graph import GraphBuilder
from ..quantization import (
    RECTIFIED_CLIP,
    ActivationQuantizer,
    QuantizedWeight,
    quantize_weights,
    write_qdq,
)
from ..seeded import save
from .data import held_out, training
from .evaluate import BIT_PAIRS, accuracy, model_path, stock_session

SEED = 2026
WIDTH = 32
CLASSES = 10
FLOAT_EPOCHS = 60
QUANTIZED_EPOCHS = 80
BATCH = 64

# Name -> in channels, out channels, kernel, groups. `network` says how they are connected.
CONVOLUTIONS = {
    "stem": (1, WIDTH, 3, 1),
    "residual1": (WIDTH, WIDTH, 3, 1),
    "residual2": (WIDTH, WIDTH, 3, 1),
    "depthwise": (WIDTH, WIDTH, 3, WIDTH),
    "pointwise": (WIDTH, 2 * WIDTH, 1, 1),
    "mix": (3 * WIDTH, 2 * WIDTH, 3, 1),
}

# Layer with weights -> the quantizer of the tensor it reads; its bias is in units of that scale times the
# weights'.
READS = {
    "stem": "input",
    "residual1": "stem",
    "residual2": "residual1",
    "depthwise": "add",
    "pointwise": "depthwise",
    "mix": "concat",
    "classifier": "average",
}

# The one tensor without a Relu before its quantizer: its zero point is in the middle of the codes.
SIGNED = {"residual2"}


def network(ops: Any, x: Any) -> Any:
    """The network on whatever `ops` computes with: float values, quantized values, or names of an ONNX graph.

    A residual block at 8x8, a depthwise separable block at 4x4 concatenated with its own input, a classifier.
    """
    x = ops.quantize("input", x)
    x = ops.quantize("stem", ops.relu(ops.conv("stem", x)))
    y = ops.quantize("residual1", ops.relu(ops.conv("residual1", x)))
    y = ops.quantize("residual2", ops.conv("residual2", y))
    x = ops.max_pool(ops.quantize("add", ops.relu(ops.add(y, x))))
    y = ops.quantize("depthwise", ops.relu(ops.conv("depthwise", x)))
    y = ops.quantize("pointwise", ops.relu(ops.conv("pointwise", y)))
    x = ops.quantize("concat", ops.concat([x, y]))
    x = ops.quantize("mix", ops.relu(ops.conv("mix", x)))
    return ops.classify(ops.quantize("average", ops.average(x)))


class _TorchOps(nn.Module):
    """The operators of `network` that have no parameters, on torch tensors."""

    def relu(self, x: Tensor) -> Tensor:
        return functional.relu(x)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def concat(self, xs: list[Tensor]) -> Tensor:
        return torch.cat(xs, dim=1)

    def max_pool(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(x, 2)

    def average(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, 10] of images [N, 1, 8, 8]."""
        return network(self, x)


class FloatNetwork(_TorchOps):
    """The network in float32 with BatchNormalization; notes the rms of each tensor to quantize."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleDict()
        self.norms = nn.ModuleDict()
        for name, (inputs, outputs, kernel, groups) in CONVOLUTIONS.items():
            self.convolutions[name] = nn.Conv2d(
                inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False
            )
            self.norms[name] = nn.BatchNorm2d(outputs)
        self.classifier = nn.Linear(2 * WIDTH, CLASSES)
        self.rms: dict[str, float] = {}
        self._measuring = False

    def conv(self, name: str, x: Tensor) -> Tensor:
        """Convolution and normalization."""
        return self.norms[name](self.convolutions[name](x))

    def classify(self, x: Tensor) -> Tensor:
        """The fully connected layer."""
        return self.classifier(x)

    def quantize(self, name: str, x: Tensor) -> Tensor:
        """Returns x as it is."""
        if self._measuring:
            self.rms[name] = float(x.square().mean().sqrt())
        return x

    def measure(self, images: Tensor) -> None:
        """Fills `rms`: quantizer name -> root mean square of what it will quantize."""
        self._measuring = True
        with torch.no_grad():
            self(images)
        self._measuring = False

    def folded(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Weights `w * g / sqrt(v + e)` and biases `b - m * g / sqrt(v + e)`: the normalization folded."""
        out = {}
        for name, norm in self.norms.items():
            assert isinstance(norm, nn.BatchNorm2d)
            assert norm.running_var is not None
            assert norm.running_mean is not None
            gain = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            weight = self.convolutions[name].weight
            assert isinstance(weight, Tensor)
            out[name] = (weight * gain[:, None, None, None], norm.bias - norm.running_mean * gain)
        out["classifier"] = (self.classifier.weight, self.classifier.bias)
        return {
            name: (weight.detach().clone(), bias.detach().clone()) for name, (weight, bias) in out.items()
        }


def _straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value, with the gradient of the unrounded one."""
    return value + (rounded - value).detach()


class QuantizedNetwork(_TorchOps):
    """The network as the QDQ file computes it, apart from the rounding of float sums."""

    def __init__(self, source: FloatNetwork, w_bits: int, a_bits: int) -> None:
        super().__init__()
        self.w_bits = w_bits
        self.a_bits = a_bits
        self.weights = nn.ParameterDict()
        self.biases = nn.ParameterDict()
        for name, (weight, bias) in source.folded().items():
            self.weights[name] = nn.Parameter(weight)
            self.biases[name] = nn.Parameter(bias)
        self.scales = nn.ParameterDict()
        for name, rms in source.rms.items():
            # At 8 bits clipping costs more than coarser steps; 7 times the rms is beyond all but a few
            # values.
            clip = RECTIFIED_CLIP.get(a_bits, 7.0) * rms * (math.sqrt(2) if name in SIGNED else 1)
            self.scales[name] = nn.Parameter(torch.tensor(clip / (2**a_bits - 1)))

    def zero_point(self, name: str) -> int:
        """The code of 0 in the quantizer called `name`."""
        return 2 ** (self.a_bits - 1) if name in SIGNED else 0

    def scale(self, name: str) -> Tensor:
        """The learned scale of the quantizer called `name`."""
        return self.scales[name].clamp(min=1e-5)

    def _rounded(self, name: str) -> tuple[Tensor, Tensor]:
        """Weights and bias of a layer, both rounded to their codes."""
        weight, bias = self.weights[name], self.biases[name]
        quantized = QuantizedWeight.of(weight.detach().numpy(), self.w_bits)
        scale = torch.from_numpy(quantized.scale)
        rounded = torch.from_numpy(quantized.codes) * scale.reshape(-1, *[1] * (weight.ndim - 1))
        unit = self.scale(READS[name]) * scale
        return _straight_through(weight, rounded), _straight_through(bias, torch.round(bias / unit) * unit)

    def conv(self, name: str, x: Tensor) -> Tensor:
        """Convolution with quantized weights."""
        _, _, kernel, groups = CONVOLUTIONS[name]
        return functional.conv2d(x, *self._rounded(name), padding=kernel // 2, groups=groups)

    def classify(self, x: Tensor) -> Tensor:
        """The fully connected layer with quantized weights."""
        return functional.linear(x, *self._rounded("classifier"))

    def quantize(self, name: str, x: Tensor) -> Tensor:
        """Quantizes and dequantizes with a learned scale, whose gradient is damped as in the paper."""
        levels, zero = 2**self.a_bits - 1, self.zero_point(name)
        learned = self.scale(name)
        damped = learned / math.sqrt(x[0].numel() * levels)
        scale = _straight_through(damped, learned)
        steps = x / scale
        return _straight_through(steps, torch.round(steps)).clamp(-zero, levels - zero) * scale


class _OnnxOps:
    """Writes the network of a trained QuantizedNetwork as a float ONNX graph and collects its quantizers."""

    def __init__(self, source: QuantizedNetwork) -> None:
        self.builder = GraphBuilder("digits", seed=0)
        self.activations: dict[str, ActivationQuantizer] = {}
        self._source = source
        self.relu = self.builder.relu
        self.add = self.builder.add
        self.concat = self.builder.concat

    def _parameters(self, name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        return self._source.weights[name].detach().numpy(), self._source.biases[name].detach().numpy()

    def conv(self, name: str, x: str) -> str:
        _, _, kernel, groups = CONVOLUTIONS[name]
        return self.builder.conv_with(x, *self._parameters(name), pad=kernel // 2, group=groups)

    def max_pool(self, x: str) -> str:
        y = self.builder.max_pool(x, 2, 2)
        self.activations[y] = self.activations[x]
        return y

    def average(self, x: str) -> str:
        return self.builder.node("GlobalAveragePool", [x])

    def classify(self, x: str) -> str:
        flat = self.builder.flatten(x)
        self.activations[flat] = self.activations[x]
        return self.builder.gemm_with(flat, *self._parameters("classifier"))

    def quantize(self, name: str, x: str) -> str:
        scale = np.float32(self._source.scale(name).detach().numpy())
        self.activations[x] = ActivationQuantizer(scale, self._source.zero_point(name), self._source.a_bits)
        return x


def export(trained: QuantizedNetwork) -> onnx.ModelProto:
    """The trained network as a QDQ model with a symbolic batch; its logits are float."""
    ops = _OnnxOps(trained)
    model = ops.builder.finish(network(ops, "input"), ("N", 1, 8, 8), CLASSES)
    return write_qdq(model, quantize_weights(model, trained.w_bits), ops.activations, keep_activations=True)


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Moves each image by -1, 0 or 1 pixels in both directions."""
    padded = functional.pad(images, (1, 1, 1, 1))
    offsets = torch.randint(0, 3, (len(images), 2), generator=generator)
    return torch.stack(
        [
            image[:, row : row + 8, column : column + 8]
            for image, (row, column) in zip(padded, offsets.tolist(), strict=True)
        ]
    )


def _train(model: _TorchOps, epochs: int, rate: float, teacher: FloatNetwork | None = None) -> None:
    """Trains in place; a teacher's probabilities count as much as the labels."""
    generator = torch.Generator().manual_seed(SEED)
    images, labels = (torch.from_numpy(array) for array in training())
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = epochs * math.ceil(len(images) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            batch = _shifted(images[chosen], generator)
            logits = model(batch)
            loss = functional.cross_entropy(logits, labels[chosen])
            if teacher is not None:
                with torch.no_grad():
                    target = functional.softmax(teacher(batch), dim=1)
                loss = loss + functional.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def _torch_accuracy(model: _TorchOps) -> float:
    images, labels = held_out()
    with torch.no_grad():
        return float(np.mean(model(torch.from_numpy(images)).argmax(dim=1).numpy() == labels))


def main() -> None:
    """Trains, writes digits_*.onnx and accuracy.json beside this file, prints the table of README.md."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    teacher = FloatNetwork()
    _train(teacher, FLOAT_EPOCHS, 3e-3)
    teacher.measure(torch.from_numpy(training()[0]))
    results: dict[str, Any] = {
        "held_out_images": len(held_out()[1]),
        "versions": {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__},
        "float32": {"torch": _torch_accuracy(teacher)},
    }
    print(f"float32: {results['float32']['torch']:.4f}", flush=True)
    for bits in BIT_PAIRS:
        model = QuantizedNetwork(teacher, int(bits[1]), int(bits[3]))
        _train(model, QUANTIZED_EPOCHS, 2e-3, teacher)
        path = save(export(model), model_path(bits))
        session, mode = stock_session(path)
        results[bits] = {
            "torch": _torch_accuracy(model),
            "onnxruntime": accuracy(session, *held_out()),
            "onnxruntime_mode": mode,
            "bytes": path.stat().st_size,
        }
        print(f"{bits}: {results[bits]}", flush=True)
    Path(__file__).with_name("accuracy.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
