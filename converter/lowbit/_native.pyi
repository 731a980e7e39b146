"""The compiled module: op set, kernels and packing, for tests, tools and benchmarks.

Arrays are numpy arrays; `inputs` has one entry per schema input in order (variadic ones expanded), None where
an optional input is absent, and may end early. Every function raises `LowBitError` with the reason for what
it refuses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

version: str
required_api: int
DOMAIN: str
DOMAIN_VERSION: int

class LowBitError(ValueError): ...

def schemas() -> list[dict[str, Any]]:
    """The op set: name, summary, definition, inputs, attributes, output_type and output_doc of every op."""

def infer_output(
    op: str,
    attrs: Mapping[str, Any],
    shapes: Sequence[Sequence[int | str | None] | None],
    present: Sequence[bool],
) -> tuple[list[int | str | None] | None, str]:
    """Shape and dtype name of the output.

    A dim is a number, a symbol or None (unknown); a shape of None has an unknown rank.
    """

def isa_levels() -> list[str]:
    """The instruction-set levels that this machine has, lowest first."""

def default_isa() -> str:
    """The best level of this machine under the cap of LOWBIT_ISA."""

def kernel_table(elsewhere: bool = False) -> list[dict[str, Any]]:
    """One row per kernel: name, op, algorithm, isa, x_bits_max, w_bits_max, note.

    `elsewhere`: those of the architectures that this is not built for, instead.
    """

def ep_options() -> list[dict[str, str]]:
    """One row per option of the execution provider: name, values, default, doc."""

def run(
    op: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[ArrayLike | None],
    *,
    isa: str | None = None,
    kernel: str | None = None,
    reference: bool = False,
    threads: int = 1,
    task_cycles: float = 8000.0,
) -> NDArray[Any]:
    """Runs one node.

    Args:
        op: name of the op, such as "LowBitConv".
        attrs: its attributes; absent ones take their defaults.
        inputs: uint8, int8, int32 or float32 arrays.
        isa: cap of the instruction set; None: `default_isa()`.
        kernel: name of a row of the kernel table that must be used.
        reference: use the reference kernel.
        threads: the caller's included.
        task_cycles: the work that is worth a task of its own; tests cut loops finely.
    """

def plan(
    op: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[ArrayLike | None],
    *,
    isa: str | None = None,
    kernel: str | None = None,
    reference: bool = False,
    threads: int = 0,
    x_shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What `run` would do.

    Args:
        threads: as many as will run it; 0: not known.
        x_shape: what a model states of input 0's shape, -1 where it does not; None: all of it.

    Returns:
        kernel; workspace_bytes of a thread; packed_bytes; refused, "kernel: reason" of the rows that do not
        apply; candidates, the rows that apply as {"kernel", "cycles"}, by estimated cycles of one core, the
        cheapest first; tuned, whether the kernel was taken because it was measured (`lowbit tune`); tune_key,
        under which it may have been measured. The last three say nothing for ops with a single path.
    """

def time(
    op: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[ArrayLike | None],
    *,
    isa: str | None = None,
    kernel: str | None = None,
    reference: bool = False,
    threads: int = 1,
    repeats: int = 50,
) -> NDArray[np.float64]:
    """Seconds of each of `repeats` calls; creating the node is not counted."""

def race(
    runners: Sequence[tuple[str, Mapping[str, Any], Sequence[ArrayLike | None], str | None]],
    *,
    isa: str | None = None,
    threads: int = 1,
    rounds: int = 20,
    turn_seconds: float = 1e-3,
) -> NDArray[np.float64]:
    """Seconds of a call of each runner, [runners, rounds]: the mean over a turn; runners take turns.

    A runner is (op, attrs, inputs, kernel), where a kernel of None is chosen as in a session.
    """

def tune_cache_path() -> str:
    """The file of kernels that were measured on this machine; empty where no folder is known."""

def tune_cache_enabled() -> bool:
    """Whether sessions take measured kernels (LOWBIT_TUNE)."""

def parse_tune_cache(text: bytes) -> list[tuple[str, int, str]]:
    """The entries of such a file: key, threads, kernel."""

def format_tune_cache(entries: Sequence[tuple[str, int, str]]) -> bytes:
    """The text of such a file; of entries with equal key and threads the last one counts."""

def pack_weights(codes: ArrayLike, bits: int) -> NDArray[np.uint8]:
    """Packs integer codes of shape [rows, k] into bytes, every row starting on a byte."""

def unpack_weights(packed: NDArray[np.uint8], rows: int, k: int, bits: int, signed: bool) -> NDArray[Any]:
    """The inverse of `pack_weights`: int8 codes of shape [rows, k] where `signed`, uint8 otherwise."""
