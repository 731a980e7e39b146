"""Stands in for `lowbit._native` in the tests of kernels that this machine cannot run.

LOWBIT_REMOTE is the command of a node server (tests/remote/node_server.cc) on a machine that can: under an
emulator, `qemu-aarch64 -cpu cortex-a53 build/aarch64/custom_ops/lowbit_node_server`, or on a board,
`ssh board ./lowbit_node_server`. Nodes then run there, all but those that ask for the reference: that one
comes from this machine, so every comparison is one between architectures as well.
"""

from __future__ import annotations

import functools
import shlex
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TYPES = [np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.float32)]
KINDS = ["int", "float", "string", "ints", "floats"]
DESCRIBE, RUN, PLAN = range(3)
WORTH_A_TASK = 0.0
"""As many cycles as the server says itself (kTaskCycles)."""


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _attribute(kind: str, value: Any) -> bytes:
    match kind:
        case "int":
            return struct.pack("<q", value)
        case "float":
            return struct.pack("<f", value)
        case "string":
            return _string(value)
        case "ints":
            return struct.pack(f"<I{len(value)}q", len(value), *value)
    return struct.pack(f"<I{len(value)}f", len(value), *value)


def _tensor(value: Any) -> bytes:
    if value is None:
        return b"\0"
    array = np.asarray(value, order="C")
    head = struct.pack(f"<BBI{array.ndim}q", 1, TYPES.index(array.dtype), array.ndim, *array.shape)
    return head + struct.pack("<I", array.nbytes) + array.tobytes()


class _Reply:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        (size,) = self.numbers("I")
        self.at += size
        return self.data[self.at - size : self.at].decode()


class RemoteNative:
    """The functions of `lowbit._native` that run nodes, elsewhere; everything else is the module's own."""

    def __init__(self, native: Any, command: str) -> None:
        self._native = native
        self._kinds = {s["name"]: {a["name"]: a["kind"] for a in s["attributes"]} for s in native.schemas()}
        self._server = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def _ask(self, request: bytes) -> _Reply:
        to, back = self._server.stdin, self._server.stdout
        assert to is not None
        assert back is not None
        to.write(struct.pack("<I", len(request)) + request)
        to.flush()
        head = back.read(4)
        if len(head) != 4:
            raise RuntimeError(f"the node server ended with status {self._server.wait()}")
        reply = _Reply(back.read(struct.unpack("<I", head)[0]))
        (succeeded,) = reply.numbers("B")
        if not succeeded:
            raise self._native.LowBitError(reply.string())
        return reply

    def _node(
        self,
        command: int,
        op: str,
        attributes: Mapping[str, Any],
        inputs: Sequence[Any],
        isa: str | None,
        kernel: str | None,
        threads: int,
        task_cycles: float,
    ) -> _Reply:
        kinds = self._kinds[op]
        parts = [bytes([command]), _string(op), _string(isa or ""), _string(kernel or "")]
        parts.append(struct.pack("<IdI", threads, task_cycles, len(attributes)))
        for name, value in attributes.items():
            parts += [_string(name), bytes([KINDS.index(kinds[name])]), _attribute(kinds[name], value)]
        parts.append(struct.pack("<I", len(inputs)))
        parts += [_tensor(value) for value in inputs]
        return self._ask(b"".join(parts))

    @functools.cached_property
    def _description(self) -> list[list[str]]:
        return [line.split("\t") for line in self._ask(bytes([DESCRIBE])).string().split("\n")]

    def isa_levels(self) -> list[str]:
        return self._description[0]

    def kernel_table(self) -> list[dict[str, Any]]:
        names = ("name", "op", "algorithm", "isa", "x_bits_max", "w_bits_max", "note")
        rows = [dict(zip(names, line, strict=True)) for line in self._description[1:]]
        return [row | {key: int(row[key]) for key in ("x_bits_max", "w_bits_max")} for row in rows]

    def run(
        self,
        op: str,
        attributes: Mapping[str, Any],
        inputs: Sequence[Any],
        isa: str | None = None,
        kernel: str | None = None,
        reference: bool = False,
        threads: int = 1,
        task_cycles: float = WORTH_A_TASK,
    ) -> np.ndarray:
        if reference:
            result: np.ndarray = self._native.run(op, attributes, inputs, reference=True)
            return result
        reply = self._node(RUN, op, attributes, inputs, isa, kernel, threads, task_cycles)
        kind, rank = reply.numbers("BI")
        shape = reply.numbers(f"{rank}q")
        return np.frombuffer(reply.data, TYPES[kind], offset=reply.at).reshape(shape)

    def plan(
        self,
        op: str,
        attributes: Mapping[str, Any],
        inputs: Sequence[Any],
        isa: str | None = None,
        kernel: str | None = None,
    ) -> dict[str, Any]:
        reply = self._node(PLAN, op, attributes, inputs, isa, kernel, 1, WORTH_A_TASK)
        name = reply.string()
        workspace_bytes, packed_bytes, refused = reply.numbers("QQI")
        reasons = [reply.string() for _ in range(refused)]
        (count,) = reply.numbers("I")
        candidates = [{"kernel": reply.string(), "cycles": reply.numbers("d")[0]} for _ in range(count)]
        return {
            "kernel": name,
            "workspace_bytes": workspace_bytes,
            "packed_bytes": packed_bytes,
            "refused": reasons,
            "candidates": candidates,
        }
