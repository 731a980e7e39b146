"""Mutated compiled regions (EPContext) on a device, beside the same ones elsewhere.

A kind of tests.hostile.campaign. A region that was compiled for the CPU holds the nodes and their constants
as they are, so that another device may load it once it is said to be of that device. Regions that it does
load are mutated: both must refuse one, or run it with equal elements, but the device may refuse what has
become other steps there than on the CPU. Every other case on a GPU is a region compiled for it, with packed
weights: it runs, twice with equal elements, or is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime as ort

from tests.hostile.lowbit_graphs import Feeds, draw
from tests.hostile.lowbit_mutants import BASES, BLOCK, Sessions, options_of, provider_device, verdict_of

_HEADER = 32  # bytes: magic, version, a reserved 0, size and checksum of what follows
_OTHER_STEPS = ("kernel for GPUs", "the compiled model holds packed bytes for")  # reasons of a device alone
_ODD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    8,
    9,
    255,
    256,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
]


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (64 - by)) & _MASK


def checksum(payload: bytes) -> int:
    """As ep/region/compiled_model.cc computes it."""
    lanes = [_ODD, ~_ODD & _MASK, _ODD << 1 & _MASK, len(payload)]
    padded = payload + bytes(-len(payload) % 32)
    for words in struct.iter_unpack("<4Q", padded):
        lanes = [_rotated((lane ^ word) * _ODD & _MASK, 29) for lane, word in zip(lanes, words, strict=True)]
    total = 0
    for lane in lanes:
        total = _rotated((total ^ lane) * _ODD & _MASK, 29)
    return total


@dataclasses.dataclass
class Region:
    """A compiled region: for which device, measured choices, and all behind those."""

    fingerprint: bytes
    choices: bytes
    rest: bytes

    @classmethod
    def of(cls, blob: bytes) -> Region:
        texts, at = [], _HEADER
        for _ in range(2):
            (size,) = struct.unpack_from("<Q", blob, at)
            texts.append(blob[at + 8 : at + 8 + size])
            at += 8 + size
        return cls(*texts, blob[at:])

    def blob(self, damaged: bool = False) -> bytes:
        """Its bytes, with the size and the checksum that they should have, or another checksum."""
        texts = b"".join(struct.pack("<Q", len(text)) + text for text in (self.fingerprint, self.choices))
        payload = texts + self.rest
        total = checksum(payload) ^ int(damaged)
        return b"lowbitEP" + struct.pack("<IIQQ", 1, 0, len(payload), total) + payload

    def said_to_be_of(self, fingerprint: bytes) -> Region:
        """As if it had been compiled for another device; what is aligned stays so."""
        longer = len(fingerprint) - len(self.fingerprint)
        return Region(fingerprint, self.choices + b"\n" * (-longer % 64), self.rest)


def mutated(rest: bytes, other: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Bytes, numbers or a stretch changed, left out, repeated, or taken from another region."""
    changed = bytearray(rest)
    kind = rng.choice(["bytes", "bit", "number", "number", "stretch", "splice"])
    if kind == "bytes":
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif kind == "bit":
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == "number":
        size = rng.choice([4, 8])
        at = rng.randrange(max(1, len(changed) - size))
        number = rng.choice(_NUMBERS) if rng.random() < 0.8 else rng.getrandbits(64)
        changed[at : at + size] = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    elif kind == "stretch":
        at, size = rng.randrange(len(changed)), rng.choice([1, 4, 8, 8, 16, 64])
        changed[at : at + size] = b"" if rng.random() < 0.5 else changed[at : at + size] * 2
    else:
        at, size = rng.randrange(len(changed)), rng.choice([8, 64, 256])
        source = rng.randrange(max(1, len(other) - size))
        changed[at : at + size] = other[source : source + size]
    return kind, bytes(changed)


def _region(model: onnx.ModelProto) -> onnx.AttributeProto | None:
    """The bytes of the one region that a compiled model consists of."""
    nodes = list(model.graph.node)
    if len(nodes) != 1 or nodes[0].op_type != "EPContext":
        return None
    return next(a for a in nodes[0].attribute if a.name == "ep_cache_context")


@functools.lru_cache(maxsize=2 * BASES)
def _compiled(device: str, seed: int) -> tuple[onnx.ModelProto, Region, Feeds] | None:
    """A sound graph as one compiled region; None where it is none or more."""
    model, feeds = draw(seed)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_provider_for_devices([provider_device(device)], options_of(device))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "compiled.onnx")
        try:
            compiler = ort.ModelCompiler(
                options, model.SerializeToString(), embed_compiled_data_into_model=True
            )
            compiler.compile_to_file(str(target))
        except Exception:  # ONNX Runtime compiles only models of which a provider takes something
            return None
        compiled = onnx.load(target)
    attribute = _region(compiled)
    return None if attribute is None else (compiled, Region.of(attribute.s), feeds)


def _drawn(
    device: str, base: int, is_taken: Callable[[int], bool] = lambda _: True
) -> tuple[onnx.ModelProto, Region, Feeds]:
    """The first from `base` on that is one region, and taken."""
    return next(
        found
        for seed in range(base, base + 1000)
        if (found := _compiled(device, seed)) is not None and is_taken(seed)
    )


def _with(model: onnx.ModelProto, blob: bytes) -> bytes:
    attribute = _region(model)
    assert attribute is not None
    attribute.s = blob
    return model.SerializeToString()


class Fuzzer:
    """One process's part of a campaign."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cpu":
            raise SystemExit("compiled regions run on the execution provider: --device cpu-ep or cuda")
        self._sessions = Sessions(device, options_of(device))
        # On the CPU itself the reference kernels are the other party: one kernel of a fuzzed region may be
        # wrong, not both.
        reference = {"reference": "1"} if device == "cpu-ep" else {}
        self._beside = Sessions("cpu-ep", reference)
        self._taken: dict[int, bool] = {}  # by seed: whether the device runs the CPU's sound region

    @functools.cached_property
    def _fingerprint(self) -> bytes:
        return _drawn(self._device, 1)[1].fingerprint

    def _takes(self, seed: int) -> bool:
        if self._device == "cpu-ep":
            return True
        if seed not in self._taken:
            found = _compiled("cpu-ep", seed)
            assert found is not None
            model, region, feeds = found
            here = region.said_to_be_of(self._fingerprint)
            self._taken[seed] = self._sessions.ended(_with(model, here.blob()), feeds, True)[0] == "end"
        return self._taken[seed]

    def case(self, seed: int) -> tuple[str, str]:
        """What mutant `seed` is, and its verdict."""
        rng = random.Random(seed)
        base = seed // BLOCK * BASES
        of_device = self._device.startswith("cuda") and seed % 2 == 1
        source = self._device if of_device else "cpu-ep"
        first, second = (base + rng.randrange(BASES) for _ in range(2))
        if of_device:
            model, region, feeds = _drawn(source, first)
        else:
            model, region, feeds = _drawn(source, first, self._takes)
        what, rest = mutated(region.rest, _drawn(source, second)[1].rest, rng)
        damaged = rng.random() < 0.03
        changed = dataclasses.replace(region, rest=rest)
        expected = self._sessions if of_device else self._beside
        ended = expected.ended(_with(model, changed.blob(damaged)), feeds, True)
        here = changed.said_to_be_of(self._fingerprint)
        ours = self._sessions.ended(_with(model, here.blob(damaged)), feeds, True)
        verdict = verdict_of(ours, ended)
        if not of_device and ours[0] == "load" and any(reason in str(ours[1]) for reason in _OTHER_STEPS):
            verdict = "refused (load), other steps than on the CPU"
        return f"graph {first} for {source}: {what}", verdict
