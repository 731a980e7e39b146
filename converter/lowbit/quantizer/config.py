"""What the caller asks for: widths, methods, which nodes, and exceptions by node."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lowbit.errors import LowBitError

METHODS = ("mse", "minmax", "percentile", "entropy")
ROUNDINGS = ("auto", "nearest", "gptq", "descent", "adaround")
RULES = {
    "unsigned": "codes without a sign where a tensor cannot be negative",
    "asymmetric": "a zero point at 8 bits where the mean square error gains from it",
    "residual": "one rounding for a convolution and the Add behind it; a bare one beside it has 8 bits",
    "depthwise": "weights of depthwise convolutions at 8 bits",
    "trunk": "tensors with a sign at 8 bits where activations have fewer",
    "ends": "first and last layers at 8 bits",
    "pool": "tensors that only a global pool reads, and its result, at 8 bits",
    "gate": "layers of a squeeze-and-excitation block at 8 bits",
    "concat": "operands and result of a Concat share a grid where their ranges are within a factor of 4",
    "channels": "one activation scale per channel in front of a depthwise convolution below 8 bits",
    "feedback": "a layer's weights are rounded for its quantized input and its float output",
    "bias": "the bias takes the difference of the means",
    "mirror": "10 to 255 images calibrate together with their mirror images",
}
"""The placement rules and steps that can be turned off one by one."""

_PLACEMENT = ("residual", "depthwise", "trunk", "ends", "pool", "gate")
"""Those that give a tensor or a layer more bits than were asked for, which ``uniform`` turns off."""


@dataclass(frozen=True)
class Config:
    """The effective configuration.

    Attributes:
        bits: ``w4a8``: weights and activations.
        calibration_method: how activation ranges are chosen.
        rounding: how weights are rounded.
        per_channel: one weight scale per output channel, else one per tensor.
        first_last: bits of first and last layers.
        uniform: every tensor has the bits that were asked for.
        disable_rules: rules of :data:`RULES` that are turned off.
        nodes_to_exclude: regular expressions; nodes whose whole name matches stay float.
        nodes_to_quantize: regular expressions; if there are any, only those nodes are quantized.
        op_types_to_quantize: if there are any, only these ops are quantized.
        overrides: regular expression of a node's name -> its ``weight_bits``, ``input_bits``, ``rounding``.
        percentile: of the values that the range covers, with ``percentile``.
        ridge: what is added to the diagonal of a Gram matrix, as a part of its mean; None: chosen per layer
            on held-out images.
        sweeps: of coordinate descent at most.
        sub_byte: int4 and int2 weight tensors.
        io: ``float32``, or ``uint8`` for a model that is fed raw images.
        seed: of whatever is drawn at random.
    """

    bits: str = "w8a8"
    calibration_method: str = "mse"
    rounding: str = "auto"
    per_channel: bool = True
    first_last: int = 8
    uniform: bool = False
    disable_rules: tuple[str, ...] = ()
    nodes_to_exclude: tuple[str, ...] = ()
    nodes_to_quantize: tuple[str, ...] = ()
    op_types_to_quantize: tuple[str, ...] = ()
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    percentile: float = 99.999
    ridge: float | None = None
    sweeps: int = 12
    sub_byte: bool = False
    io: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks everything that can be checked without a model."""
        if not re.fullmatch(r"w[1-8]a[1-8]", self.bits):
            raise LowBitError(f"bits: expected w<1..8>a<1..8> such as w4a8, got '{self.bits}'")
        _one_of("calibration_method", self.calibration_method, METHODS)
        _one_of("rounding", self.rounding, ROUNDINGS)
        _one_of("io", self.io, ("float32", "uint8"))
        for rule in self.disable_rules:
            _one_of("disable_rules", rule, RULES)
        if self.first_last not in range(1, 9):
            raise LowBitError(f"first_last: expected 1 to 8 bits, got {self.first_last}")
        if not 50 < self.percentile <= 100:
            raise LowBitError(f"percentile: expected more than 50 and at most 100, got {self.percentile}")
        if self.ridge is not None and not 0 <= self.ridge <= 1000:
            raise LowBitError(f"ridge: expected 0 to 1000, got {self.ridge}")
        if self.sweeps < 0:
            raise LowBitError(f"sweeps: expected 0 or more, got {self.sweeps}")
        for pattern in (*self.nodes_to_exclude, *self.nodes_to_quantize, *self.overrides):
            try:
                re.compile(pattern)
            except re.error as error:
                raise LowBitError(f"'{pattern}' is no regular expression: {error}") from error
        for pattern, given in self.overrides.items():
            for name, value in given.items():
                if name == "rounding":
                    _one_of(f"overrides of '{pattern}': rounding", value, ROUNDINGS)
                elif name not in ("weight_bits", "input_bits"):
                    raise LowBitError(
                        f"overrides of '{pattern}': expected weight_bits, input_bits or "
                        f"rounding, got '{name}'"
                    )
                elif value not in range(1, 9):
                    raise LowBitError(f"overrides of '{pattern}': {name} must be 1 to 8, got {value!r}")

    @property
    def weight_bits(self) -> int:
        """Of weights that no rule decides."""
        return int(self.bits[1])

    @property
    def activation_bits(self) -> int:
        """Of activations that no rule decides."""
        return int(self.bits[3])

    def rule(self, name: str) -> bool:
        """Whether a rule of :data:`RULES` is on."""
        return name not in self.disable_rules and not (self.uniform and name in _PLACEMENT)

    def override(self, node: str, name: str) -> Any:
        """What an override says about a node: the last pattern that matches its whole name; None if none."""
        found = None
        for pattern, given in self.overrides.items():
            if name in given and re.fullmatch(pattern, node):
                found = given[name]
        return found

    def excluded(self, node: str, op_type: str, *, layer: bool = True) -> str | None:
        """Why the caller wants a node to stay float; None if not. ``nodes_to_quantize`` is about layers."""
        for pattern in self.nodes_to_exclude:
            if re.fullmatch(pattern, node):
                return f"nodes_to_exclude has '{pattern}'"
        if self.op_types_to_quantize and op_type not in self.op_types_to_quantize:
            return "its op is not among op_types_to_quantize"
        if (
            layer
            and self.nodes_to_quantize
            and not any(re.fullmatch(p, node) for p in self.nodes_to_quantize)
        ):
            return "it matches none of nodes_to_quantize"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`of` takes."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Config:
        """A configuration from plain data.

        Raises:
            LowBitError: names what is unknown or of a wrong kind.
        """
        known = {entry.name: entry for entry in fields(cls)}
        made: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise LowBitError(f"config: unknown entry '{name}'; expected {', '.join(known)}")
            default = getattr(cls(), name)
            if isinstance(default, tuple):
                if isinstance(value, str) or not isinstance(value, Sequence):
                    raise LowBitError(f"config: {name} must be a list, got {value!r}")
                value = tuple(value)
            elif isinstance(default, bool) and not isinstance(value, bool):
                raise LowBitError(f"config: {name} must be true or false, got {value!r}")
            elif isinstance(default, (int, float)) and not isinstance(default, bool):
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise LowBitError(f"config: {name} must be a number, got {value!r}")
            elif isinstance(default, str) and not isinstance(value, str):
                raise LowBitError(f"config: {name} must be a text, got {value!r}")
            elif name == "overrides" and not (
                isinstance(value, Mapping) and all(isinstance(inner, Mapping) for inner in value.values())
            ):
                raise LowBitError("config: overrides must map patterns to settings")
            made[name] = value
        return cls(**made)


def _one_of(what: str, value: Any, allowed: Sequence[str] | Mapping[str, str]) -> None:
    if value not in allowed:
        raise LowBitError(f"{what}: expected one of {', '.join(allowed)}, got '{value}'")


def read_config(path: Path) -> dict[str, Any]:
    """The entries of a YAML or JSON file.

    Raises:
        LowBitError: if it cannot be read, or needs PyYAML, which is not there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LowBitError(f"{path}: cannot be read: {error}") from error
    try:
        read = json.loads(text)  # every JSON file is a YAML file, and the effective configuration is one
    except ValueError:
        try:
            import yaml
        except ImportError as error:
            raise LowBitError(f"{path}: YAML needs PyYAML: pip install 'lowbit[quantize]'") from error
        try:
            read = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise LowBitError(f"{path}: {error}") from error
    if not isinstance(read, dict):
        raise LowBitError(f"{path}: expected entries such as 'bits: w4a8', found {type(read).__name__}")
    return read
